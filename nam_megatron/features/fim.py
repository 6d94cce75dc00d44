"""Fill-in-the-middle (arXiv 2207.14255) on the training data: Megatron's --fim-data."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.setting import Name, Setting

Rate = Annotated[float, Field(gt=0, le=1)]  # Megatron's own check refuses 0


class Fim(Switch):
    name: ClassVar[str] = "fim"

    rate: Rate
    spm_rate: Rate
    prefix_token: Name
    middle_token: Name
    suffix_token: Name
    pad_token: Name
    eod_token: Name

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("fim_data", self.enabled, "documents are split and permuted", "enabled")
        if self.on:
            yield Setting("fim_rate", self.rate, "share of documents", "rate")
            yield Setting("fim_spm_rate", self.spm_rate, "share of those in suffix-prefix-middle order", "spm_rate")
            for part in ("prefix", "middle", "suffix", "pad", "eod"):
                key = f"{part}_token"
                yield Setting(f"fim_{key}", getattr(self, key), "must be one token of the tokenizer", key)

    def check(self, plan) -> Iterator[Problem]:
        if plan.recipe.data.name == "mock":
            yield Problem(
                "fill-in-the-middle on mock data",
                "feature.fim.enabled",
                "set `data=built data.path=...`",
            )
