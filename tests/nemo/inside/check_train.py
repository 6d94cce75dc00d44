"""The same plan trained by Megatron's pretrain and by Bridge's, on CPU ranks over gloo: the same losses and gradient norms.

In a process of its own: Megatron is imported without Transformer Engine, so that it takes its own functions, Bridge with the stand-in.
"""

import functools
import os
import re
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "cpu")]

import pretend  # noqa: E402
import pytest  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

from nam_megatron import argv, train  # noqa: E402
from nam_megatron.lower import translate  # noqa: E402
from nam_megatron.recipe import load  # noqa: E402

sys.path.insert(0, str(TESTS / "nemo" / "stand_in"))

import megatron.bridge.training.setup as bridge_setup  # noqa: E402

import nam_megatron.nemo.container as container  # noqa: E402
import nam_megatron.nemo.train as nemo_train  # noqa: E402

SMALL = (
    "model.seq_length=32",
    "model.depth=6",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.vocab_size=256",
    "model.blocks.mamba2.heads=8",
    "model.blocks.mamba2.head_dim=8",
    "model.blocks.attention.head_dim=16",
    "data.workers=0",
    "schedule.train_steps=4",
    "schedule.log_interval=1",
)
LAYOUTS = {
    "one": (),
    "tensor": ("cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true"),
    "pipeline": ("cluster=h200_2", "parallel.pipeline=2"),
}


def steps(plan: Path, main, overrides: tuple[str, ...]) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) as logged by a run of `main`."""
    lowering = translate(load("nam56r_smoke", (*SMALL, *overrides)))
    plan.write_text(argv.plan_json(lowering))
    words = ["--nam-plan", str(plan), *argv.argv(lowering)]

    def job() -> int:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
        return main(words)

    ranks = pretend.fork(lowering.plan.recipe.world_size, job)
    assert all(rank.code == 0 for rank in ranks), "".join(rank.err[-3000:] for rank in ranks)
    line = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ")
    found = [line.search(text) for rank in ranks for text in rank.out.splitlines()]
    return {int(hit[1]): (float(hit[2]), float(hit[3])) for hit in found if hit}


def by_bridge(words: list[str]) -> int:
    """nam_megatron.nemo.train where there is no GPU, no kernel of Transformer Engine's, and not all packages."""
    bridge_setup.initialize_megatron = functools.partial(bridge_setup.initialize_megatron, allow_no_cuda=True)
    rope_utils.fused_apply_rotary_pos_emb = object()
    nemo_train.doctor.findings = lambda: iter(())
    provide = container.NamProvider.provide

    def without_fused_rope(self, *args, **kwargs):
        self.apply_rope_fusion = False
        return provide(self, *args, **kwargs)

    container.NamProvider.provide = without_fused_rope
    return nemo_train.main(words)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_train_the_same(layout, tmp_path):
    ours = steps(tmp_path / "plan.json", lambda words: train.main(words, time.time()), LAYOUTS[layout])
    theirs = steps(tmp_path / "plan.json", by_bridge, LAYOUTS[layout])
    assert set(ours) == set(theirs) == {1, 2, 3, 4}
    # Megatron's line of step 2 is the mean of the first two.
    theirs[2] = (theirs[1][0] + theirs[2][0]) / 2, theirs[2][1]
    for step in ours:
        assert theirs[step] == pytest.approx(ours[step], rel=1e-6), step
    assert ours[4][0] < ours[1][0]
