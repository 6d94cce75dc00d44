"""Optimizer state sharded over the data-parallel ranks (ZeRO-1): Megatron's --use-distributed-optimizer."""

from collections.abc import Iterator
from typing import ClassVar

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Setting
from nam_megatron.sizes import COMMUNICATION, GRADIENTS, OTHER, UNMEASURED, Line


class DistributedOptimizer(Feature):
    name: ClassVar[str] = "distributed_optimizer"

    enabled: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    reshardable: bool

    @property
    def on(self) -> bool:
        return self.enabled or self.overlap_grad_reduce or self.overlap_param_gather or self.reshardable

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("use_distributed_optimizer", self.enabled, "master weights and moments are sharded", "enabled")
        yield Setting(
            "overlap_grad_reduce",
            self.overlap_grad_reduce,
            "gradients are reduced during backward",
            "overlap_grad_reduce",
        )
        yield Setting(
            "overlap_param_gather",
            self.overlap_param_gather,
            "weights are gathered during forward",
            "overlap_param_gather",
        )
        yield Setting(
            "dist_ckpt_optim_fully_reshardable",
            self.reshardable,
            "else its state fits the layout that wrote it, but for the data-parallel size",
            "reshardable",
        )

    def check(self, plan) -> Iterator[Problem]:
        at = "feature.distributed_optimizer."
        if self.overlap_param_gather and not self.enabled:
            yield Problem(
                "there are no sharded weights to gather", at + "overlap_param_gather", f"set `{at}enabled=true`"
            )
        if self.reshardable and not self.enabled:
            yield Problem("unsharded state is always reshardable", at + "reshardable", "set it to false")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield Problem(
                "`overlap_param_gather` needs `overlap_grad_reduce`",
                at + "overlap_grad_reduce",
                "switch both on or both off",
            )

    def state(self, z, group) -> Iterator[Line]:
        """Of plain data parallelism, with Adam's state whole or shared; Muon's matrices are not among it."""
        r, share = z.plan.recipe, f" / {group.shares}" if self.enabled else ""
        adam = group.split("other") if r.feature.muon.on else group.held
        wide = r.precision.grad_reduce == "fp32"
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
