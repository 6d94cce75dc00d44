"""Weights in the form in which others publish them, to Megatron's and back (torch side). On a CPU host, a tensor at a time.

Nothing is run from a folder, and of its files safetensors and JSON alone are read. What a tensor must be is the plan's: each of ours gets
all its values, each of theirs goes somewhere, or the import is refused with every name.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nam_megatron.blocks.exported import Config, Tensor, one
from nam_megatron.compile.argv import load_plan
from nam_megatron.compile.plan import Plan
from nam_megatron.compile.plan import plan as plan_of
from nam_megatron.data import tokenizer
from nam_megatron.errors import Problem, Refused, counted, raise_if, shown
from nam_megatron.hf import describe, distributed, families, folder, quantized
from nam_megatron.hf import export as exports
from nam_megatron.hf.adapters import Merged
from nam_megatron.hf.distributed import Lazy
from nam_megatron.hf.export import Say
from nam_megatron.hf.families import Family, Place
from nam_megatron.hf.families.config import written
from nam_megatron.hf.folder import DTYPES
from nam_megatron.lint import lint, preset, recipe
from nam_megatron.lint.huggingface import of_text
from nam_megatron.lint.huggingface import words as of_config

INDEX, SINGLE = folder.INDEX, folder.SINGLE
MOST = 12  # findings that are said
ADAPTERS = "adapter_config.json"
DERIVED = "rotary_emb.inv_freq"  # of older files: it follows from the config


@dataclass
class Source:
    """A published folder's tensors. spelled: names in the files that are others in the table. left_out: names of what is no text's."""

    at: Path
    shelf: folder.Shelf
    spelled: dict[str, str]
    form: quantized.Form
    left_out: frozenset[str]
    rounded: list[str] = field(default_factory=list)

    def names(self) -> set[str]:
        """Without the scales of quantized weights, which belong to these."""
        names = {name for name in self.form.names(self.shelf.found) - self.left_out if not name.endswith(DERIVED)}
        return {self.spelled.get(name, name) for name in names}

    @property
    def files(self) -> set[str]:
        return {name for name, _, _ in self.shelf.found.values()}

    def stored(self, name: str) -> str:
        """Its name in the files."""
        others = (other for other, usual in self.spelled.items() if usual == name)
        return next((other for other in others if other in self.shelf.found), name)

    def file(self, name: str) -> str:
        """Where its values lie."""
        return self.shelf.found[self.form.key(self.stored(name), self.shelf.found)][0]

    def read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], less: float = 0.0) -> torch.Tensor:
        """A published tensor of that shape as our type, `less` taken off, what was rounded remembered. Raises Refused: no such numbers."""
        stored = self.stored(name)
        value = self.form.read(self.shelf, stored, shape)
        made = (value.float() - less).to(dtype) if less else value.to(dtype)
        if not made.isfinite().all():  # what is too large for our type, too
            said = f"`{stored}` of `{self.file(name)}` holds a NaN or an infinity as {str(dtype)[6:]}"
            raise Refused(said, hint="the file is damaged, or its training was: get it again")
        back = (made.float() + less).to(value.dtype) if less else made.to(value.dtype)
        if not torch.equal(back, value):
            self.rounded.append(name)
        return made


def is_published(path: Path) -> bool:
    """Whether a folder has a config.json that is no export of ours."""
    at = path / folder.CONFIG
    return at.exists() and not (path / folder.MANIFEST).exists() and folder.load_json(at).get("model_type") != "nam"


def load(path: Path, plan: Path, out: Path, without_mtp: bool, say: Say) -> None:
    """Write published weights as Megatron weights that a run of `plan` starts from: `schedule.load=OUT`.

    without_mtp: leave out layers of token prediction that the plan has not.

    Raises:
        Refused: another model than the plan's, a tensor without a place or the reverse, damaged files, an `out` that is there.
    """
    lowering = load_plan(plan)
    raise_if(describe.objections(lowering.plan))
    config, tree = describe.config(lowering.plan), folder.load_json(path / folder.CONFIG)
    if without_mtp and config["mtp_depths"]:
        hint = "leave one of them out: `feature.mtp.depths=0` in the plan"
        raise Refused("the plan has the layers that are to be left out", key="--without-mtp", hint=hint)
    text, beside = of_text(tree)
    of = families.family(str(text.get("model_type")))
    raise_if(
        [
            *_of_another(tree, str(path / folder.CONFIG), config),
            *families.unlike(of, config),
            *_depths(text, of, config),
        ]
    )
    places = list(families.places(of, config))
    source = _source(path, tree, text, of)
    if config["tie_word_embeddings"]:
        _tie(source, of)
    ahead = families.beyond(of, config)
    _tell(tree, str(path / folder.CONFIG), say, but=beside)
    _copies(source, families.copies(of, config))
    misfits = list(_misfits(source, places, ahead if without_mtp else (), ahead))
    raise_if([*misfits[:MOST], *([Problem(f"and {more} more")] if (more := len(misfits) - MOST) > 0 else [])])
    for other in sorted(at.name for at in path.glob("*.safetensors") if at.name not in source.files):
        say(
            f"`{path / other}` is not read: {f'`{INDEX}` does not name it' if (path / INDEX).exists() else f'`{SINGLE}` is'}"
        )
    with folder.making(out) as part:
        if source.left_out:
            why = "; ".join(beside) or "equal to the embedding"
            say(f"{why}: {counted(len(source.left_out), 'tensor')} left out, as `{min(source.left_out)}`")
        say(f"{len(places)} tensors, {sum(tensor.nbytes for tensor, _ in places) / 1e9:.2f} GB")
        distributed.write(part, dict(_lazy(source, places)), lowering)
        if source.rounded:
            some = ", ".join(dict.fromkeys(source.rounded[:3]))
            say(
                f"{len(source.rounded)} tensors were rounded to the type of the plan's: {some}{', ...' if len(source.rounded) > 3 else ''}"
            )
        exports.keep_tokenizer(path, part)


# What transformers puts a model of several kinds of input in, and within it the one of text.
WHOLE, TEXT = "model.", "model.language_model."


def _source(path: Path, tree: Mapping[str, Any], text: Mapping[str, Any], of: Family) -> Source:
    """text: the part of config.json that is the model of text, or all of it.

    Raises Refused: files that cannot be read, or weights in a form that is not.
    """
    form = quantized.form(path, tree, text, packs=of.model_type == "gpt_oss")
    index = path / INDEX
    said = folder.load_json(index).get("weight_map") if index.exists() else None
    if not isinstance(said, dict | None):
        raise Refused(f"`weight_map` of `{index}` is no table", hint="get the file again")
    if (path / ADAPTERS).exists():  # which transformers would put into the weights
        hint = "merge them, or take them away if they are not meant"
        raise Refused(f"`{path}` holds adapters beside its weights: `{ADAPTERS}`", hint=hint)
    if said is None and not (path / SINGLE).is_file():
        hint = "weights are read from safetensors alone: nothing is unpickled"
        raise Refused(f"`{path}` holds neither `{INDEX}` nor `{SINGLE}`", hint=hint)
    # transformers would load this one
    if said is not None and (path / SINGLE).exists() and SINGLE not in said.values():
        hint = "take away the one that is not the model's"
        raise Refused(f"`{path}` holds both `{INDEX}` and a `{SINGLE}` that it does not name", hint=hint)
    shelf, spelled, left_out = (folder.shelf(path, said, SINGLE), dict(of.spelled), set[str]())
    for name in shelf.found if text is not tree else ():
        if name.startswith(TEXT):
            spelled[name] = f"{WHOLE}{name.removeprefix(TEXT)}"
        elif name.startswith(WHOLE):
            left_out.add(name)
    if both := [name for name, usual in spelled.items() if {name, usual} <= shelf.found.keys()]:
        hint = "keep the one that is the model's"
        raise Refused(f"`{path}` holds `{both[0]}` and `{spelled[both[0]]}`, which are one tensor", hint=hint)
    return Source(path, shelf, spelled, form, frozenset(left_out))


def _tie(source: Source, of: Family) -> None:
    """One tensor for embedding and output layer. Files may hold either, or both, as transformers 5.12.1 ties them (`tie_weights`).

    Raises Refused: both, with other values.
    """
    table, head = (of.called("model", f"{slot}.weight") or "" for slot in ("embed_tokens", "lm_head"))
    there = source.names()
    if head not in there:
        return
    if table not in there:
        source.spelled[head] = table
        return
    if not torch.equal(*(source.form.read(source.shelf, source.stored(name)) for name in (table, head))):
        what = (
            f"`{head}` of `{source.file(head)}` is another than `{table}`, and `{source.at / folder.CONFIG}` ties them"
        )
        raise Refused(what, key="tie_word_embeddings", hint="transformers leaves such two apart: say false")
    source.left_out |= {source.stored(head)}


def _depths(text: Mapping[str, Any], of: Family, config: Config) -> Iterator[Problem]:
    """Where a plan has other layers of token prediction than a config.json says; without any it may leave them out."""
    key = of.mtp.get("depths")
    if key and config["mtp_depths"] and (said := text.get(key, config["mtp_depths"])) != config["mtp_depths"]:
        what = f"config.json has `{key}` {_short(said)}, and the plan {config['mtp_depths']}"
        yield Problem(what, key="feature.mtp.depths", hint=f"set it to {said}, or to 0 with `--without-mtp`")


def _copies(source: Source, copies: Mapping[str, str]) -> None:
    """Leave out tensors that are another once more.

    Raises Refused: one with other values.
    """
    there = source.names()
    for name, whole in copies.items():
        if name in there and whole in there:
            if not torch.equal(*(source.form.read(source.shelf, source.stored(n)) for n in (name, whole))):
                what = f"`{name}` of `{source.file(name)}` is another than `{whole}`, and Megatron's MTP has the model's own"
                raise Refused(
                    what, key="feature.mtp.depths", hint="set it to 0, and leave the layer out: `--without-mtp`"
                )
            source.left_out |= {source.stored(name)}


def _of_another(tree: dict[str, Any], name: str, config: Config) -> Iterator[Problem]:
    """Where a config.json is another model than a plan's, by key."""
    theirs, ours = describe.counted(described(tree, name)), describe.counted(config)
    for side in (theirs, ours):  # `families.unlike` and the tensors' names say what is read of them
        side |= {"mtp_kinds": [], "mtp_depths": 0}
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            said = f"`{name}` has `{key}` {_short(theirs.get(key))}, and the plan {_short(ours.get(key))}"
            yield Problem(said, hint="give the plan of this model")


def described(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A published config.json as an export of ours would say the same model. Raises Refused: one that no recipe says."""
    report = lint(json.dumps(tree), name)
    sys.stderr.write(shown("".join(f"> {name}: {line}\n" for line in preset.stops(report))))
    made = recipe.make(report, Path("published.yaml"))
    # A value that the schema does not take leaves ours in its place, which `translate` asks for.
    unsaid = [line for line in made.lost if line.startswith(("model.", "feature.")) and "model.letters." not in line]
    raise_if(Problem(f"`{name}` has a value that no recipe has: {line}") for line in unsaid)
    return describe.config(plan_of(made.recipe))


def _tell(tree: Mapping[str, Any], name: str, say: Say, but: Collection[str] = ()) -> None:
    """Say what a config.json has and nobody reads, and where transformers' class computes otherwise; but for what is said anyway."""
    for line in of_config(tree, name)[1]:
        if line not in but:
            say(f"{name}: {line}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:100]}..."


def _misfits(
    source: Source, places: list[tuple[Tensor, list[Place]]], left_out: tuple[str, ...], ahead: tuple[str, ...]
) -> Iterator[Problem]:
    wanted = {place.name: place for _, found in places for place in found}
    there = source.names()
    for name, place in wanted.items():
        if name not in there:
            yield Problem(f"`{source.at}` holds no `{name}`, which `{place.piece.tensor}` is made of")
            continue
        yield from source.form.misfits(source.stored(name), place.piece.shape, source.shelf.found)
    strangers = sorted(name for name in there - wanted.keys() if not (left_out and name.startswith(left_out)))
    for name in strangers:
        predicts = bool(ahead) and name.startswith(ahead)
        ways = "`--without-mtp` leaves out layers of token prediction, a plan with `feature.mtp.depths=1` may read them"
        hint = ways if predicts else None
        yield Problem(f"`{name}` of `{source.file(name)}` has no place in the plan", hint=hint)


def _lazy(source: Source, places: list[tuple[Tensor, list[Place]]]) -> Iterator[tuple[str, Lazy]]:
    """The checkpoint's tensors, each made when it is written."""
    for tensor, found in places:
        made = _Once(source, tensor, found)
        first = 0
        for key, shape in tensor.parts:
            yield key, Lazy(shape, DTYPES[tensor.dtype], made.part(first, shape[0]))
            first += shape[0]


@dataclass
class _Once:
    """A tensor of ours, made of published ones. Kept while its parts are written, one after another."""

    source: Source
    tensor: Tensor
    places: list[Place]
    value: torch.Tensor | None = None
    left: int = 0

    def part(self, first: int, count: int) -> Callable[[], torch.Tensor]:
        self.left += 1

        def read() -> torch.Tensor:
            value = self.value if self.value is not None else joined(self.source, self.tensor, self.places)
            self.left -= 1
            self.value = value if self.left else None
            return value[first : first + count]

        return read


def joined(source: Source, tensor: Tensor, places: list[Place]) -> torch.Tensor:
    """A tensor of ours, of published ones."""
    dtype = DTYPES[tensor.dtype]
    whole, read = torch.empty(tensor.shape, dtype=dtype), {}
    for name, piece in ((place.name, place.piece) for place in places):
        if name not in read:
            read = {name: source.read(name, dtype, piece.shape, piece.less)}
        here = piece.here(whole)
        here.copy_(piece.there(read[name]).reshape(here.shape))
    return whole


def apart(places: list[Place], whole: torch.Tensor) -> torch.Tensor:
    """A published tensor, of one of ours. places: its own."""
    made = torch.empty(places[0].piece.shape, dtype=whole.dtype)
    for piece in (place.piece for place in places):
        value = piece.here(whole) + piece.less if piece.less else piece.here(whole)
        there = piece.there(made)
        there.copy_(value.reshape(there.shape))
    return made


# Out ---------------------------------------------------------------------------------------------------------------------


def architecture(plan: Plan, named: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The published architecture that computes a plan's model, and its config.json; of several the first, or the one that is named.

    Raises:
        Refused: none does, and why each does not.
    """
    config, why = describe.config(plan), []
    for of in families.own() if named is None else [families.family(named)]:
        problems = list(_not_of(of, plan, config))
        if not problems:
            return of, written(of, plan)
        why.append(f"`{of.model_type}`: {problems[0].message}")
    said, hint = "no published architecture computes this model", "`--as nam` exports it with code of ours"
    if named:
        said, hint = f"`{named}` does not compute this model", f"`--as native` asks every architecture, {hint}"
    raise Refused([Problem(said, key="model", hint=hint), *map(Problem, why)])


def _not_of(of: Family, plan: Plan, config: Config) -> Iterator[Problem]:
    """Why a plan's model is not a family's: its layers, its tensors, or what its config.json says when it is read again."""
    found = list(families.unlike(of, config))
    try:
        found = found or [*_of_another(written(of, plan), "config.json", config)]
        if not found:
            list(families.places(of, config))
    except Refused as refused:
        found = list(refused.problems)
    yield from found


def export(
    checkpoint: Path, out: Path, tokens: Path | None, say: Say, shard_bytes: int = folder.MOST, named: str | None = None
) -> str:
    """Write the newest step of `checkpoint` in its published architecture, or the named one; the class of transformers that opens it.

    tokens: the tokenizer's folder; None: that of imported weights or of the run's dataset, if we built it.

    Raises:
        Refused: as `export.export`, or a model that no published architecture computes.
    """
    lowering, step, tokens = exports.opened(checkpoint, tokens, say)
    of, keys = architecture(lowering.plan, named)
    _tell(keys, folder.CONFIG, say)
    source = exports.checked(step, lowering.plan)
    config = describe.config(lowering.plan)
    copies = families.copies(of, config)
    theirs: dict[str, tuple[Tensor, Tensor, list[Place]]] = {}
    for tensor, found in families.places(of, config):
        by_name: dict[str, list[Place]] = {}
        for place in (*found, *_again(found, copies)):
            by_name.setdefault(place.name, []).append(place)
        for name, held in by_name.items():
            theirs[name] = one(name, tensor.name, *held[-1].piece.shape, dtype=tensor.dtype), tensor, held
    with folder.making(out) as part:
        _write(part, [made for made, _, _ in theirs.values()], _reader(source, theirs), shard_bytes, say)
        ends, generation = exports.special(tokens)
        folder.write_json(part / folder.CONFIG, keys | ends)
        if ends:
            folder.write_json(part / exports.GENERATION, generation)
        if tokens is not None:
            tokenizer.copy(tokens, part)
    return of.architecture


def peft(checkpoint: Path, out: Path, say: Say, named: str | None = None) -> str:
    """Write the adapters of the newest step of `checkpoint` as the peft package reads them, beside the published model's own weights.

    Raises:
        Refused: as `export`, a run without adapters, or one on what is no linear layer of transformers' class.
    """
    lowering, step, _ = exports.opened(checkpoint, None, say)
    lora = lowering.plan.recipe.feature.lora
    if lora is None:
        raise Refused(f"`{step}` has no adapters", key="feature.lora.rank", hint="`--as native` writes weights")
    of, keys = architecture(lowering.plan, named)
    _tell(keys, folder.CONFIG, say)
    source = exports.checked(step, lowering.plan)
    assert isinstance(source, Merged)
    held: dict[str, torch.Tensor] = {}
    for tensor, found in families.places(of, describe.config(lowering.plan)):
        if (pair := source.pair(tensor)) is None:
            continue
        if len(tensor.shape) > 2:
            said = (
                f"`{tensor.name}` has an adapter, and transformers' `{of.architecture}` holds its experts in one tensor"
            )
            raise Refused(said, key="feature.lora.targets", hint="`--as native` adds it to the weights")
        for place in found:
            assert place.piece.there(tensor) is tensor, (
                "a published tensor that packs several of ours has one adapter for each"
            )
            module = place.name.removesuffix(".weight")
            for theirs, opened in of.opened.items():
                module = f"{opened}{module.removeprefix(theirs)}" if module.startswith(theirs) else module
            rows = place.piece.here(pair[1]).reshape(place.piece.shape[0], lora.rank)
            held |= {
                f"base_model.model.{module}.lora_{part}.weight": value.clone(memory_format=torch.contiguous_format)
                for part, value in (("A", pair[0]), ("B", rows))
            }
    modules = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in held})
    with folder.making(out) as part:
        save_file(held, part / "adapter_model.safetensors", {"format": "pt"})
        keys = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
        }
        more = {"target_modules": modules, "bias": "none", "inference_mode": True, "base_model_name_or_path": None}
        folder.write_json(part / ADAPTERS, keys | more)
    return of.architecture


def _again(found: list[Place], copies: Mapping[str, str]) -> list[Place]:
    """The places of tensors that a file holds once more."""
    return [replace(place, name=name) for name, whole in copies.items() for place in found if place.name == whole]


def _write(part: Path, tensors: list[Tensor], read: Callable[[Tensor], torch.Tensor], most: int, say: Say) -> None:
    files = folder.shards(tensors, most)
    for name, group in files:
        folder.write_shard(part / name, group, read)
        say(f"{name}: {sum(tensor.nbytes for tensor in group) / 1e9:.2f} GB")
    folder.write_index(part, files)


def _reader(
    source: distributed.Checkpoint, theirs: dict[str, tuple[Tensor, Tensor, list[Place]]]
) -> Callable[[Tensor], torch.Tensor]:
    """What makes a published tensor; the last of ours is kept, of which the next is mostly made, too."""
    kept: dict[str, torch.Tensor] = {}

    def read(tensor: Tensor) -> torch.Tensor:
        _, ours, found = theirs[tensor.name]
        if ours.name not in kept:
            kept.clear()
            kept[ours.name] = source.joined(ours)
        return apart(found, kept[ours.name])

    return read
