"""MLA's tensors, which others publish as they are."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.blocks.exported import Config, Piece, Tensor, norm, one, same
from nam_megatron.blocks.mla.block import Mla

INPUT_NORM = "input_layernorm."
UNBIASED = True


def keys(b: Mla) -> dict[str, Any]:
    named = ("kv_lora_rank", "qk_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm", "latent_norm_epsilon")
    return {name: getattr(b, name) for name in named} | {"q_lora_rank": b.q_lora_rank or 0}


def tensors(c: Config) -> Iterator[Tensor]:
    b, h, n, at = c["mla"], c["hidden_size"], c["num_attention_heads"], "self_attention."
    rq, rkv, dq, dr, dv = (
        b[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if rq:
        yield one("mixer.q_down.weight", f"{at}linear_q_down_proj.weight", rq, h)
    yield one("mixer.q_up.weight", f"{at}linear_q_{'up_' if rq else ''}proj.weight", n * (dq + dr), rq or h)
    yield one("mixer.kv_down.weight", f"{at}linear_kv_down_proj.weight", rkv + dr, h)
    yield one("mixer.kv_up.weight", f"{at}linear_kv_up_proj.weight", n * (dq + dv), rkv)
    yield one("mixer.out.weight", f"{at}linear_proj.weight", h, n * dv)
    if b["latent_norm"]:
        if rq:
            yield from norm(c, "mixer.q_norm", f"{at}q_layernorm.", rq)
        yield from norm(c, "mixer.kv_norm", f"{at}kv_layernorm.", rkv)


def pieces(c: Config) -> Iterator[Piece]:
    """Without a query latent the projection that makes queries has another name, `q`."""
    for piece in same(tensors(c)):
        if piece.slot == "q_up.weight" and not c["mla"]["q_lora_rank"]:
            yield Piece("q.weight", piece.tensor, piece.shape)
        else:
            yield piece
