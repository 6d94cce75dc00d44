"""Fill-in-the-middle (arXiv 2207.14255) on the training data: Megatron's --fim-data."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from nam_megatron.features import Switch
from nam_megatron.words.setting import Name, Row, Setting
from nam_megatron.words.site import Site

Rate = Annotated[float, Field(gt=0, le=1)]  # Megatron's own check refuses 0


class Fim(Switch):
    """Fill-in-the-middle on the training data."""

    name = "fim"

    enabled: Annotated[bool, Row("documents are split and permuted", "fim_data", ("args.fim_data",))]
    rate: Annotated[Rate, Row("share of documents", "fim_rate")]
    spm_rate: Annotated[Rate, Row("share of those in suffix-prefix-middle order", "fim_spm_rate")]
    prefix_token: Annotated[Name, Row("one token of the tokenizer: the prefix follows", "fim_prefix_token")]
    middle_token: Annotated[Name, Row("one token of the tokenizer: the middle follows", "fim_middle_token")]
    suffix_token: Annotated[Name, Row("one token of the tokenizer: the suffix follows", "fim_suffix_token")]
    pad_token: Annotated[Name, Row("one token of the tokenizer: fills a sample", "fim_pad_token")]
    eod_token: Annotated[Name, Row("one token of the tokenizer: a document ends", "fim_eod_token")]

    @classmethod
    def off(cls) -> Iterator[Setting]:
        yield Setting("fim_data", False, "documents as they are", fields=("args.fim_data",))

    def alone(self, site: Site) -> Iterator[str]:
        # NVIDIA/Megatron-LM core_v0.19.0: pretrain_gpt.py makes a GPTFIMDataset where --fim-data is given, pretrain_hybrid.py never.
        yield "Megatron's script for hybrid models passes over --fim-data and would train on documents as they are"
