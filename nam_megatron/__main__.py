"""python -m nam_megatron COMMAND ...: each command is a module of its own

  python -m nam_megatron.translate conf=NAME    what Megatron must be told, or why it cannot be
  python -m nam_megatron.verify conf=NAME       do Megatron's own parser and configs agree?
  python -m nam_megatron.prove conf=NAME        does its layout compute the same model as one rank?
  python -m nam_megatron.budget conf=NAME       does it fit, and what does it cost?
  python -m nam_megatron.lint FILE              which model does any Megatron command line train?
  python -m nam_megatron.data VERB ...          text to Megatron's indexed datasets
  python -m nam_megatron.hf VERB ...            a checkpoint that transformers opens, and back
  python -m nam_megatron.generate PATH ...      text from an export or a checkpoint
  python -m nam_megatron.nemo TASK ...          the same recipes under Megatron-Bridge
  python -m nam_megatron.schema                 JSON Schema of the files in conf/
  python -m launch VERB ...                     run it, with a receipt

`--help` after any of them says more.
"""

import sys

from nam_megatron.errors import OK, Problem, Refused, finish


def command() -> int:
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        name = sys.argv[1]
        raise Refused(Problem(f"no word `{name}` here", hint="`python -m nam_megatron` lists the commands"))
    print(__doc__)
    return OK


if __name__ == "__main__":
    finish(command)
