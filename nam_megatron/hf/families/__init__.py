"""Published architectures: a table of names for each `model_type` of config.json, and where our tensors' values stand in theirs.

Imports no torch. A table says
    like           the family whose table this one goes over
    architecture   the class of transformers
    parts          layers of ours in one of theirs
    layer          what their tensors of a layer begin with
    names          of the model and of each kind: slots (blocks/exported.py) and what comes after `layer` in theirs; `weight` and `bias` are
                   added where a name stands for a module
    later          whether others that compute the same model come before it
    ahead          what tensors of layers of token prediction begin with
    mtp            those layers, where they are read: keys of config.json that say how many (`depths`) and of which `pattern`, where one
                   does; the `most` of them; what tensors of a `layer` begin with; `names` beside it; `copies` of tensors of the model
    spelled        other names under which a tensor is found
    opened         what transformers' class has where files have another beginning: adapters go by its modules
    config         keys of their config.json, and what they are of ours (config.py)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import yaml

from nam_megatron.blocks.exported import Config, Piece, Tensor, same
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.errors import Problem, Refused
from nam_megatron.hf import describe

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Family:
    """A table of names, by `model_type`."""

    model_type: str
    architecture: str
    layer: str
    parts: int
    names: Mapping[str, Mapping[str, str]]
    ahead: tuple[str, ...] = ()
    mtp: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    opened: Mapping[str, str] = field(default_factory=dict)

    def called(self, kind: str, slot: str) -> str | None:
        """What comes after `layer` in their name of a slot; None: the family has none."""
        table = self.names.get(kind, {})
        if (exact := table.get(slot)) is not None:
            return exact
        stem, _, what = slot.rpartition(".")
        return f"{table[stem]}.{what}" if stem in table and what in ("weight", "bias") else None


@dataclass(frozen=True)
class Place:
    """Where values of one of our tensors stand in a published one."""

    name: str
    piece: Piece


def known() -> list[str]:
    """Every `model_type` that has a table."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def family(model_type: str) -> Family:
    """The table of a `model_type`. Raises Refused: there is none."""
    if model_type not in known():
        said = f"weights of `{model_type}` are not read: it has no table of names"
        raise Refused(said, key="model_type", hint=f"there are: {', '.join(known())}")
    tree = _tree(model_type)
    return Family(model_type, tree["architecture"], tree["layer"], tree["parts"], tree["names"], tuple(tree.get("ahead", ())),
                  tree.get("mtp", {}), tree.get("spelled", {}), tree.get("config", {}), tree.get("opened", {}))  # fmt: skip


@cache
def _tree(model_type: str) -> dict[str, Any]:
    tree = yaml.safe_load((HERE / f"{model_type}.yaml").read_text(encoding="utf-8"))
    base = _tree(tree["like"]) if "like" in tree else {"names": {}}
    names = {
        k: {**base["names"].get(k, {}), **tree.get("names", {}).get(k, {})}
        for k in {**base["names"], **tree.get("names", {})}
    }
    return {**base, **tree, "names": names, "config": {**base.get("config", {}), **tree.get("config", {})}}


def own() -> list[Family]:
    """The families that are architectures of their own, not another's under a second name."""
    has = [
        name
        for name in known()
        if "architecture" in yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    ]
    return [family(name) for name in sorted(has, key=lambda name: _tree(name).get("later", False))]


def places(of: Family, c: Config) -> Iterator[tuple[Tensor, list[Place]]]:
    """Every tensor of ours and where its values stand, in the order in which ours are written.

    Raises:
        Refused: the family has no such layers, or no name for a tensor, which is named.
    """
    pieces = _by_tensor(of, c)
    nameless = []
    for tensor in describe.tensors(c):
        found = pieces.get(tensor.name, [])
        if sum(prod(place.piece.shape) for place in _whole(found)) < prod(tensor.shape):
            nameless.append(tensor.name)
        yield tensor, found
    if nameless:
        more = f" and {len(nameless) - 1} more" if len(nameless) > 1 else ""
        message = f"`{of.model_type}` has no tensor for `{nameless[0]}`{more}"
        raise Refused(message, key="model", hint="it is another model")


def _whole(found: list[Place]) -> list[Place]:
    """Each published tensor once: of one that packs several of ours every piece has the whole shape."""
    return list({place.name: place for place in found}.values())


def _by_tensor(of: Family, c: Config) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for name, piece in _pieces(of, c):
        found.setdefault(piece.tensor, []).append(Place(name, piece))
    return found


def _pieces(of: Family, c: Config) -> Iterator[tuple[str, Piece]]:
    beside = [tensor for tensor in describe.tensors(c) if ".layers." not in tensor.name]
    for piece in same(beside):
        slot = piece.slot.removeprefix("model.")
        if (name := of.called("model", slot)) is not None:
            yield name, piece
    for index, kind in enumerate(c["layer_kinds"]):
        at = of.layer.format(layer=index // of.parts)
        for piece in _of_layer(c, kind):
            if (name := of.called(kind, piece.slot)) is not None:
                yield (
                    f"{at}.{name.format(expert=piece.expert)}",
                    replace(piece, tensor=f"model.layers.{index}.{piece.tensor}"),
                )
    yield from _ahead(of, c)


def _ahead(of: Family, c: Config) -> Iterator[tuple[str, Piece]]:
    """Of layers of token prediction, where the family's are read."""
    for depth in range(c["mtp_depths"] if of.mtp else 0):
        here, numbers = f"model.mtp.{depth}.", _numbers(of, c, depth)
        own = [t for t in describe.tensors(c) if t.name.startswith(here) and ".layers." not in t.name]
        for piece in same(own):
            stem, _, what = piece.slot.removeprefix(here).rpartition(".")
            if stem in of.mtp["names"]:
                yield f"{of.mtp['names'][stem].format(**numbers)}.{what}", piece
        for index, kind in enumerate(c["mtp_kinds"]):
            at = of.mtp["layer"].format(**numbers, index=index)
            for piece in _of_layer(c, kind):
                if (name := of.called(kind, piece.slot)) is not None:
                    inner = replace(piece, tensor=f"{here}layers.{index}.{piece.tensor}")
                    yield f"{at}.{name.format(expert=piece.expert)}", inner


def _numbers(of: Family, c: Config, depth: int) -> dict[str, int]:
    return {"layer": len(c["layer_kinds"]) // of.parts + depth, "depth": depth, "last": len(c["mtp_kinds"]) - 1}


def copies(of: Family, c: Config) -> dict[str, str]:
    """Tensors of layers of token prediction that are a tensor of the model once more: its name, by theirs."""
    found = {}
    for depth in range(c["mtp_depths"]):
        for name, slot in of.mtp.get("copies", {}).items():
            if (whole := of.called("model", slot)) is not None:
                found[name.format(**_numbers(of, c, depth))] = whole
    return found


def _of_layer(c: Config, kind: str) -> Iterator[Piece]:
    facet = describe.FACETS[kind]
    yield from same(tensor for tensor in describe.layer(c, kind, False) if tensor.name.startswith("norm."))
    yield from facet.pieces(c)


def unlike(of: Family, c: Config) -> Iterator[Problem]:
    """Why layers of ours do not make layers of theirs."""
    kinds = c["layer_kinds"]
    for index, kind in enumerate(kinds):
        if kind not in of.names:
            yield Problem(f"layer {index + 1} is `{kind}`, which `{of.model_type}` has not", key="model.pattern")
            return
        if of.parts == 2 and ("E" in KINDS[kind].letters) != (index % 2 == 1):
            said = (
                f"layers of `{of.model_type}` are a mixer and a feed-forward layer, and layer {index + 1} is `{kind}`"
            )
            yield Problem(said, key="model.pattern")
            return
    if c["mtp_depths"] > of.mtp.get("most", 0):
        said = f"MTP of depth {c['mtp_depths']} is no published layer of token prediction of `{of.model_type}`"
        yield Problem(said, key="feature.mtp.depths")
    if len(kinds) % of.parts:
        yield Problem(f"{len(kinds)} layers are no whole layers of `{of.model_type}`", key="model.depth")


def beyond(of: Family, c: Config) -> tuple[str, ...]:
    """What published tensors of token prediction begin with."""
    return tuple(prefix.format(layers=len(c["layer_kinds"]) // of.parts) for prefix in of.ahead)
