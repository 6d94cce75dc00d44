"""What one flag does to what lint says, on both sides: the rules that speak (lint_rules.yaml), what is described, and a recipe's keys."""

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
import yaml
from lint_cases import CASES, DSA, FSDP, HYBRID, MLA, MOE, TP2, words

from nam_megatron.errors import Refused
from nam_megatron.judge.same import flat
from nam_megatron.laws import book
from nam_megatron.laws.law import WRONG
from nam_megatron.lint import describe, lint, recipe, rules
from nam_megatron.lint.rules import layout, sparse, training
from nam_megatron.lint.values import NotKnown
from nam_megatron.schema import configs
from nam_megatron.targets import current

TABLE = yaml.safe_load((Path(__file__).parent / "lint_rules.yaml").read_text())
# Launches of every family; two layouts, for most rules of a layout are silent on one GPU.
LAID_OUT = TP2 | {"--pipeline-model-parallel-size": "2", "--context-parallel-size": "2"}
BASES = {
    "h": HYBRID, "e": MOE, "l": MLA | {"--mtp-num-layers": "1"}, "s": DSA, "t": MOE | LAID_OUT, "f": FSDP | TP2,
    "r": HYBRID | {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1",
          "--use-distributed-optimizer": True},
}  # fmt: skip
VALUES = {"int": ("0", "3"), "float": ("0.0", "0.3"), "str": ("other",), "eval": ("[1,0]",)}


def asked(text: str) -> Iterator[tuple[dict, str]]:
    """`--a 1|2 @he, without --b` -> each change, and the letters of the launches that it is about."""
    for part in text.split(", "):
        said, _, where = part.partition(" @")
        flag, _, values = said.removeprefix("without ").partition(" ")
        for value in values.split("|"):
            yield {flag: None if said.startswith("without ") else value or True}, where or "".join(BASES)


def word(change: dict) -> str:
    ((flag, value),) = change.items()
    return f"without {flag}" if value is None else flag if value is True else f"{flag} {value}"


def launched(flags: dict, ignore: frozenset = frozenset(), env: dict | None = None):
    text = "\n".join(f"export {k}={v}" for k, v in (env or {}).items())
    line = " ".join(map(shlex.quote, words(flags)))
    return lint(f"{text}\ntorchrun --nproc-per-node 8 train.py {line}", "case", ignore=ignore)


def found(flags: dict, ignore: frozenset = frozenset(), env: dict | None = None):
    return launched(flags, ignore, env).findings


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_silent_one_flag_beside_its_trap(name):
    base, change, *env = CASES[name]
    others = frozenset(rules.BY_ID.keys() - {name})
    assert "; ".join(f"{f.flag} {f.detail}".strip() for f in found(base | change, others, *env)) == TABLE[name]["says"]
    outs = [out for out, _ in asked(TABLE[name]["out"])] if "out" in TABLE[name] else []
    assert [word(out) for out in outs if found(base | change | out, others, *env)] == []


def changes(base: dict) -> Iterator[dict]:
    """Each flag, with values that its parser takes and the launch has not."""
    for name, flag in sorted(current().flags.items()):
        if not name.startswith("--") or name == "--help":
            continue
        if flag.action != "store":
            yield {name: None if name in base else True}
            continue
        values = tuple(map(str, flag.choices or ())) or VALUES.get(flag.type or "str", ("3",))
        yield from ({name: value} for value in (*values, *((None,) if name in base else ())) if base.get(name) != value)


@cache
def stepping() -> dict[str, dict[str, list[str]]]:
    """change -> letter of a launch -> the rules that it steps into there."""
    made: dict[str, dict[str, list[str]]] = {}
    for rule, row in TABLE.items():
        for change, letters in asked(row["in"]) if "in" in row else ():
            for letter in letters:
                made.setdefault(word(change), {}).setdefault(letter, []).append(rule)
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("letter", BASES)
def test_one_flag_steps_in_these_traps_and_no_other(letter):
    """Of the flags that step into none anywhere each is tried in two of the launches."""
    base, table, differing = BASES[letter], stepping(), {}
    # whose rows test_lint_refusals.py tries, one by one
    plain = Counter([*(f.id for f in found(base)), *["idle-flag"] * 9])
    for change in changes(base):
        flag = word(change)
        if flag in table or (crc32(flag.encode()) + list(BASES).index(letter)) % 7 < 2:
            now = sorted(Counter(f.id for f in found(base | change)) - plain)
            if now != sorted(table.get(flag, {}).get(letter, [])):
                differing[flag] = now
    assert differing == {}


@pytest.mark.parametrize(
    ("flag", "rules_"), [("mscale", ["idle-flag"]), ("rotary-scaling-factor", ["rope-scaling-of-yarn"])]
)
def test_what_yarn_alone_reads_is_told_beside_llamas_scaling(flag, rules_):
    base = BASES["t"] | {"--use-rope-scaling": True}
    assert [f.id for f in found(base | {f"--{flag}": "0.7"}) if f.id not in {g.id for g in found(base)}] == rules_


def test_every_rule_that_flags_can_step_into_is_in_the_table():
    of_scripts = {"not-the-plan", "not-built"}
    assert TABLE.keys() >= CASES.keys() and TABLE.keys() <= set(rules.BY_ID) - of_scripts


# What our compiler refuses, since Megatron would train something else and say nothing: the rule that tells it of others' launches, or why
# there is none.
OF_OTHERS = {
    "unwindowed-mtp": "window-mtp", "rope-share-odd": "rope-share-odd", "yarn-part-of-a-head": "yarn-share",
    "mla-tensor-without-sequence": "mla-sequence", "gdn-tensor-without-sequence": "gdn-sequence",
    "sequence-without-tensor": "sequence-parallel-off", "expert-groups-top-k": "moe-groups-uneven", "fused-relu-activation": "idle-flag",
    "fused-relu-ungrouped": "idle-flag", "wandb-without-tensorboard": "idle-flag", "compiled-loss-deterministic": "deterministic",
    "graphs-recomputed-dropout": "graphs-recomputed-dropout", "graphs-recomputed-attention": "graphs-recomputed-attention",
    "recompute-up-projection-fsdp": "dsa-fsdp-recompute", "recompute-shared-top-k": "dsa-reuse-recompute",
    "graphs-without-modules": "whole layers are what it means without experts, and beside them Megatron stops",
    "recompute-without-modules": "the description has the module, which is Megatron's default and said in its help",
    "fp8-delayed-evaluations": "so does any run of Megatron's that evaluates with the recipe that is its default",
    "graphs-shared-top-k": "of our DSA alone", "streams-muon": "of our optimizer alone", "value-unread": "of a key without an argument",
    "adapters-expert-bias": "of Bridge's adapters", "answers-mtp": "of Bridge's data", "answers-capacity": "of Bridge's data",
}  # fmt: skip


def test_what_we_refuse_as_silently_wrong_is_told_of_others_launches():
    assert OF_OTHERS.keys() == {law.id for law in book.LAWS if law.category == WRONG}
    assert {told for told in OF_OTHERS.values() if " " not in told} <= rules.BY_ID.keys()


# What one flag changes: flag | launch | words that are new in rows of the description | keys of the nearest recipe, nine at most.
MOVED = [
    line.split(" | ") for line in (Path(__file__).parent / "lint_moved.txt").read_text().splitlines() if line[:1] != "#"
]


@cache
def shown(letter: str, change: str = "") -> tuple[dict[str, str], dict[str, str] | None]:
    """The rows of a launch, and the keys of its nearest recipe as far as they are known before one is composed; None of no model."""
    it = launched(BASES[letter] | (next(asked(change))[0] if change else {}))
    rows = dict(describe.rows(it.args, it.model))
    try:
        keys = recipe._groups(it.args, it.model) | flat(recipe._wanted(it.args, it.model, "mine", []), "")
    except (NotKnown, Refused):
        return rows, None
    return rows, {key: str(value) for key, value in keys.items()}


@pytest.mark.parametrize(("change", "letter", "rows", "keys"), MOVED, ids=[row[0] for row in MOVED])
def test_one_flag_moves_these_rows_and_keys(change, letter, rows, keys):
    (was, had), (now, has) = shown(letter), shown(letter, change)
    new = {
        row: "gone"
        if row not in now
        else " ".join([w for w in now[row].split() if w not in was.get(row, "").split()][:7])
        for row in dict.fromkeys([*was, *now])
        if was.get(row) != now.get(row)
    }
    assert "; ".join(f"{row}: {text}" for row, text in new.items()) == rows
    both = dict.fromkeys([*had, *has]) if has is not None else ()
    assert ", ".join([f"{key}={has.get(key)}" for key in both if had.get(key) != has.get(key)][:9]) == keys


def test_every_key_that_a_flag_decides_is_among_them():
    """By the rows of the keys: what `Row.argument` names and no line moves is lost in a recipe made of a launch."""
    arguments = {path + name: config.row(name).argument for path, config in configs() for name in config.model_fields}
    moved = {part.partition("=")[0] for *_, keys in MOVED for part in keys.split(", ")}
    flags = {next(iter(next(asked(change))[0])) for change, *_ in MOVED}
    unmoved = {
        key for key, argument in arguments.items()
        if argument and current().by_dest[argument].name in flags and key not in moved
    }  # fmt: skip
    assert unmoved == set()


# Sizes of a layout, each a prime, and by which of them each width must be divisible.
PRIMES = {"two": 2, "cp": 3, "tp": 5, "etp": 7, "ep": 11, "groups": 13, "mamba_groups": 17, "key_heads": 19}
CUT_BY = {
    "num_attention_heads": ("tp", "groups"), "hidden_size": (*PRIMES,), "mamba_num_heads": ("tp", "cp", "mamba_groups"),
    "mamba_num_groups": ("tp",), "linear_num_key_heads": ("tp", "cp"), "linear_num_value_heads": ("tp", "cp", "key_heads"),
    "tensor_parallel_num_weight_shards": ("tp",), "expert_tensor_parallel_num_weight_shards": ("etp",), "ffn_hidden_size": ("tp",),
    "moe_ffn_hidden_size": ("etp",), "num_experts": ("ep",), "seq_length": ("tp", "cp", "two"), "num_query_groups": ("tp",),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT_BY)
def test_a_width_is_held_against_every_size_that_cuts_it_and_no_other(name):
    def blamed(without: int = 1) -> set[str]:
        whole = math.prod(PRIMES.values())
        width = dict.fromkeys(CUT_BY, whole) | {
            "mamba_num_groups": 3 * 5 * 17,
            "linear_num_key_heads": 3 * 5 * 19,
            "num_query_groups": 5 * 13,
        }
        width[name] //= math.gcd(width[name], without)
        a = SimpleNamespace(
            **width, group_query_attention=True, said=lambda _: False, launch=SimpleNamespace(words=()), written=str
        )
        m = SimpleNamespace(
            **{size: PRIMES[size] for size in ("tp", "cp", "etp", "ep")}, kinds={"attention", "mlp"}, mamba=True, moe=True,
            variant="gated_delta_net", sequence_parallel=True, heads=a.num_attention_heads, groups=a.num_query_groups,
            mamba_heads=a.mamba_num_heads, ffn=a.ffn_hidden_size, moe_ffn=a.moe_ffn_hidden_size,
        )  # fmt: skip
        return {said.partition("\t")[0] for said in layout._indivisible(a, m)}

    assert blamed() == set()
    cutting = {size for size, prime in PRIMES.items() if name in blamed(prime)}
    assert cutting == set(CUT_BY[name])


def test_which_heads_a_kernel_of_sparse_attention_takes():
    takes = {"cudnn": {16, 32, 64, 128, 192, 256}, "tilelang": {16, 32, 64, 128, 256}}
    for (backend, fine), each in itertools.product(takes.items(), (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)):
        for tp in (1, 2):
            a = SimpleNamespace(kv_lora_rank=512, qk_pos_emb_head_dim=64, dsa_kernel_backend=backend)
            assert sparse._kernel_declines(a, SimpleNamespace(heads=each * tp, tp=tp)) == (each not in fine), (
                backend,
                each,
            )


def test_layers_for_inference_refuse_each_of_what_they_lack():
    plain = {
        "transformer_impl": "inference_optimized", "normalization": "RMSNorm", "layernorm_zero_centered_gamma": False,
        "add_bias_linear": False, "add_qkv_bias": False, "moe_router_dtype": "fp32", "moe_expert_capacity_factor": None,
        "gated": False, "etp": 1,
    }  # fmt: skip
    always = {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "add_bias_linear": True,
        "add_qkv_bias": True,
    }
    routed = {"gated": True, "etp": 2, "moe_router_dtype": None, "moe_expert_capacity_factor": 1.0}
    for experts, (key, value) in itertools.product((None, 8), [(None, None), *always.items(), *routed.items()]):
        said = SimpleNamespace(**plain | {"num_experts": experts, str(key): value})
        assert rules.layers._inference(said, said) == (key in always or bool(experts and key in routed)), (experts, key)
        said.transformer_impl = "transformer_engine"
        assert not rules.layers._inference(said, said)


def test_chunks_of_recompute_part_a_group_where_one_begins_within_it():
    """Layers 3 to 6 share what layer 3 computes; of several stages each counts its chunks anew, and is not asked where it begins."""
    m = SimpleNamespace(dsa_layers=range(1, 7), topk_source=lambda n: min(n, 3))
    for method, size, pp in itertools.product(("uniform", "block"), (None, 1, 2, 3, 4, 6), (1, 2)):
        begun = range(1, 7, size or 1)
        parted = method != "uniform" or pp > 1 or bool({4, 5, 6}.intersection(begun))
        m.pp, a = pp, SimpleNamespace(recompute_num_layers=size, recompute_method=method)
        assert sparse._recompute_parts_group(a, m) == parted, (method, size, pp)


def test_experts_are_alone_where_no_two_ranks_hold_the_same():
    """Each of the dp x tp ranks holds the experts of its place among ep, and of each its part among etp."""
    for dp, tp, ep, etp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        if dp * tp % (ep * etp) == 0:
            held = Counter(rank % (ep * etp) for rank in range(dp * tp))
            a = SimpleNamespace(use_megatron_fsdp=True, calculate_per_token_loss=False, global_batch_size=8 * dp,
                                data_parallel_sharding_strategy="optim_grads")  # fmt: skip
            m = SimpleNamespace(plan=None, moe=True, dp=dp, cp=1, tp=tp, ep=ep, etp=etp, need=lambda _: 1)
            assert training._lone_experts(a, m) == (dp > 1 and {*held.values()} == {1}), (dp, tp, ep, etp)


@pytest.mark.parametrize(
    "said", ["num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", None]
)
def test_layers_are_told_where_no_number_of_them_on_each_stage_makes_the_model(said):
    names = (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        *layout.NOT_WITH_PATTERN,
        *layout.UNEVEN,
    )
    for layers, ranks, by, ends in itertools.product(range(1, 25), (2, 3, 4), (2, 3), ((0, 0), (1, 0), (1, 1))):
        given = (
            dict.fromkeys(names)
            | ({said: by} if said else {})
            | dict(zip(layout.NOT_WITH_PATTERN[-2:], ends, strict=True))
        )
        a = SimpleNamespace(**given, any_said=lambda *_: said is not None)
        m = SimpleNamespace(segments=((),), pp=ranks, num_layers=layers, unrolled_stages=None, pattern=None)
        shared = layers + sum(ends) in {ranks * (by if said else 1) * each for each in range(1, 27)}
        assert [*layout._pipeline(a, m)] == [] if shared else [*layout._pipeline(a, m)], (layers, ranks, by, ends)
