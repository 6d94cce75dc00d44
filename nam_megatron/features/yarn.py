"""YaRN (arXiv 2309.00071): RoPE for sequences longer than those before, as Megatron has it.

megatron-core 0.19.2, core/models/common/embeddings/yarn_rotary_pos_embedding.py. A column that turns more than `beta_fast` times over
`original_length` keeps its angles, one that turns less than `beta_slow` times has them divided by `factor`, between them is a ramp.
What is turned is weighed by m(mscale) / m(mscale_all_dim), m(x) = 0.1 x ln(factor) + 1, MLA's softmax by the square of the latter.
The attention kind says that it is yarn, where it says that it is RoPE.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from nam_megatron.features import Feature
from nam_megatron.words.setting import Row
from nam_megatron.words.site import Site

# What MLA takes in Megatron 0.19.2, whose parser hands --yarn-* to GQA alone: defaults of MLATransformerConfig.
FIXED = {"original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


class Yarn(Feature):
    """YaRN: RoPE for sequences longer than those before."""

    name = "yarn"
    switch = "factor"
    shapes = True
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

    def exported(self, kinds: Collection[str]) -> tuple[str, Mapping[str, Any]]:
        keys = self.model_dump(include={*FIXED, "factor", "mscale", "mscale_all_dim"})
        return "yarn", keys | {"rounded": "attention" not in kinds or self.rounded}

    @property
    def on(self) -> bool:
        return self.factor > 1

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        if "attention" not in site.kinds:
            yield "rounded", "MLA's ramp always begins and ends at whole columns"

    def ours(self, site: Site) -> str | None:
        if site.blocks.mla and {name: getattr(self, name) for name in FIXED} != FIXED:
            return "Megatron 0.19.2 has no flag of MLA's for `original_length` and the betas, and would take 4096, 32 and 1"
        return None
