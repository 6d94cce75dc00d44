"""The same plan trained by Megatron's pretrain and by Bridge's, on CPU ranks over gloo: the same losses and gradient norms. And what
Bridge alone does with its checkpoints: prompts and answers.
"""

import functools
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import loops
import megatron.bridge.peft.lora as lora
import megatron.bridge.peft.utils as peft
import megatron.bridge.training.pretrain as bridge
import megatron.bridge.training.setup as bridge_setup
import modules
import numpy
import pretend
import pytest
import torch
import transformer_engine.pytorch.cpp_extensions as engine
from megatron.bridge.data.datasets.utils import _JSONLMemMapDataset
from megatron.bridge.training import gpt_step
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors.torch import load_file
from transformers import AutoTokenizer

import nam_megatron.nemo.container as container
import nam_megatron.nemo.train as nemo_train
from launch.record import steps as log
from nam_megatron import events as events_of_a_run
from nam_megatron import tracker, train
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.data import tokenizer
from nam_megatron.hf import export
from nam_megatron.mends import SAID, Trainer
from nam_megatron.mends.series import needed
from nam_megatron.nemo import finetune, guards
from nam_megatron.nemo.__main__ import command
from nam_megatron.recipe import load
from nam_megatron.runtime import checkpoint, checksums, rate
from nam_megatron.words.whole import digest

SMALL = (
    "model.seq_length=32",
    "model.pattern=AEMEAE",
    "model.depth=6",
    "model.hidden_size=64",
    "model.vocab_size=256",
    "model.blocks.mamba2.heads=8",
    "model.blocks.mamba2.head_dim=8",
    "model.blocks.attention.head_dim=16",
    "data.workers=0",
    "schedule.train_steps=4",
    "schedule.log_interval=1",
)
LAYOUTS = {
    "one": ("schedule.eval_steps=1", "schedule.eval_interval=2"),
    "tensor": ("cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true"),
    "pipeline": ("cluster=h200_2", "parallel.pipeline=2"),
    "context": ("cluster=h200_2", "parallel.context=2"),
    # As far as conf/overlay/fused.yaml runs without a GPU.
    "fused": (
        "cluster=h200_2",
        "precision.fused_grad_accumulation=true",
        "execution.moe.dispatcher=local",
        "execution.moe.expert_gemm=torch",
        "execution.moe.fused_router_gradient=true",
        "execution.moe.fused_weighted_squared_relu=true",
        "execution.mamba2.strided=true",
        "execution.mamba2.strided_norm=true",
        "schedule.manual_gc_interval=2",
    ),
}


def general_gemm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **_) -> None:
    """Transformer Engine's, as the linear layers' weight gradients need it."""
    out += b.float().t() @ a.float()


engine.general_gemm = general_gemm


def ran(plan: Path, main, *overrides: str) -> list[pretend.Rank]:
    """How `main` trained the small model."""
    ours = "lane=author_dp" in overrides  # without the kinds whose sizes SMALL gives
    small = [
        word for word in SMALL if not (ours and word.startswith(("model.blocks.mamba2", "model.blocks.attention")))
    ]
    lowering = translate(load("nam56r_smoke", (*small, *overrides)))
    plan.write_text(argv.plan_json(lowering))
    words = ["--nam-plan", str(plan), *argv.words(lowering)]

    def job() -> int:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
        return main(words)

    return pretend.fork(lowering.plan.recipe.world_size, job)


def steps(ranks: list[pretend.Rank]) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) as logged by a run that ended well."""
    assert all(rank.code == 0 for rank in ranks), "".join(rank.err[-3000:] for rank in ranks)
    line = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ")
    found = [line.search(text) for rank in ranks for text in rank.out.splitlines()]
    return {int(hit[1]): (float(hit[2]), float(hit[3])) for hit in found if hit}


def evaluations(ranks: list[pretend.Rank]) -> list[str]:
    return re.findall(r"(?:validation|test) (?:loss|set)?.*?lm loss value: (\S+)", "".join(rank.out for rank in ranks))


def by_bridge(words: list[str]) -> int:
    """nam_megatron.nemo.train where there is no GPU, no kernel of Transformer Engine's, and not all packages."""
    pretended()
    return nemo_train.main(words)


def in_background(words: list[str]) -> int:
    """The process that writes the checkpoints as a fork, for it has no GPU either."""
    caller = async_utils.PersistentAsyncCaller
    start = caller._get_process.__func__
    caller._get_process = classmethod(functools.wraps(start)(lambda cls, rank, *_, **__: start(cls, rank, "fork")))
    torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda _: None
    return by_bridge(words)


def told(words: list[str]) -> int:
    """in_background, as a launcher starts it that reads events."""
    os.environ[events_of_a_run.NONCE] = "mine"
    return in_background(words)


def by_others(words: list[str]) -> int:
    """The same by Bridge's pretrain alone, as other people's runners call it, and Python's end of a process."""
    pretended()
    try:
        bridge.pretrain(container.container(train.load(Path(words[1])).lowering), gpt_step.forward_step)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return 0


def pretended() -> None:
    bridge_setup.initialize_megatron = functools.partial(bridge_setup.initialize_megatron, allow_no_cuda=True)
    rope_utils.fused_apply_rotary_pos_emb = object()
    nemo_train.doctor.findings = lambda: iter(())
    logging.basicConfig(force=True)  # pytest would keep what Bridge logs
    provide = container.NamProvider.provide

    def without_fused_rope(self, *args, **kwargs):
        self.apply_rope_fusion = False
        return provide(self, *args, **kwargs)

    container.NamProvider.provide = without_fused_rope


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_train_the_same(layout, tmp_path):
    by_megatron = ran(tmp_path / "plan.json", lambda words: train.main(words, time.time()), *LAYOUTS[layout])
    by_bridges = ran(tmp_path / "plan.json", by_bridge, *LAYOUTS[layout])
    ours, theirs = steps(by_megatron), steps(by_bridges)
    assert evaluations(by_megatron) == evaluations(by_bridges)
    assert len(evaluations(by_bridges)) == 4 * (layout == "one"), "twice, at the end, and of the test split"
    assert set(ours) == set(theirs) == {1, 2, 3, 4}
    # Megatron's line of step 2 is the mean of the first two.
    theirs[2] = (theirs[1][0] + theirs[2][0]) / 2, theirs[2][1]
    for step in ours:
        assert theirs[step] == pytest.approx(ours[step], rel=1e-6), step
    assert ours[4][0] < ours[1][0]
    plan = train.load(tmp_path / "plan.json").plan
    for ranks, trainer in ((by_megatron, Trainer.MEGATRON), (by_bridges, Trainer.BRIDGE)):
        (said,) = [line for rank in ranks for line in rank.out.splitlines() if line.startswith(SAID)]
        # those of other plans, too, of which this process has made containers
        stood = re.findall(r"(\w+)=[0-9a-f]{64}", said)
        wanted = [mend.name for mend in needed(plan, trainer)]
        assert [name for name in stood if name in wanted] == wanted


# One recipe by everybody's loop ----------------------------------------------------------------------------------------------

PLAIN = (*SMALL, "schedule.seed=7")


def by_loop(name: str, folder: Path, words: Sequence[str]) -> int:
    pretended()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    loops.LOOPS[name]("nam56r_smoke", folder, words)
    return 0


@pytest.mark.slow
def test_one_recipe_by_every_loop_has_the_same_losses(tmp_path):
    """Nemotron's where its source is: last run on 2026-11-28 with e27b371, `NAM_NEMOTRON=FOLDER/src`."""
    rank = Path(__file__).with_name("rank.py")
    by = {name: pretend.fork(1, lambda name=name: by_loop(name, tmp_path, PLAIN)) for name in ("ours", "bridge")}
    # Its process makes others, which pretend by themselves.
    by["nemo_run"] = pretend.fork(1, lambda: loops.nemo_run("nam56r_smoke", tmp_path, PLAIN, [str(rank)]) or 0)
    if "NAM_NEMOTRON" in os.environ:
        by["nemotron"] = pretend.fork(1, lambda: by_loop("nemotron", tmp_path, PLAIN))
    losses = {name: steps(ranks) for name, ranks in by.items()}
    assert set(losses["ours"]) == {1, 2, 3, 4}
    for name, found in losses.items():
        assert found == losses["ours"], name


@pytest.mark.slow
def test_commands_that_stop_and_resume_are_one_run(tmp_path):
    """And each says in its log what a launcher looks for."""
    plan, save = tmp_path / "plan.json", tmp_path / "ckpt"
    saved = (f"schedule.save={save}", "schedule.save_interval=2", "schedule.stop_every=2")
    (first,) = ran(plan, told, *saved, "schedule.async_save=true")
    begun = steps([first])
    goes_on = (*saved, f"schedule.load={save}")
    assert refusals(*goes_on) == []
    assert refusals(*goes_on, "optim.lr=0.002")[0].startswith("the checkpoint has `optim.lr`")
    assert refusals(*saved) == [f"`{save}` holds the checkpoints of a run"]
    assert "no checkpoint in" not in str(megatrons(*goes_on)) and megatrons(*goes_on), (
        "its samples are not counted there"
    )
    (second,) = ran(plan, by_others, *goes_on)
    whole = steps(ran(plan, by_bridge))
    assert begun | steps([second]) == whole and (set(begun), set(whole)) == ({1, 2}, {1, 2, 3, 4})
    assert "Traceback" not in first.err
    events = [json.loads(line) for line in (tmp_path / events_of_a_run.FILE).read_text().splitlines()]
    saves = [(event["event"], event["step"]) for event in events if event["event"] in ("saving", "scheduled", "saved")]
    assert saves == [("saving", 2), ("scheduled", 2), ("saved", 2)]
    said = log.read(first.out.splitlines())
    assert [(s.step, s.behind, s.done) for s in said.saves] == [(2, False, False), (2, True, False), (2, False, True)]
    assert [(r.when, r.step) for r in said.readings] == [("built", 0), ("step", 1), ("end", 2)]
    assert all(rate.NAME in step.values for step in said.steps.values())
    assert (save / "iter_0000004" / checksums.NAME).is_file(), "which other runners write too"
    for step in (1, 9):
        (save / "latest_checkpointed_iteration.txt").write_text(str(step))
        assert any(f"says step {step}, and `latest_train_state.pt` 4" in text for text in refusals(*goes_on))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["load", "pretrained"])
def test_a_checkpoint_that_was_exchanged_once_it_was_judged_is_refused(start, pretrained, tmp_path):
    """Bridge looks at the disk again, and begins with random weights where there is none any more, or with others."""
    folder = tmp_path / "run"
    shutil.copytree(pretrained / "bridge", folder)

    def late(words: list[str]) -> int:
        def exchange(*_) -> None:
            if start == "load":
                (folder / guards.TRACKER).unlink()
                (folder / tracker.TRACKER).unlink()
            else:
                with open(folder / "iter_0000002" / checksums.NAME, "a") as file:
                    file.write("\n")

        checkpoint.sign = exchange  # between the judging and the load
        return by_bridge(words)

    saved = ("schedule.save=null", "schedule.train_steps=2")
    words = (*WORDS, *saved, f"schedule.load={folder}") if start == "load" else sft(folder.parent, "run")
    if start == "pretrained":
        for name in ("tokenizer", "training.jsonl"):
            (tmp_path / name).symlink_to(pretrained / name)
    (rank,) = ran(tmp_path / "plan.json", late, *words)
    what = (
        "its `iter_0000002` was not loaded" if start == "load" else "the checksums of its `iter_0000002` are others now"
    )
    assert rank.code == 2, rank.err[-3000:]
    assert f"error: `{folder}` was changed after it was looked at: {what} @ schedule.{start}" in rank.err


@pytest.mark.slow
def test_a_step_without_its_own_state_of_training_is_refused(pretrained, tmp_path):
    """Bridge would go on with the data from the first sample."""
    shutil.copytree(pretrained / "bridge", tmp_path / "run")
    words = (*WORDS, "schedule.train_steps=2", f"schedule.load={tmp_path / 'run'}")
    state = tmp_path / "run" / "iter_0000002" / guards.STATE
    assert refusals(*words) == []
    for name, value, said in (
        ("step", 1, "step 1 and 8 samples"),
        ("consumed_train_samples", 0, "step 2 and 0 samples"),
    ):
        other = torch.load(pretrained / "bridge" / "iter_0000002" / guards.STATE) | {name: torch.tensor(value)}
        torch.save(other, state)
        assert refusals(*words) == [f"`{state}` says {said}, and `{guards.TRACKER}` 2 and 8"]
    state.unlink()
    (message,) = refusals(*words)
    assert message.startswith(f"`{state}` cannot be read: ") and "No such file" in message


def refusals(*overrides: str) -> list[str]:
    return [problem.message for problem in guards.objections(translate(load("nam56r_smoke", (*SMALL, *overrides))))]


def megatrons(*overrides: str) -> list:
    return list(checkpoint.objections(translate(load("nam56r_smoke", (*SMALL, *overrides)))))


@pytest.mark.slow
@pytest.mark.parametrize(("step", "runner"), [(1, by_others), (3, by_bridge)])
def test_a_nan_ends_the_run_and_is_traced(step, runner, tmp_path):
    def poisoned(words: list[str]) -> int:
        provide = container.NamProvider.provide

        def with_nan(*args, **kwargs):
            model = provide(*args, **kwargs)
            now = get_rerun_state_machine
            model.decoder.layers[2].register_forward_hook(
                lambda _, __, output: output * torch.nan if now().current_iteration == step else output
            )
            return model

        container.NamProvider.provide = with_nan
        return runner(words)

    (rank,) = ran(tmp_path / "plan.json", poisoned)
    assert rank.code == 1
    assert f"error: step {step}, rank 0: the loss is nan; first seen in the output of decoder.layers.2" in rank.err
    assert "Traceback" not in rank.err


@pytest.mark.slow
def test_a_gradient_that_is_no_number_ends_the_run(tmp_path):
    """Without a folder to save to, Bridge's own end was a TypeError."""

    def poisoned(words: list[str]) -> int:
        provide = container.NamProvider.provide

        def late(_, __, output: torch.Tensor) -> None:
            if get_rerun_state_machine().current_iteration == 3 and output.requires_grad:
                output.register_hook(lambda gradient: gradient * torch.nan)

        def with_nan(*args, **kwargs):
            model = provide(*args, **kwargs)
            model.decoder.layers[2].register_forward_hook(late)
            return model

        container.NamProvider.provide = with_nan
        return by_bridge(words)

    (rank,) = ran(tmp_path / "plan.json", poisoned)
    assert rank.code == 1, rank.err[-3000:]
    assert "error: step 3, rank 0: a gradient is no number; " in rank.err and "Traceback" not in rank.err


# From a pretrained checkpoint -----------------------------------------------------------------------------------------------

SAMPLES = [{"input": f"What is {n} and {n}?", "output": f" It is {2 * n}.", "n": n} for n in range(10)]
WORDS = ("model.vocab_size=512", "lane=native_dp", "feature.mtp.depths=0", "model.pattern=AEMR", "model.depth=4",
         "model.blocks.moe.grouped_gemm=false")  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """A folder with a tokenizer, samples, and what both trainers have saved of one plan."""
    folder = tmp_path_factory.mktemp("pretrained")
    text = [sample[key] for sample in SAMPLES for key in ("input", "output")]
    tokenizer.save(tokenizer.train(text, 270, progress=False), folder / "tokenizer")
    (folder / "training.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    for name, main in (("bridge", by_bridge), ("megatron", lambda words: train.main(words, time.time()))):
        saved = (f"schedule.save={folder / name}", "schedule.save_interval=2", "schedule.train_steps=2")
        steps(ran(folder / "plan.json", main, *WORDS, *saved))
    return folder


OTHER_TOKENS = " not the one of the dataset that the weights were trained on"


def sft(folder: Path, start: str = "bridge") -> tuple[str, ...]:
    return (
        *WORDS,
        "data=sft",
        f"data.path={folder}",
        f"data.tokenizer={folder / 'tokenizer'}",
        "data.workers=0",
        f"schedule.pretrained={folder / start}",
    )


def watched(words: list[str]) -> int:
    """by_bridge, which prints what each microbatch learns, and its loss."""
    loss_of = gpt_step.masked_next_token_loss
    get = gpt_step.get_batch
    batch = {}

    def got(*args, **kwargs):
        found = get(*args, **kwargs)
        batch["tokens"], batch["labels"] = found[:2]
        return found

    def learned(mask, output, **kwargs):
        rows = [row[keep > 0].tolist() for row, keep in zip(batch["labels"], mask, strict=True)]
        means = (output.view(-1) * mask.view(-1)).sum() / mask.sum()
        print("learned", json.dumps([means.item(), rows, list(batch["tokens"].shape)]), flush=True)
        return loss_of(mask, output, **kwargs)

    gpt_step.get_batch, gpt_step.masked_next_token_loss = got, learned
    gpt_step._forward_step_common.__kwdefaults__["_get_batch_fn"] = got
    return by_bridge(words)


@pytest.mark.slow
def test_answers_alone_are_learned_from_pretrained_weights_and_resumed(pretrained, tmp_path):
    saves = (f"schedule.save={tmp_path / 'out'}", "schedule.save_interval=2")
    whole = ran(tmp_path / "plan.json", watched, *sft(pretrained))
    losses = steps(whole)
    encoder = tokenizer.load(pretrained / "tokenizer")
    learned = [json.loads(line.removeprefix("learned ")) for line in whole[0].out.splitlines() if "learned " in line]
    texts = [encoder.decode(row, skip_special_tokens=False) for _, rows, _ in learned for row in rows]
    assert len(texts) == 16 and set(texts) == {f"{sample['output']}<|endoftext|>" for sample in SAMPLES}
    assert {tuple(shape) for *_, shape in learned} == {(2, 32)}
    assert losses[1][0] == pytest.approx((learned[0][0] + learned[1][0]) / 2, rel=1e-6), "two microbatches a step"
    first = ran(tmp_path / "plan.json", by_bridge, *sft(pretrained), *saves, "schedule.stop_every=2")
    goes_on = (*sft(pretrained), *saves, f"schedule.load={tmp_path / 'out'}")
    assert steps(first) | steps(ran(tmp_path / "plan.json", by_others, *goes_on)) == losses
    assert unfit(*goes_on) == []
    began = tmp_path / "out" / finetune.guards.SIGNED / finetune.resume.BEGAN
    without = {key: said for key, said in json.loads(began.read_text()).items() if key != "data.path"}
    began.write_text(json.dumps(without))
    assert unfit(*goes_on) == ["what stands there is not what the run began with"], "of which it says nothing"
    for text in ("{", "[]"):
        began.write_text(text)
        (said,) = unfit(*goes_on)
        assert said.startswith(f"`{began.name}` in `{began.parent}` cannot be read")
    finetune.sign(translate(load("nam56r_smoke", (*SMALL, *goes_on))).plan.recipe)
    others = (*goes_on, f"schedule.pretrained={pretrained / 'megatron'}")  # a step of the same name
    assert unfit(*others) == ["what stands there is not what the run began with"]
    (pretrained / "training.jsonl").write_text("".join(json.dumps(s) + "\n" for s in SAMPLES[::-1]))
    assert unfit(*goes_on) == ["what stands there is not what the run began with"]


def test_an_index_of_other_samples_is_forgotten(tmp_path):
    """Bridge would read lines to the ends that it names, and none behind the last, whatever came first: copies keep their times."""
    path, index = tmp_path / "training.jsonl", tmp_path / "training.jsonl.idx.npy"
    recipe = translate(load("nam56r_smoke", (*SMALL, *sft(tmp_path)))).plan.recipe

    def indexed(text: str) -> list[int]:
        path.write_text(text)
        finetune.forget(recipe)
        _JSONLMemMapDataset([str(path)], workers=1)
        return numpy.load(index).tolist()

    first, made = indexed('{"a": 1}\n{"a": 2}\n'), index.stat()
    assert indexed('{"a": 1}\n{"a": 2}\n') == first == [8, 17] and index.stat() == made, "it stays"
    os.utime(index, (2e9, 2e9))
    assert indexed('{"a": 1}\n{"a": 2}\n{"a": 3}') == [8, 17, 27]
    index.write_bytes(b"")
    assert indexed('{"a": 1}\n') == [8]


@pytest.mark.slow
def test_a_blend_of_answers_is_learned_in_its_shares_and_resumed(pretrained, tmp_path):
    for name, chosen in (("few", SAMPLES[:3]), ("rest", SAMPLES[3:])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in chosen))
    parts = f"data.parts=[{{weight: 3, path: {tmp_path}/few}}, {{weight: 1, path: {tmp_path}/rest}}]"
    words = ["data=sft_blend" if w == "data=sft" else w for w in sft(pretrained) if not w.startswith("data.path")]
    words += [parts, f"schedule.save={tmp_path / 'out'}", "schedule.save_interval=2"]
    (whole,) = ran(tmp_path / "plan.json", watched, *words)
    learned = [json.loads(line.removeprefix("learned "))[1] for line in whole.out.splitlines() if "learned " in line]
    encoder = tokenizer.load(pretrained / "tokenizer")
    texts = [encoder.decode(row) for rows in learned for row in rows]
    few = [text in {sample["output"] for sample in SAMPLES[:3]} for text in texts]
    assert [sum(few[i : i + 4]) for i in range(0, 16, 4)] == [3, 3, 3, 3], "of every four samples"
    assert len({text for text, of in zip(texts, few, strict=True) if not of}) == 4, "none twice before all came once"
    shutil.rmtree(tmp_path / "out")
    first = ran(tmp_path / "plan.json", by_bridge, *words, "schedule.stop_every=2")
    words.append(f"schedule.load={tmp_path / 'out'}")
    assert steps(first) | steps(ran(tmp_path / "plan.json", by_others, *words)) == steps([whole])
    (tmp_path / "rest" / "training.jsonl").write_text("[]\n")
    assert unfit(*words) == ["what stands there is not what the run began with",
                             f"line 1 of `{tmp_path}/rest/training.jsonl` is no JSON object"]  # fmt: skip


@pytest.mark.slow
def test_weights_of_the_other_trainer_are_the_same_start(pretrained, tmp_path):
    """Under another seed: were they not loaded, random ones would differ."""
    short = ("schedule.train_steps=1", "optim.warmup_steps=0")
    began = [
        steps(ran(tmp_path / "plan.json", by_bridge, *sft(pretrained, start), *short, f"schedule.seed={seed}"))
        for start, seed in (("bridge", 1), ("megatron", 2))
    ]
    assert began[0][1] == pytest.approx(began[1][1], rel=1e-6)
    made = [export.export(pretrained / trainer, tmp_path / trainer, None, print) for trainer in ("bridge", "megatron")]
    assert made[0].keys() == made[1].keys()
    weights = [load_file(next((tmp_path / trainer).glob("*.safetensors"))) for trainer in ("bridge", "megatron")]
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 20
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-2)


# Adapters -----------------------------------------------------------------------------------------------------------------------

STAYS = ("model.blocks.moe.expert_bias_update_rate=0.0", "feature.lora.rank=4")
# One layer of each kind, as far as one model can have them.
DESIGNED = (
    "lane=author_dp", "model.pattern=AEMRAE", "model.depth=6", "model.letters.A=mla", "model.num_attention_heads=4",
    "model.substitute=[{letter: A, ranks: [1], kind: dsa}, {letter: E, ranks: [1], kind: mlp}]",
    "execution.mla.kernels=naive",
    "model.blocks.mla={q_lora_rank: 16, kv_lora_rank: 16, qk_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16}",
    "execution.dsa.kernels=naive",
    "model.blocks.dsa={indexer_heads: 4, indexer_head_dim: 16, top_k: 8, indexer_loss_coeff: 0.1}",
    "execution.mamba3.kernels=naive",
    "model.blocks.mamba3={heads: 4, head_dim: 8, state_dim: 16, groups: 2}",
    "execution.m2rnn.kernels=naive",
    "model.blocks.m2rnn={k_dim: 8, v_dim: 4, heads: 4}",
)  # fmt: skip
LATENT = {"linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"}
REST = {"linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"}
TARGETS = {"native": {"linear_qkv"} | REST, "designed": LATENT | REST}


@pytest.fixture(scope="module")
def designed(pretrained) -> Path:
    """The same folder with a model of our own kinds."""
    saved = (f"schedule.save={pretrained / 'designed'}", "schedule.save_interval=2", "schedule.train_steps=2")
    steps(ran(pretrained / "plan.json", lambda words: train.main(words, time.time()), *KINDS["designed"], *saved))
    return pretrained


KINDS = {
    "native": (),
    "designed": tuple(word for word in WORDS if not word.startswith(("lane", "model.pattern", "model.depth")))
    + DESIGNED,
}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["native", "designed"])
def test_every_adapter_learns_and_nothing_else(kinds, designed, tmp_path):
    words = (*sft(designed, {"native": "bridge"}.get(kinds, kinds)), *KINDS[kinds], *STAYS)
    words += ("model.blocks.dsa.indexer_loss_coeff=0.0",) * (kinds == "designed")
    saves = (f"schedule.save={tmp_path / 'out'}", "schedule.save_interval=2")
    (whole,) = ran(tmp_path / "plan.json", observed, *words)
    losses = steps([whole])
    seen = next(json.loads(line.removeprefix("seen ")) for line in whole.out.splitlines() if line.startswith("seen "))
    assert {name.split(".")[-2] for name in seen["adapters"]} == TARGETS[kinds]
    assert len(seen["learned"]) == 2 * len(seen["adapters"])
    assert not [name for name, largest in seen["learned"].items() if not largest > 0]
    assert seen["moved"] == []
    two = steps(ran(tmp_path / "plan.json", observed, *words, "cluster=h200_2", "schedule.micro_batch_size=1"))
    assert two.keys() == losses.keys() and len(two) == 4
    for step, figures in losses.items():
        assert two[step] == pytest.approx(figures, rel=1e-2), "two data-parallel ranks"
    first = ran(tmp_path / "plan.json", observed, *words, *saves, "schedule.stop_every=2")
    goes_on = (*words, *saves, f"schedule.load={tmp_path / 'out'}")
    assert steps(first) | steps(ran(tmp_path / "plan.json", observed, *goes_on)) == losses
    sizes = [sum(path.stat().st_size for path in folder.glob("*.distcp"))
             for folder in (tmp_path / "out/iter_0000002", designed / "bridge/iter_0000002")]  # fmt: skip
    assert sizes[0] < sizes[1] / 2, "adapters alone"


def engines() -> None:
    """What Bridge's adapters ask of Transformer Engine's linear layers, of the classes that stand for them here.

    A layer with a norm inside hands that norm's output to its adapter, as Transformer Engine's does.
    """
    begin, forward = modules.ReplicatedLinear.__init__, modules.NormColumnLinear.forward
    attributes = lora.get_adapter_attributes_from_linear

    def began(self, inputs, outputs, *, config, **kwargs):
        begin(self, inputs, outputs, config=config, **kwargs)
        self.config, self.in_features, self.out_features = config, inputs, outputs

    def both(self, x):
        output, bias = forward(self, x)
        normed = torch.nn.functional.rms_norm(x, (x.size(-1),), self.layer_norm_weight, self.config.layernorm_epsilon)
        return ((output, normed) if getattr(self, "return_layernorm_output", False) else output), bias

    def sharded(self, prefix="", sharded_offsets=(), metadata=None):
        groups = dict(tp_group=get_tensor_model_parallel_group(), dp_cp_group=metadata["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets, **groups)

    def told(module, **kwargs):
        module.return_layernorm_output = isinstance(module, modules.NormColumnLinear)
        return attributes(module, **kwargs)

    modules.ReplicatedLinear.__init__, modules.NormColumnLinear.forward = began, both
    modules.NormColumnLinear.tp_size, modules.ReplicatedLinear.sharded_state_dict = 1, sharded
    peft.TECL, peft.TERL, peft.TELinear = (), (), modules.ReplicatedLinear
    lora.get_adapter_attributes_from_linear = told


def observed(words: list[str]) -> int:
    """by_bridge, which prints the largest gradient that each adapter had, and what of the rest has moved."""
    stand = container.adapters.stand
    models = []

    def stood(built, plan):
        stand(built, plan)
        models.extend(built)
        before.update({n: p.detach().clone() for n, p in built[0].named_parameters() if not p.requires_grad})
        for name, p in built[0].named_parameters():
            if p.requires_grad:
                largest[name] = 0.0
                p.register_hook(
                    lambda grad, name=name: largest.update({name: max(largest[name], grad.abs().max().item())})
                )

    before, largest = {}, {}
    engines()
    container.adapters.stand = stood
    code = by_bridge(words)
    now = dict(models[0].named_parameters())
    moved = [name for name, value in before.items() if not torch.equal(value, now[name])]
    names = [n for n, m in models[0].named_modules() if n.endswith(".adapter")]
    print("seen", json.dumps({"learned": largest, "moved": moved, "adapters": names}), flush=True)
    return code


@pytest.mark.slow
def test_what_is_no_start_and_what_no_sample_is_refused(pretrained, tmp_path):
    good = sft(pretrained)
    for more, said in (
        (f"schedule.pretrained={tmp_path}", f"no checkpoint in `{tmp_path}`"),
        ("model.hidden_size=128", "the checkpoint's model has `model.hidden_size` 64, and the plan's 128"),
        ("model.blocks.moe.top_k=1", "the checkpoint's model has `model.blocks.moe.top_k` 2, and the plan's 1"),
        ("model.pattern=AEMA", "the checkpoint's model has other layers"),
        (f"data.path={tmp_path}", f"`{tmp_path}/training.jsonl` cannot be read: No such file or directory"),
        (f"data.tokenizer={tmp_path}", f"`{tmp_path}` is no folder of a tokenizer"),
        ("data.answer=n", f"line 1 of `{pretrained}/training.jsonl` has no text `n`, and 9 more lines"),
        ("model.seq_length=8", "tokens, and the model takes 8"),
    ):
        assert said in unfit(*good, more)[0], said
    encoder = tokenizer.load(pretrained / "tokenizer")
    # its end
    most = max(sum(len(tokenizer.encode(encoder, s[key])) for key in ("input", "output")) for s in SAMPLES) + 1
    assert unfit(*good, f"model.seq_length={most}") == []
    assert f"has {most} tokens, and the model takes {most - 1}" in unfit(*good, f"model.seq_length={most - 1}")[0]
    assert unfit(*good, "model.seq_length=64", "model.blocks.moe.aux_loss_coeff=0.0", "optim.lr=2e-4") == []
    folder = tmp_path / "samples"
    folder.mkdir()
    for text, said in (
        ("", "has no samples"),
        ("[]\n", "line 1"),
        ('{"input": "", "output": "b"}\n', "has an empty `input`"),
    ):
        (folder / "training.jsonl").write_text(text)
        assert said in unfit(*good, f"data.path={folder}")[0], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "more", "said"),
    [
        ("a <|endoftext|> b", {}, "line 2 of `{}` has `<|endoftext|>` in its `output`, where a text ends"),
        ("a <|im_start|> b", {}, "line 2 of `{}` has `<|im_start|>` in its `output`, which Bridge never learns"),
        ("a", {finetune.UNLEARNED: True}, "line 2 of `{}` says `__AUTOGENERATED__`, and Bridge learns no such answer"),
        ("a", {finetune.UNLEARNED: False}, None),
    ],
)
def test_an_answer_that_bridge_would_not_learn_is_refused(answer, more, said, pretrained, tmp_path):
    """It takes tokens and whole samples out of the loss. In a prompt, which is not in it, they may stand."""
    encoder = AutoTokenizer.from_pretrained(pretrained / "tokenizer")
    encoder.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    encoder.save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "training.jsonl"
    lines = {"input": "<|im_start|>", "output": "a"}, {"input": "a", "output": answer, **more}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = f"data.path={tmp_path}", f"data.tokenizer={tmp_path / 'tokenizer'}"
    assert unfit(*sft(pretrained), *words) == ([said.format(path)] if said else [])


@pytest.mark.slow
def test_an_end_that_bridge_would_not_learn_is_refused(pretrained, tmp_path):
    encoder = AutoTokenizer.from_pretrained(pretrained / "tokenizer")
    encoder.add_special_tokens({"eos_token": "<pad>"})
    encoder.save_pretrained(tmp_path)
    (said,) = unfit(*sft(pretrained), f"data.tokenizer={tmp_path}")
    assert said == "texts end with `<pad>`, which Bridge never learns"


@pytest.mark.slow
@pytest.mark.parametrize("start", ["megatron", "bridge"])
def test_answers_in_other_tokens_than_the_weights_have_learned_are_refused(pretrained, tmp_path, start):
    """A run keeps the manifest of its dataset beside its checkpoints, and that the hash of its tokenizer."""
    shutil.copytree(pretrained / start, tmp_path / "run")
    signed = tmp_path / "run" / finetune.guards.SIGNED if start == "bridge" else tmp_path / "run"
    words = (*sft(pretrained), f"schedule.pretrained={tmp_path / 'run'}")
    for sha256, said in ((digest(pretrained / "tokenizer" / "tokenizer.json"), []), ("0" * 64, [OTHER_TOKENS])):
        (signed / "data.json").write_text(json.dumps({"files": {"tokenizer/tokenizer.json": {"sha256": sha256}}}))
        assert [message.partition(", is")[2] for message in unfit(*words)] == said
    tree = json.loads((signed / "plan.json").read_text())
    tree["recipe"]["optim"]["lr"] = 0.5
    (signed / "plan.json").write_text(json.dumps(tree))
    assert "is of another run: `optim.lr`" in unfit(*words)[0], "a step that somebody has put there"


@pytest.mark.slow
def test_each_trainer_and_command_says_whose_work_it_is(pretrained, tmp_path, monkeypatch, capfd):
    (rank,) = ran(tmp_path / "plan.json", lambda words: train.main(words, time.time()), *sft(pretrained))
    assert rank.code == 2 and "Megatron's own trainer reads no prompts and answers" in rank.err
    for task, words, said in (
        ("finetune", (), "nothing to finetune"),
        ("pretrain", sft(pretrained), "starts from random"),
    ):
        monkeypatch.setattr(sys, "argv", ["nemo", task, "conf=nam56r_smoke", *words])
        with pytest.raises(SystemExit) as end:
            command()
        assert end.value.code == 2 and said in capfd.readouterr().err


def unfit(*overrides: str) -> list[str]:
    lowering = translate(load("nam56r_smoke", (*SMALL, *overrides)))
    return [problem.message for problem in finetune.objections(lowering)]
