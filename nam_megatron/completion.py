"""nam completion SHELL: what a shell evaluates to complete `nam` by itself, `eval "$(nam completion bash)"` or zsh

What may stand at the cursor is asked of `nam complete WORDS`, one candidate a line; where there is none, the shell offers files.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nam_megatron.commands import ARGPARSE, COMMANDS, LISTS, RECIPES, of
from nam_megatron.errors import OK, Refused, finish

# bash parts words at `=`: the word under the cursor is taken from the line itself, and what it has before the last break is cut off again.
BASH = r"""_nam() {
  local line=${COMP_LINE:0:COMP_POINT} candidate word
  local -a asked candidates
  read -ra asked <<< "$line"
  [[ $line == *[[:space:]] ]] && asked+=("")
  word=${asked[-1]}
  mapfile -t candidates < <(nam complete "${asked[@]}" 2>/dev/null)
  COMPREPLY=("${candidates[@]}")
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
  if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
  fi
}
complete -o default -o nosort -F _nam nam
"""
ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
_nam() {
  local -a candidates open closed
  candidates=("${(@f)$(nam complete ${words[1,CURRENT]} 2>/dev/null)}")
  open=(${(M)candidates:#*[=.]}) closed=(${candidates:#*[=.]})
  [[ -n ${closed[*]} ]] && compadd -- $closed
  [[ -n ${open[*]} ]] && compadd -S '' -- $open
  [[ -n ${candidates[*]} ]] || _files
}
compdef _nam nam
"""
SHELLS = {"bash": BASH, "zsh": ZSH}
WITH_RECIPE = ("show", "check", "run", "dump", "pretrain", "finetune")


# A shell takes no other word as it stands: the name of a file may be a line break or `$(command)`.
PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+")


def complete(words: Sequence[str]) -> list[str]:
    """Candidates for the last of `words`, which begin with the program's name and are as far as the cursor."""
    before, word = list(words[1:-1]), (words[-1] if len(words) > 1 else "")
    return sorted({found for found in _candidates(before, word) if found.startswith(word) and PLAIN.fullmatch(found)})


def _candidates(before: Sequence[str], word: str) -> Iterator[str]:
    if not before:
        yield from (*COMMANDS, "--help", "--version")
        return
    name, said = before[0], before[1:]
    if name == "list":
        yield from () if said else LISTS
    elif name == "completion":
        yield from () if said else SHELLS
    elif name == "card":
        yield from names("preset", said)
    elif name in ARGPARSE:
        yield from _argparse(name, said, word)
    elif name in RECIPES:
        yield from recipe(name, said, word)
    elif name in ("launch", "nemo"):
        yield from _verbs(name, said, word)


def _argparse(name: str, said: Sequence[str], word: str) -> Iterator[str]:
    from importlib import import_module

    parser = import_module(ARGPARSE[name]).parser()
    verbs = next((action.choices for action in parser._actions if action.dest == "verb"), None)
    if verbs and not said:
        yield from verbs
    else:
        options = of(parser, said)
        if word.startswith("-"):  # the module's own grammar
            yield from (f"--{option}{'' if flag else '='}" for option, flag in options.items())
        else:
            yield from (f"{option}=" for option in options)


def _verbs(name: str, said: Sequence[str], word: str) -> Iterator[str]:
    if name == "nemo":
        verbs: dict[str, tuple[str, ...]] = dict.fromkeys(("list", "dump", "pretrain", "finetune", "doctor"), ())
    else:
        from launch.__main__ import OPTIONS, WITH_A_RECIPE

        verbs = {**dict.fromkeys(WITH_A_RECIPE, ()), **{verb: options for verb, (_, options) in OPTIONS.items()}}
    if not said:
        yield from verbs
    elif said[0] in WITH_RECIPE:
        yield from recipe(name, said[1:], word)
    elif said[0] in ("compare", "report", "inspect"):
        yield from (f"{option}=" for option in verbs[said[0]])
        yield from (str(path.parent) for path in Path("receipts").glob("*/receipt.json"))
    elif said[0] == "patch":
        yield from ("list", "apply", "verify", "export")
    else:
        yield from (f"{option}=" for option in verbs.get(said[0], ()))


def recipe(config: str, said: Sequence[str], word: str) -> Iterator[str]:
    """`conf=` and groups with their files, the command's own keys, a recipe's keys piece by piece, the words that may stand there."""
    from nam_megatron.recipe import conf_dir
    from nam_megatron.recipe.keys import values_at

    key, equals, _ = word.partition("=")
    groups = [
        path.name
        for path in conf_dir().iterdir()
        if path.is_dir() and path.name not in ("preset", "overlay", "feature")
    ]
    if equals:
        group = {"conf": "preset", "diff": "preset", "against": "preset", "+overlay": "overlay"}.get(key, key)
        if key == "list":
            yield from (f"list={name}" for name in LISTS)
        elif (conf_dir() / group).is_dir():
            yield from (f"{key}={name}" for name in names(group, said))
        else:
            yield from (f"{key}={value}" for value in values_at(key))
        return
    yield from ("conf=", "+overlay=", "--config-dir", *(f"{group}=" for group in groups))
    own = (conf_dir() / f"{config}.yaml").read_text(encoding="utf-8").partition("\nhydra:")[0]
    yield from (
        f"{line.partition(':')[0]}="
        for line in own.splitlines()
        if line[:1].isalpha() and not line.startswith("defaults")
    )
    depth = word.count(".") + 1
    for path in _keys():
        parts = path.split(".")
        yield ".".join(parts[:depth]) + ("=" if len(parts) == depth else ".")


def names(group: str, said: Sequence[str]) -> Iterator[str]:
    """The files of a group, those of a folder of one's own (`--config-dir`) among them."""
    from nam_megatron.recipe import conf_dir

    own = [said[at + 1] for at, word in enumerate(said[:-1]) if word in ("--config-dir", "-cd")]
    own += [word.partition("=")[2] for word in said if word.startswith("--config-dir=")]
    for folder in (conf_dir(), *map(Path, own)):
        yield from (path.stem for path in (folder / group).glob("*.yaml"))


def _keys() -> Iterator[str]:
    from nam_megatron.schema import configs
    from nam_megatron.words.setting import section

    for prefix, config in configs():
        if "NAME." not in prefix:
            yield from (prefix + name for name, field in config.model_fields.items() if not section(field.annotation))


def command() -> int:
    words = sys.argv[1:]
    if len(words) != 1 or words[0] not in (*SHELLS, "-h", "--help"):
        raise Refused("`completion` takes a shell", hint="`nam completion bash`, or zsh")
    print(SHELLS.get(words[0]) or (__doc__ or "").rstrip())
    return OK


if __name__ == "__main__":
    finish(command)
