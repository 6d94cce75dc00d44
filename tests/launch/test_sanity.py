"""What Megatron's sniff test prints, read and judged; the test itself needs GPUs."""

import re

import pytest
from hosts import FIXTURES
from hypothesis import given
from hypothesis import strategies as st

from launch.host import sanity
from launch.host.bounded import Answer
from launch.record.redact import Redactor
from nam_megatron.recipe import load

DEVICE = load("nam56r_smoke").device
GEMM = "GEMM throughput (8192x8192x8192, bf16) [TFLOP/s/GPU]"
REDUCE = "All-reduce busbw (global PG, size=4, 268 MB) [GB/s]"


def text(gemm=700.0, reduce=300.0, after=""):
    """As rank 0 of 4 prints it."""
    lines = ["GPU sniff test (standalone): world_size=4, ep_size=4, tp_size=4", "CUDA device: NVIDIA H200", "=" * 60]
    for name, value in (
        (GEMM, gemm),
        ("GEMM throughput (4096x4096x16384, bf16) [TFLOP/s/GPU]", 650.0),
        (REDUCE, reduce),
        ("All-reduce busbw (global PG, size=4, 1 MB) [GB/s]", 20.0),
        ("All-to-all busbw (EP PG, size=4, 268 MB) [GB/s]", 250.0),
    ):
        lines.append(f"  {name}: median={value + 5:.2f}, mean={value + 4:.2f}, min={value:.2f}, max={value + 9:.2f}")
        lines += [after] if name == GEMM and after else []
    return "\n".join([*lines, "  Result: ALL RANKS OK"])


def judged(said, count=4):
    return [(f.name, f.level) for f in sanity.findings(sanity.parse(said), DEVICE, count)]


def test_healthy_gpus_pass_and_one_gpu_needs_no_collective():
    assert judged(text()) == [("gemm", "ok"), ("collective", "ok")]
    assert judged(text().split("  All-reduce")[0], 1) == [("gemm", "ok")]


def test_what_an_h200_printed():
    (found,) = sanity.findings(sanity.parse((FIXTURES / "sniff_h200_x1.txt").read_text()), DEVICE, 1)
    assert found.level == "ok" and "800.93 to 800.93" in found.message


def test_below_the_floors_of_the_device_file():
    assert judged(text(gemm=DEVICE.gemm_floor_tflops - 1))[0] == ("gemm", "fail")
    assert judged(text(reduce=DEVICE.allreduce_floor_gbs - 1))[1] == ("collective", "fail")
    assert judged(text(gemm=float("nan")))[0] == ("gemm", "fail")


def test_a_missing_figure_fails():
    assert judged("", 2) == [("gemm", "fail"), ("collective", "fail")]
    assert judged(text().replace("268 MB", "300 MB"), 2)[1] == ("collective", "fail")


def test_an_outlier_is_named_by_rank_and_not_by_host():
    said = text(after="    OUTLIER rank 2 (gpu-node-17.example): 600.10 (-14.9%)")
    (found, _) = sanity.findings(sanity.parse(said), DEVICE, 4)
    assert found.level == "fail" and "rank 2 " in found.message and "node-17" not in found.message


def test_the_script_of_the_installed_megatron_prints_what_is_read():
    """Its own format strings, so that another Megatron's other words are noticed."""
    source = sanity.script().read_text()
    assert '"  {name}: median={median:.2f}, mean={mean:.2f}, min={min_val:.2f}, max={max_val:.2f}"' in source
    assert '"    OUTLIER rank {i}{node}: {all_vals[i]:.2f} ' in source
    assert '"GEMM throughput ({M}x{N}x{K}, bf16"' in source and "(8192, 8192, 8192)" in source
    assert '"All-reduce busbw (global PG, size={group_size}, {nbytes / 1e6:.0f} MB) [GB/s]"' in source
    names = re.findall(r'f"((?:GEMM|[\w/-]+ busbw) [^"]*)', source)
    assert len(names) == 5 and all(name.startswith(("GEMM", *sanity.WIRES)) for name in names), names
    assert "MSG_BYTES_LARGE = 256 * 1024 * 1024" in source and f"{256 * 2**20 / 1e6:.0f} MB" == "268 MB"


def test_a_receipt_has_every_figure_under_its_own_name():
    names = (
        "GEMM throughput (4096x4096x16384, bf16) [TFLOP/s/GPU]",
        *(f"{wire}, size=2, 268 MB) [GB/s]" for wire in sanity.WIRES),
    )
    figures = {name: place for place, name in enumerate(names)}
    assert Redactor({}).tree(figures) == figures


@pytest.mark.slow
def test_without_a_gpu_the_pass_fails_and_is_bounded():
    found, figures = sanity.run(DEVICE, 1, 29511, {"PATH": "/usr/bin:/bin"})
    assert [(f.name, f.level) for f in found] == [("gemm", "fail")] and figures == {}


def test_dcgm():
    said = (FIXTURES / "dcgmi_persistence.txt").read_text()
    found = sanity.dcgm(said, 226)
    assert (found.level, found.message) == ("fail", "dcgmi diag: Persistence Mode failed")
    healthy = re.sub(r"\| Persistence Mode          \| Fail", "| Persistence Mode          | Pass", said)
    assert sanity.dcgm(healthy, 0).message == "dcgmi diag: 9 of 9 tests passed"
    offline = "Error: unable to establish a connection to the specified host: localhost"
    assert (sanity.dcgm(offline, 1).level, sanity.dcgm("", None, "no answer within 120 s").level) == ("note", "note")


@given(
    st.lists(
        st.sampled_from([*text().splitlines(), "  x: median=a, mean=b, min=c, max=d", "    OUTLIER rank 1: x"])
        | st.text()
    )
)
def test_no_output_ends_in_a_traceback(lines):
    list(sanity.findings(sanity.parse("\n".join(lines)), DEVICE, 2))


def test_the_pass_runs_megatrons_own_test_and_nvidias(tmp_path, monkeypatch):
    """In the environment that was given; its words are what torchrun and dcgmi take."""
    (tmp_path / "dcgmi").write_text("")
    (tmp_path / "dcgmi").chmod(0o755)
    asked = []

    def ask(words, seconds, environ):
        asked.append((words, environ))
        return Answer(
            0, text() if "torch.distributed.run" in words else (FIXTURES / "dcgmi_persistence.txt").read_text()
        )

    monkeypatch.setattr(sanity, "ask", ask)
    monkeypatch.setattr(sanity, "script", lambda: tmp_path / "sniff.py")
    found, facts = sanity.run(DEVICE, 4, 29500, {"PATH": str(tmp_path), "MINE": "1", "NCCL_DEBUG": "INFO"})
    (sniff, environ), (dcgmi, _) = asked
    assert str(tmp_path / "sniff.py") in sniff and "--nproc-per-node=4" in sniff
    assert (environ["MINE"], environ["NCCL_DEBUG"], environ["PYTHONSAFEPATH"]) == ("1", "WARN", "1")
    assert dcgmi == [str(tmp_path / "dcgmi"), "diag", "-r", "1"]
    assert "dcgmi diag: Persistence Mode failed" in [f.message for f in found]
    assert facts[GEMM] == {"median": 705.0, "min": 700.0, "max": 709.0}
