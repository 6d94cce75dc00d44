"""The trainer, from the command line to the loss: Megatron's own pretrain(), data and optimizer on a CPU."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import megatron.core.dist_checkpointing
import numpy
import pretend
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args
from megatron.training.arguments import parse_and_validate_args

from launch.record import steps
from nam_megatron import installed, train
from nam_megatron.blocks.mamba2.block import Mamba2
from nam_megatron.budget import cost
from nam_megatron.compile.argv import argv as argv_of
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.argv import words as words_of
from nam_megatron.compile.lower import translate
from nam_megatron.compile.plan import Seam
from nam_megatron.errors import REFUSED, Problem, Refused
from nam_megatron.mends import SAID, Trainer, experts_apart, install, sample_order, sinks
from nam_megatron.mends.series import needed
from nam_megatron.recipe import load
from nam_megatron.runtime import checksums, cross_entropy, hosts, padding, pretrain, rate, word_embedding
from nam_megatron.runtime.stack import hybrid_stack_spec

SMALL = ("model.seq_length=32", "model.pattern=AEMEAE", "model.depth=6", "model.hidden_size=64", "model.vocab_size=256")
SMALL += ("model.blocks.mamba2.heads=8", "model.blocks.mamba2.head_dim=8", "model.blocks.attention.head_dim=16")
SMALL += ("data.workers=0",)
TORCHRUN = dict(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", PYTORCH_ALLOC_CONF="expandable_segments:True")
TWO = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


@cache
def lowered(*overrides: str):
    return translate(load("nam56r_smoke", (*SMALL, *overrides)))


def command(folder: Path, *overrides: str) -> list[str]:
    """The plan written to `folder`, and the words after `-m nam_megatron.train`."""
    lowering = lowered(*overrides)
    path = folder / "plan.json"
    path.write_text(plan_json(lowering))
    return ["--nam-plan", str(path), *words_of(lowering)]


def run(folder: Path, *overrides: str, world: int = 1, before=lambda: None, main=train.main) -> list[pretend.Rank]:
    """The training command on `world` ranks, after `before()` in each of them."""
    words = command(folder, *overrides)

    def job() -> int:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        before()
        return main(words, time.time())

    return pretend.fork(world, job)


def signed(step: Path) -> None:
    """Its checksums made anew, as whoever can write a checkpoint can."""
    (step / checksums.NAME).unlink(missing_ok=True)
    checksums.put(step, checksums.digests(step, checksums.names(step)))


def logged(ranks: list[pretend.Rank], what: str = "lm loss") -> list[float]:
    """A figure of each step's log line, over all that was printed; so a line printed twice counts twice."""
    text = "".join(rank.out for rank in ranks)
    return [
        float(line.split(f" {what}: ")[1].split()[0])
        for line in text.splitlines()
        if " iteration " in line and what in line
    ]


def trained(ranks: list[pretend.Rank]) -> list[float]:
    """The losses of a run that ended well."""
    assert all(rank.code == 0 for rank in ranks), "".join(rank.err[-3000:] for rank in ranks)
    return logged(ranks)


# What is refused ---------------------------------------------------------------------------------------------------------------


def refusal(words: list[str], **environ: str) -> tuple[Problem, ...]:
    with pytest.raises(Refused) as refused:
        train.accept(words, TORCHRUN | environ)
    return refused.value.problems


def test_the_plan_as_written_is_accepted(tmp_path):
    job = train.accept(command(tmp_path), TORCHRUN)
    assert job.plan == lowered().plan


def test_what_a_rank_meets_alone_is_said(monkeypatch, capsys):
    """The first rank says what all meet, and torchrun ends the others while they wait."""
    waited = []
    monkeypatch.setattr(train.time, "sleep", waited.append)
    assert [train.stop(rank, 2, f"error: on {rank}\n") for rank in (0, 3)] == [2, 2]
    assert capsys.readouterr().err == "error: on 0\nerror: on 3\n" and len(waited) == 1


def test_experts_and_nothing_else_are_reduced_apart():
    linear = partial(torch.nn.Linear, 2, 2, bias=False)
    mlp = torch.nn.ModuleDict(
        {
            "experts": torch.nn.ModuleDict({"linear_fc1": linear()}),
            "shared_experts": torch.nn.ModuleDict({"linear_fc1": linear()}),
            "router": linear(),
        }
    )
    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"mlp": mlp, "mixer": linear()})})
    experts_apart.install([model], None)
    apart = [name for name, p in model.named_parameters() if not getattr(p, "allreduce", True)]
    assert apart == ["layer.mlp.experts.linear_fc1.weight"]


def test_each_tensor_rank_has_its_own_sinks():
    """As Transformer Engine makes them, without a mark: one that the norm counts on the first rank alone."""
    counted = partial(param_is_not_tensor_parallel_duplicate, tp_group=SimpleNamespace(rank=lambda: 1))
    attention = torch.nn.Module()
    attention.core_attention, attention.norm = torch.nn.Module(), torch.nn.Linear(2, 2)
    attention.core_attention.softmax_offset = torch.nn.Parameter(torch.zeros(2))
    assert not any(map(counted, attention.parameters()))
    sinks.install([attention], None)
    assert [name for name, p in attention.named_parameters() if counted(p)] == ["core_attention.softmax_offset"]


def test_help_is_a_text_and_no_run(capsys):
    assert train.main(["--help"], 0.0) == 0
    assert "--nam-plan plan.json" in capsys.readouterr().out
    assert train.main([], 0.0) == 2


ENDS = """
import atexit, sys, threading
from nam_megatron import train
def main(words, started):
    atexit.register(print, "closed")
    {end}
train.main = main
threading.Thread(target=threading.Event().wait, daemon={ends}).start()  # as NCCL, with which Python's regular end would wait
train.process([], 0.0)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise RuntimeError('planted')", 1, "RuntimeError: planted"),
        ("return 2", 2, ""),
        ("sys.exit(16)", 16, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("return 0", 0, ""),
    ],
)
def test_a_process_that_fails_waits_for_nothing_that_may_never_come(end, code, said):
    """Megatron's code 16, too. What has to be closed is closed; a run that ended well ends as Python does."""
    program = ENDS.format(end=end, ends=not code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (code, "closed\n") and said in done.stderr


def test_without_a_plan_nothing_is_guessed():
    for words in ([], ["--bf16"], ["--bf16", "--nam-plan"]):
        assert "no plan" in refusal(words)[0].message


def test_another_world_is_refused(tmp_path):
    (problem,) = refusal(command(tmp_path), WORLD_SIZE="4")
    assert problem.message == "4 processes, and the plan is for 1"
    words = command(tmp_path, "cluster=h200_2")
    (problem,) = refusal(words, WORLD_SIZE="2")  # of two hosts, whose files nobody would compare
    assert problem.message == "1 processes on a host, and the plan is for 2"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_a_plain_python_process_is_refused(tmp_path, missing):
    with pytest.raises(Refused, match="not started by torchrun"):
        train.accept(command(tmp_path), {name: TORCHRUN[name] for name in TORCHRUN if name != missing})


def test_the_environment_the_plan_needs_is_demanded(tmp_path):
    words = command(tmp_path, "cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true")
    (problem,) = refusal(words, **TWO, CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert problem.message.startswith("CUDA_DEVICE_MAX_CONNECTIONS is `8`, and the plan needs `1`")
    train.accept(words, TORCHRUN | dict(**TWO, CUDA_DEVICE_MAX_CONNECTIONS="1"))


def test_an_fsdp_forbids_the_one_connection_that_tensor_parallelism_wants(tmp_path):
    """Megatron asserts it. Another value, as a platform may force it, and none are both fine."""
    layout = ("cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2")
    words = command(tmp_path, *layout, "feature.megatron_fsdp.enabled=true")
    (problem,) = refusal(words, **TWO, CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert problem.message.startswith(
        "CUDA_DEVICE_MAX_CONNECTIONS is set, and the plan needs it unset: an FSDP forbids 1"
    )
    for value in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}):
        train.accept(words, TORCHRUN | TWO | value)


def test_a_variable_the_plan_needs_unset_is_refused(tmp_path):
    """Another program would compute the norms than the recipe says. Platforms force the connections, which are only slower."""
    (problem,) = refusal(command(tmp_path), NVTE_NORM_BWD_USE_CUDNN="1", CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert problem.message.startswith("NVTE_NORM_BWD_USE_CUDNN is set, and the plan needs it unset")
    both = dict(NVTE_NORM_FWD_USE_CUDNN="1", NVTE_NORM_BWD_USE_CUDNN="1")
    train.accept(command(tmp_path, "precision.norm_kernels=cudnn"), TORCHRUN | both)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: [*w, "--tie-all"], "given only `--tie-all`"),
        (lambda w: [x for x in w if x != "--bf16"], "in the plan only `--bf16`"),
        (lambda w: [*w[:-1], w[-2], w[-1]], "same flags in another order or number"),
        (
            lambda w: ["1e-9" if x == "0.0003" else x for x in w],
            "given only `--lr 1e-9`; in the plan only `--lr 0.0003`",
        ),
    ],
)
def test_arguments_other_than_the_plans_are_refused(tmp_path, change, said):
    (problem,) = refusal(change(command(tmp_path)))
    assert said in problem.message


def test_what_differs_is_clipped_and_run_sh_is_named(tmp_path):
    (problem,) = refusal(command(tmp_path)[:2])
    assert len(problem.message) < 400 and " more" in problem.message and "run.sh" in problem.hint


def test_another_megatron_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "_megatron", lambda: "0.20.0")
    assert refusal(command(tmp_path))[0].message.startswith("Megatron is 0.20.0 (`")


def test_no_megatron_is_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "_megatron", lambda: None)
    assert refusal(command(tmp_path))[0].message.endswith("needs `megatron`, which is not installed")


def test_another_transformer_engine_is_refused(tmp_path, monkeypatch):
    """Of the modules that train; where there is none, what builds them says so."""
    monkeypatch.setattr(installed, "_engine", lambda: "2.5")
    (problem,) = refusal(command(tmp_path))
    assert problem.message.startswith("Transformer Engine is 2.5") and "2.20.2" in problem.message
    assert train.accept(command(tmp_path), TORCHRUN, engine=False)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (SystemExit(None), 1, "error: Megatron gave up before the end; its reason stands above\n"), (SystemExit(16), 16, ""),
        (torch.OutOfMemoryError("CUDA out of memory."), 1, "OutOfMemoryError"), (Refused(Problem("no")), 2, "error: no\n"),
    ],
    ids=("gave up", "a result that differs", "memory", "refused"),
)  # fmt: skip
def test_how_a_run_ends_is_how_the_command_ends(tmp_path, end, code, said):
    def before() -> None:
        def ends(*_, **__):
            raise end

        pretrain.run = ends

    (rank,) = run(tmp_path, before=before)
    assert rank.code == code and said in rank.err


def test_a_plan_with_unbuilt_parts_is_incomplete(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Mamba2, "missing", "the mixer")
    lowering = translate(load("nam56r_smoke", SMALL))
    (tmp_path / "plan.json").write_text(plan_json(lowering))
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--nam-plan", str(tmp_path / "plan.json"), *words_of(lowering)], time.time()) == 3
    err = capfd.readouterr().err
    assert "error: `mamba2` is not built: the mixer (layers " in err


def test_what_is_not_built_is_said_with_its_layers():
    seams = (Seam("a", "no kernel", (3, 5)), Seam("b", "no loss"))
    job = SimpleNamespace(plan=SimpleNamespace(not_built=seams))
    assert train.unbuilt(job) == "error: `a` is not built: no kernel (layers 3, 5)\nerror: `b` is not built: no loss\n"


def test_the_log_divides_by_a_gpus_share_of_a_sequence():
    one, two = lowered().plan, lowered("cluster=h200_2").plan
    assert train.operations(one) == cost.cost(one).model * 32 == 2 * train.operations(two)


@pytest.mark.slow
def test_a_refusal_is_said_once_under_torchrun(tmp_path):
    """Two ranks that refuse at the same time: whoever ends first must not take the message with it."""
    words = [
        *["-m", "nam_megatron.torchrun", "--standalone", "--nproc-per-node", "2", "-m", "nam_megatron.train"],
        *command(tmp_path),
    ]
    env = os.environ | dict(
        PYTHONPATH=str(Path(train.__file__).parents[1]),
        OMP_NUM_THREADS="1",
        **{k: v for k, v in TORCHRUN.items() if "ALLOC" in k},
    )
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 2 processes, and the plan is for 1") and done.stderr.count("error: ") == 1
    assert done.stderr.splitlines()[-1].startswith("hint: "), done.stderr  # torchrun adds nothing to it


def test_an_argument_that_nothing_would_act_on_is_refused():
    def job():
        sys.argv = ["", *argv_of(lowered()), *["--spec", "x", "y"]]
        with pytest.raises(Refused, match="--spec"):
            pretrain.settings(
                parse_and_validate_args(), hybrid_stack_spec(lowered().plan, pretend.modules.CpuBackend())
            )

    in_rank(job)


# A whole run -------------------------------------------------------------------------------------------------------------------

EIGHT = ("schedule.train_steps=8", "schedule.decay_steps=8", "optim.lr=0.01")


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory) -> list[float]:
    return trained(run(tmp_path_factory.mktemp("one"), *EIGHT))


def test_it_learns(eight_steps):
    assert len(eight_steps) == 8
    assert eight_steps[-1] < eight_steps[0] - 0.2


@pytest.mark.slow
def test_the_trainer_says_its_last_step_whatever_the_log_hides(tmp_path):
    """`log_interval` hid it, and the step that was begun was told for the one that was done."""
    (rank,) = run(
        tmp_path, "schedule.train_steps=3", "schedule.log_interval=2", "schedule.decay_steps=3", "optim.warmup_steps=0"
    )
    assert rank.code == 0, rank.err[-3000:]
    said = steps.read(rank.out.splitlines())
    assert (max(said.steps), steps.last_step(said)) == (2, 3)


@pytest.mark.slow
def test_two_data_parallel_ranks_are_one(tmp_path, eight_steps):
    """Same seed, same data, half the microbatches each; and every step is logged once, by one rank."""
    assert trained(run(tmp_path, *EIGHT, "cluster=h200_2", world=2)) == pytest.approx(eight_steps, abs=2e-2)


def gemm_of_te() -> None:
    """From here on, Transformer Engine consists of its GEMM, which counts its calls."""
    calls = []

    def general_gemm(a, b, *, out_dtype, layout, out, accumulate, grad):
        assert (layout, accumulate, grad, out_dtype) == ("NT", True, True, out.dtype)
        calls.append(out.add_(b.float().t() @ a.float()))

    for name in ("", ".pytorch", ".pytorch.cpp_extensions"):
        sys.modules[f"transformer_engine{name}"] = ModuleType(f"transformer_engine{name}")
    sys.modules["transformer_engine.pytorch.cpp_extensions"].general_gemm = general_gemm
    leave = pretrain.leave
    pretrain.leave = lambda: (leave(), print(f"{len(calls)} GEMMs"))


@pytest.mark.slow
def test_gradients_that_the_gemm_adds_are_the_same(tmp_path, eight_steps):
    """Megatron's linear layers demand APEX for this; with TE's GEMM in its place they learn the same."""
    (rank,) = run(tmp_path, *EIGHT, "precision.fused_grad_accumulation=true", before=gemm_of_te)
    assert trained([rank]) == pytest.approx(eight_steps, abs=1e-2)
    # at least the output layer, in each of two microbatches
    assert int(rank.out.split(" GEMMs")[0].split()[-1]) >= 8 * 2


@pytest.mark.slow
def test_what_only_makes_it_faster_learns_the_same(tmp_path, eight_steps):
    """The dispatcher and the mixer that are ours, and the activation that Megatron fuses: from the recipe to the last step."""
    keys = ("moe.dispatcher=local", "moe.fused_weighted_squared_relu=true", "mamba2.strided=true")
    keys += ("moe.fused_router_gradient=true", "mamba2.strided_norm=true")
    faster = run(tmp_path, *EIGHT, *(f"execution.{key}" for key in keys))
    assert trained(faster) == pytest.approx(eight_steps, abs=1e-2)


@pytest.mark.slow
def test_the_recipe_chooses_the_loss(tmp_path):
    """Without a GPU ours is refused, not replaced; where it is there, each stage of the pipeline gets it before it is wrapped."""
    (rank,) = run(tmp_path, "precision.cross_entropy=fused")
    assert rank.code == 2 and "the fused cross entropy needs a GPU" in rank.err

    def in_torch() -> None:
        def loss(labels, logits):
            print(f"ours of {logits.shape}")
            return torch.nn.functional.cross_entropy(logits.float().permute(1, 2, 0), labels, reduction="none")

        def provide(models):
            for model in models:
                assert isinstance(model, HybridModel)
                model.compute_language_model_loss = loss
            return models

        cross_entropy.provide = provide

    pipeline = ("cluster=h200_2", "parallel.pipeline=2", "feature.mtp.depths=1", "precision.cross_entropy=fused")
    first, last = run(tmp_path, *pipeline, world=2, before=in_torch)
    assert len(trained([first, last])) == 2
    assert "ours of" not in first.out
    schedule = lowered(*pipeline).plan.recipe.schedule
    microbatches = schedule.global_batch_size // schedule.micro_batch_size
    # in each of two steps: the model's loss and MTP's
    assert last.out.count(f"ours of torch.Size([32, {schedule.micro_batch_size}, 256])") == 2 * microbatches * 2


LAYOUTS = {
    "tensor and sequence": ("parallel.tensor=2", "parallel.sequence=true"),
    "expert": ("parallel.expert=2",),
    "pipeline with MTP": ("parallel.pipeline=2", "feature.mtp.depths=2"),
    "virtual pipeline with MTP": (
        "parallel.pipeline=2", "parallel.virtual_pipeline=2", "feature.mtp.depths=1", "schedule.global_batch_size=8",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_train(tmp_path, layout):
    ranks = run(tmp_path, "cluster=h200_2", *layout, world=2)
    losses = trained(ranks)
    assert len(losses) == 2
    assert losses == pytest.approx([5.55, 5.55], abs=0.1)  # ln 256 at the start
    assert len(logged(ranks, rate.NAME)) == len(logged(ranks, "throughput per GPU (TFLOP/s/GPU)")) == 2
    stood = [line.removeprefix(SAID) for rank in ranks for line in rank.out.splitlines() if line.startswith(SAID)]
    wanted = needed(lowered("cluster=h200_2", *layout).plan, Trainer.MEGATRON)
    assert stood == [" ".join(f"{mend.name}={mend.sha256}" for mend in wanted)]
    depths = [int(word.split("=")[1]) for word in layout if "depths" in word]
    for depth in range(1, 1 + sum(depths)):
        assert logged(ranks, f"mtp_{depth} loss") == pytest.approx([5.55, 5.55], abs=0.1)


def test_experts_in_mtp_are_in_the_log(tmp_path):
    """Megatron's table has a row for each depth, and `E` is the second layer of one: IndexError in the first step."""
    balanced = ("model.blocks.moe.aux_loss_coeff=0.01", "model.blocks.moe.z_loss_coeff=0.001")
    ranks = run(tmp_path, "cluster=h200_1", "feature.mtp.depths=2", "feature.mtp.pattern=AEE", *balanced)
    assert len(trained(ranks)) == 2 and len(logged(ranks, "mtp_2 loss")) == 2
    layers = lowered("feature.mtp.depths=2", "feature.mtp.pattern=AEE").plan.letter_counts["E"] + 2 * 2
    # At the start a router prefers none: its loss is 1, which Megatron divides by two layers too many.
    assert logged(ranks, "load_balancing_loss")[0] == pytest.approx(layers / (layers + 2), rel=0.05)


@pytest.mark.slow
def test_a_stage_without_experts_takes_part_in_the_log_of_theirs(tmp_path):
    """Megatron's stages would add up as many numbers as layers here, as MoE layers there: the first line would not come."""
    words = ("cluster=h200_2", "parallel.pipeline=2", "model.pattern=AEE|AMM", "model.blocks.moe.aux_loss_coeff=0.01")
    ranks = run(tmp_path, *words, world=2)
    assert len(trained(ranks)) == 2 and len(logged(ranks, "load_balancing_loss")) == 2


def test_another_source_in_megatrons_place_is_refused(tmp_path):
    """Said once, by the whole command, before anything is built."""

    def before() -> None:
        def save_checkpoint(*_, **__):
            """Another version's."""

        megatron.core.dist_checkpointing.save = save_checkpoint

    (rank,) = run(tmp_path, before=before)
    assert rank.code == 2 and "Traceback" not in rank.err and "training ..." not in rank.out
    place = "`megatron.core.dist_checkpointing:save`, which the mend `checksums` is about, has another source"
    assert f"error: {place}" in rank.err and "hint: install the pinned version again" in rank.err


def counted_changes() -> None:
    """From here on each rank says at its end how many parameters, of which names, are not what they were made as."""
    build, made = pretrain.NamModelBuilder.build_distributed_models, {}

    def remembered(*args, **kwargs):
        models = build(*args, **kwargs)
        made.update({(n, p): p.detach().clone() for model in models for n, p in model.named_parameters()})
        return models

    def said() -> None:
        changed = [name for (name, p), before in made.items() if not torch.equal(p, before)]
        print("changed:", *changed)

    pretrain.NamModelBuilder.build_distributed_models = remembered
    leave, pretrain.leave = pretrain.leave, lambda: (said(), leave())


def changed(ranks: list[pretend.Rank]) -> list[str]:
    return [name for rank in ranks for name in rank.out.split("changed: ")[1].splitlines()[0].split()]


@pytest.mark.slow
def test_residual_streams_learn(tmp_path):
    """Over a pipeline's cut, which two of them cross; every map of the six layers moves, in fp32 among bf16."""
    streams = ("feature.mhc.streams=2", "feature.mhc.kernels=naive", "parallel.pipeline=2", "cluster=h200_2")
    ranks = run(tmp_path, *EIGHT, *streams, world=2, before=counted_changes)
    losses = trained(ranks)
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.2
    moved = [name for name in changed(ranks) if "hyper_connection" in name]
    assert sum(name.endswith("mapping_proj.weight") for name in moved) == 6 and len(moved) >= 6 * 4


@pytest.mark.slow
def test_n_gram_rows_learn_beside_muon(tmp_path):
    ngrams = ("feature.ngram_hash.enabled=true", "feature.ngram_hash.buckets=64", "feature.ngram_hash.width=4")
    three = ("schedule.train_steps=3", "schedule.decay_steps=3", "optim.lr=0.01", "optim.warmup_steps=0")
    ranks = run(tmp_path, *ngrams, "optim=muon", *three, before=counted_changes)
    losses = trained(ranks)
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.2
    assert sum("ngrams" in name for name in changed(ranks)) == 2
    (share,) = logged(ranks, "n-gram rows 0")
    assert 0 < share < 1


@pytest.mark.slow
def test_one_rank_speaks(tmp_path):
    """No line is printed by two ranks, warnings included."""
    first, last = (
        {*rank.out.splitlines(), *rank.err.splitlines()} for rank in run(tmp_path, "cluster=h200_2", world=2)
    )
    assert "training ..." in first
    assert first & last <= {""}


# The model ---------------------------------------------------------------------------------------------------------------------


class MarkedMixer(MambaMixer):
    """Megatron's mixer with one parameter that asks for fp32."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.A_log.keep_in_fp32 = True


def test_marked_parameters_stay_in_fp32():
    """bf16 casts A_log and D of Megatron's own mixer, in 0.19.2; a marked one keeps its type and every bit of its value."""

    def job():
        install.single("marked_fp32")
        plan = lowered().plan
        spec = hybrid_stack_spec(plan, pretend.modules.CpuBackend())
        mixer = spec.submodules.mamba_layer.submodules.mixer
        spec.submodules.mamba_layer.submodules.mixer = ModuleSpec(MarkedMixer, mixer.params, mixer.submodules)
        args = _initialised(argv_of(lowered()))
        container = pretrain.settings(args, spec)
        builder = container.model.get_builder_cls()(container.model)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        made = {}
        container.model.pre_wrap_hooks.append(
            lambda models: made.update({n: p.detach().clone() for n, p in models[0].named_parameters()}) or models
        )
        (model,) = builder.build_distributed_models(groups, ddp_config=container.ddp)
        types = {n.removeprefix("module.module."): p.dtype for n, p in model.named_parameters()}
        kept = {n for n, dtype in types.items() if dtype == torch.float32}
        assert kept == {"decoder.layers.2.mixer.A_log"}
        assert types["decoder.layers.2.mixer.D"] == types["decoder.layers.2.mixer.dt_bias"] == torch.bfloat16
        value = dict(model.named_parameters())["module.module.decoder.layers.2.mixer.A_log"]
        assert torch.equal(value, made["decoder.layers.2.mixer.A_log"])
        assert not torch.equal(value, value.bfloat16().float())

    in_rank(job)


def test_a_missing_stack_is_never_replaced():
    """Megatron's builder would train its default stack; so would its config lose ours on the way through arguments."""

    def job():
        args = _initialised(argv_of(lowered()))
        container = pretrain.settings(args, None)
        with pytest.raises(AssertionError, match="no stack"):
            container.model.get_builder_cls()(container.model).build_model(
                ProcessGroupCollection.use_mpu_process_groups()
            )

    in_rank(job)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("end", [None, SystemExit(3), SystemExit(None), pretrain.NonFinite()], ids=repr)
def test_everything_is_provided_before_megatron_starts_and_ended_after(monkeypatch, fused, end):
    args = SimpleNamespace(
        gradient_accumulation_fusion=fused, consumed_train_samples=21, global_batch_size=4,
        cuda_graph_impl="full_iteration" if fused else "local", exit_signal_handler=False, exit_interval=None,
    )  # fmt: skip
    plan = lowered(*["precision.cross_entropy=fused"] * fused).plan
    config = SimpleNamespace(model=SimpleNamespace(pre_wrap_hooks=[], post_wrap_hooks=[]))
    called = []

    def records(name, result=None):
        return lambda *words, **named: called.append((name, *words, *named.values())) or result

    def start(*words):
        called.append(("pretrain", *words))
        if end is not None:
            raise end

    for name in ("set_startup_timestamps", "leave"):
        monkeypatch.setattr(pretrain, name, records(name))
    monkeypatch.setattr(pretrain.install, "command", records("mends"))
    monkeypatch.setattr(pretrain, "GAUGES", SimpleNamespace(expect=records("gauges")))
    monkeypatch.setattr(pretrain, "READINGS", SimpleNamespace(end=records("readings")))
    monkeypatch.setattr(pretrain, "HEART", SimpleNamespace(end=records("heart")))
    monkeypatch.setattr(pretrain.whole_step, "release", records("release"))
    monkeypatch.setattr(pretrain, "parse_and_validate_args", records("parse", args))
    monkeypatch.setattr(pretrain, "settings", records("settings", config))
    monkeypatch.setattr(pretrain, "pretrain", start)
    monkeypatch.setattr(pretrain.time, "time", lambda: 9.0)
    monkeypatch.setattr(sys, "argv", ["us", "old"])
    with contextlib.suppress(SystemExit, pretrain.NonFinite):
        pretrain.run(["--x"], "stack", 7.0, plan, operations=5.0, track="track", gauges={1: "g"})
    left = end is None or (isinstance(end, SystemExit) and end.code is not None)
    of = next(words for name, *words in called if name == "mends")
    assert (of[0].plan, of[0].operations, of[0].track, of[0].look) == (plan, 5.0, "track", pretrain.look)
    assert of[0].begin.keywords == {"blind": True}
    wanted = [("set_startup_timestamps", 7.0, 9.0), ("mends", of[0], Trainer.MEGATRON), ("gauges", {1: "g"}), ("parse",),
              ("settings", args, "stack"),
              ("pretrain", config, pretrain.datasets, pretrain.ModelType.encoder_or_decoder, pretrain.forward_step),
              ("readings", 5), ("heart",), ("release",), *[("leave",)] * left]  # fmt: skip
    assert sorted(called, key=str) == sorted(wanted, key=str) and sys.argv == ["us", "--x"]
    assert called.index(("settings", args, "stack")) < len(called) - 4
    assert config.model.pre_wrap_hooks == [cross_entropy.provide, word_embedding.provide] * fused
    hooks = [(hook.func, hook.keywords) for hook in config.model.post_wrap_hooks]
    assert hooks == [(install.wrapped, {"plan": plan}), (hosts.one_for_all, {"recipe": plan.recipe})]


@pytest.mark.parametrize("there", [True, False])
def test_a_process_group_is_left_by_all_together(monkeypatch, there):
    """The graph of a step goes first: NCCL ends no communicator that it holds."""
    called = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: there)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, partial(called.append, name))
    graph = SimpleNamespace(reset=partial(called.append, "reset"))
    for at in (pretrain.whole_step.FullCudaGraphWrapper.cuda_graph, pretrain.whole_step.FullCudaGraphWrapper.result):
        monkeypatch.setitem(at, "training", graph)
    pretrain.leave()
    assert called == ["reset", *["barrier", "destroy_process_group"] * there]
    pretrain.leave()
    assert called.count("reset") == 1


def test_what_stands_beside_the_stack_reaches_the_model(monkeypatch):
    """Hashed n-grams, and Llama's angles."""
    of_megatron = SimpleNamespace(transformer="transformer", pre_wrap_hooks=["theirs"])
    args = SimpleNamespace(**dict.fromkeys(pretrain.UNSERVED))
    monkeypatch.setattr(pretrain, "hybrid_config_from_args", lambda args, model_config_cls: of_megatron)
    monkeypatch.setattr(pretrain, "pretrain_cfg_container_from_args", lambda args, model: model)
    stack = ModuleSpec(object, metainfo={"hooks": ["ours"]})
    assert pretrain.settings(args, stack) is of_megatron
    assert of_megatron.hybrid_stack_spec is stack and of_megatron.pre_wrap_hooks == ["theirs", "ours"]


# Batches -----------------------------------------------------------------------------------------------------------------------

WHOLE = {
    "tokens": torch.arange(64).view(2, 32),
    "labels": torch.arange(64).view(2, 32) + 1,
    "loss_mask": torch.arange(64.0).view(2, 32) % 3,
    "position_ids": torch.arange(32).expand(2, 32).contiguous(),
}


def _initialised(argv: tuple[str, ...]):
    """Megatron's arguments and groups, as pretrain() has them when it builds the model."""
    from megatron.training import training

    sys.argv = ["", *argv]
    install.single("shipped_helpers")
    args = parse_and_validate_args()
    training.initialize_megatron()
    return args


def batch_of(rank: int, layout: tuple[str, ...], vp_stage: int | None = None) -> dict[str, torch.Tensor | None]:
    _initialised(argv_of(lowered("cluster=h200_2", *layout)))
    # The first tensor rank alone has an iterator with anything in it.
    samples = iter([WHOLE] if parallel_state.get_tensor_model_parallel_rank() == 0 else [])
    return pretrain.get_batch(samples, vp_stage)


def expect(layout: tuple[str, ...], wanted, vp_stage: int | None = None):
    """Each rank's batch is `wanted(rank)`, compared in the rank itself."""

    def job():
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        rank = int(os.environ["RANK"])
        batch = batch_of(rank, layout, vp_stage)
        want = dict.fromkeys(pretrain.BATCH) | wanted(rank)
        assert batch.keys() == want.keys()
        for name, tensor in want.items():
            assert (batch[name] is None) == (tensor is None), f"rank {rank}: {name}"
            assert tensor is None or torch.equal(batch[name], tensor), f"rank {rank}: {name}"

    for rank in pretend.fork(2, job):
        assert rank.code == 0, rank.err


def test_the_first_tensor_rank_reads_for_all():
    expect(("parallel.tensor=2", "parallel.sequence=true"), lambda rank: WHOLE)


def test_pipeline_ends_get_what_they_use():
    parts = (("tokens", "position_ids"), ("labels", "loss_mask"))
    expect(("parallel.pipeline=2",), lambda rank: {name: WHOLE[name] for name in parts[rank]})


def test_the_stage_with_mtp_gets_tokens_too():
    parts = (("tokens", "position_ids"), tuple(WHOLE))
    expect(("parallel.pipeline=2", "feature.mtp.depths=1"), lambda rank: {name: WHOLE[name] for name in parts[rank]})


def test_inner_virtual_stages_read_nothing():
    layout = (
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "feature.mtp.depths=1",
        "schedule.global_batch_size=8",
    )
    # Rank 0 holds virtual stages 0 and 2 of four, rank 1 holds 1 and 3.
    expect(layout, lambda rank: ({}, WHOLE)[rank], vp_stage=1)


def test_context_ranks_share_a_sequence_evenly():
    """Rank r of two takes quarters r and 3 - r, so that causal attention costs both the same."""

    def wanted(rank):
        cut = slice(None), torch.cat([torch.arange(8) + 8 * rank, torch.arange(8) + 8 * (3 - rank)])
        return {name: tensor[cut] for name, tensor in WHOLE.items()}

    expect(("parallel.context=2",), wanted)


@pytest.mark.parametrize("first", [True, False])
def test_a_microbatch_goes_to_the_model_whole(monkeypatch, first):
    """The mask as well: MTP's loss is made in there."""
    batch = {name: object() for name in pretrain.BATCH}
    given, looked = [], []
    at = SimpleNamespace(curr_iteration=3, log_interval=7, cuda_graph_impl="none")
    monkeypatch.setattr(pretrain, "get_args", lambda: at)
    monkeypatch.setattr(pretrain, "get_timers", lambda: MagicMock())
    for name in ("READINGS", "HEART", "GAUGES"):
        recorder = SimpleNamespace(step=lambda *words, name=name: looked.append((name, *words)))
        monkeypatch.setattr(pretrain, name, recorder)
    monkeypatch.setattr(pretrain, "get_attr_wrapped_model", lambda model, name: (model, name))
    monkeypatch.setattr(pretrain, "get_batch", lambda *words: looked.append(words) or batch)
    monkeypatch.setattr(pretrain, "get_rerun_state_machine", lambda: "machine")
    monkeypatch.setattr(pretrain, "watched", lambda machine: machine == "machine" and first)
    monkeypatch.setattr(pretrain, "unwrap_model", lambda model: ("unwrapped", model))
    monkeypatch.setattr(
        pretrain, "Watch", lambda model: SimpleNamespace(of=model, close=lambda: looked.append("closed"))
    )

    def model(*words, **named):
        given.append((words, named))
        return "output"

    output, loss = pretrain.forward_step("samples", model)
    ((words, named),) = given
    assert words == tuple(batch[name] for name in ("tokens", "position_ids", "attention_mask"))
    assert named == {name: batch[name] for name in ("labels", "loss_mask")}
    mask, watch = loss.args
    assert output == "output" and loss.func is pretrain.loss_func and mask is batch["loss_mask"]
    assert (watch and watch.of) == (("unwrapped", model) if first else None)
    steps = [("READINGS", 3), ("HEART", 3, False), ("GAUGES", 3, 7, False)]
    assert looked == [*steps, ("samples", (model, "vp_stage")), *["closed"] * first]


# Loss --------------------------------------------------------------------------------------------------------------------------


def past_the_first_step(job) -> None:
    """`job(machine)` in a rank, with Megatron's rerun state machine inside its second step and every check asked for."""

    def in_step():
        args = _initialised(argv_of(lowered()))
        args.check_for_spiky_loss, args.curr_iteration = True, 1
        machine = pretrain.get_rerun_state_machine()
        machine.first_iteration_complete = True
        assert machine.should_run_forward_backward(None)
        job(machine)

    in_rank(in_step)


def in_rank(job) -> None:
    (rank,) = pretend.fork(1, job)
    assert rank.code == 0, rank.err


def test_the_loss_is_the_masked_sum():
    def job(machine):
        losses, mask = torch.rand(2, 8), torch.tensor([[1.0, 0, 1, 1, 0, 1, 1, 1], [0.0] * 8])
        loss, tokens, report = pretrain.loss_func(mask, None, losses)
        assert loss.item() == pytest.approx((losses * mask).sum().item())
        assert (tokens.item(), tokens.dtype) == (6, torch.int)
        assert report["lm loss"].tolist() == [pytest.approx(loss.item()), 6]
        assert not machine.rerun_requested

    past_the_first_step(job)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_loss_that_is_no_number_asks_for_a_rerun(value):
    def job(machine):
        losses = torch.ones(2, 8)
        losses[1, 3] = value
        pretrain.loss_func(torch.ones(2, 8), None, losses)
        assert machine.rerun_requested

    past_the_first_step(job)


def test_a_spiky_loss_asks_for_a_rerun_and_a_doubled_one_does_not():
    def job(machine):
        mask = torch.ones(2, 8)
        for _ in range(100):  # the largest loss is learned from the first hundred
            pretrain.loss_func(mask, None, mask)
        pretrain.loss_func(mask, None, 2 * mask)
        assert not machine.rerun_requested
        pretrain.loss_func(mask, None, 200 * mask)
        assert machine.rerun_requested

    past_the_first_step(job)


def poison(step: int, module: str) -> None:
    """From here on, `module`'s output is NaN in `step` (from 1)."""
    build = pretrain.NamModelBuilder.build_model

    def poisoned(*args, **kwargs):
        model = build(*args, **kwargs)

        def hook(_, __, output):
            if get_args().curr_iteration + 1 != step:
                return output
            first, *rest = output if isinstance(output, tuple) else (output,)
            return (first * torch.nan, *rest) if isinstance(output, tuple) else first * torch.nan

        dict(model.named_modules())[module].register_forward_hook(hook)
        return model

    pretrain.NamModelBuilder.build_model = poisoned


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("embedding", "embedding (LanguageModelEmbedding)"),
        ("decoder.layers.2", "decoder.layers.2 (layer 3, MambaLayer)"),
        ("output_layer", "output_layer (ColumnParallelLinear)"),
    ],
)
def test_a_nan_ends_the_run_and_is_traced(tmp_path, step, module, named):
    (rank,) = run(tmp_path, "schedule.train_steps=4", before=partial(poison, step, module))
    assert rank.code == 1
    assert f"error: step {step}, rank 0: the loss is nan; first seen in the output of {named}\n" in rank.err
    assert len(logged([rank])) == step - 1


@pytest.mark.slow
def test_a_nan_in_an_earlier_pipeline_stage_is_traced_there(tmp_path):
    layout = ("cluster=h200_2", "parallel.pipeline=2")
    first, last = run(tmp_path, *layout, world=2, before=partial(_poison_first_stage, 2))
    assert last.code == 1
    assert (
        "error: step 2, rank 0: NaN or Inf, first seen in the output of decoder.layers.1 (layer 2, MoETransformerLayer)\n"
        in first.err
    )
    assert "step 2, rank 1: the loss is nan; it came with the input of this pipeline stage" in last.err


def _poison_first_stage(step: int) -> None:
    if os.environ["RANK"] == "0":
        poison(step, "decoder.layers.1")


# Data --------------------------------------------------------------------------------------------------------------------------


def indexed(folder: Path, documents: int = 40, first: int = 0) -> str:
    """A Megatron indexed dataset: documents of 5 to 44 tokens, each one number over and over, then 255. first: the first number."""
    prefix = str(folder / "corpus")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for i in range(first, first + documents):
        builder.add_document([i] * (4 + i) + [255], [5 + i])
    builder.finalize(f"{prefix}.idx")
    return prefix


MARKS = {"<fim_prefix>": 250, "<fim_middle>": 251, "<fim_suffix>": 252, "<fim_pad>": 254, "<|endoftext|>": 255}


class Words:
    """A tokenizer of a few words, as Megatron wraps them."""

    vocab_size, eod, pad = 256, 255, 254
    all_special_ids = (250, 251, 252, 254, 255)
    added_tokens_decoder: ClassVar[dict] = {}

    @property
    def unique_identifiers(self):
        return {"class": "Words"}

    @property
    def _tokenizer(self):
        return self

    tokenizer = _tokenizer

    def tokens_to_ids(self, tokens):
        return [MARKS.get(t, 0) for t in tokens]  # 0 is its unknown token

    def ids_to_tokens(self, ids):
        return [{v: k for k, v in MARKS.items()}.get(i, "<unk>") for i in ids]

    def ids_to_text(self, ids, remove_special_tokens):
        return "".join(chr(33 + i) for i in ids)

    def text_to_ids(self, text):
        return [ord(c) - 33 for c in text]


def built(folder: Path, *flags: str, tokenizer=Words) -> list:
    """Train, validation and test datasets of these arguments, from the provider that Megatron calls."""
    argv = [*argv_of(lowered()), "--split", "80,20,0", *flags]
    if any("data-path" in f for f in flags):
        argv.remove("--mock-data")
    _initialised(tuple(argv))
    install.single("padding", "sample_order", plan=lowered().plan)
    pretrain.get_tokenizer = tokenizer
    return pretrain.datasets((6, 2, 0))


def test_indexed_data_is_read_in_order_of_tokens(tmp_path):
    prefix = indexed(tmp_path)

    def job():
        train_set, valid, test = built(tmp_path, "--data-path", prefix)
        assert len(train_set) >= 6
        assert len(valid) >= 2
        assert test is None
        sample = train_set[0]
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        documents = {int(t) for i in range(6) for t in train_set[i]["tokens"]} - {255}
        assert documents <= set(range(32)), "validation documents in the training split"

    in_rank(job)


def test_fill_in_the_middle_reorders_and_marks(tmp_path):
    prefix = indexed(tmp_path)

    def job():
        train_set, *_ = built(
            tmp_path, "--data-path", prefix, "--fim-data", "--fim-rate", "1.0", "--fim-spm-rate", "0.5"
        )
        samples = [train_set[i] for i in range(6)]
        for sample in samples:
            ids = sample["tokens"].tolist()
            assert len(ids) == 32
            assert 250 in ids, "no prefix mark in a sample of rate 1"
        assert any(251 in s["tokens"] and 252 in s["tokens"] for s in samples)

    in_rank(job)


def test_an_order_is_kept_for_the_lengths_that_it_was_made_of(tmp_path):
    """Of a dataset written anew at its path the old order was taken, and its new documents never read."""

    def job():
        found, kept = [], []
        for first in (0, 0, 5, 5):  # as many documents, of other lengths
            prefix = indexed(tmp_path, 40, first)
            train_set = pretrain.datasets((6, 2, 0))[0] if found else built(tmp_path, "--data-path", prefix)[0]
            found.append([train_set[i]["tokens"].tolist() for i in range(6)])
            kept.append({path.name for path in tmp_path.rglob("*-document_index.npy")})
        assert found[0] == found[1] != found[2] == found[3]
        assert kept[0] == kept[1] < kept[2] == kept[3]  # the same lengths, the same order

    in_rank(job)


def test_the_lengths_of_documents_are_told_in_their_order():
    """Two that change places begin other samples."""
    told = [
        sample_order.lengths(SimpleNamespace(sequence_lengths=numpy.array(n, numpy.int32)))
        for n in ([5, 3], [3, 5], [5, 3], [8])
    ]
    assert told[0] == told[2] and len(set(told)) == 3


def test_an_order_that_was_damaged_is_made_again(tmp_path):
    """Of one file the place of each sample, say: other samples were trained, or every command ended with a traceback."""
    (tmp_path / "cache").mkdir()

    def job():
        prefix = indexed(tmp_path)
        blend = ("--data-path", "1", prefix, "2", prefix, "--data-cache-path", str(tmp_path / "cache"))
        read = lambda data: [data[i]["tokens"].tolist() for i in range(6)]  # noqa: E731
        first = read(built(tmp_path, *blend)[0])
        kept = sorted(tmp_path.glob("cache/*-train-*.npy"))
        assert len(kept) == 4 + 4  # of two parts, one order each, and of the blend
        for path in kept:
            raw = path.read_bytes()
            for damaged in (raw[:128] + bytes(len(raw) - 128), raw[:-1], b""):
                path.write_bytes(damaged)
                assert read(pretrain.datasets((6, 2, 0))[0]) == first and path.read_bytes() == raw, path
        kept[0].unlink()
        os.mkfifo(kept[0])
        assert read(pretrain.datasets((6, 2, 0))[0]) == first

    in_rank(job)


@pytest.mark.parametrize("lengths", [(0, 3, 0, 60, 0), (90,), (1,) * 70])
def test_documents_of_any_length_are_read_through(tmp_path, lengths):
    prefix, ids = str(tmp_path / "any"), [i % 200 for i in range(sum(lengths))]
    builder, text = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16), iter(ids)
    for length in lengths:
        builder.add_document([next(text) for _ in range(length)], [length])
    builder.finalize(f"{prefix}.idx")

    def job():
        train_set, *_ = built(tmp_path, "--data-path", prefix, "--split", "100,0,0")
        read = [train_set[i]["tokens"] for i in range(6)]
        assert {*torch.cat(read).tolist()} == {*ids} and all(len(tokens) == 32 for tokens in read)

    in_rank(job)


def parted(folder: Path, between: int, numbers: int = 200) -> str:
    """One long document of 0, 1, 2, ..., with `between` at every fifth place."""
    prefix, ids = str(folder / "parted"), [i // 5 % numbers if i % 5 else between for i in range(2000)]
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_a_pad_token_inside_the_data_is_a_token(tmp_path):
    """Megatron trained it as token 0 without loss, and masked the first sample's places of it in all samples."""
    prefix, ids = parted(tmp_path, Words.pad), []

    def job():
        train_set, *_ = built(tmp_path, "--data-path", prefix, "--split", "100,0,0")
        for i in range(6):
            sample = train_set[i]
            text = torch.cat([sample["tokens"], sample["labels"][-1:]])
            assert torch.equal(text[1:], sample["labels"]) and sample["loss_mask"].all()
            ids.extend(text.tolist())
        assert ids.count(Words.pad) > 30

    in_rank(job)


@pytest.mark.parametrize("bad", [256, -1, 70000])
def test_what_is_no_token_of_the_model_ends_the_run(tmp_path, bad):
    prefix = parted(tmp_path, bad)

    def job():
        train_set, *_ = built(tmp_path, "--data-path", prefix, "--split", "100,0,0")
        for workers in (0, 1):
            with pytest.raises(padding.Unfit) as unfit:
                next(iter(torch.utils.data.DataLoader(train_set, num_workers=workers)))
            said = f"document 0 of `{prefix}` has token {bad}, and the model's vocabulary 256"
            assert str(unfit.value) == said

    in_rank(job)


def test_each_sample_of_fill_in_the_middle_has_its_own_padding(tmp_path):
    """The first one's places of it were masked in all, and so was nothing where the tokenizer pads with another token than the recipe."""
    prefix, pads = indexed(tmp_path), 253
    fim = ("--fim-data", "--fim-rate", "1.0", "--fim-spm-rate", "0.5")

    class Shorter(Words):
        """Its text comes back with fewer tokens, so that samples are padded."""

        pad = pads

        def text_to_ids(self, text):
            return super().text_to_ids(text)[::2]

    def job():
        train_set, *_ = built(tmp_path, "--data-path", prefix, *fim, tokenizer=Shorter)
        lengths = []
        for i in range(6):
            sample = train_set[i]
            length = int(sample["loss_mask"].sum())
            assert sample["loss_mask"][:length].all() and not sample["tokens"][length + 1 :].any()
            assert not {-1, 254} & {*sample["tokens"].tolist(), *sample["labels"].tolist()}
            lengths.append(length)
        assert len({*lengths}) > 2 and max(lengths) < 32

    in_rank(job)


def test_a_special_token_that_fill_in_the_middle_would_leave_out_ends_the_run(tmp_path):
    prefix = parted(tmp_path, 254)

    def job():
        train_set, *_ = built(tmp_path, "--data-path", prefix, "--split", "100,0,0", "--fim-data", "--fim-rate", "1.0")
        with pytest.raises(
            padding.Unfit, match="has token 254, a special token that fill-in-the-middle would leave out"
        ):
            train_set[0]

    in_rank(job)


def test_fill_in_the_middle_needs_its_tokens(tmp_path):
    prefix = indexed(tmp_path)

    def job():
        flags = ("--data-path", prefix, "--fim-data", "--fim-suffix-token", "<suf>", "--fim-eod-token", "<eod>")
        with pytest.raises(Refused) as refused:
            built(tmp_path, *flags)
        assert [p.key for p in refused.value.problems] == ["feature.fim.suffix_token", "feature.fim.eod_token"]

    in_rank(job)


@pytest.mark.few(1)
@pytest.mark.parametrize("short", [True, False])
def test_sockets_below_a_folder_of_a_long_name(tmp_path, short):
    """A worker that could open none left its rank waiting for data without end."""
    (long := tmp_path / ("x" * 90)).mkdir()
    program = "from multiprocessing import connection; from nam_megatron import train"
    program += f"{'; train.short_sockets()' if short else ''}; connection.Listener(family='AF_UNIX')"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(long)}, capture_output=True, text=True
    )
    assert (ran.returncode == 0) == short, ran.stderr
    assert short or "AF_UNIX path too long" in ran.stderr


@pytest.mark.parametrize("long", ["x" * 90, "é" * 40])  # of bytes, not of characters
def test_a_rank_without_a_folder_for_its_sockets_refuses(monkeypatch, tmp_path, capsys, long):
    monkeypatch.setattr(train.tempfile, "tempdir", long)
    monkeypatch.setattr(train, "SHORT", (str(tmp_path / "none"),))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    assert train.recorded("megatron", [str(tmp_path / "plan.json")], lambda: 0) == REFUSED
    assert "let `TMPDIR` name a folder of a shorter path" in capsys.readouterr().err
