"""Our kernels inside an exported model, on a GPU in bf16 (torch side): `fuse(model)`, for an export's own code and for ours.

Whole passes and prefills: Mamba-3's and M2RNN's scans, DSA's selection and sparse attention, experts by one grouped GEMM. A step of one
token, where the cache was allocated once: everything as one CUDA graph, with Mamba-3's states read and written once. What the kernels do
not do is the export's plain torch, which computes the same: DSA of batches with padding or behind a cache whose length 128 does not
divide, and recurrences with a cache and gradients. Caches are the same either way.

A graph belongs to its cache and reads the weights where they lay when it was captured: whoever puts other tensors in their place begins
with a new cache. No hook of a module runs in it.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache as once
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import knobs

from nam_megatron.blocks.dsa import kernel as dsa
from nam_megatron.blocks.dsa.block import TILE
from nam_megatron.blocks.m2rnn import block as m2rnn_block
from nam_megatron.blocks.m2rnn import kernel as m2rnn
from nam_megatron.blocks.mamba3 import block as mamba3_block
from nam_megatron.blocks.mamba3 import kernel as mamba3
from nam_megatron.blocks.mamba3.naive import Shape, State, Weights
from nam_megatron.blocks.mamba3.step import step as mamba3_step
from nam_megatron.blocks.mla.block import WIDTHS
from nam_megatron.blocks.moe.torch_gemm import TorchGemm
from nam_megatron.errors import Problem, raise_if

FORGET = -1e4  # of a token that is padding: softplus of it is 0
KEPT = ("angle", "ssm", "key", "value")  # what State is called in a cache


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
    # Partials, which a deep copy makes anew for its own modules.
    for kind, layer in layers:
        mixer = layer.mixer
        if kind == "mamba3":
            mixer.mix = partial(_served, _mamba3, mixer)
        elif kind == "m2rnn":
            mixer.scan = partial(_served, _m2rnn, mixer)
        elif kind == "dsa":
            mixer.attended = partial(_served, _dsa, mixer)
        elif kind == "moe":
            mixer.experts.forward = partial(_served, _experts, mixer.experts)
    model.one_token = one_token


def unserved(config: Any, dtype: torch.dtype) -> Iterator[Problem]:
    """Why the kernels cannot compute this model."""
    kinds = {*config.layer_kinds, *config.mtp_kinds}
    hint = "open it without them: `torch` computes any size"
    if dtype != torch.bfloat16:
        yield Problem(f"the kernels compute in bf16, and the weights are {dtype}".replace("torch.", ""), None, hint)
    found: list[str] = []
    if "mamba3" in kinds:
        sizes = config.mamba3
        tiles, rank = (sizes["head_dim"], sizes["state_dim"]), sizes["mimo_rank"]
        found += [text for _, text in mamba3_block.odd_sizes(*tiles, rank, _chunk(rank))]
    if "m2rnn" in kinds:
        found += [text for _, text in m2rnn_block.odd_sizes(config.m2rnn["k_dim"], config.m2rnn["v_dim"])]
    if "dsa" in kinds:
        widths = {"indexer heads": config.dsa["indexer_head_dim"], "latents": config.mla["kv_lora_rank"]}
        widths["rotary heads"] = config.mla["qk_rope_head_dim"]
        odd = {name: width for name, width in widths.items() if width not in WIDTHS}
        found += [f"DSA's kernels take {name} of {WIDTHS}, not {width}" for name, width in odd.items()]
    if "moe" in kinds:
        sizes = config.moe
        rows = (sizes["expert_hidden_size"], sizes["latent_size"] or config.hidden_size)
        found += [f"torch's grouped GEMM takes widths that 8 divides, not {n}" for n in rows if n % 8]
    for text in found:
        yield Problem(text, None, hint)
    if "moe" in kinds:
        yield from (Problem(problem.message, None, hint) for problem in TorchGemm.unserved())


def _chunk(rank: int) -> int:
    """Tokens of Mamba-3 at once: what a walk takes, where it can."""
    return max(1, 64 // rank)


def _on_gpu(x: Tensor) -> None:
    if not (x.is_cuda or knobs.runtime.interpret):
        raise ValueError(f"kernels: `nam_megatron` computes on a GPU, and the model is on `{x.device}`")


def _served(compute: Callable[..., Tensor], self: Any, x: Tensor, *rest: Any) -> Tensor:
    """A layer's part on the GPU of its input, which need not be the current one; the model may have left it, or bf16, since `fuse`."""
    _on_gpu(x)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"kernels: `nam_megatron` computes in bf16, and the model in {x.dtype}".replace("torch.", ""))
    with torch.cuda.device_of(x):
        return compute(self, x, *rest)


def _remembers(self: Any, x: Tensor, step: Any) -> bool:
    """Whether gradients are asked for through a cache: of the tokens, of frozen layers' own weights, or of tokens before."""
    if step.cache is None or not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in (x, *self.parameters(), *step.state(self.index).values()))


# Whole passes, and prefills ----------------------------------------------------------------------------------------------


def _mamba3(self: Any, packed: Tensor, step: Any) -> Tensor:
    if _remembers(self, packed, step):
        return type(self).mix(self, packed, step)
    shape = Shape(self.heads, self.width, self.states, self.groups, self.rank, self.angles)
    state = step.state(self.index)
    weights = Weights(
        self.dt_bias, self.D, self.B_bias, self.C_bias, self.B_norm.weight, self.C_norm.weight,
        self.mimo_x, self.mimo_z, self.mimo_o,
    )  # fmt: skip
    before = State(*(state[name] for name in KEPT)) if "key" in state else None
    if before is not None and packed.size(1) == 1 and step.real is None:
        return mamba3_step(packed[:, 0], weights, shape, before).unsqueeze(1)
    if step.real is not None:
        z, x, B, C, dt, rest = packed.split((*self.parts[:5], sum(self.parts[5:])), -1)
        real = step.real.unsqueeze(-1)
        packed = torch.cat((z, torch.where(real, x, 0), B, C, torch.where(real, dt, FORGET), rest), -1)
    packed, chunk = packed.transpose(0, 1), _chunk(self.rank)
    if step.cache is None:
        return mamba3.scan(packed, weights, shape, chunk).transpose(0, 1)
    if before is not None:
        before = before._replace(angle=before.angle.squeeze(1))
    y, after = mamba3.prefill(packed, weights, shape, chunk, before)
    for name, kept in zip(KEPT, after._replace(angle=after.angle.unsqueeze(1)), strict=True):
        state[name] = kept
    return y.transpose(0, 1)


def _m2rnn(self: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, step: Any) -> Tensor:
    if _remembers(self, v, step):
        return type(self).scan(self, q, k, v, keep, step)
    state = step.state(self.index)
    q, k, v, keep = (x.transpose(0, 1).contiguous() for x in (q, k, v.unflatten(-1, (self.heads, self.width)), keep))
    y, state["matrix"] = m2rnn.scan(q, k, v, keep, self.state_weight, state.get("matrix"))
    return y.transpose(0, 1)


def _dsa(self: Any, query: Tensor, rows: Tensor, index: tuple[Tensor, ...] | None, step: Any) -> Tensor:
    new, total = query.size(1), rows.size(1)
    if step.real is not None or new == 1 or (total - new) % TILE:  # alike for all layers of a pass
        return type(self).attended(self, query, rows, index, step)
    if index is not None:
        with torch.no_grad():
            q, weights, keys = (x.transpose(0, 1) for x in index)
            step.indices[self.index] = dsa.select(dsa.index_scores(q, keys, weights), self.top_k)
    selection = step.indices[self.index if self.source is None else self.source]
    mixed = dsa.attend(query.transpose(0, 1), rows.transpose(0, 1).unsqueeze(2), selection, self.scale, self.rkv)
    return dsa.values(mixed, self.kv_up.weight.unflatten(0, (self.heads, -1))[:, self.dq :]).transpose(0, 1)


def _experts(self: Any, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    activate = sys.modules[type(self).__module__].activate
    order = chosen.flatten().argsort(stable=True)
    counts = (chosen.flatten().unsqueeze(0) == torch.arange(len(self.up), device=x.device).unsqueeze(1)).sum(1)
    ends = counts.cumsum(0).to(torch.int32)
    y = activate(F.grouped_mm(x[order // chosen.size(1)], self.up.mT, offs=ends), self.activation)
    y = F.grouped_mm((y * shares.flatten()[order, None]).to(x.dtype), self.down.mT, offs=ends)
    return y[order.argsort()].view(*chosen.shape, -1).sum(1)


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

    def tell(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, length: int) -> None:
        self.at.fill_(length)
        self.tokens.copy_(tokens)
        seen = self.seen[:, : length + 1]
        seen.copy_(mask) if mask is not None else seen.fill_(True)
        self.positions.copy_(seen.sum(1, keepdim=True) - 1 if positions is None else positions)

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

    mask: [b, length + 1]. positions: [b, 1], None: by the mask.
    """
    learned, ngrams = model.config.learned_positions, model.config.ngrams
    room = min(cache.max_length or 0, learned or cache.max_length or 0)
    least = max(1, ngrams["order"] - 1 if ngrams else 1)  # until then what n-grams remember grows
    if not least <= cache.length < room or torch.is_grad_enabled():
        return None
    if mask is not None and (mask.shape != (len(tokens), cache.length + 1) or not mask[:, -1].all()):
        return None  # padding between tokens, which recurrences pass over
    _on_gpu(tokens)
    # Whatever mode the cache was filled in: its tensors are written, and what is kept of a step outlives the mode of this one.
    with torch.inference_mode(), torch.cuda.device_of(tokens):
        decoder = _DECODERS.get(cache)
        if decoder is None or decoder.model is not model or decoder.places != _Decoder.lie(model, cache):
            decoder = _DECODERS[cache] = _Decoder(model, cache, len(tokens))
        decoder.step.tell(tokens, mask, positions, cache.length)
        logits = decoder.next()
    cache.length += 1
    return logits.clone()
