"""The command: python -m nam_megatron.translate conf=nam56r"""

import contextlib
import difflib
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf

from nam_megatron import app, report
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import budget
from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.compile.sources import Sources, shown
from nam_megatron.data import indexed
from nam_megatron.errors import INCOMPLETE, OK, Problem, Refused, folded, likely, quoted, raise_if, unwritable
from nam_megatron.features.names import FEATURES
from nam_megatron.laws import book, page
from nam_megatron.recipe import (
    Device,
    Recipe,
    conf_dir,
    config_at,
    device,
    keys_at,
    keys_hint,
    load,
    value_at,
    whole_hint,
)
from nam_megatron.reference import values
from nam_megatron.schema import configs
from nam_megatron.tracker import TRACKER
from nam_megatron.words.regular import irregular
from nam_megatron.words.setting import Config, section
from nam_megatron.words.taken import taken

if TYPE_CHECKING:
    from rich.console import Console

Rows = Iterable[tuple[str, str]]
WHY = 24  # columns of a terminal below which a sentence is no longer read
# What Megatron's layer pattern says, too.
IN_PATTERN = ("model.depth", "model.letters.", "model.substitute", "feature.mtp.depths", "feature.mtp.pattern")
KEYS = ("format", "out", "explain", "diff", "list")
# What `out` writes: the name of each file, its text, and a piece of text by which one of ours is known.
FILES = {
    "args.txt": (argv.lines, "\n# identity: "),
    "run.sh": (argv.run_script, "\n# identity: "),
    "plan.json": (argv.plan_json, '{\n "nam_megatron": '),
}


def task(recipe: Recipe, words: Mapping[str, Any], sources: Sources) -> int:
    """Print what was asked for. The product goes to stdout; notes go to stderr, or stand in the table on a terminal."""
    raise_if(_problems(words))
    form = words["format"]
    if words["list"] is not None:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        sys.stdout.write(listed(LISTS[words["list"]](sources), columns))
        return OK
    if law := book.BY_ID.get(str(words["explain"])):
        sys.stdout.write(_told(law.id, page.explained(law)))
        return OK
    sys.stderr.write(sources.unnamed_preset(recipe.preset.name))
    lowering = translate(recipe)
    p, asked = lowering.plan, words["explain"] is not None or words["diff"] is not None
    piped = not asked and not (form == "auto" and sys.stdout.isatty())
    if p.not_built and (piped or words["out"] is not None):
        for seam in p.not_built:
            sys.stderr.write(
                f"error: {seam.owner} is not built ({seam.missing}): nothing is written that would train without it\n"
            )
        sys.stderr.write("\nhint: `python -m nam_megatron.budget` prices it; `explain=` and `diff=` answer about it\n")
        return INCOMPLETE
    if piped or words["out"] is not None:
        raise_if(indexed.objections(recipe, there=True))  # of the training host's data, where this is it
    if words["out"] is not None:
        write(lowering, Path(str(words["out"])))
    if words["explain"] is not None:
        sys.stdout.write(explain(lowering, str(words["explain"]), sources))
    elif words["diff"] is not None:
        from nam_megatron.judge.diff import diff

        try:
            other = translate(load(str(words["diff"]), sources.search))
        except Refused as refused:
            raise Refused(replace(p, key="diff") for p in refused.problems) from None
        sys.stdout.write(diff(lowering, other))
    elif form == "auto" and sys.stdout.isatty():
        table(lowering)
    elif form != "auto" or words["out"] is None:
        sys.stdout.write(argv.FORMATS["shell" if form == "auto" else form](lowering))
    if piped:
        for line in (*report.tiling(p), *report.notes(p), *report.over_hosts(p), *sources.left_out()):
            if line not in sources.told:
                sys.stderr.write(f"note: {line}\n")
            sources.told.add(line)
    return INCOMPLETE if p.not_built and not asked else OK


def _problems(words: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the command's words, each for itself first."""
    for key, word in words.items():
        if word == "" or (word is not None and type(word) not in (str, int)):
            hint = "put a name into quotes if it needs them"
            yield Problem(f"`{key}` takes one word, not `{word}`", key=key, hint=hint, law="word-malformed")
            return
    form = words["format"]
    if form != "auto" and form not in argv.FORMATS:
        message = f"no format `{form}`"
        yield Problem(message, key="format", hint=f"there are: auto, {', '.join(argv.FORMATS)}", law="format-unknown")
    if words["list"] is not None and words["list"] not in LISTS:
        yield Problem(
            f"cannot list `{words['list']}`",
            key="list",
            hint=(f"did you mean `list={near}`?" if (near := likely(str(words["list"]), LISTS)) else "")
            or f"there are {quoted(f'list={name}' for name in LISTS)}",
            law="list-unknown",
        )
    asked = [key for key in ("list", "explain", "diff") if words[key] is not None]
    if len(asked) > 1:
        said = f"`{asked[0]}` and `{asked[1]}` answer different questions"
        yield Problem(said, key=asked[1], hint="ask one at a time", law="two-questions")
    elif asked and form != "auto":
        yield Problem(
            f"`{asked[0]}` has one form", key="format", hint="leave `format` out", law="answer-without-format"
        )
    elif asked == ["list"] and words["out"] is not None:
        yield Problem("a list is printed, not written", key="out", hint="leave `out` out", law="list-into-files")


def write(lowering: Lowering, folder: Path) -> None:
    """FILES into `folder`, each put in place whole; two writers that mix theirs are caught by the trainer, which compares them.

    Raises:
        Refused: the folder cannot be written to, or holds a file of such a name that is none of ours.
    """
    replaced = []
    parts = {name: folder / f".{name}.{os.getpid()}.part" for name in FILES}
    try:
        raise_if(taken(folder, "out"))
        folder.mkdir(parents=True, exist_ok=True)
        raise_if(irregular((folder / name for name in FILES), "out"))
        for name, (text_of, mark) in FILES.items():
            text, path = text_of(lowering), folder / name
            there = path.read_text(encoding="utf-8", errors="replace") if path.exists() else text
            if mark not in there:
                hint = "name another folder, or take the file away"
                raise Refused(f"`{path}` was not written by `translate`", key="out", hint=hint, law="file-of-others")
            if there != text and path.suffix == ".json" and (folder / TRACKER).exists():
                message = f"`{path}` says what the checkpoints beside it are, and is another plan"
                raise Refused(message, key="out", hint="name another folder", law="file-of-others")
            replaced += [name] if there != text else []
            parts[name].write_text(text, encoding="utf-8")
        parts["run.sh"].chmod(0o755)
        for name, part in parts.items():
            part.replace(folder / name)
    except OSError as err:
        raise Refused(unwritable(folder, err, "out")) from None
    finally:
        with contextlib.suppress(OSError):
            for part in parts.values():
                part.unlink(missing_ok=True)
    if replaced:
        sys.stderr.write(
            f"note: replaced {', '.join(replaced)} in {folder}: of another plan, another version, or edited\n"
        )
    sys.stderr.write(f"wrote {folder}/{', '.join(FILES)}\n")


def explain(lowering: Lowering, name: str, sources: Sources) -> str:
    """Who sets a flag, or what a recipe key is: from which key, file and line, why, and what Megatron is told."""
    if name.split(".")[0] in Recipe.model_fields and not name.startswith("-"):
        return explain_key(lowering, name, sources)
    asked, name = name, name if name.startswith("-") else "--" + name.replace("_", "-")
    target = lowering.target
    if name == argv.MARKER:
        return _told(name, _marked(lowering))
    flag = target.by_name(name)
    if flag is None:
        close = difflib.get_close_matches(name, target.flags, 1)
        near = (
            f"did you mean `{close[0]}`?" if close else "a recipe key is written with its section: `explain=optim.lr`"
        )
        hint = whole_hint([asked]) or near
        raise Refused(f"Megatron {target.pin} has no flag `{name}`", key="explain", hint=hint, law="flag-unknown")
    s = lowering.by_name.get(flag.dest)
    if s is None:
        said = f"{flag.name}\n  not set by this recipe; Megatron's default is {_held(flag.default)}\n"
        return said + (f"  why: {why} (docs/articles.md)\n" if (why := unset().get(flag.name)) else "")
    shown = " ".join(target.words(s)) or f"(no word needed for {_held(s.value)})"
    set_by = f"{s.key} @ {sources.where(s.key)}" if s.key else f"pinned by {s.owner}"
    rows = {"says": shown, "owner": s.owner, "set": set_by, "why": s.why}
    rows["default"] = f"{_held(flag.default)} in Megatron {target.pin}"
    return _told(flag.name, rows)


def unset() -> Mapping[str, str]:
    """Flags that no recipe sets, and why."""
    found = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("unset.yaml")))
    return {str(name): str(why) for name, why in found.items()} if isinstance(found, dict) else {}


def _held(value: Any) -> str:
    """A value as Megatron holds it; a list as one is written."""
    return shown(value) if isinstance(value, (list, tuple)) else repr(value)


def _marked(lowering: Lowering) -> Mapping[str, str]:
    """Of the one argument that is ours."""
    says = " ".join(argv.marker(lowering)) or "nothing: stock Megatron trains these arguments as they are meant"
    return {
        "says": says,
        "why": "stock Megatron would train another model on these arguments, or fail; it has no such flag and stops",
        "kind": "our trainer's own: what only it trains, and a digest of their keys; compared with plan.json",
    }


def explain_key(lowering: Lowering, key: str, sources: Sources) -> str:
    """What a recipe key is, its value here, and every setting that it decides."""
    *parents, last = key.split(".")
    config = config_at(parents)
    if config is None or last not in config.model_fields:
        close = likely(last, keys_at(parents))
        near = f"did you mean `{'.'.join((*parents, close))}`?" if close else keys_hint(parents)
        meant = whole_hint([key]) or near
        raise Refused(f"there is no key `{key}`", key="explain", hint=meant, law="key-unknown")
    row = config.row(last)
    recipe = lowering.plan.recipe
    stands = all(value_at(recipe, ".".join(parents[: i + 1])) is not None for i in range(len(parents)))
    here = value_at(recipe, key)
    if section(config.model_fields[last].annotation):
        here = getattr(here, "name", "on") if here is not None else "does not stand here"
    elif not stands or (here is None and not config.model_fields[last].is_required()):
        here = "does not stand here: nothing reads it in this plan"
    rows = {"is": row.doc, "here": shown(here)}
    by_lane = getattr(recipe.lane.blocks, last, None) if parents == ["model", "letters"] else None
    if by_lane and by_lane != here:
        rows["here"] += f"; lane `{recipe.lane.name}` puts `{by_lane}` there"
    if place := sources.where(key, or_above=False):
        rows["set"] = place
    by = (key, "model.pattern") if key.startswith(IN_PATTERN) else (key,)
    told = [
        " ".join(lowering.target.words(s)) or f"{s.name}={_held(s.value)}, without a word"
        for s in lowering.settings
        if s.key in by
    ]
    rows["says"] = "; ".join(told) or "nothing to Megatron: it is read from plan.json, or by the commands"
    rows["kind"] = (
        f"executes: {row.executes}" if row.executes else "computes: another value is another model or training"
    )
    return _told(key, rows)


def _told(title: str, rows: Mapping[str, str]) -> str:
    return f"{title}\n" + "".join(f"  {name:<7} {text}\n" for name, text in rows.items())


def presets(sources: Sources) -> Rows:
    """Every preset, those of one's own folders too, with the GPUs that it fits; one that cannot be read says why."""
    paths = list(sources.files("preset"))
    context = get_context("fork")  # Hydra takes some 0.4 s for each
    with ProcessPoolExecutor(None, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        for path, said in zip(paths, pool.map(partial(_preset, sources.search), paths), strict=True):
            yield path.stem, said + _whose(path, sources)


def _preset(search: Sequence[str], path: Path) -> str:
    try:
        recipe = load(path.stem, search)
        found = recipe.preset
        return f"alias of {found.alias_of}" if found.alias_of else f"{found.about}; {fits(recipe, devices())}"
    except Refused as refused:
        return f"refused: {refused.problems[0].message}"


def devices() -> list[Device]:
    """The GPUs that conf/device describes."""
    return [device(path) for path in sorted((conf_dir() / "device").glob("*.yaml"))]


def fits(recipe: Recipe, known: Iterable[Device]) -> str:
    """Which GPUs have room for a plan with the hosts and the layout that its recipe names, by the budget."""
    budgets = {d.name: budget(translate(recipe.model_copy(update={"device": d})).plan) for d in known}
    room = [name + ("" if b.roomy else " (barely)") for name, b in budgets.items() if b.fits]
    said = ("fits", room) if room else ("too large for", [*budgets])
    return f"{said[0]} {recipe.world_size} x {' or '.join(said[1])}"


def overlays(sources: Sources) -> Rows:
    """Every file to lay over a preset."""
    return ((path.stem, _comment(path) + _whose(path, sources)) for path in sources.files("overlay"))


def lanes(sources: Sources) -> Rows:
    """Every lane, and what it gives up."""
    return ((path.stem, _comment(path) + _whose(path, sources)) for path in sources.files("lane"))


def clusters(sources: Sources) -> Rows:
    """Every cluster: hosts and GPUs."""
    for path in sources.files("cluster"):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        said = f"{tree.get('nodes')} x {tree.get('gpus_per_node')} {str(tree.get('processor', 'gpu')).upper()}s"
        yield path.stem, ": ".join(filter(None, (said, _comment(path)))) + _whose(path, sources)


def kinds(sources: Sources) -> Rows:
    """Every kind of layer: the letters at which it may stand, Megatron's symbol, and what it is."""
    for name, block in KINDS.items():
        yield (
            name,
            f"at {' or '.join(block.letters)}, Megatron's {block.symbol}: {_first(block)}{_built(block.missing)}",
        )


def features(sources: Sources) -> Rows:
    """Every feature, by the key that switches it on."""
    for name, feature in FEATURES.items():
        yield f"feature.{name}.{feature.switch}", _first(feature) + _built(feature.missing)


def keys(sources: Sources) -> Rows:
    """Every key of a recipe and what it takes; `explain=KEY` says more."""
    for path, config in configs():
        for name, field in config.model_fields.items():
            if not section(field.annotation):
                yield path + name, f"{config.row(name).doc} ({values(field.annotation)})"


def laws(sources: Sources) -> Rows:
    """Every law by its id; `explain=ID` says more."""
    return ((law.id, f"{law.category}: {law.stated}") for law in book.EVERY)


def _comment(path: Path) -> str:
    """The first sentence of a file's comment."""
    head = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    said = " ".join(line[2:] for line in head if not line.startswith(("# @package", "# yaml-language-server")))
    return said.split(". ")[0].removesuffix(".")


def _first(config: type[Config]) -> str:
    return (config.__doc__ or "").partition("\n")[0].removesuffix(".")


def _built(missing: str | None) -> str:
    return f" (not built: {missing})" if missing else ""


def _whose(path: Path, sources: Sources) -> str:
    """The folder of a file that is not the library's."""
    return next((f" ({folder})" for folder in sources.own if path.is_relative_to(folder)), "")


LISTS = {listing.__name__: listing for listing in (presets, overlays, lanes, clusters, kinds, features, keys, laws)}


def listed(rows: Rows, columns: int | None = None) -> str:
    """One line each, in two columns. columns: of a terminal, on which the second one folds between words."""
    found = list(rows)
    width = max(len(name) for name, _ in found)
    if columns is None or columns - width - 2 < WHY:
        return "".join(f"{name:<{width}}  {said}\n" for name, said in found)
    blank = " " * (width + 2)
    return "".join(folded(f"{name:<{width}}  ", said, blank, columns) for name, said in found)


def table(lowering: Lowering) -> None:
    """The layer strip, the totals and every setting by owner, in colour where the terminal has it."""
    from rich.console import Console
    from rich.text import Text

    p, out = lowering.plan, Console(highlight=False)
    title, *rest = report.header(lowering)
    out.print(Text(title, "bold"))
    for line in rest:
        out.print(
            Text(
                line,
                "bold red"
                if line.startswith("NOT BUILT")
                else "yellow"
                if line.startswith(("gives up", "departs", "only nam"))
                else "dim",
            )
        )
    ruler, letters, symbols, marks = report.strip(p)
    kinds = iter(p.layers)
    columns = [None if c == "|" else next(kinds).kind for c in letters]
    out.print()
    width = max(out.width - 2, 20)
    for start in range(0, len(letters), width):  # a narrow terminal folds the strip, its rows together
        piece = slice(start, start + width)
        out.print(Text(ruler[piece], "dim"), no_wrap=True)
        for row in filter(None, (letters, symbols, marks)):
            out.print(
                Text.assemble(
                    *((c, KINDS[k].colour if k else "white") for c, k in zip(row[piece], columns[piece], strict=True))
                ),
                no_wrap=True,
            )
    out.print(Text(p.pattern, "dim"))
    for kind in KINDS:
        if numbers := p.numbers(kind):
            name = p.site.blocks.of(kind).called(p.site)
            out.print(Text(f"{name:<8} {len(numbers):>3}  {', '.join(map(str, numbers))}", KINDS[kind].colour))
    for name, numbers in p.variants.items():
        out.print(f"{name}: layers {', '.join(map(str, numbers))}")
    out.print()
    settings(out, lowering)
    for env in lowering.env:
        out.print(
            Text(f"environment: {env.name}{'=' + env.value if env.value is not None else ' unset'}  ({env.why})", "dim")
        )


def settings(out: "Console", lowering: Lowering) -> None:
    """Every setting by owner: in columns where names and keys fit whole, else below one another, as a broken one cannot be searched for."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    said = {s.name: " ".join(lowering.target.words(s)) for s in lowering.settings}
    shown = {s.name: said[s.name] or f"{s.name} = {s.value}" for s in lowering.settings}
    owner_width, key_width, name_width, whole = (
        max(map(len, column))
        for column in (
            [s.owner for s in lowering.settings],
            [s.key or "" for s in lowering.settings],
            [text.split()[0] for text in shown.values()],  # a value may fold: a pattern is as long as the model is deep
            shown.values(),
        )
    )
    left = out.width - owner_width - key_width - WHY - 6  # two blanks after each column
    wide = min(whole, max(name_width, (left + WHY) // 2))
    grid = Table(box=None, pad_edge=False, header_style="bold") if left >= name_width else None
    if grid:
        for column, width in (("owner", owner_width), ("argument", wide), ("key", key_width), ("why", None)):
            grid.add_column(column, overflow="fold", width=width)
    for owner, group in groupby(lowering.settings, key=lambda s: s.owner):
        for i, s in enumerate(group):
            argument = Text(shown[s.name], "" if said[s.name] else "dim")
            if grid:
                grid.add_row("" if i else Text(owner, "bold"), argument, Text(s.key or "", "dim"), Text(s.why, "dim"))
                continue
            if not i:
                out.print(Text(owner, "bold"))
            out.print(Padding(argument, (0, 0, 0, 2), expand=False))
            out.print(Padding(Text(f"{s.key}: {s.why}" if s.key else s.why, "dim"), (0, 0, 0, 6), expand=False))
    if grid:
        out.print(grid)


def main() -> None:
    app.run("translate", KEYS, task)


if __name__ == "__main__":
    main()
