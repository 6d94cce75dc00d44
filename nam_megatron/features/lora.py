"""Low-rank adapters (arXiv 2106.09685) on a pretrained model whose own weights stay: Megatron-Bridge's LoRA.

Which modules of a kind may have one, its block says: `Block.adapted`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import NonNegativeInt, PositiveInt

from nam_megatron.errors import Problem, quoted
from nam_megatron.features import Feature
from nam_megatron.setting import Name, Row
from nam_megatron.sizes import Param, Sizes, Stage

if TYPE_CHECKING:
    from nam_megatron.blocks import Block
    from nam_megatron.plan import Plan


class Lora(Feature):
    """Low-rank adapters on a pretrained model whose own weights stay."""

    name = "lora"
    switch = "rank"
    named = True

    rank: Annotated[NonNegativeInt, Row("of an adapter; 0: off, all weights are trained")]
    alpha: Annotated[PositiveInt, Row("an adapter adds alpha / rank of its output")]
    targets: Annotated[
        tuple[Name, ...] | None, Row("modules that get one; null: all that may, of every kind that stands")
    ]

    def ours(self, plan: "Plan") -> str | None:
        return "Megatron 0.19.2 has no adapters and would train every weight"

    def modules(self, plan: "Plan") -> list[str]:
        """The names of the modules that get an adapter."""
        return list(offered(plan) if self.targets is None else self.targets)

    def check(self, plan: "Plan") -> Iterator[Problem]:
        r, f = plan.recipe, plan.recipe.feature
        if r.schedule.pretrained is None:
            message = "adapters stand on a pretrained model, and none is named"
            yield Problem(message, "schedule.pretrained", "give the folder of its checkpoints")
        for block in standing(plan):
            if not block.adapted:
                message = f"adapters have not been shown on {block.title}"
                yield Problem(message, "feature.lora.rank", "set it to 0, or another kind in its place")
        yield from self._targets(plan)
        p = r.parallel
        sizes = {"tensor": p.tensor, "pipeline": p.pipeline, "context": p.context, "expert": p.expert}
        for name, ranks in sizes.items():
            if ranks > 1:
                message = "adapters have been shown under data parallelism alone"
                yield Problem(message, f"parallel.{name}", "set it to 1")
        for feature in (f.fp8, f.muon, f.megatron_fsdp, f.cuda_graphs, f.mhc, f.mtp):
            if feature is not None:
                message = f"adapters have not been shown beside `{feature.name}`"
                off = "set `optim=adamw`" if feature is f.muon else f"`~feature.{feature.name}` turns it off"
                yield Problem(message, f"feature.{feature.name}.{feature.switch}", off)
        if r.precision.fused_grad_accumulation:
            message = "weights that stay have no buffer that a gradient would be added to"
            yield Problem(message, "precision.fused_grad_accumulation", "set it to false")
        moe, dsa = r.model.blocks.moe, r.model.blocks.dsa
        if moe and "moe" in plan.kinds and moe.expert_bias_update_rate:
            message = "the experts' bias would move while all weights stay, and checkpoints of adapters do not hold it"
            yield Problem(message, "model.blocks.moe.expert_bias_update_rate", "set it to 0")
        if dsa and "dsa" in plan.kinds and dsa.indexer_loss_coeff:
            message = "the indexer stays as it is, and its loss would teach nothing"
            yield Problem(message, "model.blocks.dsa.indexer_loss_coeff", "set it to 0")

    def _targets(self, plan: "Plan") -> Iterator[Problem]:
        good, bad = offered(plan), {name: why for block in standing(plan) for name, why in block.unadapted.items()}
        if self.targets is not None and not self.targets:
            yield Problem("adapters on nothing", "feature.lora.targets", f"null, or of {quoted(good)}")
        for name in self.targets or ():
            if name not in good and name not in bad:
                message = f"no kind of this model has a module `{name}` that could have an adapter"
                yield Problem(message, "feature.lora.targets", f"of {quoted(good)}")
            elif why := bad.get(name):
                yield Problem(f"`{name}` gets no adapter: {why}", "feature.lora.targets", f"of {quoted(good)}")

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        """Two matrices for each module; the experts of a grouped GEMM share one pair."""
        names = self.modules(z.plan)
        for layer in stage.layers:
            for param in z.block(layer.kind).params(z, layer):
                module, _, weight = param.name.rpartition(".")
                if module.rpartition(".")[2] not in names or not weight.startswith("weight") or len(param.shape) != 2:
                    continue
                pairs = 1 if z.model.blocks.moe and z.model.blocks.moe.grouped_gemm else param.count
                out, into = param.shape
                yield Param(f"{module}.adapter.linear_in.weight", (self.rank, into), "replicated", "weight", pairs)
                yield Param(f"{module}.adapter.linear_out.weight", (out, self.rank), "replicated", "weight", pairs)


def offered(plan: "Plan") -> list[str]:
    """Modules of the kinds that stand around which an adapter may stand."""
    latent = plan.recipe.model.blocks.mla
    absent = ("linear_q_down_proj", "linear_q_up_proj") if latent and latent.q_lora_rank is None else ("linear_q_proj",)
    found = [name for block in standing(plan) for name in block.adapted if name not in absent]
    return list(dict.fromkeys(found))


def standing(plan: "Plan") -> "Sequence[Block]":
    return [block for block in plan.blocks if block.kind in plan.kinds]
