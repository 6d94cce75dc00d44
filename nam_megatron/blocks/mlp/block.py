"""Dense feed-forward layer of `model.ffn_hidden_size`: Megatron's MLPLayer, symbol `-`."""

from typing import ClassVar

from nam_megatron.blocks import Block


class Mlp(Block):
    kind: ClassVar[str] = "mlp"
    symbol: ClassVar[str] = "-"
    title: ClassVar[str] = "MLP"
