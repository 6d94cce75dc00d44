"""Four GPUs: the articles' layout, TP 2 + SP + EP 2 + Megatron-FSDP, trains as the same layout without FSDP does; killed, it is resumed.

Needs four GPUs and fails with fewer: there, leave it out by `--ignore tests/gpu/test_four_gpus.py`.
"""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from launch.record import steps as log

from .test_two_gpus import ENDS, FAULT
from .test_whole_step import STACKS, ran

pytestmark = pytest.mark.gpu
FOUR = "cluster.gpus_per_node=4"
LAYOUTS = {"fsdp": "+overlay=[tp_sp_ep,fsdp_ep]", "without": "+overlay=tp_sp_ep"}


@pytest.fixture(autouse=True)
def four_gpus():
    found = torch.cuda.device_count()
    assert found >= 4, f"{found} GPUs, four are needed: leave this file out by `--ignore tests/gpu/test_four_gpus.py`"


@pytest.mark.parametrize(("preset", "words"), STACKS)
def test_sharded_weights_train_as_whole_ones(tmp_path, preset, words):
    """Sums are of another order, and in bf16."""
    with ProcessPoolExecutor() as beside:  # a launcher ends whatever outlives its run in its own process
        running = {
            name: beside.submit(ran, tmp_path / name, preset, FOUR, *words, overlay)
            for name, overlay in LAYOUTS.items()
        }
    found, expected = (log.read(running[name].result()[1].splitlines()).steps for name in LAYOUTS)
    texts = [one.result()[1][-2000:] for one in running.values()]
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4, 5, 6], texts
    for number, step in expected.items():
        for name, limit in (("lm loss", 2e-3), ("grad norm", 5e-2)):
            assert found[number].values[name] == pytest.approx(step.values[name], rel=limit), (number, name)


@pytest.mark.parametrize(("preset", "words"), STACKS)
def test_a_killed_run_of_sharded_weights_goes_on(tmp_path, preset, words):
    """With the losses of a run that nobody killed."""
    (tmp_path / "fault.py").write_text(FAULT % ENDS["signal"])
    layout = (FOUR, *words, LAYOUTS["fsdp"], "precision.deterministic=true")
    save = f"schedule.save={tmp_path}/ckpt", "schedule.save_interval=100"
    with ProcessPoolExecutor() as beside:  # a launcher ends whatever outlives its run in its own process
        unharmed = beside.submit(ran, tmp_path / "unharmed", preset, *layout)
        run = beside.submit(ran, tmp_path / "run", preset, *layout, *save, script=tmp_path / "fault.py")
        code, text = run.result()
        assert not code and sorted(log.read(text.splitlines()).steps) == [1, 2, 3, 4, 5], text[-3000:]
        code, text = beside.submit(
            ran, tmp_path / "rest", preset, *layout, *save, f"schedule.load={tmp_path}/ckpt"
        ).result()
        rest = log.read(text.splitlines()).steps
        assert not code and sorted(rest) == [6], text[-3000:]
    code, text = unharmed.result()
    last = log.read(text.splitlines()).steps[6]
    assert not code and rest[6].values["lm loss"] == pytest.approx(last.values["lm loss"], rel=1e-5)
