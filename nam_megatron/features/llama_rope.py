"""Llama-3.1's RoPE: angles of columns that turn slowly are divided. Ours in a hybrid; Megatron 0.19.2 has it in its GPT.

megatron-core 0.19.2, core/models/common/embeddings/rotary_pos_embedding.py, `_apply_scaling`: over 8192 tokens, columns that turn less than
once are divided by `factor`, those that turn more than four times are left, between them is a ramp. Only the factor can be said.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nam_megatron.errors import Problem
from nam_megatron.features import Feature
from nam_megatron.setting import Row, Setting

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from nam_megatron.plan import Plan


class LlamaRope(Feature):
    """Llama-3.1's scaling of RoPE's angles."""

    name = "llama_rope"
    switch = "factor"

    factor: Annotated[
        float, Field(ge=1), Row("times 8192 tokens that sequences may be; 1: off, plain RoPE", "rope_scaling_factor")
    ]

    @property
    def on(self) -> bool:
        return self.factor > 1

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        yield Setting("use_rope_scaling", True, "by our trainer; Megatron hands it to its GPT alone", "factor")

    def ours(self, plan: "Plan") -> str | None:
        return "Megatron 0.19.2 scales angles in its GPT and would leave a hybrid's as they are"

    def build(self, stack: "ModuleSpec", layers: "Mapping[str, ModuleSpec]") -> "ModuleSpec":
        from nam_megatron.runtime import llama_rope

        stack.metainfo.setdefault("hooks", []).append(llama_rope.provider(self.factor))
        return stack

    def check(self, plan: "Plan") -> Iterator[Problem]:
        at, off = "feature.llama_rope.factor", "set `feature.llama_rope.factor=1.0`"
        block = plan.recipe.model.blocks.attention
        if plan.kinds & {"mla", "dsa"}:
            yield Problem("MLA's RoPE is scaled by YaRN or not at all", at, f"{off}, or `feature.yarn.factor`")
        elif not block or not block.turned:
            yield Problem("no layer has RoPE, whose angles this would scale", at, off)
        if plan.recipe.feature.yarn:
            yield Problem("YaRN scales these angles already", at, f"{off}, or `feature.yarn.factor=1.0`")
