"""Flags that one condition of Megatron reads together, two at a time: does lint say what Megatron's own parser and configs say?

    python tests/pairs.py [BASE ...] [count=1000] [seed=0]

BASE: a clean launch of BASES. Each refusal that lint has no word of, and each `will fail` that Megatron takes, once, with the first
pair that shows it. Nothing else is drawn: two flags that no `if` of Megatron's has in one piece are seldom refused for each other.
"""

import ast
import random
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path

from lint_cases import DSA, FSDP, GPT, HYBRID, LATER, MLA, MOE, SHARDED, words

from nam_megatron.lint import lint
from nam_megatron.lint.rules.rule import FAIL
from nam_megatron.runtime.oracle import Oracle
from nam_megatron.targets import current

SOURCES = (
    "training/arguments.py", "training/argument_utils.py", "core/transformer/transformer_config.py", "core/model_parallel_config.py",
    "core/optimizer/optimizer_config.py", "core/distributed/distributed_data_parallel_config.py",
)  # fmt: skip
PARALLEL = {"--expert-model-parallel-size": "8", "--use-distributed-optimizer": True}
BASES = {
    "gpt": GPT | {"--use-distributed-optimizer": True},
    "hybrid": HYBRID,
    "moe": MOE | PARALLEL,
    "mla": MLA,
    "dsa": DSA,
    "fsdp": FSDP | SHARDED,
}
# Of a type, or of a flag of its own: what it is given. Of a choice: all.
VALUES = {"int": ("2",), "float": ("0.5",), "str": ("x",), "None": ("x",), "bool": ("true",)}
OWN = {
    "recompute_modules": ("moe", "core_attn", "mla_up_proj", "layernorm", "mlp", "moe_act", "shared_experts"),
    "cuda_graph_modules": ("attn", "moe_router", "mlp"), "fp8_recipe": ("delayed", "tensorwise", "mxfp8", "blockwise"),
    "moe_router_load_balancing_type": ("none", "sinkhorn", "seq_aux_loss", "global_aux_loss"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion"),
    "pipeline_model_parallel_size": ("2", "4"), "tensor_model_parallel_size": ("2", "3"), "context_parallel_size": ("2",),
    "expert_model_parallel_size": ("1", "2"), "num_query_groups": ("4", "3"),
}  # fmt: skip
# What they name is looked for on a disk or a network, or they end the process.
LEFT = re.compile(
    r"data_path|tokenizer|load|save|yaml|config|spec|export|help|rank$|local|wandb|tensorboard|profile|log|path|dir|file|url"
)
# What this host lacks, not the launch.
HERE = re.compile(r"CUDA device|not found|is required|requires FlashInfer|not installed")


def together() -> set[tuple[str, str]]:
    """Names of arguments that stand in one `if` or `assert` of Megatron's checks, its inner ones' conditions included."""
    known = {flag.dest for flag in current().flags.values()}
    found = set()
    (root,) = find_spec("megatron").submodule_search_locations
    for name in SOURCES:
        tree = ast.parse(Path(root, name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.If, ast.Assert)):
                # Not what stands below an `else`, nor a body of a hundred lines.
                body = node.body if isinstance(node, ast.If) else []
                parts = [node.test, *(b for b in body if len(body) < 8)]
                names = {n.attr for part in parts for n in ast.walk(part) if isinstance(n, ast.Attribute)} & known
                found |= {tuple(sorted(pair)) for pair in combinations(names, 2)} if len(names) < 9 else set()
    return found


def said(dest: str) -> list[dict[str, object]]:
    """Ways to give an argument that is not what it is by itself."""
    flag = current().by_dest[dest]
    if flag.action in ("store_true", "store_false"):
        return [{flag.name: True}]
    if flag.action == "boolean":
        return [{flag.name: True}, {f"--no-{flag.name[2:]}": True}]
    values = OWN.get(dest) or [str(c) for c in flag.choices or ()] or VALUES.get(str(flag.type), ("2",))
    return [{flag.name: value} for value in values if value != str(flag.default)]


def pairs(seed: int) -> list[dict[str, object]]:
    """Every way to give every two of them, in an order of its own for each seed."""
    names = [pair for pair in sorted(together()) if not any(LEFT.search(name) for name in pair)]
    ways = [one | other for a, b in names for one, other in product(said(a), said(b))]
    random.Random(seed).shuffle(ways)
    return ways


def tried(base: dict, change: dict, oracle: Oracle) -> tuple[str | None, list[str]]:
    """(why Megatron refuses it, rules of lint by which it will fail)."""
    line = words(base | change)
    script = "pretrain_hybrid.py" if "--hybrid-layer-pattern" in base else "pretrain_gpt.py"
    report = lint(f"torchrun --nproc-per-node 8 {script} {shlex.join(line)}", "pair")
    one = "1" if any("parallel-size" in w for w in line) and "--use-megatron-fsdp" not in line else None
    answer = oracle.ask(line, 8, (9, 0), {"CUDA_DEVICE_MAX_CONNECTIONS": one})
    return answer.error, [f.id for f in report.findings if f.severity == FAIL and f.id not in LATER]


def disagreements(asked: list[str]) -> Iterator[tuple[str, str, str]]:
    """(kind, what, the base and the pair that show it first)."""
    options = {k: int(v) for k, _, v in (w.partition("=") for w in asked if "=" in w)}
    names = [w for w in asked if "=" not in w] or list(BASES)
    ways, seen = pairs(options.get("seed", 0))[: options.get("count", 1 << 30)], set()
    with Oracle() as oracle:
        for change, name in product(ways, names):
            error, rules = tried(BASES[name], change, oracle)
            if error and HERE.search(error):
                continue
            kind = "silent" if error and not rules else "false" if rules and not error else None
            what = re.sub(r"\d+|'[^']*'", "_", error or "") if kind == "silent" else " ".join(sorted(set(rules)))
            if kind and (kind, what) not in seen:
                seen.add((kind, what))
                yield kind, error or what, f"{name}: {shlex.join(words(change))}"


def main(asked: list[str]) -> int:
    found = 0
    for kind, what, where in disagreements(asked):
        found += 1
        print(f"{kind}: {what}\n    {where}", flush=True)
    print(f"{found} disagreements")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
