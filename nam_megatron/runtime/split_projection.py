"""An input projection whose last rows multiply in bf16, beside the others in FP8 (torch side).

The parameter, its gradient's buffer and its checkpoints stay one: Transformer Engine's norm-and-linear (2.20) multiplies by a view of the
first rows and hands the norm's output on, by which the last ones are multiplied. A microbatch's gradient of the last ones is rounded to
bf16 before it is added to the buffer, as Megatron adds any gradient that Transformer Engine's GEMMs do not add themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nam_megatron.runtime.aligned import added


def prepare(projection: Any) -> None:
    """Have Transformer Engine's norm-and-linear return what its norm gave, too."""
    assert not projection.config.delay_wgrad_compute, "the gradient of the first rows has to be there when autograd is"
    projection.return_layernorm_output = True


def split(projection: Any, hidden: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """[s, b, hidden] -> [s, b, rows] by the first rows of the weight, in the precision that is on, and [s, b, *] by the others, in the
    weight's own."""
    weight = projection.weight
    accumulate = projection.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled()
    first, last = _Split.apply(weight, rows, accumulate)
    if accumulate:
        first.main_grad, first.grad_added_to_main_grad = weight.main_grad[:rows], False
        first.overwrite_main_grad = getattr(weight, "overwrite_main_grad", False)
    projection._get_weight_tensors = lambda: [first]
    try:
        (out, normed), _ = projection(hidden)
        assert out.size(-1) == rows, "this Transformer Engine takes its weight another way"
    finally:
        del projection._get_weight_tensors
    return out, F.linear(normed, last)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int, accumulate: bool) -> tuple[Tensor, Tensor]:
        ctx.weight, ctx.rows, ctx.accumulate = weight, rows, accumulate
        return weight[:rows], weight[rows:]

    @staticmethod
    def backward(ctx: Any, d_first: Tensor, d_last: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.accumulate:
            return torch.cat([d_first, d_last]), None, None
        return added(ctx.weight, d_last, ctx.rows), None, None  # Transformer Engine has added the other rows'
