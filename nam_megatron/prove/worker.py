"""One rank of one side of a proof: Megatron's whole training program, watched at every step (torch side).

The reference writes what it sees to files, a whole tensor for each key; each rank of the layout compares its parts with those files and
writes numbers. What is watched: the norm of what each layer puts out, each microbatch's losses, each gradient as the optimizer gets it,
each weight and persistent buffer after the step, the tokens that each expert got; of a deterministic run the bits of all these, and of
what each module puts out and gets back.
"""

import contextlib
import itertools
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nam_megatron.compile.argv import argv
from nam_megatron.compile.lower import Lowering
from nam_megatron.prove.compare import BACK, FORTH, NORM, hooked
from nam_megatron.prove.tensors import Shard, fill, gathered, kept, shards, unsharded
from nam_megatron.runtime.nonfinite import tensors

GRADIENTS, WEIGHTS, BITS = "gradient", "weight", "bits"
ROUNDING = {"cpu": 2.0**-23, "cuda": 2.0**-8}  # of fp32 and bf16
LAYER = re.compile(r"^decoder\.layers\.(\d+)")
STOPS = re.compile(r"embedding|decoder\.layers\.\d+|mtp\.layers\.\d+\.mtp_model_layer\.layers\.\d+")
BEGIN = "begin"  # the folder of the checkpoint of the weights that everything starts from
# Elements of a bucket of gradients on a CPU: Megatron's 40 million would hold every parameter there, and show nothing of bucket borders.
BUCKET = 3000


@dataclass(frozen=True)
class Side:
    """What a rank has to do.

    folder: where the reference's tensors are, the checkpoints and this side's findings. name: of its findings. reference: it writes
    tensors and the checkpoint from which all others begin. saves: it writes a checkpoint after step 1, its optimizer included; resume:
    the side whose checkpoint this one goes on from. shaken: its weights are moved first, each by about a rounding. exact: in fp32, as a
    CPU always does, from the reference's tensors.
    """

    lowering: Lowering
    folder: Path
    device: str
    name: str = "layout"
    reference: bool = False
    resume: str = ""
    saves: bool = False
    shaken: bool = False
    exact: bool = False


def words(side: Side) -> list[str]:
    """Megatron's arguments: the plan's, but for the checkpoints and, on a CPU, for the precision."""
    said = list(argv(side.lowering))
    if side.device == "cpu" or side.exact:
        said.remove("--bf16")
    if side.device == "cpu":
        said += ["--ddp-bucket-size", str(BUCKET)]
    if side.resume:
        said += ["--load", str(side.folder / side.resume), "--no-load-rng"]
    elif not side.reference and not _is_filled(side):
        said += ["--load", str(side.folder / BEGIN), "--no-load-rng", "--finetune", "--no-load-optim"]
    return said


def run(side: Side, before: Callable[[], object] | None = None) -> int:
    """Train this rank's part of `side` to the end. `before`: called once everything is imported; tests plant their bugs there."""
    for env in side.lowering.env:  # before libraries are imported that look at it once
        env.put(os.environ)
    if side.exact:  # Transformer Engine gives fp32 to cuBLAS as TF32, which has hardly more bits than bf16
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    from megatron.training import training

    from nam_megatron.runtime import pretrain, stack

    plan = side.lowering.plan
    pretrain.datasets = partial(datasets, plan.recipe)
    pretrain.datasets.is_distributed = True
    watch = Watch(side)
    training.train_step = partial(watch.step, training.train_step)
    if _is_filled(side):
        _filled(side, pretrain.NamModelBuilder)
    if before is not None:
        before()
    spec = stack.hybrid_stack_spec(plan)
    pretrain.run(words(side), spec, time.time(), plan, operations=1.0)
    return 0


def _is_filled(side: Side) -> bool:
    """Whether it reads no checkpoint of the reference's: Megatron-FSDP reads its own alone, and fp32 is not what was saved."""
    return side.exact or side.lowering.plan.recipe.feature.megatron_fsdp is not None


def _filled(side: Side, builder: Any) -> None:
    """The reference's weights go into the model before it is wrapped."""
    build = builder.build_model

    def filled(*args: Any, **named: Any) -> Any:
        model = build(*args, **named)
        fill(model, torch.load(side.folder / f"{WEIGHTS}-0.pt", mmap=True, weights_only=True))
        return model

    builder.build_model = filled


# Batches -------------------------------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    """Random tokens, of which a few at the end of each sample do not count; sample `i` is the same everywhere."""

    def __init__(self, number: int, length: int, vocabulary: int, seed: int, mask: bool):
        self.number, self.length, self.vocabulary, self.seed, self.mask = number, length, vocabulary, seed, mask

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(i))
        tokens = torch.randint(0, self.vocabulary, (self.length + 1,), generator=generator)
        counts = torch.ones(self.length)
        counts[self.length - int(i) % 4 :] = 0.0
        sample = {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": counts}
        sample["position_ids"] = torch.arange(self.length)
        if self.mask:
            sample["attention_mask"] = torch.ones(1, self.length, self.length).triu(1).bool()
        return sample


def datasets(recipe: Any, sizes: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
    """As Megatron asks for data: training samples alone."""
    from megatron.training import get_args

    model, schedule = recipe.model, recipe.schedule
    number = schedule.train_steps * schedule.global_batch_size
    mask = get_args().create_attention_mask_in_dataloader
    return Samples(number, model.seq_length, model.vocab_size, schedule.seed, mask), None, None


# What is seen --------------------------------------------------------------------------------------------------------


class Watch:
    """Stands around Megatron's train_step."""

    def __init__(self, side: Side):
        self.side, self.started, self.said = side, False, []
        self.exact = side.lowering.plan.recipe.precision.deterministic
        self.seen: tuple[list[torch.Tensor], dict[str, torch.Tensor]] = [], {}

    def step(self, train_step: Callable[..., Any], forward: Callable, *rest: Any, iteration: int, **named: Any) -> Any:
        _, model, optimizer, scheduler, *_ = rest
        if not self.started:
            self.started = True
            self._start(model, optimizer, scheduler)
        number = iteration + 1
        losses: list[torch.Tensor] = []
        counts: dict[str, torch.Tensor] = {}
        passed: dict[str, torch.Tensor] = {}
        squares: dict[str, torch.Tensor] = {}
        with contextlib.ExitStack() as watched:
            self._count(model, counts, watched)
            if hooked(self.side.lowering.plan):
                for hook in (
                    *_squares(model, squares, self._counted()),
                    *(_passing(model, passed) if self.exact else ()),
                ):
                    watched.callback(hook.remove)
            step = optimizer.step

            def stepping() -> Any:
                self.said += [(BITS, number, name, bits.item()) for name, bits in passed.items()]
                self._tensors(GRADIENTS, number, _gradients(model))
                return step()

            optimizer.step = stepping
            watched.callback(delattr, optimizer, "step")
            result = train_step(partial(_recorded, forward, losses), *rest, iteration=iteration, **named)
        self.said += [(FORTH, number, name, value.item()) for name, value in squares.items()]
        if losses or counts:
            self.seen = losses, counts
        _whole_weights(model, optimizer)
        self._tensors(WEIGHTS, number, _weights(model))
        self._numbers(number, *self.seen)  # the replay of a graph ran no Python, and wrote where its capture had
        if self.side.saves and number == 1:
            _save(self.side.folder / self.side.name, model, optimizer, scheduler)
        self._write()
        return result

    def _start(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        if self.side.resume:
            return
        if self.side.reference:
            _tell_apart(model)
            if self.side.device == "cuda":  # fp32 weights are the optimizer's own
                optimizer.reload_model_params()
            _save(self.side.folder / BEGIN, model)
        if self.side.shaken:
            _shake(model, ROUNDING[self.side.device])
            optimizer.reload_model_params()
        _whole_weights(model, optimizer)
        self._tensors(WEIGHTS, 0, _weights(model))
        if not self.side.reference:  # whose one rank counts everything
            self.said += [(NORM, 1, *counted) for chunk in model if not _is_fsdp(chunk) for counted in _normed(chunk)]

    def _count(self, model: Any, counts: dict[str, torch.Tensor], watched: contextlib.ExitStack) -> None:
        """Add up the tokens that each expert gets, by layer number, where they leave for it: the graph of a router runs no hook."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        counted = self._counted()

        def leave(layer: MoELayer, dispatch: Callable, *tokens: torch.Tensor) -> Any:
            if torch.is_grad_enabled() and counted:  # what is recomputed runs without first
                number, seen = str(layer.layer_number), layer.token_dispatcher.routing_map.sum(0).double()
                counts[number] = counts.get(number, 0) + seen
            return dispatch(*tokens)

        for layer in (m for chunk in model for m in chunk.modules() if isinstance(m, MoELayer)):
            layer.dispatch = partial(leave, layer, layer.dispatch)
            watched.callback(delattr, layer, "dispatch")

    def _counted(self) -> bool:
        """Whether this rank's tokens are no other's: without sequence parallelism every tensor rank has the same."""
        from megatron.core import parallel_state as ps

        return self.side.lowering.plan.recipe.parallel.sequence or ps.get_tensor_model_parallel_rank() == 0

    def _tensors(self, what: str, number: int, found: list[Shard]) -> None:
        path = self.side.folder / f"{what}-{number}.pt"
        if self.side.reference:
            whole: dict[str, torch.Tensor] = {}
            for key, shape, where, local in found:
                target = whole.setdefault(key, torch.full(shape, torch.nan, dtype=torch.float32))
                target[where] = local.float().cpu()
            torch.save(whole, path)
            return
        whole = torch.load(path, mmap=True, weights_only=True)
        for key, shape, where, local in found:
            if self.exact:
                self.said.append((BITS, number, f"{what} {key}", _digest(local)))
            if key not in whole or tuple(whole[key].shape) != shape:
                self.said.append((what, number, key, None, 0.0, 0.0, 0))
                continue
            tensor = whole[key].to(local.device).double()
            off = (local.double() - tensor[where]).square().sum().item()
            spot = tuple((w.start, w.stop) if isinstance(w, slice) else w for w in where)
            self.said.append((what, number, key, spot, off, tensor.square().sum().item(), local.numel()))

    def _numbers(self, number: int, losses: list[torch.Tensor], counts: dict[str, torch.Tensor]) -> None:
        from megatron.core import parallel_state as ps

        rank, ranks = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        for index, values in enumerate(losses):
            self.said.append(("loss", number, index * ranks + rank, values.tolist()))
        for layer, count in counts.items():
            self.said.append(("count", number, layer, count.tolist()))

    def _write(self) -> None:
        path = self.side.folder / f"{self.side.name}-{torch.distributed.get_rank()}.said"
        torch.save(self.said, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def _save(folder: Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
    """A checkpoint of Megatron's, of step 1: it reads none of step 0. Without an optimizer it is one of weights."""
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    args = get_args()
    changed = {"save": str(folder), "no_save_optim": optimizer is None, "no_save_rng": True}
    # the loop counts a step's samples when the step has returned
    changed["consumed_train_samples"] = args.global_batch_size
    kept = {name: getattr(args, name) for name in changed}
    vars(args).update(changed)
    save_checkpoint(1, model, optimizer, scheduler, 0)
    vars(args).update(kept)


@torch.no_grad()
def _tell_apart(model: Any) -> None:
    """Give vectors that start as ones or zeros values of their own: a shard in the wrong place would be its right one's equal."""
    generator = torch.Generator().manual_seed(1)
    for chunk in model:
        for p in chunk.parameters():
            if p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                p += (0.1 * torch.randn(p.shape, generator=generator)).to(p)


@torch.no_grad()
def _shake(model: Any, rounding: float) -> None:
    """What another order of sums does to every product, by the weights: each is up to `rounding` of itself larger or smaller."""
    for chunk in model:
        for p in chunk.parameters():
            generator = torch.Generator(p.device).manual_seed(p.numel())
            noise = 2 * torch.rand(p.shape, generator=generator, device=p.device) - 1
            p.copy_(p.float() * (1 + rounding * noise))


def _passing(model: Any, found: dict[str, torch.Tensor]) -> Iterator[Any]:
    """Hooks that take a digest of all that a module puts out and, in the backward pass, of the gradients that come back for it."""

    def passing(name: str, number: int, what: str, values: torch.Tensor) -> None:
        # torch.hash_tensor is one XOR over all, of which rows in another order, or equal ones, are no part.
        octets = values.detach().contiguous().flatten().view(torch.uint8).long()
        places = torch.arange(1, len(octets) + 1, device=octets.device)
        found[f"{what} {name}, {number}"] = (octets * places).sum()

    def look(name: str) -> Callable[..., None]:
        calls = itertools.count(1)

        def hook(module: Any, inputs: Any, output: Any) -> None:
            for values in filter(torch.Tensor.numel, tensors(output)):  # an expert may have no tokens
                passing(name, number := next(calls), FORTH, values)
                if values.requires_grad:
                    values.register_hook(partial(passing, name, number, BACK))

        return hook

    for name, module in _modules(model):
        yield module.register_forward_hook(look(name))


def _squares(model: Any, found: dict[str, torch.Tensor], counted: bool) -> Iterator[Any]:
    """Hooks that add up the squares of what the embedding and each layer put out: of all ranks together, the norm whatever the layout."""

    def hook(name: str, module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and counted:  # what is recomputed runs without first
            found[name] = found.get(name, 0) + sum(x.detach().double().square().sum() for x in tensors(output))

    for name, module in _modules(model):
        if STOPS.fullmatch(name):
            yield module.register_forward_hook(partial(hook, name))


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Those of this rank, by the names that a checkpoint of all stages has for them."""
    for chunk in model:
        bare = _bare(chunk.module.module if _is_fsdp(chunk) else chunk)
        own = bare.decoder.layers  # of this stage; a checkpoint counts all of them
        for name, module in bare.named_modules():
            if name not in ("", "decoder"):  # of which every stage has one
                yield LAYER.sub(lambda at, own=own: f"decoder.layers.{own[int(at[1])].layer_number - 1}", name), module


def _recorded(forward: Callable, losses: list[torch.Tensor], samples: Any, model: Any) -> Any:
    from megatron.core import parallel_state

    output, loss_of = forward(samples, model)

    def recorded(values: torch.Tensor) -> Any:
        loss, tokens, report = loss_of(values)
        of_sequences = report["lm loss"].clone()
        torch.distributed.all_reduce(of_sequences, group=parallel_state.get_context_parallel_group())
        losses.append(of_sequences)
        return loss, tokens, report

    return output, recorded


def _whole_weights(model: Any, optimizer: Any) -> None:
    """Gather what a distributed optimizer has updated in shards and would gather in the next forward pass."""
    from megatron.training import training

    if getattr(model[0].ddp_config, "overlap_param_gather", False) and not _is_fsdp(model[0]):
        training.force_param_sync(model, optimizer)


@torch.no_grad()
def _gradients(model: Any) -> list[Shard]:
    """Gradients as the optimizer gets them; a distributed one gets its shard of each buffer, and here all shards are put together."""
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    found = []
    for chunk in model:
        if _is_fsdp(chunk):
            found += _unsharded(chunk, "main_grad_buffer")
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            if chunk.ddp_config.use_distributed_optimizer and group.size() > 1:
                for bucket in buffer.buckets:
                    mine = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
                    parts = [torch.empty_like(mine) for _ in range(group.size())]
                    torch.distributed.all_gather(parts, mine, group=group)
                    bucket.grad_data.copy_(torch.cat(parts))
        found += gathered(_bare(chunk), lambda p: p.main_grad)
    return found


def _weights(model: Any) -> list[Shard]:
    """Every tensor that a checkpoint of the model holds: parameters and buffers."""
    found: list[Shard] = []
    for chunk in model:
        if _is_fsdp(chunk):
            found += _unsharded(chunk, "model_weight_buffer", buffers=True)
            continue
        found += map(kept, shards(_bare(chunk)))
    return found


def _normed(chunk: Any) -> Iterator[tuple[str, float]]:
    """Of each tensor how many elements the norm that clips counts on this rank; each of n ranks of data that have it takes an n-th."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    groups = ps.get_tensor_model_parallel_group(), ps.get_expert_tensor_parallel_group()
    dense = ps.get_data_parallel_world_size(with_context_parallel=True)
    experts = ps.get_expert_data_parallel_world_size()

    def share(p: torch.nn.Parameter) -> torch.Tensor:
        counted = param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, *groups)
        ranks = dense if getattr(p, "allreduce", True) else experts
        return torch.full(p.shape, counted / ranks, dtype=torch.float64)

    for key, _, _, local in gathered(_bare(chunk), share):
        yield key, local.sum().item()


def _is_fsdp(chunk: Any) -> bool:
    return hasattr(chunk, "megatron_fsdp_dist_index")


def _unsharded(chunk: Any, what: str, buffers: bool = False) -> list[Shard]:
    """Of a model under Megatron-FSDP, whose parameters stand for those of the layers while nothing is computed."""
    fsdp = chunk.module
    away = fsdp.is_param_fsdp_distributed
    fsdp._replace_param_with_raw_if_needed()
    whole = unsharded(fsdp, what)
    fsdp.is_param_fsdp_distributed = True  # so that its hook before a state dict does not put them back
    found = gathered(_bare(fsdp.module), whole.__getitem__, buffers)
    fsdp.is_param_fsdp_distributed = False
    if away:
        fsdp._replace_param_with_distributed_if_needed()
    return found


def _digest(tensor: torch.Tensor) -> int:
    """Of a tensor's bits, whatever its type."""
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())


def _bare(chunk: Any) -> Any:
    from megatron.core.utils import unwrap_model

    return unwrap_model(chunk)
