"""What Megatron refuses, lint finds: refusals.txt. And what a flag does nothing without: wants.yaml."""

import re
import shlex
from pathlib import Path

import pytest
from lint_cases import FULL, words
from pairs import BASES, said

from nam_megatron.lint import describe, lint
from nam_megatron.lint.model import Model
from nam_megatron.lint.rules import companions
from nam_megatron.lint.rules.rule import FAIL
from nam_megatron.lint.rules.terms import TRAPS
from nam_megatron.targets import current

LINES = [line for line in (Path(__file__).parent / "refusals.txt").read_text().splitlines() if not line.startswith("#")]
ROWS = [(which, row) for which, rows in companions.WANTS.items() for row in rows]
ROWS += [("traps", {"flags": "", "wants": name, "with": row["when"]}) for name, row in TRAPS.items()]

# What a bare launch must have beside a flag, so that this one does nothing.
BESIDE = {
    "moe_aux_loss_coeff": {"--moe-router-load-balancing-type": "none"}, "recompute_modules": FULL,
    "save_interval": {"--load": "x"}, "vocab_size": {"--tokenizer-type": "SFTTokenizer"}, "mscale": {"--rotary-scaling-factor": "1"},
    "fp8_amax_history_len": {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"}, "fp8_param_gather": {"--use-torch-fsdp2": True},
    "initial_loss_scale": {"--loss-scale": "3"}, "grad_reduce_in_bf16": {"--bf16": None}, "adam_": {"--optimizer": "sgd"},
    "accumulate_allreduce_grads_in_fp32": {"--grad-reduce-in-bf16": True}, "min_lr": {"--lr-decay-style": "constant", "--lr": "9"},
}  # fmt: skip


def launched(base: dict, env: dict[str, str] | None = None):
    script = "pretrain_hybrid.py" if "--hybrid-layer-pattern" in base else "pretrain_gpt.py"
    exports = "".join(f"export {k}={v}\n" for k, v in (env or {}).items())
    return lint(f"{exports}torchrun --nproc-per-node 8 {script} {shlex.join(words(base))}", "case")


@pytest.mark.parametrize("line", LINES)
def test_lint_finds_what_megatron_refuses(line, oracle):
    name, *rest = shlex.split(line)
    env = {word.partition("=")[0]: word.partition("=")[2] for word in rest if re.match("[A-Z_0-9]+=", word)}
    added = re.split(r"(?:^| )(?=-)(?!-?\d)", " ".join(w for w in rest if not re.match("[A-Z_0-9]+=", w)))
    base = dict(BASES[name])
    for flag, _, value in (part.partition(" ") for part in added if part):
        base |= {flag: value or True} if flag.startswith("--") else {f"-{flag}": None}
    found = launched(base, env)
    assert [f.id for f in found.findings if f.severity == FAIL]
    tied = any("parallel-size" in w for w in words(base)) and "fsdp" not in " ".join(words(base))
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "1" if tied else None}
    assert oracle.ask(words(base), 8, (9, 0), connections | env).error is not None


def flags(row: dict) -> list[str]:
    known = current().by_dest
    return [
        n for flag in row["flags"].split() for n in known if n == flag or (flag.endswith("_") and n.startswith(flag))
    ]


@pytest.mark.parametrize(
    ("which", "row"), ROWS, ids=lambda r: r if isinstance(r, str) else f"{r['flags'].partition(' ')[0]}: {r['wants']}"
)
def test_every_name_of_the_table_is_one(which, row):
    known = current().by_dest
    assert all(flag in known or (flag.endswith("_") and flags({"flags": flag})) for flag in row["flags"].split())
    for term in re.split(" or | and ", row["with"]):
        name, right = re.fullmatch(r"(?:not )?(?:said )?(\w+)(?:[=~]\S+|[<>%](\S+))?", term).groups()
        names = [name, right] if right and right[0].isalpha() else [name]
        assert all(n in known or hasattr(Model, n) or hasattr(launched(BASES["gpt"]).model, n) for n in names)


@pytest.mark.parametrize(
    "row", companions.WANTS["idle"] + companions.WANTS["noted"], ids=lambda r: f"{r['flags'].split()[0]}: {r['wants']}"
)
def test_flag_that_does_nothing_is_told_on_a_bare_launch(row):
    beside = BESIDE.get(row["flags"].split()[0], {})
    tried = [base | beside | way for base in BASES.values() for name in flags(row) for way in said(name)]
    made = map(launched, tried)
    if row in companions.WANTS["noted"]:
        assert any(f"wants {row['wants']}" in note for one in made for note in describe.notes(one.args, one.model))
    else:
        speaks = (f.detail for one in made for f in one.findings if f.id == "idle-flag")
        assert any(detail == f"wants {row['wants']}" for detail in speaks)
