"""How well a model predicts a split of a dataset that we built (torch side)."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nam_megatron import installed
from nam_megatron.data import indexed, manifest
from nam_megatron.data.identity import overwritten
from nam_megatron.errors import Refused, raise_if
from nam_megatron.hf.opened import absent, another_tokenizer, of_text, open_model

SECONDS = 5.0  # between two words on how far it is


def perplexity(
    path: Path,
    dataset: Path,
    split: str,
    most: int | None,
    batch: int,
    dtype: torch.dtype,
    device: str,
    kernels: str = "torch",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The mean loss of the split's tokens in nats, and e to it.

    The split is one row of tokens, cut into windows of the model's length as in training; a window's first token is not predicted.
    path: an export or a checkpoint. most: windows to read, None: all. say: gets how far it is, every few seconds.

    Raises:
        Refused: a dataset or a model that is damaged, or made for another vocabulary.
    """
    versions = installed.ask().as_dict()
    raise_if(absent(device, kernels))
    if split not in manifest.SPLITS:
        raise Refused(f"`{split}` is no split", hint=f"there are: {', '.join(manifest.SPLITS)}")
    made = manifest.read(dataset)
    raise_if([*manifest.damage(dataset, made, thorough=False), *overwritten(dataset, made)])
    bound = of_text(path)
    raise_if(another_tokenizer(path, dataset / manifest.TOKENIZER))
    if "tokenizer" in bound["unproven"]:
        say(f"which tokenizer `{path}` was trained with cannot be told: that of `{dataset}` is taken for it")
    model = open_model(path, dtype, device, kernels)
    raise_if(manifest.misfit(made, model.config.vocab_size))
    loss, tokens, begin = 0.0, 0, time.monotonic()
    told = begin
    for read in windows(dataset / split, model.config.max_position_embeddings + 1, most, batch):
        with torch.inference_mode():
            logits = model(read[:, :-1].to(device)).logits
            labels = read[:, 1:].to(device)
            loss += F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").item()
        if not math.isfinite(loss):
            raise Refused(f"the loss of `{path}` is not finite: these weights are of no use")
        tokens += labels.numel()
        if time.monotonic() - told >= SECONDS:
            told = time.monotonic()
            say(f"{tokens:,} tokens of `{split}` in {told - begin:.0f} s, loss {loss / tokens:.4f}")
    if not tokens:
        raise Refused(f"`{dataset / split}` has too few tokens for a window")
    return {
        "loss": loss / tokens,
        "perplexity": math.exp(min(loss / tokens, 700.0)),
        "tokens": tokens,
        "seconds": round(time.monotonic() - begin, 2),
        "split": split,
        "dataset": made.key,
        **bound,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": kernels,
        **versions,
    }


def held_out(dataset: Path, vocabulary: int, batch: int, length: int) -> torch.Tensor:
    """int64 [batch, length] from the beginning of a dataset's held-out documents. Raises Refused."""
    made = manifest.read(dataset)
    damage = [*manifest.damage(dataset, made, thorough=False), *overwritten(dataset, made)]
    raise_if([*damage, *manifest.misfit(made, vocabulary)])
    read = next(windows(dataset / "valid", length, batch, batch), None)
    if read is None or read.shape != (batch, length):
        message = f"`{dataset / 'valid'}` has fewer than {batch} x {length} tokens"
        raise Refused(message, hint="a smaller `--length` or `--batch`")
    return read


def windows(prefix: Path, length: int, most: int | None, batch: int) -> Iterator[torch.Tensor]:
    """int64 [up to `batch`, length]; neighbouring windows share a token, so that all but the first are predicted. Raises Refused."""
    installed.ask()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        tokens = (said := indexed.read(prefix)).bytes // said.token_bytes
    except indexed.Unreadable as why:
        raise Refused(str(why), key="data.path", hint="build the dataset again") from None
    if not tokens:
        return
    index = IndexedDataset(str(prefix))
    row = np.memmap(f"{prefix}.bin", dtype=index.index.dtype, mode="r", shape=(tokens,))
    count = max((len(row) - 1) // (length - 1), 0)
    if count == 0 and len(row) > 1:
        yield torch.from_numpy(row.astype(np.int64))[None]
        return
    starts = [i * (length - 1) for i in range(count if most is None else min(count, most))]
    for first in range(0, len(starts), batch):
        yield torch.from_numpy(
            np.stack([row[at : at + length].astype(np.int64) for at in starts[first : first + batch]])
        )
