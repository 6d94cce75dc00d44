"""python -m launch VERB ...

  show conf=NAME ...            the plan, its settings, the environment and the exact command; touches nothing
  check conf=NAME ...           preflight: is this host fit to run it?
  run conf=NAME ...             check, train, and leave a receipt
  compare RECEIPT RECEIPT ...   what differs, in config and figures (--anyway: even where it means nothing)
  receipts [DIR] [KEY=VALUE]    list them: state= family= host= end= preset=, --full for the layouts
  status [DIR]                  which runs go on, are silent or ended, and why; format=prometheus for an exporter
  report RUN ... [out=FILE]     one HTML page of a run, or of several that may be compared
  scale RUN [gpus=1,2,4,8]      how long its step would take on other numbers of GPUs
  inspect RUN                   look at a run that hangs or has died, each question bounded in time
  patch list|apply|verify|export    what we change upstream: patches/ onto Megatron, and mends
  stack                         the pinned packages and the steps that install them

`show`, `check` and `run` take a recipe as `python -m nam_megatron.translate` does; `--help` after them lists their keys.
"""

import sys
from importlib import import_module
from typing import NoReturn

from launch.words import parse
from nam_megatron.errors import OK, Refused, finish, raise_if_twice
from nam_megatron.launcher import called

WITH_A_RECIPE = ("show", "check", "run")
# Verb -> its module, and its options, written KEY=VALUE.
OPTIONS = {
    "compare": ("record.compare", ("anyway",)),
    "receipts": ("record.receipts", ("state", "family", "host", "end", "preset", "signers", "gaps", "head", "full")),
    "status": ("record.status", ("silent", "format")),
    "report": ("record.report", ("out", "anyway")),
    "scale": ("record.scale", ("gpus", "batch", "network")),
    "inspect": ("run.inspect", ("receipts", "seconds")),
    "patch": ("host.patch", ("onto", "commits", "format")),
    "stack": ("host.stack", ("lock", "wheels", "disk", "also")),
}


def main() -> NoReturn:
    finish(command)


def command() -> int:
    verb, *rest = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(called(__doc__ or ""))
        return OK
    if verb in WITH_A_RECIPE:
        from launch import app

        app.run(verb, rest)
    if verb not in OPTIONS:
        raise Refused(f"no verb `{verb}`", hint=f"there are: {', '.join((*WITH_A_RECIPE, *OPTIONS))}")
    place, options = OPTIONS[verb]
    module = import_module(f"launch.{place}")  # each imports what it needs only
    if {"-h", "--help"} & set(rest):
        keys = " ".join(f"[{key}=...]" for key in options)
        print(called(f"{module.__doc__}\npython -m launch {verb} ... {keys}"))
        return OK
    raise_if_twice(word.removeprefix("--").partition("=")[::2] for word in rest if word.startswith("--") or "=" in word)
    return module.command(*parse(rest, options))


if __name__ == "__main__":
    main()
