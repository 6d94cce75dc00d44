"""The command: python -m nam_megatron.budget conf=nam56r"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import ListConfig

from nam_megatron import app, report
from nam_megatron.budget import container, picture, search, text
from nam_megatron.budget.cost import cost
from nam_megatron.budget.memory import Budget, budget
from nam_megatron.budget.serving import serve
from nam_megatron.compile.lower import translate
from nam_megatron.compile.sources import Sources
from nam_megatron.errors import FINDINGS, OK, Problem, Refused, finish, raise_if
from nam_megatron.launcher import called
from nam_megatron.recipe import Recipe, load

if TYPE_CHECKING:
    from rich.console import Console

MOST_RANKS = 10**6
KEYS = ("format", "against", "fit", "sweep", "plot", "serve", "batch", "context", "page", "imbalance")
FORMATS = ("auto", "table", "lines", "json")
FIT = "`fit=micro_batch_size` searches the largest that fits; "
MORE = "on more GPUs (`cluster=NAME`) {} deals the model out"
FURTHER = "{} deals the model out, a larger `parallel.{}` further; so do more GPUs (`cluster=NAME`)"
SERVING = ("batch", "context", "page")
# The forms that each question has beside `auto`.
VIEWS = {"sweep": ("table",), "fit": (), "against": ("table", "lines"), "serve": ("table", "json")}


def task(recipe: Recipe, words: Mapping[str, Any], sources: Sources) -> int:
    """Print what was asked for: the product to stdout, notes to stderr. 1 if it does not fit."""
    raise_if(_problems(words))
    sys.stderr.write(sources.unnamed_preset(recipe.preset.name))
    target = picture.check(words["plot"]) if words["plot"] else None
    imbalance = float(words["imbalance"])
    if words["sweep"]:
        return _sweep(recipe, words["sweep"], target, imbalance)
    if words["fit"]:
        return _fit(recipe, words["fit"], imbalance)
    plan = translate(recipe).plan
    sys.stderr.writelines(f"note: {line}\n" for line in report.denied(plan))
    ours = budget(plan, imbalance)
    if words["serve"]:
        return _serve(ours, words)
    others = [budget(_other(name), imbalance) for name in _names(words["against"])]
    if target:
        picture.draw([ours, *others], target)
        sys.stderr.write(f"wrote {target}\n")
    _show(ours, others, words["format"])
    if ours.fits and not ours.roomy:
        sys.stderr.write(f"warning: {text.verdict(ours)}\n")
    if not ours.fits:
        overlays, ranks = "`+overlay=tp_sp`", "tensor"
        if recipe.blocks.moe:
            overlays, ranks = "one of `+overlay=ep`, `+overlay=tp_sp` and `+overlay=fsdp_ep`", "expert"
        ways = (FURTHER if recipe.world_size > 1 else MORE).format(overlays, ranks)
        ways = ways if recipe.schedule.micro_batch_size == 1 else FIT + ways
        sys.stderr.write(called(f"{text.verdict(ours)}\nhint: {ways}\n"))
    return OK if ours.fits else FINDINGS


def _problems(words: Mapping[str, Any]):
    def number(key: str, low: int) -> Problem | None:
        value = words[key]
        good = value is None or (type(value) is int and value >= low)
        return None if good else Problem(f"`{key}` takes an integer of at least {low}, not `{value}`", key=key)

    if words["format"] not in FORMATS:
        yield Problem(f"no format `{words['format']}`", key="format", hint=f"there are: {', '.join(FORMATS)}")
    for key in ("fit", "sweep", "plot"):
        if words[key] is not None and (not isinstance(words[key], str) or not words[key]):
            yield Problem(f"`{key}` takes one word, not `{words[key]}`", key=key)
    names = words["against"]
    if names is not None and (not names or not all(isinstance(n, str) and n for n in _names(names))):
        message = f"`against` takes names of presets, not `{names}`"
        yield Problem(message, key="against", hint="`translate list=presets` lists them")
    if not isinstance(words["serve"], bool):
        yield Problem(f"`serve` is true or false, not `{words['serve']}`", key="serve")
    yield from filter(None, (number(key, 1) for key in SERVING))
    if (
        not isinstance(words["imbalance"], (int, float))
        or isinstance(words["imbalance"], bool)
        or not 1 <= words["imbalance"] <= MOST_RANKS  # where one has the rows of all
    ):
        said = f"`imbalance` is the busiest rank over the mean, from 1 to {MOST_RANKS}, not `{words['imbalance']}`"
        yield Problem(said, key="imbalance")
    if words["serve"] is False:
        for key in SERVING:
            if words[key] is not None:
                yield Problem(f"`{key}` belongs to serving", key=key, hint="add `serve=true`")
    views = [key for key in VIEWS if words[key]]
    if len(views) > 1:
        hint = "ask one at a time"
        yield Problem(f"`{views[0]}` and `{views[1]}` answer different questions", key=views[1], hint=hint)
    elif views and words["format"] in FORMATS and words["format"] not in ("auto", *VIEWS[views[0]]):
        yield Problem(f"`{views[0]}` has no format `{words['format']}`", key="format", hint="leave `format` out")
    if words["plot"] and (words["fit"] or words["serve"]):
        yield Problem("there is nothing to draw of that", key="plot", hint="leave `plot` out")


def _names(against: Any) -> Sequence[Any]:
    return [] if against is None else list(against) if isinstance(against, (list, ListConfig)) else [against]


def _other(name: str):
    """Another preset, overrides behind it: what it asks for is checked like our own."""
    preset, *overrides = name.split()
    try:
        return translate(load(preset, overrides)).plan
    except Refused as refused:
        raise Refused(replace(p, key="against") for p in refused.problems) from None


def _show(ours: Budget, others: Sequence[Budget], form: str) -> None:
    if form == "json":
        sys.stdout.write(text.to_json(text.tree(ours, cost(ours.plan))))
    elif form == "lines":
        sys.stdout.write(text.lines(ours) + "\n" + text.cost_text(cost(ours.plan)))
    elif form == "auto" and sys.stdout.isatty():
        from rich.console import Console

        terminal(ours, others, Console(highlight=False))
        return
    elif not others:
        sys.stdout.write(text.table(ours) + "\n" + text.cost_text(cost(ours.plan)))
    for other in others if form != "json" else ():
        sys.stdout.write(text.against(ours, other))


def terminal(ours: Budget, others: Sequence[Budget], out: "Console") -> None:
    """Bars to the scale of the device, the table, the verdict."""
    from rich.text import Text

    found = picture.bars([ours, *others])
    margin = max(map(len, found))
    for label, buckets in found.items():
        bar = picture.strip(buckets, ours.capacity, max(20, out.width - margin - 22))
        out.print(Text.assemble(f"{label:<{margin}} ", bar), no_wrap=True, overflow="ignore", crop=False)
    legend = Text()
    for bucket in picture.HUES:
        if any(buckets[bucket] for buckets in found.values()):
            legend.append("█ ", picture.HUES[bucket][1]).append(f"{bucket}  ")
    out.print(legend)
    out.print()
    if others:
        for other in others:
            out.print(text.against(ours, other), soft_wrap=True)
    else:
        out.print(text.table(ours), soft_wrap=True)
        out.print(text.cost_text(cost(ours.plan)), soft_wrap=True)
    style = "bold green" if ours.roomy else "bold yellow" if ours.fits else "bold red"
    out.print(Text(text.verdict(ours), style))


def _fit(recipe: Recipe, name: str, imbalance: float) -> int:
    key = search.resolve(recipe, name, "fit")
    translate(recipe)  # what is wrong before anything is changed is said as always
    shrinks = search.shrinks(recipe, key, imbalance)
    find = search.smallest if shrinks else search.largest
    fit = find(recipe, key, imbalance)
    if fit.best is None:
        assert fit.beyond is not None, "a search ends somewhere"
        sys.stdout.write(f"no value of {key} leaves the headroom; {fit.beyond.value}: {_outcome(fit.beyond)}\n")
        if (more := search.attempt(recipe, key, 2 * fit.beyond.value, imbalance)).budget is None:
            sys.stdout.write(f"{key}={more.value}: refused: {more.reason}\n")
        return FINDINGS
    sys.stdout.write(f"{key}={fit.best.value}: {_outcome(fit.best)}\n")
    if fit.best.note:
        sys.stdout.write(f"with {fit.best.note}\n")
        kept = find(recipe, key, imbalance, keep=True).best
        said = f"{key}={kept.value}: {_outcome(kept)}" if kept else f"no value of {key} fits"
        sys.stdout.write(f"{said}, with the global batch of {recipe.schedule.global_batch_size} as it is\n")
    if fit.beyond is None:
        sys.stdout.write(
            "more of it needs less; no smaller one is taken\n" if shrinks else "memory sets no limit to it\n"
        )
    else:
        word = "refused: " if fit.beyond.budget is None else ""
        sys.stdout.write(f"{key}={fit.beyond.value}: {word}{_outcome(fit.beyond)}\n")
    return OK


def _outcome(trial: search.Trial) -> str:
    return trial.reason if trial.budget is None else text.verdict(trial.budget)


def _sweep(recipe: Recipe, words: str, target: Path | None, imbalance: float) -> int:
    from rich.console import Console
    from rich.progress import track

    name, points = search.values(words)
    key = search.resolve(recipe, name, "sweep")
    trials = search.sweep(recipe, key, points, imbalance)
    console = Console(stderr=True)
    seen = list(
        track(trials, f"{key}", total=len(points), console=console, transient=True, disable=not console.is_terminal)
    )
    rows = [(key, "GiB allocated", "in use", "free", "verdict")]
    for t in seen:
        if t.budget is None:
            rows.append((str(t.value), "", "", "", f"refused: {t.reason}"))
            continue
        worst = t.budget.worst
        word = "fits" if t.budget.roomy else "fits, without the headroom" if t.budget.fits else "does not fit"
        sizes = text.gib(worst.steady.allocated), text.gib(worst.worst.total), text.gib(t.budget.free)
        rows.append((str(t.value), *sizes, f"{word}{'; ' + t.note if t.note else ''}"))
    if not any(t.budget for t in seen):
        raise Refused(f"every value of {key} is refused: {seen[0].reason}", key="sweep")
    sys.stdout.write(text.grid(rows, right=(0, 1, 2, 3)))
    if target:
        picture.draw_sweep(key, seen, target)
        sys.stderr.write(f"wrote {target}\n")
    return OK


def _serve(ours: Budget, words: Mapping[str, Any]) -> int:
    context = words["context"] or ours.plan.recipe.model.seq_length
    stages = serve(ours.plan, words["batch"] or 1, context, words["page"])
    if words["format"] == "json":
        sys.stdout.write(text.to_json(text.tree(ours, cost(ours.plan), stages)))
    else:
        sys.stdout.write(text.serving_text(stages))
    return OK if all(s.fits("paged") for s in stages) else FINDINGS


def main() -> None:
    finish(lambda: _run(sys.argv[1:]))


def _run(words: Sequence[str]) -> NoReturn:
    conf = next((word for word in words if word.startswith("conf=")), "")
    if at := app.published(conf.removeprefix("conf=")):  # it says nothing of a training, and memory has no use for that
        words = [str(at), *(word for word in words if word != conf)]
    if not container.is_file(words):
        command()
    container.run(words, command)


def command() -> NoReturn:
    app.run("budget", KEYS, task)


if __name__ == "__main__":
    main()
