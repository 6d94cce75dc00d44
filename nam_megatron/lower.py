"""Stage 3, Plan -> Lowering: every setting Megatron gets, each with one owner and a reason.

Sections of the recipe, blocks and features bring their own; see Config.lowered.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nam_megatron.errors import Problem, raise_if
from nam_megatron.features.names import FEATURES
from nam_megatron.plan import Plan, plan
from nam_megatron.recipe import Recipe
from nam_megatron.setting import CONNECTIONS, Config, Env, Setting
from nam_megatron.targets import Target, current

SECTIONS = ("model", "parallel", "precision", "optim", "schedule", "data", "device")


@dataclass(frozen=True)
class Lowering:
    """What Megatron is told: settings in the order they are read best, and the environment it needs."""

    plan: Plan
    target: Target
    settings: tuple[Setting, ...]
    env: tuple[Env, ...]

    @cached_property
    def by_name(self) -> dict[str, Setting]:
        return {s.name: s for s in self.settings}


def translate(recipe: Recipe, target: Target | None = None) -> Lowering:
    """Recipe -> Plan -> Lowering, for the current Megatron unless another target is given.

    Raises:
        Refused: with every finding of the stage that failed.
    """
    return lower(plan(recipe), target or current())


def lower(p: Plan, target: Target) -> Lowering:
    """All settings of a plan, checked: sections, blocks, features, the device, and that no setting has two owners."""
    problems = list(_device(p.recipe, target))
    # Whether the layout fits the machines comes first: what else is wrong may follow from it.
    owners = sorted(_owners(p), key=lambda owner: owner[0] != "parallel")
    for config in (*(config for _, _, config in owners), *p.recipe.feature.all()):
        problems += config.check(p)
    raise_if(problems)
    return unchecked(p, target)


def unchecked(p: Plan, target: Target) -> Lowering:
    """All settings of a plan that may not be one to train: for comparing, never for a launch."""
    settings: list[Setting] = []
    for owner, prefix, config in _owners(p):
        settings += _owned(config.lowered(p), owner, prefix)
    for name, cls in FEATURES.items():
        feature = getattr(p.recipe.feature, name)
        settings += _owned(feature.lowered(p) if feature else cls.off(p), name, f"feature.{name}.")
    seen: dict[str, Setting] = {}
    for s in settings:
        assert s.name not in seen, f"{s.name} is set by {seen[s.name].owner} and by {s.owner}"
        seen[s.name] = s
    return Lowering(p, target, tuple(settings), tuple(_env(p)))


def _owners(p: Plan) -> Iterator[tuple[str, str, Config]]:
    """(name, what its keys begin with, itself) of each section and each block that stands."""
    yield from ((name, f"{name}.", getattr(p.recipe, name)) for name in SECTIONS)
    yield from ((b.kind, f"model.blocks.{b.kind}.", b) for b in p.blocks)


def _owned(settings: Iterator[Setting], owner: str, prefix: str) -> Iterator[Setting]:
    """A key with a dot in it is another section's, and whole."""
    for s in settings:
        yield replace(s, owner=owner, key=prefix + s.key if s.key and "." not in s.key else s.key)


def _device(r: Recipe, target: Target) -> Iterator[Problem]:
    """Whether what is said here is true on the device: kernels, forecasts and Megatron's own demands are an architecture's."""
    if r.device.capability in target.chips:
        return
    found = ".".join(map(str, r.device.capability))
    missing = target.lacking.get(r.device.capability, "nothing here was measured there")
    served = ", ".join(f"{'.'.join(map(str, c))} {name}" for c, name in target.chips.items())
    message = f"device `{r.device.name}` of compute capability {found} is not served: {missing}"
    yield Problem(message, "device.capability", f"there is {served}")


# What libraries read at their start, once a run has to be equal to the last bit. Megatron would set the first three itself where they
# are not set, and refuse other values (megatron-core 0.19.2, determinism.py).
DETERMINISTIC = (
    ("NCCL_ALGO", "Ring", "a tree's order of summation is the machine's choice"),
    ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "Transformer Engine's attention adds its gradients in one order"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "cuBLAS splits a product the same way each time"),
    (
        "TRITON_CACHE_AUTOTUNING",
        "1",
        "mamba-ssm leaves its tiles to Triton, of which the trainer takes the same ones in each run",
    ),
)


def _env(p: Plan) -> Iterator[Env]:
    layout, f = p.recipe.parallel, p.recipe.feature
    yield Env("PYTORCH_ALLOC_CONF", "expandable_segments:True", "without it fragmentation decides what fits", "device")
    # megatron-core 0.19.2, training/arguments.py: an FSDP decides before the layout does.
    ordered = layout.tensor > 1 or layout.context > 1
    if f.megatron_fsdp:
        more = ", which tensor and context parallelism would have for their overlap" if ordered else ""
        yield Env(CONNECTIONS, None, f"an FSDP forbids 1{more}", "parallel", never="1")
    elif ordered:
        yield Env(
            CONNECTIONS, "1", "Megatron demands it on this device under tensor or context parallelism", "parallel"
        )
    else:
        yield Env(CONNECTIONS, None, "nothing demands it; a leftover 1 slows the overlap", "parallel")
    # Transformer Engine reads both once, at the first norm.
    kernels = p.recipe.precision.norm_kernels
    cudnn, why = kernels == "cudnn", f"`norm_kernels` is {kernels}"
    for way in ("FWD", "BWD"):
        more = "" if cudnn else "; a leftover 1 would choose cuDNN's"
        yield Env(f"NVTE_NORM_{way}_USE_CUDNN", "1" if cudnn else None, why + more, "precision")
    if p.recipe.precision.deterministic:
        for name, value, why in DETERMINISTIC:
            yield Env(name, value, why, "precision")
    for feature in f.all():
        yield from (replace(e, owner=feature.name) for e in feature.env(p))
