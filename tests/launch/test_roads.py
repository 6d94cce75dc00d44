"""What a rank sees on each road to it: run.sh, the launcher, its torchrun text, a batch script, a pod, a NeMo-Run experiment."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from launch.context import Context
from launch.run import job, kubernetes, overlay, slurm
from nam_megatron.compile.argv import run_script
from nam_megatron.compile.lower import translate
from nam_megatron.environment import carried, given
from nam_megatron.recipe import load

ROOT = Path(__file__).parents[2]
# What a shell may have lying around.
LITTER = {
    "TORCH_NCCL_HIGH_PRIORITY": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1", "OMP_NUM_THREADS": "7", "PYTORCH_ALLOC_CONF": "",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}  # fmt: skip
DUMP = "#!{python}\nimport json, os, sys\nif {when}: json.dump(dict(os.environ), open({out!r}, 'w'))\n"
WORDS = {"trainer": "megatron", "port": 29500, "diagnostic": None, "time": None, "image": "i", "rdma": "none"}


@pytest.fixture
def seen(tmp_path):
    """seen(script): the environment of the program that a script starts in the place of torchrun, or of the launcher."""
    out, folder = tmp_path / "environ.json", tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "srun", "grep"):
        when = "'check' not in sys.argv and 'nam_megatron.translate' not in sys.argv" if name != "grep" else "False"
        (folder / name).write_text(DUMP.format(python=sys.executable, when=when, out=str(out)))
        (folder / name).chmod(0o755)
    (folder / "grep").write_text("#!/bin/sh\necho software=1\n")  # of the one host's line

    def run(script: str, **more: str) -> dict[str, str]:
        environ = (
            os.environ | LITTER | more | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
        )
        done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return run


def context(tmp_path: Path, *words: str) -> Context:
    places = [f"cluster.storage.{kind}={tmp_path}/{kind}" for kind in ("durable", "scratch", "receipts")]
    overrides = (*words, *places)
    lowering = translate(load("nam56r_nemo_native", overrides))
    return Context(lowering, WORDS, ("conf=nam56r_nemo_native", *overrides), os.environ | LITTER)


def by_run_sh(c, seen, tmp_path):
    return seen(run_script(c.lowering))


def by_the_launcher(c, seen, tmp_path):
    return c.child_environ


def by_its_torchrun(c, seen, tmp_path):
    return seen(job.shell_text(c), RUN=str(tmp_path))


def by_a_batch_script(c, seen, tmp_path):
    return overlay.child(seen(slurm.sbatch(c.lowering, c.overrides), SLURM_JOB_ID="7"), c.envs)


def by_a_pod(c, seen, tmp_path):
    (pod,) = kubernetes.spec(c, "pytorch")["containers"]
    return overlay.child(seen(pod["command"][-1]), c.envs)  # `launch run`


def by_one_of_several_pods(c, seen, tmp_path):
    several = context(tmp_path, "cluster=h200_2x8")
    tree = next(yaml.safe_load_all(kubernetes.pytorch_job(several)))
    replicas = tree["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"][-1]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.sh").write_text(run_script(several.lowering))
    return seen(replicas.replace("/tmp/run", str(tmp_path / "run")), PET_NODE_RANK="1", MASTER_ADDR="h")


def by_nemo_run(c, seen, tmp_path):
    asked = {}
    stand_in = types.ModuleType("nemo_run")
    for name in ("Packager", "LocalTunnel", "Script", "Experiment"):
        setattr(stand_in, name, lambda *_, **__: types.SimpleNamespace(add=lambda *_, **__: None, dryrun=lambda: None))
    stand_in.SlurmExecutor = lambda **words: asked.update(words)
    stand_in.Experiment = Experiment
    file = ROOT / "examples/nemo/slurm.py"
    spec = importlib.util.spec_from_file_location("slurm_example", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sys.modules["nemo_run"] = stand_in
    try:
        example.start(["conf=nam56r_nemo_native"], dryrun=True)
    finally:
        del sys.modules["nemo_run"]
    return asked["env_vars"]


class Experiment:
    def __init__(self, _):
        self.add = self.dryrun = lambda *_, **__: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


ROADS = [by_run_sh, by_the_launcher, by_its_torchrun, by_a_batch_script, by_a_pod, by_one_of_several_pods]


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_a_rank_sees_the_same_environment_on_every_road(road, seen, tmp_path):
    c = context(tmp_path)
    wanted = {env.name: env.value for env in carried(c.lowering)}
    assert LITTER.keys() <= wanted.keys()
    found = road(c, seen, tmp_path)
    assert {name: found.get(name) for name in wanted} == wanted


def test_nemo_run_and_bridge_set_what_can_be_set(seen, tmp_path):
    """Neither can take a variable away; Bridge's container is asked in tests/nemo/inside."""
    c = context(tmp_path)
    assert by_nemo_run(c, seen, tmp_path) == given(c.lowering)
    assert given(c.lowering)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "7200"
