"""The memory of somebody's launch: whatever lint reads, Megatron-Bridge's run_config.yaml among them, priced as the nearest recipe.

What that recipe does not carry and memory depends on is refused by name, unless a word behind the file says it.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, get_args

from nam_megatron.compile.lower import translate
from nam_megatron.conf import conf_dir
from nam_megatron.errors import Problem, Refused, quoted, raise_if
from nam_megatron.lint import lint, recipe
from nam_megatron.lint.model import Model
from nam_megatron.lint.preset import keep, stops
from nam_megatron.lint.read import of_file
from nam_megatron.lint.values import Args
from nam_megatron.recipe.keys import argument, config_at, value_at
from nam_megatron.targets import current

SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch", ".txt", ".py", ".pt")
# What may be otherwise: nothing is held for it, or nothing more.
WEIGHTLESS = {
    # When, where from and how fast; what a loss is summed over.
    "check_for_nan_in_loss_and_grad", "data_cache_path", "data_path", "dataloader_type", "decoupled_lr", "eod_mask_loss", "eval_interval",
    "eval_iters", "exit_interval", "exit_signal_handler", "lr_decay_iters", "lr_decay_style", "lr_warmup_init", "lr_warmup_iters",
    "lr_wsd_decay_iters", "lr_wsd_decay_style", "min_lr", "num_workers", "reset_position_ids", "seed", "split", "tokenizer_model",
    "tokenizer_type", "train_iters", "weight_decay_incr_style",
    # What is written and read, how long ranks wait, and when the host's objects are collected.
    "async_save", "ckpt_format",
    "distributed_timeout_minutes", "distributed_timeout_seconds_after_init", "load", "log_interval", "log_throughput",
    "manual_gc", "manual_gc_interval", "save", "save_interval",
    # With biases, a fused gelu keeps its input, an unfused one its input's sum with the bias: as many bytes.
    "bias_gelu_fusion",
    "embedding_init_method_std", "init_method_xavier_uniform",
}  # fmt: skip
# A number that may be left open: whichever it is, as much is held.
OPEN = WEIGHTLESS - {"tokenizer_type"} | {
    "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "init_method_std", "lr", "lr_decay_samples", "lr_warmup_fraction",
    "lr_warmup_samples", "train_samples", "weight_decay",
}  # fmt: skip
# Read by Megatron's own modules alone: with Transformer Engine's nothing is held for it.
LOCAL = {"attention_softmax_in_fp32"}
# Those that keep no scores; the others do.
FLASH_LIKE = ("auto", "flash", "fused")
# What no key of ours says and what changes what is held.
HELD = re.compile(
    r"--(?:use-precision-aware-optimizer|exp-avg|main-(?:grads|params)-dtype|optimizer-cpu-offload|cpu-offloading|"
    r"fine-grained-activation-offloading|offload-modules|fp4|use-torch-fsdp2|moe-pad-expert-input|padded-moe|"
    r"num-distributed-optimizer-instances (?!1$))"
)
# Of a training; memory has no use for them.
FREE = ("model.init_std", "optim.lr", "optim.min_lr", "optim.warmup_steps", "schedule.train_steps")
# The longest that a model takes is in its place, and no choice of a training's.
LENGTH = "sequence length: "
# Nemotron's YAML: sections that say when, where and how fast, and not how much.
LIGHT = ("checkpoint.", "logger.", "scheduler.", "validation.", "rng.", "tokenizer.", "dist.", "train.train_iters")


def is_file(words: Sequence[str]) -> bool:
    """Whether a command names a file in the place of a preset."""
    first = words[0] if words and "=" not in words[0] and not words[0].startswith("-") else ""
    return first.endswith(SUFFIXES) or (bool(first) and Path(first).exists())


def run(words: Sequence[str], command: Callable[[], NoReturn]) -> NoReturn:
    """Run the budget on the file that the first of `words` names; the others are `gpus=N` and the command's own. Raises Refused."""
    name, *rest = words
    gpus = [word for word in rest if word.startswith("gpus=")]
    rest = [word for word in rest if word not in gpus]
    preset, text, notes, filled = read(Path(name), gpus, rest)
    sys.stderr.write("".join(f"note: {note}\n" for note in notes))
    with tempfile.TemporaryDirectory() as folder:
        keep(Path(folder), preset, text, name)
        sys.argv[1:] = ["--config-dir", folder, f"conf={preset}", *filled, *rest]
        command()


def read(path: Path, gpus: Sequence[str], said: Sequence[str]) -> tuple[str, str, list[str], list[str]]:
    """A preset's name and text of a file, notes, and words for what memory has no use of. said: words that speak for what the file
    leaves open.

    Raises Refused.
    """
    text = of_file(str(path))
    number = gpus[0].partition("=")[2] if gpus else ""
    if gpus and not (number.isascii() and number.isdigit() and int(number)):
        raise Refused(f"`{number}` is no number of GPUs", key="gpus")
    found = lint(text, path.name, int(number) if gpus else None)
    open_ = [name for name, _ in found.args.open_values() if name in OPEN]
    unread = [found.args.written(name) for name in open_]
    for name in open_:
        del found.args.given[name]
    found = replace(found, model=Model(found.args)) if open_ else found
    if found.launch.program:
        hint = "give what it makes of them: the words that Megatron gets, a `run_config.yaml`, or a checkpoint"
        raise Refused(f"`{path}` has {found.launch.program}'s words, and its model is another file's", hint=hint)
    raise_if(_laid(found.launch.notes))
    ours = found.launch.plan is not None
    raise_if([] if ours else _stumbled(found.args))
    preset = re.sub(r"\W", "_", path.stem) or "container"
    if (conf_dir() / "preset" / f"{preset.lower()}.yaml").exists():
        preset = f"of_{preset}"
    made = recipe.make(found, path.with_name(f"{preset}.yaml"), stepping=True)
    if not ours and any(note.startswith("it has `peft`") for note in found.launch.notes):
        raise Refused("it has `peft`: adapters of others are not priced", hint="the run without it needs more")
    idle = WEIGHTLESS | (LOCAL if found.args.transformer_impl == "transformer_engine" else set())
    idle |= {"attention_backend"} if found.args.value("attention_backend") in FLASH_LIKE else set()
    given = {word.lstrip("+").partition("=")[0] for word in said}
    raise_if(_unread([] if ours else made.lost, made, given, idle))
    filled = [f"{key}={value_at(made.recipe, key)}" for key in FREE if key in made.unsaid and key not in given]
    notes = [] if ours else [line for line in made.lost if _sentence(line) and not line.startswith(LENGTH)]
    notes += [] if ours or not made.keyless else [f"without a key here: {', '.join(made.keyless)}"]
    notes += [f"not read, as it matters to no memory: {', '.join(unread)}"] if unread else []
    notes += [f"taken as it matters to no memory: {' '.join(filled)}"] if filled else []
    foreign = [] if ours else found.args.foreign
    notes += [f"of a fork, and nothing is priced for them: {', '.join(foreign)}"] if foreign else []
    notes += [] if ours else [f"`lint` finds {said}" for said in stops(found)]
    return preset, made.yaml, notes, filled


def _stumbled(args: Args) -> Iterator[Problem]:
    """Words that are no setting yet, or none of Megatron's: each may be one that changes what is held."""
    for t in args.trouble:
        if t.rule == "unknown-variable":
            message = f"`{t.about}` stands for words that the file does not say"
            yield Problem(message, hint="put them in, or leave it out")
        elif t.rule in ("unknown-flag", "removed-flag"):
            hint = t.detail or t.fix or "leave it out"
            yield Problem(f"Megatron {args.target.pin} has no flag `{t.about}`", hint=hint)


def _laid(notes: Sequence[str]) -> Iterator[Problem]:
    """Fields that Nemotron's YAML lays over its recipe and that memory depends on."""
    for note in notes:
        if note.startswith("laid over it"):
            for name in note.partition(": ")[2].split(", "):
                if not name.startswith(LIGHT):
                    message = f"`{name}` is laid over the recipe, and only Megatron-Bridge's validation would say what of it follows"
                    yield Problem(message, hint="say it as a key of the recipe, in its `overrides`")


def _unread(lost: Sequence[str], made: recipe.Made, given: Collection[str], idle: Collection[str]) -> Iterator[Problem]:
    # A law that it breaks is the command's to tell, which has the words behind the file.
    target, settings = current(), (recipe.as_it_stands(made.recipe, []) or translate(made.recipe)).by_name
    length = ["model.seq_length"] if any(line.startswith(LENGTH) for line in lost) else []
    if left := [key for key in (*length, *made.unsaid) if key not in given and key not in FREE]:
        hint = f"say what holds there, behind the file: `{' '.join(f'{key}=...' for key in left)}`"
        yield Problem(f"the file does not say {quoted(left)}, or says what no recipe has", hint=hint)
    for line in lost:
        if _sentence(line):
            continue
        here, arrow, there = line.partition(" -> ")
        word = here.split(" ")[0].rstrip(":")
        flag = target.flags.get(word)
        dest = flag.dest if flag else word
        key = settings[dest].key if arrow and dest in settings else None
        if key and key not in given and here.startswith("--") and not _takes(key, here.partition(" ")[2]):
            key = None
        if key and key.startswith("model.") and argument(key) != dest:
            key = None  # it says what the model is, and more than this
        if dest not in idle and key not in given and key not in made.unsaid:
            change = _copy(here if arrow else line.partition(": ")[0], there)
            hint = f"say what holds there: `{key}=...` behind the file" if key else change
            yield Problem(f"the nearest recipe does not carry `{line}`", hint=hint)
    for line in made.keyless:
        if HELD.match(line):
            yield Problem(f"no key of a recipe says `{line}`, and memory depends on it")


def _sentence(line: str) -> bool:
    return " -> " not in line and (not line.startswith("--") or line.startswith("--rampup-batch-size "))


def _takes(key: str, value: str) -> bool:
    """Whether a value is among the words that a key takes, where it takes words."""
    *above, last = key.split(".")
    config = config_at(above)
    words = get_args(config.model_fields[last].annotation) if config and last in config.model_fields else ()
    return not value or not any(isinstance(word, str) for word in words) or value in words


def _copy(here: str, there: str) -> str:
    """What a copy of the file would have to say to be priced."""
    out, put = here.removesuffix(" (not known here)") if here.startswith("--") else "", there.startswith("--") and there
    if not there:
        return f"a copy of the file without `{out}`, and with flags for what it stands for, has a budget"
    change = " and ".join([*([f"with `{put}`"] if put else []), *([f"without `{out}`"] if out else [])])
    return f"no key of a recipe says it: a copy of the file {change or 'in which it is otherwise'} has a budget, of another run"
