"""DSA's selection and sparse attention inside an exported model (torch side).

Batches with padding, or behind a cache whose length the tiles do not divide, are left to plain torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nam_megatron.blocks.dsa import kernel
from nam_megatron.blocks.dsa.block import TILE
from nam_megatron.blocks.mla.block import WIDTHS
from nam_megatron.runtime.served import served


def unserved(config: Any) -> Iterator[str]:
    widths = {"indexer heads": config.dsa["indexer_head_dim"], "latents": config.mla["kv_lora_rank"]}
    widths["rotary heads"] = config.mla["qk_rope_head_dim"]
    odd = {name: width for name, width in widths.items() if width not in WIDTHS}
    yield from (f"DSA's kernels take {name} of {WIDTHS}, not {width}" for name, width in odd.items())


def put(mixer: Any) -> None:
    mixer.attended = served(_attended, mixer)


def _attended(self: Any, query: Tensor, rows: Tensor, index: tuple[Tensor, ...] | None, step: Any) -> Tensor:
    new, total = query.size(1), rows.size(1)
    if step.real is not None or new == 1 or (total - new) % TILE:  # alike for all layers of a pass
        return type(self).attended(self, query, rows, index, step)
    if index is not None:
        with torch.no_grad():
            q, weights, keys = (x.transpose(0, 1) for x in index)
            step.indices[self.index] = kernel.select(kernel.index_scores(q, keys, weights), self.top_k)
    selection = step.indices[self.index if self.source is None else self.source]
    mixed = kernel.attend(query.transpose(0, 1), rows.transpose(0, 1).unsqueeze(2), selection, self.scale, self.rkv)
    return kernel.values(mixed, self.kv_up.weight.unflatten(0, (self.heads, -1))[:, self.dq :]).transpose(0, 1)
