"""Training from a pretrained checkpoint by Bridge: whose weights, which prompts and answers, and what is kept of both (torch side).

Bridge would cut samples that are too long, and train on whatever stands in the folders when a run is resumed. Made for
megatron-bridge 0.6.2.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from megatron.bridge.data.builders import GPTSFTDatasetConfig as Samples
from megatron.bridge.data.builders import PromptCompletionSFTPreprocessingConfig
from megatron.bridge.data.datasets.utils import build_index_from_memdata

from nam_megatron import tracker
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.lower import Lowering
from nam_megatron.data.identity import SAMPLES
from nam_megatron.errors import Problem, Refused
from nam_megatron.judge import resume, same
from nam_megatron.nemo import guards
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.data import words
from nam_megatron.runtime import checkpoint, checksums
from nam_megatron.runtime.bridge import Arguments
from nam_megatron.words.regular import irregular
from nam_megatron.words.whole import write_whole

# The container ----------------------------------------------------------------------------------------------------------

# Megatron's arguments for where its own datasets are.
PLACES = ("data_path", "mock_data", "train_data_path", "valid_data_path", "split", "data_cache_path")


def dataset(a: Arguments) -> Samples:
    """Prompts and answers as Bridge reads them: shuffled anew in each pass, every sample padded to the model's length."""
    data = a.lowering.plan.recipe.data
    a.field = "dataset.dataset_root"
    for name in PLACES:
        a(name)
    a.field = "dataset.max_train_samples"
    samples = a("train_iters") * a("global_batch_size")
    text = PromptCompletionSFTPreprocessingConfig(
        prompt_column=data.prompt or "", completion_column=data.answer or "", strip_whitespace=False
    )
    return Samples(
        **a.of("dataset", Samples)
        | {
            "dataset_root": list(words(data.parts)) or data.path,
            "max_train_samples": samples,
            "preprocessing": text,
            "dataset_kwargs": {"pad_to_max_length": True},
            "do_validation": False,
            "do_test": False,
        }
    )


# Before anything is built -----------------------------------------------------------------------------------------------


@resume.seen
def objections(lowering: Lowering, *, thorough: bool = True) -> Iterator[Problem]:
    """Why this plan cannot start from the weights that it names, or learn from its samples.

    thorough: read the weights' files and all samples too; of a job one rank does that.
    """
    recipe = lowering.plan.recipe
    if recipe.schedule.pretrained is not None:
        found = list(weights(Path(recipe.schedule.pretrained), lowering, thorough=thorough))
        yield from (replace(p, key="schedule.pretrained") if p.key in (None, "schedule.load") else p for p in found)
        if not found:
            yield from resumed(recipe)
    if recipe.data.sft and thorough:
        yield from samples(recipe)


def weights(folder: Path, lowering: Lowering, *, thorough: bool) -> Iterator[Problem]:
    """What is wrong with a pretrained checkpoint, Bridge's or Megatron's, or with its model for this plan."""
    if not (folder / tracker.TRACKER).is_file():
        hint = "the folder that a run of ours, by either trainer, or `python -m nam_megatron.hf import` has saved to"
        yield Problem(f"no checkpoint in `{folder}`", hint=hint)
        return
    yield from checkpoint.damage(folder, thorough=thorough)
    bridges = (folder / guards.TRACKER).is_file()
    if bridges:
        yield from guards.at_odds(folder)
    signed = folder / guards.SIGNED if bridges else folder
    try:
        before = same.read(signed / resume.PLAN)
    except Refused as refused:
        yield from refused.problems
        return
    yield from same.another_model(before, json.loads(plan_json(lowering)))
    yield from resume.strangers(folder)
    yield from resume.another_tokenizer(signed, lowering.plan.recipe.data)


def samples(recipe: Recipe) -> Iterator[Problem]:
    """What of the prompts and answers could not be learned as it stands: Bridge would cut it, or stop on the way."""
    from transformers import AutoTokenizer

    data, tokens = recipe.data, Path(recipe.data.tokenizer or "")
    pipes = [
        *irregular([Path(folder) / SAMPLES for folder in data.folders], data.key),
        *irregular(tokens.iterdir() if tokens.is_dir() else (), "data.tokenizer"),
    ]
    if pipes:
        yield from pipes
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(data.tokenizer)
    except (OSError, ValueError) as err:
        message = f"`{data.tokenizer}` is no folder of a tokenizer: {str(err).splitlines()[0]}"
        yield Problem(message, key="data.tokenizer")
        return
    if len(tokenizer) > recipe.model.vocab_size:
        message = f"the tokenizer has {len(tokenizer)} entries, and the model {recipe.model.vocab_size}"
        yield Problem(message, key="data.tokenizer", hint="take the one that it was pretrained with")
    if tokenizer.eos_token_id is None:
        yield Problem("the tokenizer has no end of a text, which every answer ends with", key="data.tokenizer")
        return
    for folder in data.folders:
        yield from _of_folder(Path(folder) / SAMPLES, recipe, tokenizer)


def _of_folder(path: Path, recipe: Recipe, tokenizer: Any) -> Iterator[Problem]:
    """The same of one file of samples."""
    where = recipe.data.key
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")  # as Bridge parts them
    except (OSError, UnicodeDecodeError) as err:
        message = f"`{path}` cannot be read: {getattr(err, 'strerror', None) or err}"
        yield Problem(message, key=where, hint=f"a folder with `{SAMPLES}`, a JSON object a line")
        return
    if lines == [""]:
        yield Problem(f"`{path}` has no samples", key=where)
        return
    found = [(n, bad) for n, line in enumerate(lines, 1) if (bad := _unfit(line, recipe, tokenizer))]
    if found:
        n, (why, key) = found[0]
        more = f", and {len(found) - 1} more lines" if len(found) > 1 else ""
        hint = "`model.seq_length` may be larger than it was" if key == "model.seq_length" else None
        yield Problem(f"line {n} of `{path}` {why}{more}", key=key, hint=hint)


def _unfit(line: str, recipe: Recipe, tokenizer: Any) -> tuple[str, str] | None:
    """Why a line is no sample to learn, and the key that says so."""
    try:
        sample = json.loads(line)
    except ValueError:
        sample = None
    if not isinstance(sample, dict):
        return "is no JSON object", recipe.data.key
    length = 1
    for key in ("prompt", "answer"):
        text = sample.get(name := getattr(recipe.data, key))
        if not isinstance(text, str):
            return f"has no text `{name}`", f"data.{key}"
        tokens = len(tokenizer.encode(text, add_special_tokens=False))
        if not tokens:
            return f"has an empty `{name}`", f"data.{key}"
        length += tokens
    if length > recipe.model.seq_length:
        return f"has {length} tokens, and the model takes {recipe.model.seq_length}", "model.seq_length"
    return None


# What it began with -----------------------------------------------------------------------------------------------------


def sign(recipe: Recipe) -> None:
    """Write beside the checkpoints to come which weights and samples they come of."""
    s = recipe.schedule
    if s.save is None or s.pretrained is None:
        return
    write_whole(Path(s.save) / guards.SIGNED / resume.BEGAN, json.dumps(_began(recipe), indent=1) + "\n")


def forget(recipe: Recipe) -> None:
    """Remove Bridge's index of where lines end if it is of another file of samples: Bridge looks only whether one is there."""
    for folder in recipe.data.folders if recipe.data.sft else ():
        path = Path(folder) / SAMPLES
        index = path.with_name(f"{SAMPLES}.idx.npy")
        try:
            its_own = numpy.array_equal(numpy.load(index), build_index_from_memdata(str(path), ord("\n")))
        except (OSError, ValueError, EOFError):
            its_own = False
        if not its_own:
            index.unlink(missing_ok=True)


def _began(recipe: Recipe) -> dict[str, str]:
    folder = Path(recipe.schedule.pretrained or "")
    step = tracker.newest(folder)
    found = {"schedule.pretrained": f"{step.name} {_digest(step / checksums.NAME)}"}
    if recipe.data.sft:
        found[recipe.data.key] = " ".join(_digest(Path(folder) / SAMPLES) for folder in recipe.data.folders)
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def resumed(recipe: Recipe) -> Iterator[Problem]:
    """Whether a run goes on from other weights or with other samples than it began with."""
    began = Path(recipe.schedule.load or "") / guards.SIGNED / resume.BEGAN
    if recipe.schedule.load is None or not began.is_file():
        return
    before = json.loads(began.read_text(encoding="utf-8"))
    for key, now in _began(recipe).items():
        if before.get(key) != now:
            yield Problem(
                "what stands there is not what the run began with", key=key, hint="put it back, or start afresh"
            )
