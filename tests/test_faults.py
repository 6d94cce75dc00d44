"""Faults while commands write: a failing call, rename or disk, a kill, at each thing that they ask of the system below their folder.

    python tests/test_faults.py [count=160] [seed=1] > benchmarks/faults_of_commands.json

Whatever happens: no traceback, nothing under the name that was asked for but the whole of it, and the same command afterwards makes it.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # as a program

import inject  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402, F401  before a fork

from launch.host import host_id  # noqa: E402
from launch.record import report  # noqa: E402
from nam_megatron import translate  # noqa: E402
from nam_megatron.blocks.exported import Tensor  # noqa: E402
from nam_megatron.compile.lower import Lowering  # noqa: E402
from nam_megatron.compile.lower import translate as compiled  # noqa: E402
from nam_megatron.data import __main__ as data  # noqa: E402
from nam_megatron.data import build, manifest, tokenizer  # noqa: E402
from nam_megatron.errors import finish, keyless  # noqa: E402
from nam_megatron.hf import folder  # noqa: E402
from nam_megatron.recipe import load  # noqa: E402

FAULTS = ("SIGKILL", *inject.ERRORS)
TEXTS = [f"int f{i}(int x) {{ return {i * 37} * x; }}\n" for i in range(40)]


def make_tokenizer(at: Path) -> int:
    return data.main(["tokenizer", str(at / "made"), str(at / "t.jsonl"), "--entries", "270"])


def make_dataset(at: Path) -> int:
    words = [
        "build", str(at / "made"), str(at / "t.jsonl"), "--tokenizer", str(at / "bpe"), "--valid", "0.2", "--workers", "1",
    ]  # fmt: skip
    return data.main(words)


def make_export(at: Path) -> int:
    """As an export and an import make their folder."""
    tensors = [Tensor("a.weight", (("x", (4, 4)),)), Tensor("b.weight", (("y", (4,)),))]

    def made() -> int:
        with folder.making(at / "made") as part:
            files = folder.shards(tensors, 40)
            hashes = {
                n: folder.write_shard(part / n, g, lambda t: torch.ones(t.shape, dtype=torch.bfloat16))
                for n, g in files
            }
            folder.write_index(part, files)
            folder.write_manifest(part, hashes, step=None, checkpoint=None, weights=folder.fingerprint(hashes))
        return 0

    return keyless(made)


def make_translation(at: Path) -> int:
    translate.write(lowering(), at / "made")
    return 0


def make_page(at: Path) -> int:
    report.put(at / "made.html", f"{report.MADE_BY}{'x' * 5000}")
    return 0


def make_name(at: Path) -> int:
    host_id.named(at / "made", {"gpus": "f" * 16}, "n1")
    return 0


@cache
def lowering() -> Lowering:
    return compiled(load("nam56r_smoke"))


def whole_translation(made: Path) -> None:
    """Of a first writing that was ended some files may be there, and are whole."""
    there = [path.name for path in made.iterdir() if not path.name.startswith(".")]
    assert {*there} <= {*translate.FILES}, there
    assert all((made / name).read_text() == translate.FILES[name][0](lowering()) for name in there)


def whole_page(made: Path) -> None:
    assert [path.stat().st_size > 5000 for path in made.parent.glob("made.html")] in ([], [True])


def whole_name(made: Path) -> None:
    assert host_id.hosts(made) in ({}, {"n1": "f" * 16})


def whole_tokenizer(made: Path) -> None:
    tokenizer.load(made)


def whole_dataset(made: Path) -> None:
    assert build.check(made, None)[1] == []


def whole_export(made: Path) -> None:
    folder.verified(made)


# What writes, what tells that the result is whole, and how many calls it has.
WRITERS: dict[str, tuple[Callable[[Path], int], Callable[[Path], None], int]] = {
    "tokenizer": (make_tokenizer, whole_tokenizer, 8),
    "dataset": (make_dataset, whole_dataset, 60),
    "export": (make_export, whole_export, 12),
    "translation": (make_translation, whole_translation, 14),
    "page": (make_page, whole_page, 3),
    "name of a host": (make_name, whole_name, 14),
}
AGAIN = ("dataset", "translation", "page", "name of a host")  # may be made over what is there of it


def forked(job: Callable[[], int]) -> tuple[int, str]:
    """(exit code, what it printed) of a process of its own; minus a signal's number where that ended it."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        said, code = io.StringIO(), 99
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                finish(job)
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                traceback.print_exc(file=said)
        os.write(write, said.getvalue().encode()[-4000:])
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        text = stream.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), text


def prepared(at: Path, writer: str) -> None:
    (at / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    if writer == "dataset":
        tokenizer.save(tokenizer.train(TEXTS, 270, progress=False), at / "bpe")


def tried(at: Path, writer: str, number: int, fault: str) -> str:
    """How the command ended. Raises AssertionError where that must not be."""
    make, whole, _ = WRITERS[writer]
    prepared(at, writer)

    def job() -> int:
        inject.at_call(number, fault, at / ".made" if writer == "page" else at / "made")
        return make(at)

    lowering()
    code, said = forked(job)
    assert "Traceback" not in said or code == 99, said
    assert code in (0, 2, -signal.SIGKILL), said
    there = (at / "made").exists() and any((at / "made").iterdir())
    if code == 0 or (there and writer != "dataset"):
        whole(at / "made")
    elif there:  # a dataset is one by its manifest, written last
        assert not (at / "made" / manifest.NAME).exists() or build.check(at / "made", None)[1] == []
    if code != 0 and (writer in AGAIN or not there):
        again, words = forked(lambda: make(at))
        assert again == 0, words
        whole(at / "made")
    return {0: "done", 2: "refused"}.get(code, "killed")


def drawn(count: int, seed: int) -> list[tuple[str, int, str]]:
    of = [
        (writer, number, fault)
        for writer, (_, _, calls) in WRITERS.items()
        for number in range(1, calls + 1)
        for fault in FAULTS
    ]
    random.Random(seed).shuffle(of)
    return of[:count]


@pytest.mark.few(3)
@pytest.mark.parametrize(("writer", "number", "fault"), drawn(12, 2))
def test_a_fault_while_a_command_writes(tmp_path, writer, number, fault):
    tried(tmp_path, writer, number, fault)


def main(words: list[str]) -> int:
    options = {k: int(v) for k, _, v in (word.partition("=") for word in words)}
    seen: Counter[tuple[str, str, str]] = Counter()
    for writer, number, fault in drawn(options.get("count", 1 << 20), options.get("seed", 0)):
        at = Path(tempfile.mkdtemp())
        try:
            end = tried(at, writer, number, fault)
        except (AssertionError, Exception) as wrong:
            end = "wrong"
            print(f"{writer} {number} {fault}: {type(wrong).__name__} {str(wrong)[-700:]}", file=sys.stderr, flush=True)
        shutil.rmtree(at, ignore_errors=True)
        seen[writer, fault, end] += 1
    json.dump(
        [{"writer": w, "fault": f, "end": e, "times": n} for (w, f, e), n in sorted(seen.items())], sys.stdout, indent=1
    )
    print()
    return 1 if any(end == "wrong" for _, _, end in seen) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
