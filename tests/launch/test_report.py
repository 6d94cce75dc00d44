"""The page of a run: whole in itself, true to receipt and log, and never of runs that may not be compared."""

import json
import math
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_in
from hypothesis import given
from hypothesis import strategies as st
from test_compare import BOX, LINEAGE, OUTCOME, RECIPE, TREES

from launch.record import compare, receipt, report, steps
from launch.record.redact import Redactor
from nam_megatron import events
from nam_megatron.errors import Refused

RECEIPTS = Path(__file__).parents[2] / "receipts"
LAYERS = {"attention": {"count": 2, "numbers": [1, 3]}, "moe": {"count": 2, "numbers": [2, 4]}}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "receipts"


def run(root, preset="x", lineage=LINEAGE, box=BOX, outcome=OUTCOME, steps_=40, **more):
    stands = {
        "layers": LAYERS,
        "given_up": [{"letter": "R", "designed": "m2rnn", "stands": "mamba2", "layers": [4], "by": "lane native_dp"}],
    }
    content = {"lineage": lineage, "box": box, "stands": stands, "recipe": {"preset": {"name": preset}}, **more}
    made = receipt.open_receipt(root, preset, content, Redactor({}))
    lines = [
        stand_in.step_line(n, steps_, 9000 if n == 1 else 100 + n % 3, 11 / math.sqrt(n)) for n in range(1, steps_ + 1)
    ]
    (made.folder / receipt.LOG).write_text("\n".join(lines))
    made.seal("completed", outcome)
    return made.folder


class Whole(HTMLParser):
    """Tags that are opened and closed, the texts, and what a browser would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.texts, self.fetched = [], [], re.findall(r"https?://|src=|href=|@import|url\(|<script", text)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        while self.open and (last := self.open.pop()) != tag:
            assert last in ("p", "td", "th", "tr"), f"<{last}> is not closed before </{tag}>"

    def handle_data(self, data):
        self.texts.append(data)


def test_a_page_needs_nothing_from_elsewhere_and_says_what_ran(root, capsys):
    folder = run(root)
    assert report.command([str(folder)], {}) == 0
    text = (folder / "report.html").read_text()
    page = Whole(text)
    assert page.fetched == [] and page.open == []
    said = " ".join(page.texts)
    for part in (
        folder.name,
        "completed",
        "native_dp; 1 x 8 GPUs",
        "given up: m2rnn at R",
        "layer 3: attention",
        "25,500",
        "step 1: 9,000",
    ):
        assert part in said, part
    assert text.count("<polyline") == 3  # loss, norm, time
    report.command([str(folder)], {})  # its own page is written anew
    receipt.read(folder)  # and is not part of what was sealed
    (folder / "mine.html").write_text("mine")
    with pytest.raises(Refused, match="is there, and no report"):
        report.command([str(folder)], {"out": str(folder / "mine.html")})


def test_lines_are_where_their_values_are():
    svg = report.chart([[(1, 0.0), (2, 10.0), (3, 5.0)]], ["a"])
    points = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg)[1].split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x1 < x2 < x3 and x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y2 < y3 < y1 and y3 == pytest.approx((y1 + y2) / 2, abs=0.2)
    clipped = report.chart([[(1, 500.0), (2, 10.0), (3, 10.0)]], ["a"], top=16.0)
    assert min(float(p.split(",")[1]) for p in re.search(r'points="([^"]+)"', clipped)[1].split()) >= report.TOP


def test_bars_are_as_long_as_their_values():
    widths = [
        float(w)
        for w in re.findall(
            r'<rect x="190" y="\d+" width="([\d.]+)"', report.bars([("a", 50, "--s0"), ("b", 100, "--s0")])
        )
    ]
    assert widths[0] == pytest.approx(widths[1] / 2, abs=0.1)


def test_several_runs_are_one_page_under_the_rule_of_compare(root, tmp_path):
    pair = [run(root, "x"), run(root, "y", box={"gpus": "f" * 16, "host": "a", "salt": "b"})]
    out = tmp_path / "page.html"
    with pytest.raises(Refused, match="2 hosts"):
        report.command([str(f) for f in pair], {"out": str(out)})
    assert not out.exists()
    report.command([str(f) for f in pair], {"out": str(out), "anyway": "true"})
    assert "RUMOR: these runs are not comparable" in out.read_text() and "2 hosts" in out.read_text()
    same = [run(root, "u"), run(root, "v")]
    report.command([str(f) for f in same], {"out": str(out)})
    text = out.read_text()
    assert "RUMOR" not in text and text.count("<polyline") == 6 and Whole(text).open == []
    assert "cannot be told" not in text
    old = [run(root, "u", recipe=RECIPE | {"data": {"name": "built"}}) for _ in same]
    report.command([str(f) for f in old], {"out": str(out)})
    assert f"whether the data is the same cannot be told: `{old[0].name}` and `{old[1].name}` did" in out.read_text()


def test_without_a_name_the_newest_is_taken_and_which_ones_are_is_said(root, monkeypatch, capsys):
    monkeypatch.setattr(report, "RECEIPTS", root)
    with pytest.raises(Refused, match="no run in"):
        report.command([], {})
    old, new = sorted([run(root, "x"), run(root, "y")])
    report.command([], {})
    assert f"newest: {new.name}\n" in capsys.readouterr().err and (new / "report.html").is_file()
    with pytest.raises(Refused):
        report.command([str(old), str(new), str(RECEIPTS / "20261121T120836Z-nam56r_smoke-301745")], {})
    assert f"3 runs: {old.name}, {new.name}, 2026" in capsys.readouterr().err


def test_the_newest_is_the_chains_though_a_clock_went_back(root, monkeypatch, capsys):
    monkeypatch.setattr(report, "RECEIPTS", root)
    run(root, "x")
    monkeypatch.setattr(receipt, "datetime", SimpleNamespace(now=lambda zone: datetime(2020, 1, 1, tzinfo=zone)))
    later = run(root, "y")
    report.command([], {"out": str(root / "page.html")})
    assert f"newest: {later.name}\n" in capsys.readouterr().err


def test_a_replaced_log_is_no_report(root):
    folder = run(root)
    (folder / receipt.LOG).write_text(stand_in.step_line(1, 1, 1.0))
    with pytest.raises(Refused, match=r"`log.txt` of"):
        report.command([str(folder)], {})


def test_kernels_by_kind_where_there_is_a_trace(root):
    folder = run(root)
    table = {
        "span_ms": 100.0,
        "gaps_ms": 10.0,
        "kinds": {"GEMM": {"ms": 60.0, "launches": 5}, "NCCL": {"ms": 30.0, "launches": 2}},
    }
    (folder / report.KERNELS).write_text(json.dumps(table))
    text = report.page([report.Run.read(folder)])
    assert text.index("GEMM") < text.index("NCCL") < text.index("no kernel runs") and "after it was sealed" in text
    for text in ("[]", "[" * 100_000):
        (folder / report.KERNELS).write_text(text)
        with pytest.raises(Refused, match="is no table of kernels"):
            report.Run.read(folder)


def test_what_stands_in_a_receipt_moves_no_cursor(root):
    """Its keys, too: a receipt may be anybody's."""
    folders = [run(root, recipe={"device": {"\x1b\0": f"\x07{name}"}}) for name in "ab"]
    runs = [report.Run.read(folder) for folder in folders]
    shown = (compare.table([run.receipt for run in runs], True), report.page(runs, True), report.page(runs[:1]))
    for text in shown:
        assert "\ufffd" in text and not {"\x1b", "\x07", "\0"} & {*text}


def test_the_committed_receipts_have_a_page():
    for folder in receipt.folders(report.Path(__file__).parents[2] / "receipts"):
        assert Whole(report.page([report.Run.read(folder)])).open == []


EVIL = '"><script>alert(1)</script><img src=x onerror=y>'


def test_no_word_of_a_receipt_becomes_markup(root):
    folder = run(root, lineage=LINEAGE | {"regime": EVIL}, words=[EVIL], outcome=OUTCOME | {"reason": EVIL})
    edited = receipt.read(folder) | {"words": [EVIL], "stands": {"layers": {EVIL: {"numbers": [1]}}}}
    edited["outcome"]["reason"] = EVIL
    text = report.page([report.Run(edited, None, {"span": 1.0, "gaps": 0.0, "kinds": {EVIL: 1.0}})])
    assert "<script" not in text and "<img" not in text


KEYS = [
    "recipe", "host", "job", "outcome", "patches", "forecast", "stands", "words", "findings", "chain", "files", "environ",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), TREES))
def test_no_receipt_is_a_traceback(content):
    found = {**receipt.plain(content), "run": "r", "state": "sealed", "lineage": LINEAGE}
    assert Whole(report.page([report.Run(found, None, None)])).fetched == []


def test_what_layers_measure_is_drawn_by_layer(root):
    folder = run(root)
    made = receipt.open_receipt(root, "y", {"lineage": LINEAGE, "box": BOX}, Redactor({}))
    lines = [
        stand_in.step_line(n, 9) + f" DSA kept 5: 0.{n}5 | DSA kept 13: 0.5 | M2RNN gain 12: 1.{n} |"
        for n in range(1, 10)
    ]
    (made.folder / receipt.LOG).write_text("\n".join(lines))
    made.seal("completed", OUTCOME)
    page = report.page([report.Run.read(made.folder)])
    assert [page.count(f">{name}</h2>") for name in ("DSA kept", "M2RNN gain")] == [1, 1]
    assert re.findall(r"<title>(layer \d+)</title></polyline>", page) == ["layer 5", "layer 13", "layer 12"]
    assert ">DSA kept<" not in report.page([report.Run.read(folder)])


def test_a_run_with_events_is_drawn_by_them(root):
    """Whatever its log says; and the page says so where they are not beside the receipt."""
    made = receipt.open_receipt(root, "x", {"nonce": "mine", "lineage": LINEAGE}, Redactor({}))
    (made.folder / receipt.LOG).write_text("\n".join(stand_in.step_line(n, 9, 1.0, 9.0) for n in range(1, 9)))
    record = events.Record()
    record.open(made.folder, "mine", 0)
    for n in (1, 2, 3):
        record.say(
            "step",
            step=n,
            of=3,
            ms=100.0,
            loss=2.0 + n,
            grad_norm=1.0,
            gauges={"M2RNN gain 12": 1.5, f"M2RNN gain {'9' * 5000}": 1.0},
        )
    record.close()
    made.seal("completed", OUTCOME)
    of = report.Run.read(made.folder)
    assert of.series(steps.LOSS) == [(1, 3.0), (2, 4.0), (3, 5.0)] and of.numbers("M2RNN gain") == [12]
    (made.folder / events.FILE).unlink()
    text = report.page([report.Run.read(made.folder)])
    assert "<code>" not in text and "`events.jsonl` is not beside the receipt, and it is from before" in text


def test_what_is_published_is_drawn_by_its_series(root):
    """The receipt alone: of 1000 steps every fifth and the last, a gauge among them, and of a NaN nothing."""
    said = steps.Said()
    for n in range(1, 1001):
        values = {
            steps.LOSS: math.nan if n == 6 else 10 / n,
            steps.TIME: 100.0,
            "M2RNN gain 12": float(n),
            "skipped": 0.0,
        }
        said.steps[n] = steps.Step(n, 1000, values)
    made = receipt.open_receipt(
        root, "x", {"nonce": "mine", "lineage": LINEAGE, "stands": {"layers": LAYERS}}, Redactor({})
    )
    made.seal("completed", OUTCOME | {"series": steps.series(said)})
    of = report.Run.read(made.folder)
    loss = of.series(steps.LOSS)
    assert [n for n, _ in loss] == [1, *range(11, 997, 5), 1000] and loss[-1] == (1000, 0.01)
    assert of.numbers("M2RNN gain") == [12] and len(of.receipt["outcome"]["series"]["step"]) == 201
    text = report.page([of])
    assert "<h2>Loss</h2><svg" in text and "is not beside" not in text
    assert ">*</text></g>" in text and ">* attention 2</span>" in text  # the strip without its colours


def test_a_published_receipt_is_drawn_from_nothing_else():
    (folder,) = [path.parent for path in RECEIPTS.rglob("receipt.json") if "nam56r_smoke-33a157" in path.parent.name]
    of = report.Run.read(folder)
    assert len(of.series(steps.LOSS)) == 10 and "<h2>Loss</h2><svg" in report.page([of])
