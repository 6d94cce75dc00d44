"""Nothing is written into a folder that vouches for its files, which would be refused from then on; by no command, and not below it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.record import report
from nam_megatron import translate
from nam_megatron.budget import picture
from nam_megatron.compile.lower import translate as compiled
from nam_megatron.data import __main__ as data
from nam_megatron.errors import REFUSED, Refused
from nam_megatron.lint import lint, recipe
from nam_megatron.recipe import load
from nam_megatron.words import taken

LAUNCH = "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2\n"


def told(*words: str) -> None:
    """A command of `nam_megatron.data`, whose refusal it prints itself."""
    assert data.main([*words]) == REFUSED


WRITERS: dict[str, Callable[[Path], object]] = {
    "corpus": lambda at: told("corpus", str(at / "x.jsonl"), "--from", "torch"),
    "tokenizer": lambda at: told("tokenizer", str(at / "x"), str(at.parent / "t.jsonl"), "--entries", "270"),
    "dataset": lambda at: told("build", str(at / "x"), str(at.parent / "t.jsonl"), "--tokenizer", str(at.parent)),
    "page": lambda at: report.put(at / "x.html", report.MADE_BY),
    "recipe": lambda at: recipe.write(lint(LAUNCH), str(at / "x.yaml")),
    "drawing": lambda at: picture.check(str(at / "x.svg")),
    "translation": lambda at: translate.write(compiled(load("nam56r_smoke")), at / "x"),
}


@pytest.mark.parametrize(
    ("mark", "below"),
    [(mark, below) for mark in taken.SAID for below in ("", "deeper") if below or mark != taken.RECEIPT],
)
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_into_what_vouches_for_its_files(tmp_path, capsys, writer, mark, below):
    at = tmp_path / "theirs" / below
    at.mkdir(parents=True)
    (tmp_path / "theirs" / mark).touch()
    (tmp_path / "t.jsonl").touch()
    try:
        WRITERS[writer](at)
        said = capsys.readouterr().err
    except Refused as refused:
        said = refused.render()
    assert f"`{tmp_path}/theirs` is {taken.SAID[mark]}, which vouches for its files" in said
    assert [path for path in (tmp_path / "theirs").rglob("*") if path.is_file()] == [tmp_path / "theirs" / mark]


def test_a_result_has_room_beside_the_record_of_its_run(tmp_path):
    (tmp_path / taken.RECEIPT).touch()
    report.put(tmp_path / "x.html", report.MADE_BY)
    assert (tmp_path / "x.html").exists()
    with pytest.raises(Refused, match="is the record of a run"):
        translate.write(compiled(load("nam56r_smoke")), tmp_path)
