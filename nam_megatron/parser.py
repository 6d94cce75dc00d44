"""argparse's parser for a command of ours: called as the command is, and a wrong word is a refusal like any other."""

import argparse
from typing import Any, NoReturn

from nam_megatron.errors import Refused
from nam_megatron.launcher import called


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, **more: Any):
        super().__init__(prog=called(prog), **more)

    def error(self, message: str) -> NoReturn:
        wanted = (one for one in self._actions if one.required or not one.option_strings)
        named = " ".join(" ".join((*one.option_strings[:1], str(one.metavar or one.dest))) for one in wanted)
        raise Refused(message, hint=f"it is `{self.prog} {named}`; `{self.prog} --help` says more")
