"""Low-rank adapters (arXiv 2106.09685) on a pretrained model whose own weights stay: Megatron-Bridge's LoRA.

Which modules of a kind may have one, its block says: `Block.adapted`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt

from nam_megatron.blocks import Block
from nam_megatron.features import Feature
from nam_megatron.words.setting import Name, Row
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import Param, Sizes, Stage


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

    def ours(self, site: Site) -> str | None:
        return "Megatron 0.19.2 has no adapters and would train every weight"

    def modules(self, site: Site) -> list[str]:
        """The names of the modules that get an adapter."""
        return list(offered(site) if self.targets is None else self.targets)

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        """Two matrices for each module; the experts of a grouped GEMM share one pair."""
        names = self.modules(z.site)
        for layer in stage.layers:
            for param in z.site.blocks.of(layer.kind).params(z, layer):
                module, _, weight = param.name.rpartition(".")
                if module.rpartition(".")[2] not in names or not weight.startswith("weight") or len(param.shape) != 2:
                    continue
                pairs = 1 if z.site.blocks.moe and z.site.blocks.moe.grouped_gemm else param.count
                out, into = param.shape
                yield Param(f"{module}.adapter.linear_in.weight", (self.rank, into), "replicated", "weight", pairs)
                yield Param(f"{module}.adapter.linear_out.weight", (out, self.rank), "replicated", "weight", pairs)


def offered(site: Site) -> list[str]:
    """Modules of the kinds that stand around which an adapter may stand."""
    latent = site.blocks.mla
    absent = ("linear_q_down_proj", "linear_q_up_proj") if latent and latent.q_lora_rank is None else ("linear_q_proj",)
    found = [name for block in standing(site) for name in block.adapted if name not in absent]
    return list(dict.fromkeys(found))


def standing(site: Site) -> Sequence[Block]:
    return [block for block in site.blocks.all() if block.kind in site.kinds]
