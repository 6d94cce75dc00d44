"""Megatron without torch's compilers, which are nearly half of what its import takes (torch side)."""

import torch


def functions() -> None:
    """What Megatron decorates with torch.compile stays as it is, if it is imported after this: where nothing is computed, or on a CPU."""
    torch.compile = lambda model=None, **_: model or (lambda decorated: decorated)
