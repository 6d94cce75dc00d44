"""Optimizer state sharded over the data-parallel ranks (ZeRO-1): Megatron's --use-distributed-optimizer."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Annotated

from nam_megatron.features import Feature
from nam_megatron.words.setting import Row, Setting
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import COMMUNICATION, GRADIENTS, OTHER, UNMEASURED, Group, Line, Sizes


class DistributedOptimizer(Feature):
    """Optimizer state shared by the data-parallel ranks (ZeRO-1). Always there: off, it says so."""

    name = "distributed_optimizer"
    plain = MappingProxyType({"overlap_grad_reduce": False, "overlap_param_gather": False})

    enabled: Annotated[bool, Row("master weights and moments are sharded")]
    overlap_grad_reduce: Annotated[
        bool,
        Row(
            "gradients are reduced during backward",
            "overlap_grad_reduce",
            ("ddp.overlap_grad_reduce",),
            "when gradients travel",
        ),
    ]
    overlap_param_gather: Annotated[
        bool,
        Row("weights are gathered during forward", "overlap_param_gather",
            ("optimizer.overlap_param_gather", "ddp.overlap_param_gather"), "when weights travel"),
    ]  # fmt: skip
    reshardable: Annotated[
        bool,
        Row("checkpoints that any parallel layout can read; gathered on one rank to be written, so slower",
            "dist_ckpt_optim_fully_reshardable", ("checkpoint.dist_ckpt_optim_fully_reshardable",), "what a checkpoint looks like"),
    ]  # fmt: skip

    def settings(self, site: Site) -> Iterator[Setting]:
        # Muon's state is sharded layer by layer, by another switch that Megatron throws itself.
        fields = dict.fromkeys(
            ("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer"), self.enabled and not site.muon
        )
        fields["args.use_layer_wise_distributed_optimizer"] = self.enabled and site.muon
        why = "master weights and moments are sharded"
        yield Setting("use_distributed_optimizer", self.enabled, why, "enabled", fields=fields)

    def alone(self, site: Site) -> Iterator[str]:
        if self.reshardable and self.overlap_grad_reduce and site.save:
            yield "Megatron 0.19.2 saves master weights and moments shifted by padding, and a run that goes on trains with others"

    @property
    def on(self) -> bool:
        return True

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        """Of plain data parallelism, with Adam's state whole or shared; Muon's matrices are not among it."""
        share = f" / {group.shares}" if self.enabled else ""
        adam = group.split("other") if z.site.muon else group.held
        wide = z.site.grad_reduce == "fp32"
        yield from group.weights(z, "2", "bf16, in the DDP buffer" if self.enabled else "bf16")
        why = "the DDP buffer; fp32 accumulation" if wide else "the DDP buffer; bf16 accumulation"
        yield from group.line(z, GRADIENTS, "gradients", "4" if wide else "2", why, since="init")
        over = f", shared by {group.ranks} data-parallel ranks" if self.enabled else ", whole on each rank"
        yield from group.line(z, OTHER, "master weights", "4" + share, "fp32" + over, adam, since="init")
        why = f"two, fp32{over}; made by the first step"
        yield from group.line(z, OTHER, "moments", "8" + share, why, adam, since="step")
        if not wide:
            why = "copy for the step: the buffer is bf16"
            yield from group.line(z, OTHER, "fp32 gradients", "4" + share, why, adam, since="stepping", mark=UNMEASURED)
        if self.enabled:
            why = "as the modules made them, until DDP has copied them into its buffer"
            yield from group.weights(z, "2", why, since="build")
            size = 2 + (4 if wide else 2)
            padded = z.own(pad=group.padding)
            why = "each parameter starts at a multiple of 64 elements"
            bucket = {"bucket": COMMUNICATION, "since": "init"}
            yield padded.line(f"buffer padding, {group.name}", f"({size} + 12{share}) pad", why, **bucket)
