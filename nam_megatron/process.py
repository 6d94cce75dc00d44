"""What this process was started as, and whether somebody has ended it. Imports next to nothing: the package's first line does it."""

import sys

# Whether this is the program `nam` of an installed package, not a module of ours.
PROGRAM = sys.argv[:1] != ["-m"] and sys.orig_argv[1:2] == sys.argv[:1] and sys.argv[0].rpartition("/")[2] == "nam"
interrupted = False  # by a Ctrl-C that nothing else handles: what a library made of it since is no error of its own


def started() -> str:
    """The module that this process was started with: `nam_megatron.verify` of `python -m nam_megatron.verify`; empty where it was none."""
    if PROGRAM:
        return f"nam_megatron.{sys.orig_argv[2]}" if len(sys.orig_argv) > 2 else ""
    return next((sys.orig_argv[i + 1] for i, word in enumerate(sys.orig_argv[:-1]) if word == "-m"), "")


def ours(err: ModuleNotFoundError) -> bool:
    """Whether a module of this package's own is missing, which nothing installs."""
    return (err.name or "nam_megatron").partition(".")[0] in ("nam_megatron", "launch")
