"""DSA in plain torch: the definition that kernel.py is held to, and `kernels=naive`.

Whole [s, t] matrices, autograd, any device and floating type; fp64 tensors make it a reference. Semantics are those of
megatron-core 0.19.2, transformer/experimental_attention_variant/dsa.py (DeepSeek-V3.2, section 2.1), causal and without
padding. Shapes: s queries, the last ones of t positions with keys (of whole sequences s = t); b samples, n heads of the attention, h of
the indexer; r latent and p RoPE channels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOG_FLOOR = 1e-10  # of a target's probability inside the logarithm: upstream's


@dataclass(frozen=True)
class Selection:
    """selected: bool [b, s, t], the keys (last axis) that each query attends to."""

    selected: Tensor

    def of(self, rows: slice) -> Tensor:
        """The same of some queries: bool [b, rows, t]."""
        return self.selected[:, rows]


def causal(s: int, t: int, device: torch.device) -> Tensor:
    """bool [s, t]: key (last axis) not after query."""
    return torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """sum over h of w relu(q . k), -inf for keys after the query: [b, s, t], fp32 or wider.

    q [s, b, h, d], k [t, b, d], w [s, b, h], already scaled.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dots = torch.einsum("ibhd,jbd->bhij", q.to(wide), k.to(wide)).relu()
    scores = torch.einsum("bhij,ibh->bij", dots, w.to(wide))
    return scores.masked_fill(~causal(len(q), len(k), q.device), -torch.inf)


def select(scores: Tensor, top_k: int) -> Selection:
    """The `top_k` largest scores of each query, all of them where it has fewer keys. Of equal scores the earlier keys are taken."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return Selection(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (scores > -torch.inf))


def attend(query: Tensor, key: Tensor, selection: Selection, scale: float, rank: int) -> Tensor:
    """softmax(scale query . key) over the selected keys times the latent part of the keys: [s, b, n, r].

    query [s, b, n, r + p]; key [t, b, 1, r + p], one for all heads, its first `rank` = r channels the value too.
    """
    p = _probabilities(query, key, selection.selected, scale)
    return torch.einsum("bnij,jbr->ibnr", p.to(key.dtype), key[:, :, 0, :rank])


def values(latent: Tensor, weight: Tensor) -> Tensor:
    """Each head's value from its latent output: [s, b, n d] of latent [s, b, n, r] and weight [n, d, r]."""
    return torch.einsum("sbnr,ndr->sbnd", latent, weight).flatten(2)


def indexer_kl(
    q: Tensor, k: Tensor, w: Tensor, scores: Tensor, query: Tensor, key: Tensor, scale: float, group=None, factor=1.0
) -> Tensor:
    """`factor` times the sum over all queries of KL(attention || indexer), each over all keys up to the query; a scalar.

    The attention's distribution is that over all keys, not only over the selected ones, averaged over the heads of all
    ranks of `group`; no gradient flows into it. `scores` are index_scores of q, k and w, through which gradients flow.
    """
    visible = causal(len(query), len(key), query.device)
    with torch.no_grad():
        target = _probabilities(query, key, visible, scale).sum(1)
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(target, group=group)
        target /= target.sum(-1, keepdim=True)
    predicted = scores.log_softmax(-1).masked_fill(~visible, 0.0)
    return factor * (target * (target.clamp_min(LOG_FLOOR).log() - predicted)).sum()


@torch.no_grad()
def kept(query: Tensor, key: Tensor, selection: Any, scale: float, rows: slice) -> Tensor:
    """Of the attention over all keys up to each query of `rows`, the share that falls on the selected ones: [b, n, rows].

    query [s, b, n, r + p] and key [t, b, 1, r + p], as attend's; selection: this file's or kernel.py's.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    positions = torch.arange(len(key), device=query.device)
    hidden = positions > positions[len(key) - len(query) :][rows].unsqueeze(-1)
    shares = []
    for sample, selected in enumerate(selection.of(rows)):  # one at a time: [n, rows, t] in fp32, twice
        dots = torch.einsum("ind,jd->nij", query[rows, sample].to(wide), key[:, sample, 0].to(wide)).mul_(scale)
        shares.append(dots.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(~selected, 0.0).sum(-1))
    return torch.stack(shares)


def _probabilities(query: Tensor, key: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[b, n, s, t]; visible: bool [b, s, t] or [s, t], in every row at least one key."""
    wide = torch.promote_types(query.dtype, torch.float32)
    dots = torch.einsum("ibnd,jbd->bnij", query.to(wide), key[:, :, 0].to(wide)) * scale
    return dots.masked_fill(~visible.unsqueeze(-3), -torch.inf).softmax(-1)
