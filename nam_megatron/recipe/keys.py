"""The keys of a recipe: which there are, and what is said to somebody who wrote another."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from nam_megatron.features.names import FEATURES
from nam_megatron.recipe.recipe import Recipe
from nam_megatron.words.setting import Config, section

# Tables of what published config.json files call it; what a word of theirs is where no key is called so; and Megatron's for several keys.
PUBLISHED = Path(__file__).parents[1] / "hf" / "families"
DEPTH = "model.depth"
COMPUTED = {
    "layers": DEPTH, "ffn": "model.ffn_hidden_size", "tie_word_embeddings": "model.tied_embeddings",
    "max_position_embeddings": "model.seq_length", "aux_loss": "model.blocks.moe.aux_loss_coeff",
    "partial_rotary_factor": "model.blocks.attention.rotary_percent",
}  # fmt: skip
MEGATRONS = {
    "num_layers": DEPTH, "hybrid_layer_pattern": "model.pattern",
    **dict.fromkeys(("num_query_groups", "kv_heads", "num_kv_heads"), "model.blocks.attention.query_groups"),
}  # fmt: skip
# What other trainers' options are called (NeMo, torchtitan, Lightning, DeepSpeed, transformers' Trainer, nanoGPT), where no key is.
TRAINERS = {
    name: key for key, names in {
        DEPTH: "layers n_layers n_layer",
        "model.hidden_size": "d_model n_embd dim width embed_dim",
        "model.ffn_hidden_size": "d_ff ffn_dim mlp_dim",
        "model.num_attention_heads": "n_heads n_head num_heads",
        "model.blocks.attention.query_groups": "n_kv_heads",
        "model.seq_length": "seq_len max_seq_len max_seq_length sequence_length context_length context_len block_size max_length",
        "model.vocab_size": "vocab n_vocab",
        "model.hidden_dropout": "dropout",
        "model.activation": "hidden_act activation_function act_fn",
        "model.tied_embeddings": "share_embeddings_and_output_weights tie_embeddings weight_tying",
        "feature.mtp.depths": "mtp_num_layers num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers mtp_depths",
        "parallel.tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree",
        "parallel.sequence": "sp",
        "parallel.pipeline": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree",
        "parallel.virtual_pipeline": "vpp virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size",
        "parallel.context": "cp cp_size context_parallel context_parallel_degree",
        "parallel.expert": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree",
        "parallel.expert_tensor": "etp expert_tensor_parallel_degree",
        "cluster.nodes": "num_nodes nnodes n_nodes",
        "cluster.gpus_per_node": "gpus num_gpus n_gpus ngpus devices nproc_per_node nproc ngpus_per_node num_gpus_per_node",
        "optim": "optimizer optimizer_type",
        "optim.lr": "learning_rate max_lr base_lr peak_lr",
        "optim.min_lr": "min_learning_rate lr_min",
        "optim.decay": "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay",
        "optim.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps",
        "optim.weight_decay": "wd",
        "optim.clip_grad": "grad_clip max_grad_norm max_norm gradient_clip_val gradient_clipping clip",
        "schedule.micro_batch_size": "mbs micro_batch local_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
        "schedule.global_batch_size": "gbs batch_size global_batch train_batch_size",
        "schedule.train_steps": "max_steps steps num_steps total_steps training_steps max_iters num_train_steps",
        "schedule.save": "output_dir save_dir ckpt_dir checkpoint_dir",
        "schedule.save_interval": "save_steps save_every every_n_train_steps checkpoint_interval",
        "schedule.load": "resume resume_from_checkpoint",
        "schedule.log_interval": "logging_steps log_every log_every_n_steps log_freq",
        "schedule.eval_interval": "eval_every val_check_interval",
        "data.path": "data_path dataset dataset_path train_data",
        "precision.params": "dtype torch_dtype mixed_precision",
        "feature.recompute.granularity": "activation_checkpointing gradient_checkpointing activation_checkpoint recompute_activations",
        "feature.megatron_fsdp.enabled": "fsdp",
        "feature.distributed_optimizer.enabled": "zero zero_stage",
        "feature.tracking": "wandb logger",
    }.items() for name in names.split()
}  # fmt: skip
# And what none of ours sets, since others decide it.
FOLLOWS = {
    name: why for why, names in {
        "data-parallel ranks are what `cluster.nodes` x `cluster.gpus_per_node` leaves of tensor, pipeline and context":
            "dp dp_size data_parallel data_parallel_size data_parallel_degree dp_shard dp_replicate data_parallel_shard_degree",
        "microbatches are what `schedule.global_batch_size` has of `schedule.micro_batch_size` on each data-parallel rank":
            "gradient_accumulation_steps accumulate_grad_batches grad_accum gradient_accumulation num_microbatches",
        "`optim.beta1` and `optim.beta2` are two keys": "betas adam_betas",
        "a training is as long as `schedule.train_steps` says": "epochs num_epochs max_epochs num_train_epochs",
    }.items() for name in names.split()
}  # fmt: skip

SWITCHED = "features are switched by key: `feature.NAME.KEY=...`; `~feature.NAME` turns one off"


def value_at(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key; None where it does not stand."""
    node: Any = recipe
    for part in key.split("."):
        node = getattr(node, part, None)
    return node


def keys_at(loc: Iterable[Any]) -> tuple[str, ...]:
    """Names of the keys that exist under `loc`, the parts of a key; none where `loc` itself does not exist."""
    found = config_at(loc)
    return tuple(found.model_fields) if found else ()


def config_at(loc: Iterable[Any]) -> type[Config] | None:
    """The config class of the section at `loc`, the parts of a key; None where there is none."""
    cls: type[Config] | None = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        cls = section(cls.model_fields[part].annotation) if cls and part in cls.model_fields else None
    return cls


def values_at(key: str) -> Iterator[str]:
    """The words that a key may have, where they are a few."""
    *parents, last = key.split(".")
    config = config_at(parents)
    if config is None or last not in config.model_fields:
        return
    kind = config.model_fields[last].annotation
    for one in (kind, *get_args(kind)):
        if get_origin(one) is Literal:
            yield from map(str, get_args(one))
        elif one is bool:
            yield from ("true", "false")


def keys_hint(loc: Sequence[Any]) -> str:
    """For somebody who wrote a key under `loc` that does not exist. At the top a command has words of its own."""
    names = keys_at(loc) if loc else ()
    return f"there are: {', '.join(names)}" if names else "`--cfg job` prints every key there is"


def whole_hint(written: Iterable[str]) -> str | None:
    """For somebody who wrote the end of a key, or left something in it out, or Megatron's name of it; of a feature its switch. The first
    that is one tells.
    """
    written = list(written)
    for key in written:
        above, _, last = key.rpartition(".")
        found = [
            f"`{known}.{feature.switch}`" if (feature := FEATURES.get(known.removeprefix("feature."))) else f"`{known}`"
            for known in (known for known in _known() if not known.startswith("lane."))  # a lane's are its name's
            if known.endswith(f".{key}") or (known.startswith(f"{above}.") and known.endswith(f".{last}"))
        ]
        if found:
            return f"a recipe key is written whole: {' or '.join(found)}"
    for key in written:
        last = key.rpartition(".")[2]
        if found := [f"`{known}`" for known in _known() if argument(known) == last]:
            return f"of Megatron's `--{last.replace('_', '-')}` the recipe's key is {' or '.join(found)}"
    for key in written:
        above, _, last = key.rpartition(".")
        of_model = "blocks" not in above.split(".")  # a kind's heads are not the model's
        if here := called_elsewhere().get(last) or (TRAINERS.get(last) if of_model else None):
            more = ", where attention and the MLP after it are two layers" if here == DEPTH else ""
            return f"what others call `{last}` is `{here}` here{more}"
        if follows := FOLLOWS.get(last):
            return follows
    for key in written:
        above, _, last = key.rpartition(".")
        found = [f"`{known}`" for known in _known() if known.endswith(f".{last}")]
        if above in _known() and 0 < len(found) < 4:
            return f"elsewhere there is {' or '.join(found)}"
    return None


def argument(key: str) -> str | None:
    """Megatron's argument that gets the value of a key as it stands."""
    *parents, last = key.split(".")
    config = config_at(parents)
    return config.row(last).argument if config and last in config.model_fields else None


@cache
def called_elsewhere() -> dict[str, str]:
    """Recipe keys by names in published config.json files, Llama's first, and by those of Megatron's that no one key is."""
    known, found = {*_known()}, dict(MEGATRONS)
    for path in sorted(PUBLISHED.glob("*.yaml"), key=lambda path: (path.stem != "llama", path.stem)):
        for name, said in yaml.safe_load(path.read_text(encoding="utf-8")).get("config", {}).items():
            word = said.partition(" or ")[0] if isinstance(said, str) else ""
            ours = (COMPUTED.get(word, ""), f"model.{word}", f"model.blocks.{word}")
            if here := next((key for key in ours if key in known), None):
                found.setdefault(name, here)
    return found


def _known(cls: type[Config] = Recipe, path: str = "") -> Iterator[str]:
    """Every key that the command line can give, sections too."""
    for name, field in cls.model_fields.items():
        yield path + name
        inner = section(field.annotation)
        if inner and getattr(field.annotation, "__origin__", None) not in (tuple, dict):
            yield from _known(inner, f"{path}{name}.")
