"""Real HybridModels on a CPU: Megatron's classes and schedules over gloo, each rank a fork of one warm parent.

`on_ranks(case, job)` forks one process per rank, builds the model of `case` there with our stack spec, and returns what
`job(rig)` returned on each rank. Weights depend on a parameter's checkpoint key and global shape alone, so every
parallel layout of one pattern is the same model. Only the children are patched; the parent never initialises
torch.distributed.

Patterns are written in Megatron's symbols, plus `R` for m2rnn and `3` for mamba3 (`M` to Megatron).
"""

import contextlib
import importlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

# Warm: what a rank would import happens once, in the parent.
import megatron.core.dist_checkpointing.strategies.filesystem_async
import megatron.core.models.hybrid.hybrid_model
import megatron.core.ssm.gated_delta_net.gdn
import megatron.core.transformer.experimental_attention_variant.absorbed_mla
import megatron.core.transformer.experimental_attention_variant.dsa  # noqa: F401
import modules
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from presets import written

from nam_megatron.blocks import Block
from nam_megatron.blocks.kinds import KINDS, Blocks
from nam_megatron.features.names import FEATURES
from nam_megatron.mends import install
from nam_megatron.prove.cpu import patched
from nam_megatron.prove.tensors import Shard, gathered, shards, window
from nam_megatron.runtime.stack import hybrid_stack_spec

KIND = {
    "*": "attention", "+": "mla", "D": "dsa", "E": "moe", "-": "mlp", "M": "mamba2", "G": "gdn", "3": "mamba3", "R": "m2rnn",
}  # fmt: skip
SEQUENCE, BATCH, VOCAB = 32, 2, 128
for kind in KINDS:
    importlib.import_module(f"nam_megatron.blocks.{kind}.layer")
written("nam56r")  # composed here, each rank has it; otherwise that would take a third of a rank's time


@dataclass(frozen=True)
class Layer:
    number: int
    kind: str
    letter: str
    rank: int
    segment: int


@dataclass(frozen=True)
class Plan:
    """What hybrid_stack_spec reads of a plan."""

    layers: tuple[Layer, ...]
    mtp: tuple[str, ...]
    mtp_depths: int
    recipe: SimpleNamespace

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(layer.kind for layer in self.layers) | frozenset(self.mtp)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The kinds that stand; sizes of Megatron's own come from its config (config_of), not from here."""
        return tuple(block for block in self.recipe.blocks.all() if block.kind in self.kinds)

    @property
    def site(self) -> SimpleNamespace:
        return site_of(self.recipe)


def site_of(recipe: Any) -> SimpleNamespace:
    """What a kind's layer.py reads of a site."""
    fp8 = recipe.feature.fp8
    keeps = fp8.keeps if fp8 else lambda part: False
    return SimpleNamespace(blocks=recipe.blocks, fp8=fp8 is not None, keeps=keeps)


def recipe_of(
    latent_norm: bool = True,
    grouped_gemm: bool = True,
    dispatcher: str = "alltoall",
    strided: bool = False,
    features: Mapping[str, dict] = MappingProxyType({}),
    expert_gemm: str = "transformer_engine",
    keys: Mapping[str, dict] = MappingProxyType({}),
) -> SimpleNamespace:
    """features: name -> keys of it, beside those of conf/. keys: of blocks, by kind, beside those that are said here."""
    said = {
        "mla": {"kernels": "megatron", "latent_norm": latent_norm},
        "dsa": {"kernels": "megatron"},
        "moe": {"grouped_gemm": grouped_gemm, "dispatcher": dispatcher, "expert_gemm": expert_gemm},
        "mamba2": {"strided": strided},
        "mamba3": {"kernels": "naive"},
        "m2rnn": {"kernels": "naive"},
    }
    model, execution, own = (written("nam56r")[section] for section in ("model", "execution", "feature"))
    parts = {kind: computing | execution.get(kind, {}) for kind, computing in model["blocks"].items()}
    blocks = {kind: part | said.get(kind, {}) | keys.get(kind, {}) for kind, part in parts.items()}
    on = [FEATURES[name].model_validate(own[name] | said) for name, said in features.items()]
    return SimpleNamespace(
        blocks=Blocks.model_validate(blocks),
        feature=SimpleNamespace(**dict.fromkeys(FEATURES) | {f.name: f for f in on}, all=lambda: iter(on)),
        precision=SimpleNamespace(attention_kernels="transformer_engine"),
        parallel=SimpleNamespace(tensor=1),  # as the series of mends asks
    )


def say(recipe: Any, kind: str, **keys: Any) -> None:
    """Other values at the keys of a kind."""
    block = recipe.blocks.of(kind).model_copy(update=keys)
    recipe.blocks = recipe.blocks.model_copy(update={kind: block})


def plan_of(pattern: str, **said: Any) -> Plan:
    """said: as `recipe_of` takes it."""
    main, *mtp = pattern.split("/")
    letters = [(letter, i) for i, segment in enumerate(main.split("|")) for letter in segment]
    ranks = [sum(a == letter for a, _ in letters[:i]) for i, (letter, _) in enumerate(letters)]
    layers = [Layer(i + 1, KIND[a], a, ranks[i], segment) for i, (a, segment) in enumerate(letters)]
    depth = tuple(KIND[a] for a in mtp[0]) if mtp else ()
    return Plan(tuple(layers), depth, len(mtp), recipe_of(**said))


@dataclass(frozen=True)
class Case:
    """A pattern in a layout. `microbatches`: over all data-parallel ranks. `config`: fields other than config_of's.

    positions: rows of a learned table in RoPE's stead. keys: of blocks, by kind.
    meta: build on the meta device, without weights and without DDP.
    """

    pattern: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    microbatches: int = 2
    vocab: int = VOCAB
    config: dict = field(default_factory=dict)
    mixers: dict = field(default_factory=dict)
    latent_norm: bool = True
    dispatcher: str = "alltoall"
    expert_gemm: str = "transformer_engine"
    strided: bool = False
    positions: int | None = None
    features: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    meta: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


@dataclass
class Rig:
    """What a job gets: the bare HybridModel and the same model inside Megatron's DDP."""

    case: Case
    rank: int
    config: Any
    model: Any
    ddp: Any


class RankFailed(AssertionError):
    """A rank raised: the text is its traceback."""


def on_ranks(case: Case, job: Callable[[Rig], Any], limit_s: float = 120.0) -> list[Any]:
    """`job`'s result on each rank of `case`, in rank order.

    Raises:
        RankFailed: with the tracebacks of the ranks that failed.
    """

    def rank_job(rank: int, folder: Path) -> Any:
        with patched():
            return job(_rig(case, rank, folder))

    return _forked(rank_job, case.world, limit_s)


def in_child(job: Callable[[], Any], limit_s: float = 120.0) -> Any:
    """`job`'s result in one forked process, which it may patch as it likes. Raises RankFailed with its traceback."""
    (result,) = _forked(lambda rank, folder: job(), 1, limit_s)
    return result


def _forked(job: Callable[[int, Path], Any], world: int, limit_s: float) -> list[Any]:
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [fork.Process(target=_child, args=(job, rank, folder)) for rank in range(world)]
        for child in children:
            child.start()
        deadline = time.monotonic() + limit_s
        # A rank that failed leaves the others waiting in a collective: the first error ends them all.
        while (
            any(child.is_alive() for child in children)
            and time.monotonic() < deadline
            and not list(folder.glob("*.error"))
        ):
            time.sleep(0.01)
        for child in children:
            if list(folder.glob("*.error")) or time.monotonic() >= deadline:
                child.kill()
            child.join()
        if errors := [path.read_text() for path in sorted(folder.glob("*.error"))]:
            raise RankFailed("\n".join(errors))
        done = {int(path.stem): pickle.loads(path.read_bytes()) for path in folder.glob("*.pickle")}
    if lost := sorted(set(range(world)) - done.keys()):
        raise RankFailed(f"ranks {lost} ended without a result (killed, or {limit_s:.0f} s were up)")
    return [done[rank] for rank in range(world)]


def _child(job: Callable[[int, Path], Any], rank: int, folder: Path) -> None:
    part = folder / f"{rank}.part"
    try:
        part.write_bytes(pickle.dumps(job(rank, folder)))
        part.rename(part.with_suffix(".pickle"))
    except BaseException:
        part.write_text(f"rank {rank}:\n{traceback.format_exc()}")
        part.rename(part.with_suffix(".error"))


# The model -----------------------------------------------------------------------------------------------------------

ATTENTION = dict(num_query_groups=2, kv_channels=16)
LATENT = dict(q_lora_rank=16, kv_lora_rank=24, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16, qk_layernorm=True)
LATENT |= dict(rope_type="rope", rotary_base=500000)
# The indexer of layer 3 serves layers 3 to 6, that of 7 serves 7 to 10, and so on. Hadamard needs a CUDA package.
DSA = dict(experimental_attention_variant="dsa", dsa_indexer_n_heads=4, dsa_indexer_head_dim=16, dsa_indexer_topk=8)
DSA |= dict(dsa_indexer_loss_coeff=0.01, dsa_indexer_rotate_activation=False)
DSA |= dict(dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=3)
MOE = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=48)
MOE |= dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32")
MOE |= dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2)
MOE |= dict(moe_grouped_gemm=True)
MAMBA = dict(mamba_num_heads=8, mamba_head_dim=8, mamba_state_dim=16, mamba_num_groups=2)


def config_of(case: Case) -> Any:
    """The TransformerConfig of `case`: NAM56R's choices at width 64, fp32, every fusion off."""
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    plan = plan_of(case.pattern)
    kinds = {layer.kind for layer in plan.layers} | set(plan.mtp)
    fields = dict(
        num_layers=len(plan.layers), mtp_num_layers=plan.mtp_depths or None, hidden_size=64, ffn_hidden_size=96
    )
    fields |= dict(num_attention_heads=4, activation_func=squared_relu, normalization="RMSNorm", add_bias_linear=False)
    fields |= dict(hidden_dropout=0.0, attention_dropout=0.0, is_hybrid_model=True, use_cpu_initialization=True)
    fields |= dict(params_dtype=torch.float32, pipeline_dtype=torch.float32, transformer_impl="local")
    fields |= dict(bias_activation_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False)
    fields |= dict(gradient_accumulation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False)
    fields |= dict(tensor_model_parallel_size=case.tp, sequence_parallel=case.tp > 1, expert_tensor_parallel_size=1)
    fields |= dict(pipeline_model_parallel_size=case.pp, expert_model_parallel_size=case.ep)
    fields |= dict(context_parallel_size=case.cp, cp_comm_type="all_gather")
    latent = bool(kinds & {"mla", "dsa"})
    for kind, more in (("attention", ATTENTION), ("dsa", DSA), ("moe", MOE), ("mamba2", MAMBA)):
        fields |= more if kind in kinds else {}
    if "moe" in kinds:
        fields["moe_token_dispatcher_type"] = (
            "allgather" if case.dispatcher in ("local", "gathered") else case.dispatcher
        )
    fields |= LATENT if latent else {}
    return (MLATransformerConfig if latent else TransformerConfig)(**{**fields, **case.config})


def _rig(case: Case, rank: int, folder: Path) -> Rig:
    from megatron.core import parallel_state as ps
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.world)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    config = config_of(case)
    # Another seed in every layout: equal losses then prove that fill() reached every parameter.
    torch.manual_seed(1000 + rank + case.world)
    said = ("latent_norm", "dispatcher", "strided", "features", "expert_gemm", "keys")
    plan = plan_of(case.pattern, **{name: getattr(case, name) for name in said})
    stack = hybrid_stack_spec(plan, modules.CpuBackend(), case.mixers)
    with torch.device("meta") if case.meta else contextlib.nullcontext():
        model = HybridModel(
            config,
            stack,
            vocab_size=case.vocab,
            max_sequence_length=case.positions or SEQUENCE,
            hybrid_layer_pattern="".join(KINDS[KIND[c]].symbol if c in KIND else c for c in case.pattern),
            position_embedding_type="learned_absolute" if case.positions else "rope",
            rotary_base=500000,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    for hook in stack.metainfo.get("hooks", []):
        hook([model])
    if case.meta:
        return Rig(case, rank, config, model, None)
    fill(model)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    if case.cp > 1:
        install.single("context")
    return Rig(case, rank, config, model, ddp)


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape of the model of `case` (one rank), without memory: full widths are welcome."""
    no_memory = dict(use_cpu_initialization=False, perform_initialization=False)
    case = replace(case, meta=True, config=no_memory | case.config)
    (found,) = on_ranks(case, lambda rig: {name: tuple(p.shape) for name, p in rig.model.named_parameters()})
    return found


# Global tensors ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(model: Any) -> None:
    """Set every parameter from its checkpoint key and global shape; asserts that the checkpoint holds every one."""
    waiting = {p.data_ptr(): p.numel() for p in model.parameters()}
    sizes = {p.data_ptr(): p.nbytes for p in model.parameters()}  # parameters may share a storage
    for shard in shards(model):
        at = shard.data.data_ptr()
        owner = next((begin for begin, size in sizes.items() if 0 <= at - begin < size), None)
        if owner is None:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
        values = torch.randn(shard.global_shape, generator=generator)
        values = 1 + 0.2 * values if "norm" in shard.key else 0.15 * values
        shard.data.copy_(values[window(shard)])
        waiting[owner] -= shard.data.numel()
    missing = [name for name, p in model.named_parameters() if waiting[p.data_ptr()]]
    assert not missing, f"not in the sharded state dict: {missing}"


def weights(rig: Rig) -> list[Shard]:
    return gathered(rig.model, lambda p: p.data)


def gradients(rig: Rig) -> list[Shard]:
    """As the optimizer would see them: summed over microbatches, reduced over every group."""
    return gathered(rig.model, lambda p: p.main_grad)


def assemble(per_rank: list[list[Shard]]) -> dict[str, torch.Tensor]:
    """Global tensors by checkpoint key from all ranks' shards; asserts that replicas agree and nothing is missing."""
    whole: dict[str, torch.Tensor] = {}
    for key, shape, where, local in (shard for rank in per_rank for shard in rank):
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        seen = target[where]
        assert seen.isnan().all() or torch.allclose(seen, local, rtol=1e-4, atol=1e-7), f"replicas of {key} differ"
        target[where] = local
    assert not (bad := [key for key, t in whole.items() if t.isnan().any()]), f"incomplete or not finite: {bad}"
    return whole


# The step ------------------------------------------------------------------------------------------------------------


def step(rig: Rig) -> list[float]:
    """One forward and backward through Megatron's schedule; each microbatch's loss (on the last pipeline stage)."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_batch_on_this_cp_rank

    generator = torch.Generator().manual_seed(7)
    data = [torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(rig.case.microbatches)]
    mine = data[ps.get_data_parallel_rank() :: rig.case.dp]

    def of_sequences(losses):
        mean = losses.detach().float().mean()
        torch.distributed.all_reduce(mean, group=ps.get_context_parallel_group())
        return mean.item() / rig.case.cp

    def forward(batches, model):
        whole = next(batches)
        mask = torch.ones(BATCH, SEQUENCE // rig.case.cp)
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        parts = {"tokens": whole[:, :-1], "labels": whole[:, 1:], "position_ids": positions}
        tokens, labels, positions = get_batch_on_this_cp_rank(
            parts, is_hybrid_cp=False, cp_group=ps.get_context_parallel_group()
        ).values()
        # An explicit (unused) mask: with index reuse Megatron hangs the shared top-k on it, one per microbatch.
        attention_mask = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        out = model(tokens, positions, attention_mask, labels=labels, loss_mask=mask)
        return out, lambda o: (o.float().sum(), torch.tensor(mask.numel(), dtype=torch.int), {"loss": of_sequences(o)})

    rig.ddp.zero_grad_buffer()
    report = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(mine),
        model=[rig.ddp],
        num_microbatches=len(mine),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [r["loss"] for r in report]


@dataclass(frozen=True)
class Trained:
    """losses: by microbatch, in the order of the data. gradients: global, by checkpoint key."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def train(case: Case, before: Callable[[Rig], object] = lambda rig: None) -> Trained:
    """One step of `case` in its layout after `before(rig)` on each rank, put together from all ranks."""
    ranks = on_ranks(case, lambda rig: (before(rig), step(rig), gradients(rig))[1:])
    reporting = [losses for losses, _ in ranks if losses]
    by_dp = reporting[:: len(reporting) // case.dp]
    losses = [by_dp[i % case.dp][i // case.dp] for i in range(case.microbatches)]
    return Trained(losses, assemble([grads for _, grads in ranks]))
