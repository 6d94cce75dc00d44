"""Prompts and answers of several folders, mixed by Megatron's rule for its own datasets (torch side)."""

from dataclasses import replace
from typing import Any

import numpy
from megatron.bridge.data import utils
from megatron.bridge.data.builders import (
    GPTSFTDatasetBuilder,
    GPTSFTDatasetConfig,
    gpt_sft_train_valid_test_datasets_provider,
)
from megatron.core.datasets.utils import normalize
from torch.utils.data import Dataset

from nam_megatron.mends import Plan


class Mixed(Dataset):
    """config: its `dataset_root` is weight and folder, in turn."""

    def __init__(self, config: GPTSFTDatasetConfig, tokenizer: Any) -> None:
        from megatron.core.datasets import helpers  # compiled code

        size, weights = config.max_train_samples or 0, normalize([float(weight) for weight in config.dataset_root[::2]])
        self.part, self.place = numpy.zeros(size, numpy.int16), numpy.zeros(size, numpy.int64)
        helpers.build_blending_indices(self.part, self.place, weights, len(weights), size, False)
        drawn = zip(config.dataset_root[1::2], numpy.bincount(self.part, minlength=len(weights)).tolist(), strict=True)
        alone = [replace(config, dataset_root=folder, max_train_samples=count) for folder, count in drawn]
        self.datasets = [GPTSFTDatasetBuilder(one, tokenizer).build()[0] for one in alone]
        self.collate_fn = self.datasets[0].collate_fn

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> Any:
        return self.datasets[self.part[index]][int(self.place[index])]


def provided(
    counts: list[int], config: GPTSFTDatasetConfig, tokenizer: Any = None, pg_collection: Any = None
) -> tuple[Any, ...]:
    """The datasets for training, validation and test."""
    if isinstance(config.dataset_root, list):
        return Mixed(config, tokenizer), None, None
    return gpt_sft_train_valid_test_datasets_provider(counts, config, tokenizer, pg_collection)


def install(plan: Plan) -> None:
    """This goes for every container of the process; one folder is read as before."""
    utils._REGISTRY[GPTSFTDatasetConfig] = provided
