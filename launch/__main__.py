"""python -m launch VERB ...

  show conf=NAME ...            the plan, its settings, the environment and the exact command; touches nothing
  check conf=NAME ...           preflight: is this host fit to run it?
  run conf=NAME ...             check, train, and leave a receipt
  compare RECEIPT RECEIPT ...   what differs, in config and figures (--anyway: even where it means nothing)
  receipts [DIR] [KEY=VALUE]    list them: state= family= host= end= preset=
  report RUN ... [out=FILE]     one HTML page of a run, or of several that may be compared
  inspect RUN                   look at a run that hangs or has died, each question bounded in time
  patch apply|verify|export     patches/ onto Megatron
  stack                         the pinned packages and the steps that install them

`show`, `check` and `run` take a recipe as `python -m nam_megatron.translate` does; `--help` after them lists their keys.
"""

import sys
from importlib import import_module
from typing import NoReturn

from launch.words import parse
from nam_megatron.errors import OK, Problem, Refused, finish, raise_if_twice

WITH_A_RECIPE = ("show", "check", "run")
# Verb -> its options, written KEY=VALUE.
OPTIONS = {
    "compare": ("anyway",),
    "receipts": ("state", "family", "host", "end", "preset", "signers"),
    "report": ("out", "anyway"),
    "inspect": ("receipts", "seconds"),
    "patch": ("onto", "commits"),
    "stack": ("lock",),
}


def main() -> NoReturn:
    finish(command)


def command() -> int:
    verb, *rest = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(__doc__)
        return OK
    if verb in WITH_A_RECIPE:
        from launch import app

        app.run(verb, rest)
    if verb not in OPTIONS:
        raise Refused(Problem(f"no verb `{verb}`", None, f"there are: {', '.join((*WITH_A_RECIPE, *OPTIONS))}"))
    module = import_module(f"launch.{verb}")  # each imports what it needs only
    if {"-h", "--help"} & set(rest):
        options = " ".join(f"[{key}=...]" for key in OPTIONS[verb])
        print(module.__doc__, f"python -m launch {verb} ... {options}", sep="\n")
        return OK
    raise_if_twice(word.removeprefix("--").partition("=")[::2] for word in rest if word.startswith("--") or "=" in word)
    return module.command(*parse(rest, OPTIONS[verb]))


if __name__ == "__main__":
    main()
