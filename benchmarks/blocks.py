"""What each kind of block costs in a real training step: forward and backward milliseconds of every layer, by CUDA events.

    python benchmarks/blocks.py --out blocks.json [--data FOLDER] [--limit SECONDS] [OVERRIDE ...]

The plan is `nam56r` cut to 13 layers on one GPU, one microbatch of 4 sequences a step, with one MLA layer, three of DSA and MTP; recipe
overrides come on top. Nothing waits for the GPU within a step. A time is what lies between two events of one stream: kernels, and the
gaps in which the GPU waited for the host. Backward includes adding up the gradients of the weights. "Everything else" is the step's
time less all that is timed: embedding, final norm, losses, optimizer, and what lies between the layers.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import FINDINGS, OK, REFUSED, Problem, Refused
from nam_megatron.words.site import Layer

PRESET = "nam56r"
CUT = ("cluster=h200_1", "model.depth=13", "model.substitute=[{letter: A, ranks: [1, 2, 3], kind: dsa}]")
CUT += ("schedule.global_batch_size=4", "schedule.micro_batch_size=4")
CUT += ("schedule.train_steps=8", "schedule.decay_steps=16", "optim.warmup_steps=2")
MTP, OUTPUT = "MTP block", "output layer"
WAYS = ("forward", "backward")


# In the training process


def unfit(plan: Plan) -> Iterator[Problem]:
    """Why the layers of a plan cannot be timed."""
    if plan.recipe.feature.recompute:
        yield Problem(
            "with recomputation the forward pass of a layer runs inside backward passes",
            key="feature.recompute.granularity",
            hint="to time blocks, set it to `none`",
        )
    if plan.recipe.feature.cuda_graphs:
        yield Problem(
            "a layer inside a CUDA graph cannot be timed",
            key="feature.cuda_graphs.impl",
            hint="to time blocks, set it to `none`",
        )
    if plan.recipe.parallel.pipeline > 1:
        yield Problem(
            "the first rank's times are reported, and it holds one pipeline stage only",
            key="parallel.pipeline",
            hint="to time blocks, set it to 1",
        )


def kind_of(layer: Layer) -> str:
    """A row of the report: DSA that takes another layer's top-k costs a third of what computing one does."""
    return layer.kind if layer.source is None else f"{layer.kind}, reused top-k"


class Mark(torch.autograd.Function):
    """The tensor itself, not copied; `reached()` is called in the backward pass when its gradient is complete."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reached: Callable[[], None]) -> Tensor:
        ctx.reached = reached
        return x.data  # of `x` itself autograd would make a view, which Megatron treats otherwise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.reached()
        return gradient, None


class Marks:
    """Events around each layer of the decoder, the MTP block as a whole, and the output layer, which MTP's loss calls too.

    Autograd runs what was called last first. So all of a layer's backward pass lies between the mark on its output and the one on its
    input, and no two layers overlap. Within a step, the calls of a part (microbatches) add up.
    """

    def __init__(self, plan: Plan):
        self.kinds = {layer.number: kind_of(layer) for layer in plan.layers}
        self.calls: dict[int | str, list[dict[str, torch.cuda.Event]]] = {}
        self.steps: list[dict[int | str, dict[str, float]]] = []

    def begin(self, model: list[torch.nn.Module]) -> None:
        """Before a step."""
        if not self.calls:
            self.attach(model)
        for calls in self.calls.values():
            calls.clear()

    def attach(self, model: list[torch.nn.Module]) -> None:
        from megatron.core.utils import unwrap_model

        for chunk in unwrap_model(model):
            for layer in chunk.decoder.layers:
                self.around(layer, layer.layer_number)
            if chunk.mtp_process:
                self.around(chunk.mtp, MTP)
            self.around(chunk.output_layer, OUTPUT)
        assert self.calls.keys() >= self.kinds.keys(), "layers of the plan that the model lacks"

    def around(self, module: torch.nn.Module, part: int | str) -> None:
        """Time `module`, whose input and output are a hidden state: `hidden_states` or the first argument, and the first result."""
        inner, calls = module.forward, self.calls.setdefault(part, [])

        def forward(*args: Any, **named: Any) -> Any:
            events: dict[str, torch.cuda.Event] = {}
            calls.append(events)
            note = partial(record, events)
            begun, ended = partial(note, "backward begin"), partial(note, "backward end")
            if "hidden_states" in named:
                named["hidden_states"] = Mark.apply(named["hidden_states"], ended)
            else:
                args = (Mark.apply(args[0], ended), *args[1:])
            note("forward begin")
            result = inner(*args, **named)
            note("forward end")
            if isinstance(result, tuple):
                return Mark.apply(result[0], begun), *result[1:]
            return Mark.apply(result, begun)

        module.forward = forward

    def end(self) -> None:
        """After a step, once the GPU has finished it."""
        self.steps.append(
            {
                part: {way: sum(e[f"{way} begin"].elapsed_time(e[f"{way} end"]) for e in calls) for way in WAYS}
                for part, calls in self.calls.items()
            }
        )

    def report(self, steady: slice) -> dict[str, Any]:
        """Medians over the `steady` ones of the steps; `layers` in their order, `parts` for what else there is."""
        steps = self.steps[steady] or self.steps

        def row(part: int | str) -> dict[str, float]:
            return {f"{way}_ms": round(statistics.median(step[part][way] for step in steps), 4) for way in WAYS}

        return {
            "layers": [{"number": n, "kind": kind, **row(n)} for n, kind in self.kinds.items()],
            "parts": {part: row(part) for part in (MTP, OUTPUT) if part in self.calls},
        }


def record(events: dict[str, torch.cuda.Event], moment: str) -> None:
    events[moment] = torch.cuda.Event(enable_timing=True)
    events[moment].record()


# The command


def shares(times: dict[str, Any], step_ms: float) -> dict[str, Any]:
    """The report with means by kind, and with each one's share of the step; the shares add up to 1."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(layer["kind"] for layer in times["layers"]):
        of_kind = [layer for layer in times["layers"] if layer["kind"] == kind]
        mean = {f"{way}_ms": statistics.mean(layer[f"{way}_ms"] for layer in of_kind) for way in WAYS}
        kinds[kind] = {"layers": len(of_kind)} | {key: round(ms, 4) for key, ms in mean.items()}
        kinds[kind]["share"] = round(len(of_kind) * sum(mean.values()) / step_ms, 4)
    parts = {
        part: row | {"share": round((row["forward_ms"] + row["backward_ms"]) / step_ms, 4)}
        for part, row in times["parts"].items()
    }
    rest = step_ms - sum(row[f"{way}_ms"] for row in (*times["layers"], *times["parts"].values()) for way in WAYS)
    return {
        "step_ms": round(step_ms, 4),
        "kinds": kinds,
        "parts": parts,
        "everything else": {"ms": round(rest, 4), "share": round(rest / step_ms, 4)},
        "layers": times["layers"],
    }


def text(found: dict[str, Any]) -> str:
    """The report as a person reads it; times are milliseconds in a step, of kinds per layer."""
    lines = [f"{'':<30}{'layers':>8}{'forward':>12}{'backward':>12}{'of the step':>13}"]
    lines += [
        f"{name:<30}{row.get('layers', ''):>8}{row['forward_ms']:>12.3f}{row['backward_ms']:>12.3f}{row['share']:>13.1%}"
        for name, row in [*found["kinds"].items(), *found["parts"].items()]
    ]
    rest = found["everything else"]
    lines += [f"{'everything else':<38}{rest['ms']:>24.3f}{rest['share']:>13.1%}"]
    lines += [f"{'step':<38}{found['step_ms']:>24.3f}", "", f"{'layer':<30}{'':>8}{'forward':>12}{'backward':>12}"]
    lines += [
        f"{layer['number']:>5} {layer['kind']:<32}{layer['forward_ms']:>12.3f}{layer['backward_ms']:>12.3f}"
        for layer in found["layers"]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=measure.dataset, help="a built dataset; mock data by default")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all of it")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the recipe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            overrides = (*CUT, *measure.built(options.data, folder / "data"), *options.overrides)
        except Refused as refused:
            sys.stderr.write(refused.render())
            return REFUSED
        entry = measure.trial("blocks", PRESET, overrides, folder, options.limit, ("--blocks",))
        log = folder / "blocks.log"
        if "error" in entry and log.exists():
            options.out.with_suffix(".log").write_text(log.read_text(errors="replace")[-100_000:])
    if "error" not in entry:
        entry["blocks"] = shares(entry["blocks"], entry["median_step_seconds"] * 1e3)
        for key in ("ranks", "plan_sha256", "kernels"):
            entry.pop(key)
    options.out.write_text(json.dumps(entry, indent=1) + "\n")
    if "error" in entry:
        print(f"blocks: {entry['error']}", file=sys.stderr)
        return FINDINGS
    print(text(entry["blocks"]), end="")
    return OK


if __name__ == "__main__":
    sys.exit(main())
