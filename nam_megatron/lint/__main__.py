"""The command: python -m nam_megatron.lint train.sh"""

import argparse
import difflib
import sys
from collections.abc import Iterable

from nam_megatron.errors import OK, REFUSED, Refused, finish, raise_if_twice
from nam_megatron.lint import Report, flops, lint, report
from nam_megatron.lint.read import of_file
from nam_megatron.lint.rules import BY_ID
from nam_megatron.parser import Parser

KEYS = {
    "format": "text (default) or json",
    "gpus": "world size, where the text does not say",
    "ignore": "rules to leave out, comma-separated",
    "flops": "true: also the operations of a token, by kind of layer, as the nearest recipe of ours has them",
    "recipe": "a file NAME.yaml: write the nearest recipe of ours there, a preset for conf/preset, over an earlier one of lint's alone",
}
EXAMPLES = """
keys:
{keys}

examples:
  python -m nam_megatron.lint train.sh                       what this script trains, and the traps it steps in
  python -m nam_megatron.lint - < flags.txt                  the same of a list of flags
  python -m nam_megatron.lint model_config.yaml gpus=16      a YAML of flags does not say on how many GPUs
  python -m nam_megatron.lint run_config.yaml gpus=8         a container of Megatron-Bridge's
  python -m nam_megatron.lint config.json recipe=mine.yaml   a model of Hugging Face's as a recipe; its folder will do
  python -m nam_megatron.lint runs/pretrain gpus=8           the arguments that a checkpoint stores
  python -m nam_megatron.lint out/plan.json                  what a plan of ours trains: all that no flag says, too
  python -m nam_megatron.lint train.sh recipe=mine.yaml      and write the nearest recipe of ours
  python -m nam_megatron.lint train.sh flops=true            and count its operations; its memory: `python -m nam_megatron.budget train.sh`
  python -m nam_megatron.lint train.sh format=json ignore=default-bias,default-activation

exit code: 0 nothing found, 1 findings, flags left open, or a recipe= that translate does not take as it stands, 2 refused: no launch in the
text, an edited plan.json, a wrong option
"""


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m nam_megatron.lint",
        usage="%(prog)s FILE [KEY=VALUE ...]",
        description="Which model a Megatron-Core 0.19.2 launch really trains, and which traps it steps in. Nothing is executed.",
        epilog=EXAMPLES.format(keys="\n".join(f"  {key:<7} {what}" for key, what in KEYS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a shell script, a list of flags, a YAML of flags, Megatron-Bridge's run_config.yaml, a config.json of Hugging Face, "
        "a Megatron checkpoint, or our plan.json; `-` is standard input",
    )
    parser.add_argument("options", nargs="*", default=[], metavar="KEY=VALUE", help=argparse.SUPPRESS)
    words, dashed = parser.parse_known_args(argv)  # `--format=json` is `format=json`
    try:
        options = _options([*words.options, *dashed])
        found = lint(of_file(words.file), words.file, options["gpus"], options["ignore"])
        counted = flops.of(found) if options["flops"] else None
        _print(found, options["format"], counted)
        return max(found.exit_code, _recipe(found, options["recipe"]) if options["recipe"] else OK)
    except Refused as refused:
        sys.stderr.write(refused.render())
        return REFUSED


def _options(words: list[str]) -> dict:
    found: dict = {"recipe": None, "format": "text", "gpus": None, "ignore": (), "flops": "false"}
    given = []
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals or key not in KEYS or not value:
            known = "; ".join(f"{k}={v}" for k, v in KEYS.items())
            raise Refused(f"`{word}` is no option", hint=f"{_meant(key, KEYS)}one FILE, and {known}")
        given.append((key, value))
    raise_if_twice(given)
    found |= given
    if found["flops"] not in ("true", "false"):
        raise Refused(f"`flops` is true or false, not `{found['flops']}`", key="flops")
    found["flops"] = found["flops"] == "true"
    if found["format"] not in ("text", "json"):
        raise Refused(f"no format `{found['format']}`", key="format", hint="there are: text, json")
    if found["gpus"] is not None:
        if not (found["gpus"].isascii() and found["gpus"].isdigit() and 0 < int(found["gpus"]) < 1_000_000):
            raise Refused(f"`{found['gpus']}` is no number of GPUs", key="gpus")
        found["gpus"] = int(found["gpus"])
    if found["ignore"]:
        found["ignore"] = tuple(found["ignore"].split(","))
        for name in found["ignore"]:
            if name not in BY_ID:
                raise Refused(f"no rule `{name}`", key="ignore", hint=_meant(name, BY_ID) + "docs/lint.md lists them")
    return found


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, [name for name in known if name != word], 1)
    return f"did you mean `{close[0]}`? " if close else ""


def _recipe(found: Report, out: str) -> int:
    from nam_megatron.lint import recipe  # Hydra, only for those who want it

    made = recipe.write(found, out)
    sys.stderr.write("\n" + made.text())
    return made.exit_code


def _print(found: Report, form: str, counted: "flops.Counted | None") -> None:
    if form == "json":
        sys.stdout.write(report.as_json(found, {"flops": counted.data()} if counted else {}))
        return
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    if not out.is_terminal:
        sys.stdout.write(report.text(found) + (f"\n{counted.text()}" if counted else ""))
        return
    for line in report.lines(found, max(60, min(out.width, 120))):
        out.print(
            "".join(text for text, _ in line) if out.no_color else Text.assemble(*line), soft_wrap=True, markup=False
        )
    if counted:
        out.print(f"\n{counted.text()}", soft_wrap=True, markup=False, end="")


if __name__ == "__main__":
    finish(main)
