"""Change and drop every flag of a plan, one at a time: verify must object.

python tests/mutate_flags.py [PRESET ...] runs all of them and writes benchmarks/mutation.json; tests/test_verify.py runs a sample.
tests/mutate_code.py changes the programs instead.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from presets import NAMES, lowered

from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering
from nam_megatron.runtime.oracle import Answer, Oracle
from nam_megatron.targets import current
from nam_megatron.verify import UNFINISHED, VERIFIED, verify
from nam_megatron.words.setting import Setting

# Flags whose value decides nothing Megatron keeps: none so far. A name here needs its reason beside it.
EXECUTION_ONLY: dict[str, str] = {}


@dataclass(frozen=True)
class Mutant:
    flag: str
    kind: str  # changed | dropped
    words: tuple[str, ...]


def mutants(lowering: Lowering) -> Iterator[Mutant]:
    """Every emitted flag with another value, and without it. A switch changes by being dropped."""
    spoken = [(s, words) for s in lowering.settings if (words := current().words(s))]
    for i, (setting, words) in enumerate(spoken):
        rest = [[w for _, ws in spoken[:i] for w in ws], [w for _, ws in spoken[i + 1 :] for w in ws]]
        yield Mutant(words[0], "dropped", (*rest[0], *rest[1]))
        if len(words) > 1:
            yield Mutant(words[0], "changed", (*rest[0], words[0], *changed(setting), *rest[1]))


def changed(s: Setting) -> tuple[str, ...]:
    """Another value of the same type, a legal choice where there are choices."""
    flag = current().by_dest[s.name]
    value = s.value[0] if isinstance(s.value, tuple) else s.value
    if s.name == "hybrid_layer_pattern":  # swap the first two layers
        return (value[1] + value[0] + value[2:],)
    if flag.choices:
        return (str(next(c for c in flag.choices if c != value)),)
    if isinstance(value, bool):
        raise AssertionError(s.name)
    if isinstance(value, int):
        return (str(value * 2 or 1),)
    if isinstance(value, float):
        return (str(value * 1.5 or 0.1),)
    if s.name == "cuda_graph_modules":
        return ("attn",)
    return (value + "x",)


def outcome(lowering: Lowering, mutant: Mutant, oracle: Oracle, before: Answer) -> str:
    """killed | equal (the drop leaves every config as it was) | SURVIVED."""
    verdict = verify(lowering, oracle, mutant.words)
    if verdict.word not in (VERIFIED, UNFINISHED):
        return "killed"
    r = lowering.plan.recipe
    after = oracle.ask(mutant.words, r.world_size, r.device.capability, {e.name: e.value for e in lowering.env})
    return "equal" if mutant.kind == "dropped" and after == before else "SURVIVED"


def run(name: str, oracle: Oracle, every: int = 1) -> dict:
    """Counts and survivors of one preset; `every` n-th mutant only."""
    lowering = lowered(name)
    r = lowering.plan.recipe
    before = oracle.ask(argv.argv(lowering), r.world_size, r.device.capability, {e.name: e.value for e in lowering.env})
    assert before.error is None, before.error
    counts: dict[str, dict[str, int]] = {}
    survivors = []
    for mutant in list(mutants(lowering))[::every]:
        if mutant.flag in EXECUTION_ONLY:
            continue
        result = outcome(lowering, mutant, oracle, before)
        counts.setdefault(mutant.kind, {}).setdefault(result, 0)
        counts[mutant.kind][result] += 1
        if result == "SURVIVED":
            survivors.append(f"{mutant.kind} {mutant.flag}")
    return {"counts": counts, "survivors": survivors}


if __name__ == "__main__":
    results = {}
    with Oracle() as warm:
        for preset in sys.argv[1:] or NAMES:
            results[preset] = run(preset, warm)
            print(preset, json.dumps(results[preset]), flush=True)
    if not sys.argv[1:]:
        tree = {"megatron_core": current().pin, "presets": results}
        out = Path(__file__).parent.parent / "benchmarks" / "mutation.json"
        out.write_text(json.dumps(tree, indent=1) + "\n")
