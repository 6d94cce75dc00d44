"""What a rank holds whatever the microbatches do: parameters, gradients, optimizer state, buffers, workspaces.

Placement order: tensor parallelism cuts the tensors, pipeline parallelism deals out the layers, the data-parallel ranks
share the optimizer state (or, under FSDP, more), expert parallelism deals out the experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nam_megatron.budget import ends
from nam_megatron.compile.plan import Plan
from nam_megatron.features import Feature
from nam_megatron.words.sizes import (
    ALLOCATOR,
    COMMUNICATION,
    GRADIENTS,
    PARAMETERS,
    RUNTIME,
    UNMEASURED,
    WORKSPACE,
    Group,
    Held,
    Line,
    Param,
    Sizes,
    Stage,
)  # fmt: skip


def stages(plan: Plan) -> tuple[Stage, ...]:
    of = plan.recipe.parallel.pipeline
    return tuple(Stage(rank, of, plan.segments[rank::of]) for rank in range(of))


def parts(plan: Plan, z: Sizes, stage: Stage) -> Iterator[tuple[str, int | None, Param]]:
    """(owner, layer number, parameter) of everything on a stage."""
    for param in ends.params(z, stage):
        yield "ends", None, param
    for layer in stage.layers:
        for param in z.site.blocks.of(layer.kind).params(z, layer):
            yield layer.kind, layer.number, param
    for feature in plan.recipe.feature.all():
        for param in feature.params(z, stage):
            yield feature.name, None, param


def parameters(plan: Plan) -> tuple[int, int]:
    """(all parameters of the model, those that one token uses). Embedding and output layer are among both."""
    total, idle = 0, 0
    moe = plan.recipe.blocks.moe
    for _, _, param in parts(plan, Sizes.of(plan.site), Stage(0, 1, plan.segments)):
        total += param.elements
        if moe and param.shard == "expert":
            idle += param.elements // moe.experts * (moe.experts - moe.top_k)
    return total, total - idle


def by_kind(plan: Plan) -> dict[str, int]:
    """Parameters of the whole model by owner, in the order of the model."""
    found: dict[str, int] = {}
    for owner, _, param in parts(plan, Sizes.of(plan.site), Stage(0, 1, plan.segments)):
        found[owner] = found.get(owner, 0) + param.elements
    return found


def groups(plan: Plan, z: Sizes, stage: Stage) -> tuple[Group, ...]:
    """The parameters of a rank by buffer. Experts have one of their own where their ranks are others.

    megatron-core 0.19.2: `is_expert_parallel` of distributed_data_parallel.py, set where EP > 1 or ETP != TP.
    """
    apart = z["e"] > 1 or z["et"] != z["t"]
    dense: list[Held] = []
    experts: list[Held] = []
    for owner, number, param in parts(plan, z, stage):
        (experts if apart and param.shard == "expert" else dense).append(Held.of(z, param, owner, number))
    return (
        Group("dense", tuple(dense), int(z["N"]), "N"),
        *([Group("experts", tuple(experts), int(z["Ne"]), "Ne")] if experts else []),
    )


def lines(plan: Plan, z: Sizes, stage: Stage, held: Sequence[Group]) -> Iterator[Line]:
    """Everything static on a rank, with the phase in which it first exists."""
    f = plan.recipe.feature
    # One feature says how weights, gradients and Adam's state lie; others change or add to it.
    keeper = f.megatron_fsdp or f.distributed_optimizer
    changing: tuple[Feature | None, ...] = (keeper, f.muon, f.fp8)
    for feature in filter(None, changing):
        for group in held:
            yield from _of(feature, _state(feature, z, group))
    for feature in f.all():
        yield from _of(feature, feature.buffers(z, held))
    yield from ends.buffers(z, stage)
    yield from _unread(z, held)
    yield from _communication(z)
    yield from _workspaces(z)
    yield from _device(plan, z, held)


def _state(feature: Feature, z: Sizes, group: Group) -> Iterator[Line]:
    """Beside adapters all weights are held, and only the adapters' gradients and moments."""
    if not z.site.lora:
        yield from feature.state(z, group)
        return
    stays, learns = (
        replace(group, held=tuple(held for held in group.held if (held.owner == "lora") is mine))
        for mine in (False, True)
    )
    yield from (line for line in feature.state(z, stays) if line.bucket in PARAMETERS.values())
    yield from feature.state(z, learns)


def _of(feature: Feature, found: Iterator[Line]) -> Iterator[Line]:
    return (replace(line, owner=line.owner or feature.name) for line in found)


def _communication(z: Sizes) -> Iterator[Line]:
    more = {"bucket": COMMUNICATION, "owner": "parallel"}
    if z.site.sequence:
        yield z.line("sequence gather", "2 T h", "Megatron's global buffer for the output layer's input", **more)
    if z.site.pipeline > 1:
        yield z.line("pipeline exchange", "4 Ts h", "a received gradient and a received input", **more)


def _unread(z: Sizes, held: Sequence[Group]) -> Iterator[Line]:
    """What autograd is given for gradients that a GEMM has added to their buffer: one tensor of each shape, which stays.

    Transformer Engine 2.20.2 (module/base.py, get_dummy_wgrad). The output layer's has no element: runtime/wgrad.py.
    """
    if not z.site.fused_grad_accumulation:
        return
    moe = z.site.blocks.moe
    by_torch = moe is not None and moe.expert_gemm == "torch"  # which autograd is given what was added
    shapes = {
        (x.param.shape, x.param.shard): x.elements
        for x in (x for group in held for x in group.held)
        if len(x.param.shape) == 2 and x.param.role == "weight" and not (by_torch and x.param.shard == "expert")
    }
    why = "of each shape of a linear layer's weight, for autograd"
    z = z.own(W=sum(shapes.values()))
    yield z.line("gradients that nobody reads", "2 W", why, bucket=GRADIENTS, owner="precision", since="forward")


def _workspaces(z: Sizes) -> Iterator[Line]:
    """cuBLAS's, on Hopper: Transformer Engine 2.20.2 module/base.py; torch 2.11 CUDABlas.cpp, one for each thread."""
    of = {"bucket": WORKSPACE, "owner": "device"}
    yield z.line("Transformer Engine's cuBLAS", "32 MiB + 1024", "one", **of)
    # torch's grouped GEMM does without: 141 and 144 MB less at the peak of two models, which were run both ways.
    if (moe := z.site.blocks.moe) and moe.grouped_gemm and moe.expert_gemm == "transformer_engine":
        yield z.line("grouped GEMM", "4 (32 MiB + 1024)", "one more for each of four streams", **of)
    yield z.line("torch's cuBLAS", "64 MiB", "32 for the forward and for the autograd thread", **of)


def _device(plan: Plan, z: Sizes, held: Sequence[Group]) -> Iterator[Line]:
    device, site = plan.recipe.device, z.site
    z = z.own(runtime=device.runtime_gib, overhead=device.allocator_gib)
    of = {"bucket": RUNTIME, "owner": "device", "since": "init", "place": "outside"}
    yield z.line("runtime", "runtime GiB", "CUDA context and loaded kernels: outside torch's allocator", **of)
    gathered = site.blocks.moe and site.blocks.moe.gathers
    # Gradients and weights of each buffer go through a group of their own, which context ranks are of, too. What tensor ranks take was
    # measured beside the experts' group, and has it in it.
    members: dict[str, tuple[str, int]] = {
        group.name: ("data", group.ranks) for group in held if group.name == "dense" or site.tensor == 1
    }
    members |= {key: (key, getattr(site, key)) for key in ("tensor", "pipeline", "context")}
    members["expert"] = ("gathered" if gathered else "expert", site.expert)
    for name, (key, n) in members.items():
        if n > 1:
            z = z.own(group=getattr(device.groups_gib, key))
            mark = UNMEASURED if name in ("experts", "context") or (name == "dense" and site.context > 1) else ""
            why = "NCCL's buffers, outside torch's allocator"
            yield z.line(f"{key} group{', experts' if name == 'experts' else ''}", "group GiB", why, mark=mark, **of)
    why = "reserved beyond what is allocated: fragments, not modelled"
    of = {"bucket": ALLOCATOR, "owner": "device", "since": "init", "place": "reserved"}
    yield z.line("allocator", "overhead GiB", why, **of)
    if site.whole_step and site.context > 1:
        why = "what the capture of a step over context ranks leaves reserved: seen once, on two GPUs with 52 layers, not modelled"
        yield z.line("captured context ranks", "10 GiB", why, **of)
