"""YaRN (arXiv 2309.00071): RoPE for sequences longer than those before, as Megatron has it.

megatron-core 0.19.2, core/models/common/embeddings/yarn_rotary_pos_embedding.py. A column that turns more than `beta_fast` times over
`original_length` keeps its angles, one that turns less than `beta_slow` times has them divided by `factor`, between them is a ramp.
What is turned is weighed by m(mscale) / m(mscale_all_dim), m(x) = 0.1 x ln(factor) + 1, MLA's softmax by the square of the latter.
The attention kind says that it is yarn, where it says that it is RoPE.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Row

if TYPE_CHECKING:
    from nam_megatron.plan import Plan
    from nam_megatron.recipe import Recipe

# What MLA takes in Megatron 0.19.2, whose parser hands --yarn-* to GQA alone: defaults of MLATransformerConfig.
FIXED = {"original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


class Yarn(Feature):
    """YaRN: RoPE for sequences longer than those before."""

    name = "yarn"
    switch = "factor"
    named = True

    factor: Annotated[
        float,
        Field(ge=1),
        Row("times `original_length` that sequences may be; 1: off, plain RoPE", "rotary_scaling_factor"),
    ]
    original_length: Annotated[
        PositiveInt, Row("tokens of the sequences before", "yarn_original_max_position_embeddings")
    ]
    beta_fast: Annotated[
        PositiveFloat, Row("turns over `original_length` from which on a column keeps its angles", "yarn_beta_fast")
    ]
    beta_slow: Annotated[
        PositiveFloat, Row("turns over it up to which a column has its angles divided by `factor`", "yarn_beta_slow")
    ]
    mscale: Annotated[NonNegativeFloat, Row("weighs the turned columns: 0.1 mscale ln(factor) + 1", "mscale")]
    mscale_all_dim: Annotated[
        NonNegativeFloat, Row("the same, by which that is divided; its square scales MLA's softmax", "mscale_all_dim")
    ]
    rounded: Annotated[
        bool | None,
        Row(
            "whether the ramp begins and ends at whole columns; MLA's always does", "yarn_correction_range_round_to_int"
        ),
    ] = None

    @property
    def on(self) -> bool:
        return self.factor > 1

    def idle(self, recipe: "Recipe", kinds: frozenset[str]) -> Iterator[tuple[str, str]]:
        if "attention" not in kinds:
            yield "rounded", "MLA's ramp always begins and ends at whole columns"

    def ours(self, plan: "Plan") -> str | None:
        if plan.kinds & {"mla", "dsa"} and {name: getattr(self, name) for name in FIXED} != FIXED:
            return "Megatron 0.19.2 has no flag of MLA's for `original_length` and the betas, and would take 4096, 32 and 1"
        return None

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at, block, off = "feature.yarn.factor", plan.recipe.model.blocks.attention, "set `feature.yarn.factor=1.0`"
        if not plan.kinds & {"attention", "mla", "dsa"} or (block and block.position_embedding == "none"):
            yield Problem("no layer has RoPE, which YaRN would change", at, off)
        elif block and block.rotary_percent != 1:
            message = "Megatron's YaRN turns whole heads, whatever the share"
            yield Problem(message, "model.blocks.attention.rotary_percent", f"set it to 1.0, or {off}")
        if block and plan.recipe.feature.mtp:
            yield Problem(
                "Megatron has MTP beside plain RoPE or none, not beside YaRN", at, f"{off}, or MTP's depths to 0"
            )
        if self.beta_fast < self.beta_slow:
            message = (
                f"`beta_fast` {self.beta_fast:g} is below `beta_slow` {self.beta_slow:g}: the ramp would run backwards"
            )
            yield Problem(message, "feature.yarn.beta_fast", "it is the larger of the two, or the same")
