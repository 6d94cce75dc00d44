"""python -m launch VERB ...

  show conf=NAME ...            the plan, its settings, the environment and the exact command; touches nothing
  check conf=NAME ...           preflight: is this host fit to run it?
  run conf=NAME ...             check, train, and leave a receipt
  compare RECEIPT RECEIPT ...   what differs, in config and figures (--anyway: even where it means nothing)
  receipts [DIR] [KEY=VALUE]    list them: state= family= host= end= preset=
  inspect RUN                   look at a run that hangs or has died, each question bounded in time
  patch apply|verify|export     patches/ onto Megatron
  stack                         the pinned packages and the steps that install them

`show`, `check` and `run` take a recipe as `python -m nam_megatron.translate` does; `--help` after them lists their keys.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from launch.words import parse
from nam_megatron.errors import OK, REFUSED, Problem, Refused

WITH_A_RECIPE = ("show", "check", "run")
# Verb -> its options, written KEY=VALUE.
OPTIONS = {
    "compare": ("anyway",),
    "receipts": ("state", "family", "host", "end", "preset"),
    "inspect": ("receipts", "seconds"),
    "patch": ("onto", "commits"),
    "stack": ("lock",),
}


def main() -> NoReturn:
    verb, *rest = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(__doc__)
        sys.exit(OK)
    if verb in WITH_A_RECIPE:
        from launch import app

        app.run(verb, rest)
    try:
        if verb not in OPTIONS:
            raise Refused(Problem(f"no verb `{verb}`", None, f"there are: {', '.join((*WITH_A_RECIPE, *OPTIONS))}"))
        if {"-h", "--help"} & set(rest):
            print(__doc__)
            sys.exit(OK)
        code = plain(verb, *parse(rest, OPTIONS[verb]))
        sys.stdout.flush()
        sys.exit(code)
    except Refused as refused:
        sys.stderr.write(refused.render())
        sys.exit(REFUSED)
    except BrokenPipeError:  # `| head` has read enough
        sys.stderr.close()
        sys.exit(OK)


def plain(verb: str, names: Sequence[str], options: Mapping[str, str]) -> int:
    """The verbs without a recipe; each imports its own module only."""
    if verb == "compare":
        from launch import compare as module
    elif verb == "receipts":
        from launch import receipts as module
    elif verb == "inspect":
        from launch import inspect as module
    elif verb == "patch":
        from launch import patch as module
    else:
        from launch import stack as module
    return module.command(names, options)


if __name__ == "__main__":
    main()
