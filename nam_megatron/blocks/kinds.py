"""The closed list of kinds. A new block is a folder and a line here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import create_model

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
from nam_megatron.words.setting import Config, section


class Blocks(Config):
    """The config of every kind that stands: what `model.blocks` says of it, and what `execution` does."""

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


def _part(kind: type[Block], name: str, doc: str, executes: bool) -> type[Config]:
    """The keys of a kind that only execute, or those that compute, as a section of the recipe: their rows say which."""
    fields = kind.model_fields
    keys: dict[str, Any] = {key: (fields[key].annotation, fields[key]) for key in kind.keys(executes)}
    return _made(name, doc, keys)


def _section(name: str, doc: str, parts: dict[str, type[Config]]) -> type[Config]:
    return _made(name, doc, {kind: (part | None, None) for kind, part in parts.items()})


def _made(name: str, doc: str, keys: dict[str, Any]) -> type[Config]:
    """A class by a name that is its own here, by which a process that is no fork of this one finds it."""
    made = create_model(name, __base__=Config, __doc__=doc, **keys)
    made.__qualname__ = f"Made{name}"
    globals()[made.__qualname__] = made
    return made


# Where a key lies says whether it computes.
_computing = {kind: _part(block, block.__name__, block.__doc__ or "", executes=False) for kind, block in KINDS.items()}
_executing = {
    kind: _part(
        block, f"{block.__name__}Execution", f"How {block.title} is executed; the model is the same.", executes=True
    )
    for kind, block in KINDS.items()
}
_executing = {kind: part for kind, part in _executing.items() if part.model_fields}
if TYPE_CHECKING:  # a checker knows no class that is made while the program runs

    class Computing(Config): ...

    class Executing(Config): ...

else:
    Computing = _section("Blocks", "What every kind that stands computes.", _computing)  # `model.blocks`
    Executing = _section("Execution", "How every kind that stands is executed.", _executing)


def whole(computing: Config, executing: Config) -> Blocks:
    """Every kind that stands with all its keys."""
    parts = ((kind, getattr(computing, kind), getattr(executing, kind, None)) for kind in KINDS)
    blocks: dict[str, Any] = {
        kind: KINDS[kind].model_construct(**dict(computed), **dict(how or {}))
        for kind, computed, how in parts
        if computed is not None
    }
    return Blocks.model_construct(**blocks)


# What may stand at a letter of the source pattern.
LETTERS: dict[str, tuple[str, ...]] = {
    letter: tuple(kind for kind, block in KINDS.items() if letter in block.letters) for letter in ("A", "E", "M", "R")
}
