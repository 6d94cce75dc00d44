"""The keys of a recipe: which there are, and what is said to somebody who wrote another."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from nam_megatron.features.names import FEATURES
from nam_megatron.recipe.recipe import Recipe
from nam_megatron.words.setting import Config, section

# Tables of what published config.json files call it; what a word of theirs is where no key is called so; and Megatron's for several keys.
PUBLISHED = Path(__file__).parents[1] / "hf" / "families"
DEPTH = "model.depth"
COMPUTED = {
    "layers": DEPTH, "ffn": "model.ffn_hidden_size", "tie_word_embeddings": "model.tied_embeddings",
    "max_position_embeddings": "model.seq_length", "aux_loss": "model.blocks.moe.aux_loss_coeff",
    "partial_rotary_factor": "model.blocks.attention.rotary_percent",
}  # fmt: skip
MEGATRONS = {
    "num_layers": DEPTH, "hybrid_layer_pattern": "model.pattern",
    **dict.fromkeys(("num_query_groups", "kv_heads", "num_kv_heads"), "model.blocks.attention.query_groups"),
}  # fmt: skip

SWITCHED = "features are switched by key: `feature.NAME.KEY=...`; `~feature.NAME` turns one off"


def value_at(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key; None where it does not stand."""
    node: Any = recipe
    for part in key.split("."):
        node = getattr(node, part, None)
    return node


def keys_at(loc: Iterable[Any]) -> tuple[str, ...]:
    """Names of the keys that exist under `loc`, the parts of a key; none where `loc` itself does not exist."""
    found = config_at(loc)
    return tuple(found.model_fields) if found else ()


def config_at(loc: Iterable[Any]) -> type[Config] | None:
    """The config class of the section at `loc`, the parts of a key; None where there is none."""
    cls: type[Config] | None = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        cls = section(cls.model_fields[part].annotation) if cls and part in cls.model_fields else None
    return cls


def values_at(key: str) -> Iterator[str]:
    """The words that a key may have, where they are a few."""
    *parents, last = key.split(".")
    config = config_at(parents)
    if config is None or last not in config.model_fields:
        return
    kind = config.model_fields[last].annotation
    for one in (kind, *get_args(kind)):
        if get_origin(one) is Literal:
            yield from map(str, get_args(one))
        elif one is bool:
            yield from ("true", "false")


def keys_hint(loc: Sequence[Any]) -> str:
    """For somebody who wrote a key under `loc` that does not exist. At the top a command has words of its own."""
    names = keys_at(loc) if loc else ()
    return f"there are: {', '.join(names)}" if names else "`--cfg job` prints every key there is"


def whole_hint(written: Iterable[str]) -> str | None:
    """For somebody who wrote the end of a key, or left something in it out, or Megatron's name of it; of a feature its switch. The first
    that is one tells.
    """
    written = list(written)
    for key in written:
        above, _, last = key.rpartition(".")
        found = [
            f"`{known}.{feature.switch}`" if (feature := FEATURES.get(known.removeprefix("feature."))) else f"`{known}`"
            for known in (known for known in _known() if not known.startswith("lane."))  # a lane's are its name's
            if known.endswith(f".{key}") or (known.startswith(f"{above}.") and known.endswith(f".{last}"))
        ]
        if found:
            return f"a recipe key is written whole: {' or '.join(found)}"
    for key in written:
        last = key.rpartition(".")[2]
        if found := [f"`{known}`" for known in _known() if argument(known) == last]:
            return f"of Megatron's `--{last.replace('_', '-')}` the recipe's key is {' or '.join(found)}"
    for key in written:
        last = key.rpartition(".")[2]
        if here := called_elsewhere().get(last):
            more = ", where attention and the MLP after it are two layers" if here == DEPTH else ""
            return f"what others call `{last}` is `{here}` here{more}"
    for key in written:
        above, _, last = key.rpartition(".")
        found = [f"`{known}`" for known in _known() if known.endswith(f".{last}")]
        if above in _known() and 0 < len(found) < 4:
            return f"elsewhere there is {' or '.join(found)}"
    return None


def argument(key: str) -> str | None:
    """Megatron's argument that gets the value of a key as it stands."""
    *parents, last = key.split(".")
    config = config_at(parents)
    return config.row(last).argument if config and last in config.model_fields else None


@cache
def called_elsewhere() -> dict[str, str]:
    """Recipe keys by names in published config.json files, Llama's first, and by those of Megatron's that no one key is."""
    known, found = {*_known()}, dict(MEGATRONS)
    for path in sorted(PUBLISHED.glob("*.yaml"), key=lambda path: (path.stem != "llama", path.stem)):
        for name, said in yaml.safe_load(path.read_text(encoding="utf-8")).get("config", {}).items():
            word = said.partition(" or ")[0] if isinstance(said, str) else ""
            ours = (COMPUTED.get(word, ""), f"model.{word}", f"model.blocks.{word}")
            if here := next((key for key in ours if key in known), None):
                found.setdefault(name, here)
    return found


def _known(cls: type[Config] = Recipe, path: str = "") -> Iterator[str]:
    """Every key that the command line can give, sections too."""
    for name, field in cls.model_fields.items():
        yield path + name
        inner = section(field.annotation)
        if inner and getattr(field.annotation, "__origin__", None) not in (tuple, dict):
            yield from _known(inner, f"{path}{name}.")
