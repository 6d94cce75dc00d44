"""A lowering as Megatron-Bridge's ConfigContainer, which keeps the law of the house under other people's runners (torch side).

Runners build the container, lay overrides over it and let Bridge validate it; Bridge takes top-k 500 of 128 experts. Ours carries the
recipe that it was made of, as one line of JSON. When it is validated, each changed field becomes a change of the recipe key that
decides it, the recipe is checked as everywhere else, and all fields are made anew. A field that no key decides cannot be changed.
Made for megatron-bridge 0.6.2.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch  # noqa: F401  before Transformer Engine, which needs the libraries that torch loads
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.models.transformer_config import MLATransformerConfig
from megatron.bridge.training import config as bridge_config
from megatron.bridge.training import initialize
from megatron.bridge.training.utils import omegaconf_utils
from megatron.bridge.utils.common_utils import get_world_size_safe
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.datasets import utils as dataset_utils
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec

from nam_megatron import bridge
from nam_megatron.bridge import Arguments
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.lower import Lowering, translate
from nam_megatron.mcore.pretrain import Float16ExceptMarked, keep_shipped_helpers, set_experts_apart
from nam_megatron.recipe import Recipe, from_tree, to_tree
from nam_megatron.setting import Setting

# Bridge makes objects of YAML only where the name of their class begins with a registered prefix.
register_allowed_target_prefix("nam_megatron.")


class _Dropped(logging.Filter):
    """Bridge leaves out an override that it cannot place, and says so in its log alone: here it is refused."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            raise Refused(Problem(record.getMessage(), hint="name a field that exists, or leave it out"))
        return True


omegaconf_utils.logger.addFilter(_Dropped())

# Bridge builds the datasets' helpers by `make` at every start and exits where that fails, and the wheel has no Makefile.
keep_shipped_helpers()
initialize.compile_helpers = dataset_utils.compile_helpers


# The model --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class NamProvider(HybridModelProvider):
    """Bridge's provider of hybrid models with our layers. nam_recipe: the recipe as one line of JSON."""

    nam_recipe: str = ""

    @property
    def lowering(self) -> Lowering:
        return translate(from_tree(json.loads(self.nam_recipe)))

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> HybridModel:
        model = super().provide(pre_process, post_process, vp_stage)
        if not self.lowering.plan.recipe.feature.muon.on:
            set_experts_apart(model)
        return model

    def provide_distributed_model(self, *args: Any, **kwargs: Any) -> list[MegatronModule]:
        return super().provide_distributed_model(*args, **{"mixed_precision_wrapper": Float16ExceptMarked} | kwargs)


@dataclasses.dataclass
class NamLatentProvider(NamProvider, MLATransformerConfig):
    """The same for models with latent attention, whose config is another class in Megatron."""


def stack_spec(config: NamProvider) -> ModuleSpec:
    """The layers of a provider's recipe. A function with a name, since YAML drops a ModuleSpec in silence.

    Raises Refused for a recipe whose layers are not built.
    """
    from nam_megatron.mcore import stack

    return stack.hybrid_stack_spec(config.lowering.plan)


# The container ----------------------------------------------------------------------------------------------------------

CLASSES: Mapping[str, type] = {
    "train": bridge_config.TrainingConfig,
    "validation": bridge_config.ValidationConfig,
    "optimizer": bridge_config.OptimizerConfig,
    "scheduler": bridge_config.SchedulerConfig,
    "ddp": bridge_config.DistributedDataParallelConfig,
    "dataset": bridge_config.GPTDatasetConfig,
    "tokenizer": bridge_config.TokenizerConfig,
    "checkpoint": bridge_config.CheckpointConfig,
    "logger": bridge_config.LoggerConfig,
    "dist": bridge_config.DistributedInitConfig,
    "rng": bridge_config.RNGConfig,
    "rerun_state_machine": bridge_config.RerunStateMachineConfig,
    "profiling": bridge_config.ProfilingConfig,
}
# What a runner may set as it likes: where a run writes and what it reports, and when it stops.
FREE = (
    "logger.",
    "profiling.",
    "straggler",
    "nvrx_straggler",
    "ft",
    "env_vars",
    "checkpoint.most_recent_k",
    "train.exit_duration_in_mins",
    "train.manual_gc",
)


def _blend(a: Arguments) -> Any:
    mock, paths = a("mock_data"), a("data_path")
    return (
        None if mock or not paths else dataset_utils.get_blend_from_list(list(paths))
    )  # no blend means mock data to Bridge


def _blend_per_split(a: Arguments) -> Any:
    mock, paths = a("mock_data"), [a(f"{split}_data_path") for split in ("train", "valid", "test")]
    if mock or not any(paths):
        return None
    return [dataset_utils.get_blend_from_list(list(path)) if path else None for path in paths]


DATASET: Mapping[str, Callable[[Arguments], Any]] = {
    "seq_length": lambda a: a("seq_length"),
    "random_seed": lambda a: a("seed"),
    "blend": _blend,
    "blend_per_split": _blend_per_split,
    "data_path": lambda a: None,  # `blend` says it
    "path_to_cache": lambda a: a("data_cache_path"),
    "create_attention_mask": lambda a: a("create_attention_mask_in_dataloader"),
    "skip_getting_attention_mask_from_dataset": lambda a: not a("create_attention_mask_in_dataloader"),
    "fast_cache_load": lambda a: a("dataloader_fast_cache_load"),
    "defer_npy_index_mmap": lambda a: a("dataloader_defer_npy_index_mmap"),
    "persistent_workers": lambda a: a("num_workers") > 0,
}
bridge.SPELLED.update({f"dataset.{name}": rule for name, rule in DATASET.items()})

# Settings that need no field of Bridge's as long as they have this value.
ELSEWHERE = {
    "spec": (None, "the stack is handed over as a function"),
    "fim_data": (False, "fill-in-the-middle is not carried over"),
    "use_rope_scaling": (False, "its hybrid models have none"),
    "init_method_xavier_uniform": (False, "its hybrid models are initialised normally"),
    "openai_gelu": (False, "there is no field for it"),
    "bias_gelu_fusion": (False, "there is no field for it"),
    "quick_geglu": (False, "there is no field for it"),
}


@dataclasses.dataclass(kw_only=True)
class NamContainer(bridge_config.ConfigContainer):
    """Bridge's container; validating it asks the recipe first."""

    def validate(self) -> None:
        """Refuse what the recipe would refuse, then Bridge's own checks.

        Raises:
            Refused: the recipe's findings on the changed fields, or a change of a field that no recipe key decides.
        """
        settle(self)
        super().validate()


def container(lowering: Lowering) -> NamContainer:
    """The container of a lowering, not yet validated.

    Raises:
        Refused: a setting that Bridge has no field for.
    """
    container, _ = _made(lowering)
    return container


def _made(lowering: Lowering) -> tuple[NamContainer, Arguments]:
    raise_if(_unserved(lowering.plan.recipe))
    a = Arguments(lowering)
    latent = issubclass(bridge.transformer_class(lowering), MLATransformerConfig.__mro__[2])
    provider = NamLatentProvider if latent else NamProvider
    model = a.of("model", provider) | {"hybrid_stack_spec": stack_spec, "nam_recipe": _line(lowering.plan.recipe)}
    made = NamContainer(
        model=provider(**model),
        env_vars={env.name: env.value for env in lowering.env if env.value is not None},
        mixed_precision=None,  # the settings say it field by field
        **{section: cls(**a.of(section, cls)) for section, cls in CLASSES.items()},
    )
    raise_if(a.homeless(ELSEWHERE))
    return made, a


def _unserved(r: Recipe) -> Iterator[Problem]:
    hint = "train it with `nam_megatron.train`"
    if r.parallel.virtual_pipeline > 1:
        message = "Megatron-Bridge builds no hybrid model with virtual pipeline stages"
        yield Problem(message, "parallel.virtual_pipeline", f"set it to 1, or {hint}")
    if r.feature.fsdp2.on:
        yield Problem("torch FSDP2 is not carried over to Megatron-Bridge", "feature.fsdp2.enabled", hint)
    if r.feature.muon.on and r.feature.distributed_optimizer.enabled:
        message = "Megatron-Bridge does not shard the state of Muon"
        yield Problem(message, "feature.distributed_optimizer.enabled", f"set it to false, or {hint}")
    if r.model.hidden_size % 8:
        message = f"hidden_size {r.model.hidden_size} is not a multiple of 8: rows of bf16 would not be 16 bytes apart"
        yield Problem(message, "model.hidden_size", f"{r.model.hidden_size // 8 * 8} fits")


def _line(recipe: Recipe) -> str:
    return json.dumps(to_tree(recipe), separators=(",", ":"))


# Changes made by a runner -------------------------------------------------------------------------------------------------


def settle(c: NamContainer) -> None:
    """Make a container's fields agree with its recipe, after the recipe took over what was changed in the fields.

    Raises Refused.
    """
    recipe = from_tree(json.loads(c.model.nam_recipe))
    meant, a = _made(translate(recipe))
    before, now = flat(meant), flat(c)
    changed = {path: now[path] for path in now if now[path] != before[path] and not path.startswith(FREE)}
    if changed and get_world_size_safe() == recipe.world_size:
        # A container that was saved with a checkpoint holds what validation derived.
        bridge_config.ConfigContainer.validate(meant)
        derived = flat(meant)
        changed = {path: value for path, value in changed.items() if value != derived[path]}
    new = _with_world(_with(recipe, changed, a))
    if new == recipe:
        return
    fresh = container(translate(new))
    after = flat(fresh)
    raise_if(
        Problem(f"`{path}` is {value!r}, and the recipe with all these changes makes {after.get(path)!r} of it")
        for path, value in changed.items()
        if after.get(path) != value
    )
    free = {path for path in now if path.startswith(FREE) and now[path] != before.get(path)}
    for field in dataclasses.fields(c):
        ours, theirs = getattr(fresh, field.name), getattr(c, field.name)
        for path in free:
            section, _, name = path.partition(".")
            if section == field.name and name and hasattr(theirs, name):
                setattr(ours, name, getattr(theirs, name))
        if field.name not in free:
            setattr(c, field.name, ours)


def flat(c: bridge_config.ConfigContainer) -> dict[str, Any]:
    """`section.field` -> value, in a form that does not depend on whether lists were tuples."""
    found = {}
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for inner in dataclasses.fields(value):
                if not inner.name.startswith("_"):
                    found[f"{field.name}.{inner.name}"] = _plain(getattr(value, inner.name, None))
        elif not field.name.startswith("_"):
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value):
        # Made anew at each construction: two are the same if they come from the same code.
        inner = getattr(value, "func", value)
        return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
    return value


def _with(recipe: Recipe, changed: Mapping[str, Any], a: Arguments) -> Recipe:
    """The recipe with the keys that decide the changed fields set to what the fields say."""
    owners: dict[str, Setting] = {}
    for setting in a.lowering.settings:
        for path in a.fields[setting.name]:
            owners.setdefault(path, setting)
    said: dict[str, Any] = {}
    problems = []
    for path, value in changed.items():
        setting = owners.get(path)
        if setting is None:
            message = f"`{path}` was set to {value!r}, and no recipe key decides it"
            problems.append(Problem(message, hint="leave it out; if it has to change, it needs a key in the recipe"))
        elif setting.key is None:
            problems.append(Problem(f"`{path}` was set to {value!r}, and `{setting.owner}` pins it: {setting.why}"))
        elif _held(recipe, setting.key) != setting.value:
            message = f"`{path}` was set to {value!r}; it follows from another value of the recipe"
            problems.append(Problem(message, setting.key, f"change that key: `overrides=['{setting.key}=...']`"))
        elif said.setdefault(setting.key, value) != value:
            problems.append(
                Problem(f"`{path}` was set to {value!r}, and another field to {said[setting.key]!r}", setting.key)
            )
    raise_if(problems)
    tree = to_tree(recipe)
    for key, value in said.items():
        node, last = _node(tree, key)
        node[last] = value
    return from_tree(tree)


def _held(recipe: Recipe, key: str) -> Any:
    node, last = _node(to_tree(recipe), key)
    return tuple(node[last]) if isinstance(node[last], list) else node[last]


def _node(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *parents, last = key.split(".")
    for name in parents:
        tree = tree[name]
    return tree, last


def _with_world(recipe: Recipe) -> Recipe:
    """The recipe on as many GPUs as the runner has started."""
    world = get_world_size_safe()
    if world == recipe.world_size:
        return recipe
    a_node = min(world, recipe.cluster.gpus_per_node)
    if world % a_node:
        hint = f"start full hosts of {a_node} GPUs, or change `cluster.gpus_per_node`"
        raise Refused(Problem(f"{world} processes on hosts of {a_node} GPUs", "cluster.gpus_per_node", hint))
    cluster = recipe.cluster.model_copy(update={"nodes": world // a_node, "gpus_per_node": a_node})
    return recipe.model_copy(update={"cluster": cluster})
