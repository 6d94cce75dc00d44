"""Stage 3, Plan -> Lowering: every setting Megatron gets, each with one owner and a reason.

Sections of the recipe, blocks and features bring their own; see Config.lowered.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nam_megatron.compile.plan import Plan
from nam_megatron.compile.wishes import granted
from nam_megatron.errors import raise_if
from nam_megatron.features.names import FEATURES
from nam_megatron.laws import book
from nam_megatron.recipe import Recipe
from nam_megatron.targets import Target, current
from nam_megatron.words.setting import CONNECTIONS, Env, Setting

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
    target = target or current()
    return lower(granted(recipe, target), target)


def lower(p: Plan, target: Target) -> Lowering:
    """All settings of a plan, checked: sections, blocks, features, the device, and that no setting has two owners."""
    raise_if(book.left(book.problems(p, target), p.recipe.allow))
    return unchecked(p, target)


def unchecked(p: Plan, target: Target) -> Lowering:
    """All settings of a plan that may not be one to train: for comparing, never for a launch."""
    settings: list[Setting] = []
    for name in SECTIONS:
        settings += _owned(getattr(p.recipe, name).lowered(p.site), name, f"{name}.".__add__)
    for block in p.blocks:
        settings += _owned(block.lowered(p.site), block.kind, block.at)
    for name, cls in FEATURES.items():
        feature = getattr(p.recipe.feature, name)
        settings += _owned(feature.lowered(p.site) if feature else cls.off(), name, f"feature.{name}.".__add__)
    seen: dict[str, Setting] = {}
    for s in settings:
        assert s.name not in seen, f"{s.name} is set by {seen[s.name].owner} and by {s.owner}"
        seen[s.name] = s
    return Lowering(p, target, tuple(settings), tuple(_env(p)))


def _owned(settings: Iterator[Setting], owner: str, whole: Callable[[str], str]) -> Iterator[Setting]:
    """whole: the recipe key of one of its owner's. A key with a dot in it is another section's, and whole."""
    for s in settings:
        yield replace(s, owner=owner, key=whole(s.key) if s.key and "." not in s.key else s.key)


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
    layout, f, gpu = p.recipe.parallel, p.recipe.feature, p.recipe.cluster.processor != "cpu"
    if gpu:
        yield Env(
            "PYTORCH_ALLOC_CONF", "expandable_segments:True", "without it fragmentation decides what fits", "device"
        )
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
    for way in ("FWD", "BWD") if gpu else ():
        more = "" if cudnn else "; a leftover 1 would choose cuDNN's"
        yield Env(f"NVTE_NORM_{way}_USE_CUDNN", "1" if cudnn else None, why + more, "precision")
    if p.recipe.precision.deterministic:
        for name, value, why in DETERMINISTIC:
            yield Env(name, value, why, "precision")
    for feature in f.all():
        yield from (replace(e, owner=feature.name) for e in feature.env())
