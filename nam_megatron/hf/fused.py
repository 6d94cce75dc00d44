"""Our kernels inside an exported model, on a GPU in bf16 (torch side): `fuse(model)`, for an export's own code and for ours.

Whole passes and prefills: Mamba-3's and M2RNN's scans, DSA's selection and sparse attention, experts by one grouped GEMM. A step of one
token, where the cache was allocated once: everything as one CUDA graph, with Mamba-3's states read and written once. What the kernels do
not do is the export's plain torch, which computes the same: DSA of batches with padding or behind a cache whose length 128 does not
divide, and recurrences with a cache and gradients. Caches are the same either way.

A graph belongs to its cache and reads the weights where they lay when it was captured: whoever puts other tensors in their place begins
with a new cache. No hook of a module runs in it.
"""

import weakref
from collections.abc import Iterator
from functools import cache as once
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import Problem, raise_if
from nam_megatron.runtime.served import on_gpu


def fuse(model: Any) -> None:
    """Let the kernels compute in `model`, a NamForCausalLM, from now on; it need not be on its GPU yet.

    Raises:
        Refused: weights that are not bf16, or sizes that the kernels do not take.
    """
    config, core = model.config, model.model
    raise_if(unserved(config, core.embed_tokens.weight.dtype))
    layers = [*zip(config.layer_kinds, core.layers, strict=True)]
    for depth in core.mtp:
        layers += zip(config.mtp_kinds, depth.layers, strict=True)
    for kind, layer in layers:
        if side := _side_of(kind):
            side.put(layer.mixer)
    model.one_token = one_token


def unserved(config: Any, dtype: torch.dtype) -> Iterator[Problem]:
    """Why the kernels cannot compute this model."""
    kinds = {*config.layer_kinds, *config.mtp_kinds}
    hint = "open it without them: `torch` computes any size"
    if dtype != torch.bfloat16:
        yield Problem(f"the kernels compute in bf16, and the weights are {dtype}".replace("torch.", ""), hint=hint)
    for kind in KINDS:
        if kind in kinds and (side := _side_of(kind)):
            yield from (Problem(text, hint=hint) for text in side.unserved(config))


def _side_of(kind: str) -> Any:
    """`serve.py` of a kind's folder; None: the export's plain torch computes it."""
    name = f"nam_megatron.blocks.{kind}.serve"
    return import_module(name) if find_spec(name) else None


# A step of one token -----------------------------------------------------------------------------------------------------


class _Kept(dict):
    """A layer's states, written where they lie."""

    def __setitem__(self, name: str, value: Tensor) -> None:
        self[name].copy_(value)


class _Fixed:
    """What Step is to the layers, for one token at a place that lies on the GPU: shapes do not depend on how much is cached."""

    real = None

    def __init__(self, cache: Any, rows: int, device: torch.device):
        # No reference to the cache, which owns this.
        self.cache, self.past, self.layers, self.total = True, True, cache.layers, cache.max_length
        self.indices: dict[int, Any] = {}
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens, self.positions = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self.seen = torch.ones(rows, self.total, dtype=torch.bool, device=device)
        self.states = {layer: _Kept(kept) for layer, kept in cache.layers.items()}

    def tell(self, tokens: Tensor, mask: Tensor | None, length: int) -> None:
        self.at.fill_(length)
        self.tokens.copy_(tokens)
        seen = self.seen[:, : length + 1]
        seen.copy_(mask) if mask is not None else seen.fill_(True)
        self.positions.copy_(seen.sum(1, keepdim=True) - 1)

    def rows(self, layer: int, **new: Tensor) -> Any:
        found = [self.layers[layer][name].index_copy_(1, self.at, x) for name, x in new.items()]
        return found[0] if len(found) == 1 else found

    def state(self, layer: Any) -> _Kept:
        return self.states[layer]

    def visible(self, first: int, last: int, window: int = 0) -> Tensor:
        back = self.at - torch.arange(self.total, device=self.at.device)
        return (self.seen & (back >= 0) & (back < (window or self.total))).unsqueeze(1)


class _Decoder:
    """The steps of one cache: the first as it is, the second captured, the others replayed."""

    def __init__(self, model: Any, cache: Any, rows: int):
        self.model, self.step = model, _Fixed(cache, rows, model.device)
        self.graph: Any = None
        self.logits: Tensor | None = None
        self.places = self.lie(model, cache)

    @staticmethod
    def lie(model: Any, cache: Any) -> list[int]:
        """Where a graph finds what it reads and writes."""
        kept = [tensor.data_ptr() for layer in cache.layers.values() for tensor in layer.values()]
        return [model.lm_head.weight.data_ptr(), model.model.norm.weight.data_ptr(), *kept]

    def run(self) -> Tensor:
        core, step = self.model.model, self.step
        step.indices = {}
        return self.model.lm_head(core(core.placed(core.begun(step.tokens, step), step), step))

    def next(self) -> Tensor:
        if not self.step.tokens.is_cuda:
            return self.run()
        if self.logits is None:  # compiles kernels, which no capture may
            self.logits = self.run()
            return self.logits
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=_side(self.model.device), capture_error_mode="thread_local"):
                self.logits = self.run()
            self.graph = graph
        self.graph.replay()
        return self.logits


@once
def _side(device: torch.device) -> Any:
    """What steps are captured on; torch's own stream for it stays on the GPU that was the first."""
    return torch.cuda.Stream(device)


_DECODERS: "weakref.WeakKeyDictionary[Any, _Decoder]" = weakref.WeakKeyDictionary()


def one_token(model: Any, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Any) -> Tensor | None:
    """Logits [b, 1, vocabulary] of tokens [b, 1] behind a cache that was allocated once; None: not a step of that kind.

    mask: [b, length + 1]. positions: [b, 1], what the mask says.
    """
    learned, ngrams = model.config.learned_positions, model.config.ngrams
    room = min(cache.max_length or 0, learned or cache.max_length or 0)
    least = max(1, ngrams["order"] - 1 if ngrams else 1)  # until then what n-grams remember grows
    if not least <= cache.length < room or torch.is_grad_enabled():
        return None
    if mask is not None and (mask.shape != (len(tokens), cache.length + 1) or not mask[:, -1].all()):
        return None  # padding between tokens, which recurrences pass over
    if positions is not None and (positions != (cache.length if mask is None else mask.sum(1, keepdim=True) - 1)).any():
        return None  # which the model refuses
    on_gpu(tokens)
    # Whatever mode the cache was filled in: its tensors are written, and what is kept of a step outlives the mode of this one.
    with torch.inference_mode(), torch.cuda.device_of(tokens):
        decoder = _DECODERS.get(cache)
        if decoder is None or decoder.model is not model or decoder.places != _Decoder.lie(model, cache):
            decoder = _DECODERS[cache] = _Decoder(model, cache, len(tokens))
        decoder.step.tell(tokens, mask, cache.length)
        logits = decoder.next()
    cache.length += 1
    return logits.clone()
