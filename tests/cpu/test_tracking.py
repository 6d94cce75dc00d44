"""What others may look at: Megatron's own writers are given our figures, and nothing that is asked for is dropped."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from ports import free_port
from presets import NAMES
from presets import lowered as preset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train import command, lowered, run

from nam_megatron.blocks import Gauge
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused, raise_if
from nam_megatron.recipe import load
from nam_megatron.runtime import tracking
from nam_megatron.runtime.gauges import Gauges

SHORT = ("schedule.train_steps=3", "schedule.decay_steps=3", "optim.warmup_steps=0")


def counters() -> None:
    """Torch has none without a GPU."""
    torch.cuda.memory_stats = lambda: defaultdict(int)


def stand_in(folder: Path) -> None:
    """A package for W&B and one for MLflow, which write down what they are given."""
    counters()
    said = folder / "said"

    def note(*words, **more) -> None:
        with open(said, "a") as file:
            file.write(f"{words} {more}\n")

    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    wandb.init = lambda **more: note("init", more["project"], more["name"], more["dir"])
    wandb.log = lambda figures, step: note("wandb", step, sorted(figures))
    wandb.config = type("Config", (), {"update": staticmethod(lambda _: None)})
    wandb.finish = lambda: None
    for name in ("set_tracking_uri", "set_experiment"):
        setattr(mlflow, name, lambda word, name=name: note(name, word))
    mlflow.start_run = lambda run_name: note("run", run_name) or True
    mlflow.log_metrics = lambda figures, step: note("mlflow", step, sorted(figures))
    sys.modules |= {"wandb": wandb, "mlflow": mlflow}
    for module in (wandb, mlflow):
        module.__spec__ = sys.__spec__


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_our_figures_stand_among_megatrons(tmp_path):
    at = tmp_path / "events"
    ranks = run(
        tmp_path,
        *SHORT,
        f"feature.tracking.tensorboard={at}",
        "cluster.gpus_per_node=2",
        "model.letters.E=mlp",
        world=2,
        before=counters,
    )
    assert all(rank.code == 0 for rank in ranks), ranks[0].err[-3000:]
    found = scalars(at)
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3]
    assert {"model TFLOP/s/GPU", "MFU", "memory/peak allocated GiB", "memory/peak reserved GiB"} <= found.keys()
    peak = lowered().plan.recipe.device.bf16_tflops
    for (step, rate), (same, share) in zip(found["model TFLOP/s/GPU"], found["MFU"], strict=True):
        assert step == same and share == pytest.approx(rate / peak)
    assert len(list(at.iterdir())) == 1  # one rank writes


def test_a_rehearsal_writes_nothing_of_a_gpu(tmp_path):
    """Megatron broke at torch's counters, which a CPU has none of."""
    words = command(tmp_path, *SHORT, "cluster=cpu", f"feature.tracking.tensorboard={tmp_path}/events")
    one = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    program = [sys.executable, "-m", "nam_megatron.train", *words]
    done = subprocess.run(program, env=os.environ | one, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = scalars(tmp_path / "events")
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3] and "model TFLOP/s/GPU" in found
    assert not [name for name in found if "mem" in name or name == "MFU"]


def test_what_layers_measured_is_written_too(monkeypatch):
    written = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: written.setdefault(name, (value, step)))
    monkeypatch.setattr(tracking.global_vars, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(tracking.global_vars, "get_wandb_writer", lambda: None)
    monkeypatch.setattr(tracking, "memory", dict)
    gauges = Gauges()
    gauges.expect({5: Gauge("DSA kept"), 21: Gauge("DSA kept")})
    monkeypatch.setattr(tracking, "GAUGES", gauges)
    tracking.Tracker(lowered().plan)(
        " iteration        7/       9 | lm loss: 2.5E+00 | DSA kept 5: 0.447 | DSA kept 6: 1 |"
    )
    assert written == {"DSA kept 5": (0.447, 7)}


@pytest.mark.slow
def test_wandb_and_mlflow_are_given_the_same(tmp_path):
    words = [f"feature.tracking.{key}" for key in (
        f"tensorboard={tmp_path}/tb", "wandb_project=p", "wandb_name=n", f"wandb_dir={tmp_path}/w", "mlflow=file:x", "mlflow_experiment=e",
    )]  # fmt: skip
    (rank,) = run(tmp_path, *SHORT, *words, before=lambda: stand_in(tmp_path))
    assert rank.code == 0, rank.err[-3000:]
    said = (tmp_path / "said").read_text()
    assert f"('init', 'p', 'n', '{tmp_path}/w')" in said
    for once in ("('set_tracking_uri', 'file:x')", "('set_experiment', 'e')", "('run', 'nam56r_smoke')"):
        assert said.count(once) == 1
    for step in (1, 2, 3):
        (ours,) = [line for line in said.splitlines() if line.startswith(f"('wandb', {step}, ") and "MFU" in line]
        (theirs,) = [line for line in said.splitlines() if line.startswith(f"('mlflow', {step}, ")]
        assert "memory/peak allocated GiB" in ours and {"MFU", "lm loss", "grad norm"} <= set(theirs.split("'"))


@pytest.mark.parametrize(("key", "package"), tracking.PACKAGES.items())
def test_a_writer_that_is_not_installed_is_refused(monkeypatch, tmp_path, key, package):
    """Megatron prints a warning and writes nothing."""
    monkeypatch.chdir(tmp_path)
    more = {"wandb_project": ("tensorboard=t", "wandb_name=n", "wandb_dir=d"), "mlflow": ("mlflow_experiment=e",)}.get(
        key, ()
    )
    plan = translate(load("nam56r_smoke", [f"feature.tracking.{word}" for word in (f"{key}=x", *more)])).plan
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(Refused, match=f"`{package}` is not installed") as refused:
        raise_if(tracking.objections(plan))
    assert refused.value.problems[0].key == f"feature.tracking.{key}"


def test_a_store_that_mlflow_does_not_open_is_refused_before_anything_is_built(monkeypatch):
    """As MLflow 3.17 does any folder; the trainer ended with a traceback behind its first step."""
    refuse = Mock(side_effect=ValueError("is in maintenance mode"))
    theirs = SimpleNamespace(set_tracking_uri=Mock(), set_experiment=refuse, __spec__=sys.__spec__)
    monkeypatch.setitem(sys.modules, "mlflow", theirs)
    words = ("feature.tracking.mlflow=file:/m", "feature.tracking.mlflow_experiment=e")
    (found,) = tracking.objections(plan := translate(load("nam56r_smoke", list(words))).plan)
    assert found.key == "feature.tracking.mlflow" and "maintenance mode" in found.message
    assert list(tracking.objections(plan, dry=True)) == []


def test_a_folder_that_its_writer_cannot_write_to_is_refused(monkeypatch, tmp_path):
    """The last rank alone writes; Megatron ended with a traceback."""
    (tmp_path / "file").touch()
    plan = translate(load("nam56r_smoke", [f"feature.tracking.tensorboard={tmp_path}/file/x"])).plan
    assert list(tracking.objections(plan, dry=True)) == [], "of another host"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", []), ("1", [f"cannot write to `{tmp_path}/file/x`: Not a directory"])):
        monkeypatch.setenv("RANK", rank)
        assert [p.message for p in tracking.objections(plan) if p.key == "feature.tracking.tensorboard"] == told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("wandb_project=p", "wandb_name=n", "wandb_dir=d"), "only beside TensorBoard"),
        (("tensorboard=t", "wandb_project=p", "wandb_dir=d"), "without `wandb_name`"),
        (("tensorboard=t", "wandb_name=n"), "without `wandb_project`"),
        (("wandb_name=n",), "`wandb_name` of a feature that is off"),
        (("mlflow=m",), "go together"),
        (("mlflow_experiment=m",), "`mlflow_experiment` of a feature that is off"),
    ],
)
def test_what_would_be_dropped_is_refused(words, said):
    with pytest.raises(Refused, match=said):
        translate(load("nam56r_smoke", [f"feature.tracking.{word}" for word in words]))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_no_preset_has_an_argument_of_it(name):
    assert not [s.name for s in preset(name).settings if s.owner == "tracking"]
