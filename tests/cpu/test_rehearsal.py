"""`cluster=cpu`: the regular trainer, launcher and report without a GPU; and what such a run refuses."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pods
import pytest
from gpu import test_two_gpus as two
from pods import Hosts

from launch.record import compare, receipts, report
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load
from nam_megatron.rehearsal import NOTE

SMALL = ["model.seq_length=32", "model.pattern=AEM", "model.depth=3", "model.hidden_size=64", "model.vocab_size=256"]
SMALL += ["model.blocks.mamba2.heads=8", "model.blocks.mamba2.head_dim=8", "model.blocks.attention.head_dim=16"]


@pytest.fixture
def short():
    """A folder whose path leaves room for the names of sockets, which hold 107 bytes; pytest's may not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_ten_steps_from_the_launcher_to_the_page(short):
    """Two processes over gloo. What has no meaning without a GPU is not in the receipt."""
    words = ["conf=nam56r_smoke", "cluster=cpu", "cluster.gpus_per_node=2", "schedule.train_steps=10", "port=29571"]
    words += [f"cluster.storage.receipts={short}/receipts", f"cluster.storage.scratch={short}/scratch", *SMALL]
    words += ["dirty=store"]
    done = subprocess.run([sys.executable, "-m", "launch", "run", *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count(NOTE) + done.stderr.count(NOTE) == 2  # the checks', and one rank's
    assert "GPU" not in done.stdout and "NCCL_" not in done.stderr and done.stdout.count("\n") < 60
    (folder,) = Path(short, "receipts").glob("*smoke*")
    log = (folder / "log.txt").read_text()
    held = log.count("\n") - done.stdout.count("\n") - 2  # the launcher's own: started, ended
    assert log.count("/GPU): ") == 10 and f"note: {held} lines are left out" in done.stderr
    said = json.loads((folder / "receipt.json").read_text())
    losses = said["outcome"]["series"]["loss"]
    assert said["outcome"]["end"] == "completed" and len(losses) == 10 and losses[-1] < losses[0] - 0.1
    assert said["outcome"]["memory"] is said["outcome"]["against_forecast"] is None
    assert said["forecast"].keys() == {"parameters", "active"}
    assert "1x2 CPU ranks" in (listed := receipts.line(said)) and listed.endswith(" tok/s/CPU rank")
    assert "GPU" not in str(compare.figures([said, said]))
    assert report.command([str(folder)], {}) == 0
    page = (folder / "report.html").read_text()
    assert NOTE in page and "of the peak" not in page and "<h2>Loss</h2><svg" in page
    regime = said["lineage"]["regime"]
    assert "1 x 2 CPU ranks" in regime and "norm_kernels=torch" in regime and "tokens/s/CPU rank" in done.stderr
    assert "GPUs" not in page and "h200" not in page and "<td>transformer_engine</td>" not in page


@pytest.mark.slow
def test_two_hosts_train_what_one_does_and_neither_outlives_the_other(tmp_path):
    words = ["conf=nam56r_smoke", "cluster=cpu", "schedule.global_batch_size=4", *SMALL]
    six = [*words, "schedule.train_steps=6", "schedule.decay_steps=6"]
    with (
        Hosts(tmp_path / "two", 2, 0, six) as two,
        Hosts(tmp_path / "one", 1, 0, [*six, "cluster.gpus_per_node=2"]) as one,
    ):
        assert two.ended() == [0, 0] and one.ended() == [0]
        found, expected = ({n: (s["lm loss"], s["grad norm"]) for n, s in of.steps().items()} for of in (two, one))
    assert len(found) == 6 and found == expected
    with Hosts(tmp_path / "lost", 2, 0, [*words, "schedule.train_steps=100000"]) as lost:
        lost.trained(2)
        lost.lose(0 if "lm loss" in lost.logs[1].read_text() else 1)
        assert all(lost.ended())


@pytest.mark.parametrize(("preset", "words"), two.STACKS)
@pytest.mark.parametrize("more", [two.SIX, two.WAITS], ids=["six", "waits"])
def test_what_two_hosts_of_gpus_are_told_is_a_recipe(preset, words, more):
    recipe = load(preset, [*words, *two.SMALL, *more, *pods.of(2, 4)])
    assert (recipe.cluster.nodes, recipe.world_size) == (2, 8)


def test_what_asks_for_a_gpu_is_refused_with_a_hint_that_works():
    """Everything at once; and the recipe as the hints have it is taken. What overlays wish of a GPU is denied, and said."""
    words = ["+overlay=[fused,extras,fp8]", "feature.cuda_graphs.impl=full_iteration", "cluster=cpu"]
    with pytest.raises(Refused) as refused:
        translate(load("nam56r_fused", words))
    problems = refused.value.problems
    assert len(problems) > 5 and {p.key for p in problems} >= {"feature.fp8.recipe", "execution.mla.kernels"}
    hints = [found[1] for p in problems if (found := re.fullmatch(r"`(\S+)`", p.hint))]
    hints = [hint for hint in hints if not hint.startswith("feature.fp8")]
    wishes = translate(load("nam56r_fused", ["cluster=cpu", *hints])).plan.recipe.wishes
    assert {wish.key for wish in wishes} >= {"precision.cross_entropy", "execution.moe.permute_fusion"}
    assert translate(load("nam56r_smoke", ["cluster=cpu", "cluster.nodes=2", "schedule.global_batch_size=8"]))
