"""`data`: what is trained on."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat

from nam_megatron.words.setting import Config, Name, Row, Setting
from nam_megatron.words.site import Site

# The keys of `data` that each kind of it has; `data.workers` has all.
KEYS = {
    "mock": (),
    "indexed": ("path", "split", "tokenizer", "cache"),
    "blend": ("parts", "valid_parts", "split", "tokenizer", "cache"),
    "built": ("path", "cache"),
    "sft": ("path", "tokenizer", "prompt", "answer"),
    "sft_blend": ("parts", "tokenizer", "prompt", "answer"),
}


def mock(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section of a recipe's tree without a corpus: what Megatron makes up, or whoever asks gives."""
    return dict.fromkeys(data) | {"name": "mock", "workers": 0}


class Part(Config):
    """One of several datasets that are mixed."""

    weight: Annotated[PositiveFloat, Row("its share of the samples, beside the others' weights")]
    path: Annotated[Name, Row("the indexed dataset, without suffix; of prompts and answers a folder")]


def words(parts: tuple[Part, ...] | None) -> tuple[str, ...]:
    """A blend as Megatron's arguments have it."""
    return tuple(word for part in parts or () for word in (str(part.weight), part.path))


class Data(Config):
    """The tokens: random ones, one or several of Megatron's indexed datasets, what `python -m nam_megatron.data build` made, or
    prompts and answers."""

    name: Annotated[Literal["mock", "indexed", "blend", "built", "sft", "sft_blend"], Row("kind of data")]
    path: Annotated[Name | None, Row("the dataset")]
    parts: Annotated[tuple[Part, ...] | None, Row("the datasets of a blend and their weights", was=None)]
    valid_parts: Annotated[
        tuple[Part, ...] | None, Row("those that only evaluations read; null: `split` parts each of a blend", was=None)
    ]
    split: Annotated[Name | None, Row("train,valid,test weights", "split", ("args.split",))]
    tokenizer: Annotated[Name | None, Row("folder of a Hugging Face tokenizer")]
    cache: Annotated[
        Name | None,
        Row("folder for the order of its samples, which the first run works out; null: `cache` beside the dataset",
            "data_cache_path", ("args.data_cache_path",), "where it is kept", was=None),
    ]  # fmt: skip
    prompt: Annotated[Name | None, Row("of an SFT sample's fields the one that is asked; it bears no loss", was=None)]
    answer: Annotated[Name | None, Row("of its fields the one that is learned, with the end of the text", was=None)]
    workers: Annotated[
        NonNegativeInt, Row("loader processes per rank", "num_workers", ("args.num_workers",), "who reads")
    ]

    @property
    def built(self) -> Path | None:
        """Folder of the built dataset, where it is one."""
        return Path(self.path or "") if self.name == "built" else None

    @property
    def sft(self) -> bool:
        """Whether samples are prompts and answers: they end in padding, and prompts bear no loss."""
        return self.name in ("sft", "sft_blend")

    @property
    def folders(self) -> tuple[str, ...]:
        """Those of prompts and answers."""
        return tuple(part.path for part in self.parts or ()) or (self.path or "",)

    @property
    def key(self) -> str:
        """The key that says where it is."""
        return "data.parts" if self.parts else "data.path"

    @property
    def mixed(self) -> tuple[Part, ...]:
        """Every dataset of a blend."""
        return (self.parts or ()) + (self.valid_parts or ())

    def settings(self, site: Site) -> Iterator[Setting]:
        mock, built, apart = self.name == "mock", self.built, self.valid_parts is not None
        yield Setting("mock_data", mock, "counts up from 1, no text", "name", fields=("args.mock_data",))
        setting = partial(Setting, key="path", beside="name")
        # A folder is no indexed dataset: Megatron's own trainer stops there.
        indexed = (self.path or "",) if self.name in ("indexed", "sft") else None
        blended = words(self.parts)
        why, key = ("weight and dataset, in turn", "parts") if self.parts else ("indexed dataset", "path")
        yield setting("data_path", None if apart else blended or indexed, why, key=key, fields=("args.data_path",))
        setting = partial(Setting, key="path", beside="split")
        train = blended if apart else (str(built / "train"),) if built else None
        why, key = (why, "parts") if apart else ("split by document", "path")
        yield setting("train_data_path", train, why, key=key, fields=("args.train_data_path",))
        valid = words(self.valid_parts) if apart else (str(built / "valid"),) if built and site.eval_steps else None
        why, key = (why, "valid_parts") if apart else ("split by document; only for evaluations", "path")
        yield setting("valid_data_path", valid, why, key=key, fields=("args.valid_data_path",))
        kind = "NullTokenizer" if mock else "HuggingFaceTokenizer"
        fields = ("tokenizer.tokenizer_type",)
        yield Setting("tokenizer_type", kind, "mock data has none", "name", beside="tokenizer", fields=fields)
        tokenizer = str(built / "tokenizer") if built else self.tokenizer
        key, fields = "path" if built else "tokenizer", ("tokenizer.tokenizer_model",)
        yield Setting("tokenizer_model", tokenizer, "its folder", key, beside="tokenizer", fields=fields)
        pin = partial(Setting, beside="workers")
        yield pin("dataloader_type", "single", "in order, once")
        yield pin("reset_position_ids", False, "positions run through documents")
        yield pin("reset_attention_mask", False, "attention runs through documents")
        yield pin("eod_mask_loss", False, "the end of a document counts")
        if not site.index_reuse:
            name, why = "create_attention_mask_in_dataloader", "causal masks are made in the kernel"
            yield pin(name, False, why)

    def alone(self, site: Site) -> Iterator[str]:
        if self.sft:
            yield "prompts and answers are read by Megatron-Bridge's trainer; Megatron would look for an indexed dataset of that name"
