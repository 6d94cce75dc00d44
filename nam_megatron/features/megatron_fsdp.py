"""Megatron-FSDP: weights, gradients and optimizer state sharded over data parallel."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from nam_megatron.features import Switch
from nam_megatron.words.setting import Row, Setting
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import COMMUNICATION, GRADIENTS, OTHER, UNMEASURED, Group, Line, Sizes

# Seen on two ranks over gloo: it wraps whole layers in DTensors, and MambaMixer.sharded_state_dict wants a rank's whole in_proj.
WHY = "Megatron 0.19.2 cannot save a Mamba layer under torch's FSDP2"
# torch gives all tensors that it reduces at once the operation of the first: `_coalescing_manager` of 2.11.
NO_FUSED_SCALE = Setting(
    "gradient_reduce_div_fusion",
    False,
    "a layer's fp32 weights and its bf16 ones are reduced at once, and a scale fused into the sum would be that of the first for all",
    fields=("ddp.gradient_reduce_div_fusion",),
)
# Strategy -> what Megatron-FSDP overlaps, whatever it is told.
OVERLAPS: dict[str, tuple[str, ...]] = {
    "optim": (), "optim_grads": ("overlap_grad_reduce",), "optim_grads_params": ("overlap_grad_reduce", "overlap_param_gather"),
}  # fmt: skip
NO_FSDP2 = Setting("use_torch_fsdp2", False, WHY, fields=("args.use_torch_fsdp2",))


class MegatronFsdp(Switch):
    """Megatron-FSDP."""

    name = "megatron_fsdp"
    bound = True

    enabled: Annotated[
        bool, Row("shards over data parallel", "use_megatron_fsdp", ("args.use_megatron_fsdp", "ddp.use_megatron_fsdp"))
    ]
    strategy: Annotated[
        Literal["optim", "optim_grads", "optim_grads_params"],
        Row(
            "what is sharded",
            "data_parallel_sharding_strategy",
            ("ddp.data_parallel_sharding_strategy",),
            "what is sharded",
        ),
    ]

    def settings(self, site: Site) -> Iterator[Setting]:
        fields = ("checkpoint.ckpt_format",)
        yield Setting(
            "ckpt_format", "fsdp_dtensor", "the only checkpoint format it writes", "enabled", beside="", fields=fields
        )
        yield NO_FUSED_SCALE
        yield NO_FSDP2

    @classmethod
    def off(cls) -> Iterator[Setting]:
        fields = ("args.use_megatron_fsdp", "ddp.use_megatron_fsdp")
        yield Setting("use_megatron_fsdp", False, "no FSDP", fields=fields)
        yield NO_FSDP2

    def alone(self, site: Site) -> Iterator[str]:
        several = site.global_batch_size > site.micro_batch_size * site.data_parallel
        alone = site.expert_data_parallel == 1 < site.data_parallel
        if "moe" in site.kinds and self.strategy != "optim" and several and alone:
            yield "Megatron 0.19.2 scales the sum of the experts' gradients again with each microbatch"
        if site.blocks.dsa and site.tensor > 1:
            yield "Megatron 0.19.2 sums the gradients of DSA's indexer over tensor ranks, which are to be averaged"

    def _mark(self) -> dict[str, Any]:
        """Of the strategies only full sharding has been measured."""
        return {} if self.strategy == "optim_grads_params" else {"mark": UNMEASURED}

    def _gradients(self, z: Sizes) -> tuple[int, dict[str, Any]]:
        """Bytes of an element, and its mark: only bf16 has been measured."""
        return (4, {"mark": UNMEASURED}) if z.site.grad_reduce == "fp32" else (2, self._mark())

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        share = f" / {group.shares}"
        more, (size, mark) = self._mark(), self._gradients(z)
        weights = "2" + share * (self.strategy == "optim_grads_params")
        gradients, why = f"{size}" + share * (self.strategy != "optim"), f"{z.site.grad_reduce} accumulation"
        yield from group.weights(z, weights, f"bf16, strategy {self.strategy}", **more)
        yield from group.line(z, GRADIENTS, "gradients", gradients, why, since="init", **mark)
        yield from group.line(z, OTHER, "master weights", "4" + share, "fp32, sharded", since="init", **more)
        yield from group.line(z, OTHER, "moments", "8" + share, "two, fp32, sharded", since="step", **more)
        if size == 2:
            why = "copy of the bf16 gradients for the step"
            yield from group.line(z, OTHER, "fp32 gradients", "4" + share, why, since="stepping", **more)

    def buffers(self, z: Sizes, groups: Sequence[Group]) -> Iterator[Line]:
        """Whole units in flight: gathered weights ahead of use, gradients on their way out."""
        elements = sum(group.elements() for group in groups)
        units: Counter[int | None] = Counter()
        for held in (x for group in groups for x in group.held):
            units[held.layer] += held.elements * held.count
        z = z.own(W=elements, unit=max((size for layer, size in units.items() if layer is not None)))
        more, (size, mark) = {"bucket": COMMUNICATION}, self._gradients(z)
        if self.strategy == "optim_grads_params":
            yield z.line(
                "gathered weights", "2 min(W, unit + 5e8)", "the largest unit and 5e8 elements of prefetch", **more
            )
        if self.strategy != "optim":
            why = "1e9 elements, or two units: more are not queued"
            yield z.line("gradients in flight", f"{size} min(W, max(1e9, 2 unit))", why, **more, **mark)
