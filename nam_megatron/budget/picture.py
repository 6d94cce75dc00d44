"""Stacked bars: on the terminal with rich, in a file with matplotlib (the `plot` extra)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nam_megatron.budget.memory import Budget
from nam_megatron.budget.search import Trial
from nam_megatron.errors import Refused, raise_if
from nam_megatron.packages import adding
from nam_megatron.words.sizes import BUCKETS, GIB
from nam_megatron.words.taken import taken

if TYPE_CHECKING:
    from rich.text import Text

# A hue for each part of a bar, in a file and on a terminal of 16 colours: parameters, gradients and optimizer, activations,
# loss, the rest.
HUES = {
    "replicated parameters": ("#08519c", "blue"),
    "tensor-sharded parameters": ("#3182bd", "bright_blue"),
    "expert parameters": ("#6baed6", "cyan"),
    "gradients": ("#54278f", "magenta"),
    "matrix optimizer": ("#756bb1", "bright_magenta"),
    "other optimizer": ("#9e9ac8", "blue"),
    "activations": ("#238b45", "green"),
    "feature activations": ("#74c476", "bright_green"),
    "routing scratch": ("#a1d99b", "yellow"),
    "logits and loss": ("#d94801", "red"),
    "multi-token prediction": ("#fd8d3c", "bright_red"),
    "communication": ("#636363", "white"),
    "CUDA graphs": ("#bd0026", "bright_yellow"),
    "workspaces": ("#969696", "bright_black"),
    "runtime reserve": ("#bdbdbd", "white"),
    "allocator overhead": ("#d9d9d9", "bright_black"),
}
SUFFIXES = (".png", ".svg")


def bars(budgets: Sequence[Budget]) -> dict[str, Mapping[str, int]]:
    """Label -> bytes by bucket: a bar for each stage of each budget."""
    found: dict[str, Mapping[str, int]] = {}
    for b in budgets:
        for s in b.stages:
            label = b.plan.recipe.preset.name + (f", stage {s.stage.rank}" if len(b.stages) > 1 else "")
            found[label if label not in found else f"{label} ({len(found) + 1})"] = s.steady.buckets
    return found


def strip(buckets: Mapping[str, int], capacity: int, width: int) -> "Text":
    """A bar of `width` columns for the whole device; what does not fit goes on in red beyond the bound."""
    from rich.text import Text

    bar, done = Text(), 0
    for bucket, size in buckets.items():
        start, done = done, done + size
        cells = [round(x / capacity * width) for x in (start, done)]
        inside = [min(cell, width) for cell in cells]
        bar.append("█" * (inside[1] - inside[0]), HUES[bucket][1])
    bar.append("░" * max(0, width - round(done / capacity * width)), "dim")
    bar.append("▏", "bold")
    if done > capacity:
        bar.append(f" {done / capacity:.1f} x the device", "bold red")
    return bar


def check(path: str) -> Path:
    """The file to write.

    Raises:
        Refused: no format for it, no folder, no matplotlib.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise Refused(f"cannot draw `{path}`", key="plot", hint=f"name a file that ends in {' or '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise Refused(f"there is no folder `{target.parent}`", key="plot", hint="name a folder that exists")
    raise_if(taken(target.parent, "plot", beside_record=True))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Refused("drawing needs matplotlib", key="plot", hint=f"{adding('plot')} adds it") from None
    return target


def draw(budgets: Sequence[Budget], path: Path) -> None:
    """A bar for each stage, or for each preset, with the device's bounds."""
    found = bars(budgets)
    figure, axes = _axes(1.6 + 0.55 * len(found))
    left = [0.0] * len(found)
    for bucket in BUCKETS:
        sizes = [buckets[bucket] / GIB for buckets in found.values()]
        if any(sizes):
            axes.barh(list(found), sizes, left=left, color=HUES[bucket][0], label=bucket)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    for place, size in enumerate(left):
        axes.text(size, place, f" {size:.1f}", va="center")
    axes.invert_yaxis()
    axes.set_xlabel("GiB in use at the steady peak")
    _bounds(axes.axvline, budgets[0])
    _save(figure, axes, path)


def draw_sweep(key: str, trials: Sequence[Trial], path: Path) -> None:
    """Buckets over the values of a key. Refused values leave gaps."""
    import math

    figure, axes = _axes(5)
    values = [t.value for t in trials]
    stack = {b: [t.budget.worst.steady.buckets[b] / GIB if t.budget else math.nan for t in trials] for b in BUCKETS}
    used = {bucket: sizes for bucket, sizes in stack.items() if any(size > 0 for size in sizes)}
    axes.stackplot(values, *used.values(), labels=used, colors=[HUES[b][0] for b in used], step="mid")
    axes.set_xlabel(key)
    axes.set_ylabel("GiB in use at the steady peak")
    _bounds(axes.axhline, next(t.budget for t in trials if t.budget))
    _save(figure, axes, path)


def _axes(height: float):
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(11, height), layout="constrained")
    return figure, figure.add_subplot()


def _bounds(line, b: Budget) -> None:
    device = b.plan.recipe.device
    line(device.total_gib, color="black", linewidth=1.2, label=device.name)
    line(device.total_gib - device.headroom_gib, color="black", linewidth=0.8, linestyle=":", label="headroom")


def _save(figure, axes, path: Path) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    # The same budget gives the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "nam_megatron"}):
        try:
            figure.savefig(path, metadata=metadata)
        except OSError as err:
            message = f"cannot write `{path}`: {err.strerror}"
            raise Refused(message, key="plot", hint="name a file you may write") from None
