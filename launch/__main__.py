"""python -m launch VERB ...

  patch apply|verify|export     patches/ onto Megatron
"""

import sys
from typing import NoReturn

from launch import patch
from launch.words import parse
from nam_megatron.errors import OK, REFUSED, Problem, Refused


def main() -> NoReturn:
    verb, *rest = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(__doc__)
        sys.exit(OK)
    try:
        if verb != "patch":
            raise Refused(Problem(f"no verb `{verb}`", None, "there is: patch"))
        sys.exit(patch.command(*parse(rest, ("onto", "commits"))))
    except Refused as refused:
        sys.stderr.write(refused.render())
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
