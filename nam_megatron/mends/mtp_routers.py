"""The losses of MTP's routers in the log (torch side)."""

from functools import wraps
from typing import Any

from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from torch import Tensor

from nam_megatron.mends import Plan


def install(plan: Plan | None) -> None:
    """Give a router that is beyond the table's rows the last one; the log sums all rows.

    Megatron 0.19.2 numbers MTP's routers by their place in a depth, behind the layers of the main stack (attach_and_log_load_balancing_loss
    and apply_z_loss, transformer/moe/router.py), and its table has a row for each depth.
    """
    stock = MoEMetricsTracker.record

    @wraps(stock)
    def record(
        self: MoEMetricsTracker,
        name: str,
        value: Tensor,
        layer_number: int | None,
        num_layers: int,
        *rest: Any,
        **more: Any,
    ) -> None:
        row = None if layer_number is None else min(layer_number, num_layers)
        stock(self, name, value, row, num_layers, *rest, **more)

    MoEMetricsTracker.record = record
