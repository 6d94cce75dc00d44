"""The data command: what it writes is what was given, however often it is killed, and what it refuses, it names."""

import base64
import gzip
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.text.models.default_tokenizer import DefaultTokenizerText
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from presets import written
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from nam_megatron.compile.lower import translate
from nam_megatron.data import __main__ as command
from nam_megatron.data import build, corpus, identity, manifest, sources, tokenizer
from nam_megatron.errors import Refused
from nam_megatron.hf import export
from nam_megatron.recipe import load
from nam_megatron.train import announce, unfit_data
from nam_megatron.words.whole import digest

TEXTS = [
    f"// file {i}\n#include <vector>\nint f{i}(int x) {{\n\treturn {i * 37} * x;  // naïve €{i}\n}}\n"
    for i in range(60)
]


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Megatron collects garbage after each piece that it merges; here that would be all of Megatron's and pytest's."""
    monkeypatch.setattr("megatron.core.datasets.indexed_dataset.gc.collect", lambda: 0)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(tokenizer.train(TEXTS, 290, progress=False), folder)
    return folder


def jsonl(path: Path, texts=TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)))
    return path


def run(*words: object) -> int:
    return command.main([str(word) for word in words])


def built(folder: Path, bpe: Path, *more: object) -> Path:
    out = folder / "set"
    assert run("build", out, *more, "--tokenizer", bpe, "--valid", "0.2", "--workers", 1) == 0
    return out


def texts(out: Path, split: str) -> list[str]:
    """The documents of a split, decoded, without their ends."""
    encoder, data = tokenizer.load(out / "tokenizer"), IndexedDataset(str(out / split))
    assert all(document[-1] == encoder.token_to_id("<|endoftext|>") for document in data)
    return [encoder.decode(document[:-1].tolist(), skip_special_tokens=False) for document in data]


def test_a_large_file_is_not_taken_at_its_manifests_word(tmp_path, bpe, monkeypatch):
    """Of one that is too large to be hashed at each start the blocks are compared that the build has read, too."""
    monkeypatch.setattr(identity, "WHOLE", 1024)
    monkeypatch.setattr(identity, "BLOCK", 64)
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    data, path = load("nam56r_smoke", ["data=built", f"data.path={out}"]).data, out / "train.bin"
    assert identity.tree(data)["files"]["train.bin"]["sha256"] == digest(path) != identity.content(path)
    made = manifest.read(out).files.values()
    assert {file.bytes for file in made if file.blocks} == {file.bytes for file in made if file.bytes > 1024}
    assert any(1024 < file.bytes <= 2048 for file in made)
    path.write_bytes(bytes(2) + path.read_bytes()[2:])
    with pytest.raises(Refused, match=r"train.bin` is not what was built"):
        identity.tree(data)
    said = manifest.read(out).model_dump()
    said["files"]["train.bin"].pop("blocks")  # of an older version
    (out / manifest.NAME).write_text(json.dumps(said))
    assert identity.tree(data)
    monkeypatch.undo()
    said["files"]["train.bin"]["sha256"] = ""  # which no file has
    (out / manifest.NAME).write_text(json.dumps(said))
    with pytest.raises(Refused, match=r"train.bin` is not what was built"):
        identity.tree(data)


# What is written ---------------------------------------------------------------------------------------------------------------


def test_documents_come_back_unchanged_each_in_one_split(tmp_path, bpe):
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    train, valid = texts(out, "train"), texts(out, "valid")
    assert train == [t for t in TEXTS if t not in valid]  # in the order given
    assert {*train, *valid} == {*TEXTS}
    assert 3 <= len(valid) <= 25
    assert run("check", out, "--vocabulary", 290) == 0


def test_the_lines_of_a_source_file_end_as_they_do(tmp_path):
    (tmp_path / "a.h").write_bytes(b"int a;\r\nint b;\rc\n")
    (piece,) = sources.pieces(sources.source(tmp_path, "text", (".h",)))
    assert [text for _, text in sources.documents(piece)] == ["int a;\r\nint b;\rc\n"]


def test_a_document_stays_on_its_side(tmp_path, bpe):
    """More data, another order: what was held out is never trained on."""
    (tmp_path / "more").mkdir()
    before = texts(built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl")), "valid")
    more = [f"more {i}" for i in range(30)]
    after = texts(built(tmp_path / "more", bpe, jsonl(tmp_path / "b.jsonl", [*more, *reversed(TEXTS)])), "valid")
    assert {*before} == {*after} - {*more}


def test_the_three_kinds_of_input_say_the_same(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 2500)  # several pieces of each
    tree = tmp_path / "tree"
    for i, text in enumerate(TEXTS):
        path = tree / f"{i // 10}" / f"{i:02}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "notes.txt").write_text("not a header")
    table = pyarrow.table({"code": TEXTS, "n": range(60)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    found = []
    for name, words in (
        ("lines", [jsonl(tmp_path / "a.jsonl")]),
        ("rows", [tmp_path / "a.parquet", "--field", "code"]),
        ("files", [tree, "--suffix", ".h"]),
    ):
        (tmp_path / name).mkdir()
        out = built(tmp_path / name, bpe, *words)
        found.append([(out / f"{split}.bin").read_bytes() for split in manifest.SPLITS])
    assert found[0] == found[1] == found[2]


def test_names_of_special_tokens_in_a_text_are_text(tmp_path, bpe):
    text = "a tokenizer's own code says <|endoftext|> and <fim_prefix>"
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl", [*TEXTS, text]))
    assert text in texts(out, "train") + texts(out, "valid")
    special = range(len(tokenizer.SPECIAL))
    for split in manifest.SPLITS:
        assert not any(id in special for document in IndexedDataset(str(out / split)) for id in document[:-1])


def test_sixteen_bits_are_enough_for_65536_entries():
    assert build._dtype(2**16) is numpy.uint16
    assert build._dtype(2**16 + 1) is numpy.int32


def test_the_tokenizer_is_the_same_every_time(bpe, tmp_path):
    tokenizer.save(tokenizer.train(TEXTS, 290, progress=False), tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (bpe / "tokenizer.json").read_bytes()


def test_the_corpus_is_what_the_package_carries(tmp_path, capsys):
    assert run("corpus", tmp_path / "c.jsonl", "--from", "numpy") == 0
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert all(row["package"] == f"numpy {numpy.__version__}" for row in rows)
    header = next(row for row in rows if row["path"].endswith("ndarraytypes.h"))
    assert header["text"] == (Path(numpy.__file__).parents[1] / header["path"]).read_text()
    assert len({row["text"] for row in rows}) == len(rows)


def test_a_corpus_has_each_readable_text_once(tmp_path, monkeypatch):
    files = {"a.h": b"one", "b.h": b"\xff", "c.h": b"one", "d.h": b" \n", "e.h": "zwö".encode()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(corpus, "_files", lambda package: [(name, tmp_path / name) for name in files])
    counts = corpus.write(tmp_path / "c.jsonl", ["numpy"])
    assert counts == {"documents": 2, "bytes": 7, "duplicates": 1, "empty": 1, "not UTF-8": 1}
    assert [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").open()] == ["one", "zwö"]


# What was there before ----------------------------------------------------------------------------------------------------------


def test_a_corpus_is_written_over_nothing_and_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.jsonl").write_text("mine")
    Path("folder").mkdir()
    for name in ("own.jsonl", "folder", "."):
        assert refusal(capsys, "corpus", name, "--from", "numpy").startswith(f"error: `{name}` exists\n")
    assert "`nothing-of-the-kind` is not" in refusal(
        capsys, "corpus", "new.jsonl", "--from", "numpy", "--from", "nothing-of-the-kind"
    )
    assert refusal(capsys, "corpus", "none/new.jsonl", "--from", "numpy").startswith("error: no folder `none`\n")

    def version(_: str) -> str:
        """Somebody else is faster."""
        Path("new.jsonl").write_text("theirs")
        return "1"

    monkeypatch.setattr(corpus.metadata, "version", version)
    assert refusal(capsys, "corpus", "new.jsonl", "--from", "numpy").startswith("error: `new.jsonl` exists\n")
    assert sorted(path.name for path in Path().iterdir()) == ["folder", "new.jsonl", "own.jsonl"]
    assert (Path("own.jsonl").read_text(), Path("new.jsonl").read_text()) == ("mine", "theirs")


def test_the_second_of_two_tokenizers_for_one_folder_is_refused(tmp_path, monkeypatch, capsys):
    path, train = jsonl(tmp_path / "a.jsonl"), tokenizer.train

    def slow(*words, **more):
        """Is trained while another one is saved."""
        made = train(*words, **more)
        monkeypatch.setattr(tokenizer, "train", train)
        assert run("tokenizer", tmp_path / "bpe", path, "--entries", 280) == 0
        return made

    monkeypatch.setattr(tokenizer, "train", slow)
    assert f"`{tmp_path}/bpe` exists" in refusal(capsys, "tokenizer", tmp_path / "bpe", path, "--entries", 290)
    assert tokenizer.load(tmp_path / "bpe").get_vocab_size() == 280
    monkeypatch.setattr(tokenizer, "train", None)  # what is there is seen before an hour of training
    assert f"`{tmp_path}/bpe` exists" in refusal(capsys, "tokenizer", tmp_path / "bpe", path, "--entries", 290)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "bpe"]


def test_a_dataset_is_built_in_a_folder_of_its_own(tmp_path, bpe, capsys):
    path = jsonl(tmp_path / "a.jsonl")
    words = ("--tokenizer", bpe, "--valid", "0.2", "--workers", 1)
    assert f"`{path}` is a file, and a dataset is a folder" in refusal(capsys, "build", path, path, *words)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "work").mkdir()
    for name in ("train.bin", "work/thesis.txt", "lock"):
        (tmp_path / "other" / name).write_text("mine")
    before = contents(tmp_path / "other")
    assert f"`{tmp_path}/other` holds `lock`" in refusal(capsys, "build", tmp_path / "other", path, *words)
    assert contents(tmp_path / "other") == before
    out = tmp_path / "set"
    out.mkdir()
    with build._locked(out / build.WORK):
        assert f"another build is at work in `{out}`" in refusal(capsys, "build", out, path, *words)
    assert run("build", out, path, *words) == 0
    assert not (out / build.WORK).exists()


# Killed and started again ------------------------------------------------------------------------------------------------------


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_the_number_of_processes_does_not_change_the_result(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 2000)
    # no token of two letters
    first, last = (jsonl(tmp_path / f"{text}.jsonl", list(text)) for text in ("0123456789", "abcdefghij"))
    inputs = [sources.source(path, "text", ()) for path in (first, jsonl(tmp_path / "a.jsonl"), last)]
    for workers in (1, 2):
        build.build(tmp_path / str(workers), inputs, build.Options(bpe, 0.2, "refuse", workers))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    ids = [numpy.fromfile(tmp_path / "2" / f"{split}.bin", dtype=numpy.uint16) for split in manifest.SPLITS]
    assert manifest.read(tmp_path / "2").largest_id == max(of.max() for of in ids)


class Killed(BaseException):
    """What no handler of the build catches, as a signal would not be caught."""


def test_a_killed_build_goes_on_and_ends_the_same(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 2000)
    inputs = [sources.source(jsonl(tmp_path / "a.jsonl"), "text", ())]
    options = build.Options(bpe, 0.2, "refuse", 1)
    build.build(tmp_path / "whole", inputs, options)
    finished: list[str] = []

    class Builder(build.IndexedDatasetBuilder):
        """Is killed within the second of four pieces, between its splits, and then between the two merges."""

        def finalize(self, path):
            if len(finished) in (3, 11):
                finished.append("killed")
                raise Killed
            finished.append(path)
            super().finalize(path)

    monkeypatch.setattr(build, "IndexedDatasetBuilder", Builder)
    for _ in range(2):
        with pytest.raises(Killed):
            build.build(tmp_path / "killed", inputs, options)
    assert not (tmp_path / "killed" / "manifest.json").exists()
    made = build.build(tmp_path / "killed", inputs, options)
    pieces = [Path(path).name for path in finished if "work" in path]
    assert pieces == [f"00000{i}.{split}.idx" for i, split in (
        (0, "train"), (0, "valid"), (1, "train"), (1, "train"), (1, "valid"), (2, "train"), (2, "valid"), (3, "train"), (3, "valid"),
    )]  # fmt: skip
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    before = len(finished)
    assert build.build(tmp_path / "killed", inputs, options) == made
    assert len(finished) == before, "a finished build was done again"


@pytest.mark.slow
def test_ctrl_c_is_a_line_whatever_the_processes_do(tmp_path, bpe):
    jsonl(tmp_path / "a.jsonl", TEXTS * 100)
    options = ["--tokenizer", str(bpe), "--valid", "0.2", "--duplicates", "keep", "--workers", "2"]
    # However late the Ctrl-C comes, it finds a build: this one waits for it before its pieces are merged.
    waits = """
        import signal
        from nam_megatron.data import __main__ as command, build
        def wait(*_):
            while True:
                signal.pause()
        build._merge = wait
        signal.alarm(300)  # nor does it wait for nobody
        if __name__ == "__main__":
            command.finish(command.main)
    """
    (tmp_path / "waits.py").write_text(textwrap.dedent(waits))
    begun = subprocess.Popen(
        [sys.executable, "waits.py", "build", "set", "a.jsonl", *options], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=tmp_path, start_new_session=True, env=os.environ | {"PYTHONPATH": str(Path(build.__file__).parents[2])},
    )  # fmt: skip
    while begun.poll() is None and not list(tmp_path.glob("set/work/*/*.bin")):
        time.sleep(0.05)
    os.killpg(begun.pid, signal.SIGINT)
    assert begun.communicate(timeout=600) == ("", "interrupted\n")
    assert begun.returncode == 130


def test_other_data_is_not_written_over_a_dataset(tmp_path, bpe, capsys):
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    before = contents(out)
    again = (
        "build",
        out,
        jsonl(tmp_path / "a.jsonl", TEXTS[:-1]),
        "--tokenizer",
        bpe,
        "--valid",
        "0.2",
        "--workers",
        1,
    )
    assert run(*again) == 2
    assert "holds another dataset" in capsys.readouterr().err
    assert contents(out) == before


def test_a_build_with_another_choice_or_a_renamed_file_is_another_dataset(tmp_path, bpe, capsys):
    """Each was given the old dataset, with exit code 0, once the key forgot it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for i, text in enumerate(TEXTS):
        (tree / f"{i:02}.h").write_text(text)
    words = ("build", tmp_path / "set", tree, "--suffix", ".h", "--tokenizer", bpe, "--workers", 1, "--valid")
    assert run(*words, "0.2") == 0
    for other in (
        ("0.2", "--duplicates", "keep"),
        ("0.2", "--duplicates", "drop"),
        ("0.3",),
        ("0.2", "--skip", tree / "07.h"),
    ):
        assert "holds another dataset" in refusal(capsys, *words, *other), other
    (tree / "00.h").rename(tree / "99.h")  # the same documents, in another order
    assert "holds another dataset" in refusal(capsys, *words, "0.2")
    (tree / "99.h").rename(tree / "00.h")
    assert run(*words, "0.2") == 0
    tree.rename(tmp_path / "moved")  # where they lie decides nothing
    assert run("build", tmp_path / "set", tmp_path / "moved", *words[3:], "0.2") == 0


MOMENTS = {  # of the build's functions the one after which the input is another
    "hashed": (sources, "content"),
    "read": (build, "_judge"),
    "encoded": (build, "_merge"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", ["longer", "same size", "gone", "back again", "one more", "tokenizer", "its config"])
def test_an_input_that_changes_meanwhile_makes_no_dataset(tmp_path, bpe, monkeypatch, capsys, moment, change):
    """Four of five were accepted, with a manifest of something else; the fifth was a traceback."""
    tree, tokens, out = tmp_path / "tree", tmp_path / "tokens", tmp_path / "set"
    tree.mkdir()
    shutil.copytree(bpe, tokens)
    for i, text in enumerate(TEXTS):
        (tree / f"{i:02}.h").write_text(text)
    file, of_tokens = tree / "07.h", {"tokenizer": tokenizer.FILE, "its config": tokenizer.CONFIG}
    where, name = MOMENTS[moment]
    upstream, done = getattr(where, name), []

    def changes(*words):
        found = upstream(*words)
        if not done:
            done.append(file.read_bytes())
            if change == "gone":
                file.unlink()
            elif change == "one more":
                (tree / "99.h").write_text("more")
            elif change in of_tokens:
                path = tokens / of_tokens[change]
                path.write_text(path.read_text() + "\n")
            else:
                file.write_bytes(b"x" * (len(done[0]) + (change == "longer")))
                if change == "back again":
                    file.write_bytes(done[0])
        return found

    monkeypatch.setattr(where, name, changes)
    words = ("build", out, tree, "--suffix", ".h", "--tokenizer", tokens, "--valid", "0.2", "--workers", 1)
    said = refusal(capsys, *words)
    changed = tokens / of_tokens[change] if change in of_tokens else tree / "99.h" if change == "one more" else file
    assert f"`{changed}` changed while it was read" in said and not (out / manifest.NAME).exists()
    file.write_bytes(done[0])
    (tree / "99.h").unlink(missing_ok=True)
    shutil.copytree(bpe, tokens, dirs_exist_ok=True)
    assert run(*words) == 0
    assert texts(out, "train") + texts(out, "valid") != [] and run("check", out) == 0
    assert {*texts(out, "train"), *texts(out, "valid")} == {*TEXTS}


def test_what_a_killed_build_read_of_another_content_is_read_again(tmp_path, bpe, monkeypatch):
    """The file was another one for a while, and is what was hashed again when the build goes on."""
    path = jsonl(tmp_path / "a.jsonl")
    inputs, options = [sources.source(path, "text", ())], build.Options(bpe, 0.2, "refuse", 1)
    build.build(tmp_path / "whole", inputs, options)
    content, merge = sources.content, build._merge

    def other(source):
        found = content(source)
        jsonl(path, [text.replace("vector", "string") for text in TEXTS])
        return found

    def killed(*_):
        raise Killed

    monkeypatch.setattr(sources, "content", other)
    monkeypatch.setattr(build, "_merge", killed)
    with pytest.raises(Killed):
        build.build(tmp_path / "killed", inputs, options)
    jsonl(path)
    monkeypatch.setattr(sources, "content", content)
    monkeypatch.setattr(build, "_merge", merge)
    build.build(tmp_path / "killed", inputs, options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_file_that_somebody_has_written_to_has_another_stamp(tmp_path):
    """Also one of the same size that was given its old time again; whoever reads it changes nothing."""
    path = jsonl(tmp_path / "a.jsonl")
    source, text, times = sources.source(path, "text", ()), path.read_text(), path.stat()
    stamps = [sources.stamps(source)]
    path.read_bytes()
    assert sources.stamps(source) == stamps[0]
    for other in (text.replace("vector", "string"), text + " "):
        path.write_text(other)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert sources.stamps(source) not in stamps
        stamps.append(sources.stamps(source))


def test_a_pipe_is_refused_where_a_file_is_read(tmp_path, bpe, capsys):
    """Opening one waits for whoever writes, who may never come."""
    pipe, tree, tokens = tmp_path / "pipe.jsonl", tmp_path / "tree", tmp_path / "tokens"
    os.mkfifo(pipe)
    (tmp_path / "link.jsonl").symlink_to(pipe)
    tree.mkdir()
    for i, text in enumerate(TEXTS):
        (tree / f"{i:02}.h").write_text(text)
    (tree / "linked.h").symlink_to(pipe)  # no links are followed
    os.mkfifo(tree / "a.fifo")  # not asked for
    build_ = ("build", tmp_path / "set", tree, "--suffix", ".h", "--valid", "0.2", "--workers", 1, "--tokenizer")
    for path in (pipe, tmp_path / "link.jsonl"):
        told = refusal(capsys, "build", tmp_path / "set", path, "--tokenizer", bpe)
        assert told.startswith(f"error: `{path}` is a pipe, and no file\n")
    os.mkfifo(tree / "zz.h")
    assert f"`{tree}/zz.h` is a pipe, and no file" in refusal(capsys, *build_, bpe)
    verb = ("tokenizer", tmp_path / "new", tree, "--suffix", ".h", "--entries", 280)
    assert f"`{tree}/zz.h` is a pipe, and no file" in refusal(capsys, *verb)
    (tree / "zz.h").unlink()
    for name in (tokenizer.FILE, tokenizer.CONFIG):
        shutil.copytree(bpe, tokens)
        (tokens / name).unlink()
        os.mkfifo(tokens / name)
        assert f"`{tokens}/{name}` is a pipe, and no file" in refusal(capsys, *build_, tokens)
        plan = translate(
            load("nam56r_smoke", ["data=indexed", f"data.path={tmp_path}/x", f"data.tokenizer={tokens}"])
        ).plan
        assert f"`{tokens}/{name}` is a pipe, and no file" in [problem.message for problem in unfit_data(plan)]
        shutil.rmtree(tokens)
    capsys.readouterr()
    (tree / "to_folder").symlink_to(tmp_path)
    (tree / "to_text.txt").symlink_to(tree / "00.h")  # not asked for
    assert run(*build_, bpe) == 0
    assert f"> 2 links in `{tree}` not followed, as `{tree}/linked.h`\n" in capsys.readouterr().err
    (tmp_path / "set" / manifest.NAME).unlink()
    os.mkfifo(tmp_path / "set" / manifest.NAME)
    assert "manifest.json` is a pipe, and no file" in refusal(capsys, "check", tmp_path / "set")


def test_every_line_is_in_one_piece_wherever_the_boundary_falls(tmp_path, monkeypatch):
    """Lines of 20 bytes: boundaries on the last byte of one, on its newline, on the first byte of the next. Blank ones count, too."""
    lines = [" " * 19 if i % 3 == 1 else json.dumps({"text": f"{i:07}"}) for i in range(9)]
    assert {len(line) for line in lines} == {19}
    for end in ("\n", ""):
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(lines) + end)
        source = sources.source(path, "text", ())
        for size in (*range(1, 62), 200):
            monkeypatch.setattr(sources, "PIECE", size)
            cut = list(sources.pieces(source))
            found = [(sources.place(piece, at), text) for piece in cut for at, text in sources.documents(piece)]
            assert found == [(f"{path}:{i + 1}", f"{i:07}") for i in range(9) if i % 3 != 1], size


def test_what_is_skipped_is_named_and_recorded(tmp_path, bpe, capsys, monkeypatch):
    """One bad file of thousands: the place that a refusal names is the word that leaves it out."""
    monkeypatch.setattr(sources, "PIECE", 300)
    bad = '{"text": '
    lines = [json.dumps({"text": text}) for text in TEXTS[:20]]
    lines[10:10] = [bad]
    rows = pyarrow.table({"text": [*TEXTS[20:30], None, *TEXTS[30:40]]})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(rows, tmp_path / "b.parquet", row_group_size=7)
    (tmp_path / "broken.parquet").write_text("no Parquet")
    tree = tmp_path / "tree" / "inner"
    tree.mkdir(parents=True)
    for i, text in enumerate(TEXTS[40:]):
        (tree / f"{i:02}.h").write_text(text)
    (tree / "05a.h").write_bytes(b"\xff")
    inputs = [tmp_path / name for name in ("a.jsonl", "b.parquet", "broken.parquet", "tree")]
    words = (*inputs, "--suffix", ".h", "--tokenizer", bpe, "--valid", "0.2", "--workers", 1)
    skip = ("--skip", inputs[2])
    assert "broken.parquet` is no Parquet file" in refusal(capsys, "build", tmp_path / "set", *words)
    named = refusal(capsys, "build", tmp_path / "set", *words, *skip)
    places = [line.split(": ")[1] for line in named.splitlines() if line.startswith("error: ")]
    assert places == [f"{inputs[0]}:11", f"{inputs[1]}:11", str(tree / "05a.h")] and "--skip" in named
    skip += tuple(word for place in places for word in ("--skip", place))
    assert run("build", tmp_path / "set", *words, *skip) == 0
    assert f"left out by `--skip`: {inputs[2]}, {places[0]}" in capsys.readouterr().out
    made = manifest.read(tmp_path / "set")
    assert made.skipped == (str(inputs[2]), *places) and [i.documents for i in made.inputs] == [20, 20, 20]
    left = [t for t in TEXTS if t not in texts(tmp_path / "set", "valid")]
    assert texts(tmp_path / "set", "train") == left
    assert run("check", tmp_path / "set") == 0
    for wrong in (tmp_path / "nothing.h", f"{inputs[0]}:22", f"{inputs[0]}:0", f"{tmp_path / 'tree'}:1", tree):
        assert f"`{wrong}` would not be read" in refusal(capsys, "build", tmp_path / "other", *words, "--skip", wrong)
    assert "nothing is left" in refusal(capsys, "build", tmp_path / "other", inputs[0], *words[6:], "--skip", inputs[0])


def key_of(inputs, contents, gone, options) -> str:
    return build._key(inputs, contents, gone, options, tokenizer.load(options.tokenizer))


def test_all_that_decides_a_dataset_decides_its_key(tmp_path, bpe, monkeypatch):
    for name in (tokenizer.FILE, tokenizer.CONFIG):
        shutil.copytree(bpe, tmp_path / name)
        (tmp_path / name / name).open("a").write(" ")
    one, two = (sources.Source(Path(name), "jsonl", "text", ()) for name in "ab")
    plain = build.Options(bpe, 0.2, "refuse", 1)
    keys = {
        key_of(inputs, contents, gone, options)
        for inputs, contents, gone, options in (
            ([one, two], ["x", "y"], [], plain),
            ([one, two], ["y", "x"], [], plain),
            ([one], ["x"], [], plain),
            *(([replace(one, **more), two], ["x", "y"], [], plain) for more in (
                {"kind": "tree"}, {"field": "body"}, {"suffixes": (".h",)})),
            *(([one, two], ["x", "y"], [], replace(plain, **more)) for more in (
                {"tokenizer": tmp_path / tokenizer.FILE}, {"tokenizer": tmp_path / tokenizer.CONFIG},
                {"valid_share": 0.3}, {"duplicates": "drop"}, {"skip": ("z",)})),
            ([one, two], ["x", "y"], ["z"], replace(plain, skip=("z",))),
            ([replace(one, skip=(1,)), two], ["x", "y"], [], replace(plain, skip=("z",))),
        )
    }  # fmt: skip
    assert key_of([two, one], ["x", "y"], [], replace(plain, workers=9)) in keys, "neither names nor processes do"
    assert len(keys) == 13
    monkeypatch.setattr(sources, "PIECE", 1)
    assert key_of([one, two], ["x", "y"], [], plain) not in keys


def test_a_dataset_without_a_skip_keeps_the_key_that_it_had(tmp_path, bpe):
    """Checkpoints know their data by it."""
    inputs = [sources.source(jsonl(tmp_path / "a.jsonl"), "text", ())]
    said = key_of(inputs, ["content"], [], build.Options(bpe, 0.2, "refuse", 1))
    with_tokenizer = [digest(bpe / name) for name in (tokenizer.FILE, tokenizer.CONFIG)]
    old = [[["jsonl", "text", [], "content"]], with_tokenizer, 0.2, "refuse", sources.PIECE]
    assert said == hashlib.sha256(json.dumps(old).encode()).hexdigest()


def test_files_that_are_the_same_are_found_before_anything_is_read_whole(tmp_path, bpe, capsys, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    for i, text in enumerate(TEXTS):
        (tree / f"{i:02}.h").write_text(text)
    (tree / "98.h").write_text(TEXTS[3])
    (tree / "97.h").write_text(" \n")
    (tree / "96.h").write_text(" \n")  # no documents, so no duplicates
    words = ("build", tmp_path / "set", tree, "--suffix", ".h", "--tokenizer", bpe, "--workers", 1, "--valid", "0.2")
    hashed: list[Path] = []
    digest = sources.digest
    monkeypatch.setattr(sources, "digest", lambda path: (hashed.append(path), digest(path))[1])
    with monkeypatch.context() as within:
        within.setattr(build, "_scan", None)
        said = refusal(capsys, *words)
    assert said.startswith(f"error: {tree}/98.h is {tree}/03.h, byte for byte\n") and said.count("error:") == 1
    assert f"`--skip {tree}/98.h`" in said
    sizes = [path.stat().st_size for path in tree.iterdir()]
    assert all(sizes.count(path.stat().st_size) > 1 for path in hashed), "a file without a twin of its size was read"
    assert run(*words, "--skip", tree / "98.h") == 0
    assert run(words[0], tmp_path / "all", *words[2:], "--duplicates", "keep") == 0
    a, b = jsonl(tmp_path / "a.jsonl"), jsonl(tmp_path / "b.jsonl")
    assert f"{b} is {a}, byte for byte" in refusal(capsys, "build", tmp_path / "two", a, b, *words[5:])


# What is refused ---------------------------------------------------------------------------------------------------------------


def refusal(capsys, *words: object) -> str:
    assert run(*words) == 2
    return capsys.readouterr().err


def test_of_two_texts_in_a_row_none_is_left_out(tmp_path, bpe, capsys):
    path = jsonl(tmp_path / "a.jsonl")
    path.write_text(path.read_text() + '{"text": "one", "n": {"text": 1}, "text": "two"}\n')
    said = refusal(capsys, "build", tmp_path / "set", path, "--tokenizer", bpe, "--workers", 1)
    assert said.startswith(f"error: {path}:61: `text` stands in it twice\n")


def test_rows_that_are_no_documents_are_named(tmp_path, bpe, capsys, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 150)  # most lines are in another piece than the first
    rows = [json.dumps({"text": t}) for t in TEXTS]
    rows[10], rows[20], rows[30] = "{", '{"txt": "x"}', '{"text": 5}'
    rows[40], rows[50] = '{"text": "\\ud800"}', "[1]"
    rows[5] = ""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    said = refusal(capsys, "build", tmp_path / "set", path, "--tokenizer", bpe, "--workers", 1)
    for line, why in (
        (11, "Expecting"),
        (21, "no `text`"),
        (31, "int, not text"),
        (41, "surrogates"),
        (51, "not a JSON"),
    ):
        assert f"error: {path}:{line}: " in said
        assert why in next(x for x in said.splitlines() if f":{line}: " in x)
    assert said.count("error:") == 5
    rows = [None if i == 33 else t for i, t in enumerate(TEXTS)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=7)
    said = refusal(capsys, "build", tmp_path / "set", tmp_path / "a.parquet", "--tokenizer", bpe, "--workers", 1)
    assert said.startswith(f"error: {tmp_path}/a.parquet:34: `text` is NoneType, not text\n")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "latin.h").write_bytes("// é".encode("latin-1"))
    words = ("build", tmp_path / "set", tmp_path / "tree", "--suffix", ".h", "--tokenizer", bpe, "--workers", 1)
    assert refusal(capsys, *words).startswith(f"error: {tmp_path}/tree/latin.h: 'utf-8' codec can't decode")


def test_an_option_that_is_given_twice_is_refused():
    with pytest.raises(Refused, match="argument --valid: given twice"):
        run("build", "set", "a.jsonl", "--tokenizer", "bpe", "--valid", "0.1", "--valid", "0.2")


def test_duplicates_are_named_or_left_out_or_kept_by_choice(tmp_path, bpe, capsys):
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS, TEXTS[3], "   ", TEXTS[0]])
    words = ("--tokenizer", bpe, "--valid", "0.2", "--workers", 1)
    said = refusal(capsys, "build", tmp_path / "set", path, *words)
    assert f"error: {path}:61 is {path}:4\nerror: {path}:63 is {path}:1\n" in said
    for choice, left in (("drop", TEXTS), ("keep", [*TEXTS, TEXTS[3], TEXTS[0]])):
        out = tmp_path / choice
        assert run("build", out, path, *words, "--duplicates", choice) == 0
        made = manifest.read(out)
        assert (made.duplicates, made.empty) == (len(TEXTS) + 2 - len(left), 1)
        assert sorted(texts(out, "train") + texts(out, "valid")) == sorted(left)


@pytest.mark.parametrize(("share", "split"), [("0.000001", "valid"), ("0.999999", "train")])
def test_an_empty_split_is_refused(tmp_path, bpe, capsys, share, split):
    path = jsonl(tmp_path / "a.jsonl")
    said = refusal(capsys, "build", tmp_path / "set", path, "--tokenizer", bpe, "--valid", share, "--workers", 1)
    assert f"none of 60 documents falls into the split `{split}`" in said


def test_too_little_text_for_a_tokenizer_is_said(tmp_path, capsys):
    said = refusal(capsys, "tokenizer", tmp_path / "bpe", jsonl(tmp_path / "a.jsonl"), "--entries", 5000)
    reached = int(said.split("a tokenizer of ")[1].split()[0])
    assert 261 < reached < 5000
    assert run("tokenizer", tmp_path / "bpe", tmp_path / "a.jsonl", "--entries", reached) == 0


def test_an_unreadable_row_ends_the_training_of_a_tokenizer(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{\n')
    said = refusal(capsys, "tokenizer", tmp_path / "bpe", tmp_path / "a.jsonl", "--entries", 290)
    assert said.startswith(f"error: {tmp_path}/a.jsonl:2: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.jsonl"], "no file or folder `nothing.jsonl`"),
        (["."], "`.` is a folder"),
        (["notes.txt"], "is neither a folder nor"),
        (["a.jsonl.gz"], ".jsonl, .parquet\n\nhint: unpack it first"),
        (["gzip.jsonl"], "`gzip.jsonl` is gzip, not JSON lines in UTF-8"),
        (["wide.jsonl"], "`wide.jsonl` is UTF-16, not JSON lines in UTF-8"),
        (["table.jsonl"], "`table.jsonl` is Parquet, not JSON lines in UTF-8\n\nhint: its name ends with `.parquet`"),
        (["a.jsonl", "a.jsonl"], "`a.jsonl` is named twice"),
        (["not.parquet"], "is no Parquet file"),
        (["a.parquet", "--field", "body"], "has no column `body`"),
        (
            ["a.jsonl", "--tokenizer", "none"],
            "holds no tokenizer: No such file or directory: `none/tokenizer.json`\n\nhint: `python -m nam_megatron.data tokenizer`",
        ),
        ([".", "--suffix", ".zzz", "--suffix", ".h"], "no file in `.` ends in .h or .zzz"),
        (["empty.jsonl"], "the inputs hold no documents"),
        (
            ["a.jsonl", "empty.jsonl", "--valid", "0.2"],
            "`empty.jsonl` holds no documents\n\nhint: get it again, or `--skip empty.jsonl`",
        ),
        (["a.jsonl", "none.jsonl", "--valid", "0.2"], "`none.jsonl` holds no documents"),
        (["a.jsonl", "--suffix", ".h"], "`--suffix` is of the files of a folder, and no input is one"),
        (
            [".", "--suffix", ".txt", "--field", "body"],
            "`--field` is of JSONL and Parquet, and every input is a folder",
        ),
    ],
)
def test_what_cannot_be_an_input_is_refused(tmp_path, monkeypatch, bpe, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl")
    for name in ("notes.txt", "not.parquet", "a.jsonl.gz"):
        Path(name).write_text("x")
    Path("gzip.jsonl").write_bytes(gzip.compress(b'{"text": "x"}'))
    Path("wide.jsonl").write_text('{"text": "x"}', encoding="utf-16")
    Path("empty.jsonl").write_text("\n")
    Path("none.jsonl").touch()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), "a.parquet")
    shutil.copy("a.parquet", "table.jsonl")
    tokenizer_of = () if "--tokenizer" in words else ("--tokenizer", bpe)
    assert said in refusal(capsys, "build", "set", *words, *tokenizer_of, "--workers", 1)


# A dataset that is not what it was ----------------------------------------------------------------------------------------------


def test_check_reads_every_byte(tmp_path, bpe, capsys):
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    data = bytearray((out / "train.bin").read_bytes())
    data[100] ^= 1
    (out / "train.bin").write_bytes(data)
    assert run("check", out) == 1
    assert capsys.readouterr().err == (
        f"error: `{out}/train.bin` is not what was built\n\nhint: build the dataset again\n"
    )
    assert list(manifest.damage(out, manifest.read(out), thorough=False)) == []  # the trainer looks at sizes
    (out / "train.bin").write_bytes(data[:-2])
    (problem,) = manifest.damage(out, manifest.read(out), thorough=False)
    assert problem.message == f"`{out}/train.bin` has {len(data) - 2} bytes, not {len(data)}"


def test_a_manifest_has_a_hash_of_every_file(tmp_path, bpe):
    """One with none vouched for whatever lay beside it."""
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    made = manifest.read(out)
    for name in made.files:
        if name != "tokenizer/tokenizer_config.json":
            left = made.model_copy(update={"files": {n: f for n, f in made.files.items() if n != name}})
            (problem,) = manifest.damage(out, left, thorough=False)
            assert problem.message == f"`{out}/manifest.json` has no hash of `{name}`"
    assert len(made.files) >= 5


def test_another_tokenizer_in_its_place_is_seen(tmp_path, bpe):
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    shutil.rmtree(out / "tokenizer")
    tokenizer.save(tokenizer.train([t.upper() for t in TEXTS], 285, progress=False), out / "tokenizer")
    problems = manifest.damage(out, manifest.read(out), thorough=False)
    assert any("tokenizer.json" in p.message for p in problems)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_what_was_laid_beside_its_tokenizer_is_seen(tmp_path, bpe, name):
    """transformers takes another end of documents from the one, another vocabulary from the other."""
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    (out / "tokenizer" / name).write_text("{}")
    (problem,) = manifest.damage(out, manifest.read(out), thorough=False)
    assert problem.message == f"`{out}/tokenizer/{name}` is not of this dataset"


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path, bpe, capsys):
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    assert run("check", out, "--vocabulary", 289) == 1
    assert "has 290 entries, and the model's vocabulary 289" in capsys.readouterr().err


def test_the_trainer_refuses_a_dataset_that_does_not_fit(tmp_path, bpe):
    """Both routes ask it before anything is built."""
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))

    def unfit(*words: str) -> list[str]:
        recipe = load("nam56r_smoke", ["data=built", f"data.path={out}", *words])
        return [problem.message for problem in unfit_data(translate(recipe).plan)]

    assert unfit("model.vocab_size=290") == []
    (small,) = unfit("model.vocab_size=289")
    assert "has 290 entries, and the model's vocabulary 289" in small
    (out / "train.bin").write_bytes((out / "train.bin").read_bytes()[:-2])
    assert [said.partition(" has ")[0] for said in unfit("model.vocab_size=290")] == [f"`{out}/train.bin`"]
    shutil.rmtree(out)
    (gone,) = unfit("model.vocab_size=290")
    assert str(out) in gone


def test_a_tokenizer_as_large_as_the_vocabulary_fits(bpe):
    export.fits(bpe, 290)
    with pytest.raises(Refused, match="has 290 entries, and the model's vocabulary 289"):
        export.fits(bpe, 289)


def of_others(folder: Path, **said: object) -> Path:
    """A tokenizer as other people's: another end of documents, and a mark that it puts in front of a text."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir()
    made.save(str(folder / tokenizer.FILE))
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": {"content": "</s>"},
        "bos_token": "<s>",
        "pad_token": "<none>",
    }
    (folder / tokenizer.CONFIG).write_text(json.dumps(config | said))
    return folder


def test_further_tokens_that_end_a_text_are_of_the_dataset(tmp_path, capsys):
    theirs, texts = of_others(tmp_path / "theirs"), jsonl(tmp_path / "a.jsonl")
    (theirs / "generation_config.json").write_text('{"eos_token_id": [2, 7, 7, 199]}')
    out = built(tmp_path, theirs, texts)
    assert tokenizer.ends(out / "tokenizer", tokenizer.load(out / "tokenizer")) == [2, 7, 199]
    (theirs / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert run("build", out, texts, "--tokenizer", theirs, "--valid", "0.2") == 2
    assert "holds another dataset" in capsys.readouterr().err


def test_each_word_for_a_token_that_is_there_goes_along(tmp_path):
    tokenizer.save(tokenizer.train(TEXTS, 270, progress=False), tmp_path / "theirs")
    config = tmp_path / "theirs" / tokenizer.CONFIG
    named = {f"{name}_token": tokenizer.SPECIAL[n] for n, name in enumerate(("eos", "pad", "unk", "bos"))}
    config.write_text(json.dumps(json.loads(config.read_text()) | named | {"mask_token": "<none>"}))
    (tmp_path / "ours").mkdir()
    tokenizer.copy(tmp_path / "theirs", tmp_path / "ours")
    copied = json.loads((tmp_path / "ours" / tokenizer.CONFIG).read_text())
    assert {k: v for k, v in copied.items() if k in (*named, "mask_token")} == {
        k: v for k, v in named.items() if k != "bos_token"
    }


def test_a_copied_tokenizer_leaves_texts_as_they_are(bpe, tmp_path):
    """Neither cut, nor filled up, nor without the space before a comma, where the published one says all three."""
    shutil.copytree(bpe, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    file, config = tmp_path / "theirs" / tokenizer.FILE, tmp_path / "theirs" / tokenizer.CONFIG
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": cut, "padding": fill}))
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"clean_up_tokenization_spaces": True, "tokenizer_class": "Own"})
    )
    tokenizer.copy(tmp_path / "theirs", tmp_path / "ours")
    text = "int f ( int x , int y ) ; return x . y"
    assert (
        Tokenizer.from_file(str(tmp_path / "ours" / tokenizer.FILE)).encode(text).ids
        == tokenizer.load(bpe).encode(text).ids
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").decode(tokenizer.load(bpe).encode(text).ids) == text
    said = json.loads(
        (tmp_path / "ours" / tokenizer.CONFIG).read_text()
    )  # transformers 4 takes the space away, 5 does not
    assert issubclass(getattr(transformers, said["tokenizer_class"]), transformers.PreTrainedTokenizerFast)
    assert said["clean_up_tokenization_spaces"] is False


def test_documents_end_as_the_tokenizer_says(tmp_path, capsys):
    out = built(tmp_path, of_others(tmp_path / "theirs"), jsonl(tmp_path / "a.jsonl"))
    for split in manifest.SPLITS:
        for document in IndexedDataset(str(out / split)):
            assert document[-1] == 2 and not {1, 2} & {*document[:-1].tolist()}
    assert run("check", out) == 0
    # Every reader of the copy has the tokens of the data: no class of its own, nothing around a text, no token that is not in the file.
    copied = AutoTokenizer.from_pretrained(out / "tokenizer")
    assert (
        copied("int f3(int x)").input_ids
        == tokenizer.load(tmp_path / "theirs").encode("int f3(int x)", add_special_tokens=False).ids
    )
    assert (copied.eos_token_id, copied.bos_token_id, len(copied)) == (2, None, 200)
    again = tmp_path / "again"
    again.mkdir()
    tokenizer.copy(out / "tokenizer", again)
    assert all(
        (again / n).read_bytes() == (out / "tokenizer" / n).read_bytes() for n in (tokenizer.FILE, tokenizer.CONFIG)
    )
    megatrons = DefaultTokenizerText(
        str(out / "tokenizer"), {"library": "huggingface", "class_name": None, "tokenizer_type": None}
    )
    assert megatrons.eod == 2


def test_what_a_tokenizer_was_last_used_for_neither_cuts_nor_fills_documents(tmp_path):
    theirs = of_others(tmp_path / "theirs")
    whole = [tokenizer.load(theirs).encode(text, add_special_tokens=False).ids for text in TEXTS]
    made = Tokenizer.from_file(str(theirs / tokenizer.FILE))
    made.enable_truncation(3)
    made.enable_padding(length=500)
    made.save(str(theirs / tokenizer.FILE))
    assert [tokenizer.load(theirs).encode(text, add_special_tokens=False).ids for text in TEXTS] == whole


@pytest.mark.parametrize(
    ("said", "why"),
    [({"eos_token": "<|endoftext|>"}, "has no end of a document"), ({"eos_token": None}, "has no end of a document"),
     ({"auto_map": {"AutoTokenizer": ["somebody/else--code.Tokenizer", None]}}, "is code of its own")],
)  # fmt: skip
def test_tokenizers_that_are_none_of_ours_and_cannot_be(tmp_path, capsys, said, why):
    theirs = of_others(tmp_path / "theirs", **said)
    assert run("build", tmp_path / "set", jsonl(tmp_path / "a.jsonl"), "--tokenizer", theirs) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "set").exists()


def test_a_text_that_holds_the_end_of_a_document_is_refused_by_its_place(tmp_path, capsys):
    """Where the end is a piece of the vocabulary as any other, no way of reading makes text of it."""
    theirs = of_others(tmp_path / "theirs")
    tree = json.loads((theirs / tokenizer.FILE).read_text())
    tree["added_tokens"] = [token | {"special": False} for token in tree["added_tokens"]]
    (theirs / tokenizer.FILE).write_text(json.dumps(tree))
    data = jsonl(tmp_path / "a.jsonl", [*TEXTS, "ends in </s> and goes on", "</s> begins it", "ends it </s>"])
    words = ("build", tmp_path / "set", data, "--tokenizer", theirs, "--valid", "0.2", "--workers", 1)
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert all(f"{data}:{n} holds the token that ends a document" in said for n in (61, 62, 63))
    assert f"`--skip {data}:61`" in said
    assert run(*words, *(word for n in (61, 62, 63) for word in ("--skip", f"{data}:{n}"))) == 0


def test_a_pattern_that_gives_up_is_no_traceback(bpe, tmp_path, capsys):
    """The library panics where its regular expressions go back too often."""
    shutil.copytree(bpe, tmp_path / "theirs")
    tree = json.loads((bpe / tokenizer.FILE).read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tree["pre_tokenizer"]["pretokenizers"].insert(0, split)
    (tmp_path / "theirs" / tokenizer.FILE).write_text(json.dumps(tree))
    words = ("--tokenizer", tmp_path / "theirs", "--workers", 1, "--valid", "0.2")
    assert run("build", tmp_path / "set", jsonl(tmp_path / "t.jsonl", [*TEXTS, "a" * 40 + "b"]), *words) == 2
    assert "the tokenizer breaks down on a text that begins with" in capsys.readouterr().err
    assert run("build", tmp_path / "set", jsonl(tmp_path / "u.jsonl"), *words) == 0


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def charsmap(grows: int) -> str:
    """As sentencepiece has them: a trie, here of `a` alone, and what it leads to, `grows` letters."""
    units = [0] * 256
    units[ord("a")] = ord("a") | 1 << 8 | 3 << 10
    return base64.b64encode(struct.pack("<257I", 1024, *units) + b"b" * grows + b"\0").decode()


def precompiled(grows: int) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap(grows)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("part", "stage", "taken"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [precompiled(33)] * 2}, False),
        ("normalizer", precompiled(33), True),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 25}, False),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 25}, False),
        ("normalizer", {"type": "Sequence", "normalizers": [REPLACE] * 30}, False),
        ("decoder", {"type": "Sequence", "decoders": [REPLACE] * 30}, False),
        ("normalizer", {**REPLACE, "pattern": {"Regex": "."}, "content": "a" * 2000}, False),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, REPLACE, {"type": "NFC"}]}, True),
        ("decoder", {"type": "Sequence", "decoders": [REPLACE, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}, True),
    ],
)  # fmt: skip
def test_a_tokenizer_that_blows_texts_up_is_refused(bpe, tmp_path, part, stage, taken):
    shutil.copytree(bpe, tmp_path / "theirs")
    tree = json.loads((bpe / tokenizer.FILE).read_text())
    (tmp_path / "theirs" / tokenizer.FILE).write_text(json.dumps(tree | {part: stage}))
    if taken:
        tokenizer.load(tmp_path / "theirs")
        return
    with pytest.raises(Refused, match="times as long"):
        tokenizer.load(tmp_path / "theirs")


def test_an_added_token_as_long_as_a_book_is_refused(bpe, tmp_path):
    """The library would get ready for minutes."""
    shutil.copytree(bpe, tmp_path / "theirs")
    tree = json.loads((bpe / tokenizer.FILE).read_text())
    more = {**tree["added_tokens"][0], "id": len(tree["model"]["vocab"]), "content": "a" * 5000}
    tree["added_tokens"].append(more)
    (tmp_path / "theirs" / tokenizer.FILE).write_text(json.dumps(tree))
    with pytest.raises(Refused, match="5000 characters"):
        tokenizer.load(tmp_path / "theirs")


def test_a_number_of_five_thousand_digits_is_no_traceback(bpe, tmp_path):
    shutil.copytree(bpe, tmp_path / "theirs")
    text = (bpe / tokenizer.FILE).read_text().replace('"version"', f'"more": {"9" * 5000}, "version"', 1)
    (tmp_path / "theirs" / tokenizer.FILE).write_text(text)
    with pytest.raises(Refused, match="holds no tokenizer"):
        tokenizer.load(tmp_path / "theirs")


def test_ids_of_a_tokenizer_have_no_gap(tmp_path, bpe):
    shutil.copytree(bpe, tmp_path / "bpe")
    path = tmp_path / "bpe" / "tokenizer.json"
    tree = json.loads(path.read_text())
    last = max(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    tree["model"]["vocab"][last] += 1
    path.write_text(json.dumps(tree))
    with pytest.raises(Refused, match="has 290 entries and the id 290"):
        tokenizer.load(tmp_path / "bpe")


def test_how_often_the_data_will_be_read_is_said(tmp_path, bpe, capsys):
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    have = sum(map(len, IndexedDataset(str(out / "train"))))
    words = ("schedule.train_steps=3", "schedule.decay_steps=3", "schedule.global_batch_size=4", "model.seq_length=64")
    capsys.readouterr()
    announce(translate(load("nam56r_smoke", ["data=built", f"data.path={out}", "model.vocab_size=290", *words])).plan)
    assert capsys.readouterr().out == f"> data: 768 tokens of a training split of {have:,}: {768 / have:.2f} passes\n"


@pytest.mark.parametrize(
    ("vocabulary", "largest", "model", "says"),
    [(290, 289, 290, []), (290, 289, 289, ["tokenizer has 290 entries, and the model's vocabulary 289"]),
     (290, 290, 300, ["token 290 of a vocabulary of 290"])],
)  # fmt: skip
def test_a_model_that_does_not_fit_the_dataset(vocabulary, largest, model, says):
    made = manifest.Manifest.model_construct(vocabulary=vocabulary, largest_id=largest)
    found = [p.message for p in manifest.misfit(made, model)]
    assert len(found) == len(says) and all(map(str.__contains__, found, says))


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("valid.idx", lambda raw: raw[:-2], "is cut off"),
        ("valid.idx", lambda raw: raw[:-1] + b"\1", "and its documents others"),
        ("train.idx", lambda raw: b"x" + raw[1:], "is no index of Megatron's"),
        ("train.bin", lambda raw: raw[:-2], "is cut off"),
    ],
)
def test_check_opens_nothing_that_megatron_cannot_read(tmp_path, bpe, name, damage, says):
    """A manifest that fits a broken file was a traceback."""
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    (out / name).write_bytes(damage((out / name).read_bytes()))
    made, file = (manifest.read(out), manifest.File(sha256=digest(out / name), bytes=(out / name).stat().st_size))
    manifest.write(out, made.model_copy(update={"files": made.files | {name: file}}))
    (problem,) = build.check(out, None)[1]
    assert says in problem.message


def test_what_check_finds_in_the_tokens_themselves(tmp_path, bpe):
    """A manifest that fits its files and lies about them."""
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    builder = build.IndexedDatasetBuilder(str(out / "valid.bin"), numpy.uint16)
    builder.add_document([5, 6, 289], [3])
    builder.finalize(str(out / "valid.idx"))
    made = manifest.read(out)
    for name in ("valid.bin", "valid.idx"):
        file = manifest.File(sha256=digest(out / name), bytes=(out / name).stat().st_size)
        made = made.model_copy(update={"files": made.files | {name: file}, "largest_id": 288})
    manifest.write(out, made)
    _, problems = build.check(out, 290)
    said = [p.message for p in problems if "`valid`" in p.message]
    assert "1 documents and 3 tokens, not" in said[0]
    assert said[1:] == [
        "1 documents of `valid` do not end with `<|endoftext|>`",
        "`valid` has token 289, and the manifest knows of 288 as the largest",
    ]


def test_a_manifest_says_one_thing_of_its_documents(tmp_path, bpe, capsys):
    """Those of its inputs are those of its splits; and what was skipped moves no cursor of whoever reads it."""
    out = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl"))
    made = manifest.read(out)
    manifest.write(out, made.model_copy(update={"skipped": ("a\x1b[2J",)}))
    assert run("check", out) == 0
    told = capsys.readouterr().out
    assert "left out by `--skip`: a" in told and "\x1b" not in told
    for other in ({"inputs": ()}, {"duplicates": made.duplicates + 1}):
        manifest.write(out, made.model_copy(update=other))
        assert run("check", out) == 1
        assert "documents of its inputs, and " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Invalid JSON: EOF"),
        ("\xff", "Invalid JSON: "),
        ("[" * 5000, "Invalid JSON: recursion limit"),
        ("[]", "Input should be an object"),
        ("null", "Input should be an object"),
        ("{}", "version: Field required"),
        ('{"version": 2}', "version: Input should be 1"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, capsys, text, why):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    said = refusal(capsys, "check", tmp_path)
    assert said.startswith(f"error: `{tmp_path}/manifest.json` cannot be understood: {why}")
    assert "data.path" not in said


def test_where_a_relative_dataset_was_looked_for_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hints = []
    for folder in (Path("set"), tmp_path / "set"):
        with pytest.raises(Refused) as refused:
            manifest.read(folder)
        hints.append(refused.value.problems[0].hint)
    assert [str(tmp_path) in hint for hint in hints] == [True, False]


# In Megatron's hands ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatrons(bpe) -> DefaultTokenizerText:
    """The tokenizer as the trainer gets it."""
    return DefaultTokenizerText(str(bpe), {"library": "huggingface", "metadata_path": None})


def test_megatron_reads_the_same_tokenizer(bpe, megatrons):
    ours = tokenizer.load(bpe)
    assert megatrons.vocab_size == 290
    assert [megatrons.eod, megatrons.pad] == [ours.token_to_id(t) for t in (tokenizer.END, tokenizer.PAD)]
    for text in (*TEXTS[:5], "\n\n  two  spaces \n", "", "€"):
        assert megatrons.tokenize(text) == ours.encode(text).ids
        assert megatrons.detokenize(ours.encode(text).ids) == text


def test_fill_in_the_middle_of_our_data_is_the_text_permuted(tmp_path, bpe, megatrons):
    """Each document of a sample comes back as prefix, suffix and middle of the document it was; padding has no loss."""
    out, fim = built(tmp_path, bpe, jsonl(tmp_path / "a.jsonl")), written("nam56r_smoke")["feature"]["fim"]
    config = GPTFIMDatasetConfig(
        random_seed=1, sequence_length=600, blend=None, blend_per_split=[([str(out / "train")], None), None, None],
        path_to_cache=str(tmp_path / "cache"), tokenizer=megatrons, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, fim_rate=1.0, fim_spm_rate=0.5,
        fim_extra_tokens={name: fim[f"{name}_token"] for name in ("prefix", "middle", "suffix", "pad", "eod")},
    )  # fmt: skip
    data = IndexedDataset(str(out / "train"))
    samples = GPTFIMDataset(data, str(out / "train"), numpy.arange(len(data)), 4, Split.train, config)
    whole, padded = 0, 0
    for i in range(len(samples)):
        sample = samples[i]
        documents = megatrons.detokenize(sample["tokens"].tolist()).split(tokenizer.END)
        for document in documents[1:-1]:  # the first and the last are cut
            before, rest = document.removeprefix("<fim_prefix>").split("<fim_suffix>")
            after, middle = rest.split("<fim_middle>")
            psm, spm = before + middle + after, middle + after  # suffix first: the prefix stands with the middle
            assert psm in TEXTS or (not before and spm in TEXTS)
            whole += 1
        ended = sample["labels"] == 0  # where Megatron puts padding
        padded += int((sample["loss_mask"] == 0).sum())
        assert not sample["loss_mask"][ended & (sample["tokens"] == 0)].any()
    assert whole > 10


def test_help_waits_for_no_pydantic():
    code = "import sys; from nam_megatron.data.__main__ import parser; parser().format_help(); print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_no_folder_of_a_tree_is_left_out_because_it_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "a" / "closed").mkdir(parents=True)
    scandir = os.scandir

    def closed(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(Refused, match="closed` cannot be read: Permission denied"):
        sources.files(sources.source(tmp_path / "a", "text", (".py",)))
