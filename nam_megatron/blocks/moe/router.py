"""The router's projection, behind which the gradient of an MoE layer's input is one sum in one pass (torch side).

The input goes to the router, to the experts and to the shared expert. Megatron's backward (megatron-core 0.19.2, moe_utils.py) casts the
input to fp32 for the gradient of the router's weight, writes the input's from the router in fp32, casts that, and autograd adds the three,
two at a time: for two small products many more bytes than have to move.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nam_megatron.runtime.gpu import interpreted

TOKENS, CHANNELS, EXPERTS = 64, 128, 16  # a program's tile; CHANNELS of the input, and EXPERTS at a time
PARTS = 32  # of the tokens, whose shares of the weight's gradient are summed at the end


class ForkingRouter(TopKRouter):
    """TopKRouter whose logits come with the input for the experts and for the shared expert: the same tensor, by ways of their own."""

    inputs: tuple[Tensor, Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert self.config.moe_router_dtype == "fp32" and self.bias is None, "block.py refuses it"

    def gating(self, input: Tensor) -> Tensor:
        logits, *inputs = _Fork.apply(input, self.weight)
        self.inputs = tuple(inputs)
        return logits

    def take_inputs(self) -> tuple[Tensor, Tensor]:
        """What the experts read, and the shared expert, of the pass that runs: nothing else may read the router's input."""
        inputs, self.inputs = self.inputs, None
        assert inputs is not None, "the router has not run"
        return inputs


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return RouterGatingLinearFunction.forward(ctx, x, weight, None, torch.float32), x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor | None, *d_inputs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        others = [d for d in d_inputs if d is not None]
        if d_logits is None:
            d_logits = x.new_zeros(*x.shape[:-1], len(weight), dtype=torch.float32)
        if x.is_cuda or interpreted():
            of_x, of_weight = ctx.needs_input_grad
            d_logits = d_logits.reshape(-1, len(weight)).contiguous()
            d_x = input_gradient(d_logits, weight, *others).view_as(x) if of_x else None
            return d_x, weight_gradient(d_logits, x) if of_weight else None
        d_x, d_weight, *_ = RouterGatingLinearFunction.backward(ctx, d_logits)
        return sum([*others[1:], d_x], others[0]) if others else d_x, d_weight


def input_gradient(d_logits: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    """[tokens, width]: d_logits [tokens, experts] @ weight and others, of as many elements; each sum is rounded, as autograd would."""
    (tokens, experts), width = d_logits.shape, weight.size(1)
    first, second = (*(d.contiguous() for d in others), None, None)[:2]
    out = torch.empty(tokens, width, device=weight.device, dtype=weight.dtype)
    grid = triton.cdiv(tokens, TOKENS), triton.cdiv(width, CHANNELS)
    _input_gradient[grid](
        d_logits, weight.contiguous(), first, second, out, tokens, width, experts, TOKENS, CHANNELS, EXPERTS
    )
    return out


def weight_gradient(d_logits: Tensor, x: Tensor) -> Tensor:
    """d_logits^T [experts, tokens] @ x, in x's type."""
    (tokens, experts), width = d_logits.shape, x.size(-1)
    parts = min(PARTS, triton.cdiv(tokens, TOKENS))
    sums = torch.empty(parts, experts, width, device=x.device, dtype=torch.float32)
    grid = triton.cdiv(width, CHANNELS), parts, triton.cdiv(experts, EXPERTS)
    _weight_gradient[grid](d_logits, x.contiguous(), sums, tokens, width, experts, TOKENS, CHANNELS, EXPERTS)
    return sums.sum(0).to(x.dtype)


@triton.jit
def _product(a, b, acc):
    """acc + a @ b of an fp32 a. Three bf16 numbers are an fp32 number: beside a bf16 b the tensor cores lose nothing of it."""
    if b.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            part = a.to(tl.bfloat16)
            acc = tl.dot(part, b, acc)
            a -= part.to(tl.float32)
    else:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def _input_gradient(
    d_logits, weight, first, second, out, tokens, width, experts,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for begun in range(0, experts, EXPERTS):
        e = begun + tl.arange(0, EXPERTS)
        known, wide = e < experts, c < width
        d = tl.load(d_logits + t * experts + e[None, :], mask=(t < tokens) & known[None, :], other=0.0)
        w = tl.load(weight + e[:, None].to(tl.int64) * width + c, mask=known[:, None] & wide, other=0.0)
        total = _product(d, w, total)
    at, ok = t * width + c, (t < tokens) & (c < width)
    # The router's is the last that autograd would add; each sum is rounded.
    if first is not None:
        others = tl.load(first + at, mask=ok, other=0.0).to(tl.float32)
        if second is not None:
            others += tl.load(second + at, mask=ok, other=0.0).to(tl.float32)
            others = others.to(out.dtype.element_ty).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) + others
    tl.store(out + at, total, mask=ok)


@triton.jit
def _weight_gradient(
    d_logits, x, sums, tokens, width, experts, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, EXPERTS: tl.constexpr
):
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    e = tl.program_id(2) * EXPERTS + tl.arange(0, EXPERTS)[:, None]
    part, parts = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros((EXPERTS, CHANNELS), tl.float32)
    for begun in range(part * TOKENS, tokens, parts * TOKENS):
        t = begun + tl.arange(0, TOKENS).to(tl.int64)
        known = t < tokens
        d = tl.load(d_logits + t[None, :] * experts + e, mask=known[None, :] & (e < experts), other=0.0)
        rows = tl.load(x + t[:, None] * width + c, mask=known[:, None] & (c < width), other=0.0)
        total = _product(d, rows, total)
    at = (part * experts + e) * width + c
    tl.store(sums + at, total, mask=(e < experts) & (c < width))
