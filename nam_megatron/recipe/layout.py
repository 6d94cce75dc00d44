"""`lane`, `parallel`, `device`, `cluster`: who computes what, on which machines."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from nam_megatron.recipe.model import Kind
from nam_megatron.words.setting import Config, Name, Row, Setting
from nam_megatron.words.site import Site

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

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        for letter in type(self.blocks).model_fields:
            if letter not in site.letters:
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

    def settings(self, site: Site) -> Iterator[Setting]:
        if self.context == 1:
            return
        how, why = "p2p", "keys and values go round the ranks of a sequence while others are attended to"
        if site.gathers_keys:
            how, why = "all_gather", "each rank gets all keys: a model with sparse attention takes no other"
        yield Setting("cp_comm_type", (how,), why, "context", fields={"transformer.cp_comm_type": how})

    def alone(self, site: Site) -> Iterator[str]:
        dsa, moe = site.blocks.dsa, site.blocks.moe
        indexed = dsa is not None and dsa.indexer_loss_coeff > 0
        routed = moe is not None and "moe" in site.kinds and moe.has_losses
        if self.context > 1 and site.mtp:
            yield "Megatron 0.19.2 averages the means of context ranks, and in MTP's loss the last tokens of each count for nothing"
        if self.context > 1 and indexed:
            yield "Megatron 0.19.2 multiplies the loss of DSA's indexer by the context ranks"
        if routed and self._lacks([layer.kind == "moe" for layer in site.layers], site):
            yield "a pipeline stage without experts would wait for ever at Megatron 0.19.2's first log line"
        computing = [indexed and layer.kind == dsa.kind and layer.source is None for layer in site.layers]
        if indexed and self._lacks(computing, site):
            yield "a pipeline stage without an indexer would wait for ever at Megatron 0.19.2's first log line"

    def _lacks(self, has: list[bool], site: Site) -> bool:
        """Whether a pipeline rank has no layer of those."""
        ranks = {layer.segment % self.pipeline for layer, it in zip(site.layers, has, strict=True) if it}
        return len(ranks) < self.pipeline

    @staticmethod
    def over_hosts(ranks: int, cluster: "Cluster") -> bool:
        """Whether some group of `ranks` ranks that follow one another lies on two hosts."""
        return cluster.nodes > 1 and cluster.gpus_per_node % ranks != 0


class ProcessGroups(Config):
    """GiB of NCCL's buffers on a rank for each kind of process group that has more than one member."""

    executes: ClassVar[str | None] = "for the forecast"

    data: Annotated[NonNegativeFloat, Row("of data parallelism")]
    tensor: Annotated[NonNegativeFloat, Row("of tensor parallelism")]
    pipeline: Annotated[NonNegativeFloat, Row("of pipeline parallelism")]
    context: Annotated[NonNegativeFloat, Row("of context parallelism")]
    expert: Annotated[NonNegativeFloat, Row("of expert parallelism: all-to-all")]
    gathered: Annotated[NonNegativeFloat, Row("of expert parallelism whose tokens are gathered", was=1.3)]


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
    copy_gbs: Annotated[
        PositiveFloat, Row("what large copies on the device read and write, GB/s; measured", was=4300.0)
    ]
    link: Annotated[Name, Row("between every two GPUs of a host, as `nvidia-smi topo -m` has it")]
    gemm_floor_tflops: Annotated[PositiveFloat, Row("bf16 8192 cubed, TFLOP/s; below it a GPU is sick")]
    allreduce_floor_gbs: Annotated[
        PositiveFloat, Row("bus bandwidth of 256 MiB over NVLink, GB/s; below it a link is sick")
    ]

    def sized(self, gib: float) -> bool:
        """Whether a GPU of that memory may be one; nvidia-smi counts a little more than torch does."""
        return abs(gib - self.total_gib) <= 0.03 * self.total_gib

    def settings(self, site: Site) -> Iterator[Setting]:
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
    processor: Annotated[
        Literal["gpu", "cpu"],
        Row(
            "what trains. cpu: a rehearsal, the same program with plain torch for kernels, a process for each GPU",
            was="gpu",
        ),
    ]
    storage: Storage
    waivers: Annotated[dict[Name, Name], Row("finding of `python -m launch check`: why these hosts cannot satisfy it")]

    @property
    def unit(self) -> str:
        """What a rank runs on, for people."""
        return "GPU" if self.processor == "gpu" else "CPU rank"
