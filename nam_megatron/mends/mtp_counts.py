"""How often MTP's largest logit is the label's, of logits that our cross entropy has read already (torch side)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from nam_megatron.mends import Plan
from nam_megatron.runtime.cross_entropy import LARGEST


def install(plan: Plan | None) -> None:
    """Count by what the loss has left with the logits, where it has."""
    stock = multi_token_prediction._compute_mtp_acceptance_counts
    multi_token_prediction._compute_mtp_acceptance_counts = partial(_counts, stock)


def _counts(
    stock: Callable, logits: Tensor, labels: Tensor, mask: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Megatron's _compute_mtp_acceptance_counts, for its log: of the positions of a mask [b, s], those where the largest logit is the
    label's, and all. torch's argmax reads the logits once more, at a third of the memory's rate; here the loss has left it."""
    largest = getattr(logits, LARGEST, None)
    if largest is None:
        return stock(logits, labels, mask, *rest, **named)
    valid = mask.t().bool()
    return ((largest == labels.t()) & valid).sum().float(), valid.sum().float()
