"""What autograd is given for a weight whose gradient has been added to its buffer already (torch side)."""

from collections.abc import Sequence

import torch


def nothing(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A gradient of this shape without a row, sparse, for autograd, in the place of one that has been added to its buffer.

    In the form of Transformer Engine's get_dummy_wgrad, whose `zero` asks for one that may be added: this one always may.
    """
    rows = torch.empty(1, 0, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
    values = torch.empty(0, *shape[1:], dtype=dtype, device=rows.device)
    return torch.sparse_coo_tensor(rows, values, tuple(shape), check_invariants=False)
