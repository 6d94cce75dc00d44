"""Where memory ran out: the layer, its kind and the modules inside it, from the traceback of the error (torch side).

    out of memory: step 3, rank 1, in the forward pass of layer 5 (moe): decoder.layers.4 (MoETransformerLayer, MoELayer, TEGroupedMLP)

Nothing is hooked and nothing costs anything before the error. In the backward pass autograd holds no modules: what is known there is the
layer that is computed again, or the kind whose kernel asked.
"""

import re
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from nam_megatron.compile.plan import Plan

MARK = "out of memory"
BLOCK = re.compile(r"/nam_megatron/blocks/(\w+)/")


class Place(NamedTuple):
    """phase: forward or backward, None outside of both. layer: as above, behind `of`; inside: what is known where no layer is."""

    phase: str | None
    layer: str | None = None
    inside: str | None = None

    def __str__(self) -> str:
        if self.phase is None:
            return "outside of a step's passes"
        more = f" of {self.layer}" if self.layer else f", in {self.inside}" if self.inside else ""
        return f"in the {self.phase} pass{more}"


def told(place: Place, step: int, rank: int) -> str:
    """One line for the log."""
    return f"{MARK}: step {step}, rank {rank}, {place}"


def where(err: BaseException, plan: Plan) -> Place:
    """Where in a step the error came up."""
    stack = list(frames(err))
    names = {frame.f_code.co_name for frame in stack}
    run = "backward" if names & {"backward", "backward_step"} else "forward"
    modules: list[Any] = []
    for m in (found for frame in stack if (found := owner(frame)) is not None):
        # What lies between two frames of one module waits for it, as a shared expert does for the experts.
        modules[modules.index(m) if m in modules else len(modules) :] = [m]
    layers = [m for m in modules if isinstance(getattr(m, "layer_number", None), int)]
    if not layers:
        if not names & {"forward_step", "backward_step"}:
            return Place(None)
        kind = next((found[1] for frame in reversed(stack) if (found := BLOCK.search(frame.f_code.co_filename))), None)
        return Place(run, None, f"a kernel of {kind}" if kind else type(modules[-1]).__name__ if modules else None)
    layer = layers[0]  # parts of a layer have its number, too
    within = modules[modules.index(layer) :]
    name = next((n for n, m in modules[0].named_modules() if m is layer), type(layer).__name__).replace("module.", "")
    chain = ", ".join(dict.fromkeys(type(m).__name__ for m in within))
    return Place(run, f"layer {layer.layer_number} ({kind_of(name, layer.layer_number, plan)}): {name} ({chain})")


def kind_of(name: str, number: int, plan: Plan) -> str:
    """MTP's layers are numbered from 1 again."""
    kinds = plan.mtp if "mtp" in name.split(".") else [layer.kind for layer in plan.layers]
    return kinds[number - 1] if 0 < number <= len(kinds) else "unknown"


def frames(err: BaseException) -> Iterator[FrameType]:
    at = err.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def owner(frame: FrameType) -> Any:
    """The module whose method this is."""
    found = frame.f_locals.get("self")
    return found if isinstance(found, torch.nn.Module) else None
