"""Megatron's distributed checkpoints (torch_dist), read and written tensor by tensor without a model (torch side).

A folder of a step holds `.metadata`, a pickle that says where each piece of each global tensor lies, and files of pieces, each of
which torch.save wrote. The pickle is read with the few names that such a file needs, the pieces as tensors alone.
"""

import io
import json
import pickle
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter, metadata
from torch.distributed.checkpoint import save as save_checkpoint
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from nam_megatron.blocks.exported import Tensor
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.lower import Lowering
from nam_megatron.errors import Refused, raise_if
from nam_megatron.hf.folder import DTYPES
from nam_megatron.judge.resume import PLAN
from nam_megatron.runtime import checkpoint, checksums
from nam_megatron.tracker import RELEASE, TRACKER, newest
from nam_megatron.words.regular import closed, irregular

COMPARED = ("hybrid_layer_pattern", "hidden_size", "num_attention_heads")
# How 0.19.2 names what it saves.
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


class _Names(checkpoint.Index):
    def made(self, module: str, name: str) -> Any:
        return pickle.Unpickler.find_class(self, module, name)  # the class itself


def step_folder(checkpoint: Path) -> Path:
    """The newest step of a checkpoint folder, or the folder itself where it is a step's. Raises Refused."""
    if (checkpoint / ".metadata").is_file():
        return checkpoint
    return newest(checkpoint)


class Checkpoint:
    """The global tensors of a step's folder, whatever layout wrote them.

    Raises:
        Refused: the index cannot be read, or is no index.
    """

    def __init__(self, folder: Path):
        self.folder = self.step = folder
        try:
            with (folder / ".metadata").open("rb") as stream:
                index = _Names(stream).load()
            self.tensors: dict[str, metadata.TensorStorageMetadata] = {
                key: of
                for key, of in index.state_dict_metadata.items()
                if isinstance(of, metadata.TensorStorageMetadata)
            }
            self.chunks = {
                key: (tuple(of.size), of.properties.dtype, {tuple(c.offsets): tuple(c.sizes) for c in of.chunks})
                for key, of in self.tensors.items()
            }
            self.objects = [key for key in index.state_dict_metadata if key not in self.tensors]
            self.places: dict[str, list[tuple[tuple[int, ...] | None, Any]]] = defaultdict(list)
            for at, stored in index.storage_data.items():
                if at.fqn in self.tensors:
                    self.places[at.fqn].append((at.offset and tuple(map(int, at.offset)), stored))
        except OSError as err:
            raise Refused(f"`{folder}` is no step of a checkpoint: {err.strerror}: `.metadata`") from None
        except Exception as err:  # whatever a damaged pickle makes of itself
            raise Refused(f"the index of `{folder}` cannot be read: {str(err)[:200]}") from None

    def read(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A whole global tensor.

        Raises:
            Refused: it is not there, of another shape or type, or its pieces are damaged or do not fill it.
        """
        if key not in self.tensors:
            raise Refused(f"`{self.folder}` holds no `{key}`, and the plan has one")
        there, of, chunks = self.chunks[key]
        if there != shape:
            raise Refused(f"`{key}` is {list(there)} in `{self.folder}`, and {list(shape)} in the plan")
        if of != dtype:
            raise Refused(f"`{key}` is {of} in `{self.folder}`, not {dtype}")
        whole, sizes, filled = torch.empty(shape, dtype=dtype), dict(chunks), 0
        if dtype.is_floating_point:
            whole.fill_(torch.nan)
        for offset, stored in self.places[key]:
            piece = self._piece(key, stored)
            offset = offset or (0,) * len(shape)
            size = sizes.pop(offset, None)
            plain = piece.layout == torch.strided and not piece.is_meta
            if not plain or size is None or tuple(piece.shape) != size or piece.dtype != dtype:
                raise Refused(f"a piece of `{key}` in `{self.folder}` is not what its index says")
            window = whole[tuple(slice(o, o + n) for o, n, _ in zip(offset, size, shape, strict=False))]
            if window.shape != piece.shape:
                raise Refused(f"a piece of `{key}` in `{self.folder}` lies outside it")
            window.copy_(piece)
            filled += piece.numel()
        if filled != whole.numel():
            raise Refused(f"`{key}` is not whole in `{self.folder}`: {filled} of {whole.numel()} values")
        if not whole.isfinite().all():  # or pieces lie over one another, and what none fills is left
            hint = "its training was damaged, or its index is"
            raise Refused(f"`{key}` holds a NaN or an infinity in `{self.folder}`", hint=hint)
        return whole

    def joined(self, tensor: Tensor) -> torch.Tensor:
        """A tensor of the export. Raises Refused."""
        pieces = [self.read(key, shape, DTYPES[tensor.dtype]) for key, shape in tensor.parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece(self, key: str, stored: Any) -> torch.Tensor:
        name = str(getattr(stored, "relative_path", ""))
        if Path(name).name != name or "\0" in name:
            raise Refused(f"the index of `{self.folder}` points outside it: `{name}`")
        path = self.folder / name
        raise_if(irregular((path,)))
        try:
            with path.open("rb") as stream:
                stream.seek(stored.offset)
                data = stream.read(stored.length)
            if len(data) != stored.length:
                raise ValueError(f"{stored.length - len(data)} bytes are missing")
            piece = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except OSError as err:
            raise Refused(closed(err)) from None
        except Exception as err:
            why = str(err).partition("\n")[0][:200] or type(err).__name__
            raise Refused(f"`{key}` in `{path}` is damaged: {why}") from None
        if not isinstance(piece, torch.Tensor):
            raise Refused(f"`{key}` in `{path}` is a {type(piece).__name__}, not a tensor")
        return piece

    def strangers(self, expected: set[str]) -> Iterator[str]:
        """Tensors of the model that the plan does not have; the optimizer's are not the model's."""
        for key in self.tensors:
            if key not in expected and key.split(".")[0] in ("embedding", "decoder", "mtp", "output_layer"):
                yield key


@dataclass(frozen=True)
class Lazy:
    """A tensor that is made when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class _Planner(DefaultSavePlanner):
    """Knows lazy tensors by empty ones of their shape, and frees what was made for writing once the next is asked for: torch 2.11's writer
    keeps every tensor until its file is whole.

    Experts and what tensor ranks divide are pieces as Megatron saves them: its reader reads a whole piece for what it takes of it.
    """

    def __init__(self, lazy: Mapping[str, Lazy], ranks: int):
        super().__init__(flatten_state_dict=False)
        self.lazy, self.ranks = lazy, ranks
        self.written: torch.Tensor | None = None
        self.held: tuple[str, torch.Tensor] | None = None  # of which pieces are written just now

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[part for item in plan.items for part in _parts(item, self.ranks)])

    def resolve_data(self, write_item: Any) -> Any:
        if self.written is not None:
            self.written.untyped_storage().resize_(0)
        self.written = None
        value = self._piece(write_item) if write_item.type == WriteItemType.SHARD else super().resolve_data(write_item)
        if isinstance(value, torch.Tensor):
            part = value.untyped_storage().nbytes() != value.nbytes  # which would be copied there
            value = value.detach().clone() if part else value
            if (part or write_item.index.fqn in self.lazy) and value.untyped_storage().resizable():
                self.written = value
        return value

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        self.held = None
        found = self.lazy.get(index.fqn)
        return super().lookup_object(index) if found is None else found.read()

    def _piece(self, item: WriteItem) -> torch.Tensor:
        if self.held is None or self.held[0] != item.index.fqn:
            self.held = item.index.fqn, self.lookup_object(replace(item.index, offset=None))
        chunk = item.tensor_data.chunk
        return self.held[1][tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))]


def _by_expert(key: str) -> bool:
    """Whether the first axis of a tensor counts experts, as that of an adapter does not."""
    return ".mlp.experts.experts." in key and ".adapter." not in key


# Linear layers whose columns tensor ranks divide; of all others the rows, of a gate and of what it weighs each by itself.
BY_COLUMN = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")


def _parts(item: WriteItem, ranks: int) -> Iterator[WriteItem]:
    whole, key = item.tensor_data, item.index.fqn
    axis, counts = int(key.endswith(BY_COLUMN)), [2 * ranks, ranks]
    if whole is None or (not _by_expert(key) and (ranks == 1 or len(whole.size) != 2)):
        yield item
        return
    if _by_expert(key):
        axis, counts = 0, [whole.size[0]]
    count = next((count for count in counts if whole.size[axis] % count == 0), 1)
    sizes = torch.Size(n // count if i == axis else n for i, n in enumerate(whole.size))
    for part in range(count):
        offsets = torch.Size(part * n if i == axis else 0 for i, n in enumerate(sizes))
        cut = replace(whole, chunk=metadata.ChunkStorageMetadata(offsets, sizes))
        yield replace(item, index=replace(item.index, offset=offsets), type=WriteItemType.SHARD, tensor_data=cut)


def model_keys(tensors: list[Tensor]) -> set[str]:
    return {key for tensor in tensors for key, _ in tensor.parts}


def write(folder: Path, given: Mapping[str, torch.Tensor | Lazy], lowering: Lowering) -> None:
    """A checkpoint folder of weights alone, which Megatron starts a run of this plan from: tracker, plan and the step `release`.

    given: tensors by checkpoint key; lazy and memory-mapped ones are read as they are written.
    """
    lazy = {key: value for key, value in given.items() if isinstance(value, Lazy)}
    empty = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in lazy.items()}
    tensors = {**given, **empty}
    step = folder / RELEASE
    # What each module says of its quantisation; nothing. Which modules say something depends on who built them: all may.
    modules = sorted(
        {"output_layer", *(key.rpartition(".")[0] for key in tensors), *(m for key in tensors for m in _owners(key))}
    )
    said = {f"{module}._extra_state/shard_0_1": [None] for module in modules if module}
    for key, tensor in tensors.items():
        if _by_expert(key):  # the grouped linear layer says it of each expert
            module, count = key.rpartition(".")[0], tensor.size(0)
            said |= {f"{module}._extra_state/shard_{i}_{count}": [None] for i in range(count)}
    # What Megatron compares with a run's arguments; of a checkpoint without a pattern it says that a GPT wrote it.
    args = Namespace(num_layers=len(lowering.plan.layers), **{n: lowering.by_name[n].value for n in COMPARED})
    state = {"checkpoint_version": 3.0, "iteration": 0, "args": args, "content_metadata": METADATA}
    common = {"common_state/shard_0_1": [state]}
    planner = _Planner(lazy, lowering.plan.recipe.parallel.tensor)
    # Nothing is copied ahead: one tensor is written before the next is asked for.
    writer = FileSystemWriter(step, single_file_per_rank=True, thread_count=1, sync_files=True, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():  # that one process saves, as it is told to
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save_checkpoint({**tensors, **said, **common}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as wrapped:  # what a lazy tensor refused, or the disk
        raise wrapped.failures[0][0] from None
    (step / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    checksums.bind_to(step, {PLAN: plan_json(lowering)})
    checksums.put(step, checksums.digests(step, checksums.names(step)))
    (folder / PLAN).write_text(plan_json(lowering), encoding="utf-8")
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")


def _owners(key: str) -> Iterator[str]:
    """The module of `in_proj.weight.z` is `in_proj`."""
    parts = key.split(".")
    for i, part in enumerate(parts):
        if part == "weight" and i + 1 < len(parts):
            yield ".".join(parts[:i])
