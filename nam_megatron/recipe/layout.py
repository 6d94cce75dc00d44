"""`lane`, `parallel`, `device`, `cluster`: who computes what, on which machines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from nam_megatron.errors import Problem, counted
from nam_megatron.recipe.model import Kind
from nam_megatron.setting import Config, Name, Row, Setting

if TYPE_CHECKING:
    from nam_megatron.plan import Plan

Degree = Annotated[int, Field(ge=1, le=65536)]


class LaneBlocks(Config):
    """The kind of block a lane puts at M and R."""

    M: Annotated[Kind | None, Row("at the letter M")] = None
    R: Annotated[Kind | None, Row("at the letter R")] = None


class Lane(Config):
    """A parallel layout and which block stands at M and R; part of a run's identity."""

    name: Annotated[Name, Row("of the lane", executes="a name; its blocks and layout are compared themselves")]
    tensor: Annotated[Degree, Row("tensor size of the lane", executes="`parallel` says what is used")]
    sequence: Annotated[bool, Row("sequence parallelism of the lane", executes="`parallel` says what is used")]
    blocks: LaneBlocks

    def idle(self, recipe: Any, kinds: frozenset[str]) -> Iterator[tuple[str, str]]:
        for letter in type(self.blocks).model_fields:
            if letter not in recipe.model.pattern:
                yield f"blocks.{letter}", f"the pattern has no `{letter}`"


def _row(doc: str, argument: str) -> Row:
    return Row(doc, argument, (f"transformer.{argument}",))


class Parallel(Config):
    """The parallel layout; data parallel size is what is left: world / (tensor * pipeline * context)."""

    executes: ClassVar[str | None] = "who computes what"

    tensor: Annotated[Degree, _row("ranks that share each matrix", "tensor_model_parallel_size")]
    sequence: Annotated[bool, _row("activations between matrices are sharded too", "sequence_parallel")]
    pipeline: Annotated[Degree, _row("stages; the pattern's `|` say where it is cut", "pipeline_model_parallel_size")]
    virtual_pipeline: Annotated[Degree, Row("pipeline segments per pipeline rank")]
    context: Annotated[Degree, _row("ranks that share a sequence", "context_parallel_size")]
    expert: Annotated[Degree, _row("ranks that share the experts", "expert_model_parallel_size")]
    expert_tensor: Annotated[
        Degree,
        _row("ranks that share each expert; unset, Megatron takes the tensor size", "expert_tensor_parallel_size"),
    ]

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        if self.context == 1:
            return
        how, why = "p2p", "keys and values go round the ranks of a sequence while others are attended to"
        if self.gathers_keys(plan):
            how, why = "all_gather", "each rank gets all keys: a model with sparse attention takes no other"
        yield Setting("cp_comm_type", (how,), why, "context", fields={"transformer.cp_comm_type": how})

    def gathers_keys(self, plan: "Plan") -> bool:
        """Whether a rank that shares sequences has the keys of all ranks at once in its attention layers, or as they go round."""
        return "dsa" in plan.kinds

    def check(self, plan: "Plan") -> Iterator[Problem]:
        world = plan.recipe.world_size
        if world % (size := self.tensor * self.pipeline * self.context):
            layout = f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} = {size}"
            hint = "the product must divide nodes * gpus_per_node"
            yield Problem(f"{counted(world, 'GPU')} cannot hold {layout}", "cluster.gpus_per_node", hint)
        if world % (size := self.pipeline * self.expert * self.expert_tensor):
            layout = f"pipeline {self.pipeline} x expert {self.expert} x expert tensor {self.expert_tensor} = {size}"
            hint = "the product must divide nodes * gpus_per_node"
            yield Problem(f"{counted(world, 'GPU')} cannot hold {layout}", "parallel.expert", hint)
        if self.sequence and self.tensor == 1:
            message = "Megatron would switch sequence parallelism off at tensor size 1"
            yield Problem(message, "parallel.sequence", "set `parallel.sequence=false`")
        if "moe" not in plan.kinds:
            for name in ("expert", "expert_tensor"):
                if (degree := getattr(self, name)) > 1:
                    message = f"{name} parallel {degree} in a model without experts"
                    yield Problem(message, f"parallel.{name}", "set it to 1")


class ProcessGroups(Config):
    """GiB of NCCL's buffers on a rank for each kind of process group that has more than one member."""

    executes: ClassVar[str | None] = "for the forecast"

    data: Annotated[NonNegativeFloat, Row("of data parallelism")]
    tensor: Annotated[NonNegativeFloat, Row("of tensor parallelism")]
    pipeline: Annotated[NonNegativeFloat, Row("of pipeline parallelism")]
    context: Annotated[NonNegativeFloat, Row("of context parallelism")]
    expert: Annotated[NonNegativeFloat, Row("of expert parallelism: all-to-all")]


class Device(Config):
    """The accelerator: what plans, forecasts and the checks before a run take it for."""

    executes: ClassVar[str | None] = "for the forecast and the checks before a run"

    name: Annotated[Name, Row("of the device")]
    capability: Annotated[tuple[NonNegativeInt, NonNegativeInt], Row("CUDA compute capability")]
    total_gib: Annotated[PositiveFloat, Row("torch's total_memory, GiB; measured")]
    runtime_gib: Annotated[
        NonNegativeFloat, Row("GiB in use beyond what torch reserves: CUDA context, loaded kernels; measured")
    ]
    groups_gib: ProcessGroups
    allocator_gib: Annotated[NonNegativeFloat, Row("GiB that torch reserves beyond what is allocated; measured")]
    headroom_gib: Annotated[NonNegativeFloat, Row("GiB below which the budget warns: the error it may have")]
    bf16_tflops: Annotated[PositiveFloat, Row("dense peak on paper, TFLOP/s; MFU is measured by it")]
    gemm_tflops: Annotated[PositiveFloat, Row("what large bf16 GEMMs reach, TFLOP/s; measured")]
    link: Annotated[Name, Row("between every two GPUs of a host, as `nvidia-smi topo -m` has it")]
    gemm_floor_tflops: Annotated[PositiveFloat, Row("bf16 8192 cubed, TFLOP/s; below it a GPU is sick")]
    allreduce_floor_gbs: Annotated[
        PositiveFloat, Row("bus bandwidth of 256 MiB over NVLink, GB/s; below it a link is sick")
    ]

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        why = "the local implementation has no kernels for this device"
        yield Setting("transformer_impl", "transformer_engine", why)
        why = "`flash` would switch cuDNN off and leave no backend without flash-attn"
        yield Setting("attention_backend", "auto", why)


class Storage(Config):
    """Folders by what becomes of their files: kept (data, checkpoints), thrown away (caches, logs, temp), the record of runs."""

    executes: ClassVar[str | None] = "where files lie"

    durable: Annotated[Name, Row("data and checkpoints")]
    scratch: Annotated[Name, Row("compile caches, logs, temporary files")]
    receipts: Annotated[Name, Row("the record of runs: one folder a run; a relative path starts at the checkout")]


class Cluster(Config):
    """Hosts of one kind. `waivers`: preflight findings that these hosts cannot satisfy, by name, and why."""

    executes: ClassVar[str | None] = "the hosts"

    name: Annotated[Name, Row("of the cluster: the host lineage of its receipts")]
    pool: Annotated[
        Name | None,
        Row("a name for hosts whose figures may be compared as if they were one; null: each for itself", was=None),
    ]
    nodes: Annotated[Degree, Row("hosts")]
    gpus_per_node: Annotated[Degree, Row("GPUs of each")]
    storage: Storage
    waivers: Annotated[dict[Name, Name], Row("finding of `python -m launch check`: why these hosts cannot satisfy it")]
