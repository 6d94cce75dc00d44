"""The command: python -m nam_megatron.data {corpus, tokenizer, build, check} ..."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nam_megatron.errors import FINDINGS, OK, Refused, finish, keyless, raise_if, shown, without_keys
from nam_megatron.parser import Parser
from nam_megatron.words.argtypes import count
from nam_megatron.words.taken import taken

if TYPE_CHECKING:  # `--help` waits for no pydantic
    from nam_megatron.data import manifest, sources

EXAMPLES = """
examples:
  python -m nam_megatron.data corpus cpp.jsonl --from torch                  C++ that an installed package carries
  python -m nam_megatron.data tokenizer bpe cpp.jsonl --entries 65536        train a tokenizer on it
  python -m nam_megatron.data build set cpp.jsonl --tokenizer bpe            encode: set/{train,valid}.{bin,idx}, set/manifest.json
  python -m nam_megatron.data check set --vocabulary 65536                   read it again, every byte
  python -m nam_megatron.translate conf=nam56r_smoke data=built data.path=set

Text is a JSONL or Parquet file with a field `text`, or a folder of source files (--suffix .h --suffix .cpp). A killed build goes on
where it was. Exit code: 0 done, 1 check found something, 2 refused.
"""


class Once(argparse.Action):
    """An option that is given twice is refused: the last would win."""

    given = False

    def __call__(self, parser, namespace, values, option_string=None):
        if self.given:
            raise argparse.ArgumentError(self, "given twice")
        self.given = True
        setattr(namespace, self.dest, values)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m nam_megatron.data",
        description="Text and source files to Megatron indexed datasets.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, what: str, out: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=what, description=what)
        made.register("action", None, Once)
        made.add_argument("out", type=Path, metavar=out)
        return made

    def read(made: argparse.ArgumentParser) -> None:
        made.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help="a .jsonl, a .parquet, or a folder")
        made.add_argument("--field", help="key or column of the text (default: text)")
        made.add_argument("--suffix", action="append", default=[], help="which files of a folder; may be repeated")
        skipped = "leave this input, file of a folder, or FILE:LINE out; may be repeated"
        made.add_argument("--skip", action="append", default=[], metavar="PLACE", help=skipped)

    made = verb("corpus", "Write the C++ files of installed packages as JSONL.", "FILE.jsonl")
    made.add_argument("--from", dest="packages", action="append", required=True, metavar="PACKAGE")
    made = verb("tokenizer", "Train a byte-level BPE tokenizer.", "FOLDER")
    read(made)
    made.add_argument("--entries", type=count, required=True, help="size of the vocabulary, special tokens included")
    made = verb("build", "Encode text into a dataset for `data=built`.", "FOLDER")
    read(made)
    made.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER")
    made.add_argument("--valid", type=_share, default=0.01, help="share of documents held out (default: 0.01)")
    made.add_argument("--duplicates", choices=("refuse", "drop", "keep"), default="refuse")
    made.add_argument("--workers", type=count, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    made = verb("check", "Read a built dataset again and compare it with its manifest.", "FOLDER")
    made.add_argument("--vocabulary", type=count, help="of the model it is for")
    return top


def _share(word: str) -> float:
    try:
        share = float(word)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"`{word}` is no share between 0 and 1")
    return share


def main(argv: list[str] | None = None) -> int:
    words = parser().parse_args(argv)
    verbs = {"corpus": _corpus, "tokenizer": _tokenizer, "build": _build, "check": _check}

    def asked() -> int:
        if words.verb != "check":  # which writes nothing
            raise_if(taken(words.out.parent if words.verb == "corpus" else words.out))
        return verbs[words.verb](words)

    return keyless(asked)


def _sources(words: argparse.Namespace) -> "list[sources.Source]":
    from nam_megatron.data import sources

    field = "text" if words.field is None else words.field
    found = [sources.source(path, field, tuple(words.suffix)) for path in words.inputs]
    trees = sum(source.kind == "tree" for source in found)
    if words.suffix and not trees:
        raise Refused("`--suffix` is of the files of a folder, and no input is one", hint="leave it out")
    if words.field is not None and trees == len(found):
        raise Refused("`--field` is of JSONL and Parquet, and every input is a folder", hint="leave it out")
    return found


def _corpus(words: argparse.Namespace) -> int:
    from nam_megatron.data import corpus

    counts = corpus.write(words.out, words.packages)
    print(f"{words.out}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    return OK


def _tokenizer(words: argparse.Namespace) -> int:
    from nam_megatron.data import sources, tokenizer

    def texts():
        for source in sources.without(_sources(words), words.skip):
            for piece in sources.pieces(source):
                for at, text in sources.documents(piece):
                    if not isinstance(text, str):
                        raise Refused(f"{sources.place(piece, at)}: {text}")
                    yield text

    if words.out.exists() and not (words.out.is_dir() and not any(words.out.iterdir())):
        raise Refused(tokenizer.taken(words.out))
    tokenizer.save(tokenizer.train(texts(), words.entries, progress=sys.stderr.isatty()), words.out)
    print(f"{words.out}: {words.entries:,} entries")
    return OK


def _build(words: argparse.Namespace) -> int:
    from nam_megatron import installed

    installed.ask()
    from nam_megatron.data import build

    options = build.Options(words.tokenizer, words.valid, words.duplicates, words.workers, tuple(words.skip))
    _print(words.out, build.build(words.out, _sources(words), options))
    return OK


def _check(words: argparse.Namespace) -> int:
    from nam_megatron import installed
    from nam_megatron.data import manifest

    manifest.read(words.out)  # whether there is one is not asked seconds later, with Megatron loaded
    installed.ask()
    from nam_megatron.data import build

    made, problems = build.check(words.out, words.vocabulary)
    if problems:
        sys.stderr.write(without_keys(problems).render())
        return FINDINGS
    _print(words.out, made)
    return OK


def _print(folder: Path, made: "manifest.Manifest") -> None:
    for name, split in made.splits.items():
        print(f"{folder / name}: {split.documents:,} documents, {split.tokens:,} tokens")
    print(f"vocabulary {made.vocabulary:,}; left out: {made.duplicates:,} duplicates, {made.empty:,} empty documents")
    if made.skipped:
        print(shown(f"left out by `--skip`: {', '.join(made.skipped)}"))


if __name__ == "__main__":
    finish(main)
