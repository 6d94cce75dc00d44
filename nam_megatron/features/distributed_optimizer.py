"""Optimizer state sharded over the data-parallel ranks (ZeRO-1): Megatron's --use-distributed-optimizer."""

from collections.abc import Iterator
from typing import ClassVar

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Setting


class DistributedOptimizer(Feature):
    name: ClassVar[str] = "distributed_optimizer"

    enabled: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool

    @property
    def on(self) -> bool:
        return self.enabled or self.overlap_grad_reduce or self.overlap_param_gather

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

    def check(self, plan) -> Iterator[Problem]:
        at = "feature.distributed_optimizer."
        if self.overlap_param_gather and not self.enabled:
            yield Problem(
                "there are no sharded weights to gather", at + "overlap_param_gather", f"set `{at}enabled=true`"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield Problem(
                "`overlap_param_gather` needs `overlap_grad_reduce`",
                at + "overlap_grad_reduce",
                "switch both on or both off",
            )
