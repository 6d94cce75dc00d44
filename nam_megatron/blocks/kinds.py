"""The closed list of kinds. A new block is a folder and a line here."""

from nam_megatron.blocks import Block
from nam_megatron.blocks.attention.block import Attention
from nam_megatron.blocks.dsa.block import Dsa
from nam_megatron.blocks.m2rnn.block import M2Rnn
from nam_megatron.blocks.mamba2.block import Mamba2
from nam_megatron.blocks.mamba3.block import Mamba3
from nam_megatron.blocks.mla.block import Mla
from nam_megatron.blocks.mlp.block import Mlp
from nam_megatron.blocks.moe.block import Moe
from nam_megatron.setting import Config

KINDS: dict[str, type[Block]] = {
    "attention": Attention,
    "mla": Mla,
    "dsa": Dsa,
    "moe": Moe,
    "mlp": Mlp,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "m2rnn": M2Rnn,
}

# What may stand at a letter of the source pattern.
LETTERS: dict[str, tuple[str, ...]] = {
    "A": ("attention", "mla", "dsa"),
    "E": ("moe", "mlp"),
    "M": ("mamba2", "mamba3"),
    "R": ("m2rnn", "mamba2", "mamba3"),
}


class Blocks(Config):
    """`model.blocks`: the config of every kind, whether the pattern uses it or not."""

    attention: Attention
    mla: Mla
    dsa: Dsa
    moe: Moe
    mlp: Mlp
    mamba2: Mamba2
    mamba3: Mamba3
    m2rnn: M2Rnn
