"""A lowering as Megatron-Bridge's ConfigContainer, which keeps the law of the house under other people's runners (torch side).

Runners build the container, lay overrides over it and let Bridge validate it; Bridge takes top-k 500 of 128 experts. Ours carries the
recipe that it was made of, as one line of JSON. When it is validated, each changed field becomes a change of the recipe key that
decides it, the recipe is checked as everywhere else, and all fields are made anew. A field that no key decides cannot be changed.
Made for megatron-bridge 0.6.2.
"""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch  # before Transformer Engine, which needs the libraries that torch loads
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.models.transformer_config import MLATransformerConfig
from megatron.bridge.training import config as bridge_config
from megatron.bridge.training.utils import omegaconf_utils
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.datasets import utils as dataset_utils
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import unwrap_model

from nam_megatron import train
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.environment import given
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.mends import Trainer, install
from nam_megatron.nemo import adapters, converter, finetune, guards, overrides
from nam_megatron.recipe import Recipe, from_tree, to_tree
from nam_megatron.runtime import bridge, checkpoint, cross_entropy, hosts, word_embedding
from nam_megatron.runtime.bridge import Arguments

# Bridge makes objects of YAML only where the name of their class begins with a registered prefix.
register_allowed_target_prefix("nam_megatron.")


class _Dropped(logging.Filter):
    """Bridge leaves out an override that it cannot place, and says so in its log alone: here it is refused.

    But for what Nemotron's scripts keep at the top of their files for themselves: where a run runs, and the artifacts it uses.
    """

    OTHERS = tuple(
        f"Key '{name}' in overrides not found in config object NamContainer" for name in ("run", "artifacts")
    )

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and not record.getMessage().startswith(self.OTHERS):
            raise Refused(record.getMessage(), hint="name a field that exists, or leave it out")
        return True


omegaconf_utils.logger.addFilter(_Dropped())

guards.explain_endings()


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
        plan = self.lowering.plan
        recipe = plan.recipe
        install.start(plan, Trainer.BRIDGE)  # again, for who builds a model and trains none
        model = super().provide(pre_process, post_process, vp_stage)
        for hook in self.__dict__.pop("_hooks", []):  # of features beside the layers; stack_spec has left them
            (model,) = hook([model])
        if recipe.precision.cross_entropy == "fused":
            cross_entropy.provide([model])
        if recipe.precision.fused_grad_accumulation:
            word_embedding.provide([model])
        return model

    def provide_distributed_model(self, *args: Any, **kwargs: Any) -> list[MegatronModule]:
        models = super().provide_distributed_model(*args, **kwargs)
        adapters.stand(models, self.lowering.plan)
        if kwargs.get("wrap_with_ddp", True):  # else it is not for training
            guarded(models, self.lowering)
            install.wrapped(models, self.lowering.plan)
            hosts.one_for_all(models, self.lowering.plan.recipe)
        return models


def guarded(models: Sequence[torch.nn.Module], lowering: Lowering) -> None:
    """Guard the training of `models`, this rank's part of what a lowering says; nothing is loaded yet."""
    recipe = lowering.plan.recipe
    if checkpoint.reads():
        finetune.forget(recipe)  # before any rank builds its data
    if torch.distributed.get_rank() == 0:
        said = [*guards.notes(recipe), *checkpoint.untold_of(recipe)]  # before what it is asked of is written anew
        checkpoint.sign(lowering, guards.SIGNED)
        finetune.sign(recipe)
        train.announce(lowering.plan)
        for note in said:
            print(f"note: {note}", file=sys.stderr, flush=True)
    for model in unwrap_model(list(models)):
        model.forward = guards.Watched(model, saves=recipe.schedule.save is not None)


@dataclasses.dataclass
class NamLatentProvider(NamProvider, MLATransformerConfig):
    """The same for models with latent attention, whose config is another class in Megatron."""


def stack_spec(config: NamProvider) -> ModuleSpec:
    """The layers of a provider's recipe. A function with a name, since YAML drops a ModuleSpec in silence.

    Raises Refused for a recipe whose layers are not built.
    """
    from nam_megatron.runtime import stack

    spec = stack.hybrid_stack_spec(config.lowering.plan)
    config._hooks = spec.metainfo.get("hooks", [])
    return spec


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


def classes(recipe: Recipe) -> Mapping[str, type]:
    """The class of each section."""
    return {**CLASSES, "dataset": finetune.Samples} if recipe.data.sft else CLASSES


def _blend(a: Arguments) -> Any:
    mock, paths = a("mock_data"), a("data_path")
    if mock or not paths:
        return None  # Bridge takes that for mock data
    return dataset_utils.get_blend_from_list(list(paths))


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


def _mlflow(a: Arguments, key: str) -> str | None:
    tracking = a.lowering.plan.recipe.feature.tracking
    return getattr(tracking, key) if tracking and tracking.mlflow else None


# Bridge writes to MLflow itself, for which Megatron has no arguments; checkpoints stay where they are.
LOGGER: Mapping[str, Callable[[Arguments], Any]] = {
    "mlflow_tracking_uri": lambda a: _mlflow(a, "mlflow"),
    "mlflow_experiment": lambda a: _mlflow(a, "mlflow_experiment"),
    "mlflow_run_name": lambda a: a.lowering.plan.recipe.preset.name if _mlflow(a, "mlflow") else None,
    "mlflow_log_artifacts": lambda a: _mlflow(a, "mlflow") is None,
}
bridge.SPELLED.update({f"logger.{name}": rule for name, rule in LOGGER.items()})

# Settings that need no field of Bridge's as long as they have this value.
ELSEWHERE = {
    "spec": (None, "the stack is handed over as a function"),
    "fim_data": (False, "fill-in-the-middle is not carried over"),
    "use_rope_scaling": (False, "its hybrid models have none"),
    "init_method_xavier_uniform": (False, "its hybrid models are initialised normally"),
    "openai_gelu": (False, "there is no field for it"),
    "bias_gelu_fusion": (False, "there is no field for it"),
    "quick_geglu": (False, "there is no field for it"),
    # Of prompts and answers it goes without saying; other datasets have the fields.
    "reset_position_ids": (False, "there is no field for it"),
    "reset_attention_mask": (False, "there is no field for it"),
    "eod_mask_loss": (False, "there is no field for it"),
    "create_attention_mask_in_dataloader": (False, "there is no field for it"),
}


@dataclasses.dataclass(kw_only=True)
class NamContainer(bridge_config.ConfigContainer):
    """Bridge's container; validating it asks the recipe first."""

    def validate(self) -> None:
        """Refuse what the recipe would refuse, then Bridge's own checks. Every start of a training comes here, on every rank.

        Raises:
            Refused: the recipe's findings on the changed fields, a change of a field that no recipe key decides, an environment
                that contradicts the recipe, or what `guards.objections` finds.
        """
        settled(self)
        lowering = self.model.lowering
        thorough = os.environ.get("RANK", "0") == "0"  # other hosts: `hosts.one_for_all`
        asked = guards.objections(lowering, thorough=thorough), finetune.objections(lowering, thorough=thorough)
        raise_if([*_otherwise(lowering), *chain.from_iterable(asked)])
        install.start(lowering.plan, Trainer.BRIDGE)
        super().validate()

    def set_data_parallel_size(self) -> None:
        """Bridge's pretrain divides the GPUs here, before it validates: what does not fit is refused in our words."""
        settled(self)
        super().set_data_parallel_size()


def settled(c: NamContainer, *, saved: bool = True) -> None:
    """Make a container's fields agree with its recipe; saved: see `overrides.settle`. Raises Refused."""
    own = classes(overrides.carried(c)) if isinstance(c.model, NamProvider) else CLASSES
    overrides.settle(c, {**own, "model": NamProvider}, made, saved=saved)


def _otherwise(lowering: Lowering) -> Iterator[Problem]:
    """The environment where it contradicts the plan: Bridge sets what is missing there, and lets stand what is not."""
    for env in lowering.env:
        here = os.environ.get(env.name)
        if here is None or env.allows(here):
            continue
        wanted = "it unset" if env.value is None else f"`{env.value}`"
        yield Problem(f"{env.name} is `{here}`, and the plan needs {wanted}: {env.why}", hint=f"unset {env.name}")


def container(lowering: Lowering) -> NamContainer:
    """The container of a lowering, not yet validated.

    Raises:
        Refused: a setting that Bridge has no field for.
    """
    return made(lowering)[0]


converter.NamBridge.container = staticmethod(container)


def made(lowering: Lowering) -> tuple[NamContainer, Arguments]:
    """The container, and which of its fields each setting became. Raises Refused."""
    raise_if(_unserved(lowering.plan.recipe))
    a = Arguments(lowering)
    latent = bridge.transformer_class(lowering) is bridge.MLATransformerConfig
    provider = NamLatentProvider if latent else NamProvider
    model = a.of("model", provider) | {"hybrid_stack_spec": stack_spec, "nam_recipe": _line(lowering.plan.recipe)}
    c = NamContainer(
        model=provider(**model),
        env_vars=given(lowering),
        mixed_precision=None,  # the settings say it field by field
        peft=adapters.lora(lowering.plan),
        **{section: _section(a, section, cls) for section, cls in classes(lowering.plan.recipe).items()},
    )
    raise_if(a.homeless(ELSEWHERE))
    return c, a


def _section(a: Arguments, section: str, cls: type) -> Any:
    return finetune.dataset(a) if cls is finetune.Samples else cls(**a.of(section, cls))


def _unserved(r: Recipe) -> Iterator[Problem]:
    hint = "train it with `nam_megatron.train`"
    if r.parallel.virtual_pipeline > 1:
        message = "Megatron-Bridge builds no hybrid model with virtual pipeline stages"
        yield Problem(message, key="parallel.virtual_pipeline", hint=f"set it to 1, or {hint}")
    if r.feature.cuda_graphs and r.feature.cuda_graphs.impl != "transformer_engine":
        message = "Megatron-Bridge captures parts of layers by Transformer Engine's graphs alone"
        yield Problem(message, key="feature.cuda_graphs.impl", hint=f"set it to transformer_engine, or {hint}")
    if r.model.learned_positions not in (None, r.model.seq_length):
        message = "Megatron-Bridge holds a model's positions to the length of its samples"
        yield Problem(message, key="model.learned_positions", hint=f"set it to {r.model.seq_length}, or {hint}")
    if r.feature.mhc:
        message = "several residual streams have not been tried under Megatron-Bridge"
        yield Problem(message, key="feature.mhc.streams", hint=f"set it to 0, or {hint}")
    if r.feature.ngram_hash:
        message = "Megatron-Bridge builds the model without embeddings of n-grams"
        yield Problem(message, key="feature.ngram_hash.enabled", hint=f"set it to false, or {hint}")
    if r.feature.muon and r.feature.distributed_optimizer.enabled:
        message = "Megatron-Bridge does not shard the state of Muon"
        yield Problem(message, key="feature.distributed_optimizer.enabled", hint=f"set it to false, or {hint}")


def _line(recipe: Recipe) -> str:
    return json.dumps(to_tree(recipe), separators=(",", ":"))
