"""How the launcher is called here: in a checkout it lies beside the package, in a wheel inside it."""

import re
from pathlib import Path

MODULE = re.compile(r"python -m nam_megatron\.(translate|verify|prove|budget|lint|data|hf|generate|nemo|launch)\b")
LIST = re.compile(r"`list=(\w+)`")
BESIDE = Path(__file__).parent / "beside"
PROGRAM = "python -m nam_megatron.launch" if BESIDE.is_dir() else "python -m launch"


_nam = False  # whether this process is the program `nam`


def by_nam() -> None:
    """From here on commands are called as `nam` has them."""
    global _nam
    _nam = True


def called(text: str) -> str:
    """A text that names the launcher and other commands, by the names that they have here."""
    if _nam:
        text = LIST.sub(r"`nam list \1`", text)
        return MODULE.sub(r"nam \1", text.replace("python -m launch ", "nam launch "))
    return text.replace("python -m launch ", f"{PROGRAM} ")
