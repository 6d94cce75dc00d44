"""`launch report [RUN ...] [out=FILE]`: one HTML page of a run, by itself of the newest, or of several that may be compared.

What ran and what was given up, the strip of layers, figures, loss, gradient norm and step time, memory against the forecast, where the
time went, kernels by kind where there is a `kernels.json` (`python benchmarks/kernels.py TRACE > RUN/kernels.json`), and every setting.
Several runs are put on one page under the rule of `launch compare`; `--anyway` does it all the same and says so on the page.
The page holds words of the receipts and numbers of the events, so it may go where the receipts may go.
"""

import contextlib
import html
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.record import compare, events, outcome, steps
from launch.record.receipt import FIRST, KERNELS, LOG, folders, kept_of, named, read
from launch.record.receipts import RECEIPTS
from launch.run.terminal import printable
from nam_megatron import migrate
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import OK, Refused, raise_if
from nam_megatron.events import FILE
from nam_megatron.recipe import at
from nam_megatron.rehearsal import NOTE
from nam_megatron.words.regular import irregular
from nam_megatron.words.taken import taken
from nam_megatron.words.whole import write_whole

MADE_BY = '<meta name="generator" content="nam_megatron launch report">'
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 220, 64, 12, 10, 28
POINTS = 600  # of a line; of more, each is the mean of its neighbours
STYLE = """
:root{--ink:#1c2733;--dim:#5c6b7a;--rule:#dde3e9;--page:#fff;--card:#f6f8fa;--bad:#b3261e;--s0:#1f6feb;--s1:#d9480f;--s2:#2b8a3e;--s3:#9c36b5;
--s4:#0b7285;--s5:#846300;--other:#8b98a5}
@media(prefers-color-scheme:dark){:root{--ink:#dce3ea;--dim:#93a1b0;--rule:#2c3742;--page:#12181f;--card:#1a222b;--bad:#ff8a80;--s0:#6ea8fe;
--s1:#ff922b;--s2:#69db7c;--s3:#da77f2;--s4:#3bc9db;--s5:#ffd43b}}
*{box-sizing:border-box}body{margin:0 auto;padding:28px 24px 60px;max-width:840px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;margin:34px 0 8px}p{margin:6px 0}.dim{color:var(--dim);font-size:13px}.bad{color:var(--bad)}
.lineage{overflow-wrap:anywhere;font-size:13px;color:var(--dim)}.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(116px,1fr));
gap:10px;margin:16px 0}.tile{background:var(--card);border-radius:8px;padding:10px 14px}.tile b{display:block;font-size:22px;
font-weight:600;
font-variant-numeric:tabular-nums}.tile span{color:var(--dim);font-size:13px}svg{display:block;width:100%;height:auto}
svg text{fill:var(--dim);font:12px system-ui,sans-serif}
svg text.letter{fill:#fff;font-weight:600}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px;
font-variant-numeric:tabular-nums}td,th{text-align:left;padding:3px 10px 3px 0;border-bottom:1px solid var(--rule);vertical-align:top;
overflow-wrap:anywhere}th{color:var(--dim);font-weight:500}td:first-child{color:var(--dim)}details{margin:6px 0}summary{cursor:pointer}
.key{display:inline-block;margin:0 14px 2px 0;font-size:13px}.key i{display:inline-block;width:11px;height:11px;border-radius:3px;
margin-right:5px;vertical-align:-1px}.banner{border:2px solid var(--bad);border-radius:8px;padding:8px 14px;margin:14px 0}
"""


def command(words: Sequence[str], options: Mapping[str, str]) -> int:
    if (anyway := options.get("anyway", "false")) not in ("true", "false"):
        raise Refused(f"`anyway` is true or false, not `{anyway}`")
    found = [named(word, RECEIPTS) for word in words] or newest(RECEIPTS)
    if not found:
        raise Refused(f"there is no run in `{RECEIPTS}`", hint="name the folder of one")
    places = [path.parent if path.is_file() else path for path in found]
    if len(words) != 1:  # none, or what a shell made of `*`
        said = f"a page of {len(places)} runs: " if words else "no run is named; this is the newest: "
        sys.stderr.write(f"note: {said}{', '.join(printable(place.name) for place in places)}\n")
    runs = [Run.read(place) for place in places]
    out = Path(options.get("out") or (places[0] / "report.html" if len(runs) == 1 else "report.html"))
    text = page(runs, anyway == "true")
    put(out, text)
    sys.stderr.write(f"report: {out}\n")
    return OK


def newest(root: Path) -> list[Path]:
    """The run that was sealed last, or a later one that is open. By the chain: a clock that went back gives a later run an earlier name."""
    found, kept = folders(root)[::-1], kept_of(root)
    for folder in found if kept else ():
        with contextlib.suppress(Refused):
            one = read(folder)
            if kept and (one["state"] == "open" or one["seal"] == kept["last"]):
                return [folder]
    return found[:1]


def put(out: Path, text: str) -> None:
    """Write the page, over an earlier one and over nothing else. Raises Refused."""
    raise_if(irregular((out,), "out"))
    try:
        raise_if(taken(out.parent, "out", beside_record=True))
        if out.exists() and MADE_BY not in out.read_text(encoding="utf-8", errors="replace")[:2000]:
            raise Refused(f"`{out}` is there, and no report", key="out", hint="`out=FILE` names another file")
        write_whole(out, text)
    except OSError as err:
        message = f"cannot write `{out}`: {err.strerror}"
        raise Refused(message, key="out", hint="`out=FILE` names another file") from None


@dataclass(frozen=True)
class Run:
    """A receipt, and what the files beside it say; None where they are not there."""

    receipt: Mapping[str, Any]
    said: steps.Said | None
    kernels: Mapping[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises Refused where the receipt is damaged, or the log is not the one that it has the hash of."""
        receipt = read(folder)
        return cls(receipt, cls._said(folder, receipt), _kernels(folder / KERNELS))

    @staticmethod
    def _said(folder: Path, receipt: Mapping[str, Any]) -> steps.Said | None:
        """By the run's events, or the log of one from before there were any; where neither is here, by the receipt's own series."""
        if (nonce := receipt.get("nonce")) and (folder / FILE).is_file():
            return events.read(folder, nonce).said
        if not nonce and (folder / LOG).is_file():
            return steps.read(steps.lines(folder / LOG, outcome.LINE))
        kept = at(receipt, "outcome.series")
        return steps.of_series(kept) if isinstance(kept, Mapping) else None

    @property
    def name(self) -> str:
        return self.receipt["run"]

    def numbers(self, gauge: str) -> list[int]:
        """The layers that measured it."""
        fields = {field for step in self.said.steps.values() for field in step.values} if self.said else set()
        return sorted(
            int(n)
            for field in fields
            for name, _, n in [field.rpartition(" ")]
            if name == gauge and n.isdecimal() and len(n) < 10
        )

    def series(self, field: str) -> list[tuple[int, float]]:
        """(step, value) of each step line."""
        found = sorted(self.said.steps.items()) if self.said else []
        return [(n, v) for n, s in found if (v := s.values.get(field)) is not None and math.isfinite(v)]


def _kernels(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            "span": float(found["span_ms"]), "gaps": float(found["gaps_ms"]),
            "kinds": {str(kind): float(of["ms"]) for kind, of in found["kinds"].items()},
        }  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        message = f"`{path}` is no table of kernels: {err}"
        raise Refused(message, hint="made by `python benchmarks/kernels.py`") from None


def page(runs: Sequence[Run], anyway: bool = False) -> str:
    """The whole page. Raises Refused where several runs may not be compared."""
    receipts = [run.receipt for run in runs]
    found = compare.allowed(receipts, anyway) if len(runs) > 1 else []
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = "\n".join(_one(runs[0]) if len(runs) == 1 else _several(runs, [problem.message for problem in found]))
    # No script, nothing fetched: the browser is told to refuse it, too.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{MADE_BY}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
{body}
</body></html>
"""


# One run ---------------------------------------------------------------------------------------------------------------


def _one(run: Run) -> Iterator[str]:
    r = run.receipt
    end, reason = at(r, "outcome.end"), at(r, "outcome.reason")
    yield f"<h1>{escape(run.name)}</h1>"
    yield f"<p{'' if end == 'completed' else ' class=bad'}>{escape(end or 'open: it runs, or nobody sealed it')}"
    yield f"{': ' + escape(str(reason)) if reason else ''}</p>"
    yield _lineage(r)
    if _on_cpu(r):
        yield f'<div class="banner">{escape(NOTE)}</div>'
    yield _tiles(r)
    yield from _what_ran(r)
    yield from _charts([run])
    yield from _memory(run)
    yield from _time(r)
    yield from _kinds(run)
    yield from _settings(r)
    yield _proof(r)


def _on_cpu(r: Mapping[str, Any]) -> bool:
    return at(r, "recipe.cluster.processor") == "cpu"


def _lineage(r: Mapping[str, Any]) -> str:
    parts = [at(r, f"lineage.{key}") or "not named" for key in ("host", "family", "regime")]
    return f'<p class="lineage">lineage: {escape(" / ".join(map(str, parts)))}</p>'


def _tiles(r: Mapping[str, Any]) -> str:
    figures = {
        "ms a step, median": at(r, "outcome.figures.window.median_ms"),
        f"tokens/s/{compare.unit([r])}": at(r, "outcome.figures.window.tokens_per_s_per_gpu"),
        "of the peak, our count": _percent(at(r, "outcome.against_forecast.model_flops_utilisation")),
        "GiB allocated at most": at(r, "outcome.memory.peak_allocated_gib"),
        "loss, last": at(r, "outcome.figures.loss_last"),
        "last step": outcome.done(at(r, "outcome")),
    }
    cells = (
        f"<div class=tile><b>{escape(_number(v))}</b><span>{k}</span></div>"
        for k, v in figures.items()
        if v is not None
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _what_ran(r: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>What ran</h2>"
    layers = at(r, "stands.layers")
    if not isinstance(layers, Mapping):
        yield '<p class="dim">Receipts of version 1 do not say which layer is of which kind.</p>'
        return
    yield strip(layers)
    for gone in _list(at(r, "stands.given_up")):
        yield f'<p class="bad">given up: {escape(compare.shown(at(gone, "designed")))} at {escape(compare.shown(at(gone, "letter")))} '
        yield f"({len(_list(at(gone, 'layers')))} layers); {escape(compare.shown(at(gone, 'stands')))} stands there, "
        yield f"by {escape(compare.shown(at(gone, 'by')))}</p>"
    for key, more in r["stands"].items():
        if key != "layers" and isinstance(more, Mapping):
            said = ", ".join(f"{k.replace('_', ' ')} {_plain(v)}" for k, v in more.items())
            yield f'<p class="dim">{escape(key)}: {escape(said)}</p>'


def strip(layers: Mapping[str, Any]) -> str:
    """A square a layer, in Megatron's order, and a legend. layers: kind -> {"numbers": [...]}."""
    known = {
        n: kind for kind, of in layers.items() for n in _list(at(of, "numbers")) if type(n) is int and 0 < n <= 4096
    }
    if not known:
        return ""
    marks = {n: name for of in layers.values() for name, at_ in _map(at(of, "variants")).items() for n in _list(at_)}
    row, size = 26, 27
    rows = math.ceil(max(known) / row)
    squares = []
    for n, kind in sorted(known.items()):
        x, y = (n - 1) % row * size, (n - 1) // row * (size + 8)
        what, mark = (f"{kind}, {marks[n]}", marks[n][0]) if n in marks else (kind, "")
        squares.append(
            f'<g><title>layer {n}: {escape(what)}</title><rect x="{x}" y="{y}" width="{size - 3}" height="{size - 3}" rx="4" '
            f'fill="{_colour(kind)}"/><text class="letter" x="{x + 12}" y="{y + 17}" text-anchor="middle">{escape(letter(kind) + mark)}'
            "</text></g>"
        )
    order = [kind for kind in KINDS if kind in layers] + sorted(layers.keys() - KINDS)  # a version may have had others
    keys = [_key(_colour(kind), f"{letter(kind)} {kind} {len(_list(at(layers[kind], 'numbers')))}") for kind in order]
    keys += [_key("transparent", f"{name[0]}: {name}") for name in dict.fromkeys(marks.values())]
    box = f'viewBox="0 0 {row * size} {rows * (size + 8)}"'
    return f'<svg {box} role="img" aria-label="layers by kind">{"".join(squares)}</svg><p>{"".join(keys)}</p>'


def letter(kind: str) -> str:
    """Megatron's symbol of a kind, and R for what can stand at R alone, which has no symbol of its own."""
    if kind not in KINDS:
        return "?"
    return "R" if KINDS[kind].letters == ("R",) else KINDS[kind].symbol


def _charts(runs: Sequence[Run]) -> Iterator[str]:
    if all(run.said is None for run in runs):
        name = FILE if any(run.receipt.get("nonce") for run in runs) else LOG
        said = f"`{name}` is not beside the receipt, and it is from before receipts had a series of their steps."
        yield f'<h2>Loss, step time</h2><p class="dim">{said}</p>'
        return
    for title, field in (("Loss", steps.LOSS), ("Gradient norm", steps.NORM)):
        series = [run.series(field) for run in runs]
        if any(series):
            yield f"<h2>{title}</h2>{chart(series, [run.name for run in runs])}"
    for name in steps.GAUGES:
        drawn = {
            f"{f'{run.name}, ' if len(runs) > 1 else ''}{f'layer {n}' if n else 'embedding'}": run.series(f"{name} {n}")
            for run in runs
            for n in run.numbers(name)
        }
        if drawn:
            keys = "".join(_key(f"var(--s{i % 6})", key) for i, key in enumerate(drawn))
            yield f"<h2>{name}</h2>{chart(list(drawn.values()), list(drawn))}<p>{keys}</p>"
    times = [run.series(steps.TIME) for run in runs]
    if any(times):
        top, above = _bound(times)
        yield f"<h2>Step time, ms</h2>{chart(times, [run.name for run in runs], top)}"
        if above:
            yield f'<p class="dim">Above the scale, where Triton tunes and the allocator grows: {escape(above)}</p>'
    if len(runs) > 1:
        yield f"<p>{''.join(_key(f'var(--s{i % 6})', run.name) for i, run in enumerate(runs))}</p>"


def _bound(times: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, str]:
    """The top of the scale, by steady steps, and the steps above it."""
    values = sorted(v for series in times for _, v in series)
    top = 1.6 * steps.quantile(values, 0.5)
    several = len(times) > 1
    above = [
        f"{f'run {i}, ' if several else ''}step {n}: {v:,.0f}"
        for i, one in enumerate(times, 1)
        for n, v in one
        if v > top
    ]
    if above:
        return (top, ", ".join(above[:6]) + (f" and {len(above) - 6} more" if len(above) > 6 else ""))
    return (values[-1], "")


def chart(series: Sequence[Sequence[tuple[int, float]]], names: Sequence[str], top: float | None = None) -> str:
    """Lines over steps. top: where the scale ends; what is above it is drawn at its edge."""
    points = [p for one in series for p in one]
    low, high = min(v for _, v in points), min(max(v for _, v in points), top or math.inf)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(n for n, _ in points), max(n for n, _ in points)

    def place(n: float, v: float) -> tuple[float, float]:
        x = LEFT + (n - first) / max(last - first, 1) * (WIDTH - LEFT - RIGHT)
        y = TOP + (high - min(v, high)) / (high - low or 1) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    marks = []
    for v in ticks:
        y = place(first, v)[1]
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="var(--rule)"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_number(v)}</text>')
    for n, anchor in ((first, "start"), (last, "end")) if last > first else ((first, "start"),):
        marks.append(f'<text x="{place(n, low)[0]}" y="{HEIGHT - 8}" text-anchor="{anchor}">step {n:,}</text>')
    for i, (one, name) in enumerate(zip(series, names, strict=True)):
        line = " ".join("{},{}".format(*place(n, v)) for n, v in _thinned(one))
        stroke = f'stroke="var(--s{i % 6})" stroke-width="1.8" fill="none" stroke-linejoin="round"'
        if len(one) == 1:
            x, y = place(*one[0])
            marks.append(
                f'<circle cx="{x}" cy="{y}" r="3" fill="var(--s{i % 6})"><title>{escape(name)}</title></circle>'
            )
        elif one:
            marks.append(f'<polyline points="{line}" {stroke}><title>{escape(name)}</title></polyline>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>'


def _thinned(one: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    every = math.ceil(len(one) / POINTS)
    groups = [one[i : i + every] for i in range(0, len(one), every or 1)]
    return [(sum(n for n, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, four or so, from below `low` to above `high`."""
    span = high - low or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span / 4))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= span / 4)
    start = math.floor(low / step)
    return [round(n * step, 10) for n in range(start, math.ceil(high / step) + 1)]


def _memory(run: Run) -> Iterator[str]:
    r = run.receipt
    rows = [
        ("allocated, measured", at(r, "outcome.memory.peak_allocated_gib"), "--s0"),
        ("allocated, forecast", at(r, "forecast.peak_allocated_gib"), "--other"),
        ("reserved, measured", at(r, "outcome.memory.peak_reserved_gib"), "--s0"),
        ("reserved, forecast", at(r, "forecast.peak_reserved_gib"), "--other"),
    ]
    if any(_real(v) for _, v, _ in rows):
        yield f"<h2>Memory of the fullest rank, GiB</h2>{bars(rows)}"
        used, free = at(r, "forecast.device_gib"), at(r, "forecast.free_gib")
        if _real(used) and _real(free):
            yield f'<p class="dim">The forecast of all that the device holds is {used:.1f} of {used + free:.1f} GiB.</p>'


def bars(rows: Sequence[tuple[str, Any, str]]) -> str:
    """A bar a row: (title, value, colour)."""
    known = [(title, float(value), colour) for title, value, colour in rows if _real(value) and value >= 0]
    most, height = max((v for _, v, _ in known), default=0) or 1.0, 24
    label = 190
    made = []
    for i, (title, value, colour) in enumerate(known):
        y, width = i * height, round(value / most * (WIDTH - label - 80), 1)
        made.append(f'<text x="{label - 10}" y="{y + 15}" text-anchor="end">{escape(title)}</text>')
        made.append(
            f'<rect x="{label}" y="{y + 3}" width="{width}" height="{height - 8}" rx="3" fill="var({colour})"/>'
        )
        made.append(f'<text x="{label + width + 8}" y="{y + 15}">{_number(value)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {len(known) * height}" role="img">{"".join(made)}</svg>'


def _time(r: Mapping[str, Any]) -> Iterator[str]:
    lost = {
        "until the first step": at(r, "outcome.bad_put.until_first_step_s"),
        "first steps' excess": at(r, "outcome.bad_put.first_steps_excess_s"),
        "checkpoints": at(r, "outcome.bad_put.checkpoints_s"),
    }
    wall, known = at(r, "outcome.bad_put.wall_s"), {k: v for k, v in lost.items() if _real(v)}
    if _real(wall) and known:
        rest = max(0.0, wall - sum(known.values()))
        rows = [*((k, v, "--s1") for k, v in known.items()), ("everything else", rest, "--s2")]
        yield f"<h2>Where {_number(wall)} s went</h2>{bars(rows)}"


def _kinds(run: Run) -> Iterator[str]:
    if not run.kernels:
        return
    kinds = sorted(run.kernels["kinds"].items(), key=lambda kv: -kv[1])
    rows = [*((kind, ms, "--s4") for kind, ms in kinds), ("no kernel runs", run.kernels["gaps"], "--other")]
    yield f"<h2>Kernels of {_number(run.kernels['span'])} ms by kind, ms</h2>{bars(rows)}"
    if KERNELS not in _map(run.receipt.get("files")):
        yield '<p class="dim">The table was laid beside the receipt after it was sealed.</p>'


def _settings(r: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Settings</h2>"
    recipe = compare.flat(migrate.receipt(r), "recipe") if _map(r.get("recipe")) else {}
    if _on_cpu(r):  # that GPU is the budget's, and a rehearsal has plain torch for kernels
        recipe = {k: v for k, v in recipe.items() if not k.startswith("recipe.device.")}
        recipe = {k: f"{v}; ran: plain torch" if v == "transformer_engine" else v for k, v in recipe.items()}
    parts: dict[str, Any] = {
        "Recipe": recipe,
        "Words of the command line": dict(enumerate(_list(r.get("words")), 1)),
        "Environment": {k: at(v, "value") for k, v in _map(at(r, "job.overlay")).items()}
        | dict(_map(r.get("environ"))),
        "Code": compare.flat({k: r.get(k) for k in ("source", "patches", "mends")}, "code"),
        "Host": compare.flat(r.get("host"), "host") if r.get("host") else {},
    }
    for title, rows in parts.items():
        if rows:
            cells = ((escape(str(k)), escape(v if isinstance(v, str) else compare.shown(v))) for k, v in rows.items())
            yield f"<details><summary>{title} ({len(rows)})</summary>{table(cells)}</details>"
    findings = [f for f in _list(r.get("findings")) if isinstance(f, Mapping)]
    if findings:
        cells = ((escape(f"{f.get('level')} {f.get('name')}"), escape(str(f.get("message")))) for f in findings)
        loud = sum(f.get("level") not in ("ok", "note") for f in findings)
        yield f"<details><summary>Preflight ({len(findings)}, {loud} failed or waived)</summary>{table(cells)}</details>"


def table(rows: Iterator[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Cells are HTML."""
    top = f"<tr>{''.join(f'<th>{c}</th>' for c in head)}</tr>" if head else ""
    made = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{made}</table></div>'


def _proof(r: Mapping[str, Any]) -> str:
    hashed = ", ".join(_map(r.get("files"))) or "none"
    chain = f"link {at(r, 'chain.number')} of chain {at(r, 'chain.id')}" if r.get("chain") else "no chain"
    version = "version 1, its own hash only" if r.get("schema") == FIRST else f"files hashed: {hashed}; {chain}"
    return (
        f'<p class="dim">{"" if r["state"] == "sealed" else "not "}sealed: {escape(str(r.get("seal", "-"))[:16])}; {escape(version)}. '
        "A hash without a key shows accidents, not forgers: `launch receipts signers=FILE` checks signatures.</p>"
    )


# Several ---------------------------------------------------------------------------------------------------------------


def _several(runs: Sequence[Run], objections: Sequence[str]) -> Iterator[str]:
    receipts = [run.receipt for run in runs]
    yield f"<h1>{len(runs)} runs</h1>"
    if objections:
        yield f'<div class="banner"><b>RUMOR: these runs are not comparable</b>{"".join(f"<p>{escape(o)}</p>" for o in objections)}</div>'
    else:
        yield _lineage(receipts[0])
    head = ["", *(f"{_key(f'var(--s{i % 6})', run.name)}" for i, run in enumerate(runs))]
    names = [run.name for run in runs]
    measured = compare.figures(receipts)
    rows = ([escape(title), *map(escape, values)] for title, values in measured)
    yield f"<h2>Figures{' (RUMOR)' if objections else ''}</h2>{table(rows, [*head, *compare.changes(names)])}"
    yield from _charts(runs)
    yield from (f'<p class="bad">{escape(said)}</p>' for said in compare.untold(receipts))
    for title, found in compare.differences(receipts):
        yield f"<h2>{escape(title.capitalize())}</h2>"
        rows = ([escape(key), *map(escape, values)] for key, values in found)
        yield table(rows, head) if found else '<p class="dim">nothing</p>'
    for run in runs:
        yield f"<h2>{escape(run.name)}</h2>"
        yield _lineage(run.receipt)
        if isinstance(layers := at(run.receipt, "stands.layers"), Mapping):
            yield strip(layers)
        yield from _memory(run)
        yield from _kinds(run)
        yield _proof(run.receipt)


# Words -----------------------------------------------------------------------------------------------------------------


def _colour(kind: str) -> str:
    return KINDS[kind].hue if kind in KINDS else "var(--other)"


def _key(colour: str, text: str) -> str:
    return f'<span class="key"><i style="background:{colour}"></i>{escape(text)}</span>'


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _percent(value: Any) -> str | None:
    return f"{value:.1%}" if _real(value) else None


def _plain(value: Any) -> str:
    """Numbers and names without JSON's marks."""
    if isinstance(value, Mapping):
        return " ".join(f"{k} from {_plain(v)}" for k, v in value.items()) or "none"
    return " ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else compare.shown(value)


def _number(value: Any) -> str:
    if not _real(value):
        return str(value)
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def escape(text: str) -> str:
    """For a page, which has no characters that move a cursor either: a receipt may be anybody's."""
    return html.escape(printable(text))
