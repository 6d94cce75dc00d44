"""verify agrees with what is right and objects to what is wrong, on Megatron's own parser and configs."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import mutate_flags
import pytest
from command import unbuilt, warm
from presets import ALL, NAMES, lowered
from test_rows import ODD, odd

from nam_megatron.blocks.moe.block import Moe
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.judge.expect import as_it_stands, worked_out
from nam_megatron.recipe import load
from nam_megatron.runtime.oracle import Oracle
from nam_megatron.targets import current
from nam_megatron.verify import MISMATCH, UNFINISHED, VERIFIED, expectations, reviewed_fields, summary, verify

GPUS = {1: ["cluster=h200_1"], 2: ["cluster=h200_2"], 4: ["cluster=h200_4"], 8: ["cluster=h200_8"]}
GPUS[16] = ["cluster=h200_2x8", "parallel.pipeline=2"]


@pytest.mark.few(3)
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("name", NAMES)
def test_preset_is_what_megatron_builds(name, gpus, oracle):
    """Where its lane and batch can have that many GPUs; it is refused elsewhere."""
    r = lowered(name).plan.recipe
    data = gpus // r.lane.tensor // (2 if gpus == 16 else 1)
    if not data or r.schedule.global_batch_size % (r.schedule.micro_batch_size * data):
        with pytest.raises(Refused):
            lowered(name, *GPUS[gpus])
        return
    lowering = lowered(name, *GPUS[gpus])
    verdict = verify(lowering, oracle)
    assert verdict.refused is None
    assert verdict.mismatches == () and verdict.unknown == ()
    assert verdict.word == (UNFINISHED if lowering.plan.not_built else VERIFIED)


# Switches that bring fields of their own: each must be compared, and agree.
VARIANTS = {
    "muon": ("nam56r_native_dp", "optim=muon"),
    "megatron-fsdp": ("nam56r_native_dp", "feature.megatron_fsdp.enabled=true"),
    "megatron-fsdp, every other layout": (
        "nam56r_native_dp",
        "+overlay=tp_sp_ep",
        "feature.megatron_fsdp.enabled=true",
    ),
    "megatron-fsdp, context": ("nam56r_native_dp", "parallel.context=2", "feature.megatron_fsdp.enabled=true"),
    "learned positions": (
        "nam56r_native_dp",
        "model.blocks.attention.position_embedding=none",
        "model.learned_positions=6000",
    ),
    "learned positions beside MLA, the router in bf16": (
        "nam56r",
        "model.learned_positions=6000",
        "feature.mtp.depths=0",
        "model.blocks.moe.router_dtype=null",
    ),
    "no attention": ("nam56r_native_dp", "model.pattern=EM"),
    "no attention, learned positions": ("nam56r_native_dp", "model.pattern=EM", "model.learned_positions=4096"),
    "attention of others": (
        "nam56r_native_dp",
        "model.blocks.attention={window: 128, qkv_bias: true, output_gate: true, rotary_percent: 0.5}",
    ),
    "windows of some layers, experts of a latent, a padded capacity": (
        "nam56r_native_dp",
        "model.blocks.attention={window: 128, unwindowed_every: 4}",
        "model.blocks.moe={latent_size: 512, capacity_factor: 1.5}",
        "execution.moe.pad_to_capacity=true",
    ),
    "wsd": ("nam56r_native_dp", "optim.decay=WSD", "optim.wsd_steps=100", "optim.wsd_shape=minus_sqrt"),
    "selective-recompute": (
        "nam56r_native_dp",
        "feature.recompute.granularity=selective",
        "feature.recompute.modules=[moe_act]",
    ),
    "full-recompute": (
        "nam56r_native_dp",
        "feature.recompute.granularity=full",
        "feature.recompute.method=uniform",
        "feature.recompute.layers=2",
    ),
    "experts": ("nam56r_native_dp", "parallel.expert=4"),
    "virtual-pipeline": ("nam56r_native_dp", "cluster=h200_2x8", "parallel.pipeline=4", "parallel.virtual_pipeline=2"),
    "context": ("nam56r_native_dp", "parallel.context=2"),
    "dense": ("nam56r_native_dp", "model.letters.E=mlp"),
    "mha": ("nam56r_native_dp", "model.blocks.attention.query_groups=56"),
    "swiglu": ("nam56r_native_dp", "model.activation=swiglu"),
    "gelu": ("nam56r_native_dp", "model.activation=gelu"),
    "mtp-2": ("nam56r", "lane=native_dp", "feature.mtp.depths=2"),
    "no-reuse": ("nam56r", "lane=native_dp", "model.blocks.dsa.full_every=1"),
    "fp8-edges": ("nam56r_native_dp_fp8", "feature.fp8.first_last_bf16=true", "feature.fp8.param_gather=true"),
    "capacity": ("nam56r_native_dp", "model.blocks.moe.capacity_factor=1.25"),
    "built": ("nam56r_native_dp", "data=built", "data.path=corpus", "schedule.eval_steps=2"),
    "indexed": ("nam56r_native_dp", "data=indexed", "data.path=corpus_text_document", "data.tokenizer=tokenizer"),
    "checkpoints": (
        "nam56r_native_dp",
        "schedule.save=ckpt",
        "schedule.save_interval=10",
        "schedule.load=ckpt",
        "schedule.stop_every=5",
    ),
    "garbage": ("nam56r_native_dp", "schedule.manual_gc_interval=50"),
    "compiled-loss": ("nam56r_native_dp", "precision.cross_entropy=compiled"),
    "fused-loss": ("nam56r_native_dp", "precision.cross_entropy=fused"),
    "fused-gradients": ("nam56r_native_dp", "precision.fused_grad_accumulation=true"),
    "fused-experts": (
        "nam56r_native_dp",
        "execution.moe.router_fusion=true",
        "execution.moe.permute_fusion=true",
        "execution.moe.shared_overlap=true",
        "execution.moe.fused_weighted_squared_relu=true",
    ),
    "local-experts": ("nam56r_native_dp", "execution.moe.dispatcher=local"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("variant", [*VARIANTS, *ODD])
def test_variant_is_what_megatron_builds(variant, oracle):
    verdict = verify(lowered(*VARIANTS[variant]) if variant in VARIANTS else odd(variant)[2], oracle)
    assert (verdict.refused, verdict.mismatches, verdict.unknown) == (None, (), ())


BIASED = ("nam56r_native_dp", "model.letters.E=mlp", "model.linear_bias=true", "model.activation=gelu")


def computed():
    """Each setting that a key decides and that is not the key's own value, once: (name, where it is said)."""
    found = {}
    for words in [("nam56r_native_dp",), *((name,) for name in ALL), *VARIANTS.values()]:
        lowering = lowered(*words)
        apart = worked_out(lowering.plan)
        for s in lowering.settings:
            if s.name in apart or (s.key and not as_it_stands(s, lowering.plan.recipe)):
                found.setdefault(s.name, BIASED if s.name == "bias_gelu_fusion" else words)  # else nothing reads it
    return found


def wrong(flag, value):
    """Another value that the flag can be brought to."""
    if flag.action != "store":
        return not value
    if flag.choices:
        other = next(
            choice for choice in flag.choices if choice not in (value, *(value if isinstance(value, tuple) else ()))
        )
        return (other,) if flag.nargs in ("+", "*") else other
    if isinstance(value, tuple):
        return tuple(2 * v if isinstance(v, (int, float)) else f"{v}x" for v in value)
    if value is None:
        value = {"int": 1, "float": 0.25}.get(flag.type, "0")
        return (f"{value}x",) if flag.nargs in ("+", "*") else value
    return f"{value}x" if isinstance(value, str) else 2 * value + (value == 0)


# Said outright, and worked out by Megatron all the same: another word changes none of its fields.
INERT = {
    "multi_latent_attention": "from the pattern",
    "accumulate_allreduce_grads_in_fp32": "from --grad-reduce-in-bf16",
}


@pytest.mark.slow
def test_a_wrong_value_of_a_computed_setting_is_a_mismatch(oracle):
    """Whatever computes it: the expectation is worked out from the recipe a second time."""
    for name, words in computed().items():
        lowering = lowered(*words)
        right = lowering.by_name[name]
        bad = replace(right, value=wrong(lowering.target.by_dest[name], right.value))
        planted = replace(lowering, settings=tuple(bad if s is right else s for s in lowering.settings))
        verdict = verify(planted, oracle)
        if name in INERT:
            assert argv.argv(planted) != argv.argv(lowering) and verdict.word == VERIFIED, name
        else:
            assert verdict.refused or verdict.mismatches, bad


@pytest.mark.parametrize("block", ["shared_expert_hidden_size", "shared_overlap", "dispatcher"])
def test_a_block_that_computes_something_else_is_a_mismatch(block, oracle, monkeypatch):
    """Of the setting and whatever it says to expect alike."""
    settings, other = Moe.settings, {"shared_expert_hidden_size": 64, "shared_overlap": True, "dispatcher": "allgather"}
    monkeypatch.setattr(
        Moe, "settings", lambda self, plan: settings(self.model_copy(update={block: other[block]}), plan)
    )
    verdict = verify(translate(load("nam56r_smoke")), oracle)
    assert verdict.refused or [r.key for r in verdict.mismatches] == [Moe.at(block)]


def test_a_computed_setting_without_an_expectation_is_our_mistake(monkeypatch):
    """Never a comparison with itself."""
    lowering = lowered("nam56r_native_dp")
    for name in ("moe_shared_expert_intermediate_size", "lr_decay_iters", "tokenizer_model"):
        fewer = {other: value for other, value in worked_out(lowering.plan).items() if other != name}
        monkeypatch.setattr("nam_megatron.verify.worked_out", lambda plan, fewer=fewer: fewer)
        with pytest.raises(AssertionError, match=f"{name} from .* nothing says what to expect"):
            list(expectations(lowering, {f"transformer.{name}": None}))


def without(words, flag, values=0):
    at = words.index(flag)
    return (*words[:at], *words[at + 1 + values :])


def put(words, flag, value):
    at = words.index(flag)
    return (*words[: at + 1], value, *words[at + 2 :])


WRONG = {
    "GQA off": ("nam56r_nemo_native", lambda w: without(w, "--group-query-attention"), "transformer.num_query_groups"),
    "yarn": ("nam56r", lambda w: put(w, "--rope-type", "yarn"), "transformer.rope_type"),
    "yarn factor 40": (
        "nam56r",
        lambda w: put(w, "--rotary-scaling-factor", "40"),
        "transformer.rotary_scaling_factor",
    ),
    "dropout default": ("nam56r_smoke", lambda w: without(w, "--hidden-dropout", 1), "transformer.hidden_dropout"),
    "expert count": ("nam56r_native_dp", lambda w: put(w, "--num-experts", "32"), "transformer.num_moe_experts"),
    "no such spec": ("nam56r_smoke", lambda w: (*w, "--spec", "nowhere", "nothing"), "args.spec"),
    "a flag of nobody's": ("nam56r_smoke", lambda w: (*w, "--moe-z-loss-coeff", "0.1"), "transformer.moe_z_loss_coeff"),
    "a layer moved": ("nam56r_smoke", lambda w: put(w, "--hybrid-layer-pattern", "E*ME*EME*EMM"), "layers.1"),
    "another top-k source": ("nam56r", lambda w: put(w, "--dsa-indexer-topk-freq", "8"), "layers.13"),
    "NaN check off": (
        "nam56r_smoke",
        lambda w: (*w, "--no-check-for-nan-in-loss-and-grad"),
        "ddp.check_for_nan_in_grad",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case, oracle):
    name, change, field = WRONG[case]
    lowering = lowered(name)
    verdict = verify(lowering, oracle, change(argv.argv(lowering)))
    assert verdict.word == MISMATCH
    assert verdict.refused or field in {row.field for row in verdict.mismatches}
    assert MISMATCH in summary(lowering, verdict)


def test_the_number_of_data_parallel_ranks_is_compared(oracle):
    lowering = lowered("nam56r_native_dp")
    row = next(row for row in verify(lowering, oracle).rows if row.field == "args.data_parallel_size")
    assert (row.expected, row.actual, row.key) == (8, 8, "cluster.gpus_per_node")


YARN = {
    "--yarn-beta-fast": "beta_fast", "--yarn-beta-slow": "beta_slow", "--mscale": "mscale", "--mscale-all-dim": "mscale_all_dim",
    "--yarn-original-max-position-embeddings": "original_max_position_embeddings", "--rotary-scaling-factor": "rotary_scaling_factor",
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("flag", YARN)
def test_yarn_is_compared_where_it_is_read(flag, oracle):
    """MLA has fields, GQA has attributes of other names. Length and betas Megatron's parser hands to GQA alone, and our trainer on."""
    for name, field in (("kimi_k2", YARN[flag]), ("nam56r_nemo_native", f"yarn_{YARN[flag]}")):
        lowering = lowered(name, *(["feature.yarn.factor=4.0"] if field.startswith("yarn_") else []))
        verdict = verify(lowering, oracle, put(argv.argv(lowering), flag, "7"))
        assert [row.field for row in verdict.mismatches] == [f"transformer.{field}"]


def test_what_megatron_refuses_is_a_mismatch_with_its_words(oracle):
    lowering = lowered("nam56r_smoke")
    verdict = verify(lowering, oracle, (*argv.argv(lowering), "--no-such-flag"))
    assert verdict.word == MISMATCH and "--no-such-flag" in verdict.refused


def test_a_field_nobody_looked_at_is_a_mismatch(oracle, monkeypatch):
    demanded, derived = reviewed_fields(current())
    fewer = {f: v for f, v in demanded.items() if f != "transformer.softmax_scale"}
    monkeypatch.setattr("nam_megatron.verify.reviewed_fields", lambda target: (fewer, derived))
    verdict = verify(lowered("nam56r_smoke"), oracle)
    assert verdict.unknown == ("transformer.softmax_scale",) and verdict.word == MISMATCH


def test_no_reviewed_field_is_gone_from_megatron(oracle):
    demanded, derived = reviewed_fields(current())
    fields = set()
    for name in ("nam56r", "nam56r_native_dp_fp8"):
        lowering = lowered(name)
        fields |= set(oracle.ask(argv.argv(lowering), 8, (9, 0), {}).values)
    assert {*demanded, *derived} - fields == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nam56r", "nam56r_native_dp_fp8"])
def test_sample_of_changed_flags_is_noticed(name, oracle):
    assert mutate_flags.run(name, oracle, every=4)["survivors"] == []


def command(*words):
    return subprocess.run([sys.executable, "-m", "nam_megatron.verify", *words], capture_output=True, text=True)


@pytest.mark.slow
def test_command_says_it_in_three_lines_and_exits_with_the_verdict():
    done = warm("conf=nam56r", module="nam_megatron.verify", before=unbuilt)
    assert done.code == 3
    first, second, third = done.out.splitlines()
    assert "fields compared" in first and "pinned" in second and third.endswith("not built: mamba3")


@pytest.mark.slow
def test_command_as_json():
    done = command("conf=nam56r_smoke", "format=json")
    tree = json.loads(done.stdout)
    assert done.returncode == 0 and tree["verdict"] == VERIFIED
    assert all(row["agrees"] for row in tree["rows"])


def test_a_megatron_that_is_killed_as_it_answers_is_no_traceback():
    for said in ("", "\n", '{"error": nul'):
        oracle = Oracle()
        oracle._questions, oracle._answers = io.StringIO(), io.StringIO(said)
        with pytest.raises(Refused, match="its process has ended"):
            oracle.ask([], 1, (9, 0), {})
