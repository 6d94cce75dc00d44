"""The measured comparisons: what they report is what was trained, and every rung is a recipe."""

import argparse
import itertools
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from test_train import lowered, run, trained

from launch.host import storage
from launch.record import steps
from nam_megatron import train
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.laws import book
from nam_megatron.prove import every
from nam_megatron.recipe import load

sys.path.insert(0, str(Path(train.__file__).parents[1] / "benchmarks"))

import clock
import kernels
import ladder
import losses
import measure
import peak_memory
import report
import sitting
import throughput


def gauge() -> None:
    """From here on, in this process: a GPU's counters, and a profiler that looks at the CPU."""
    resets, profile = [], torch.profiler.profile
    torch.cuda.reset_peak_memory_stats = lambda: resets.append(None)
    torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved = lambda: 10 + 10 * len(resets), lambda: 1000
    torch.cuda.mem_get_info, torch.cuda.get_device_name = lambda: (1, 5), lambda: "pretended"
    torch.profiler.profile = lambda activities: profile(activities=[torch.profiler.ProfilerActivity.CPU])
    kernels.table = lambda trace: {"events": len(trace["traceEvents"])}


def test_no_dataset_is_told_before_anything_is_trained(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="is no built dataset: No such file"):
        measure.dataset(str(tmp_path))


@pytest.mark.slow
def test_the_memory_benchmark_reports_what_was_trained(tmp_path):
    out = tmp_path / "peak.json"
    layout = ("cluster=h200_2", "parallel.pipeline=2", "schedule.train_steps=4")
    ranks = run(
        tmp_path,
        *layout,
        world=2,
        before=gauge,
        main=lambda words, now: peak_memory.main(
            ["--out", str(out), "--profile", f"{tmp_path}/trace.json", *words], now
        ),
    )
    losses = trained(ranks)
    document = json.loads(out.read_text())
    steps = document["steps"]
    # Megatron's second log line is the mean of the first two steps.
    assert [step["losses"]["lm loss"] for step in steps][::2] == pytest.approx(losses[::2], abs=1e-5)
    assert document["peak_bytes"]["setup"] == {"allocated": 10, "reserved": 1000}
    assert document["peak_bytes"]["first_step"]["allocated"] == 20
    assert document["peak_bytes"]["steady"]["allocated"] == 50
    assert document["median_step_seconds"] == steps[2]["seconds"]  # the first two warm up, the last is profiled
    assert document["kernels"]["events"] > 1000
    assert [r["device_used"] for r in document["ranks"]] == [4, 4]
    assert sum(r["parameters"] for r in document["ranks"]) == 321944  # as Megatron counts this model on one rank


@pytest.mark.slow
def test_stock_is_megatrons_own_builder_and_stack(tmp_path):
    """Its default stack needs TE; here ours stands in its place, in the module where Megatron keeps it."""

    def default_stack() -> None:
        import megatron.training.models.hybrid as hybrid
        import modules

        from nam_megatron.runtime import pretrain, stack

        gauge()
        hybrid.default_hybrid_stack_spec = stack.hybrid_stack_spec(lowered().plan, modules.CpuBackend())
        pretrain.NamModelBuilder.build_model = None  # whoever calls it fails
        told = peak_memory.stock

        def stock_on_cpu() -> None:
            told()
            made = pretrain.settings

            def settings(args, spec):
                args.apply_rope_fusion = False  # a kernel of TE
                return made(args, spec)

            pretrain.settings = settings

        peak_memory.stock = stock_on_cpu

    def losses(*words: str, before) -> list[float]:
        out = tmp_path / "peak.json"
        trained(
            run(tmp_path, before=before, main=lambda w, now: peak_memory.main(["--out", str(out), *words, *w], now))
        )
        return [step["losses"]["lm loss"] for step in json.loads(out.read_text())["steps"]]

    assert losses("--stock", before=default_stack) == losses(before=gauge)


@pytest.mark.slow
def test_the_report_comes_where_a_command_stops(tmp_path):
    out = tmp_path / "peak.json"
    save = (f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=2", "schedule.stop_every=2")
    words = ("--out", str(out))
    trained(
        run(
            tmp_path, "schedule.train_steps=5", *save, before=gauge,
            main=lambda w, now: peak_memory.main([*words, *w], now),
        )
    )  # fmt: skip
    assert len(json.loads(out.read_text())["steps"]) == 2


# Kernels -------------------------------------------------------------------------------------------------------------------------

NAMES = {
    "nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopB_NTT": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": "GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3": "attention core",
    "_chunk_scan_chunk_state_bwd_dx_kernel": "Mamba scan, conv, norm",
    "void causal_conv1d_bwd_kernel<Causal_conv1d_bwd_kernel_traits<128, 4, true, bf16>>": "Mamba scan, conv, norm",
    "_layer_norm_bwd_kernel": "Mamba scan, conv, norm",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>": "norms",
    "ln_tma_bwd_kernel": "norms",  # cuDNN's
    "void transformer_engine::multi_tensor_adam::AdamFunctorMaster": "optimizer",
    "_permute_kernel": "MoE permute, sort, router",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<>": "MoE permute, sort, router",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "NCCL",
    "triton_red_fused__to_copy_max_0": "cross entropy",
    "triton_poi_fused__to_copy_arange_index_index_put_rsub_sub_view_0": "cross entropy",
    "_cross_entropy_gradient": "cross entropy",
    "triton_poi_fused_mul_pow_relu_threshold_backward_0": "element-wise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "gradient adds",
    "void at::native::vectorized_elementwise_kernel<4, at::native::relu_kernel>": "element-wise",
    "Memcpy DtoD (Device -> Device)": "copies and fills",
    "something new": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_told_by_its_name(name):
    assert kernels.kind_of(name) == NAMES[name]


@pytest.mark.parametrize("folder, kind", [("mamba3", "Mamba-3"), ("m2rnn", "M2RNN"), ("mla", "MLA"), ("dsa", "DSA")])
def test_every_kernel_that_a_block_launches_counts_as_the_blocks(folder, kind):
    sources = [path.read_text() for path in (Path(train.__file__).parent / "blocks" / folder).glob("*.py")]
    jitted = {name for source in sources for name in re.findall(r"@triton\.jit.*\ndef (\w+)\(", source)}
    launched = jitted & {name for source in sources for name in re.findall(r"\b(\w+)\[", source)}
    assert launched
    assert {name: kernels.kind_of(name) for name in launched} == dict.fromkeys(launched, kind)


def test_gaps_are_where_no_kernel_runs():
    """Times are microseconds in a trace; two streams may overlap."""
    spans = [("nvjet_a", 0, 1000), ("ncclDevKernel_b", 500, 1000), ("nvjet_a", 3000, 500), ("Memset", 3100, 100)]
    events = [{"ph": "X", "cat": "kernel", "name": n, "ts": t, "dur": d} for n, t, d in spans]
    events += [{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 9000}, {"ph": "M"}]
    found = kernels.table({"traceEvents": events})
    assert (found["span_ms"], found["busy_ms"], found["gaps_ms"]) == (3.5, 2.0, 1.5)
    assert found["kinds"]["GEMM"] == {"ms": 1.5, "launches": 2}
    assert found["nccl_alone_ms"] == 0.5
    assert found["waits"] == [{"after": "NCCL", "before": "GEMM", "ms": 1.5, "gaps": 1}]
    assert found["top"][0] == {"name": "nvjet_a", "kind": "GEMM", "ms": 1.5, "launches": 2}
    with pytest.raises(ValueError, match="no kernels"):
        kernels.table({"traceEvents": []})


# Trials --------------------------------------------------------------------------------------------------------------------------


def ranks(tmp_path: Path, code: str, limit: float = 1000.0) -> tuple[int | str, str, float]:
    begin = time.monotonic()
    ended = measure.ranks([sys.executable, "-c", code], os.environ, 3, tmp_path / "log", limit)
    return ended, (tmp_path / "log").read_text(), time.monotonic() - begin


def test_ranks_are_told_who_they_are(tmp_path):
    # In one write: the three share a log.
    code = (
        "import os; os.write(1, ''.join(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')).encode() + b'\\n')"
    )
    ended, said, _ = ranks(tmp_path, code)
    assert ended == 0
    assert sorted(said.split()) == ["003", "113", "223"]


def test_a_rank_that_fails_ends_the_others(tmp_path):
    ended, _, seconds = ranks(
        tmp_path, "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(1200)"
    )
    assert ended == 7
    assert seconds < 900


def test_nothing_outlives_the_limit(tmp_path):
    stay = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(1200)"
    ended, _, seconds = ranks(tmp_path, stay, limit=2.0)
    assert ended == "over 2 s"
    assert seconds < 900


def test_a_recipe_that_cannot_be_is_a_row_with_its_reason(tmp_path):
    entry = measure.trial("x", "nam56r_smoke", ["parallel.tensor=3"], tmp_path, 9)
    assert entry["error"].startswith("error: 1 GPU cannot hold tensor 3")


@pytest.mark.slow
def test_every_rung_is_a_plan_that_can_be_trained():
    for overrides, _ in throughput.RUNGS.values():
        assert measure.lowered(throughput.PRESET, (*throughput.CUT, *overrides)).plan.not_built == ()
    for name, world in ladder.RUNGS.items():
        plan = measure.lowered(ladder.PRESET, (*ladder.overrides(name), "schedule.save=x")).plan
        assert plan.not_built == ()
        assert plan.recipe.world_size == world
    for one in losses.RUNS.values():
        assert measure.lowered(one.preset, one.overrides).plan.not_built == ()


def test_losses_are_what_the_log_said_of_each_step():
    line = " [2026-11-24 10:00:0{n}] iteration {n}/ 3 | elapsed time per iteration (ms): 9.0 | lm loss: {loss} | grad norm: 2.0 |{more}"
    said = steps.read(
        line.format(n=n, loss=loss, more=more)
        for n, loss, more in ((1, "1.1E+01", " DSA kept 5: 0.25 |"), (2, "9.5", ""), (3, "8.5", ""))
    )
    assert losses.series(said) == {
        "lm loss": {1: 11.0, 2: 9.5, 3: 8.5}, "grad norm": {1: 2.0, 2: 2.0, 3: 2.0}, "DSA kept 5": {1: 0.25}
    }  # fmt: skip


def test_a_run_that_fails_leaves_how_far_it_went(tmp_path, monkeypatch, capsys):
    def trial(name, preset, overrides, folder, limit, words):
        (folder / f"{name}.log").write_text("iteration 1/ 19 | elapsed time per iteration (ms): 9.0 | lm loss: 4.0 |\n")
        assert "schedule.train_steps=19" in overrides and words == ("--stock",)
        return {"name": name, "preset": preset, "wall_seconds": 1.0, "error": "exit 1: OutOfMemoryError"}

    monkeypatch.setattr(measure, "trial", trial)
    assert losses.main(["train", "stock_1235", "--out", str(tmp_path), "--steps", "19"]) == 1
    document = json.loads((tmp_path / "stock_1235.json").read_text())
    assert document["series"] == {"lm loss": {"1": 4.0}} and document["error"] == "exit 1: OutOfMemoryError"
    assert capsys.readouterr().out == "stock_1235: exit 1: OutOfMemoryError\n"


@pytest.mark.parametrize(("name", "steps"), [("stock_1235", 10), ("bf16_author_calm_1234", 200)])
def test_a_run_that_would_end_in_its_warm_up_is_refused_and_leaves_the_record(name, steps, tmp_path, capsys):
    record = tmp_path / f"{name}.json"
    record.write_text("of a whole run")
    with pytest.raises(SystemExit) as end:
        losses.main(["train", name, "--out", str(tmp_path), "--steps", str(steps)])
    assert end.value.code == 2 and record.read_text() == "of a whole run"
    said = f"error: --steps {steps}: {name} has {steps} steps of warm-up; give it more than those\n"
    assert capsys.readouterr().err.endswith(said)


def test_smoothed_losses_are_means_of_steps_in_a_row():
    assert losses.smooth([1.0, 3.0, 5.0, 11.0], 2) == [2.0, 4.0, 8.0]
    assert losses.apart([2.0] * losses.SPAN, [1.5] * losses.SPAN) == [0.5]


# Records of kernel benchmarks ----------------------------------------------------------------------------------------------------


def test_what_crashes_ends_its_own_part_alone(tmp_path, capfd):
    book = report.Report(tmp_path / "rows.json", seconds=60.0)

    def timed(name: str, error: float) -> None:
        if book.sound(name, lambda: book.check(f"{name} y", error, 1e-2)):
            book.add("rows", name=name, ms=1.0)

    def crash() -> None:
        timed("before the crash", 0.0)
        os.kill(os.getpid(), signal.SIGKILL)

    book.apart("right", lambda: timed("right", 1e-3))
    book.apart("crash", crash)
    book.apart("raises", lambda: timed("raises", [][0]))
    book.apart("wrong", lambda: timed("wrong", float("nan")))
    book.apart("last", lambda: timed("last", 0.0))
    (written,) = json.loads((tmp_path / "rows.json").read_text())
    assert written == book.data
    assert [row["name"] for row in written["rows"]] == ["right", "before the crash", "last"]
    why = {entry["name"]: entry["why"] for entry in written["failed"]}
    assert why == {
        "crash": f"its process ended with -{signal.SIGKILL.value}",
        "raises": "IndexError: list index out of range",
        "wrong": "not timed: wrong y failed",
    }
    assert book.end() == 1
    assert "before the crash" in capfd.readouterr().out


def test_no_part_outlives_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "GRACE", 0.2)
    book, begin = report.Report(tmp_path / "rows.json", seconds=0.5), time.monotonic()
    book.apart("long", lambda: time.sleep(1200))
    book.apart("late", lambda: book.add("rows", name="late"))
    assert time.monotonic() - begin < 900
    assert [(entry["name"], entry["why"]) for entry in book.data["failed"]] == [
        ("long", f"its process ended with -{signal.SIGKILL.value}"),
        ("late", "no time left"),
    ]


def test_a_run_comes_behind_those_that_the_file_has(tmp_path):
    path, old = tmp_path / "rows.json", {"host": {"gpu": "old"}, "rows": [{"name": "old"}]}
    path.write_text(json.dumps(old))  # as files were before they were lists
    for name in ("second", "third"):
        book = report.Report(path, seconds=60.0)
        book.apart(name, lambda book=book, name=name: book.add("rows", name=name, kernels={"a": 1.0}))
    runs = json.loads(path.read_text())
    assert runs[0] == old
    assert [[row["name"] for row in run["rows"]] for run in runs] == [["old"], ["second"], ["third"]]


class Gpu:
    """With time of its own, in seconds: runs what the host has queued, one after the other."""

    def __init__(self, monkeypatch):
        self.host = self.free = 0.0
        fake = {
            "synchronize": lambda: setattr(self, "host", max(self.host, self.free)),
            "_sleep": lambda cycles: self.launch(0.0, cycles / clock.HERTZ),
            "Event": lambda enable_timing: Event(self),
        }
        for name, function in fake.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.host)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1))

    def launch(self, host: float, gpu: float) -> None:
        self.host += host
        self.free = max(self.free, self.host) + gpu


class Event:
    def __init__(self, gpu: Gpu):
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.free, self.gpu.host)

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize("launches", [1, 50])
def test_a_time_is_the_gpus_alone(monkeypatch, launches):
    """Neither the host's, which needs ten times as long, nor what is prepared, nor the first runs' compiling, nor an outlier."""
    gpu, given = Gpu(monkeypatch), []

    def prepare() -> int:
        gpu.launch(0.5, 0.5)
        return len(given)

    def work(run: int) -> None:
        given.append(run)
        gpu.host += 100.0 if run == 0 else 0.0
        for _ in range(launches):
            gpu.launch(1e-3, 3e-4 if run == 5 else 1e-4)

    assert clock.Clock(9)(work, prepare) == pytest.approx(0.1 * launches)
    assert given == list(range(12))
    assert gpu.host < 120


# A sitting at GPUs ------------------------------------------------------------------------------------------------------------------


def test_every_test_of_gpus_has_a_job():
    commands = " ".join(job.command for job in sitting.JOBS.values())
    assert [
        file.name for file in sorted((Path(__file__).parents[1] / "gpu").glob("test_*.py")) if file.name not in commands
    ] == []


# Of the other laws of what nobody has tried: why no proof on up to four GPUs would answer them.
UNPROVABLE = {
    "of several hosts": {"tensor-over-hosts", "whole-step-hosts"},
    "an equal sum with other random numbers shows nothing": {"whole-step-dropout", "flash4-dropout"},
    "proofs train every weight": {"fp8-inputs-adapters", "quack-adapters", "mamba3-rates-adapters"},
    "proofs draw whole sequences": {"flash4-documents"},
    "proofs cut a model's attention to heads that are tried, its windows and sinks with it": {
        "flash4-width", "flash4-window", "flash4-sinks", "sinks-context",
    },
    "of no layout": {"lr-above-one", "cpu-muon"},
}  # fmt: skip


def test_what_nobody_has_tried_has_a_job_or_a_reason():
    reasons = set().union(*UNPROVABLE.values())
    assert sitting.TRIED.keys() | reasons == book.WAIVABLE.keys() and not sitting.TRIED.keys() & reasons


@pytest.mark.parametrize("law", sitting.TRIED)
def test_a_try_is_of_what_its_law_alone_refuses(law):
    preset, gpus, words = sitting.TRIED[law]
    words = [f"cluster=h200_{gpus}", *words.split()]
    with pytest.raises(Refused) as refused:
        translate(load(preset, words))
    assert {problem.law for problem in refused.value.problems} == {law}
    _, pair = every.asked(preset, " ".join([*words, f"allow.{law}=tried"]), "cuda")
    assert every.run_of(pair.layout) != every.run_of(pair.reference)
    assert law in pair.layout.plan.recipe.allow


def sat(tmp_path, jobs, *words) -> tuple[int, dict]:
    code = sitting.main(["--out", str(tmp_path), *words], jobs)
    return code, {name: end["code"] for name, end in json.loads((tmp_path / "sitting.json").read_text()).items()}


def test_a_sitting_shares_out_gpus_and_goes_on_where_it_stopped(tmp_path, capfd):
    say = '-c \'import os, time; time.sleep({s}); print(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))\''.replace
    jobs = {
        "first": sitting.Job(1, 0.01, say("{s}", "0.8")),
        "both": sitting.Job(2, 0.01, say("{s}", "0")),
        "beside": sitting.Job(1, 0.01, say("{s}", "0.8")),
        "later": sitting.Job(0, 0.01, say("{s}", "0"), after="first"),
        "bad": sitting.Job(0, 0.01, "-c 'raise SystemExit(3)'"),
        "behind bad": sitting.Job(0, 0.01, say("{s}", "0"), after="bad"),
        "long": sitting.Job(1, 60, say("{s}", "0")),
        "part": sitting.Job(1, 0.01, "-c 'import sys; print(sys.argv[1:])'", part=" 'of {port}'"),
        "whole": sitting.Job(2, 0.01, "-c 'import sys; print(sys.argv[1:])'", part=" 'of {port}'"),
    }
    assert sat(tmp_path, jobs, "--gpus", "2", "--minutes", "1") == (
        1, {"first": 0, "both": 0, "beside": 0, "later": 0, "bad": 3, "part": 0, "whole": 0},
    )  # fmt: skip
    names = ("first", "both", "beside", "later", "part", "whole")
    said = {name: (tmp_path / f"{name}.log").read_text().strip() for name in names}
    assert said == {
        "first": "0", "both": "all", "beside": "0", "later": "", "part": "['of 29511']", "whole": "[]",
    }  # fmt: skip
    for name in said:
        (tmp_path / f"{name}.log").unlink()
    jobs["bad"] = sitting.Job(0, 0.01, "-c pass")
    capfd.readouterr()
    assert sat(tmp_path, jobs, "--gpus", "2", "--minutes", "1")[1]["behind bad"] == 0
    assert "not begun: long: it takes 60 minutes\n" in capfd.readouterr().out
    assert not any((tmp_path / f"{name}.log").exists() for name in said)


def test_jobs_that_are_not_timed_share_a_gpu_as_far_as_its_memory_goes(tmp_path, capfd):
    wait = "-c 'import time; time.sleep(0.5)'"
    jobs = {
        name: sitting.Job(1, 0.01, wait, gib=gib)
        for name, gib in (("a", 60), ("b", 60), ("c", 60), ("timed", 0), ("d", 1))
    }
    assert sat(tmp_path, jobs, "--minutes", "1")[0] == 0
    said = [line.split(",")[0].split(" on")[0] for line in capfd.readouterr().out.splitlines()]
    assert said[:2] == ["begun: a", "begun: b"]
    order = {line: i for i, line in enumerate(said)}
    assert order["begun: c"] > min(order["ended: a"], order["ended: b"])
    assert order["ended: c"] < order["begun: timed"] < order["ended: timed"] < order["begun: d"]


def test_a_job_that_outlives_its_sitting_is_killed_with_all_it_started(tmp_path):
    rank = 'p = subprocess.Popen(["sleep", "60"], start_new_session=True)'  # as torchrun's
    started = f"-c 'import subprocess, time; {rank}; print(p.pid, flush=True); time.sleep(60)'"
    assert sat(tmp_path, {"slow": sitting.Job(0, 0.001, started)}, "--minutes", "0.1") == (1, {"slow": "killed"})
    child = int((tmp_path / "slow.log").read_text())
    deadline = time.monotonic() + 5
    while (alive := Path(f"/proc/{child}/stat").exists()) and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            alive = False
            break
        time.sleep(0.05)
    assert not alive


@pytest.mark.slow
def test_what_waits_for_gpus_are_commands_that_there_are():
    """Each job's file, its recipes and its tests; what it measures needs the GPU."""
    for name, job in sitting.JOBS.items():
        words = shlex.split(job.command)
        assert not job.after or job.after in sitting.JOBS
        if words[0] == "benchmarks/measure.py":
            names = [word for word in words if word != "--profile"][5:]
            assert names and set(names) <= measure.CASES.keys(), name
            for case in names if job.gpus > 1 else ():
                assert measure.lowered(*measure.CASES[case]).plan.recipe.world_size == job.gpus
        elif words[0] == "benchmarks/losses.py":
            assert words[1] == "train" and words[2] in losses.RUNS
        elif "nam_megatron.prove.every" in words:
            presets = words[words.index("--presets") + 1].split(",")
            for preset in presets:
                for layout in (w for before, w in itertools.pairwise(words) if before == "--with"):
                    lowered_by = translate(load(preset, layout.split()))
                    assert lowered_by.plan.recipe.world_size == job.gpus
        elif words[:3] == ["-m", "launch", "run"]:
            for place, path in (("{out}", "/d"), ("{data}", "/d/built"), ("{revision}", "/d"), ("{scratch}", "/s")):
                words = [word.replace(place, path) for word in words]
            ours = ("revision=", "diagnostic=", "port=", "cluster.waivers.")
            overrides = [word for word in words[4:] if not word.startswith(ours)]
            lowered_by = translate(load(words[3].removeprefix("conf="), overrides))
            recipe = lowered_by.plan.recipe
            assert recipe.world_size == job.gpus and not lowered_by.plan.not_built
            used = storage.places(recipe, sitting.ROOT, {"TMPDIR": f"{recipe.cluster.storage.scratch}/tmp"})
            assert [finding.level for finding in storage.caches(used)] == ["ok"]
        elif "pytest" in words:
            files = [sitting.ROOT / word for word in words if word.startswith("tests/")]
            assert files and all(file.exists() for file in files)
