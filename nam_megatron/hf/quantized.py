"""Weights that others publish in fewer bits, as numbers again (torch side): DeepSeek-V3's FP8 in blocks, gpt-oss's experts in MXFP4."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from nam_megatron.errors import Problem, Refused
from nam_megatron.hf import folder

FP8, SCALE = "F8_E4M3", "_scale_inv"
MXFP4, BLOCKS, SCALES, BYTES = "MXFP4", "_blocks", "_scales", "U8"
READ = {"BF16", "F32", "F16", FP8}
# OCP Microscaling Formats (MX) 1.0: the 16 values of E2M1, of which 32 share a scale of E8M0, and a byte's two, its lower half first.
E2M1 = torch.tensor(
    [sign * x for sign in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)], dtype=torch.bfloat16
)
PAIRS = torch.stack((E2M1.repeat(16), E2M1.repeat_interleave(16)), 1).view(torch.int32).flatten()
SHARED = 32
KEY = "quantization_config"
# Files that say it beside config.json, and of which tool they are.
TOOLS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
HINT = "read are FP8 in blocks (`weight_block_size`), gpt-oss's MXFP4, and bf16, fp16 and fp32, in which most models are published, too"
Found = Mapping[str, tuple[str, tuple[int, ...], str]]  # as folder.Shelf has it


@dataclass(frozen=True)
class Form:
    """How a folder keeps its weights. block: rows and columns of an FP8 weight that share a scale. packed: experts may be MXFP4.
    plain: patterns of modules that are not quantized.
    """

    block: tuple[int, ...] | None = None
    packed: bool = False
    plain: tuple[str, ...] = ()

    def names(self, found: Found) -> set[str]:
        """A folder's weights: without scales, which belong to them."""
        scales = {f"{name}{SCALE}" for name, (_, _, dtype) in found.items() if dtype == FP8}
        packed = {name.removesuffix(BLOCKS) for name in found if self.packed and name.endswith(BLOCKS)}
        return (found.keys() - scales - {f"{name}{part}" for name in packed for part in (BLOCKS, SCALES)}) | packed

    def key(self, name: str, found: Found) -> str:
        """The tensor of the files that holds a weight's values."""
        return f"{name}{BLOCKS}" if self.packed and f"{name}{BLOCKS}" in found else name

    def misfits(self, name: str, shape: tuple[int, ...], found: Found) -> Iterator[Problem]:
        """Why a weight of the files is none of the plan's, which has that shape."""
        key = self.key(name, found)
        file, there, dtype = found[key]
        parts: dict[str, tuple[int, ...]] = {}
        if key != name and len(shape) == 3 and not shape[1] % SHARED:
            scales = (shape[0], shape[2], shape[1] // SHARED)
            parts, dtype = {BLOCKS: (*scales, SHARED // 2), SCALES: scales}, MXFP4
            if name in found:
                yield Problem(f"`{key}` of `{file}` is `{name}` of `{found[name][0]}`, too", hint="keep one of them")
        elif key != name:
            what = (
                f"`{key}` of `{file}` is {MXFP4}, and {list(shape)} in the plan is not, turned, in blocks of {SHARED}"
            )
            yield Problem(what)
        elif there != shape:
            yield Problem(f"`{name}` is {list(there)} in `{file}`, and {list(shape)} in the plan")
        elif dtype not in READ:
            yield Problem(
                f"`{name}` is {dtype} in `{file}`, which is not read", hint=f"there are: {', '.join(sorted(READ))}"
            )
        elif dtype == FP8 and (self.block is None or len(shape) != len(self.block)):
            yield Problem(
                f"`{name}` of `{file}` is FP8, and config.json has no `weight_block_size` for it", key=KEY, hint=HINT
            )
        elif dtype == FP8 and self.block:
            parts = {SCALE: tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))}
        for part, wanted in parts.items():
            if (scale := found.get(f"{name}{part}")) is None:
                yield Problem(f"`{key}` of `{file}` is {dtype}, and its `{name}{part}` is missing")
            elif scale[1] != wanted:
                yield Problem(f"`{name}{part}` is {list(scale[1])} in `{scale[0]}`, and {list(wanted)} by its blocks")
            elif key != name and scale[2] != BYTES:
                yield Problem(f"`{name}{part}` is {scale[2]} in `{scale[0]}`, and {BYTES} in {MXFP4}")
        module = name.removesuffix(".weight")
        if parts and (plain := [p for p in self.plain if fnmatchcase(f"{module}.", f"{p}.*")]):
            said = f"`{key}` of `{file}` is {dtype}, and config.json says that `{plain[0]}` is not quantized"
            yield Problem(said, key=f"{KEY}.modules_to_not_convert")

    def read(self, shelf: folder.Shelf, name: str) -> torch.Tensor:
        """A weight of the files: fp32 where it is FP8, bf16 where it is MXFP4, else as it is."""
        if (key := self.key(name, shelf.found)) != name:
            return unpacked(shelf.get(key), shelf.get(f"{name}{SCALES}"))
        value = shelf.get(name)
        if value.dtype != torch.float8_e4m3fn:
            return value
        assert self.block is not None
        scale = shelf.get(f"{name}{SCALE}").float()
        for axis, size in enumerate(self.block):
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, value.size(axis))
        return value.float() * scale


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
    plain = keys.get("modules_to_not_convert") or keys.get("ignored_layers") or []
    blocks = isinstance(sizes, list) and [type(size) for size in sizes] == [int, int] and min(sizes) > 0
    if key != KEY or not {"fp8": blocks, "mxfp4": packs}.get(str(method)):
        raise Refused(Problem(f"`{path / name}` quantizes its weights: `{method}`", key=key or None, hint=HINT))
    if not (isinstance(plain, list) and all(isinstance(pattern, str) for pattern in plain)):
        what = f"`modules_to_not_convert` is {plain!r} in `{path / name}`"
        raise Refused(Problem(what, key=KEY, hint="it is a list of modules"))
    return Form(tuple(sizes) if isinstance(sizes, list) else None, method == "mxfp4", tuple(plain))
