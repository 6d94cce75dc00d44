"""What `nam` has: its commands, and whose words argparse reads and whose Hydra."""

from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Sequence

# Command -> its module. Each is imported when it is asked for.
COMMANDS = {
    "translate": "nam_megatron.translate",
    "verify": "nam_megatron.verify",
    "prove": "nam_megatron.prove",
    "budget": "nam_megatron.budget",
    "list": "nam_megatron.translate",
    "card": "nam_megatron.card",
    "launch": "nam_megatron.launch",
    "nemo": "nam_megatron.nemo",
    "lint": "nam_megatron.lint",
    "migrate": "nam_megatron.migrate",
    "data": "nam_megatron.data",
    "hf": "nam_megatron.hf",
    "generate": "nam_megatron.generate",
    "doctor": "nam_megatron.doctor",
    "completion": "nam_megatron.completion",
}
# Whose options argparse reads: module -> where their parser is.
ARGPARSE = {"data": "nam_megatron.data.__main__", "hf": "nam_megatron.hf.__main__", "generate": "nam_megatron.generate"}
# What `nam list` lists.
LISTS = ("presets", "overlays", "lanes", "clusters", "kinds", "features", "keys", "laws")
# Whose keys Hydra reads; each has a config of its name in conf/.
RECIPES = ("translate", "verify", "prove", "budget")


def of(parser: ArgumentParser, words: Sequence[str]) -> dict[str, bool]:
    """The options of the verb among `words`: name -> whether it is a flag."""
    verbs = next((a.choices for a in parser._actions if isinstance(a, _SubParsersAction)), {})
    parser = next((verbs[word] for word in words if word in verbs), parser)
    return {
        option.removeprefix("--"): action.nargs == 0
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }
