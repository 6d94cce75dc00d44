"""The memory of somebody's run_config.yaml (Megatron-Bridge), or of Nemotron's YAML of a recipe of ours: read by lint, priced as the
nearest recipe.

What that recipe does not carry and memory depends on is refused by name, unless a word behind the file says it.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.lint import container, lint, recipe
from nam_megatron.lower import translate
from nam_megatron.recipe import Recipe
from nam_megatron.targets import current

# What may be otherwise: nothing is held for it, or nothing more.
WEIGHTLESS = {
    "attention_backend", "embedding_init_method_std", "eval_interval", "save_interval", "seed", "split", "tokenizer_model",
    "tokenizer_type", "train_iters", "lr_decay_iters", "lr_warmup_iters", "data_path", "data_cache_path", "num_workers",
}  # fmt: skip
# What no key of ours says and what changes what is held.
HELD = re.compile(
    r"--(?:use-precision-aware-optimizer|exp-avg|main-(?:grads|params)-dtype|optimizer-cpu-offload|cpu-offloading|"
    r"fine-grained-activation-offloading|offload-modules|fp4|use-torch-fsdp2|moe-pad-expert-input|padded-moe)"
)
# Nemotron's YAML: sections that say when, where and how fast, and not how much.
LIGHT = ("checkpoint.", "logger.", "scheduler.", "validation.", "rng.", "tokenizer.", "dist.", "train.train_iters")


def is_file(words: Sequence[str]) -> bool:
    """Whether a command names a YAML in the place of a preset."""
    return bool(words) and "=" not in words[0] and words[0].endswith((".yaml", ".yml"))


def run(words: Sequence[str], command: Callable[[], NoReturn]) -> NoReturn:
    """Run the budget on the file that the first of `words` names; the others are `gpus=N` and the command's own. Raises Refused."""
    name, *rest = words
    gpus = [word for word in rest if word.startswith("gpus=")]
    rest = [word for word in rest if word not in gpus]
    preset, text, notes = read(Path(name), gpus, rest)
    sys.stderr.write("".join(f"note: {note}\n" for note in notes))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preset").mkdir()
        (Path(folder) / "preset" / f"{preset}.yaml").write_text(text, encoding="utf-8")
        sys.argv[1:] = ["--config-dir", folder, f"conf={preset}", *rest]
        command()


def read(path: Path, gpus: Sequence[str], said: Sequence[str]) -> tuple[str, str, list[str]]:
    """A preset's name and text of a file, and notes. said: words that speak for what the file leaves open.

    Raises Refused.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise Refused(Problem(f"cannot read `{path}`: {getattr(err, 'strerror', None) or 'it is no YAML'}")) from None
    if not isinstance(root, dict) or container.kind(root) is None:
        hint = f"`python -m nam_megatron.lint {path} recipe=mine.yaml` reads other launches"
        raise Refused(
            Problem(f"`{path}` is neither Megatron-Bridge's container nor Nemotron's YAML of a recipe", None, hint)
        )
    number = gpus[0].partition("=")[2] if gpus else ""
    if gpus and not (number.isascii() and number.isdigit() and int(number)):
        raise Refused(Problem(f"`{number}` is no number of GPUs", "gpus"))
    found = lint(text, path.name, int(number) if gpus else None)
    raise_if(_laid(found.launch.notes))
    preset = re.sub(r"\W", "_", path.stem) or "container"
    made = recipe.make(found, path.with_name(f"{preset}.yaml"))
    ours = found.launch.plan is not None
    if root.get("peft") and not ours:
        raise Refused(
            Problem("it has `peft`: adapters of others are not priced", None, "the run without it needs more")
        )
    raise_if(_unread([] if ours else made.lost, made.keyless, made.recipe, said))
    return preset, made.yaml, [] if ours or not made.keyless else [f"without a key here: {', '.join(made.keyless)}"]


def _laid(notes: Sequence[str]) -> Iterator[Problem]:
    """Fields that Nemotron's YAML lays over its recipe and that memory depends on."""
    for note in notes:
        if note.startswith("laid over it"):
            for name in note.partition(": ")[2].split(", "):
                if not name.startswith(LIGHT):
                    message = f"`{name}` is laid over the recipe, and only Megatron-Bridge's validation would say what of it follows"
                    yield Problem(message, None, "say it as a key of the recipe, in its `overrides`")


def _unread(lost: Sequence[str], keyless: Sequence[str], made: Recipe, said: Sequence[str]) -> Iterator[Problem]:
    target, settings = current(), translate(made).by_name
    given = {word.lstrip("+").partition("=")[0] for word in said}
    for line in lost:
        here, arrow, _ = line.partition(" -> ")
        word = here.split(" ")[0].rstrip(":")
        flag = target.flags.get(word)
        dest = flag.dest if flag else word
        key = (settings[dest].key if dest in settings else None) if arrow else word
        if dest not in WEIGHTLESS and key not in given:
            hint = f"say what holds there: `{key}=...` behind the file" if key else "no key of a recipe says it"
            yield Problem(f"the nearest recipe does not carry `{line}`", None, hint)
    for line in keyless:
        if HELD.match(line):
            yield Problem(f"no key of a recipe says `{line}`, and memory depends on it")
