"""The command: python -m nam_megatron.hf {export, import, check, refresh, perplexity, evaluate, watch} ..."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from nam_megatron.errors import FINDINGS, OK, Problem, Refused, finish, keyless, likely, not_there, raise_if
from nam_megatron.hf import KERNELS
from nam_megatron.parser import Parser
from nam_megatron.words.argtypes import between, count, whole
from nam_megatron.words.taken import taken

EXAMPLES = """
examples:
  python -m nam_megatron.hf export runs/ckpt out/hf                        the newest step; the tokenizer of the run's dataset
  python -m nam_megatron.hf check runs/ckpt out/hf --device cuda           the same tokens through Megatron and the export
  python -m nam_megatron.hf refresh out/hf                                 the present code in the place of an older export's
  python -m nam_megatron.hf import out/hf plan.json runs/again             weights that `schedule.load=runs/again` starts from
  python -m nam_megatron.hf perplexity out/hf set --device cuda            on the held-out documents of a built dataset
  python -m nam_megatron.hf evaluate runs/ckpt arc_easy,own.yaml           by lm-evaluation-harness; names of its tasks, or files
  python -m nam_megatron.hf watch runs/ckpt out/steps --dataset set        each checkpoint as it appears, beside the run

docs/checkpoints.md says more. Exit code: 0 done, 1 check found a difference, 2 refused.
"""


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m nam_megatron.hf",
        description="Megatron checkpoints in Hugging Face's form.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, what: str, *paths: tuple[str, str]) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=what, description=what)
        for path, about in paths:
            made.add_argument(path, type=Path, metavar=path.upper(), help=about)
        return made

    made = verb("export", "Write a checkpoint so that transformers opens it.",
                ("checkpoint", "the folder of a run's checkpoints, or of one step"), ("out", "a new folder"))  # fmt: skip
    made.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="where the run had no dataset of ours")
    made.add_argument("--as", dest="form", default="nam", metavar="FORM",
                      help="nam: with code of ours (default); native: in its published architecture, where it has one; a `model_type`, "
                      "as glm4_moe_lite: in that one, where several compute the model; peft: a run's adapters by "
                      "themselves, as peft reads them")  # fmt: skip
    made.add_argument("--shard-gb", type=between(0.001, 1000), default=4.0, help="size of a file at most (default: 4)")
    made = verb("import", "Write an export, or weights as others publish them, as weights that a run starts from.",
                ("export", "an export's folder, or a published one"), ("plan", "the run's plan.json"), ("out", "a new folder"))  # fmt: skip
    made.add_argument("--without-mtp", action="store_true", help="leave out published layers of token prediction")
    verb("refresh", "Give an older export the present code, in place; weights stay.", ("export", "an export's folder"))
    made = verb("check", "Compare an export with its checkpoint in Megatron.",
                ("checkpoint", "what was exported"), ("export", "the export's folder"))  # fmt: skip
    made.add_argument(
        "--length", type=count, help="tokens of a sequence (default: as many as show what the model chooses)"
    )
    made.add_argument("--batch", type=count, default=2, help="sequences (default: 2)")
    made.add_argument("--seed", type=whole, default=0, help="of the tokens, which are random")
    made.add_argument("--dataset", type=Path, metavar="FOLDER", help="its held-out text instead of random tokens")
    made.add_argument(
        "--plain", action="store_true", help="Megatron's side without our kernels, whose rounding bf16 shows"
    )
    made.add_argument("--json", action="store_true", help="for programs")
    _where(made, "cuda")
    made = verb("perplexity", "The loss on a dataset that `nam_megatron.data` built.",
                ("model", "an export or a checkpoint"), ("dataset", "the dataset's folder"))  # fmt: skip
    made.add_argument("--split", default="valid")
    made.add_argument("--most", type=count, metavar="WINDOWS", help="of the model's length, to read")
    made.add_argument("--batch", type=count, default=4)
    made.add_argument("--out", type=Path, metavar="JSON", help="write the result there too")
    _where(made, "cpu")
    _kernels(made)
    made = verb("evaluate", "The tasks of lm-evaluation-harness.", ("model", "an export or a checkpoint"))
    made.add_argument("tasks", metavar="TASK,...", help="names that the harness knows, or YAML files of your own")
    made.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="where neither the export nor the run's dataset has one"
    )
    made.add_argument("--shots", type=whole, help="examples before a question (default: the task's)")
    made.add_argument("--limit", type=count, help="questions of each task (default: all)")
    made.add_argument("--batch", type=count, default=4)
    made.add_argument("--out", type=Path, metavar="JSON", help="write the result there too")
    _where(made, "cpu")
    _kernels(made)
    made = verb("watch", "Export every checkpoint of a run as it appears, without stopping the run.",
                ("checkpoint", "the folder of the run's checkpoints"), ("out", "where the exports go"))  # fmt: skip
    made.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="where the run has no dataset of ours")
    made.add_argument("--dataset", type=Path, metavar="FOLDER", help="write the perplexity on its held-out split too")
    made.add_argument("--until", type=count, metavar="STEP", help="end after this one (default: never)")
    made.add_argument("--seconds", type=between(0.01, 1e6), default=20.0, help="between two looks (default: 20)")
    made.add_argument("--device", default="cpu", help="(default: cpu)")
    return top


def _where(made: argparse.ArgumentParser, device: str) -> None:
    made.add_argument("--device", default=device, help=f"(default: {device})")
    made.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")


def _kernels(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--kernels", choices=KERNELS, default="torch", help="what computes: plain torch (default), or ours, on a GPU"
    )


def main(argv: list[str] | None = None) -> int:
    words = parser().parse_args(argv)

    def asked() -> int:
        if words.verb != "watch":  # which waits for its folder; others would tell seconds later, with torch loaded
            paths = (getattr(words, name, None) for name in ("checkpoint", "export", "plan", "model"))
            raise_if(not_there(path) for path in paths if path and not path.exists())
        if out := getattr(words, "out", None):
            # A result may lie beside the record of its run, in the place of none of its files.
            raise_if(taken(out.parent, beside_record=not out.exists()))
        return VERBS[words.verb](words)

    return keyless(asked)


def _progress(text: str) -> None:
    print(f"> {text}", file=sys.stderr, flush=True)


def _export(words: argparse.Namespace) -> int:
    from nam_megatron.hf import export, families, native

    forms = ("nam", "native", "peft", *families.known())
    if words.form not in forms:
        close = likely(words.form, forms)
        hint = f"did you mean `{close}`?" if close else f"there are: {', '.join(forms)}"
        raise Refused(f"`--as`: no form `{words.form}`", hint=hint)
    if words.form == "peft":
        given = [
            name for name, value in (("--tokenizer", words.tokenizer), ("--shard-gb", words.shard_gb != 4.0)) if value
        ]
        hint = "adapters are one file, and go with the published model's own tokenizer"
        raise_if(Problem(f"`--as peft` has no use for `{name}`", hint=hint) for name in given)
        kind = native.peft(words.checkpoint, words.out, _progress)
        print(f"{words.out}: adapters for a {kind} of transformers, which peft reads")
        return OK
    if words.form != "nam":
        named = None if words.form == "native" else words.form
        kind = native.export(
            words.checkpoint, words.out, words.tokenizer, _progress, int(words.shard_gb * 2**30), named
        )
        print(f"{words.out}: a {kind} of transformers")
        return OK
    made = export.export(words.checkpoint, words.out, words.tokenizer, _progress, int(words.shard_gb * 2**30))
    print(f"{words.out}: {made['step']}, weights {made['weights'][:16]}, {len(made['files'])} files")
    return OK


def _import(words: argparse.Namespace) -> int:
    from nam_megatron.hf import export, native

    if native.is_published(words.export):
        native.load(words.export, words.plan, words.out, words.without_mtp, _progress)
    elif words.without_mtp:
        raise Refused(f"`{words.export}` is an export of ours: it has the plan's own layers", key="--without-mtp")
    else:
        export.load(words.export, words.plan, words.out, _progress)
    print(f"{words.out}: start from it with `schedule.load={words.out}`")
    return OK


def _refresh(words: argparse.Namespace) -> int:
    from nam_megatron.hf import export

    old = export.refresh(words.export)
    print(f"{words.export}: {', '.join(old)} replaced" if old else f"{words.export}: its code is the present one")
    return OK


def _check(words: argparse.Namespace) -> int:
    import torch

    from nam_megatron.data.manifest import TOKENIZER
    from nam_megatron.hf import check, export, opened, perplexity

    config = export.config_of(words.export)
    length = words.length or check.length(config.to_dict())
    if words.dataset:
        raise_if(opened.another_tokenizer(words.export, words.dataset / TOKENIZER))
        tokens = perplexity.held_out(words.dataset, config.vocab_size, words.batch, length)
    else:
        generator = torch.Generator().manual_seed(words.seed)
        tokens = torch.randint(0, config.vocab_size, (words.batch, length), generator=generator)
    outcome = check.check(words.checkpoint, words.export, tokens, words.dtype, words.device, words.plain)
    if words.json:
        print(json.dumps(outcome.as_dict(), indent=1))
    else:
        print("\n".join(check.report(outcome, config.layer_kinds)))
    if outcome.passed:
        return OK
    if other := check.of_another(words.checkpoint, words.export):
        _progress(other)
    return FINDINGS


def _perplexity(words: argparse.Namespace) -> int:
    from nam_megatron.hf import perplexity
    from nam_megatron.hf.opened import DTYPES

    dtype = DTYPES[words.dtype]
    where = (dtype, words.device, words.kernels, _progress)
    made = perplexity.perplexity(words.model, words.dataset, words.split, words.most, words.batch, *where)
    return _told(made, words.out)


def _evaluate(words: argparse.Namespace) -> int:
    from nam_megatron.hf import evaluate
    from nam_megatron.hf.opened import DTYPES

    dtype = DTYPES[words.dtype]
    more = (words.tokenizer, words.shots, words.limit, words.batch, dtype, words.device, words.kernels)
    with contextlib.redirect_stdout(sys.stderr):  # what datasets and the harness print
        made = evaluate.evaluate(words.model, words.tasks.split(","), *more)
    print(evaluate.table(made), file=sys.stderr)
    return _told(made, words.out)


def _told(made: dict, out: Path | None) -> int:
    text = json.dumps(made, indent=1, default=str)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    return OK


def _watch(words: argparse.Namespace) -> int:
    from nam_megatron.hf import watch

    watch.watch(
        words.checkpoint, words.out, words.tokenizer, words.dataset, words.device, words.until, words.seconds, _progress
    )
    return OK


VERBS = {
    "export": _export,
    "import": _import,
    "check": _check,
    "refresh": _refresh,
    "perplexity": _perplexity,
    "evaluate": _evaluate,
    "watch": _watch,
}


if __name__ == "__main__":
    finish(main)
