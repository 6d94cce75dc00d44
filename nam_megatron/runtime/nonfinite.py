"""Where a NaN began: the first module of a forward pass whose inputs are finite and whose output is not (torch side)."""

import math
from collections.abc import Iterator
from typing import Any

import torch


class Watch:
    """Looks at every block of one pipeline stage during one forward pass.

    It reads each block's output once and keeps a flag per tensor where the tensor is: no synchronisation before the verdict.
    """

    def __init__(self, model: torch.nn.Module):
        self._seen: list[tuple[str, list[torch.Tensor]]] = []
        self._unseen = {f"{name} ({described(module)})": module for name, module in blocks(model)}
        self._hooks = [m.register_forward_hook(self._look(name), with_kwargs=True) for name, m in self._unseen.items()]

    def _look(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if not self._seen:
                self._seen.append(("", finite((args, kwargs))))
            self._seen.append((name, finite(output)))
            self._unseen.pop(name, None)

        return hook

    def close(self) -> None:
        """Take the hooks off, so that a recomputed forward pass is not seen twice."""
        for hook in self._hooks:
            hook.remove()

    def _first(self) -> str | None:
        """The first block with a non-finite output; empty if the stage's input was it, None if there is none."""
        return next((name for name, flags in self._seen if not all(flags)), None)

    def began_here(self) -> bool:
        """Whether a block of this stage made the first non-finite output; waits for the device."""
        return bool(self._first())

    def verdict(self) -> str:
        """One clause for a person; waits for the device."""
        first = self._first()
        if first == "":
            return "it came with the input of this pipeline stage"
        # A layer that is replayed as a CUDA graph runs no hooks.
        unseen = f" ({len(self._unseen)} blocks could not be seen)" if self._unseen else ""
        if first is None:
            return f"every block's output is finite, so it began in the loss itself{unseen}"
        return f"first seen in the output of {first}{unseen}"


def blocks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules worth naming: embedding, layers, final norm, MTP depths, output layer; in the order of `named_modules`."""
    layers = {id(layer) for name in ("decoder", "mtp") for layer in getattr(getattr(model, name, None), "layers", ())}
    ends = {"embedding", "decoder.final_norm", "output_layer"}
    return ((name, module) for name, module in model.named_modules() if name in ends or id(module) in layers)


def described(module: torch.nn.Module) -> str:
    """The class, with Megatron's layer number (from 1) where the module has one."""
    number = getattr(module, "layer_number", None)
    return type(module).__name__ if number is None else f"layer {number}, {type(module).__name__}"


def finite(values: Any) -> list[torch.Tensor]:
    """Whether each floating-point tensor in nested tuples and dicts is finite throughout: flags on the tensors' devices.

    By the largest magnitude, which one pass finds; `isfinite` of the logits alone would set the first step's memory peak.
    """
    found = (t.detach() for t in tensors(values) if t.is_floating_point() and t.numel())
    return [torch.linalg.vector_norm(tensor, math.inf).isfinite() for tensor in found]


def tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors(value)
