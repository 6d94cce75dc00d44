"""`data`: what is trained on."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat

from nam_megatron.errors import Problem
from nam_megatron.setting import Config, Name, Row, Setting

if TYPE_CHECKING:
    from nam_megatron.plan import Plan

# The keys of `data` that each kind of it has; `data.workers` has all.
KEYS = {
    "mock": (),
    "indexed": ("path", "split", "tokenizer", "cache"),
    "blend": ("parts", "split", "tokenizer", "cache"),
    "built": ("path", "cache"),
    "sft": ("path", "tokenizer", "prompt", "answer"),
}


def mock(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section of a recipe's tree without a corpus: what Megatron makes up, or whoever asks gives."""
    return dict.fromkeys(data) | {"name": "mock", "workers": 0}


class Part(Config):
    """One of several datasets that are mixed."""

    weight: Annotated[PositiveFloat, Row("its share of the samples, beside the others' weights")]
    path: Annotated[Name, Row("the indexed dataset, without suffix")]


class Data(Config):
    """The tokens: random ones, one or several of Megatron's indexed datasets, what `python -m nam_megatron.data build` made, or
    prompts and answers."""

    name: Annotated[Literal["mock", "indexed", "blend", "built", "sft"], Row("kind of data")]
    path: Annotated[Name | None, Row("the dataset")]
    parts: Annotated[tuple[Part, ...] | None, Row("the datasets of a blend and their weights", was=None)]
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

    def settings(self, plan: "Plan") -> Iterator[Setting]:
        mock, built = self.name == "mock", self.built
        yield Setting("mock_data", mock, "random tokens", "name", fields=("args.mock_data",))
        setting = partial(Setting, key="path", beside="name")
        # A folder is no indexed dataset: Megatron's own trainer stops there.
        indexed = (self.path or "",) if self.name in ("indexed", "sft") else None
        blended = tuple(word for part in self.parts or () for word in (str(part.weight), part.path))
        why, key = ("weight and dataset, in turn", "parts") if self.parts else ("indexed dataset", "path")
        yield setting("data_path", blended or indexed, why, key=key, fields=("args.data_path",))
        setting = partial(Setting, key="path", beside="split")
        train = (str(built / "train"),) if built else None
        yield setting("train_data_path", train, "split by document", fields=("args.train_data_path",))
        valid = (str(built / "valid"),) if built and plan.recipe.schedule.eval_steps else None
        why = "split by document; only for evaluations"
        yield setting("valid_data_path", valid, why, fields=("args.valid_data_path",))
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
        if not plan.index_reuse:
            name, why = "create_attention_mask_in_dataloader", "causal masks are made in the kernel"
            yield pin(name, False, why)

    def check(self, plan: "Plan") -> Iterator[Problem]:
        paths = [part.path for part in self.parts or ()]
        if self.parts is not None and not paths:
            yield Problem(
                "a blend of nothing", "data.parts", "give its datasets: `data.parts=[{weight: 1, path: PREFIX}]`"
            )
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            yield Problem(f"the blend has `{path}` twice", "data.parts", "give it one weight")
        for name in ("path", "parts", "split", "tokenizer", "cache", "prompt", "answer"):
            given, wanted = getattr(self, name) is not None, name in KEYS[self.name]
            if wanted and not given and name != "cache":
                yield Problem(f"{self.name} data without `{name}`", f"data.{name}", f"give it: `data.{name}=...`")
            if given and not wanted:
                right = " or ".join(f"`data={kind}`" for kind, keys in KEYS.items() if name in keys)
                yield Problem(f"{self.name} data with a `{name}`", f"data.{name}", f"set {right}")
        if self.name == "sft":
            yield from self._unanswered(plan)
        if self.split is None:
            return
        if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){2}", self.split):
            message = f"`{self.split}` is no split"
            yield Problem(message, "data.split", "three weights for train,valid,test: `99,1,0`")
            return
        train, valid, _ = map(float, self.split.split(","))
        if not train:
            hint = "`99,1,0` holds out one document in a hundred"
            yield Problem("nothing is left for training", "data.split", hint)
        if plan.recipe.schedule.eval_steps and not valid:
            hint = "`99,1,0`, or `schedule.eval_steps=0`"
            yield Problem("evaluations and no documents for them", "data.split", hint)

    def _unanswered(self, plan: "Plan") -> Iterator[Problem]:
        """What prompts and answers cannot be trained with: their samples end in padding, and prompts bear no loss."""
        r, moe = plan.recipe, plan.recipe.model.blocks.moe
        if r.schedule.pretrained is None:
            yield Problem(
                "answers are learned by a pretrained model, and none is named",
                "schedule.pretrained",
                "give the folder of its checkpoints: `schedule.pretrained=FOLDER`",
            )
        if self.prompt is not None and self.prompt == self.answer:
            yield Problem(f"`{self.prompt}` is both prompt and answer", "data.answer", "name another field")
        if r.schedule.eval_steps:
            message = (
                "evaluations on prompts and answers are not carried over: they would end with the first pass over them"
            )
            yield Problem(message, "schedule.eval_steps", "set it to 0")
        if plan.mtp:
            message = (
                "Megatron-Bridge does not tell MTP which tokens are the answer: its loss would be of the prompts too"
            )
            yield Problem(message, "feature.mtp.depths", "set it to 0; a checkpoint with MTP loads without")
        if r.feature.fim:
            yield Problem("fill-in-the-middle of prompts and answers", "feature.fim.enabled", "set it to false")
        if r.parallel.context > 1:
            message = "prompts and answers have been shown on whole sequences alone"
            yield Problem(message, "parallel.context", "set it to 1")
        if moe and "moe" in plan.kinds and moe.capacity_factor is not None:
            message = "padding behind an answer would take places of experts, and tokens be dropped for it"
            yield Problem(message, "model.blocks.moe.capacity_factor", "set it to null: dropless")
        if plan.index_reuse and (dsa := r.model.blocks.dsa) and dsa.kernels == "megatron":
            message = "Megatron's DSA hands a top-k on only where samples have masks, and these have none"
            yield Problem(message, "model.blocks.dsa.kernels", "`fused`, or `model.blocks.dsa.full_every=1`")
