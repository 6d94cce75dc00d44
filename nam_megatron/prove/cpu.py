"""A GPU's training program on a CPU: gloo for NCCL, plain torch for Transformer Engine and Mamba's kernels (torch side).

What it cannot show: kernels, streams and their overlap, CUDA graphs, memory, NCCL. Both entries patch modules for good: they are for
a process that ends soon.
"""

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from nam_megatron.prove import cpu_modules as modules
from nam_megatron.targets import current

CPU = torch.device("cpu")
HERE = {torch.Tensor.cuda, torch.Tensor.pin_memory}


class _CudaToCpu(torch.overrides.TorchFunctionMode):
    """device="cuda", .cuda() and pinned memory become the CPU: schedules, rope and trackers name the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Called a hundred thousand times in a training step or three: what most calls lack is looked at first.
        if kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
            if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
                kwargs["device"] = CPU
        if func in HERE:
            return args[0]
        if func is torch.device and str(args[0]).startswith("cuda"):
            return CPU
        if func is torch.Tensor.to:
            args = tuple(CPU if isinstance(a, str | torch.device) and str(a).startswith("cuda") else a for a in args)
        return func(*args, **(kwargs or {}))


class _Idle:
    """A stream or an event: every method does nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self


def _rearrange(x, pattern):
    """The three einops patterns of Megatron's Mamba mixer in training; einops itself need not be installed."""
    return x.squeeze(1) if pattern == "d 1 w -> d w" else x.transpose(0, 1)


def _earliest_of_equals(found, *args, **kwargs):
    """Megatron's index scores and top-k, where equal scores are taken as torch.topk likes; ours take the earliest keys."""
    scores, indices = found(*args, **kwargs)
    best = scores.sort(dim=-1, descending=True, stable=True)
    most = indices.size(-1)
    return scores, best.indices[..., :most].masked_fill(best.values[..., :most] == -torch.inf, -1)


def _bytes_back(output: torch.Tensor, again: torch.Tensor) -> None:
    """The bytes of an output that was let go of, from its recomputation. Megatron shares them, by C++ that it compiles at the first use."""
    kept, storage = output.untyped_storage(), again.untyped_storage()
    kept.resize_(storage.nbytes())
    kept.copy_(storage)


@cache
def _products_in_fp32() -> torch.library.Library:
    """bf16 matrices are multiplied by fp32's kernels and rounded once: as exact, and fifty times as fast on a processor without bf16."""

    def multiply(out: Any, *tensors: torch.Tensor, **scales: float) -> torch.Tensor:
        wide = [t.float() if t.dtype is torch.bfloat16 else t for t in tensors]
        made = wide[-1].new_empty((*wide[-2].shape[:-1], wide[-1].shape[-1]))
        return out(*wide, **scales, out=made).to(tensors[-1].dtype)

    library, aten = torch.library.Library("aten", "IMPL"), torch.ops.aten
    with warnings.catch_warnings(action="ignore"):  # torch's, that there was a kernel
        for op in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
            library.impl(op.default, partial(multiply, op.out), "CPU", allow_override=True)
    return library


@contextlib.contextmanager
def patched(mode: type[_CudaToCpu] = _CudaToCpu) -> Iterator[None]:
    """This process runs Megatron on the CPU from here on. The patches of modules stay: for a process that ends soon."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import megatron.core.models.hybrid.hybrid_block as hybrid_block
    import megatron.core.ssm.gated_delta_net.common as gdn_common
    import megatron.core.ssm.gated_delta_net.gdn as gdn
    import megatron.core.ssm.mamba_context_parallel as mamba_cp
    import megatron.core.ssm.mamba_mixer as mamba_mixer
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.attention as attention
    import megatron.core.transformer.experimental_attention_variant.absorbed_mla as absorbed_mla
    import megatron.core.transformer.experimental_attention_variant.dsa as dsa
    import megatron.core.transformer.moe.moe_layer as moe_layer
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.multi_latent_attention as mla

    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    _products_in_fp32()
    idle = _Idle()
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.Stream = torch.cuda.Event = _Idle
    torch.cuda.current_stream = lambda *_, **__: idle
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    # What a checkpoint's writers found goes through a process that reads it. Spawned, it would import torch and Megatron first.
    queue = writer.get_write_results_queue
    writer.get_write_results_queue = lambda mp_mode="fork": queue("fork")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Recomputed norms and experts ask Transformer Engine for its FP8 state, whatever the precision.
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    random._get_share_storage = lambda: _bytes_back
    dsa.fused_qk_topk_naive = partial(_earliest_of_equals, dsa.fused_qk_topk_naive)
    # The dispatcher turns its splits into numbers on the way off the GPU; gloo wants numbers too.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, **_: (
        t.numpy() if as_numpy and torch.is_tensor(t) else t
    )
    # Where TE is installed the router multiplies with its GEMM.
    moe_utils.te_general_gemm = None
    # HybridStack and the norms of queries and keys name TENorm itself; the two MLAs ask for TELinear to see that a projection is
    # replicated.
    hybrid_block.TENorm = attention.TENorm = modules.Norm
    mla.TELinear = absorbed_mla.TELinear = moe_layer.TELinear = modules.ReplicatedLinear
    moe_layer.HAVE_TE = True  # asked for the projections to experts of a latent alone
    # The real Mamba mixer, with its two Triton kernels in plain torch.
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_cp.HAVE_EINOPS = True
    mamba_mixer.MAMBA_HAS_STATE_DTYPE = False
    mamba_mixer.rearrange = _rearrange
    mamba_mixer.ExtendedRMSNorm = modules.GatedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = modules.mamba2_scan
    # The real gated delta net, with three kernels of flash-linear-attention in plain torch.
    gdn_common.HAVE_FLA, gdn_common.l2norm = True, modules.l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = modules.causal_conv1d, modules.gated_delta_rule
    with mode():
        yield


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Transformer Engine keeps its state: the step is counted in each group, and a tensor's state has its moments alone.

    Megatron's distributed optimizer saves and loads that form; it cannot read back the state of torch's AdamW.
    """

    def __init__(self, params, lr, betas, eps, weight_decay, capturable, adam_w_mode):
        assert adam_w_mode and not capturable
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), params = group["betas"], [p for p in group["params"] if p.grad is not None]
            # Of all: an FSDP's rank that holds nothing of a tensor has no gradient of it, and saves its empty state with the others.
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if params:
                states = [self.state[p] for p in params]
                torch.optim._functional.adamw(
                    params, [p.grad for p in params], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
                    [torch.tensor(step - 1.0) for _ in params], amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip


class _LooksLikeCuda(_CudaToCpu):
    """Optimizers read the name of a tensor's type. One mode and no second around the first: each is called for every operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        named = func is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if named else result


def _uneven_by_gloo() -> None:
    """Experts over tensor ranks gather and sum as many tokens as each rank has; gloo wants equal parts, and sums whole tensors alone."""
    even = torch.distributed.all_gather

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if all(part.shape == mine.shape for part in parts):
            return even(parts, mine, group, async_op)
        rows = max(len(part) for part in parts)
        padded = [part.new_empty(rows, *part.shape[1:]) for part in parts]
        even(padded, torch.cat([mine, mine.new_zeros(rows - len(mine), *mine.shape[1:])]), group=group)
        for part, got in zip(parts, padded, strict=True):
            part.copy_(got[: len(part)])

    def reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
        whole = torch.cat(parts)
        torch.distributed.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in parts])[torch.distributed.get_rank(group)])

    torch.distributed.all_gather, torch.distributed.reduce_scatter = all_gather, reduce_scatter


def _sharded_by_gloo() -> None:
    """Megatron-FSDP names a mesh of GPUs, and gathers tensors of two types at once: gloo gives other numbers back where those of the
    wider type come last.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    from torch.distributed import DeviceMesh

    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(lambda group, device_type, *a, **kw: from_group(group, "cpu", *a, **kw))

    gather = torch.distributed.all_gather_into_tensor

    def gathered(*args: Any, async_op: bool = False, **named: Any) -> _Idle:
        gather(*args, **named)
        return _Idle()

    torch.distributed.all_gather_into_tensor = gathered
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: contextlib.nullcontext(_Idle())


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """In this process from here on: a Hopper GPU, NCCL and Transformer Engine, as far as Megatron's training program looks."""
    import megatron.core.ssm.mamba_mixer as mamba_mixer
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.utils
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.training import training
    from megatron.training.argument_utils import ArgumentGroupFactory

    from nam_megatron.runtime import pretrain, readings, stack

    device = SimpleNamespace(major=9, minor=0, total_memory=2**30, name="cpu", multi_processor_count=1)
    for name, value in dict(
        device_count=lambda: 1,
        set_device=lambda *_: None,
        empty_cache=lambda: None,
        get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: device,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        initial_seed=torch.initial_seed,
    ).items():
        setattr(torch.cuda, name, value)
    # Help texts, which the parser reads from source code each time.
    ArgumentGroupFactory._get_field_docstrings = lambda *_: {}
    init = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, *a, **kw: init("gloo", *a, **kw)
    _uneven_by_gloo()
    _sharded_by_gloo()
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    megatron.core.utils._te_version = megatron.core.utils.PkgVersion(current().te_version)
    initialize = training.initialize_megatron
    training.initialize_megatron = lambda **kw: initialize(allow_no_cuda=True, **kw)

    def scan(x, *weights, D, **kw):
        """In fp32, as the kernel computes; activations keep their type."""
        return modules.mamba2_scan(x.float(), *(w.float() for w in weights), D=D.float(), **kw).to(x.dtype)

    def settings(args, spec, made=pretrain.settings):
        args.apply_rope_fusion = False  # a kernel of TE
        return made(args, spec)

    stack.transformer_engine_backend, pretrain.settings = modules.CpuBackend, settings
    readings.device = lambda: {"name": "cpu"}
    with patched(_LooksLikeCuda):
        # Tensor ranks draw different weights, and checkpoints hold the state of each stream: a bare model does without.
        rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        rng.initialize_rng_tracker(force_reset=True)
        mamba_mixer.mamba_split_conv1d_scan_combined = scan
        yield
