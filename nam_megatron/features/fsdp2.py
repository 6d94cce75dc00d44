"""PyTorch's fully_shard (FSDP2) through Megatron's --use-torch-fsdp2.

It can be read and priced, and nothing trains it: megatron-core 0.19.2 wraps whole layers in DTensors, and MambaMixer.sharded_state_dict
asserts that a rank holds its whole in_proj, so the first checkpoint ends the run (seen on two ranks over gloo).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.setting import Row, Setting
from nam_megatron.sizes import COMMUNICATION, GRADIENTS, OTHER, UNMEASURED, Group, Line, Sizes

if TYPE_CHECKING:
    from nam_megatron.plan import Plan


class Fsdp2(Switch):
    """PyTorch's FSDP2."""

    name = "fsdp2"
    missing = "Megatron 0.19.2 saves no checkpoint of a hybrid model under it; `feature.megatron_fsdp` trains"

    enabled: Annotated[bool, Row("shards over data parallel", "use_torch_fsdp2", ("args.use_torch_fsdp2",))]
    reshard_after_forward: Annotated[
        bool,
        Row("gathered weights are let go after the forward pass", "torch_fsdp2_reshard_after_forward",
            ("ddp.reshard_after_forward",), "when weights are let go"),
    ]  # fmt: skip

    @classmethod
    def off(cls, plan: "Plan") -> Iterator[Setting]:
        yield Setting("use_torch_fsdp2", False, "no FSDP2", fields=("args.use_torch_fsdp2",))

    def check(self, plan: "Plan") -> Iterator[Problem]:
        r, at = plan.recipe, "feature.fsdp2.enabled"
        if r.feature.distributed_optimizer.enabled:
            yield Problem(
                "torch FSDP2 excludes the distributed optimizer",
                at,
                "set `feature.distributed_optimizer.enabled=false`",
            )
        if r.parallel.expert > 1 or r.parallel.pipeline > 1:
            yield Problem("torch FSDP2 runs without expert and pipeline parallelism", at, "use `feature.megatron_fsdp`")
        if r.precision.grad_reduce != "bf16":
            yield Problem(
                "torch FSDP2 reduces gradients in the weights' dtype, whatever Megatron is told",
                "precision.grad_reduce",
                "set `precision.grad_reduce=bf16`",
            )
        if r.model.tied_embeddings:
            yield Problem("torch FSDP2 needs untied embeddings", at, "set `model.tied_embeddings=false`")
        if r.feature.fp8 and r.feature.fp8.param_gather:
            yield Problem("torch FSDP2 gathers weights in bf16", "feature.fp8.param_gather", "set it to false")

    def state(self, z: Sizes, group: Group) -> Iterator[Line]:
        share = f" / {group.shares}"
        yield from group.weights(z, "2" + share, "bf16, sharded", mark=UNMEASURED)
        yield from group.line(z, GRADIENTS, "gradients", "2" + share, "bf16, sharded", mark=UNMEASURED)
        yield from group.line(z, OTHER, "master weights", "4" + share, "fp32, sharded", since="init", mark=UNMEASURED)
        yield from group.line(z, OTHER, "moments", "8" + share, "two, fp32, sharded", since="step", mark=UNMEASURED)
        why = "copy of the bf16 gradients for the step"
        yield from group.line(z, OTHER, "fp32 gradients", "4" + share, why, since="stepping", mark=UNMEASURED)

    def buffers(self, z: Sizes, groups: Sequence[Group]) -> Iterator[Line]:
        """Megatron wraps TransformerLayer and embeddings, not MambaLayer: Mamba's parameters fall to the root unit."""
        held = [x for group in groups for x in group.held]
        unwrapped = {"mtp", *(block.kind for block in z.plan.blocks if not block.fsdp_unit)}
        root = sum(x.elements * x.count for x in held if x.owner in unwrapped)
        units: Counter[int | str] = Counter()
        for x in held:
            if x.owner not in unwrapped:
                units[x.layer or x.param.name] += x.elements * x.count
        z = z.own(root=root, unit=max(units.values(), default=0))
        more = {"bucket": COMMUNICATION, "mark": UNMEASURED}
        if root:
            why = "weights and gradients of the M slot, whole from the first forward to the end of the backward pass"
            yield z.line("root unit", "4 root", why, **more)
        kept = 2 if self.reshard_after_forward else len(units)
        yield z.line(
            "gathered units", f"{2 * kept} unit + 2 unit", "weights of this and the next, gradients of this", **more
        )
