"""The whole of `check` on pretend hosts: real looks at this machine, an `nvidia-smi` that prints what a host of H200s does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import FIXTURES, nvidia_smi, process, program, smi

from launch import app, finding
from launch.context import Context
from launch.host import preflight, stack
from launch.run import job
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load

REPO = Path(__file__).parents[2]
WORDS = {
    "format": "auto", "revision": None, "dirty": "store", "sanity": False, "port": 29741, "lock": None, "diagnostic": None,
    "over_memory": "refuse", "trainer": "megatron",
}  # fmt: skip
# What every machine that runs these tests lacks, or has in its own way.
HERE = ("lock", "extensions", "root-volume", "git", "numa", "xid", "limits", "shm", "clock", "venv", "compiling")


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A context of a smoke run on 4 GPUs whose folders are there; its programs are those of tmp_path/bin. Imports are test_stack's."""
    monkeypatch.setattr(stack, "probe", lambda lock, environ: {"torch": {"torch": "2.11.0", "cuda": lock.torch_cuda}})
    monkeypatch.setattr(stack, "stale", lambda *_: [])  # a look at all of Megatron, which test_stack takes
    monkeypatch.setattr(preflight.linux, "processes", lambda: [])  # other tests train beside this one
    for name in ("durable", "scratch"):
        (tmp_path / name).mkdir()
    given = [f"cluster.storage.{n}={tmp_path / n}" for n in ("durable", "scratch", "receipts")]
    (tmp_path / "bin").mkdir()
    environ = {k: v for k, v in os.environ.items() if k in ("HOME", "PYTHONPATH", "LANG")} | {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin"
    }
    monkeypatch.setenv("PATH", environ["PATH"])

    def make(*overrides, environ=environ, **words):
        return Context(
            translate(load("nam56r_smoke", ["cluster=h200_4", "schedule.global_batch_size=8", *given, *overrides])),
            WORDS | words,
            (),
            environ,
        )

    return make


def failures(report):
    return {f.name for f in report.findings if f.level == "fail"} - set(HERE)


def healthy(tmp_path, **changes):
    nvidia_smi(tmp_path / "bin", smi(4, **changes), (FIXTURES / "topo_h200_x4.txt").read_text())


def test_a_healthy_host_passes_and_its_facts_can_stand_in_a_receipt(context, tmp_path):
    nvidia_smi(tmp_path / "bin", smi(8), (FIXTURES / "topo_h200_x8_nics.txt").read_text())
    report = preflight.check(context("cluster.gpus_per_node=8", "schedule.global_batch_size=16"))
    assert failures(report) == set()
    assert report.findings[0].name == "torch"  # what explains the rest comes first
    known, facts = json.dumps(report.facts), report.facts
    assert facts["torch"]["torch"] == "2.11.0"
    assert facts["topology"]["links"] == "NV18" and facts["topology"]["nics"]["GPU5"] == ["mlx5_7 (PIX)"]
    assert facts["driver"] == "580.159.04" and [g["bus"] for g in facts["gpus"]][4:6] == [
        "00000000:04:00.0",
        "00000000:05:00.0",
    ]
    assert report.facts["versions"]["megatron-core"] == "0.19.2" and report.facts["megatron"] in ("pristine", "patched")
    for name in (socket.gethostname(), str(tmp_path), "GPU-0000", os.environ.get("USER") or "no user"):
        assert name not in known


def test_a_bad_host_shows_all_that_is_wrong_at_once(context, tmp_path):
    nvidia_smi(
        tmp_path / "bin",
        smi(4, at=1, ecc="Disabled", processes=process(1)),
        (FIXTURES / "topo_l40_x4_nics.txt").read_text(),
    )
    report = preflight.check(context("cluster.storage.scratch=/nowhere"))
    assert failures(report) == {"topology", "ecc", "idle", "storage"}


def test_data_that_would_be_looked_through_for_ever_fails(context, tmp_path):
    words = ("data=indexed", f"data.path={tmp_path}/durable/a", "data.tokenizer=t")
    report = preflight.Report(*preflight.intent(context(*words)))
    assert [f.message for f in report.findings if f.name == "data"] == [f"`{tmp_path}/durable/a.idx` is not there"]
    assert not [f for f in preflight.intent(context())[0] if f.name == "data"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "echo 'No devices were found'; exit 6",
        "echo",
        "kill -9 $$",
    ],
)
def test_an_nvidia_smi_without_a_driver(context, tmp_path, script):
    program(tmp_path / "bin", "nvidia-smi", script)
    assert failures(preflight.check(context())) == {"gpus", "topology"}


def test_a_driver_that_hangs_is_bounded(context, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 1)
    program(tmp_path / "bin", "nvidia-smi", "sleep 100")
    report = preflight.check(context())
    assert failures(report) == {"gpus", "topology"}
    assert sum("no answer within 1 s" in f.message for f in report.findings) == 2


def test_a_host_without_gpus_says_so(context):
    report = preflight.check(context())
    assert failures(report) == {"gpus", "topology"} and "gpus" not in report.facts
    assert any("`nvidia-smi` cannot be started" in f.message for f in report.findings)


def test_waivers_are_by_name_and_stand_beside_what_they_waive(context, tmp_path):
    healthy(tmp_path, ecc="Disabled")
    report = preflight.check(context("+cluster.waivers.ecc=borrowed host"))
    (found,) = (f for f in report.findings if f.name == "ecc")
    assert found.level == "waived" and "ECC is off (waived: borrowed host)" in found.message
    assert failures(report) == set()


ASKED = [
    "gpu.findings", "topology.fabric", "topology.findings", "topology.counted", "linux.numa", "linux.stale", "linux.port_free",
    "linux.network", "linux.xid", "linux.limits", "linux.shm", "linux.clock", "linux.compiling", "storage.findings",
    "storage.environment", "storage.space", "source.findings", "job.findings", "overlay.findings", "stack.findings", "stack.megatron",
    "stack.bytecode", "stack.bytecode_of_megatron",
]  # fmt: skip


def test_what_each_look_finds_is_said(context, tmp_path, monkeypatch):
    healthy(tmp_path)
    monkeypatch.setattr(stack, "probed", lambda *_: {"active": {"0": 18}})
    monkeypatch.setattr(preflight.linux, "kernel_log", lambda _: "")
    for name in ASKED:
        module, function = name.split(".")
        found = finding.Finding("idle", "fail", name)
        many = (
            "findings" in name or name in ("topology.fabric", "topology.counted", "linux.limits") or "bytecode" in name
        )
        said = [found] if many else (found, "pristine") if name == "stack.megatron" else found
        monkeypatch.setattr(getattr(preflight, module), function, lambda *_, said=said: said)
    assert {f.message for f in preflight.check(context()).findings} >= {*ASKED}


def test_the_sanity_pass_waits_for_idle_gpus(context, tmp_path):
    healthy(tmp_path, processes=process(7))
    report = preflight.check(context(sanity=True))
    (found,) = (f for f in report.findings if f.name == "gemm")
    assert found.level == "fail" and found.message == "the sanity pass was not run: idle first"


def test_the_sanity_pass_gets_this_shells_nccl_variables(context, tmp_path, monkeypatch):
    """What a host needs NCCL to leave alone is said in the shell, and must reach every process that is started."""
    healthy(tmp_path)
    monkeypatch.setattr(preflight, "NEEDED", ())
    seen = {}
    monkeypatch.setattr(preflight.sanity, "run", lambda device, count, port, environ: seen.update(environ) or ([], {}))
    made = context(sanity=True)
    preflight.check(replace(made, environ={**made.environ, "NCCL_NVLS_ENABLE": "0"}))
    assert seen["NCCL_NVLS_ENABLE"] == "0" and seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("gpus", "said", "runs"), [(4, None, True), (1, None, False), (4, False, False), (1, True, True)]
)
def test_the_collective_pass_is_the_default_of_several_gpus(context, tmp_path, monkeypatch, gpus, said, runs):
    nvidia_smi(tmp_path / "bin", smi(gpus), (FIXTURES / f"topo_h200_x{gpus}.txt").read_text())
    monkeypatch.setattr(preflight, "NEEDED", ())
    asked = []
    monkeypatch.setattr(preflight.sanity, "run", lambda *words: asked.append(words) or ([], {}))
    preflight.check(context(f"cluster.gpus_per_node={gpus}", sanity=said))
    assert bool(asked) == runs


def test_hosts_of_one_job_are_compared_by_what_they_run(context, tmp_path):
    healthy(tmp_path)
    facts = preflight.check(context()).facts
    same = preflight.fingerprint(facts)
    assert preflight.fingerprint({**facts, "topology": None}) == same
    *most, last = facts["gpus"]
    others = [
        {**facts, "versions": {**facts["versions"], "triton": "3.5.0"}},
        {**facts, "gpus": [*most, last | {"vbios": "97"}]},
    ]
    others += [{**facts, name: "another"} for name in ("driver", "driver_cuda", "megatron", "torch", "plan")]
    assert same not in [preflight.fingerprint(f) for f in others]
    assert finding.render([], "line", "n1", same) == f"PASS @ n1 software={same}\n"


@pytest.mark.slow
def test_hosts_of_other_code_or_other_packages_of_the_plan_differ(context, tmp_path, monkeypatch, capsys):
    """No version of the stack tells either."""
    healthy(tmp_path)

    def said(*overrides, trees=None) -> str:
        made = context(*overrides, format="line")
        if trees:
            vars(made)["source"] = replace(made.source, trees=trees)
        app.check(made)
        return capsys.readouterr().out.partition("software=")[2]

    first = said()
    assert first == said() and "\n" in first
    assert first != said("optim.lr=0.1")
    assert first != said(trees={"nam_megatron": "0" * 40, "launch": "1" * 40})
    installed = job.installed
    monkeypatch.setattr(job, "installed", lambda name: "0.0.1" if name == "einops" else installed(name))
    assert first != said()


def test_a_check_leaves_nothing_behind(context, tmp_path):
    healthy(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    preflight.check(context())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_the_command_on_this_machine():
    words = [sys.executable, "-m", "launch", "check", "conf=nam56r_smoke", "format=json"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    said = json.loads(done.stdout)
    failed = {f["name"] for f in said["findings"] if f["level"] == "fail"}
    assert said["pass"] is False and {"gpus", "topology", "extensions"} <= failed <= set(finding.NAMES)


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_and_leaves_no_process(tmp_path):
    hangs = f'[ "$1" = topo ] || exec cat {tmp_path}/bin/report; echo $$ > {tmp_path}/pid; sleep 1200'
    nvidia_smi(tmp_path / "bin", smi(1), "")
    program(tmp_path / "bin", "nvidia-smi", hangs)
    words = [sys.executable, "-m", "launch", "check", "conf=nam56r_smoke"]
    environ = {**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    with subprocess.Popen(words, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ) as check:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()):
            assert check.poll() is None
            time.sleep(0.05)
        check.send_signal(signal.SIGINT)
        assert check.wait(900) != 0  # what it asked would answer after 1,200 s
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_every_name_of_a_finding_is_explained():
    told = (REPO / "docs/preflight.md").read_text()
    assert [name for name in finding.NAMES if f"| `{name}` |" not in told] == []
