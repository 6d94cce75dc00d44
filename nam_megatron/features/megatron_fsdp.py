"""Megatron-FSDP: weights, gradients and optimizer state sharded over data parallel."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.setting import Setting


class MegatronFsdp(Switch):
    name: ClassVar[str] = "megatron_fsdp"

    strategy: Literal["optim", "optim_grads", "optim_grads_params"]

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("use_megatron_fsdp", self.enabled, "shards over data parallel", "enabled")
        if self.on:
            yield Setting("data_parallel_sharding_strategy", self.strategy, "what is sharded", "strategy")
            yield Setting("ckpt_format", "fsdp_dtensor", "the only checkpoint format it writes", "enabled")

    def check(self, plan) -> Iterator[Problem]:
        r, at = plan.recipe, "feature.megatron_fsdp.enabled"
        if not r.feature.distributed_optimizer.enabled:
            yield Problem(
                "Megatron-FSDP stands on the distributed optimizer",
                at,
                "set `feature.distributed_optimizer.enabled=true`",
            )
        if r.feature.fsdp2.on:
            yield Problem("two FSDPs at once", at, "switch one of `feature.megatron_fsdp` and `feature.fsdp2` off")
        if r.parallel.tensor > 1 or r.parallel.context > 1:
            yield Problem(
                "tensor or context parallelism wants CUDA_DEVICE_MAX_CONNECTIONS=1 on this device and FSDP forbids it",
                at,
                "set `parallel.tensor=1 parallel.sequence=false parallel.context=1`",
            )
