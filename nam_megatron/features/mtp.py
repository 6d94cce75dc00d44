"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the pattern's `/` suffix."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from nam_megatron.features import Feature
from nam_megatron.setting import Setting


class Mtp(Feature):
    name: ClassVar[str] = "mtp"

    depths: Literal[0, 1, 2]
    loss_weight: NonNegativeFloat

    @property
    def on(self) -> bool:
        return self.depths > 0

    def settings(self, plan) -> Iterator[Setting]:
        if self.on:  # how many depths there are, the pattern says
            yield Setting("mtp_loss_scaling_factor", self.loss_weight, "weight of the extra losses", "loss_weight")
            yield Setting("mtp_use_repeated_layer", False, "each depth has its own weights")
            yield Setting("mtp_detach_heads", False, "the extra losses train the trunk")
