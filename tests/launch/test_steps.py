"""What the parser makes of Megatron's log: a real one (a CPU's), lines by hand, and lines by Hypothesis."""

import math
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import stand_in
from hypothesis import given
from hypothesis import strategies as st

from launch.record import outcome, receipt, steps

REAL = Path(__file__).with_name("megatron_0_19_cpu.log").read_text()


def line(number, ms, total=100, **more):
    return stand_in.step_line(number, total, ms, **more)


def figures(*lines):
    return steps.figures(steps.read(lines), 1000, 2)


def test_a_checkpoint_in_the_background_holds_training_only_until_it_is_handed_over():
    """Megatron's three lines of one, steps between them."""
    said = steps.read(
        f" [2026-11-21 12:00:{at}] {what}"
        for at, what in (
            ("01.0", "saving checkpoint at iteration       2 to /c in torch_dist format"),
            ("02.5", "scheduled an async checkpoint save at iteration       2 to /c"),
            ("09.0", "successfully saved checkpoint from iteration       2 to /c [ t 1/1, p 1/1 ]"),
        )
    )
    put = steps.bad_put(said, None, None)
    assert (put["checkpoints"], put["checkpoints_s"]) == (1, 1.5)
    assert steps.bad_put(steps.Said(saves=said.saves[:2]), None, None)["checkpoints"] == 0, "it was never whole"


def test_a_count_that_a_line_lacks_is_not_none():
    whole, less = (line(n, 100) for n in (1, 2))
    assert (figures(whole)["skipped_steps"], figures(whole)["nan_steps"]) == (0, 0)
    made = figures(whole, less.replace(" number of skipped iterations:   0 |", ""))
    assert (made["skipped_steps"], made["nan_steps"]) == (None, 0)


def test_a_real_log():
    said = steps.read(REAL.splitlines())
    assert sorted(said.steps) == [1, 2, 3, 4, 5, 6]
    step = said.steps[5]
    assert (step.total, step.ms, step.values["grad norm"]) == (6, 117.7, 2.330)
    assert (step.values["lm loss"], step.values["load_balancing_loss"]) == (5.421705, 1.000919)
    assert step.when.isoformat() == "2026-11-21T07:16:37.503219"
    assert [(s.step, s.done) for s in said.saves] == [(4, False), (4, True), (6, False), (6, True)]
    put = steps.bad_put(said, None, None)
    assert (put["checkpoints"], put["checkpoints_s"]) == (2, 2.4)  # 2.268 and 0.133 by its own clock
    assert {(r.when, r.step) for r in said.readings} == {
        ("built", 0),
        ("step", 1),
        ("step", 2),
        ("step", 4),
        ("end", 5),
    }


def test_the_window_leaves_out_every_line_with_a_first_step_in_it():
    lines = [line(1, 90000), line(2, 45000), line(3, 300), line(4, 100), line(5, 110), line(6, 160)]
    made = figures(*lines)
    assert made["window"] == {
        "first": 4, "last": 6, "lines": 3, "median_ms": 110, "p10_ms": 102, "p90_ms": 150,
        "tokens_per_s_per_gpu": 4545.5, "megatron_tflops_per_gpu": 301.2,
    }  # fmt: skip
    assert made["first_lines_ms"] == [90000, 45000, 300]
    # Megatron's second line is the mean of steps 1 and 2: 2 x 45000 + 300, less 3 x 110.
    assert steps.bad_put(steps.read(lines), None, None)["first_steps_excess_s"] == pytest.approx(90.0, abs=0.05)
    # Bridge's is step 2 alone: 90000 + 45000 + 300, less 3 x 110.
    put = steps.bad_put(steps.read(lines), None, None, every=1)
    assert put["first_steps_excess_s"] == pytest.approx(134.97, abs=0.05)
    tens = [line(10, 9090), line(20, 100), line(30, 102)]
    put = steps.bad_put(steps.read(tens), None, None, every=10)
    assert put["first_steps_excess_s"] == pytest.approx(89.9, abs=0.05)


def test_with_a_line_every_ten_steps_the_second_one_still_holds_the_first_step():
    lines = [line(1, 90000), line(10, 9090), line(20, 100), line(30, 102)]
    made = figures(*lines)
    assert (made["window"]["first"], made["window"]["median_ms"], made["steps"]) == (20, 101, 30)
    assert steps.bad_put(steps.read(lines), None, None)["first_steps_excess_s"] == pytest.approx(89.9, abs=0.05)


def test_a_clock_that_is_set_back_measures_nothing():
    """As every autumn: the log's hours are local ones."""
    noon = datetime(2026, 10, 25, 2, 59)
    lines = []
    for said, seconds in (
        ("saving checkpoint at iteration", 0),
        ("successfully saved checkpoint from iteration", 20 - 3600),
    ):
        lines.append(f" [{noon + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S.%f}] {said}       9 to c")
    put = steps.bad_put(steps.read(lines), noon, noon - timedelta(seconds=3000))
    assert (put["wall_s"], put["checkpoints_s"], put["checkpoints"]) == (None, None, 1)
    assert steps.bad_put(steps.read(lines), noon, noon - timedelta(seconds=3000), wall=600.04)["wall_s"] == 600


def test_a_resumed_run_counts_from_its_own_first_step():
    made = figures(*(line(n, 100 + n) for n in range(501, 507)))
    assert (made["window"]["first"], made["steps"]) == (504, 6)


def test_the_window_is_bounded():
    assert figures(*(line(n, 100 + n) for n in range(1, 300)))["window"]["lines"] == steps.WINDOW


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_short_run_has_no_window(count):
    made = figures(*(line(n, 100) for n in range(1, count + 1)))
    assert made["window"] is None and made["steps"] == count


def test_what_is_not_finite_is_said():
    assert figures(line(1, 100), line(2, 100))["grad_norm_finite"]
    assert not figures(line(1, 100), line(2, 100, norm="nan"))["grad_norm_finite"]
    assert not figures(line(1, 100).replace("lm loss: 6.931472E+00 |", ""))["loss_finite"]  # as Megatron prints a NaN
    assert not figures(line(1, 100).replace("6.931472E+00", "inf"))["loss_finite"]
    assert figures(line(1, 100).replace("nan iterations:   0", "nan iterations:   2"))["nan_steps"] == 2


def test_peaks_are_of_all_ranks_and_the_gap_of_the_worst():
    def said(rank, when, allocated, reserved):
        gib = 1 << 30
        bytes_ = (
            f'"allocated": 0, "peak_allocated": {allocated * gib}, "reserved": 0, "peak_reserved": {reserved * gib}'
        )
        return f'nam_megatron.readings {{"rank": {rank}, "when": "{when}", "step": 1, {bytes_}}}'

    lines = [said(0, "step", 10, 12), said(1, "step", 12, 13), said(0, "end", 20, 21), said(1, "end", 20, 25)]
    assert steps.memory(steps.read(lines)) == {
        "ranks": 2, "peak_allocated_gib": 20, "peak_reserved_gib": 25,
        "gap": [{"when": "step", "step": 1, "rank": 0, "gib": 2}, {"when": "end", "step": 1, "rank": 1, "gib": 5}],
    }  # fmt: skip


@pytest.mark.parametrize("ended", [(7, 5), (5, 7)])
def test_the_last_step_is_that_of_the_rank_that_finished_fewest(ended):
    held = dict.fromkeys(steps.BYTES, 0.0)
    said = steps.Said(readings=[steps.Reading(0, "step", 3, **held)])
    assert steps.last_step(said) is None
    said.readings += [steps.Reading(rank, "end", step, **held) for rank, step in enumerate(ended)]
    assert steps.last_step(said) == 5


def test_megatrons_own_memory_lines_are_read_in_mebibytes():
    said = "[Rank 3] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 1024.00 | reserved: 3.00 | max reserved: 2048.00"
    assert steps.memory(steps.read([said]))["gap"] == [{"when": "step", "step": 2, "rank": 3, "gib": 1.0}]


PIECES = st.sampled_from(
    [
        " iteration", " 5/", "100 |", "elapsed time per iteration (ms):", " 845.1 |", " grad norm: nan |", "lm loss: 1e999 |", "1.2.3", "|",
        "nam_megatron.readings {", '"rank": 0', '"step": ' + "9" * 30, "}", "[Rank 0] (after 1 iterations) memory (MB) |", " allocated: ",
        "[2026-02-31 25:00:00]", "] saving checkpoint at iteration 3 to", "\x00", "\ud800", "٣", ":", "error: x", "exitcode  : 2",
        "[2026-01-01 00:00:00] launch: started", "NCCL INFO rank 0 nranks 2 cudaDev 0 busId 18000",
    ]
)  # fmt: skip
LINES = st.lists(st.one_of(st.text(), st.lists(PIECES).map("".join), st.sampled_from(REAL.splitlines())), max_size=12)


@given(LINES)
def test_no_line_is_a_traceback(lines):
    said = steps.read(lines)
    made = steps.figures(said, 1000, 2)
    window = made["window"]
    assert window is None or (
        math.isfinite(window["median_ms"]) and window["p10_ms"] <= window["median_ms"] <= window["p90_ms"]
    )
    steps.memory(said), steps.bad_put(said, None, None)


@given(LINES, st.integers(0, 400))
def test_no_log_is_a_traceback_and_its_receipt_can_be_written(tmp_path_factory, lines, cut):
    folder = tmp_path_factory.mktemp("run", numbered=True)
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    (folder / receipt.LOG).write_bytes(text[: len(text) - cut] if cut < len(text) else text)
    (folder / "nccl.1").write_bytes(text)
    came = outcome.of_run(folder, {"job": {"world": 2, "tokens_per_step": 5}, "forecast": {"peak_allocated_gib": 1.0}})
    receipt.write(folder, receipt.sealed({"schema": receipt.SCHEMA, "run": folder.name}, "lost", receipt.plain(came)))
    assert outcome.summary(receipt.read(folder)["outcome"], "GPU")


def test_a_folder_without_a_log_has_no_figures(tmp_path):
    came = outcome.of_run(tmp_path, {})
    assert (came["figures"]["steps"], came["memory"], came["nccl"], came["reason"]) == (0, None, None, None)
    assert outcome.summary(came | {"end": "refused"}, "GPU").splitlines() == ["refused", "no step"]


def test_nccls_view_and_ours(tmp_path):
    """Lines as NCCL 2.28 prints them; the pair communicator numbers its ranks anew."""
    (tmp_path / "nccl.h.1").write_text(
        "h:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"
        "h:1:9 [0] NCCL INFO Using network IB\n"
        "h:1:9 [0] NCCL INFO ncclCommInitRankConfig comm 0x54 rank 2 nranks 3 cudaDev 0 nvmlDev 0 busId 18000 commId 0x1 - Init START\n"
        "h:1:9 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 18000 commId 0x1 - Init START\n"
        "h:1:9 [0] NCCL INFO ncclCommSplit comm 0x56 rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 18000 parent 0x55 - Init START\n"
    )
    (tmp_path / "nccl.h.2").write_text(
        "h:2:9 [1] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 2a000 x\n"
        "h:2:9 [1] NCCL INFO ncclCommSplit comm 0x57 rank 0 nranks 2 cudaDev 1 nvmlDev 1 busId 2a000 parent 0x55 - Init START\n"
    )
    view = outcome.nccl(tmp_path.glob(receipt.NCCL))
    assert (view["version"], view["network"], view["world"]) == ("2.28.9+cuda13.0", "IB", 4)
    assert view["ranks"] == {n: {"device": n, "bus": f"00000000:{bus}:00.0"} for n, bus in ((0, "18"), (1, "2A"))}
    device = {"node": 0, "device": 0, "name": "x", "expandable": True}
    buses = "00000000:18:00.0", "00000000:18:00.0", "00000000:5D:00.0"
    said = [stand_in.reading("built", 0, 0, **device | {"rank": rank, "bus": bus}) for rank, bus in enumerate(buses)]
    host = {
        "gpus": [{"bus": "00000000:18:00.0"}],
        "topology": {"nics": {"GPU0": ["mlx5_0 (PIX)"]}, "cpus": {"GPU0": "0-31"}},
    }
    ranks = outcome.ranks(steps.read(said), view, host)
    assert [(r["gpu"], r["nics"], r["nccl_agrees"]) for r in ranks] == [
        ("GPU0", ["mlx5_0 (PIX)"], True),
        ("GPU0", ["mlx5_0 (PIX)"], False),
        (None, None, None),
    ]
    assert ranks[0].keys() > device.keys()
