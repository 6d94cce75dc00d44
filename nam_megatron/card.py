"""nam card NAME: what has been shown of a preset, and by which file of this repository; `nam card all` is the page docs/cards.md

`nam card all format=json` is docs/cards.json, from which an installed package, which has no such files, says the same.

Each check is *shown*, by a receipt or a file in benchmarks/, or *not shown*. A file of a smaller model of the preset says how small.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from nam_megatron.errors import OK, Refused, counted, finish, likely
from nam_megatron.recipe import conf_dir, load

REPOSITORY = Path(__file__).parent.parent
SHIPPED = Path(__file__).with_name("cards.json")  # in a wheel, which has no records: docs/cards.json
PROOFS = ("prove", "prove_public", "prove_context", "prove_long", "prove_h200")
Row = Mapping[str, Any]


class Shown(NamedTuple):
    """said: what was seen, in a few words. by: the file, relative to the repository."""

    said: str
    by: str


@cache
def benchmark(name: str) -> Any:
    return json.loads((REPOSITORY / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


@cache
def receipts() -> tuple[tuple[str, Row], ...]:
    """(path, receipt) of the published runs on GPUs that came to their end."""
    listed = sorted((REPOSITORY / "receipts").glob("*/receipt.json"))
    read = [(str(path.relative_to(REPOSITORY)), json.loads(path.read_text(encoding="utf-8"))) for path in listed]
    return tuple((path, run) for path, run in read if _published(run))


def _published(run: Row) -> bool:
    cluster = run.get("recipe", {}).get("cluster", {})
    return run["state"] == "sealed" and run["outcome"]["end"] == "completed" and cluster.get("processor") != "cpu"


def proofs(name: str) -> Iterator[tuple[str, Row]]:
    for file in PROOFS:
        yield from ((file, row) for row in benchmark(file) if row["preset"] == name and row["verdict"] == "proven")


def convert(name: str) -> Shown | None:
    row = next((row for row in benchmark("exports") if row["preset"] == name and row.get("import")), None)
    return row and Shown(
        f"an export comes back as the same weights, `{row['pattern']}` with widths cut", "benchmarks/exports.json"
    )


def verify(name: str) -> Shown | None:
    if not name.startswith("nam"):  # a public model's: the test takes them all
        return Shown("Megatron's parser and configs agree, in every run of the tests", "tests/test_public.py")
    row = benchmark("mutation")["presets"].get(name)
    if row is None or row["survivors"]:
        return None
    seen = sum(count.get("killed", 0) for count in row["counts"].values())
    return Shown(f"each of {seen} changed arguments is noticed", "benchmarks/mutation.json")


def prove(name: str) -> Shown | None:
    found = list(proofs(name))
    if not found:
        return None
    layouts = sorted({row["overlay"] for _, row in found})
    files = list(dict.fromkeys(f"benchmarks/{file}.json" for file, _ in found))
    most = max(row["ranks"] for _, row in found)
    shortest = sorted(layouts, key=len)[:6]
    more = f" and {len(layouts) - 6} more" if len(layouts) > 6 else ""
    said = f"{counted(len(layouts), 'layout')} of up to {counted(most, 'rank')}: {', '.join(shortest)}{more}"
    return Shown(said, files[0])


def resume(name: str) -> Shown | None:
    """A proof goes on from the other layout's checkpoint, unless it says that it did not."""
    known = [(file, row) for file, row in proofs(name) if "unproven" in row]
    found = [(file, row) for file, row in known if not any("resume" in said for said in row["unproven"])]
    if found:
        return Shown(f"in {len(found)} proofs from another layout's checkpoint", f"benchmarks/{found[0][0]}.json")
    return None


def pretrain(name: str) -> Shown | None:
    found = [(run["outcome"]["figures"]["steps"], path, run) for path, run in whole(name)]
    if not found:
        return None
    count, path, run = max(found, key=lambda one: one[:2])
    figures = run["outcome"]["figures"]
    return Shown(f"{count} steps, loss {figures['loss_first']:.2f} to {figures['loss_last']:.2f}", path)


def performance(name: str) -> Shown | None:
    measured = [
        (mfu, path, run)
        for path, run in whole(name)
        if (mfu := utilisation(run)) and run["outcome"]["figures"]["window"]
    ]
    if not measured:
        return None
    mfu, path, run = max(measured, key=lambda one: one[:2])
    window = run["outcome"]["figures"]["window"]
    gpus = f"{run['job']['world']} {gpu_of(run)}"
    rate = f"{window['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU"
    return Shown(f"{gpus}: {window['median_ms']:,.0f} ms a step, {rate}, {mfu:.1%} of the bf16 peak", path)


def utilisation(run: Row) -> float | None:
    return (run["outcome"].get("against_forecast") or {}).get("model_flops_utilisation")


def gpu_of(run: Row) -> str:
    gpus = (run.get("host") or {}).get("gpus") or [{}]
    return str(gpus[0].get("name", "GPU")).removeprefix("NVIDIA ").split()[0]


def whole(name: str) -> Iterator[tuple[str, Row]]:
    """The runs of the model as large as the preset has it."""
    model = load(name).model
    for path, run in receipts():
        said = run.get("recipe", {})
        if said.get("preset", {}).get("name") == name and said["model"]["depth"] == model.depth:
            yield path, run


def finetune(name: str) -> Shown | None:
    row = next((row for row in benchmark("nemo_h200")["cases"] if row["preset"] == name and "finetune" in row), None)
    return row and Shown(f"{row['name']}", "benchmarks/nemo_h200.json")


def export(name: str) -> Shown | None:
    if trained := next((row for row in benchmark("trained_h200") if row["preset"] == name and "check" in row), None):
        check = trained["check"]
        message = f"after {trained['steps']} steps on a GPU, 13 layers: KL {check['kl']:.1e} to Megatron"
        return Shown(message, "benchmarks/trained_h200.json")
    row = next(
        (row for row in benchmark("exports") if row["preset"] == name and row.get("bf16", {}).get("passed")), None
    )
    said = "the same logits as Megatron, fp32 and bf16, with widths cut"
    return row and Shown(said, "benchmarks/exports.json")


def evaluate(name: str) -> Shown | None:
    row = next((row for row in benchmark("trained_h200") if row["preset"] == name and "perplexity" in row), None)
    return row and Shown("perplexity of an export on held-out text, 13 layers", "benchmarks/trained_h200.json")


CHECKS: dict[str, Callable[[str], Shown | None]] = {
    "convert": convert,
    "verify": verify,
    "prove": prove,
    "pretrain": pretrain,
    "resume": resume,
    "finetune": finetune,
    "export": export,
    "evaluate": evaluate,
    "performance": performance,
}


def shown(preset: str) -> dict[str, Shown | None]:
    """Each check of a preset: read from the records, or in a wheel from what they said when it was built."""
    if SHIPPED.is_file():
        facts = json.loads(SHIPPED.read_text(encoding="utf-8"))[preset]
        return {check: Shown(*facts[check]) if check in facts else None for check in CHECKS}
    return {check: look(preset) for check, look in CHECKS.items()}


def facts() -> str:
    """docs/cards.json, for wheels."""
    every = {name: {check: found for check, found in shown(name).items() if found} for name in originals()}
    return json.dumps(every, indent=1) + "\n"


@cache
def meant(name: str) -> str:
    """The preset that a name stands for: an alias's evidence is its preset's. Raises Refused."""
    names = presets()
    if name not in names:
        close = likely(name, names)
        own = "`nam list presets`; runs of a preset of your own: `nam launch receipts preset=NAME`"
        raise Refused(f"no preset `{name}`", hint=f"did you mean `{close}`?" if close else own)
    return load(name).preset.alias_of or name


def presets() -> list[str]:
    return sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))


def originals() -> list[str]:
    """The presets that are no aliases."""
    return [name for name in presets() if meant(name) == name]


def text(name: str) -> str:
    preset, width = meant(name), max(map(len, CHECKS))
    lines = [f"{name}{f', an alias of {preset}' if preset != name else ''}: {load(preset).preset.about}", ""]
    for check, found in shown(preset).items():
        lines.append(f"{check:<{width}}  " + (f"shown by {found.by}: {found.said}" if found else "not shown"))
    return "\n".join(lines) + "\n"


HEAD = """# What has been shown of each preset

Generated: `nam card all`. Of each check a preset has a file of this repository that shows it, or none. Most proofs and exports are of
the preset with its widths cut, on a CPU; the file says how. `nam card NAME` says what each one is.

"""


def page() -> str:
    rows = [f"| preset | {' | '.join(CHECKS)} |", f"|---|{'---|' * len(CHECKS)}"]
    for name in originals():
        cells = [f"[shown]({LINK}{found.by})" if found else "" for found in shown(name).values()]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return HEAD + "\n".join(rows) + "\n"


LINK = "../"


def command(words: Sequence[str]) -> int:
    if {*words} & {"-h", "--help"}:
        print((__doc__ or "").rstrip())
        return OK
    if [*words] == ["all", "format=json"]:
        sys.stdout.write(facts())
        return OK
    if words[:1] == ["--config-dir"]:  # somebody's own preset, which has no card: its name says so
        words = words[2:]
    if len(words) != 1:
        raise Refused("`card` takes one name", hint="`nam card nam56r_fused`, or `nam card all`")
    sys.stdout.write(page() if words[0] == "all" else text(words[0]))
    return OK


if __name__ == "__main__":
    finish(lambda: command(sys.argv[1:]))
