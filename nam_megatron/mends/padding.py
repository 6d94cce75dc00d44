"""The tokens of a dataset, trained as they stand in it (torch side).

megatron-core 0.19.2 (core/datasets/gpt_dataset.py) takes the tokenizer's pad token for padding wherever it stands: it becomes token 0, and
bears no loss. Its mask is that of all later samples, too, since the first sample's is kept and written to (NVIDIA/Megatron-LM#1711).
Corpora hold that token: with Qwen's tokenizers for chats it is the one that parts documents. Only fill-in-the-middle pads, behind a
sample; here it does so with an id that no data has, and each sample has a mask of its own.
"""

from functools import wraps
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training.datasets.fim_dataset import GPTFIMDataset

from nam_megatron.mends import Plan
from nam_megatron.runtime.padding import Looked, special

PADDING = -1  # Megatron's own, of a tokenizer that has none


def install(plan: Plan) -> None:
    """Have datasets that this process builds from now on read so."""
    entries = plan.recipe.model.vocab_size
    make, make_fim = GPTDataset.__init__, GPTFIMDataset.__init__

    @wraps(make)
    def plain(self: GPTDataset, *words: Any, **named: Any) -> None:
        make(self, *words, **named)
        self._pad_token_id = PADDING
        self.dataset = Looked(self.dataset, self.dataset_path, entries)

    @wraps(make_fim)
    def fim(self: GPTFIMDataset, *words: Any, **named: Any) -> None:
        make_fim(self, *words, **named)
        self.pad_tok_id = PADDING
        self.masks_and_position_ids_are_cacheable = False
        self.dataset.lost = special(self.config.tokenizer._tokenizer.tokenizer, self.eod_tok_id)
        self.dataset.why = "a special token that fill-in-the-middle would leave out"

    GPTDataset.__init__, GPTFIMDataset.__init__ = plain, fim
