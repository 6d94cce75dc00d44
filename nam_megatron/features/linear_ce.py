"""Output projection and cross entropy in one pass. Megatron 0.19.2 has it for GPT, for no hybrid."""

from typing import ClassVar

from nam_megatron.features import Switch


class LinearCe(Switch):
    name: ClassVar[str] = "linear_ce"
    missing: ClassVar[str | None] = "the fused output layer"
