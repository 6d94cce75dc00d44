"""What a pipe says of stock Megatron: a marker where it would fail or train something else, a note where it needs a package."""

import json

import pytest
from presets import lowered

from nam_megatron import report
from nam_megatron.compile import argv
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Refused
from nam_megatron.lint import lint

GRAPH = ("cluster=h200_1", "feature.cuda_graphs.impl=full_iteration", "feature.cuda_graphs.warmup_steps=1")
BUILT = ("data=indexed", "data.path=/d/x", "data.tokenizer=/t")
FIM = ("feature.fim.enabled=true", "feature.fim.rate=0.3")
PADDED = ("+overlay=fp8", "feature.fp8.bf16_parts=[]", "execution.moe.expert_gemm=transformer_engine")
DENSE = ("model.letters.E=mlp", "model.pattern=AE", "model.depth=4", "model.substitute=[]")
FSDP = ("+overlay=fsdp_ep", "cluster=h200_2", "schedule.micro_batch_size=1")
SPARSE = ("nam52_h200_sparse_8_11_ref_v1", "+overlay=tp_sp", "model.letters.M=mamba2", "model.pattern=AEM")
INTERLEAVED = ("model.depth=12", "parallel.pipeline=2", "parallel.virtual_pipeline=2")

# What only we train as meant: preset and words, and what the marker names.
ALONE = {
    "fim": (("nam56r_native_dp", *BUILT, *FIM), "fim"),
    "a graph of the step with experts": (("nam56r_native_dp_fused", *GRAPH), "cuda_graphs"),
    "FP8 of columns that 16 does not divide": (("nam56r_native_dp_fused", *PADDED), "mamba2"),
    "answers": (("nam56r_native_dp", *BUILT[1:], "data=sft", "schedule.pretrained=/p"), "data"),
    "deterministic Mamba-2": (("nam56r_native_dp", "precision.deterministic=true"), "precision"),
    "sinks on tensor ranks": (("nam56r_native_dp", "model.blocks.attention.sinks=true", "+overlay=tp_sp"), "attention"),
    "MTP on context ranks": (("nam56r_native_dp", "+overlay=cp", "feature.mtp.depths=1"), "parallel"),
    "a stage without experts": (
        ("nam56r_native_dp", "model.pattern='AEM|AMM'", "model.depth=6", "parallel.pipeline=2"), "parallel",
    ),
    "experts in two stages of one rank alone": (("nam56r_native_dp", "model.pattern='AEM|AMM|AEM|AMM'", *INTERLEAVED), "parallel"),
    "experts on one rank of data": (("nam56r_native_dp", *FSDP), "megatron_fsdp"),
    "reshardable checkpoints": (
        ("nam56r_native_dp", "schedule.save=/c", "schedule.save_interval=5", "feature.distributed_optimizer.reshardable=true"),
        "distributed_optimizer",
    ),
}  # fmt: skip
# Beside each one, what stock Megatron trains as well.
SHARED = {
    "data without fim": ("nam56r_native_dp", *BUILT),
    "a graph of the step without experts": ("nam56r_native_dp", *GRAPH, *DENSE),
    "FP8 of columns that 16 divides": ("nam56r_native_dp_fp8",),
    "padding in bf16": ("nam56r_native_dp", "model.blocks.mamba2.heads=54", "model.blocks.mamba2.groups=2",
                        "execution.mamba2.padded_projection=true", "execution.mamba2.strided=true"),
    "deterministic attention": ("nam56r_native_dp", "precision.deterministic=true", *DENSE),
    "sinks on one tensor rank": ("nam56r_native_dp", "model.blocks.attention.sinks=true"),
    "tensor ranks without sinks": ("nam56r_native_dp", "+overlay=tp_sp"),
    "context ranks without MTP": ("nam56r_native_dp", "+overlay=cp"),
    "MTP on whole sequences": ("nam56r_native_dp", "feature.mtp.depths=1"),
    "stages with experts": ("nam56r_native_dp", "model.pattern='AEM|AEM'", "model.depth=6", "parallel.pipeline=2"),
    "experts in one stage of each rank": ("nam56r_native_dp", "model.pattern='AEM|AMM|AMM|AEM'", *INTERLEAVED),
    "experts on several ranks of data": ("nam56r_native_dp", "+overlay=fsdp_ep"),
    "one microbatch": ("nam56r_native_dp", *FSDP, "schedule.global_batch_size=2"),
    "reshardable, not saved": ("nam56r_native_dp", "feature.distributed_optimizer.reshardable=true"),
}  # fmt: skip


def plan(words) -> Plan:
    return lowered(*words).plan


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ALONE)
def test_what_only_we_train_is_marked(name):
    words, owner = ALONE[name]
    lowering = lowered(*words)
    assert [seam.owner for seam in lowering.plan.alone] == [owner] and not lowering.plan.ours
    marker, said = argv.marker(lowering)
    assert marker == "--nam-model" and said.startswith(f"{owner}:")
    assert argv.words(lowering)[-2:] == (marker, said) and said in argv.run_script(lowering)
    (told,) = report.only_here(lowering.plan)
    assert f"`{owner}`" in told and told in argv.lines(lowering)
    # The launch that carries it is ours, and our lint follows it.
    assert said in lint(argv.run_script(lowering), "run.sh").args.launch.words


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SHARED)
def test_what_stock_megatron_trains_too_is_not(name):
    lowering = lowered(*SHARED[name])
    assert not lowering.plan.alone and not argv.marker(lowering) and "--nam-model" not in argv.words(lowering)


@pytest.mark.parametrize(
    "words, told",
    [
        (("nam56r_native_dp", "precision.fused_grad_accumulation=true"), "stock Megatron needs APEX (fused_weight"),
        (("nam56r_native_dp",), "needs mamba-ssm, causal-conv1d and einops for Mamba-2"),
        (("nam56r_native_dp", "+overlay=muon"), "emerging-optimizers for Muon"),
        (("qwen3_next_80b_a3b",), "needs flash-linear-attention for gated delta net"),
        (("nam56r_native_dp_fused", "+overlay=extras"), "nvidia-cutlass-dsl for `precision.attention_kernels`"),
        (("llama_3_8b", "feature.tracking.tensorboard=/t"), "needs tensorboard for `feature.tracking.tensorboard`"),
    ],
)
def test_a_package_that_arguments_need_is_named(words, told):
    found = [line for line in report.needed(plan(words)) if told in line]
    assert len(found) == 1 and found[0] in argv.lines(lowered(*words))


def test_nothing_is_named_that_nobody_needs():
    assert list(report.needed(plan(("llama_3_8b",)))) == []
    # Stock Megatron never comes to its output layer where it stops at a marker.
    marked = plan(("nam56r", "precision.fused_grad_accumulation=true"))
    assert not any("APEX" in line for line in report.needed(marked)) and not any(
        "mamba-ssm" in p.name for p in marked.packages
    )


def test_a_plan_from_before_it_was_marked_is_read():
    """Its recipe says the same: weights that were trained by it can be exported and gone on with."""
    lowering = lowered(*ALONE["fim"][0])
    stored = json.loads(argv.plan_json(lowering))
    del stored["argv"][-2:]
    assert argv.parse_plan(json.dumps(stored), "plan.json").plan == lowering.plan
    stored["argv"][-1] += "x"
    with pytest.raises(Refused, match="`argv` is another now"):
        argv.parse_plan(json.dumps(stored), "plan.json")
