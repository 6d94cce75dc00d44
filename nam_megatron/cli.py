"""nam COMMAND [VERB] [NAME ...] [KEY=VALUE ...]

  from a recipe
    translate conf=NAME     what Megatron must be told, or why it cannot be
    verify conf=NAME        do Megatron's own parser and configs agree?
    prove conf=NAME         does its layout compute the same model as one rank?
    budget conf=NAME        does it fit, and what does it cost?
    list WHAT               presets, overlays, lanes, clusters, kinds, features, keys, laws
    card NAME               what has been shown of a preset, and by which file
  to run it
    launch VERB             show, check, run, status, report, compare, scale, receipts, inspect, patch, stack
    nemo VERB               the same recipes under Megatron-Bridge: list, dump, pretrain, finetune, doctor
  from what others have
    lint FILE               which model does any Megatron command line train?
    migrate FILE            a preset or overlay of an older version, in today's keys
    data VERB               text to Megatron's datasets: corpus, tokenizer, build, check
    hf VERB                 checkpoints for transformers and back: export, import, check, evaluate, ...
    generate PATH           text from an export or a checkpoint
  about this program
    doctor                  what is installed, and which command needs what
    completion SHELL        completion for bash or zsh: eval "$(nam completion bash)"

`nam COMMAND --help` says more. Exit codes: 0 ok, 1 findings, 2 refused, 3 not built yet.
"""

import contextlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from nam_megatron.commands import ARGPARSE, COMMANDS, LISTS, RECIPES, of
from nam_megatron.errors import OK, Refused, finish, likely
from nam_megatron.launcher import by_nam, called

OPTION = re.compile(r"([a-z][a-z_-]*)=(.*)", re.ASCII | re.DOTALL)
HELP = ("-h", "--help")


def main() -> NoReturn:
    by_nam()
    finish(lambda: command(sys.argv[1:]))


def command(words: Sequence[str]) -> int:
    """Run one command of the table; what it does and its exit code are its module's."""
    name, *rest = words or ["--help"]
    if name in ("--version", "-V", "version"):
        print(version())
        return OK
    if name in (*HELP, "help"):
        print((__doc__ or "").rstrip())
        return OK
    if name == "complete":  # what a shell asks: see completion.py
        from nam_megatron.completion import complete

        sys.stdout.write("".join(f"{word}\n" for word in complete(rest)))
        return OK
    if name not in COMMANDS:
        from nam_megatron.completion import complete

        under = [one for one in ("launch", "nemo", *ARGPARSE) if name in complete(("nam", one, ""))]
        alike = filter(None, [likely(name, COMMANDS)])
        meant = [f"`nam {one} {name}`" for one in under] or [f"`nam {one}`" for one in alike]
        hint = f"did you mean {' or '.join(meant)}?" if meant else "`nam --help` lists the commands"
        raise Refused(f"no command `{name}`", hint=hint)
    if {*HELP} & {*rest}:
        return helped(name, rest)
    return run(COMMANDS[name], spelled(name, rest))


def version() -> str:
    from nam_megatron import __version__
    from nam_megatron.targets import current

    return f"nam_megatron {__version__}, for Megatron-Core {current().pin}"


def run(module: str, words: Sequence[str]) -> int:
    """The module as `python -m` would run it."""
    sys.argv[1:] = words
    # That a package imports its own command, for its parser: it runs once all the same.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or OK
    return OK


def helped(name: str, words: Sequence[str]) -> int:
    """`--help` of a command, in the words of this program; of a command with a recipe one screen of it."""
    if name in RECIPES:
        print(called(screen(name)))
        return OK
    if name == "list":
        print(
            "nam list WHAT [KEY=VALUE ...]\n\nOne line each of WHAT: presets, overlays, lanes, clusters, kinds, features, keys, laws."
        )
        return OK
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run(COMMANDS[name], words)
    print(called(said.getvalue()).rstrip())
    return code


def screen(name: str) -> str:
    """What a command with a recipe answers, its examples and its own keys, as its file in conf/ has them. The recipe's: `nam list keys`."""
    from nam_megatron.recipe import conf_dir

    text = (conf_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    own, _, template = text.partition("\nhydra:\n")
    keys = [line for line in own.splitlines() if re.match(r"[a-z_]+: ", line)]
    said = re.findall(r'^    header: "\$\{hydra\.help\.app_name\}: (.*)"$', template, re.MULTILINE)
    examples = [
        line.strip().replace("$$", "$") for line in template.splitlines() if line.strip().startswith("python -m")
    ]
    return "\n".join(
        [
            f"nam {name} conf=NAME [KEY=VALUE ...]: {said[0] if said else ''}",
            "",
            *(f"  {line}" for line in examples),
            "",
            "keys of this command:",
            *(f"  {line}" for line in keys),
            "",
            "Every other KEY=VALUE changes the recipe: `nam list presets`, `nam list overlays`, `nam list keys`. A folder of",
            f"your own: --config-dir DIR. All groups and Hydra's own options: `nam {name} --hydra-help`, `--cfg job`.",
        ]
    )


def spelled(name: str, words: Sequence[str]) -> list[str]:
    """The command line as the command's module reads it: argparse's --KEY VALUE for KEY=VALUE, list=WHAT for `nam list WHAT`."""
    if name == "list":
        what, *rest = words or ["presets"]
        return [f"list={f'{what}s' if f'{what}s' in LISTS else what}", *rest]
    if name not in ARGPARSE:
        return list(words)
    options = of(import_module(ARGPARSE[name]).parser(), words)
    found: list[str] = []
    for word in words:
        said = OPTION.fullmatch(word)
        if said is None:
            found.append(word)
            continue
        key = said[1].replace("_", "-")
        if key not in options:
            meant = likely(key, options)
            hint = f"did you mean `{meant}=`?" if meant else f"there are: {', '.join(options)}"
            raise Refused(f"`nam {name}` has no `{said[1]}`", hint=hint)
        found += given(key, said[2], options[key])
    return found


def given(key: str, value: str, flag: bool) -> list[str]:
    """One option for argparse: a flag by true or false, several values as [A,B]."""
    if flag:
        if value not in ("true", "false"):
            raise Refused(f"`{key}` is true or false, not `{value}`")
        return [f"--{key}"] if value == "true" else []
    values = value[1:-1].split(",") if value.startswith("[") and value.endswith("]") else [value]
    return [f"--{key}={one}" for one in values]


if __name__ == "__main__":
    main()
