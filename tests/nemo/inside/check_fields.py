"""Every field of Bridge's container, one after the other: taken by a recipe's key, free, or refused with words that hold when followed."""

import copy
import enum
import functools
import re
import shlex
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import nam_megatron.nemo as nemo
from nam_megatron.errors import Problem, Refused
from nam_megatron.nemo.container import NamContainer, settled
from nam_megatron.nemo.overrides import FIXED, LEAVE, _free, _plain, flat

pytestmark = pytest.mark.usefixtures("fusions")
NATIVE, LATENT = "nam56r_native_dp", "nam56r_fused"
SFT = ("data.tokenizer=/t", "schedule.pretrained=/p")
BLEND = "data.parts=[{weight: 2, path: /a}, {weight: 1, path: /b}]"
CASES = [
    (NATIVE, ()),
    (LATENT, ()),
    (NATIVE, ("data=sft", "data.path=/d", *SFT)),
    (NATIVE, ("data=sft_blend", BLEND, *SFT)),
]
DECIDED = yaml.safe_load((Path(__file__).parents[3] / "nam_megatron/nemo/decided.yaml").read_text())


def other(value: Any, kind: Any) -> Any:
    """Some other value than `value`, of a field's type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(one for one in type(value) if one is not value)
    if isinstance(value, (int, float)):
        return value * 2 or 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, (list, tuple)):
        return [*value, 7]
    if isinstance(value, dict):
        return value | {"a": 1}
    kinds = (kind, *typing.get_args(kind))
    return next((said for one, said in {bool: True, int: 2, float: 0.25, str: "x"}.items() if one in kinds), [7])


# What a recipe takes, where the double or the opposite of what stands there is no value of the key's.
SAID = {
    "train.micro_batch_size": 2,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.num_attention_heads": 64,
    "model.num_query_groups": 4,
    "model.kv_channels": 128,
    "model.rotary_percent": 0.5,
    "model.position_embedding_type": "none",
    "model.normalization": "LayerNorm",
    "model.mamba_num_heads": 64,
    "model.mamba_num_groups": 4,
    "model.moe_latent_size": 64,
    "model.moe_router_dtype": "fp64",
    "model.moe_router_load_balancing_type": "seq_aux_loss",
    "model.moe_router_score_function": "softmax",
    "model.moe_token_dispatcher_type": "allgather",
    "optimizer.adam_beta1": 0.8,
    "optimizer.adam_beta2": 0.8,
    "optimizer.min_lr": 1e-6,
    "optimizer.grad_norm_skip_threshold": 1.0,
    "scheduler.lr_decay_style": "linear",
    "dataset.split": "99,1,0",
    "tokenizer.tokenizer_type": "HuggingFaceTokenizer",
}
# Fields that a recipe takes beside others alone.
SAVED = {"checkpoint.save": "/c", "checkpoint.save_interval": 2}
SHARDED = {"model.tensor_model_parallel_size": 2, "model.sequence_parallel": True}
CORPUS = {"dataset.data_path": "/d", "dataset.split": "99,1,0", "tokenizer.tokenizer_model": "/t"}
TOGETHER = [
    SAVED,
    SHARDED,
    CORPUS,
    SAVED | {"train.exit_interval": 2},
    SAVED | {"checkpoint.async_save": True},
    SHARDED | {"model.tensor_parallel_num_weight_shards": 2},
    SHARDED | {"tokenizer.tensor_model_parallel_size": 2},
    CORPUS | {"dataset.path_to_cache": "/k"},
    {"dataset.blend": [["/d"], [1.0]], "dataset.split": "99,1,0", "tokenizer.tokenizer_model": "/t"},
    {
        "dataset.blend_per_split": [[["/d"], [1.0]], [["/v"], [1.0]], None],
        "validation.eval_iters": 2,
        "tokenizer.tokenizer_model": "/t",
    },
    CORPUS | {"tokenizer.tokenizer_type": "HuggingFaceTokenizer"},
    {"model.moe_pad_expert_input_to_capacity": True, "model.moe_expert_capacity_factor": 1.0},
    {"optimizer.use_distributed_optimizer": False, "ddp.overlap_param_gather": False},
    {"ddp.use_distributed_optimizer": False, "ddp.overlap_param_gather": False},
    {"ddp.overlap_grad_reduce": False, "ddp.overlap_param_gather": False},
]
BESIDE = {path: group for group in reversed(TOGETHER) for path in group}
# Keys of which these models have no such value: a law says so, and names one.
LAWS = {
    "model.layernorm_epsilon",
    "model.add_bias_linear",
    "model.moe_router_score_function",
    "model.moe_router_pre_softmax",
    "model.moe_router_enable_expert_bias",
    "model.qk_pos_emb_head_dim",
}
# What is gone once it is taken: `dataset.blend` says it, and is made of it. check_container.py has them.
CORPORA = {"dataset.data_path", "dataset.blend", "dataset.blend_per_split"}


def every(c: NamContainer) -> Iterator[tuple[str, Any]]:
    """(section.field, another value) of a container."""
    for section in fields(c):
        config = getattr(c, section.name)
        if is_dataclass(config):
            kinds = typing.get_type_hints(type(config))
            for field in fields(config):
                path = f"{section.name}.{field.name}"
                if not field.name.startswith("_"):
                    yield path, SAID.get(path, other(getattr(config, field.name, None), kinds[field.name]))


def changed(c: NamContainer, values: dict[str, Any]) -> list[Problem]:
    """Findings on a container with these fields; none where it takes them."""
    for path, value in values.items():
        section, _, name = path.partition(".")
        setattr(getattr(c, section), name, value)
    try:
        settled(c, saved=False)
    except Refused as refused:
        return list(refused.problems)
    return []


def wrong(made: NamContainer, path: str, value: Any) -> str | None:
    """What is wrong with what a container does with a field."""
    c = copy.deepcopy(made)
    found = changed(c, {path: value, **BESIDE.get(path, {})})
    if not found:
        same = path in CORPORA or flat(c)[path] == _plain(BESIDE.get(path, {path: value})[path])
        return None if same and c.model.nam_recipe != made.model.nam_recipe else "dropped"
    (problem, *_) = found
    if words := re.search(r"^change that key: `overrides=\['(.*)'\]`$", problem.hint or ""):
        follows = flat(nemo.recipe(made.model.lowering.plan.recipe.preset.name, [words[1]]))
        return None if follows[path] == _plain(value) else f"{words[1]} makes {follows[path]} of it"
    if any(problem.hint == f"a recipe says it so: `{group['words']}`" for group in DECIDED):
        return None  # below
    reason = re.search(f"^`{re.escape(path)}` was set to .*(decides it|pins it): .", problem.message, re.S)
    known = (
        path in FIXED or path == "model.nam_recipe" or f"no value of `{problem.key}` makes it so" in str(problem.hint)
    )
    if (reason and problem.hint == LEAVE) or known or (path in LAWS and problem.key):
        return None
    return f"{problem.message} @ {problem.key}: {problem.hint}"


# The first in eighths of its fields.
PARTS = [(*CASES[0], n) for n in range(8)] + [(*case, None) for case in CASES[1:]]


@pytest.mark.few(1)
@pytest.mark.parametrize(("preset", "words", "part"), PARTS, ids=str)
def test_every_field_is_taken_or_refused_with_a_reason_or_with_words_that_hold(preset, words, part, ranks):
    made = nemo.recipe(preset, words)
    ranks(made.model.lowering.plan.recipe.world_size)
    todo = {path: value for path, value in every(made) if not _free(path)}
    if part is None:  # the rest is as above
        above = flat(nemo.recipe(NATIVE))
        todo = {path: value for path, value in todo.items() if path not in above}
    assert len(todo) > (5 if part is None else 500)
    if part is not None:
        todo = dict([*todo.items()][part::8])
    bad = {path: said for path, value in todo.items() if (said := wrong(made, path, value))}
    assert not bad, "\n".join(f"{path}: {said}" for path, said in bad.items())


def test_a_free_field_is_left_to_whoever_sets_it(ranks):
    ranks(8)
    made = nemo.recipe(NATIVE)
    free = {path: value for path, value in every(made) if _free(path)}
    assert len(free) > 50
    c = copy.deepcopy(made)
    assert not changed(c, free) and c.model.nam_recipe == made.model.nam_recipe
    assert all(getattr(getattr(c, path.split(".")[0]), path.split(".")[1]) is value for path, value in free.items())


@functools.cache
def as_it_is(preset: str, words: tuple[str, ...]) -> dict[str, Any]:
    return flat(nemo.recipe(preset, words))


@pytest.mark.few("optim.")
@pytest.mark.parametrize("group", DECIDED, ids=lambda group: group["words"][:40])
def test_words_that_are_said_to_decide_a_field_do(group):
    """Followed as they stand, by one preset at least."""
    left = set(group["fields"])
    for preset, words in CASES:
        before = as_it_is(preset, words)
        try:
            now = flat(nemo.recipe(preset, [*words, *shlex.split(group["words"])]))
        except Refused as refused:
            print(refused.render())
            continue
        left -= {path for path in left if now.get(path) != before.get(path)}
        if not left:
            return
    raise AssertionError(left)
