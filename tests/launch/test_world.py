"""What a launch takes from the world around it: the environment, git, Slurm; and what it tells it: commands and job files."""

import os
import pwd
import re
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command import warm
from hypothesis import given
from hypothesis import strategies as st

from launch import __main__ as command
from launch import app, show
from launch.context import Context
from launch.finding import Finding, passed, waive
from launch.host import preflight
from launch.record import source
from launch.run import job, kubernetes, overlay, process, run, slurm
from nam_megatron import tracker
from nam_megatron.compile.argv import argv, plan_json
from nam_megatron.compile.lower import translate
from nam_megatron.errors import INCOMPLETE, Refused
from nam_megatron.judge.resume import PLAN, SIGNED
from nam_megatron.recipe import conf_dir, load
from nam_megatron.tracker import TRACKER

WORDS = {
    "format": "auto", "revision": None, "dirty": "refuse", "over_memory": "refuse", "sanity": False, "port": 29500, "hang": 0,
}  # fmt: skip
WORDS |= {
    "trainer": "megatron", "lock": None, "diagnostic": None, "sign": None, "image": None, "time": None, "host": None, "rdma": None,
}  # fmt: skip


def context(*overrides, preset="nam56r_smoke", environ=None, checkout=None, **words) -> Context:
    lowering = translate(load(preset, overrides))
    more = {} if checkout is None else {"checkout": checkout}
    return Context(lowering, WORDS | words, (f"conf={preset}", *overrides), environ or {}, **more)


def environment(c: Context):
    return overlay.findings(c.environ, c.envs, c.words["diagnostic"])


def revision(c: Context):
    return source.findings(c.source, c.words["dirty"])


# The environment


def said(found, name="environment"):
    return [(f.level, f.message) for f in found if f.name == name]


def test_a_clean_shell_passes_and_every_variable_has_a_reason():
    c = context()
    assert passed(environment(c)) and all(e.why for e in c.envs)
    made = c.child_environ
    assert made["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and "CUDA_DEVICE_MAX_CONNECTIONS" not in made
    assert made["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "7200" and made["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    # By the names that these libraries read.
    names = (
        "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "QUACK_CACHE_DIR",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    )  # fmt: skip
    folders = {made[name] for name in names}
    assert len(folders) == 7 and all(re.fullmatch(r"/scratch/(tmp|cache/\w+)", folder) for folder in folders)


def test_a_cpu_has_no_variables_of_gpus_and_minds_none():
    c = context("cluster=cpu", environ={"CUDA_VISIBLE_DEVICES": "", "NVTE_NORM_FWD_USE_CUDNN": "1"})
    of_gpus = [e.name for e in c.envs if re.match("NVTE|NCCL|PYTORCH|TRITON|CUDA_CACHE", e.name)]
    assert not of_gpus and passed(f for f in preflight.intent(c)[0] if f.name == "environment")


def test_a_host_without_gpus_is_told_of_the_rehearsal(monkeypatch, capsys):
    monkeypatch.setattr(preflight, "check", lambda _: preflight.Report([Finding("gpus", "fail", "none")], {}))
    opened = SimpleNamespace(record=lambda **_: None)
    assert run.attempt(context(), opened, process.Signals(), job.words).end == "refused"
    assert "`cluster=cpu` rehearses" in capsys.readouterr().err


def test_leftovers_that_contradict_the_plan_fail_and_are_not_quoted():
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "s3cret", "PYTORCH_CUDA_ALLOC_CONF": "backend:x", "OMP_NUM_THREADS": "9"}
    found = list(environment(context(environ=environ)))
    assert said(found, "connections")[0][0] == "fail"
    assert [level for level, _ in said(found)] == ["note", "fail"]  # OMP_NUM_THREADS is replaced, the old name fails
    assert not any("s3cret" in f.message or "backend" in f.message for f in found)
    made = context(environ=environ).child_environ
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made and made["OMP_NUM_THREADS"] == "1"


def test_a_platform_that_forces_the_connections_gets_cudas_default():
    c = context("cluster.waivers={connections: the platform sets it}", environ={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    (env,) = [e for e in c.envs if e.name == "CUDA_DEVICE_MAX_CONNECTIONS"]
    assert (env.value, c.child_environ[env.name]) == ("8", "8") and "the platform sets it" in env.why
    assert passed(waive(environment(c), c.cluster.waivers))


def test_tensor_parallelism_keeps_its_one_connection_whatever_the_platform_forces():
    words, environ = ("cluster.waivers={connections: x}", "cluster=h200_2"), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    c = context(*words, preset="nam56r_nemo_native", environ=environ)
    assert c.child_environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and passed(environment(c))


@pytest.mark.parametrize(
    ("name", "value", "diagnostic", "fine"),
    [
        ("CUDA_VISIBLE_DEVICES", "0", None, False),
        ("CUDA_VISIBLE_DEVICES", "0", "one sick GPU", True),
        ("NCCL_MNNVL_ENABLE", "0", None, False),
        ("NCCL_MNNVL_ENABLE", "0", "no fabric", True),
        ("NCCL_MNNVL_ENABLE", "1", "no fabric", False),
    ],
)
def test_what_only_a_diagnostic_run_may_set(name, value, diagnostic, fine):
    assert passed(environment(context(environ={name: value}, diagnostic=diagnostic))) == fine


def test_what_nccls_own_files_set_is_the_environment_too(tmp_path, monkeypatch):
    """It reads them in each process, so what they set would be in no receipt, and would pass what the shell may not have."""
    file = tmp_path / "nccl.conf"
    file.write_text("# NCCL_IB_TC=1\nNCCL_ALGO=Ring\nNCCL_ALGO=Tree\nNCCL_P2P_LEVEL=NVL\nalone\n")
    shell = {"NCCL_CONF_FILE": str(file), "NCCL_P2P_LEVEL": "SYS"}
    c = context(environ=shell)
    assert passed(environment(c)) and shell.items() | {("NCCL_ALGO", "Ring")} <= c.child_environ.items()
    assert not {"NCCL_IB_TC", "alone"} & c.child_environ.keys()
    file.write_text("NCCL_MNNVL_ENABLE=1\n")
    assert not passed(environment(context(environ=shell)))
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user
    assert passed(environment(context(environ={})))


NAMES = st.sampled_from(
    [*overlay.CACHES, *(e.name for e in overlay.OURS), overlay.VISIBLE, overlay.MNNVL, overlay.CONNECTIONS, "X"]
)
ENVIRONS = st.dictionaries(NAMES, st.text(max_size=8))
SMOKE = context()


@given(ENVIRONS, st.none() | st.text(min_size=1, max_size=5))
def test_no_environment_is_a_traceback_and_the_child_has_the_overlay(environ, diagnostic):
    c = Context(SMOKE.lowering, WORDS | {"diagnostic": diagnostic}, (), environ)
    list(environment(c))
    made = c.child_environ
    assert all(made.get(e.name) == e.value for e in c.envs)
    assert {k: v for k, v in made.items() if k not in {e.name for e in c.envs}}.items() <= environ.items()


# Memory


def test_a_plan_over_the_device_is_refused_unless_told():
    big = ("schedule.micro_batch_size=512", "schedule.global_batch_size=512", "model.seq_length=16384")
    (found,) = [f for f in job.findings(context(*big)) if f.name == "memory"]
    assert found.level == "fail" and "over_memory=allow" in found.hint and "too much" in found.message
    (found,) = [f for f in job.findings(context(*big, over_memory="allow")) if f.name == "memory"]
    assert found.level == "note"
    assert passed(job.findings(context()))


def test_a_checkpoint_that_the_plan_may_not_go_on_from_is_known_before_the_start(tmp_path, monkeypatch):
    """As its plan stands beside it, wherever relative paths begin; for Bridge's trainer in a folder of ours."""

    def said(trainer, *words):
        c = context(*save, "optim.lr=3e-4", *words, checkout=tmp_path, trainer=trainer)
        return [f.message for f in job.findings(c) if f.name == "resume" and f.level == "fail"]

    trainers, load = ("megatron", "bridge"), "schedule.load=ckpt"
    save = ("schedule.save=ckpt", "schedule.save_interval=2")
    assert said("megatron", load) == [f"no checkpoint in `{tmp_path}/ckpt`"]
    step = tmp_path / "ckpt" / "iter_0000004"
    step.mkdir(parents=True)
    (step.parent / TRACKER).write_text("4")
    (step / "common.pt").touch()
    for trainer in trainers:
        (theirs,) = said(trainer, load)
        assert "was saved by another program" in theirs
        assert said(trainer) == ["`ckpt` holds the checkpoints of a run"]
    for trainer, at in zip(trainers, (step.parent, step.parent / SIGNED), strict=True):
        at.mkdir(exist_ok=True)
        for lr, expected in (("3e-4", []), ("4e-4", ["the checkpoint has `optim.lr` 0.0004, and the plan 0.0003"])):
            (at / PLAN).write_text(plan_json(context(*save, load, f"optim.lr={lr}").lowering))
            assert said(trainer, load) == expected

    def closed(folder, key=None):
        raise PermissionError(13, "Permission denied", str(folder / TRACKER))

    monkeypatch.setattr(tracker, "newest", closed)
    assert said("megatron", load) == [f"`{tmp_path}/ckpt/{TRACKER}` cannot be read: Permission denied"]


def test_what_is_not_built_is_said(monkeypatch):
    c = context()
    seams = (SimpleNamespace(owner="mhc", missing="no torch side"),)
    monkeypatch.setattr(type(c.lowering.plan), "not_built", property(lambda plan: seams))
    assert [f.message for f in job.findings(c) if f.level == "fail"] == ["mhc is not built (no torch side)"]
    assert app.train(c) == INCOMPLETE


# Git


def git(where: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=where, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path) -> Path:
    where = tmp_path / "checkout"
    (where / "nam_megatron").mkdir(parents=True)
    (where / "nam_megatron" / "a.py").write_text("a = 1\n")
    (where / "launch").mkdir()
    (where / ".gitignore").write_text("*.log\n")
    git(where, "init", "--quiet")
    git(where, "add", ".")
    git(where, "commit", "--quiet", "-m", "one")
    return where


def level(c: Context) -> str:
    (found,) = revision(c)
    return found.level


def test_a_clean_checkout_is_its_revision(checkout):
    (checkout / "receipts").mkdir()
    (checkout / "receipts" / "receipt.json").touch()  # not part of the code
    (checkout / "x.log").touch()
    c = context(checkout=checkout)
    assert level(c) == "ok" and c.source.facts()["dirty"] is False
    assert c.source.revision == git(checkout, "rev-parse", "HEAD")
    assert level(context(checkout=checkout, revision=c.source.revision[:9])) == "ok"
    begun, digit = c.source.revision[:8], c.source.revision[8]
    for other in ("0" * 9, f"{begun}{'1' if digit == '0' else '0'}"):
        with pytest.raises(Refused, match="was handed in, and this checkout is at"):
            level(context(checkout=checkout, revision=other))


def test_the_stored_difference_makes_the_tree_again(checkout, tmp_path):
    """Changed, deleted, new and binary files; the repository and its index stay as they were."""
    (checkout / "nam_megatron" / "a.py").write_text("a = 2\n")
    (checkout / ".gitignore").unlink()
    (checkout / "new file").write_bytes(bytes(range(256)))
    before, index = git(checkout, "status", "--porcelain"), (checkout / ".git" / "index").read_bytes()
    objects = sorted((checkout / ".git" / "objects").rglob("*"))
    c = context(checkout=checkout)
    assert level(c) == "fail" and level(context(checkout=checkout, dirty="store")) == "ok"
    assert "in 3 files" in next(revision(c)).message
    assert (
        git(checkout, "status", "--porcelain") == before
        and sorted((checkout / ".git" / "objects").rglob("*")) == objects
    )
    assert (checkout / ".git" / "index").read_bytes() == index
    again = tmp_path / "again"
    git(tmp_path, "clone", "--quiet", str(checkout), str(again))
    (tmp_path / "diff").write_text(c.source.diff, errors="surrogateescape")
    git(again, "apply", str(tmp_path / "diff"))
    assert git(again, "status", "--porcelain") == before
    assert source.tree_hash(again, "nam_megatron") == c.source.trees["nam_megatron"]


IGNORED, FILTERED = (
    "printf b.py > .git/info/exclude",
    "git config filter.x.clean 'sed s/2/1/'; echo '*.py filter=x' > .git/info/attributes",
)


@pytest.mark.parametrize(
    "how",
    [
        "git update-index --assume-unchanged nam_megatron/a.py", "git update-index --skip-worktree nam_megatron/a.py", IGNORED, FILTERED,
        "cluster.storage.receipts=.", "cluster.storage.receipts=nam_megatron",
    ],
)  # fmt: skip
def test_code_that_git_does_not_look_at_is_not_clean(checkout, how):
    words = (how,) if how.startswith("cluster") else ()
    if not words:
        subprocess.run(how, shell=True, cwd=checkout, check=True)
    assert level(context(*words, checkout=checkout)) == "ok" or how == IGNORED
    (checkout / "nam_megatron" / ("b.py" if how == IGNORED else "a.py")).write_text("a = 2\n")
    c = context(*words, checkout=checkout, dirty="store")
    assert level(c) == "fail" and c.source.diff is None


@pytest.mark.parametrize("setting", ["color.ui always", "diff.noprefix true", "diff.x.textconv true"])
def test_the_stored_difference_is_no_users_taste(checkout, tmp_path, setting):
    git(checkout, "config", *setting.split())
    (checkout / ".git" / "info" / "attributes").write_text("*.py diff=x\n")
    (checkout / "nam_megatron" / "a.py").write_text("a = 2\n")
    (tmp_path / "diff").write_text(context(checkout=checkout).source.diff)
    git(tmp_path, "clone", "--quiet", str(checkout), "again")
    git(tmp_path / "again", "apply", str(tmp_path / "diff"))
    assert (tmp_path / "again" / "nam_megatron" / "a.py").read_text() == "a = 2\n"


def test_new_files_too_large_to_store_are_said(checkout, monkeypatch):
    monkeypatch.setattr(source, "UNTRACKED", 10)
    (checkout / "large").write_text("x" * 11)
    assert "ignore them" in next(revision(context(checkout=checkout, dirty="store"))).hint


def test_a_copy_needs_a_revision_and_a_waiver(tmp_path):
    for package in source.PACKAGES:
        (tmp_path / package).mkdir()
    assert "no revision" in next(revision(context(checkout=tmp_path))).message
    with pytest.raises(Refused, match="`main` is no git revision"):
        level(context(checkout=tmp_path, revision="main"))
    c = context("cluster.waivers={git: a copy}", checkout=tmp_path, revision="0123abc")
    (found,) = waive(revision(c), c.cluster.waivers)
    assert found.level == "waived" and "0123abc" in found.message and "a copy" in found.message
    assert c.source.facts() | {"trees": None} == {
        "revision": "0123abc", "handed_in": True, "dirty": None, "diff_sha256": None, "trees": None,
    }  # fmt: skip
    # A repository knows its own, which a word beside it does not replace.
    assert not source.Source("0123abcd", "0123abc", True, "", {}).facts()["handed_in"]


def test_a_misspelt_waiver_is_refused():
    with pytest.raises(Refused, match="no finding `gti` to waive"):
        context("cluster.waivers={gti: a copy}")


# Commands


def test_the_shell_text_is_what_is_started(tmp_path):
    """Bash itself reads it: the same words, the same environment."""
    c = context()
    for name, script in {"python": 'printf "%s\\n" "$@"; echo "$PYTORCH_ALLOC_CONF $NCCL_DEBUG_FILE"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    text = job.shell_text(c)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": "/r u n", "PYTORCH_CUDA_ALLOC_CONF": "x"}
    done = subprocess.run(["bash", "-euc", text], env=env, capture_output=True, text=True, check=True)
    words = job.words(c, Path("/r u n/plan.json"))
    assert done.stdout.splitlines() == [*words[1:], "expandable_segments:True /r u n/nccl.%h.%p"]
    assert words[-len(argv(c.lowering)) :] == list(argv(c.lowering))


@pytest.mark.slow
def test_what_a_run_would_refuse_is_said_beside_what_is_shown():
    words = ("conf=nam56r_smoke", "cluster=cpu", "trainer=bridge", "format=torchrun")
    done = launch("show", *words)
    refused = launch("run", *words[:-1])
    assert done.code == 0 and "\nexport " in done.out and refused.code == 2
    assert refused.err.partition(" (command")[0] in done.err and "list=clusters" in done.err
    assert not launch("show", *words[:2], words[-1]).err


def test_several_hosts_are_started_by_srun():
    words = job.words(context(preset="nam56r_native_dp"), Path("p"))
    assert words[1:3] == ["-m", "nam_megatron.torchrun"]
    c = context("cluster=h200_2x8", preset="nam56r_native_dp", port=29501)
    words = job.words(c, Path("p"), "n1", "77")
    assert words[:4] == ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=n1:29501", "--rdzv-id=77"} <= set(words)


def test_sbatch_repeats_the_words_that_matter(tmp_path):
    given = [
        "conf=nam56r_native_dp",
        "cluster=h200_2x8",
        "cluster.waivers={git: a b}",
        "port=29501",
        "format=sbatch",
        "sanity=true",
    ]
    text = slurm.sbatch(context("cluster=h200_2x8", preset="nam56r_native_dp").lowering, given)
    expected = "conf=nam56r_native_dp cluster=h200_2x8 'cluster.waivers={git: a b}' port=29501 sanity=true"
    assert f"\nexec python -m launch run {expected}\n" in text
    assert f"\nsrun --label python -m launch check format=line {expected} | tee " in text
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("sign", ["", "++"])
def test_a_requeued_job_goes_on_from_its_own_checkpoint_alone(tmp_path, restarts, saved, sign):
    """The script itself: by Slurm's second start it has something newer than what it was told to begin with, or begins again."""
    own, first = tmp_path / "own", f"{sign}schedule.load=/begins/here"
    changes = "schedule.changes=[schedule.train_steps]"
    text = slurm.sbatch(
        context(f"schedule.save={own}", "schedule.save_interval=2", changes).lowering,
        ["conf=c", first, "schedule.train_steps=7", changes],
    )
    own.mkdir()
    if saved:
        (own / TRACKER).touch()
    for name, script in {"srun": "echo software=0", "python": 'echo "$*"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    env["SLURM_RESTART_COUNT"] = restarts
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()[-1].partition(" run ")[2].split()
    asked = [f"schedule.load={own}", "schedule.changes=[]"] if saved and restarts == "1" else [first, changes]
    assert sorted(words) == sorted(["conf=c", *asked, "schedule.train_steps=7"])


def test_a_job_that_could_not_be_requeued_is_refused():
    """A key that is said twice is: the second time it would say its own."""
    lowering = context("schedule.save=/c", "schedule.save_interval=2").lowering
    for said, name in ("schedule={train_steps: 7, load: /a}", "load"), ("++schedule={changes: []}", "changes"):
        with pytest.raises(Refused, match=f"would say another `{name}`"):
            slurm.sbatch(lowering, [said])
    assert "schedule={train_steps: 7}" in slurm.sbatch(lowering, ["schedule={train_steps: 7}"])


def test_what_is_translated_are_the_words_of_the_recipe_alone():
    recipe = ["conf=c", "optim.lr=1e-3", "cluster.nodes=2"]
    words = yaml.safe_load((conf_dir() / "launch.yaml").read_text()).keys() - {"defaults", "hydra"}
    ours = [f"{key}=x" for key in words] + ["+cluster.waivers.git=why", "cluster.waivers={git: why}"]
    assert shlex.split(slurm.for_translate([*ours, *recipe])) == recipe
    of_show = {"format", "image", "time", "rdma"}
    assert shlex.split(slurm.for_launch(ours)) == [w for w in ours if w.partition("=")[0] not in of_show]


@pytest.mark.parametrize(("second", "code"), [("aaaaaaaaaaaa", 0), ("bbbbbbbbbbbb", 1)])
def test_hosts_with_other_packages_end_a_job_before_it_starts(tmp_path, second, code):
    """The script itself, with an srun that answers for two hosts."""
    text = slurm.sbatch(context("cluster=h200_2x8", preset="nam56r_native_dp").lowering, ["conf=nam56r_native_dp"])
    said = f'echo "0: PASS @ n1 software=aaaaaaaaaaaa"; echo "1: PASS @ n2 software={second}"'
    for name, script in {"srun": said, "python": "echo started"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code and ("started" in done.stdout) == (code == 0), done.stderr
    assert ("the hosts differ in the plan, our code, packages, code at Python's start" in done.stderr) == (code == 1)


def test_slurm_names_its_hosts(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "n1\\nn2\\n"\n')
    (tmp_path / "scontrol").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm.hosts({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}) == ("n1", "n2")
    assert slurm.hosts({}) == slurm.hosts({"SLURM_JOB_NODELIST": "n[1-2]"}) == ()
    with pytest.raises(Refused, match="does not name its hosts"):
        slurm.hosts({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "other"})


def test_a_pytorch_job(tmp_path):
    places = ("cluster.storage.receipts=/receipts",)
    c = context(
        "cluster=h200_2x8",
        "cluster.waivers={git: x}",
        *places,
        preset="nam56r_native_dp",
        image="r/i:1",
        rdma="rdma/ib",
        time="1-02:00:00",
    )
    text = kubernetes.pytorch_job(c)
    tree = yaml.safe_load(text)
    spec = tree["spec"]["pytorchReplicaSpecs"]
    assert (tree["spec"]["nprocPerNode"], spec["Master"]["replicas"], spec["Worker"]["replicas"]) == ("8", 1, 1)
    (container,) = spec["Worker"]["template"]["spec"]["containers"]
    assert (container["name"], container["image"], container["resources"]["limits"]) == (
        "pytorch",
        "r/i:1",
        {"nvidia.com/gpu": 8, "rdma/ib": 1},
    )
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert tree["spec"]["runPolicy"]["activeDeadlineSeconds"] == 26 * 3600
    assert {"name": "receipts", "mountPath": "/receipts"} in container["volumeMounts"]
    script = container["command"][2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert (
        "translate conf=nam56r_native_dp cluster=h200_2x8 cluster.storage.receipts=/receipts out=/tmp/run\n" in script
    )
    one = yaml.safe_load(kubernetes.pytorch_job(context(*places, image="r/i:1")))["spec"]["pytorchReplicaSpecs"]
    assert list(one) == ["Master"] and "launch run" in one["Master"]["template"]["spec"]["containers"][0]["command"][2]


def test_a_train_job_is_the_same_pod_under_kubeflows_present_api():
    words = dict(preset="nam56r_native_dp", image="r/i:1", rdma="none", time="12:30:00")
    c = context("cluster=h200_2x8", "cluster.storage.receipts=/receipts", **words)
    runtime, instance = yaml.safe_load_all(kubernetes.train_job(c))
    assert (runtime["kind"], instance["kind"]) == ("TrainingRuntime", "TrainJob")
    assert instance["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert instance["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    assert instance["spec"]["trainer"]["numProcPerNode"] == 8 and runtime["spec"]["mlPolicy"]["torch"] == {}
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["activeDeadlineSeconds"] == 45000
    pod = job["template"]["spec"]["template"]["spec"]
    other = yaml.safe_load(kubernetes.pytorch_job(c))["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    other["containers"][0]["name"] = "node"
    assert pod == other and "securityContext" not in pod["containers"][0]  # Ethernet


@pytest.mark.parametrize(
    ("overrides", "least", "most"),
    [((), 120, 120), (("schedule.save=/durable/x", "schedule.save_interval=100"), 300, 400)],
)
def test_the_time_to_end_is_that_of_a_checkpoint(overrides, least, most):
    """4.0 billion parameters of 14 bytes each at 250 MB/s, and a step."""
    c = context(
        "cluster=h200_2x8", "cluster.storage.receipts=/r", *overrides, preset="nam56r_native_dp", image="i", rdma="none"
    )
    said = int(re.search(r"--signal=B:TERM@(\d+)", slurm.sbatch(c.lowering, [])).group(1))
    assert least <= said <= most
    assert f"terminationGracePeriodSeconds: {said}\n" in kubernetes.pytorch_job(c)


def test_a_batch_script_has_its_time_limit_and_its_locked_memory():
    two = slurm.sbatch(context("cluster=h200_2x8", preset="nam56r_native_dp").lowering, [], "2-00:00:00")
    assert "#SBATCH --time=2-00:00:00\n" in two and "\nulimit -l unlimited || true\n" in two
    one = slurm.sbatch(context().lowering, [])
    assert "--time" not in one and "ulimit" not in one


def test_several_pods_without_a_word_on_rdma_are_refused():
    with pytest.raises(Refused) as refused:
        kubernetes.train_job(
            context("cluster=h200_2x8", "cluster.storage.receipts=/r", preset="nam56r_native_dp", image="i")
        )
    assert [p.key for p in refused.value.problems] == ["rdma"]


def test_what_several_pods_would_not_do_is_refused():
    """One pod has `launch run`, which does it."""
    said = {"hang": "hang=60", "host": "host=a", "port": "+port=29600", "sign": "sign=/k"}
    words = dict(preset="nam56r_native_dp", image="i", rdma="none")
    one, several = (
        replace(made, overrides=(*made.overrides, *said.values()))
        for cluster in ("h200_8", "h200_2x8")
        for made in [context(f"cluster={cluster}", "cluster.storage.receipts=/r", **words)]
    )
    for form in (kubernetes.pytorch_job, kubernetes.train_job):
        with pytest.raises(Refused) as refused:
            form(several)
        assert [p.key for p in refused.value.problems] == list(said)
        assert all(word in form(one) for word in said.values())


def test_a_pytorch_job_without_an_image_or_with_a_path_of_ours():
    with pytest.raises(Refused) as refused:
        kubernetes.pytorch_job(context())
    assert [p.key for p in refused.value.problems] == ["image", "cluster.storage.receipts"]
    hinted = [p.hint.split("`")[-2] for p in refused.value.problems][1]
    assert yaml.safe_load(kubernetes.pytorch_job(context(hinted, image="r/i:1")))["kind"] == "PyTorchJob"


def test_show_has_everything_and_touches_nothing(tmp_path):
    before = sorted(tmp_path.rglob("*"))
    c = context(
        f"cluster.storage.receipts={tmp_path}/r", f"cluster.storage.scratch={tmp_path}/s", "cluster.waivers={git: WHY}"
    )
    text = show.text(c)
    titles = ("Plan", "Settings by owner", "Budget", "Lineage", "Storage", "Waivers", "Environment", "Command")
    assert [line[3:-3] for line in text.splitlines() if line.startswith("== ")] == list(titles)
    assert "fits h200" in text and "git: WHY" in text and job.shell_text(c) in text
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("verb", "words", "key"),
    [
        ("show", {"format": "json"}, "format"),
        ("check", {"format": "sbatch"}, "format"),
        ("run", {"format": "json"}, "format"),
        ("run", {"dirty": "yes"}, "dirty"),
        ("run", {"over_memory": True}, "over_memory"),
        ("run", {"trainer": "nemo"}, "trainer"),
        ("check", {"sanity": "on"}, "sanity"),
        ("run", {"port": 80}, "port"),
        ("run", {"port": "29500"}, "port"),
        ("run", {"revision": 1.0}, "revision"),
        ("run", {"diagnostic": ""}, "diagnostic"),
        ("run", {"hang": -1}, "hang"),
        ("run", {"hang": "long"}, "hang"),
        ("show", {"time": 86400}, "time"),
        ("show", {"time": "24:00"}, "time"),
        ("show", {"time": "1:00:00\n#SBATCH --x"}, "time"),
        ("check", {"sanity": 1}, "sanity"),
    ],
)
def test_wrong_words_are_refused(verb, words, key):
    with pytest.raises(Refused) as refused:
        app.checked(verb, WORDS | words)
    assert [p.key for p in refused.value.problems] == [key]


@pytest.mark.parametrize("key", [key for key, word in WORDS.items() if word is None])
def test_a_word_of_digits_alone_stays_a_word(key, tmp_path, monkeypatch):
    """A hash, a host, the file of a key: Hydra reads a number. A list of them is no word, and says so by its key."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1234567").touch()
    digits = "24:00:00" if key == "time" else 1234567
    assert app.checked("run", WORDS | {key: digits})[key] == str(digits)
    with pytest.raises(Refused) as refused:
        app.checked("run", WORDS | {key: [digits]})
    assert "takes one word" in str(refused.value) and {p.key for p in refused.value.problems} == {key}


BRIDGES = ("schedule.pretrained=/p", "model.blocks.moe.expert_bias_update_rate=0.0")
BRIDGES_ALONE = {
    "schedule.pretrained": BRIDGES,
    "feature.lora.rank": (*BRIDGES, "feature.lora.rank=8"),
    "data.name": (*BRIDGES, "data=sft", "data.tokenizer=/t", "data.path=/d"),
    None: (),
}


@pytest.mark.parametrize("key", BRIDGES_ALONE)
@pytest.mark.parametrize("trainer", app.TRAINERS)
def test_what_bridge_alone_trains_is_started_under_bridge_alone(key, trainer, monkeypatch):
    """And what both can, under either."""
    monkeypatch.setattr(run, "run", lambda context: "started")
    c = context(*BRIDGES_ALONE[key], preset="nam56r_native_dp", trainer=trainer)
    if key and trainer == "megatron":
        with pytest.raises(Refused) as refused:
            app.train(c)
        assert key in [problem.key for problem in refused.value.problems]
    else:
        assert app.train(c) == "started"


def test_several_nodes_run_in_slurm_only(tmp_path, monkeypatch):
    c = context("cluster=h200_2x8", preset="nam56r_native_dp")
    with pytest.raises(Refused, match="this is no Slurm job"):
        app.train(c)
    monkeypatch.setattr(slurm, "_hosts", lambda nodes: ("n1",))
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    with pytest.raises(Refused, match="has 1 nodes, and the plan is for 2"):
        app.train(context("cluster=h200_2x8", preset="nam56r_native_dp", environ=environ))


# The command line


def launch(*words: str):
    return warm(*words, module="launch.__main__")


@pytest.mark.slow
def test_waivers_on_the_command_line_need_no_plus():
    for word in ("cluster.waivers={git: a copy, root-volume: one disk}", "cluster.waivers.git=a copy"):
        done = launch("show", "conf=nam56r_smoke", word)
        assert done.code == 0 and "\ngit: a copy\n" in done.out, done.err
    done = launch("show", "conf=nam56r_smoke", "cluster.waivers={gti: x}")
    assert done.code == 2 and done.err.startswith("error: no finding `gti` to waive @ cluster.waivers.gti")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "conf=nam56r_smoke", "prot=1"), 2, "error: unknown key `prot`"),
        (("run", "conf=nam56r_smoke", "dirty=yes"), 2, "error: `dirty` is refuse or store, not `yes`"),
        (("run", "conf=nam56r_native_dp", "cluster=h200_2x8"), 2, "error: 2 nodes, and this is no Slurm job"),
        (("shwo",), 2, "error: no verb `shwo`"),
        (("receipts", "stat=open"), 2, "error: no option `stat`"),
    ],
)
def test_mistakes_on_the_command_line(words, code, said):
    done = launch(*words)
    assert (done.code, done.out) == (code, "") and done.err.startswith(said)


def test_help_names_every_verb():
    text = launch("--help").out
    assert all(f"\n  {verb} " in text for verb in (*command.WITH_A_RECIPE, *command.OPTIONS))
    assert "python -m launch run   conf=nam56r_smoke" in launch("run", "--help").out
