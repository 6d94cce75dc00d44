"""PyTorch's fully_shard (FSDP2) through Megatron's --use-torch-fsdp2."""

from collections.abc import Iterator
from typing import ClassVar

from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.setting import Setting


class Fsdp2(Switch):
    name: ClassVar[str] = "fsdp2"

    reshard_after_forward: bool

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("use_torch_fsdp2", self.enabled, "shards over data parallel", "enabled")
        if self.on:
            yield Setting(
                "torch_fsdp2_reshard_after_forward",
                self.reshard_after_forward,
                "frees weights early",
                "reshard_after_forward",
            )

    def check(self, plan) -> Iterator[Problem]:
        r, at = plan.recipe, "feature.fsdp2.enabled"
        if r.feature.distributed_optimizer.enabled:
            yield Problem(
                "torch FSDP2 excludes the distributed optimizer",
                at,
                "set `feature.distributed_optimizer.enabled=false`",
            )
        if r.parallel.expert > 1 or r.parallel.pipeline > 1:
            yield Problem("torch FSDP2 runs without expert and pipeline parallelism", at, "use `feature.megatron_fsdp`")
        if r.parallel.tensor > 1 or r.parallel.context > 1:
            yield Problem(
                "tensor or context parallelism wants CUDA_DEVICE_MAX_CONNECTIONS=1 on this device and FSDP forbids it",
                at,
                "set `parallel.tensor=1 parallel.sequence=false parallel.context=1`",
            )
        if r.precision.grad_reduce != "bf16":
            yield Problem(
                "torch FSDP2 reduces gradients in the weights' dtype, whatever Megatron is told",
                "precision.grad_reduce",
                "set `precision.grad_reduce=bf16`",
            )
        if r.model.tied_embeddings:
            yield Problem("torch FSDP2 needs untied embeddings", at, "set `model.tied_embeddings=false`")
        if r.feature.fp8.param_gather:
            yield Problem("torch FSDP2 gathers weights in bf16", "feature.fp8.param_gather", "set it to false")
