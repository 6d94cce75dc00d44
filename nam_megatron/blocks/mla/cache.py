"""What MLA remembers while decoding: one latent and one rotated rope head per token, for all heads."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LatentCache:
    """latents: [length, b, rkv + dr], the first `filled` of them written.

    query_weight: [n (rkv + dr), rq] of naive.absorbed_weight; value_weight: [n, dv, rkv]. Both are of this tensor rank's heads.
    """

    latents: Tensor
    query_weight: Tensor
    value_weight: Tensor
    filled: int = 0

    @property
    def length(self) -> int:
        return len(self.latents)

    def next(self, tokens: int) -> slice:
        """Where the next tokens stand."""
        end = self.filled + tokens
        assert end <= self.length, f"a cache of {self.length} tokens, {end} asked for"
        return slice(self.filled, end)

    def attend(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """[s, b, n dv]: appends the keys of s tokens, then attends from each to all up to itself.

        query [s, b, n, rkv + dr]; key [s, b, 1, rkv + dr].
        """
        new = self.next(len(key))
        self.latents[new] = key[:, :, 0]
        seen = self.latents[: new.stop]
        scores = torch.einsum("sbnc,tbc->bnst", query, seen).float() * scale
        later = torch.ones(len(key), new.stop, dtype=torch.bool, device=seen.device).triu(new.start + 1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1).to(query.dtype)
        self.filled = new.stop
        mixed = torch.einsum("bnst,tbc->sbnc", shares, seen[..., : self.value_weight.size(-1)])
        return torch.einsum("sbnc,ndc->sbnd", mixed, self.value_weight).flatten(2)
