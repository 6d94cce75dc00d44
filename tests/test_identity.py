"""What must not be compared has another family or regime; what is the same has the same."""

import json

import pytest
from command import warm
from presets import lowered

from launch.record.outcome import against
from launch.run import job
from nam_megatron.budget.cost import cost
from nam_megatron.budget.text import cost_text
from nam_megatron.compile.lower import translate
from nam_megatron.judge.identity import family, regime, stands
from nam_megatron.recipe import load


def plan(words: str):
    name, *overrides = words.split()
    return lowered(name, *overrides).plan


NATIVE, AUTHOR = "nam56r_native_dp", "nam56r"
FAMILIES = {
    "mHC": ("nam52_h200_dense_ref_v1", "nam52_h200_dense_no_mhc_recovery_v1"),
    "streams": ("nam52_h200_dense_ref_v1", "nam52_h200_dense_ref_v1 feature.mhc.streams=2"),
    "sparse attention": ("nam52_h200_dense_no_mhc_recovery_v1", "nam52_h200_sparse_8_11_ref_v1"),
    "ranks of sparse attention": (AUTHOR, f"{AUTHOR} model.substitute.0.ranks=[1,2,3] model.blocks.dsa.full_every=1"),
    "index reuse": (AUTHOR, f"{AUTHOR} model.blocks.dsa.full_every=1"), "tail": (AUTHOR, "nam52r_h200_prod_candidate_v1"),
    "mixers": (AUTHOR, f"{AUTHOR} lane=native_dp"), "MTP": (NATIVE, f"{NATIVE} feature.mtp.depths=1"),
    "MTP depths": (AUTHOR, f"{AUTHOR} feature.mtp.depths=2"), "experts": (NATIVE, f"{NATIVE} model.blocks.moe.experts=32"),
    "no experts": (NATIVE, f"{NATIVE} model.letters.E=mlp"),
    "n-grams": (NATIVE, f"{NATIVE} feature.ngram_hash.enabled=true feature.ngram_hash.buckets=1024"),
    "YaRN": (NATIVE, f"{NATIVE} feature.yarn.factor=4.0"),
    "YaRN of another factor": (f"{NATIVE} feature.yarn.factor=2.0", f"{NATIVE} feature.yarn.factor=4.0"),
    "Llama-3.1's RoPE": (NATIVE, f"{NATIVE} feature.llama_rope.factor=8.0"), "width": (NATIVE, f"{NATIVE} model.hidden_size=1792"),
    "sequence": (NATIVE, f"{NATIVE} model.seq_length=2048"), "dropout": (NATIVE, f"{NATIVE} model.hidden_dropout=0.1"),
    "depth": (NATIVE, f"{NATIVE} model.depth=26"), "width of a mixer": (AUTHOR, f"{AUTHOR} model.blocks.mamba3.state_dim=64"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_another_model_is_another_family(name):
    one, other = map(plan, FAMILIES[name])
    assert family(one) != family(other)


ALONE = "feature.distributed_optimizer.enabled=false feature.distributed_optimizer.overlap_param_gather=false"
REGIMES = {
    "Megatron-FSDP": "+overlay=fsdp_ep", "distributed optimizer": ALONE,
    "overlap": "feature.distributed_optimizer.overlap_param_gather=false", "graphs": "+overlay=graphs",
    "FP8": "model.blocks.mamba2.heads=64 precision=fp8_tensorwise feature.fp8.recipe=tensorwise",
    "recompute": "feature.recompute.granularity=selective feature.recompute.modules=[core_attn]",
    "full recompute": "feature.recompute.granularity=full feature.recompute.method=uniform feature.recompute.layers=1",
    "kernels": "execution.mamba2.strided=true", "compile": "precision.cross_entropy=compiled",
    "cross entropy": "precision.cross_entropy=fused", "norm kernels": "precision.norm_kernels=cudnn",
    "weight gradients": "precision.fused_grad_accumulation=true", "gradient dtype": "precision.grad_reduce=bf16",
    "dispatcher": "execution.moe.dispatcher=allgather", "grouped GEMM": "model.blocks.moe.grouped_gemm=false", "tensor": "+overlay=tp_sp",
    "expert": "+overlay=ep", "pipeline": "parallel.pipeline=2", "GPUs": "cluster.gpus_per_node=4",
    "micro batch": "schedule.micro_batch_size=2", "global batch": "schedule.global_batch_size=128", "optimizer": "+overlay=muon",
}  # fmt: skip
STREAMS = "nam52_h200_dense_ref_v1"


@pytest.mark.few(8)
@pytest.mark.parametrize("name", REGIMES)
def test_another_way_is_another_regime_of_the_same_family(name):
    one, other = plan(NATIVE), plan(f"{NATIVE} {REGIMES[name]}")
    assert regime(one) != regime(other)
    if name != "FP8":  # which needs other heads
        assert family(one) == family(other)


def test_adapters_are_another_regime_without_a_utilisation():
    """What is counted has the gradient of every weight, and most of them stay."""
    words = ("schedule.pretrained=/p", "model.blocks.moe.expert_bias_update_rate=0.0")
    whole, low, high = (
        translate(load(NATIVE, [*words, *more])) for more in ((), ("feature.lora.rank=8",), ("feature.lora.rank=16",))
    )
    assert len({regime(each.plan) for each in (whole, low, high)}) == 3
    figures = {"window": {"tokens_per_s_per_gpu": 25_500.0}}
    assert [bool(against(job.forecast(each), figures, None)) for each in (whole, low)] == [True, False]
    assert "counted with the gradient of every weight" in cost_text(cost(low.plan))


@pytest.mark.parametrize("kernels", ["megatron", "naive"])
def test_the_kernels_of_a_block_are_regime(kernels):
    one, other = plan(AUTHOR), plan(f"{AUTHOR} execution.mla.kernels={kernels}")
    assert regime(one) != regime(other) and family(one) == family(other)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("nam52_h200_dense_ref_v1", "nam52_h200_moe_no_dsa_ref_v1"),
        (NATIVE, f"{NATIVE} schedule.log_interval=10 schedule.train_steps=70 data.workers=0 schedule.seed=5"),
    ],
)
def test_what_is_the_same_has_the_same_lineage(words, same):
    assert family(plan(words)) == family(plan(same)) and regime(plan(words)) == regime(plan(same))


def test_the_family_can_be_read():
    assert family(plan(AUTHOR)).startswith(
        "nam56r: A13 mla 0,4,8,12 + dsa 1-3,5-7,9-11; E22 moe; M13 mamba3; R4 m2rnn; mtp 1 (mla mlp); "
    )


def test_show_says_the_lineage_in_one_line():
    ran = warm("show", f"conf={NATIVE}", module="launch.__main__")
    (line,) = [line for line in ran.out.splitlines() if line.startswith("lineage: ")]
    host, what, how = line.removeprefix("lineage: ").split(" / ")
    assert (host, what) == ("h200_8", family(plan(NATIVE))) and how == f"{regime(plan(NATIVE))}; megatron"


def test_a_receipt_of_a_lane_names_nothing_that_the_lane_gave_up_but_as_given_up():
    """A run in `lane=native_dp` said "Mamba-3, M2RNN" in its receipt: in a sentence, in letters, in blocks that stood nowhere."""
    lowering = lowered(AUTHOR, "lane=native_dp")
    content = {"lineage": [family(lowering.plan), regime(lowering.plan)], "recipe": job.recipe(lowering)}
    told = stands(lowering.plan)
    gone = told.pop("given_up")
    text = json.dumps([content, told]).lower()
    assert not any(word in text for word in ("mamba3", "mamba-3", "m2rnn"))
    assert [(g["letter"], g["designed"], g["stands"], len(g["layers"])) for g in gone] == [
        ("M", "mamba3", "mamba2", 13), ("R", "m2rnn", "mamba2", 4),
    ]  # fmt: skip
    assert told["layers"]["mamba2"] == {"count": 17, "numbers": sorted(gone[0]["layers"] + gone[1]["layers"])}
    assert told["mtp"] == {"depths": 1, "kinds": ["mla", "mlp"]}
    assert told["dsa"]["a_ranks"] == [1, 2, 3, 5, 6, 7, 9, 10, 11] and len(told["dsa"]["index_reused_from"]) == 6
    assert told["moe"]["experts_per_rank"] == 16


def test_kernels_of_residual_streams_are_another_regime_of_the_same_family():
    one, other = plan(STREAMS), plan(f"{STREAMS} feature.mhc.kernels=naive")
    assert regime(one) != regime(other) and family(one) == family(other)
    assert family(one) != family(plan(f"{STREAMS} feature.mhc.sinkhorn_steps=5"))
