"""Llama-3.1's RoPE: angles of columns that turn slowly are divided. Ours in a hybrid; Megatron 0.19.2 has it in its GPT.

megatron-core 0.19.2, core/models/common/embeddings/rotary_pos_embedding.py, `_apply_scaling`: over 8192 tokens, columns that turn less than
once are divided by `factor`, those that turn more than four times are left, between them is a ramp. Only the factor can be said.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from nam_megatron.features import Feature
from nam_megatron.words.setting import Row, Setting
from nam_megatron.words.site import Site


class LlamaRope(Feature):
    """Llama-3.1's scaling of RoPE's angles."""

    name = "llama_rope"
    switch = "factor"
    shapes = True

    factor: Annotated[
        float, Field(ge=1), Row("times 8192 tokens that sequences may be; 1: off, plain RoPE", "rope_scaling_factor")
    ]

    def exported(self, kinds: Collection[str]) -> tuple[str, Mapping[str, Any]]:
        return "llama_rope", self.model_dump(include={"factor"})

    @property
    def on(self) -> bool:
        return self.factor > 1

    def settings(self, site: Site) -> Iterator[Setting]:
        yield Setting("use_rope_scaling", True, "by our trainer; Megatron hands it to its GPT alone", "factor")

    def ours(self, site: Site) -> str | None:
        return "Megatron 0.19.2 scales angles in its GPT and would leave a hybrid's as they are"
