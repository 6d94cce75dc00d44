"""Arithmetic that several laws share: sizes that have to divide one another, and shares of columns."""

from collections.abc import Mapping
from math import nextafter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nam_megatron.recipe.layout import Parallel

BF16_ROW = 8  # elements of 16 bytes: what a GEMM of bf16 wants a row to be a multiple of
FP8_ROW = 16  # what one of FP8 wants
UNEVEN = "{what} {total} is not divisible by `{by_key}` = {by}"  # says, of `uneven` and `unshared`

SHARED = (
    "fewer ranks that share it, or a multiple of {by}, which is another model"  # the way, of ranks that share a size
)
# FP8's kept inputs and rates of Mamba-3 in bf16, beside each other: nobody has tried them apart.


def uneven(what: str, total: int, by: int, by_key: str) -> Mapping[str, object] | None:
    """The words for UNEVEN if `by` does not divide `total`."""
    return {"what": what, "total": total, "by": by, "by_key": by_key} if total % by else None


def unshared(what: str, total: int, parallel: "Parallel") -> Mapping[str, object] | None:
    """The words for UNEVEN if the ranks that share a sequence's heads do not divide `total`."""
    by_key = "parallel.tensor" if parallel.context == 1 else "parallel.tensor * parallel.context"
    return uneven(what, total, parallel.tensor * parallel.context, by_key)


def fits(columns: int, wanted: float) -> str:
    """For somebody who turns `wanted` of so many columns: the shares nearest to it that turn whole pairs, as a person may write them."""
    low = 2 * int(wanted // 2)
    # The product with a rounded quotient may lie below the whole number, which Megatron would round down.
    shares = (
        n / columns if columns * (n / columns) >= n else nextafter(n / columns, 1)
        for n in (low, low + 2)
        if 0 < n <= columns
    )
    return f"{' or '.join(f'{share!r}' for share in shares)} fits"
