"""Causal attention by FlashAttention 4 (flash-attn-4, CuTe DSL, Hopper) in the place of Transformer Engine's (torch side).

Megatron has the sequence before the batch, FlashAttention the batch before it. Transformer Engine (2.20) copies queries, keys, values and
outputs to the other order and back; here the kernels get views, and write outputs and gradients where Megatron's order has them. Its
public function has no place for such tensors: these are the two behind it (flash_attn/cute/interface.py, 4.0.0b36).
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from nam_megatron.errors import Problem, raise_if
from nam_megatron.packages import FLASH_INSTALL, FLASH_KEY, installed, without_flash

SERVED = (9, 0)  # compute capability


def unserved() -> Iterator[Problem]:
    """Another GPU than Hopper's, none, or a host without the library; nothing else is put in its place."""
    if problems := list(without_flash(installed)):
        yield from problems
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability() != SERVED:
        message = "FlashAttention 4 has been run on Hopper alone"
        yield Problem(message, key=FLASH_KEY, hint=f"set `{FLASH_KEY}=transformer_engine`")
    else:
        try:
            importlib.import_module("flash_attn.cute.interface")
        except Exception as err:  # whatever a broken installation throws
            why = f"{type(err).__name__}: {str(err).partition(chr(10))[0]}"
            hint = f"{FLASH_INSTALL}; or set `{FLASH_KEY}=transformer_engine`"
            yield Problem(f"FlashAttention 4 cannot be imported: {why}", key=FLASH_KEY, hint=hint)


class FlashBackend(TESpecProvider):
    """Transformer Engine's modules, but for the core attention.

    Raises:
        Refused: see `unserved`.
    """

    def __init__(self) -> None:
        super().__init__()
        raise_if(unserved())

    def core_attention(self) -> type:
        return FlashAttention


class FlashAttention(torch.nn.Module):
    """Megatron's core attention: causal, without dropout, window or context ranks, of one head width for queries and keys and one for
    values; no parameters."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,  # widths, groups of ranks: what the tensors themselves say, and what is refused
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self", (attn_mask_type, attention_type)
        dropped = (
            config.attention_dropout,
            config.window_size,
            config.context_parallel_size > 1,
            config.softmax_type != "vanilla",
        )
        assert not any(dropped), "recipe/training.py refuses them"
        self.scale = (k_channels or config.kv_channels) ** -0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[s, b, n, d], [s, b, g, d], [s, b, g, dv] in bf16 -> [s, b, n * dv]. The mask is causal whatever `attention_mask` holds."""
        assert attn_mask_type in (None, AttnMaskType.causal) and attention_bias is None and packed_seq_params is None
        # Values are a slice of the packed projection, all of which would be kept with them.
        return _Attend.apply(query, key, value.contiguous(), self.scale).flatten(2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        out = q.new_empty(*q.shape[:-1], v.size(-1))
        given = (x.transpose(0, 1) for x in (q, k, v))
        _, statistics, *_ = _flash_attn_fwd(
            *given, softmax_scale=scale, causal=True, out=out.transpose(0, 1), return_lse=True
        )
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from flash_attn.cute.interface import _flash_attn_bwd

        *kept, statistics = ctx.saved_tensors
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in kept[:3]]
        given = (x.transpose(0, 1) for x in (*kept, d_out))
        d_q, d_k, d_v = (x.transpose(0, 1) for x in gradients)
        _flash_attn_bwd(*given, statistics, softmax_scale=ctx.scale, causal=True, dq=d_q, dk=d_k, dv=d_v)
        return *gradients, None
