"""The closed list of kinds. A new block is a folder and a line here."""

from collections.abc import Iterator

from nam_megatron.blocks import Block
from nam_megatron.blocks.attention.block import Attention
from nam_megatron.blocks.dsa.block import Dsa
from nam_megatron.blocks.gdn.block import Gdn
from nam_megatron.blocks.m2rnn.block import M2Rnn
from nam_megatron.blocks.mamba2.block import Mamba2
from nam_megatron.blocks.mamba3.block import Mamba3
from nam_megatron.blocks.mla.block import Mla
from nam_megatron.blocks.mlp.block import Mlp
from nam_megatron.blocks.moe.block import Moe
from nam_megatron.setting import Config, section


class Blocks(Config):
    """`model.blocks`: the config of every kind that stands."""

    attention: Attention | None = None
    mla: Mla | None = None
    dsa: Dsa | None = None
    moe: Moe | None = None
    mlp: Mlp | None = None
    mamba2: Mamba2 | None = None
    gdn: Gdn | None = None
    mamba3: Mamba3 | None = None
    m2rnn: M2Rnn | None = None

    def of(self, kind: str) -> Block:
        """The config of a kind that stands."""
        block: Block | None = getattr(self, kind)
        assert block is not None, f"`{kind}` does not stand"
        return block

    def all(self) -> Iterator[Block]:
        return (block for kind in KINDS if (block := getattr(self, kind)) is not None)


def _kinds() -> dict[str, type[Block]]:
    """The classes of the fields above, by name."""
    found = {}
    for name, field in Blocks.model_fields.items():
        kind = section(field.annotation)
        assert kind is not None and issubclass(kind, Block), name
        found[name] = kind
    return found


KINDS: dict[str, type[Block]] = _kinds()

# What may stand at a letter of the source pattern.
LETTERS: dict[str, tuple[str, ...]] = {
    letter: tuple(kind for kind, block in KINDS.items() if letter in block.letters) for letter in ("A", "E", "M", "R")
}
