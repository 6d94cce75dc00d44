"""Weights that others publish in fewer bits, as numbers again (torch side): DeepSeek-V3's FP8 in blocks, gpt-oss's experts in MXFP4, and
integers that compressed-tensors packs, as Kimi-K2-Thinking's experts in INT4."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch

from nam_megatron.errors import Problem, Refused
from nam_megatron.hf import folder

FP8 = "F8_E4M3"
FLOATS = frozenset(("BF16", "F32", "F16"))
READ = FLOATS | {FP8}
# OCP Microscaling Formats (MX) 1.0: the 16 values of E2M1, of which 32 share a scale of E8M0, and a byte's two, its lower half first.
E2M1 = torch.tensor(
    [sign * x for sign in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)], dtype=torch.bfloat16
)
PAIRS = torch.stack((E2M1.repeat(16), E2M1.repeat_interleave(16)), 1).view(torch.int32).flatten()
SHARED = 32
WORD = 32  # bits of what integers are packed into
KEY, REGEX = "quantization_config", "re:"
PLAIN = ("modules_to_not_convert", "ignored_layers", "ignore")  # each tool's word for what is not quantized
# Files that say it beside config.json, and of which tool they are.
TOOLS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
HINT = (
    "read are FP8 in blocks (`weight_block_size`), gpt-oss's MXFP4, compressed-tensors' `pack-quantized` of 4 or 8 bits, and bf16, fp16 "
    "and fp32, in which most models are published, too"
)
Found = Mapping[str, tuple[str, tuple[int, ...], str]]  # as folder.Shelf has it
# {what stands behind a weight's name: its shape, the types it may have}
Parts = dict[str, tuple[tuple[int, ...], frozenset[str]]]


@dataclass(frozen=True)
class Form:
    """How a folder keeps its weights: here as they are. plain: patterns of modules that are not quantized; a regular expression behind
    `re:`. plain_key: where they are said.
    """

    plain: tuple[str, ...] = ()
    plain_key: str = "modules_to_not_convert"
    # What stands behind a weight's name where its values are, and where the rest of it is.
    values: ClassVar[str] = ""
    rest: ClassVar[tuple[str, ...]] = ()
    title: ClassVar[str] = ""

    def keeps(self, name: str, found: Found) -> bool:
        """Whether a weight is quantized."""
        return bool(self.values) and f"{name}{self.values}" in found

    def parts(self, shape: tuple[int, ...]) -> Parts | None:
        """The tensors of such a weight; None: no weight of that shape is kept so."""
        return None

    def lacks(self, shape: tuple[int, ...]) -> str:
        """Why none is."""
        return ""

    def number(self, get: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
        """Its values. get: a tensor by what stands behind the name."""
        raise NotImplementedError

    def names(self, found: Found) -> set[str]:
        """A folder's weights: without scales, which belong to them."""
        bases = (name.removesuffix(self.values) for name in found if name.endswith(self.values))
        ours = {name for name in bases if self.keeps(name, found)}
        return (found.keys() - {f"{name}{part}" for name in ours for part in (self.values, *self.rest)}) | ours

    def key(self, name: str, found: Found) -> str:
        """The tensor of the files that holds a weight's values."""
        return f"{name}{self.values}" if self.keeps(name, found) else name

    def misfits(self, name: str, shape: tuple[int, ...], found: Found) -> Iterator[Problem]:
        """Why a weight of the files is none of the plan's, which has that shape."""
        if not self.keeps(name, found):
            file, there, dtype = found[name]
            if there != shape:
                yield Problem(f"`{name}` is {list(there)} in `{file}`, and {list(shape)} in the plan")
            elif dtype not in READ:
                hint = f"there are: {', '.join(sorted(READ))}"
                yield Problem(f"`{name}` is {dtype} in `{file}`, which is not read", hint=hint)
            elif dtype == FP8:
                said = f"`{name}` of `{file}` is FP8, and config.json has no `weight_block_size` for it"
                yield Problem(said, key=KEY, hint=HINT)
            return
        key = f"{name}{self.values}"
        file, there, _ = found[key]
        if self.values and name in found:
            yield Problem(f"`{key}` of `{file}` is `{name}` of `{found[name][0]}`, too", hint="keep one of them")
        if (parts := self.parts(shape)) is None:
            yield Problem(f"`{key}` of `{file}` is {self.title}, and {list(shape)} in the plan {self.lacks(shape)}")
            return
        if not self.values and there != shape:
            yield Problem(f"`{name}` is {list(there)} in `{file}`, and {list(shape)} in the plan")
            return
        for part, (wanted, types) in parts.items():
            if (of := found.get(f"{name}{part}")) is None:
                yield Problem(f"`{key}` of `{file}` is {self.title}, and its `{name}{part}` is missing")
            elif of[1] != wanted:
                yield Problem(f"`{name}{part}` is {list(of[1])} in `{of[0]}`, and {list(wanted)} by its blocks")
            elif of[2] not in types:
                message = f"`{name}{part}` is {of[2]} in `{of[0]}`, and {' or '.join(sorted(types))} in {self.title}"
                yield Problem(message)
        module = name.removesuffix(".weight")
        if plain := [pattern for pattern in self.plain if _matches(pattern, module)]:
            said = f"`{key}` of `{file}` is {self.title}, and config.json says that `{plain[0]}` is not quantized"
            yield Problem(said, key=f"{KEY}.{self.plain_key}")

    def read(self, shelf: folder.Shelf, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A weight of the files: as it is where it is not quantized. shape: the plan's. Raises Refused: its parts say another."""
        kept = self.keeps(name, shelf.found)
        value = self.number(lambda part: shelf.get(f"{name}{part}"), name) if kept else shelf.get(name)
        if shape is not None and tuple(value.shape) != shape:
            raise Refused(f"`{name}` is {list(value.shape)} by its parts, and {list(shape)} in the plan")
        return value


@dataclass(frozen=True)
class Blocks(Form):
    """FP8, whose scales are of blocks of rows and columns, as DeepSeek-V3's; its values are fp32."""

    block: tuple[int, ...] = ()
    rest = ("_scale_inv",)
    title = FP8

    def keeps(self, name: str, found: Found) -> bool:
        _, shape, dtype = found.get(name, ("", (), ""))
        return dtype == FP8 and len(shape) == len(self.block)  # of another number of axes, it has no scales

    def parts(self, shape: tuple[int, ...]) -> Parts:
        blocks = tuple(-(-n // size) for n, size in zip(shape, self.block, strict=False))
        return {"": (shape, frozenset((FP8,))), "_scale_inv": (blocks, FLOATS | {"F8_E8M0"})}

    def number(self, get: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
        value, scale = get(""), get("_scale_inv").float()
        for axis, size in enumerate(self.block):
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, value.size(axis))
        return value.float() * scale


@dataclass(frozen=True)
class Mxfp4(Form):
    """Experts as gpt-oss's; their values are bf16."""

    values, rest = "_blocks", ("_scales",)
    title = "MXFP4"

    def parts(self, shape: tuple[int, ...]) -> Parts | None:
        if len(shape) != 3 or shape[1] % SHARED:
            return None
        scales, types = (shape[0], shape[2], shape[1] // SHARED), frozenset(("U8",))
        return {"_blocks": ((*scales, SHARED // 2), types), "_scales": (scales, types)}

    def lacks(self, shape: tuple[int, ...]) -> str:
        return f"is not, turned, in blocks of {SHARED}"

    def number(self, get: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
        return unpacked(get("_blocks"), get("_scales"))


@dataclass(frozen=True)
class Packed(Form):
    """Integers of so many bits, symmetric about 0, of which `group` of a row share a scale (0: all); their values are fp32.

    compressed-tensors 0.20.1, compressors/pack_quantized: each is stored 2^(bits-1) too large, a word's lowest bits first.
    """

    bits: int = 4
    group: int = 0
    values, rest = "_packed", ("_scale", "_shape")

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"INT{self.bits}"

    def parts(self, shape: tuple[int, ...]) -> Parts | None:
        if len(shape) != 2 or (self.group and shape[1] % self.group):
            return None
        rows, columns = shape
        words, scales = -(-columns * self.bits // WORD), columns // self.group if self.group else 1
        return {
            "_packed": ((rows, words), frozenset(("I32",))),
            "_scale": ((rows, scales), FLOATS),
            "_shape": ((2,), frozenset(("I32", "I64"))),
        }

    def lacks(self, shape: tuple[int, ...]) -> str:
        return f"has no rows of {self.group} at a time"

    def number(self, get: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
        words, scale, shape = get("_packed"), get("_scale").float(), get("_shape").tolist()
        rows, columns = shape
        if rows != len(words) or -(-columns * self.bits // WORD) != words.size(1) or columns % scale.size(1):
            said = f"`{name}_shape` says {shape}, and `{name}_packed` is {list(words.shape)} words"
            raise Refused(said, hint="get the files again")
        at = torch.arange(0, WORD, self.bits, dtype=torch.int32)
        values = (words[:, :, None] >> at & (1 << self.bits) - 1).flatten(1)[:, :columns] - (1 << self.bits - 1)
        return values.float() * scale.repeat_interleave(columns // scale.size(1), 1)


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module, or one that it is of."""
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), module) is not None
    return fnmatchcase(f"{module}.", f"{pattern}.*")


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 [experts, out, in / 32, 16] with scales [experts, out, in / 32] as [experts, in, out] in bf16, exactly; NaN where a scale is.
    An expert at a time, since indices are as large as what they give.
    """
    made = torch.empty(*blocks.shape[:2], blocks.size(2) * SHARED, dtype=torch.bfloat16)
    for whole, pairs, scale in zip(made, blocks, scales.view(torch.float8_e8m0fnu), strict=True):
        values = PAIRS.index_select(0, pairs.int().flatten()).view(torch.bfloat16)
        torch.mul(values.view(-1, SHARED), scale.bfloat16().view(-1, 1), out=whole.view(-1, SHARED))
    return made.transpose(1, 2)


def form(path: Path, tree: Mapping[str, Any], text: Mapping[str, Any], packs: bool) -> Form:
    """How a published folder says that its weights are kept. text: what of config.json is of text. packs: MXFP4 of its family is read.

    Raises Refused: in a form that is not read.
    """
    places = [(folder.CONFIG, key, keys.get(key)) for key in (KEY, "compression_config") for keys in (tree, text)]
    places += [(name, "", {"quant_method": tool}) for name, tool in TOOLS.items() if (path / name).exists()]
    name, key, said = next((place for place in places if place[2]), ("", "", None))
    if not said:
        return Form()
    keys = said if isinstance(said, dict) else {}
    method, sizes = keys.get("quant_method", said), keys.get("weight_block_size")
    blocks = isinstance(sizes, list) and [type(size) for size in sizes] == [int, int] and min(sizes) > 0
    packed = _packed(keys) if method == "compressed-tensors" else None
    if key != KEY or not {"fp8": blocks, "mxfp4": packs, "compressed-tensors": packed}.get(str(method)):
        raise Refused(f"`{path / name}` quantizes its weights: `{method}`", key=key or None, hint=HINT)
    at = next((at for at in PLAIN if keys.get(at)), PLAIN[-1])
    plain = keys.get(at) or []
    if not (isinstance(plain, list) and all(isinstance(pattern, str) for pattern in plain)):
        what = f"`{at}` is {plain!r} in `{path / name}`"
        raise Refused(what, key=KEY, hint="it is a list of modules")
    for pattern in (pattern for pattern in plain if pattern.startswith(REGEX)):
        try:
            re.compile(pattern.removeprefix(REGEX))
        except re.error as err:
            what = f"`{pattern}` is no regular expression in `{path / name}`: {err}"
            raise Refused(what, key=f"{KEY}.{at}") from None
    if packed:
        return Packed(tuple(plain), at, *packed)
    return Mxfp4(tuple(plain), at) if method == "mxfp4" else Blocks(tuple(plain), at, tuple(sizes or ()))


def _packed(keys: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bits, and weights of a row that share a scale (0: all), of a config of compressed-tensors; None: it is in no form that is read."""
    groups = keys.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or group.get("format", "pack-quantized") not in ("pack-quantized", None):
            return None
        bits, size = weights.get("num_bits"), weights.get("group_size")
        strategy = weights.get("strategy") or ("group" if size else "channel")
        size = 0 if strategy == "channel" else size
        plain = weights.get("type", "int") == "int" and weights.get("symmetric", True) is True
        plain &= weights.get("actorder") in (None, False, "static", "weight") and weights.get("dynamic", False) is False
        if not plain or bits not in (4, 8) or strategy not in ("group", "channel") or type(size) is not int or size < 0:
            return None
        found.add((bits, size))
    sparse = keys.get("sparsity_config") or {}
    dense = isinstance(sparse, dict) and sparse.get("format", "dense") == "dense"
    return found.pop() if len(found) == 1 and keys.get("format") == "pack-quantized" and dense else None
