"""Settings, their owners, the parallel algebra, refusals, and Megatron's traps: each impossible or refused."""

import contextlib
import itertools
import re

import pytest
import torch
from megatron.core import parallel_state
from presets import NAMES, changed, lowered
from torch.testing._internal.distributed.fake_pg import FakeStore

from nam_megatron import report
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.compile.plan import identity
from nam_megatron.errors import Refused
from nam_megatron.laws import book
from nam_megatron.laws import law as law_module
from nam_megatron.laws.model import LAYOUT
from nam_megatron.recipe import Device, load, to_tree
from nam_megatron.targets import current
from nam_megatron.words.setting import Setting

NATIVE, DESIGN, DELTA, FP8 = "nam56r_native_dp", "nam56r", "qwen3_next_80b_a3b", "nam56r_native_dp_fp8"
B = "model.blocks."
MUON = {"optim.name": "muon", "feature.muon.enabled": True}
PLAIN_OPTIMIZER = {
    "feature.distributed_optimizer.enabled": False,
    "feature.distributed_optimizer.overlap_grad_reduce": False,
    "feature.distributed_optimizer.overlap_param_gather": False,
}
OVERLAP = "feature.distributed_optimizer.overlap_"
UNLAPPED = {f"{OVERLAP}grad_reduce": False, f"{OVERLAP}param_gather": False}
STREAMS = {"feature.mhc.streams": 4}
NGRAMS = {"feature.ngram_hash.enabled": True, "feature.ngram_hash.buckets": 1000}
STRATEGY = "feature.megatron_fsdp.strategy"
FSDP = {"feature.megatron_fsdp.enabled": True}
TP = {"parallel.tensor": 2, "parallel.sequence": True}
INDEXED = {"data.name": "indexed", "data.path": "/d/x", "data.split": "99,1,0", "data.tokenizer": "/t"}
SFT = {"data.name": "sft", "data.path": "/d", "data.tokenizer": "/t", "data.prompt": "input", "data.answer": "output",
       "schedule.pretrained": "/p"}  # fmt: skip
ADAPTED = {"feature.lora.rank": 8, "schedule.pretrained": "/p", "model.blocks.moe.expert_bias_update_rate": 0.0}
BLEND = {"data.name": "blend", "data.parts": [{"weight": 0.7, "path": "/a"}, {"weight": 1e-7, "path": "/b"}]}
BLEND |= {"data.path": None, "data.split": "99,1,0", "data.tokenizer": "/t"}
APART = BLEND | {"data.split": None, "data.valid_parts": [{"weight": 1, "path": "/v"}], "schedule.eval_steps": 1}
SELECTIVE = {"feature.recompute.granularity": "selective"}
FULL = {"feature.recompute.granularity": "full", "feature.recompute.method": "uniform", "feature.recompute.layers": 1}
WHOLE_KEY = "feature.cuda_graphs.impl"
GRAPHS = {"feature.cuda_graphs.impl": "transformer_engine", "feature.cuda_graphs.modules": ["attn", "mamba"]}
WINDOWS = {"model.blocks.attention.window": 128, "model.blocks.attention.unwindowed_every": 2}
LEARNED = {"model.learned_positions": 4096, "model.blocks.attention.position_embedding": "none"}
YARN, LLAMA = {"feature.yarn.factor": 4.0}, {"feature.llama_rope.factor": 8.0}
ALL_MLA = {"model.substitute": []}
LOCAL = {"execution.moe.dispatcher": "local"}
GATHERED = {"execution.moe.dispatcher": "gathered", "parallel.expert": 2}
EXPERT_GEMM = "execution.moe.expert_gemm"
ON_GPU = LOCAL | {EXPERT_GEMM: "torch"}
QUACK = LOCAL | {EXPERT_GEMM: "quack"}
WHOLE = ON_GPU | {"cluster.gpus_per_node": 1, WHOLE_KEY: "full_iteration"}
WEIGHED_KEY = "execution.moe.fused_weighted_squared_relu"
WEIGHED = {WEIGHED_KEY: True}
PADDED = "execution.m2rnn.padded_projection"
NORM_KEY = "execution.mamba2.strided_norm"
PADDED2, STRIDED = "execution.mamba2.padded_projection", {"execution.mamba2.strided": True}
EDGES = {"feature.fp8.first_last_bf16": True, "feature.fp8.bf16_layers_at_start": 1}
KEPT_KEY, FLASH_KEY = "feature.fp8.bf16_parts", "precision.attention_kernels"
KEPT, FLASH = {KEPT_KEY: ["experts"]}, {FLASH_KEY: "flash_attention_4"}
INPUTS_KEY = "feature.fp8.keep_inputs"
INPUTS = {"feature.fp8.recipe": "tensorwise", INPUTS_KEY: True}
RATES = {"feature.fp8.recipe": "tensorwise", KEPT_KEY: ["m2rnn", "mamba3_rates"]}
DELAYED = RATES | {"feature.fp8.recipe": "delayed"}
FORKED_KEY = "execution.moe.fused_router_gradient"
FORKED = LOCAL | {FORKED_KEY: True}


def settings(base, **changes):
    return {s.name: s.value for s in translated(base, changes).settings}


def translated(base, changes=()):
    return translate(changed(base, dict(changes)))


def problems_of(base, changes):
    try:
        translated(base, changes)
    except Refused as refused:
        return refused.problems
    return ()


def words(base, *overrides):
    return argv.argv(lowered(base, *overrides))


def value_of(words, flag):
    return words[words.index(flag) + 1]


def refused(base, changes):
    with pytest.raises(Refused) as error:
        translated(base, changes)
    return {p.key: p.message for p in error.value.problems}


# Traps: each one silently trained a different model somewhere ------------------------------------------------------


def test_trap_query_groups_without_group_query_attention():
    """Megatron ignores --num-query-groups alone. One field decides both."""
    for groups in (1, 2, 4, 7, 8, 14, 28, 56):
        now = settings(NATIVE, **{"model.blocks.attention.query_groups": groups})
        assert now["group_query_attention"] is (groups < 56)
        assert now["num_query_groups"] == groups
    assert value_of(words("nam56r_nemo_native"), "--num-query-groups") == "8"
    assert "--group-query-attention" in words("nam56r_nemo_native")


@pytest.mark.parametrize("name", NAMES)
def test_trap_mla_without_rope_type(name):
    """Unset, Megatron takes yarn with a factor of 40."""
    said = {s.name: s.value for s in lowered(name).settings}
    if said.get("multi_latent_attention"):
        assert value_of(words(name), "--rope-type") == "rope"
        assert value_of(words(name), "--rotary-scaling-factor") == "1.0"
        assert (said["mscale"], said["mscale_all_dim"]) == (1.0, 0.0)
    else:
        assert "rope_type" not in said


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_trap_gqa_under_mla_loses_its_positions(name):
    """`*` and --multi-latent-attention never meet, MTP's part included; a recipe that mixes them is refused."""
    for depths in (0, 1, 2):
        p = lowered(name, f"feature.mtp.depths={depths}")
        assert ("*" in p.plan.pattern) != ("--multi-latent-attention" in argv.argv(p))
    mixed = {"model.substitute": [{"letter": "A", "ranks": [0], "kind": "mla"}]}
    assert refused(NATIVE, mixed) == {
        "model.substitute": "GQA and MLA in one model: Megatron would give GQA no position embedding"
    }


def test_trap_expert_tensor_size_unset_is_the_tensor_size():
    assert value_of(words("nam56r_nemo_native"), "--tensor-model-parallel-size") == "2"
    assert value_of(words("nam56r_nemo_native"), "--expert-tensor-parallel-size") == "1"
    assert value_of(words("nam56r_nemo_native", "parallel.expert_tensor=2"), "--expert-tensor-parallel-size") == "2"


@pytest.mark.parametrize("name", NAMES)
def test_trap_a_spec_that_cannot_be_imported_is_replaced(name):
    """--spec is never said, and owned so that nothing else can say it; ours goes in as an object (runtime/stack.py)."""
    assert "--spec" not in words(name)
    assert lowered(name).by_name["spec"].value is None


def test_trap_latent_norms():
    """The flag follows the field, and the field is on in every MLA preset; the norms stand in our spec (tests/cpu)."""
    for name in NAMES:
        if "mla" in lowered(name).plan.kinds:
            assert "--qk-layernorm" in words(name)
    assert "--qk-layernorm" not in words(DESIGN, "model.blocks.mla.latent_norm=false")
    assert "--qk-layernorm" not in words(NATIVE)
    assert "--qk-layernorm" in words(NATIVE, "model.blocks.attention.qk_norm=true")


DEFAULTS = {  # destination -> (what every preset says, Megatron's default, which would train another model)
    "hidden_dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
    "position_embedding_type": ("rope", "learned_absolute"),
    "normalization": ("RMSNorm", "LayerNorm"),
    "add_bias_linear": (False, True),
    "squared_relu": (True, False),
    "untie_embeddings_and_output_weights": (True, False),
    "rotary_base": (500000, 10000),
    "adam_beta2": (0.95, 0.999),
    "weight_decay": (0.1, 0.01),
    "lr_decay_style": ("cosine", "linear"),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "moe_router_score_function": ("sigmoid", "softmax"),
    "moe_router_enable_expert_bias": (True, False),
    "moe_aux_loss_coeff": ((0.0001,), 0.0),
    "moe_router_dtype": ("fp32", None),
    "moe_grouped_gemm": (True, False),
    "moe_ffn_hidden_size": (896, None),
    "moe_shared_expert_intermediate_size": (1024, None),
}


# The presets that take what is fastest: `local` is built on Megatron's default.
CHOSEN = {(p, "moe_token_dispatcher_type"): "allgather" for p in ("nam56r_fused", "nam56r_native_dp_fused")}


@pytest.mark.parametrize("dest", DEFAULTS)
def test_trap_defaults_that_are_not_ours(dest):
    said, default = DEFAULTS[dest]
    flag = current().by_dest[dest]
    assert flag.default == (list(default) if isinstance(default, tuple) else default), "Megatron moved: review"
    for name in NAMES:
        if name != "nam56r_smoke":
            lowering = lowered(name)
            assert lowering.by_name[dest].value == CHOSEN.get((name, dest), said)
            assert current().words(lowering.by_name[dest])[0] in argv.argv(lowering), (
                "said aloud, since the default differs"
            )


def test_trap_balancing_is_said_whole():
    """An unset coefficient is 0. Without a balancing loss the coefficient must be 0, or it would be dropped."""
    assert value_of(words(NATIVE), "--moe-aux-loss-coeff") == "0.0001"
    assert value_of(words(NATIVE), "--moe-router-load-balancing-type") == "aux_loss"
    assert "model.blocks.moe.aux_loss_coeff" in refused(NATIVE, {"model.blocks.moe.balancing": "none"})


def test_trap_kv_lora_rank():
    """32 on Megatron's command line, 512 in its config: said for MLA and for DSA, which stands on it."""
    for name in ("nam56r", "nam52_h200_sparse_8_11_ref_v1"):
        assert value_of(words(name), "--kv-lora-rank") == "64"
    only_dsa = {"model.substitute": [{"letter": "A", "ranks": list(range(13)), "kind": "dsa"}]}
    assert (
        settings(DESIGN, **only_dsa | {"model.blocks.dsa.full_every": 1, "feature.mtp.depths": 0})["kv_lora_rank"] == 64
    )


def test_trap_cuda_graph_modules_without_impl():
    assert refused(NATIVE, {"feature.cuda_graphs.modules": ["attn"]}) == {
        "feature.cuda_graphs.modules": "`modules` of a feature that is off"
    }
    both = words("nam56r_native_dp_fp8")
    assert value_of(both, "--cuda-graph-impl") == "transformer_engine"
    assert value_of(both, "--cuda-graph-modules") == "attn"
    assert value_of(words(NATIVE), "--cuda-graph-impl") == "none"
    assert "--cuda-graph-modules" not in words(NATIVE)


@pytest.mark.parametrize("name", NAMES)
def test_trap_attention_backend_flash(name):
    """`flash` would switch cuDNN off; a recipe has no way to say it."""
    assert value_of(words(name), "--attention-backend") == "auto"
    assert lowered(name).by_name["attention_backend"].key is None


def test_trap_cross_entropy_fusion():
    """`te` is refused by Megatron, and linear cross entropy exists for no hybrid: neither is ever said."""
    compiled, ours = (words(NATIVE, f"precision.cross_entropy={which}") for which in ("compiled", "fused"))
    assert "--cross-entropy-loss-fusion" in compiled and "--cross-entropy-loss-fusion" not in ours
    assert value_of(compiled, "--cross-entropy-fusion-impl") == "native"


@pytest.mark.parametrize("name", NAMES)
def test_trap_rope_fusion_with_mla(name):
    assert ("--no-rope-fusion" in words(name)) == ("mla" in lowered(name).plan.kinds)


@pytest.mark.parametrize("name", ["nam56r", "nam52_h200_sparse_8_11_ref_v1"])
def test_trap_dsa(name):
    said = words(name)
    assert value_of(said, "--experimental-attention-variant") == "dsa"
    assert "--no-dsa-indexer-rotate-activation" in said
    assert value_of(said, "--dsa-kernel-backend") == "none"
    assert value_of(said, "--dsa-indexer-loss-coeff") == "0.001"


def test_trap_fp8_with_56_mamba_heads():
    """Megatron wants 16 to divide 2 * d_inner + 2 * groups * state + heads (core/ssm/mamba_mixer.py)."""
    for heads in range(8, 129, 8):
        fits = (2 * heads * 64 + 2 * 8 * 64 + heads) % 16 == 0
        changes = {"model.blocks.mamba2.heads": heads}
        if fits:
            assert settings("nam56r_native_dp_fp8", **changes)["fp8"] == "hybrid"
        else:
            (said,) = refused("nam56r_native_dp_fp8", changes).items()
            assert said[0] == "model.blocks.mamba2.heads"
    assert "model.blocks.mamba2.heads" in refused("nam56r_native_dp_fp8", {"model.blocks.mamba2.heads": 56})


def test_trap_fp8_delayed_with_edge_layers_in_bf16():
    delayed = {"feature.fp8.recipe": "delayed", "feature.fp8.first_last_bf16": True}
    assert refused("nam56r_native_dp_fp8", delayed) == {
        "feature.fp8.first_last_bf16": "delayed scaling excludes bf16 edge layers"
    }


def test_trap_device_max_connections():
    def connections(base, **changes):
        return {e.name: e.value for e in translated(base, changes).env}["CUDA_DEVICE_MAX_CONNECTIONS"]

    assert connections("nam56r_nemo_native") == "1"
    assert connections(NATIVE, **{"parallel.context": 2}) == "1"
    assert connections(NATIVE) is None
    assert connections(NATIVE, **FSDP) is None
    tensor = {"parallel.tensor": 2, "parallel.sequence": True}
    for layout in (tensor | {"parallel.expert": 2}, {"parallel.context": 2}):
        assert connections(NATIVE, **FSDP | layout) is None
    script = argv.run_script(translated(NATIVE, FSDP | tensor))
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in script
    script = argv.run_script(translated(NATIVE, {}))
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in script
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in argv.run_script(translated("nam56r_nemo_native", {}))


def test_norm_kernels_are_two_variables():
    """Transformer Engine chooses by the environment alone: both are set, or both demanded unset."""

    def norms(name):
        made = translated(NATIVE, {"precision.norm_kernels": name})
        assert {s.name: s.value for s in made.settings} == settings(NATIVE)
        return {e.name: e.value for e in made.env if "NORM" in e.name}

    both = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")
    assert norms("cudnn") == dict.fromkeys(both, "1")
    assert norms("transformer_engine") == dict.fromkeys(both)


def test_trap_megatron_fsdp():
    assert settings(NATIVE, **FSDP)["ckpt_format"] == "fsdp_dtensor"
    # Of the dtype of gradients it reads an argument of its own.
    for dtype, told in ("fp32", "fp32"), ("bf16", "auto"):
        found = settings(NATIVE, **FSDP | {"precision.grad_reduce": dtype})
        assert found["megatron_fsdp_main_grads_dtype"] == told
    assert "megatron_fsdp_main_grads_dtype" not in settings(NATIVE)
    assert settings(NATIVE)["ckpt_format"] == "torch_dist"
    assert "feature.muon.enabled" in refused(NATIVE, FSDP | MUON)
    assert "feature.megatron_fsdp.enabled" in refused(NATIVE, FSDP | PLAIN_OPTIMIZER)


def test_trap_index_reuse_without_a_mask():
    """Without one the shared top-k rides on the config object across microbatches."""
    stock = "execution.dsa.kernels=megatron"
    assert "--no-create-attention-mask-in-dataloader" not in words(DESIGN, stock), "on is Megatron's default"
    assert "--no-create-attention-mask-in-dataloader" in words(DESIGN), "our layers hand it on themselves"
    assert lowered("nam52_h200_sparse_8_11_ref_v1").by_name["create_attention_mask_in_dataloader"].value is False


def test_trap_index_reuse_under_full_recompute():
    stock = FULL | {"execution.dsa.kernels": "megatron"}
    assert refused(DESIGN, stock) == {
        "feature.recompute.granularity": "stock DSA loses a shared top-k under full recompute"
    }
    for served in (stock | {"model.blocks.dsa.full_every": 1}, FULL):
        assert settings(DESIGN, **served)["recompute_granularity"] == "full"


def test_trap_muon():
    said = words(NATIVE, "optim=muon")
    assert value_of(said, "--optimizer") == "muon"
    assert value_of(said, "--muon-tp-mode") == "blockwise"
    assert value_of(words(NATIVE), "--optimizer") == "adam"
    assert "feature.muon.enabled" in refused(NATIVE, FSDP | MUON)


def test_a_blend_is_said_to_the_last_digit():
    said = list(argv.argv(translated(NATIVE, BLEND)))
    at = said.index("--data-path") + 1
    assert said[at : at + 4] == ["0.7", "/a", "1e-07", "/b"]


def test_trap_a_name_of_an_optimizer_that_is_not_the_one():
    assert list(refused(NATIVE, {"optim.name": "muon"})) == ["optim.name"]
    assert list(refused(NATIVE, {"feature.muon.enabled": True})) == ["optim.name"]


@pytest.mark.parametrize("name", NAMES)
def test_trap_features_of_gpt_only(name):
    """Overlap of expert communication, delayed weight gradients and layer offloading do nothing in a hybrid."""
    never = {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--cpu-offloading-num-layers"}
    assert never <= current().flags.keys()
    assert not never & set(words(name))


@pytest.mark.parametrize("name", NAMES)
def test_trap_checks_that_must_stay_on(name):
    assert lowered(name).by_name["check_for_nan_in_loss_and_grad"].value is True


# Parallel algebra ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_world(size):
    """Process groups without processes."""
    torch.distributed.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


LAYOUTS = list(itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2)))


@pytest.mark.few(2)
@pytest.mark.parametrize("world", [1, 2, 4, 6, 8, 16])
def test_group_sizes_are_megatrons(world):
    """Every layout that Megatron can group has our sizes; every other one is refused."""
    fits = 0
    with fake_world(world):
        for tp, pp, cp, ep, etp in LAYOUTS:
            changes = {
                "cluster.nodes": 1,
                "cluster.gpus_per_node": world,
                "parallel.tensor": tp,
                "parallel.pipeline": pp,
            }
            changes |= {"parallel.context": cp, "parallel.expert": ep, "parallel.expert_tensor": etp}
            recipe = changed(NATIVE, changes)
            facts = {"parallel": recipe.parallel, "recipe": recipe, "cluster": recipe.cluster}
            refusals = [p.key for law in LAYOUT for p in law_module.broken(law, facts)]
            try:
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    context_parallel_size=cp,
                    expert_model_parallel_size=ep,
                    expert_tensor_parallel_size=etp,
                    create_gloo_process_groups=False,
                )
            except RuntimeError as error:
                assert "not divisible" in str(error)
                assert refusals, (tp, pp, cp, ep, etp)
            else:
                assert not refusals, (tp, pp, cp, ep, etp)
                assert recipe.data_parallel == parallel_state.get_data_parallel_world_size()
                assert recipe.expert_data_parallel == parallel_state.get_expert_data_parallel_world_size()
                fits += 1
            finally:
                parallel_state.destroy_model_parallel()
    assert fits > 0


def test_sizes_of_the_presets():
    nemo = lowered("nam56r_nemo_native").plan.recipe
    assert (nemo.world_size, nemo.data_parallel, nemo.expert_data_parallel) == (8, 4, 8)
    two = lowered("nam56r_nemo_native", "cluster=h200_2x8", "parallel.pipeline=2", "parallel.expert=4").plan.recipe
    assert (two.world_size, two.data_parallel, two.expert_data_parallel) == (16, 4, 2)


@pytest.mark.parametrize(
    ("micro", "batch", "gpus", "fits"),
    [(4, 64, 8, True), (4, 60, 8, False), (5, 320, 8, True), (3, 64, 8, False), (4, 64, 4, True)],
)
def test_batches(micro, batch, gpus, fits):
    changes = {"schedule.micro_batch_size": micro, "schedule.global_batch_size": batch, "cluster.gpus_per_node": gpus}
    if fits:
        assert settings(NATIVE, **changes)["global_batch_size"] == batch
    else:
        assert list(refused(NATIVE, changes)) == ["schedule.global_batch_size"]


# Owners -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_one_owner_a_reason_and_a_key_that_exists(name):
    lowering = lowered(name)
    assert len({s.name for s in lowering.settings}) == len(lowering.settings)
    for s in lowering.settings:
        assert s.owner and s.why, s
        node = to_tree(lowering.plan.recipe)
        for part in s.key.split(".") if s.key else ():
            node = node[part]


def test_a_second_owner_is_our_mistake(monkeypatch):
    def twice(self, plan):
        yield Setting("hidden_size", 8, "also me")

    monkeypatch.setattr(Device, "settings", twice)
    with pytest.raises(AssertionError, match="hidden_size is set by model and by device"):
        translate(changed(NATIVE, {}))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_translating_twice_is_byte_identical(name):
    first, second = (argv.plan_json(translate(load(name))) for _ in range(2))
    assert first == second


# Refusals: one case each, and no refusal without a case -------------------------------------------------------------

REFUSALS = [
    (NATIVE, {"device.capability": [10, 0]}, "device.capability", "10.0 is not served: CUDA_DEVICE_MAX_CONNECTIONS follows other"),
    (NATIVE, {"device.capability": [10, 3]}, "device.capability", "10.3 is not served: CUDA_DEVICE_MAX_CONNECTIONS follows other"),
    # base, changes, key, part of the message
    (NATIVE, {"cluster.processor": "cpu", "precision.cross_entropy": "fused"}, "precision.cross_entropy",
     "`fused` asks for what a CPU has not"),
    (NATIVE, MUON | {"cluster.processor": "cpu"}, "feature.muon.enabled", "Muon has not been tried on a CPU"),
    (NATIVE, {"schedule.save": "/s", "schedule.save_interval": 1, "schedule.async_save": True, "cluster.processor": "cpu"},
     "schedule.async_save", "asks for a GPU"),
    (NATIVE, {"schedule.async_save": True}, "schedule.async_save", "nothing is saved, in the background or not"),
    (NATIVE, FSDP | {"schedule.save": "/s", "schedule.save_interval": 1, "schedule.async_save": True}, "schedule.async_save",
     "hands its checkpoints to another package"),
    (NATIVE, {"precision.deterministic": True, "precision.cross_entropy": "compiled"}, "precision.cross_entropy", "is not deterministic"),
    (NATIVE, {"model.norm_epsilon": 1e-3}, "model.norm_epsilon", "Mamba-2 has no epsilon but 1e-05"),
    (NATIVE, {"parallel.tensor": 3}, "cluster.gpus_per_node", "8 GPUs cannot hold tensor 3 x pipeline 1 x context 1 = 3"),
    (NATIVE, {"parallel.expert": 16}, "parallel.expert", "8 GPUs cannot hold pipeline 1 x expert 16 x expert tensor 1"),
    (NATIVE, {"parallel.sequence": True}, "parallel.sequence", "switch sequence parallelism off at tensor size 1"),
    (NATIVE, {"schedule.global_batch_size": 60}, "schedule.global_batch_size", "60 is not a multiple of micro batch 4"),
    (NATIVE, {"optim.name": "muon"}, "optim.name", "called muon and Muon is off"),
    (NATIVE, {"optim.lr": 3e4}, "optim.lr", "a learning rate of 30000 moves"),
    (NATIVE, {"optim.min_lr": 1.0}, "optim.min_lr", "min_lr 1.0 is above lr 0.0003"),
    (NATIVE, {"optim.warmup_steps": 1000}, "optim.warmup_steps", "warm-up of 1000 steps leaves nothing of 1000"),
    (NATIVE, {"optim.decay": "WSD", "optim.wsd_steps": 991, "optim.wsd_shape": "linear"}, "optim.wsd_steps", "a fall of 991 steps"),
    (NATIVE, {"schedule.stop_every": 5}, "schedule.stop_every", "stops on its way and saves nothing"),
    (NATIVE, {"schedule.save": "/c"}, "schedule.save_interval", "`save` and `save_interval` go together"),
    (NATIVE, TP | {"model.vocab_size": 65535}, "model.vocab_size", "vocab_size 65535 is not divisible by tensor size 2"),
    (NATIVE, TP | {"model.seq_length": 4095}, "model.seq_length", "a sequence of 4095 cannot be shared by 2 ranks"),
    (NATIVE, {"parallel.context": 2, "model.seq_length": 4094}, "model.seq_length", "cannot be cut into 2 x context 2"),
    (DESIGN, {"model.tied_embeddings": True}, "model.tied_embeddings", "MTP with tied embeddings"),
    (NATIVE, {"parallel.expert": 2, "model.letters.E": "mlp"}, "parallel.expert", "expert parallel 2 in a model without"),
    (NATIVE, {"data.path": "/d/x"}, "data.path", "mock data with a `path`"),
    (NATIVE, INDEXED | {"data.name": "built"}, "data.split", "built data with a `split`"),
    (NATIVE, BLEND | {"data.parts": []}, "data.parts", "a blend of nothing"),
    (NATIVE, BLEND | {"data.parts": 2 * [{"weight": 1, "path": "/a"}]}, "data.parts", "the blend has `/a` twice"),
    (NATIVE, APART | {"data.valid_parts": []}, "data.valid_parts", "a blend of nothing"),
    (NATIVE, APART | {"data.valid_parts": BLEND["data.parts"]}, "data.valid_parts", "of `/a`, which is trained on"),
    (NATIVE, APART | {"schedule.eval_steps": 0}, "data.valid_parts", "datasets for evaluations, and no evaluations"),
    (NATIVE, APART | {"data.split": "9,1,0"}, "data.split", "a split beside datasets of which none is split"),
    (NATIVE, BLEND | {"data.path": "/d/x"}, "data.path", "blend data with a `path`"),
    (NATIVE, SFT | {"schedule.pretrained": None}, "schedule.pretrained", "learned by a pretrained model"),
    *((NATIVE, whole | {f"data.{key}": None}, f"data.{key}", f"{whole['data.name']} data without `{key}`") for whole, keys in (
        (INDEXED, "path split tokenizer"), (BLEND, "parts split tokenizer"), (APART, "parts tokenizer"),
        (SFT, "path tokenizer prompt answer"), (INDEXED | {"data.name": "built"}, "path"),
        (SFT | {"data.name": "sft_blend"}, "parts tokenizer prompt answer"),
    ) for key in keys.split()),
    (NATIVE, SFT | {"data.name": "sft_blend"}, "data.path", "sft_blend data with a `path`"),
    (NATIVE, SFT | {"data.answer": "input"}, "data.answer", "both prompt and answer"),
    (NATIVE, SFT | {"schedule.eval_steps": 1}, "schedule.eval_steps", "are not carried over"),
    (NATIVE, SFT | {"feature.mtp.depths": 1}, "feature.mtp.depths", "does not tell MTP which tokens are the answer"),
    (NATIVE, SFT | {"feature.fim.enabled": True}, "feature.fim.enabled", "of prompts and answers"),
    (NATIVE, SFT | {"parallel.context": 2}, "parallel.context", "shown on whole sequences alone"),
    (NATIVE, SFT | {"model.blocks.moe.capacity_factor": 1.25}, "model.blocks.moe.capacity_factor", "padding behind an answer"),
    (DESIGN, SFT | {"feature.mtp.depths": 0, "execution.dsa.kernels": "megatron"}, "execution.dsa.kernels", "have masks"),
    (NATIVE, {"data.prompt": "input"}, "data.prompt", "mock data with a `prompt`"),
    # lora
    (NATIVE, ADAPTED | {"schedule.pretrained": None}, "schedule.pretrained", "stand on a pretrained model"),
    (NATIVE, ADAPTED | {"feature.lora.targets": []}, "feature.lora.targets", "adapters on nothing"),
    (NATIVE, ADAPTED | {"feature.lora.targets": ["linear_q_proj"]}, "feature.lora.targets", "no kind of this model has"),
    (NATIVE, ADAPTED | {"feature.lora.targets": ["router"]}, "feature.lora.targets", "`router` gets no adapter"),
    (NATIVE, ADAPTED | TP, "parallel.tensor", "under data parallelism alone"),
    (NATIVE, ADAPTED | {"parallel.expert": 2}, "parallel.expert", "under data parallelism alone"),
    (NATIVE, ADAPTED | MUON, "feature.muon.enabled", "have not been shown beside `muon`"),
    (NATIVE, ADAPTED | {"precision.fused_grad_accumulation": True}, "precision.fused_grad_accumulation", "weights that stay"),
    (NATIVE, ADAPTED | {"model.blocks.moe.expert_bias_update_rate": 0.001}, "model.blocks.moe.expert_bias_update_rate", "would move"),
    (DESIGN, ADAPTED | {"feature.mtp.depths": 0}, "model.blocks.dsa.indexer_loss_coeff", "would teach nothing"),
    (DELTA, {"feature.lora.rank": 8, "schedule.pretrained": "/p"}, "feature.lora.rank", "not been shown on"),
    (NATIVE, INDEXED | {"data.split": "٩٩,1,0"}, "data.split", "is no split"),  # digits to Python, none to Megatron
    (NATIVE, INDEXED | {"data.split": "99;1;0"}, "data.split", "`99;1;0` is no split"),
    (NATIVE, INDEXED | {"data.split": "0,1,0"}, "data.split", "nothing is left for training"),
    (NATIVE, INDEXED | {"data.split": "1,0,0", "schedule.eval_steps": 1}, "data.split", "and no documents for them"),
    # attention
    (NATIVE, {"model.blocks.attention.query_groups": 5}, "model.num_attention_heads", "attention heads 56 is not divisible"),
    (NATIVE, TP | {"model.blocks.attention.query_groups": 7}, "model.blocks.attention.query_groups", "7 query groups are"),
    (NATIVE, {"model.blocks.attention.head_dim": 63}, "model.blocks.attention.head_dim", "an even number of columns of a head, not 63"),
    (DELTA, {"model.blocks.gdn.value_heads": 24}, "model.blocks.gdn.value_heads", "value heads 24 is not divisible"),
    (DELTA, TP | {"model.blocks.gdn.key_heads": 1}, "model.blocks.gdn.key_heads", "key heads 1 is not divisible"),
    (DELTA, {"model.activation": "gelu"}, "model.activation", "knows SiLU alone, not that of gelu"),
    (DELTA, {"parallel.tensor": 2}, "parallel.sequence", "a gated delta net under tensor parallelism gets wrong gradients"),
    (DELTA, GRAPHS | {"feature.cuda_graphs.modules": ["attn"]}, "feature.cuda_graphs.impl", "inside CUDA graphs"),
    ("nam56r_native_dp_fp8", {"lane.blocks.M": "gdn", "lane.blocks.R": "gdn", "lane.name": "delta", "model.blocks.gdn.key_heads": 1,
     "model.blocks.gdn.value_heads": 57}, "model.blocks.gdn.value_heads", "has 7538 columns a GPU"),
    (DESIGN, {"model.zero_centered_norms": True}, "execution.mla.kernels", "not centred at zero"),
    (NATIVE, {"model.blocks.attention.window": 4096}, "model.blocks.attention.window", "limits nothing in 4096"),
    (NATIVE, {"model.blocks.attention.window": 512, "parallel.context": 2}, "model.blocks.attention.window",
     "ring of context ranks takes no window"),
    (NATIVE, {"model.blocks.attention.sinks": True, "parallel.context": 2}, "model.blocks.attention.sinks", "with context ranks"),
    (NATIVE, {"model.blocks.attention.sinks": True, "precision.attention_kernels": "flash_attention_4"}, "precision.attention_kernels",
     "FlashAttention 4 has not been tried with sinks"),
    (NATIVE, {"model.blocks.attention.unwindowed_every": 2}, "model.blocks.attention.unwindowed_every", "there is no window"),
    (NATIVE, WINDOWS | {"model.blocks.attention.unwindowed_every": 14}, "model.blocks.attention.unwindowed_every", "no 14-th of 13"),
    ("nam56r_native_dp_fp8", {"feature.mtp.depths": 1, "feature.mtp.pattern": "EM", "feature.cuda_graphs.impl": "none"},
     "feature.mtp.pattern", "nobody has tried MoE and Mamba-2 in FP8"),
    (NATIVE, GRAPHS | {"feature.mtp.depths": 1, "feature.mtp.pattern": "AE"}, "feature.mtp.pattern", "tried MoE beside CUDA graphs"),
    (NATIVE, WINDOWS | {"feature.mtp.depths": 1}, "model.blocks.attention.unwindowed_every", "layers of MTP from 1 again"),
    (NATIVE, {"execution.moe.pad_to_capacity": True}, "execution.moe.pad_to_capacity", "nothing to pad to"),
    (NATIVE, {"model.blocks.moe.latent_size": 100}, "model.blocks.moe.latent_size", "not a multiple of 8"),
    (NATIVE, {"model.blocks.moe.latent_size": 512, "execution.moe.dispatcher": "local"}, "execution.moe.dispatcher", "the latent"),
    (NATIVE, {"model.blocks.moe.latent_size": 512, "execution.moe.shared_overlap": True}, "execution.moe.shared_overlap",
     "experts of a latent"),
    (NATIVE, {"model.linear_bias": True, "model.letters.E": "mlp", "model.blocks.attention.qkv_bias": True},
     "model.blocks.attention.qkv_bias", "gives these biases already"),
    (NATIVE, {"model.blocks.attention.rotary_percent": 0.3}, "model.blocks.attention.rotary_percent", "columns of a head, not 19.2"),
    (NATIVE, {"model.blocks.attention.position_embedding": "none", "model.blocks.attention.rotary_percent": 0.5},
     "model.blocks.attention.rotary_percent", "there is no RoPE"),
    (NATIVE, YARN | {"model.blocks.attention.position_embedding": "none"}, "feature.yarn.factor", "no layer has RoPE, which YaRN"),
    (NATIVE, YARN | {"model.blocks.attention.rotary_percent": 0.5}, "model.blocks.attention.rotary_percent", "turns whole heads"),
    (NATIVE, YARN | {"feature.mtp.depths": 1}, "feature.yarn.factor", "not beside YaRN"),
    (NATIVE, YARN | {"feature.yarn.beta_slow": 33.0}, "feature.yarn.beta_fast", "the ramp would run backwards"),
    (NATIVE, LLAMA | {"model.blocks.attention.position_embedding": "none"}, "feature.llama_rope.factor", "no layer has RoPE, whose"),
    (DESIGN, LLAMA, "feature.llama_rope.factor", "MLA's RoPE is scaled by YaRN"),
    (NATIVE, LLAMA | YARN, "feature.llama_rope.factor", "YaRN scales these angles already"),
    (NATIVE, {"model.learned_positions": 4096}, "model.learned_positions", "learned positions or RoPE for attention, not both"),
    (NATIVE, LEARNED | {"model.learned_positions": 4095}, "model.learned_positions", "4095 positions for a sequence of 4096"),
    (NATIVE, LEARNED | {"feature.mtp.depths": 1}, "model.learned_positions", "no MTP beside learned positions"),
    # mla and dsa
    (DESIGN, {"model.blocks.mla.q_lora_rank": None}, "model.blocks.mla.q_lora_rank", "indexer reads the query latent"),
    (DESIGN, ALL_MLA | {"model.blocks.mla.q_lora_rank": None}, "execution.mla.kernels", "projects queries from a latent"),
    (DESIGN, {"model.blocks.mla.qk_rope_head_dim": 63}, "model.blocks.mla.qk_rope_head_dim", "even width, not 63"),
    (DESIGN, {"parallel.tensor": 2}, "parallel.sequence", "wrong gradients without sequence parallelism"),
    (DESIGN, {"model.blocks.dsa.top_k": 4097}, "model.blocks.dsa.top_k", "top-k 4097 exceeds the sequence of 4096"),
    (DESIGN, {"model.blocks.dsa.indexer_head_dim": 32}, "model.blocks.dsa.indexer_head_dim", "cannot hold the 64 RoPE"),
    (DESIGN, {"parallel.context": 2, "model.seq_length": 4608 - 128}, "model.seq_length", "take queries by 128, and those of a sequence"),
    (DESIGN, {"execution.dsa.query_pieces": 3}, "execution.dsa.query_pieces", "are cut into 3 parts"),
    (DESIGN, {"execution.dsa.query_pieces": 3, "execution.dsa.kernels": "naive", "model.seq_length": 4097},
     "execution.dsa.query_pieces", "takes queries in equal parts"),
    (DESIGN, {"execution.dsa.query_pieces": 2, "execution.dsa.kernels": "megatron", "model.blocks.dsa.full_every": 1},
     "execution.dsa.query_pieces", "takes all queries at once"),
    (DESIGN, {"model.linear_bias": True}, "model.linear_bias", "DSA has no linear bias"),
    (NATIVE, {"model.hidden_size": 3592, "model.pattern": "M", "model.depth": 4}, "model.hidden_size",
     "3592 is not a multiple of num_attention_heads 56"),
    (NATIVE, {"model.linear_bias": True, "model.pattern": "M", "model.depth": 4}, "model.linear_bias", "no layer has such a bias"),
    # moe
    (NATIVE, {"model.linear_bias": True}, "model.linear_bias", "a shared expert takes no bias"),
    (NATIVE, {"model.linear_bias": True, "model.blocks.moe.shared_expert_hidden_size": 0}, "model.linear_bias", "grouped experts take"),
    # recurrent blocks
    (DESIGN, TP | {"model.blocks.m2rnn.heads": 45}, "model.blocks.m2rnn.heads", "M2RNN heads 45 is not divisible"),
    (DESIGN, {"parallel.context": 8}, "model.blocks.m2rnn.heads", "heads 44 is not divisible by `parallel.tensor * parallel.context` = 8"),
    (DESIGN, {"parallel.context": 2, "model.blocks.mamba3.groups": 7}, "model.blocks.mamba3.groups", "Mamba-3 groups 7 is not"),
    (NATIVE, TP | {"parallel.tensor": 4, "parallel.context": 2, "model.seq_length": 4100}, "model.seq_length", "shared by 8 ranks"),
    (NATIVE, {"parallel.context": 4, "model.blocks.mamba2.groups": 7}, "model.blocks.mamba2.groups", "neither spread over 4 context ranks"),
    ("nam56r_native_dp_fp8", {"model.letters.A": "mla"}, "execution.mla.kernels", "our MLA projects to latents"),
    ("nam56r_native_dp_fp8", {"model.letters.A": "dsa"}, "execution.dsa.kernels", "our DSA projects to latents"),
    (DESIGN, {"model.normalization": "LayerNorm"}, "execution.mla.kernels", "RMSNorm in its projections, not LayerNorm"),
    (DESIGN, {"model.normalization": "LayerNorm"}, "execution.dsa.kernels", "RMSNorm in its projections, not LayerNorm"),
    (DESIGN, {"model.blocks.mla.kv_lora_rank": 96}, "model.blocks.mla.kv_lora_rank", "fused kernels take widths"),
    (DESIGN, TP | {"model.blocks.m2rnn.k_dim": 65}, "model.blocks.m2rnn.k_dim", "M2RNN's key width 65 is not divisible"),
    ("nam56r_native_dp_fp8", {"lane.blocks.R": "m2rnn"}, "model.blocks.m2rnn.heads", "M2RNN's input projection"),
    (DESIGN, {"model.blocks.m2rnn.k_dim": 40}, "model.blocks.m2rnn.k_dim", "key widths that 16 divides, not 40"),
    (DESIGN, {"model.blocks.m2rnn.v_dim": 8}, "model.blocks.m2rnn.v_dim", "value widths of 16 and 32, not 8"),
    (DESIGN, {PADDED: True, "model.blocks.m2rnn.heads": 40}, PADDED, "1,448 columns on each GPU, which 8 divides"),
    (DESIGN, TP | {PADDED: True, "model.blocks.m2rnn.heads": 16}, PADDED, "328 columns on each GPU, which 8 divides"),
    (DESIGN, {PADDED: True, "feature.megatron_fsdp.enabled": True}, PADDED, "only while a layer runs"),
    (DESIGN, {PADDED: True, "precision.grad_reduce": "bf16", "precision.fused_grad_accumulation": True}, PADDED,
        "rounded to bf16 before it is added"),
    (DESIGN, GRAPHS | {PADDED: True}, PADDED, "a CUDA graph of a layer would hold the padded weight"),
    (DESIGN, ADAPTED | {PADDED: True}, PADDED, "an adapter's output has no columns"),
    (DESIGN, {"model.blocks.mamba3.state_dim": 33}, "model.blocks.mamba3.state_dim", "angles turn pairs of columns"),
    (DESIGN, {"model.blocks.mamba3.groups": 3}, "model.blocks.mamba3.heads", "Mamba-3 heads 112 is not divisible"),
    (DESIGN, TP | {"model.blocks.mamba3.heads": 111, "model.blocks.mamba3.groups": 1}, "model.blocks.mamba3.heads", "tensor"),
    (DESIGN, TP | {"model.blocks.mamba3.groups": 7}, "model.blocks.mamba3.groups", "Mamba-3 groups 7 is not divisible"),
    (DESIGN, {"execution.mamba3.head_pieces": 3}, "execution.mamba3.head_pieces", "3 pieces of the 8 groups of heads"),
    (DESIGN, TP | {"execution.mamba3.head_pieces": 8}, "execution.mamba3.head_pieces", "8 pieces of the 4 groups of heads"),
    (DESIGN, {"model.blocks.mamba3.rope_fraction": 1.5}, "model.blocks.mamba3.rope_fraction", "1.5 is above 1"),
    (DESIGN, {"model.blocks.mamba3.rope_fraction": 0.01}, "model.blocks.mamba3.rope_fraction",
     "turn pairs of columns, and rope_fraction 0.01 of 128 is 1.28"),
    (DESIGN, {"model.blocks.mamba3.rope_fraction": 0.3}, "model.blocks.mamba3.rope_fraction", "0.3 of 128 is 38.4"),
    (DESIGN, {"model.blocks.mamba3.rope_fraction": 0.51}, "model.blocks.mamba3.rope_fraction", "0.51 of 128 is 65.28"),
    (DESIGN, {"model.blocks.mamba3.rope_fraction": 0.5078125}, "model.blocks.mamba3.rope_fraction", "0.5078125 of 128 is 65"),
    (DESIGN, TP | {"model.blocks.mamba3.rope_fraction": 0.046875}, "model.blocks.mamba3.rope_fraction", "angles 3 is not divisible"),
    (DESIGN, {"model.blocks.mamba3.head_dim": 48}, "model.blocks.mamba3.head_dim", "a power of two from 16, not 48"),
    (DESIGN, {"model.seq_length": 2**19}, "model.seq_length", "fewer than 524,288 tokens in a sample"),
    (DESIGN, {"parallel.context": 4, "model.seq_length": 2**21}, "model.seq_length", "fewer than 2,097,152 tokens in a sample"),
    (DESIGN, {"execution.mamba3.head_pieces": 4, "model.seq_length": 2**21}, "model.seq_length", "fewer than 2,097,152"),
    (DESIGN, {"execution.mamba3.chunk": 64}, "execution.mamba3.chunk", "from 16 to 128, not 64 x 4"),
    (DESIGN, {"execution.mamba3.chunk": 24}, "execution.mamba3.chunk", "a power of two from 1, not 24"),
    ("nam56r_native_dp_fp8", {"lane.blocks.M": "mamba3", "model.blocks.mamba3.heads": 111, "model.blocks.mamba3.groups": 1},
     "model.blocks.mamba3.heads", "no FP8 GEMM"),
    (NATIVE, {"model.blocks.mamba2.groups": 3}, "model.blocks.mamba2.heads", "Mamba-2 heads 56 is not divisible"),
    (NATIVE, TP | {"model.blocks.mamba2.heads": 57, "model.blocks.mamba2.groups": 3}, "model.blocks.mamba2.heads", "tensor"),
    (NATIVE, TP | {"model.blocks.mamba2.groups": 7}, "model.blocks.mamba2.groups", "Mamba-2 groups 7 is not divisible"),
    (NATIVE, {"execution.mamba2.strided": True, "model.blocks.mamba2.heads": 63, "model.blocks.mamba2.groups": 3},
     "execution.mamba2.strided", "strides that 8 divides"),
    (NATIVE, {NORM_KEY: True}, NORM_KEY, "only the strided mixer"),
    (NATIVE, {"execution.mamba2.strided": True, NORM_KEY: True, "parallel.context": 2}, NORM_KEY, "context ranks exchange"),
    (NATIVE, TP | {"execution.mamba2.strided": True}, "execution.mamba2.strided", "columns on each GPU"),
    # moe
    (NATIVE, {"model.blocks.moe.top_k": 17}, "model.blocks.moe.top_k", "top-k 17 of 16 experts"),
    (NATIVE, {"parallel.expert": 8, "model.blocks.moe.experts": 12}, "model.blocks.moe.experts", "12 is not divisible"),
    (NATIVE, {"parallel.expert_tensor": 2, "model.blocks.moe.expert_hidden_size": 895},
     "model.blocks.moe.expert_hidden_size", "expert width 895 is not divisible by `parallel.expert_tensor` = 2"),
    (NATIVE, TP | {"model.blocks.moe.shared_expert_hidden_size": 1023}, "model.blocks.moe.shared_expert_hidden_size", "1023"),
    (NATIVE, {"model.blocks.moe.score_function": "softmax"}, "model.blocks.moe.expert_bias", "needs sigmoid scores"),
    (NATIVE, {"model.blocks.moe.score_function": "softmax", "model.blocks.moe.top_k": 1}, "model.blocks.moe.top_k", "no gradient"),
    (NATIVE, {"model.blocks.moe.shared_expert_gate": True, "model.blocks.moe.shared_expert_hidden_size": 0},
     "model.blocks.moe.shared_expert_gate", "no shared expert to gate"),
    (NATIVE, {"model.blocks.moe.pre_softmax": True}, "model.blocks.moe.pre_softmax", "sigmoid scores are no softmax"),
    (NATIVE, {"model.blocks.moe.group_limit": [3, 1]}, "model.blocks.moe.group_limit", "not divisible"),
    (NATIVE, {"model.blocks.moe.group_limit": [2, 4]}, "model.blocks.moe.group_limit", "limit nothing"),
    (NATIVE, {"model.blocks.moe.group_limit": [16, 4]}, "model.blocks.moe.group_limit", "limit nothing"),
    (NATIVE, {"model.blocks.moe.group_limit": [4, 3]}, "model.blocks.moe.group_limit", "not divisible by 3"),
    (NATIVE, {"model.blocks.moe.group_limit": [8, 1]}, "model.blocks.moe.group_limit", "fewer experts than top-k 4"),
    (NATIVE, {"model.blocks.moe.balancing": "none"}, "model.blocks.moe.aux_loss_coeff", "without a balancing loss"),
    (NATIVE, {EXPERT_GEMM: "torch"}, EXPERT_GEMM, "only dispatchers of ours"),
    (NATIVE, ON_GPU | {"model.blocks.moe.grouped_gemm": False}, EXPERT_GEMM, "without grouped GEMM"),
    ("nam56r_native_dp_fp8", ON_GPU, EXPERT_GEMM, "no FP8"),
    (NATIVE, ON_GPU | {"feature.megatron_fsdp.enabled": True}, EXPERT_GEMM, "keeps hold of them"),
    (NATIVE, ON_GPU | {"model.blocks.moe.expert_hidden_size": 900}, EXPERT_GEMM, "900 is not a multiple of 8"),
    (NATIVE, ON_GPU | {"model.blocks.moe.experts": 1024}, EXPERT_GEMM, "fewer than 1,024 experts, not 1,024"),
    (NATIVE, {EXPERT_GEMM: "quack"}, EXPERT_GEMM, "only dispatchers of ours"),
    ("nam56r_native_dp_fp8", QUACK, EXPERT_GEMM, "QuACK's GEMM has no FP8"),
    (NATIVE, QUACK | {"feature.megatron_fsdp.enabled": True}, EXPERT_GEMM, "QuACK's GEMM keeps hold of them"),
    (NATIVE, QUACK | {"model.blocks.moe.expert_hidden_size": 900}, EXPERT_GEMM, "QuACK's GEMM wants rows"),
    (NATIVE, QUACK | {"precision.deterministic": True}, EXPERT_GEMM, "not been tried with `precision.deterministic`"),
    (NATIVE, QUACK | MUON, EXPERT_GEMM, "not been tried with Muon"),
    (NATIVE, QUACK | ADAPTED, EXPERT_GEMM, "not been tried with adapters"),
    (NATIVE, {"schedule.save": "s3://b/c", "schedule.save_interval": 5}, "schedule.save", "`s3://b/c` is an address"),
    (NATIVE, {"cluster.storage.durable": "s3://b"}, "cluster.storage.durable", "`s3://b` is an address"),
    (NATIVE, {"schedule.steady_timeout_seconds": 301}, "schedule.steady_timeout_seconds", "later steps may wait 301 s"),
    (NATIVE, {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "parallel.tensor": 4, "parallel.sequence": True}, "parallel.tensor",
     "tensor ranks on several hosts"),
    (NATIVE, {"cluster.nodes": 2, "cluster.gpus_per_node": 6, "parallel.tensor": 4, "model.hidden_size": 3584}, "parallel.tensor",
     "tensor ranks on several hosts"),  # the second group begins on one and ends on the other
    (NATIVE, QUACK | {"precision.grad_reduce": "bf16"}, EXPERT_GEMM, "not been tried with bf16 gradients"),
    (NATIVE, ON_GPU | {"parallel.expert": 2}, "execution.moe.dispatcher", "the experts are on several GPUs"),
    (NATIVE, LOCAL | {"parallel.expert": 2}, "execution.moe.dispatcher", "the experts are on several GPUs"),
    (NATIVE, LOCAL | {"parallel.expert_tensor": 2}, "execution.moe.dispatcher", "the experts are on several GPUs"),
    ("gpt_oss_20b", TP | {"parallel.expert_tensor": 2, "parallel.expert": 1}, "model.linear_bias", "experts with biases are whole"),
    (NATIVE, ON_GPU | {"execution.moe.dispatcher": "gathered"}, "execution.moe.dispatcher", "nobody to gather tokens from"),
    (NATIVE, ON_GPU | GATHERED | {"parallel.expert_tensor": 2}, "execution.moe.dispatcher", "each expert whole"),
    (NATIVE, GATHERED, "execution.moe.dispatcher", "and transformer_engine wants them on the host"),
    (NATIVE, ON_GPU | GATHERED | {"model.blocks.moe.capacity_factor": 1.0}, "execution.moe.dispatcher", "gathered dispatcher drops"),
    (NATIVE, LOCAL | {"model.blocks.moe.capacity_factor": 1.0}, "execution.moe.dispatcher", "drops nothing"),
    (NATIVE, LOCAL | GRAPHS | {"feature.cuda_graphs.modules": ["moe_router"]}, "execution.moe.dispatcher", "leaves for later"),
    (NATIVE, LOCAL | {"execution.moe.shared_overlap": True}, "execution.moe.shared_overlap", "only the all-to-all"),
    (NATIVE, {FORKED_KEY: True}, FORKED_KEY, "with a dispatcher of ours alone"),
    (NATIVE, FORKED | {"model.blocks.moe.router_dtype": "fp64"}, FORKED_KEY, "of fp32 logits, not fp64"),
    (NATIVE, FORKED | {"model.blocks.moe.router_dtype": None}, FORKED_KEY, "of fp32 logits, not bf16"),
    (NATIVE, FORKED | {"model.linear_bias": True}, FORKED_KEY, "a router with a bias"),
    (NATIVE, WEIGHED | {"model.activation": "swiglu"}, WEIGHED_KEY, "is squared ReLU, not swiglu"),
    (NATIVE, WEIGHED | {"model.blocks.moe.grouped_gemm": False}, WEIGHED_KEY, "grouped experts only"),
    (NATIVE, WEIGHED | {"model.linear_bias": True}, WEIGHED_KEY, "takes no bias"),
    (NATIVE, {"model.linear_bias": True, "model.blocks.moe.shared_expert_hidden_size": 0, "model.blocks.moe.grouped_gemm": False,
              "model.activation": "swiglu"}, "model.linear_bias", "weighed SwiGLU of experts"),
    (NATIVE, {"parallel.tensor": 2}, "parallel.sequence", "MoE under tensor parallelism trains only with sequence"),
    (NATIVE, {"model.hidden_size": 3588}, "model.hidden_size", "not a multiple of 8"),
    # cuda_graphs
    (NATIVE, {"feature.cuda_graphs.modules": ["attn"]}, "feature.cuda_graphs.modules", "`modules` of a feature that is off"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": []}, "feature.cuda_graphs.modules", "without modules would capture"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["mlp"]}, "feature.cuda_graphs.modules", "no layer has the part `mlp`"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["attn"], "model.pattern": "EM"}, "feature.cuda_graphs.modules", "part `attn`"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["moe_preprocess"]}, "feature.cuda_graphs.modules", "with `moe_router`"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["mlp"], "feature.mtp.depths": 1}, "feature.cuda_graphs.modules",
     "only in models without MoE"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["moe_router", "moe_preprocess"], "model.blocks.moe.capacity_factor": 1.0},
     "feature.cuda_graphs.modules", "with a capacity factor"),
    (NATIVE, GRAPHS | FULL, "feature.cuda_graphs.impl", "exclude each other"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.impl": "local", "feature.cuda_graphs.modules": ["moe_router"]},
     "feature.cuda_graphs.modules", "capture `moe_preprocess` with `moe_router`"),
    *((DESIGN, SELECTIVE | FSDP | {"feature.recompute.modules": ["mla_up_proj"], STRATEGY: strategy, "parallel.expert": 1},
       "feature.recompute.modules", "loses one of the gradients that it gets in two passes")
      for strategy in ("optim_grads_params", "optim_grads")),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["moe_router"]} | SELECTIVE | {"feature.recompute.modules": ["moe"]},
     "feature.cuda_graphs.modules", "recompute of `moe` would run"),
    (NATIVE, GRAPHS | {"model.letters.E": "mlp", "feature.cuda_graphs.modules": ["mlp"], "model.hidden_dropout": 0.1} | SELECTIVE
     | {"feature.recompute.modules": ["mlp"]}, "feature.cuda_graphs.modules", "cannot draw the dropout again"),
    (NATIVE, GRAPHS | {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["core_attn"]},
     "feature.cuda_graphs.modules", "captured attention keeps"),
    (DESIGN, GRAPHS | {"execution.dsa.kernels": "megatron"}, "feature.cuda_graphs.modules", "synchronises with the host"),
    (DESIGN, GRAPHS | {"feature.cuda_graphs.impl": "local"}, "feature.cuda_graphs.modules", "another microbatch's top-k"),
    (NATIVE, WHOLE | {"feature.cuda_graphs.modules": ["attn"]}, "feature.cuda_graphs.modules", "it captures everything"),
    (NATIVE, WHOLE | {"feature.cuda_graphs.warmup_steps": 0}, "feature.cuda_graphs.warmup_steps", "the first step cannot be captured"),
    (NATIVE, WHOLE | {"schedule.train_steps": 3, "optim.warmup_steps": 1}, "feature.cuda_graphs.warmup_steps", "nothing would be captured"),
    (NATIVE, WHOLE | {"schedule.stop_every": 2, "schedule.save": "/c"}, "feature.cuda_graphs.warmup_steps", "has 2 steps, and 3 are"),
    (NATIVE, WHOLE | {EXPERT_GEMM: "transformer_engine"}, EXPERT_GEMM, "waits for the experts' counts"),
    (DESIGN, WHOLE | {"execution.dsa.kernels": "megatron"}, "execution.dsa.kernels", "synchronises with the host"),
    (NATIVE, WHOLE | {"schedule.eval_steps": 1}, "schedule.eval_steps", "memory of their own"),
    (NATIVE, WHOLE | {"cluster.nodes": 2}, WHOLE_KEY, "not been tried with several hosts"),
    (NATIVE, WHOLE | {"cluster.gpus_per_node": 2, "parallel.pipeline": 2}, WHOLE_KEY, "waits for the device after each exchange"),
    (NATIVE, WHOLE | SELECTIVE | {"feature.recompute.modules": ["moe_act"]}, WHOLE_KEY, "not been tried with recompute"),
    (DESIGN, WHOLE | {"execution.mamba3.recompute": "in_proj"}, WHOLE_KEY, "not been tried with recompute"),
    (NATIVE, WHOLE | {"model.hidden_dropout": 0.1}, WHOLE_KEY, "not been tried with dropout"),
    (NATIVE, WHOLE | {"model.attention_dropout": 0.1}, WHOLE_KEY, "not been tried with dropout"),
    ("nam56r_native_dp_fp8", WHOLE | KEPT | {"feature.fp8.recipe": "blockwise"}, WHOLE_KEY,
     "not been tried with FP8 scaled by blocks"),
    ("nam56r_native_dp_fp8", WHOLE | KEPT | {"feature.fp8.param_gather": True}, WHOLE_KEY, "not been tried with weights held in FP8"),
    ("nam56r_native_dp_fp8", WHOLE | KEPT | EDGES, WHOLE_KEY, "not been tried with layers in bf16 beside"),
    ("llama_3_8b", FSDP | {"cluster.gpus_per_node": 1, WHOLE_KEY: "full_iteration"}, WHOLE_KEY, "not been tried with Megatron-FSDP"),
    (NATIVE, WHOLE | NGRAMS, WHOLE_KEY, "not been tried with n-gram tables"),
    # distributed_optimizer
    (NATIVE, {"feature.distributed_optimizer.enabled": False}, "feature.distributed_optimizer.overlap_param_gather", "no sharded"),
    (DESIGN, {"model.blocks.dsa.indexer_loss_coeff": 0.0}, "model.blocks.dsa.indexer_loss_coeff", "the overlapped reduction waits"),
    (NATIVE, {"feature.distributed_optimizer.overlap_grad_reduce": False}, "feature.distributed_optimizer.overlap_grad_reduce",
     "`overlap_param_gather` needs `overlap_grad_reduce`"),
    (NATIVE, PLAIN_OPTIMIZER | {"feature.distributed_optimizer.reshardable": True},
     "feature.distributed_optimizer.reshardable", "always reshardable"),
    (NATIVE, MUON | {"feature.distributed_optimizer.reshardable": True},
     "feature.distributed_optimizer.reshardable", "the optimizer's state of `muon` fits its own parallel layout alone"),
    (NATIVE, FSDP | {"feature.distributed_optimizer.reshardable": True},
     "feature.distributed_optimizer.reshardable", "the optimizer's state of `megatron_fsdp` fits its own"),
    (NATIVE, FSDP | {OVERLAP + "param_gather": False}, OVERLAP + "param_gather", "on for strategy `optim_grads_params`"),
    (NATIVE, FSDP | UNLAPPED | {STRATEGY: "optim_grads"}, OVERLAP + "grad_reduce", "switches it on for strategy `optim_grads`"),
    (NATIVE, FSDP | {"precision.fused_grad_accumulation": True}, "precision.fused_grad_accumulation", "does not keep the buffer"),
    (NATIVE, FSDP | {"precision.norm_kernels": "cudnn"}, "precision.norm_kernels", "multiples of 16 bytes"),
    (NATIVE, {"execution.moe.shared_overlap": True, "execution.moe.dispatcher": "allgather"},
     "execution.moe.shared_overlap", "only the all-to-all dispatcher"),
    (NATIVE, {"execution.moe.shared_overlap": True, "model.blocks.moe.shared_expert_hidden_size": 0},
     "execution.moe.shared_overlap", "no shared expert to overlap"),
    # fim, ngram_hash
    (NATIVE, {"feature.fim.enabled": True}, "feature.fim.enabled", "on mock data"),
    (NATIVE, {"feature.ngram_hash.enabled": True}, "feature.ngram_hash.buckets", "without buckets"),
    (NATIVE, NGRAMS | {"feature.ngram_hash.buckets": 2**31}, "feature.ngram_hash.buckets", "more buckets than"),
    (NATIVE, NGRAMS | TP | {"parallel.tensor": 8, "feature.ngram_hash.buckets": 1001}, "feature.ngram_hash.buckets", "shared by 8"),
    (NATIVE, NGRAMS | {"feature.ngram_hash.document_end": 65536}, "feature.ngram_hash.document_end", "is not among the 65536"),
    (NATIVE, NGRAMS | {"parallel.pipeline": 2, "feature.mtp.depths": 1}, "feature.ngram_hash.enabled", "rows of its own"),
    (NATIVE, NGRAMS | FSDP, "feature.ngram_hash.enabled", "that of the n-grams' table is sparse"),
    # mhc
    (NATIVE, STREAMS | {"parallel.pipeline": 2, "parallel.virtual_pipeline": 2}, "feature.mhc.streams", "an interleaved pipeline"),
    (NATIVE, STREAMS | FULL, "feature.mhc.streams", "full recompute of layers between"),
    (NATIVE, STREAMS | {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["moe", "layernorm"]},
     "feature.mhc.streams", "recompute of `layernorm` between"),
    (NATIVE, STREAMS | GRAPHS, "feature.mhc.streams", "a CUDA graph of a layer"),
    (NATIVE, STREAMS | WHOLE | {"feature.mhc.kernels": "naive"}, "feature.mhc.kernels", "not been tried with streams in plain torch"),
    (NATIVE, STREAMS | {"feature.mhc.epsilon": 1.5}, "feature.mhc.epsilon", "must be less than or equal to 1"),
    (NATIVE, STREAMS | {"feature.mhc.epsilon": 1e-50}, "feature.mhc.epsilon", "must be greater than or equal to 0.000000000001"),
    (NATIVE, STREAMS | MUON, "feature.mhc.streams", "Muon would take the maps"),
    ("nam56r_native_dp_fp8", STREAMS, "feature.mhc.streams", "between FP8 layers have not been shown"),
    # tracking
    (NATIVE, {"feature.tracking.wandb_project": "p"}, "feature.tracking.tensorboard", "only beside TensorBoard"),
    (NATIVE, {"feature.tracking.wandb_project": "p"}, "feature.tracking.wandb_dir", "Weights & Biases without"),
    (NATIVE, {"feature.tracking.mlflow": "m"}, "feature.tracking.mlflow_experiment", "go together"),
    (NATIVE, {"feature.tracking.tensorboard": "t", "feature.tracking.wandb_name": "n"}, "feature.tracking.wandb_project", "keys of"),
    # fp8
    (NATIVE, {"feature.fp8.param_gather": True}, "feature.fp8.param_gather", "`param_gather` of a feature that is off"),
    ("nam56r_native_dp_fp8", {"model.blocks.mamba2.heads": 56}, "model.blocks.mamba2.heads", "which 16 does not divide"),
    ("nam56r_native_dp_fp8", {PADDED2: True} | STRIDED, PADDED2, "there is nothing to pad"),
    ("nam56r_native_dp_fp8", {PADDED2: True, "model.blocks.mamba2.heads": 56}, PADDED2, "Megatron's mixer cuts"),
    ("nam56r_native_dp_fp8", {PADDED2: True, "model.blocks.mamba2.heads": 56, "parallel.context": 2} | STRIDED, PADDED2, "context ranks"),
    ("nam56r_native_dp_fp8", KEPT | {"model.blocks.moe.grouped_gemm": False}, KEPT_KEY, "without grouped GEMM are in FP8"),
    ("llama_3_8b", {"feature.fp8.recipe": "tensorwise"} | KEPT, KEPT_KEY, "no experts to keep in bf16"),
    ("nam56r_native_dp_fp8", KEPT, KEPT_KEY, "CUDA graphs of parts of layers have not been tried"),
    ("nam56r_native_dp_fp8", {PADDED2: True, "model.blocks.mamba2.heads": 56, "feature.fp8.param_gather": True} | STRIDED, PADDED2,
     "one scale"),
    ("nam56r_native_dp_fp8", KEPT | {"feature.fp8.param_gather": True}, KEPT_KEY, "gathered in FP8 are FP8 in all parts"),
    (DESIGN, {"execution.mamba3.kernels": "naive", "execution.mamba3.keep_states": True}, "execution.mamba3.keep_states",
     "there are no chunks"),
    (DESIGN, {"execution.mamba3.kernels": "naive", "execution.mamba3.keep_prepared": True}, "execution.mamba3.keep_prepared",
     "keeps all that autograd needs"),
    (DESIGN, INPUTS | {"feature.fp8.recipe": "delayed"}, INPUTS_KEY, "delayed scaling keeps FP8 inputs by itself"),
    (DESIGN, INPUTS | {"feature.fp8.recipe": "blockwise"}, INPUTS_KEY, "not been tried with scaling `blockwise`"),
    (DESIGN, INPUTS | {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["layernorm"]}, INPUTS_KEY,
     "not been tried with recompute of parts of layers"),
    (DESIGN, INPUTS | {"feature.fp8.first_last_bf16": True, "feature.fp8.bf16_layers_at_start": 26, "feature.fp8.bf16_layers_at_end": 26,
                       "feature.mtp.depths": 0}, INPUTS_KEY, "no attention and no shared experts in FP8"),
    ("nam56r_native_dp_fp8", {INPUTS_KEY: True}, INPUTS_KEY, "not been tried with CUDA graphs of parts of layers"),
    (DESIGN, INPUTS | {"feature.lora.rank": 8}, INPUTS_KEY, "not been tried with adapters"),
    (DESIGN, INPUTS | {"model.pattern": "EM", "model.depth": 4, "model.substitute": [], "feature.mtp.depths": 0,
                       "model.blocks.moe.shared_expert_hidden_size": 0}, INPUTS_KEY, "no attention and no shared experts"),
    (DESIGN, RATES | {"parallel.tensor": 2}, KEPT_KEY, "cannot be multiplied apart"),
    (DESIGN, RATES | {"feature.fp8.recipe": "blockwise"}, KEPT_KEY, "has not been tried with FP8 scaled by blocks"),
    (DESIGN, DELAYED | {"schedule.save": "x", "schedule.save_interval": 5}, "feature.fp8.recipe", "as a pickle"),
    (DESIGN, DELAYED | {"schedule.load": "x"}, "feature.fp8.recipe", "as a pickle"),
    (DESIGN, DELAYED | {"schedule.eval_steps": 2}, "feature.fp8.recipe", "evaluations would change the scales"),
    (DESIGN, DELAYED | {"execution.mamba3.recompute": "in_proj"}, "feature.fp8.recipe", "a projection that is computed again"),
    (DESIGN, RATES | {"feature.lora.rank": 8}, KEPT_KEY, "has not been tried with adapters"),
    (DESIGN, RATES | {"model.blocks.mamba3.groups": 1, "model.blocks.mamba3.heads": 1, "model.blocks.mamba3.head_dim": 4},
     "model.blocks.mamba3.heads", "is 1032 wide, which 16"),
    (NATIVE, FLASH | {"precision.deterministic": True}, FLASH_KEY, "has not been tried with `precision.deterministic`"),
    (NATIVE, FLASH | GRAPHS, FLASH_KEY, "graphs of parts of layers"),
    (NATIVE, FLASH | {"parallel.context": 2}, FLASH_KEY, "not been tried with context ranks"),
    (NATIVE, FLASH | {"model.attention_dropout": 0.1}, FLASH_KEY, "not been tried with dropout"),
    (NATIVE, FLASH | WINDOWS, FLASH_KEY, "not been tried with a window"),
    (NATIVE, FLASH | SFT, FLASH_KEY, "not been tried with packed documents"),
    (NATIVE, FLASH | {"model.blocks.attention.head_dim": 192}, FLASH_KEY, "192 and 192 wide"),
    (DESIGN, FLASH | {"model.letters.A": "dsa", "model.substitute": [], "feature.mtp.depths": 0}, FLASH_KEY,
     "no layer has a core attention"),
    ("nam56r_native_dp_fp8", {"feature.fp8.recipe": "delayed", "feature.fp8.first_last_bf16": True},
     "feature.fp8.first_last_bf16", "delayed scaling excludes bf16 edge layers"),
    ("nam56r_native_dp_fp8", PLAIN_OPTIMIZER | {"feature.fp8.param_gather": True}, "feature.fp8.param_gather", "needs sharded"),
    ("nam56r_native_dp_fp8", {"feature.fp8.recipe": "delayed", "feature.recompute.granularity": "selective",
     "feature.recompute.modules": ["layernorm"]}, "feature.fp8.recipe", "excludes recompute of"),
    ("nam56r_native_dp_fp8", {"feature.fp8.first_last_bf16": True, "feature.fp8.bf16_layers_at_end": 53},
     "feature.fp8.bf16_layers_at_end", "more bf16 layers than the 52 of a pipeline stage"),
    ("nam56r_native_dp_fp8", {"model.hidden_size": 3592}, "model.hidden_size", "FP8 GEMMs need widths that 16 divides"),
    # Every matrix in FP8 as a rank has it.
    (FP8, {"model.letters.E": "mlp", "model.ffn_hidden_size": 1000, "feature.cuda_graphs.modules": ["attn"]}, "model.ffn_hidden_size",
     "not 1000 of `mlp.linear_fc1` on a rank"),
    (FP8, {B + "moe.expert_hidden_size": 904}, B + "moe.expert_hidden_size", "not 904 of `mlp.experts.linear_fc1` on a rank"),
    (FP8, {B + "moe.latent_size": 520}, B + "moe.latent_size", "not 520 of `mlp.fc1_latent_proj` on a rank"),
    (FP8, TP | {B + "moe.shared_expert_hidden_size": 1040}, B + "moe.shared_expert_hidden_size", "not 520 of `mlp.shared_experts."),
    (FP8, {B + "attention.head_dim": 33}, B + "attention.head_dim", "not 2376 of `self_attention.linear_qkv` on a rank"),
    (FP8, {"model.letters.A": "mla", "execution.mla.kernels": "megatron", B + "mla.kv_lora_rank": 72}, B + "mla.kv_lora_rank",
     "not 136 of `self_attention.linear_kv_down_proj` on a rank"),
    # fsdp
    (NATIVE, FSDP | PLAIN_OPTIMIZER, "feature.megatron_fsdp.enabled", "stands on the distributed optimizer"),
    (NATIVE, FSDP | {"parallel.pipeline": 2}, "parallel.pipeline", "no place for pipeline stages"),
    (NATIVE, FSDP | MUON, "feature.muon.enabled", "Muon does not run under `megatron_fsdp`"),
    # recompute
    (NATIVE, {"feature.recompute.layers": 2}, "feature.recompute.layers", "`layers` of a feature that is off"),
    (NATIVE, {"feature.recompute.granularity": "selective"}, "feature.recompute.modules", "recomputes `core_attn` silently"),
    (NATIVE, FULL | {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["moe"]},
     "feature.recompute.method", "belong to full recompute"),
    (NATIVE, {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["mla_up_proj"]},
     "feature.recompute.modules", "in a model without mla"),
    (NATIVE, {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["moe_act"],
     "model.blocks.moe.grouped_gemm": False}, "feature.recompute.modules", "only with grouped GEMM"),
    (NATIVE, {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["moe"], "feature.recompute.layers": 2},
     "feature.recompute.method", "belong to full recompute"),
    (NATIVE, FULL | {"feature.recompute.modules": ["moe"]}, "feature.recompute.modules", "belong to selective recompute"),
    (NATIVE, FULL | {"feature.recompute.layers": None}, "feature.recompute.method", "needs `method` and `layers`"),
    (NATIVE, FULL | {"feature.recompute.method": None}, "feature.recompute.method", "needs `method` and `layers`"),
    (NATIVE, FULL | {"feature.recompute.layers": 53}, "feature.recompute.layers", "exceed the longest stage of 52"),
    (DESIGN, FULL | {"execution.dsa.kernels": "megatron"}, "feature.recompute.granularity", "loses a shared top-k"),
    (DESIGN, FULL | {"feature.recompute.layers": 2}, "feature.recompute.layers", "Megatron recomputes MTP by single layers"),
]  # fmt: skip


# Neighbours: the last value that stands and the first that does not, and each clause of a condition alone.
# (base, what stands, key, value of it that is refused: ... without the key, None where there is none)
NAIVE3 = {"execution.mamba3.kernels": "naive"}
NEIGHBOURS = [
    (DESIGN, {B + "dsa.indexer_loss_coeff": 0.0, **UNLAPPED}, f"{OVERLAP}grad_reduce", True),
    (DESIGN, {B + "dsa.indexer_loss_coeff": 1e-9}, B + "dsa.indexer_loss_coeff", 0.0),
    (NATIVE, YARN, B + "attention.position_embedding", "none"),
    (NATIVE, YARN, B + "attention.rotary_percent", 0.5),
    (NATIVE, LEARNED, "model.learned_positions", 4095),
    (NATIVE, LEARNED, B + "attention.position_embedding", "rope"),
    (NATIVE, LEARNED, "feature.mtp.depths", 1),
    (NATIVE, YARN, "feature.mtp.depths", 1),
    (NATIVE, YARN | {"feature.yarn.beta_slow": 32.0}, "feature.yarn.beta_slow", 32.5),
    (NATIVE, LLAMA, B + "attention.position_embedding", "none"),
    (NATIVE, LLAMA, "feature.yarn.factor", 2.0),
    (DESIGN, YARN, "feature.llama_rope.factor", 2.0),
    (DESIGN, ALL_MLA | {"execution.mla.kernels": "megatron", B + "mla.q_lora_rank": None}, "execution.mla.kernels", "naive"),
    (DESIGN, ALL_MLA | {"execution.mla.kernels": "megatron", B + "mla.q_lora_rank": None}, "model.substitute", ...),
    (DESIGN, {"model.blocks.mla.qk_rope_head_dim": 32}, "model.blocks.mla.qk_rope_head_dim", 16),
    (NATIVE, {OVERLAP + "param_gather": False, OVERLAP + "grad_reduce": False}, OVERLAP + "param_gather", True),
    (NATIVE, FSDP | {STRATEGY: "optim", **UNLAPPED}, STRATEGY, "optim_grads"),
    (NATIVE, FSDP | {STRATEGY: "optim_grads", OVERLAP + "param_gather": False}, STRATEGY, "optim_grads_params"),
    (NATIVE, {"optim.min_lr": 3e-4}, "optim.min_lr", 3.1e-4),
    (NATIVE, {"optim.warmup_steps": 999}, "optim.warmup_steps", 1000),
    (NATIVE, {"model.hidden_size": 3584}, "model.hidden_size", 3588),
    (NATIVE, {"schedule.global_batch_size": 96}, "schedule.global_batch_size", 80),
    (NATIVE, {"schedule.stop_every": 5, "schedule.save": "/c", "schedule.save_interval": 1}, "schedule.save", ...),
    (NATIVE, {"schedule.save": "/c", "schedule.save_interval": 7}, "schedule.save_interval", ...),
    (NATIVE, TP | {"model.seq_length": 4098}, "model.seq_length", 4097),
    (NATIVE, {"parallel.context": 2, "model.seq_length": 4092}, "model.seq_length", 4094),
    (NATIVE, TP | {B + "attention.query_groups": 1}, B + "attention.query_groups", 7),
    (NATIVE, TP | {B + "attention.query_groups": 2}, B + "attention.query_groups", 7),
    (NATIVE, {B + "attention.head_dim": 62}, B + "attention.head_dim", 61),
    (NATIVE, INDEXED | {"data.split": "1,0,0"}, "data.split", "0,1,0"),
    (NATIVE, INDEXED | {"data.split": "0.5,0.25,0.25", "schedule.eval_steps": 1}, "data.split", "0.5,0,0.25"),
    (NATIVE, INDEXED | {"data.split": "99.5,0.5,0"}, "data.split", "99.,0.5,0"),
    (NATIVE, INDEXED, "data.split", "99,1"),
    (NATIVE, INDEXED, "data.split", "99,1,0,0"),
    (NATIVE, {B + "moe.top_k": 16}, B + "moe.top_k", 17),
    (NATIVE, {B + "moe.expert_bias": False, B + "moe.score_function": "softmax", B + "moe.top_k": 2}, B + "moe.top_k", 1),
    (NATIVE, {B + "moe.top_k": 1}, B + "moe.top_k", None),
    (NATIVE, {B + "moe.balancing": "none", B + "moe.aux_loss_coeff": 0.0}, B + "moe.aux_loss_coeff", 1e-9),
    (NATIVE, {"parallel.expert": 8}, B + "moe.experts", 12),
    (FP8, {"feature.cuda_graphs.impl": "none", B + "moe.expert_hidden_size": 904, KEPT_KEY: ["experts"]}, KEPT_KEY, []),
    (FP8, {B + "moe.expert_hidden_size": 912}, B + "moe.expert_hidden_size", 904),
    (FP8, {"model.hidden_size": 3600}, "model.hidden_size", 3592),
    (NATIVE, {"parallel.expert_tensor": 2}, B + "moe.expert_hidden_size", 895),
    (NATIVE, {"execution.moe.shared_overlap": True}, B + "moe.shared_expert_hidden_size", 0),
    (NATIVE, LOCAL, "parallel.expert", 2),
    (NATIVE, LOCAL | GRAPHS, "feature.cuda_graphs.modules", ["moe_router"]),
    (NATIVE, WHOLE, "cluster.nodes", 2),
    (NATIVE, WHOLE | {"schedule.train_steps": 4, "optim.warmup_steps": 1}, "feature.cuda_graphs.warmup_steps", 4),
    (NATIVE, WHOLE | STREAMS | {"feature.mhc.kernels": "fused"}, "feature.mhc.kernels", "naive"),
    (NATIVE, WEIGHED, "model.activation", "gelu"),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["moe_router", "moe_preprocess"]},
     "feature.cuda_graphs.modules", ["moe_preprocess"]),
    (NATIVE, GRAPHS | {"feature.cuda_graphs.modules": ["mamba"]} | {"feature.recompute.granularity": "selective",
     "feature.recompute.modules": ["core_attn"]}, "feature.cuda_graphs.modules", ["attn"]),
    (NATIVE, GRAPHS | {"feature.recompute.granularity": "selective", "feature.recompute.modules": ["moe_act"]},
     "feature.recompute.modules", ["core_attn"]),
    (NATIVE, FULL | {"feature.recompute.layers": 52}, "feature.recompute.layers", 53),
    (NATIVE, FULL | {"parallel.pipeline": 2, "feature.recompute.layers": 26}, "feature.recompute.layers", 27),
    (NATIVE, {B + "mamba2.groups": 7}, B + "mamba2.groups", 3),
    (NATIVE, {"execution.mamba2.strided": True}, B + "mamba2.heads", 63),
    (DESIGN, {B + "dsa.top_k": 4096}, B + "dsa.top_k", 4097),
    (DESIGN, {B + "dsa.indexer_head_dim": 64}, B + "dsa.indexer_head_dim", 32),
    (DESIGN, {B + "mla.kv_lora_rank": 128}, B + "mla.kv_lora_rank", 96),
    (DESIGN, {B + "m2rnn.k_dim": 48}, B + "m2rnn.k_dim", 40),
    (DESIGN, {B + "m2rnn.v_dim": 32}, B + "m2rnn.v_dim", 64),
    (DESIGN, {"execution.m2rnn.kernels": "naive", B + "m2rnn.k_dim": 40, B + "m2rnn.v_dim": 8}, "execution.m2rnn.kernels", "fused"),
    (DESIGN, {B + "mamba3.rope_fraction": 1.0}, B + "mamba3.rope_fraction", 1.01),
    (DESIGN, {B + "mamba3.head_dim": 16}, B + "mamba3.head_dim", 8),
    (DESIGN, {B + "mamba3.state_dim": 32}, B + "mamba3.state_dim", 16),
    (DESIGN, {B + "mamba3.state_dim": 64}, B + "mamba3.state_dim", 96),
    (DESIGN, {"execution.mamba3.chunk": 32}, "execution.mamba3.chunk", 64),
    (DESIGN, {"execution.mamba3.chunk": 4}, "execution.mamba3.chunk", 2),
    (DESIGN, {B + "mamba3.mimo_rank": 1, "execution.mamba3.chunk": 128}, "execution.mamba3.chunk", 256),
    (DESIGN, {B + "mamba3.mimo_rank": 2}, B + "mamba3.mimo_rank", 3),
    (DESIGN, NAIVE3 | {B + "mamba3.head_dim": 8, "execution.mamba3.chunk": 64}, "execution.mamba3.kernels", "fused"),
    (DESIGN, {"model.seq_length": 2**19 - 8}, "model.seq_length", 2**19),
    ("nam56r_native_dp_fp8", EDGES | {"feature.fp8.bf16_layers_at_end": 52}, "feature.fp8.bf16_layers_at_end", 53),
    ("nam56r_native_dp_fp8", {"feature.fp8.param_gather": True}, "feature.distributed_optimizer.enabled", False),
    ("nam56r_native_dp_fp8", {"feature.mhc.streams": 1}, "feature.mhc.streams", 2),
    (NATIVE, STREAMS, "feature.fp8.recipe", "tensorwise"),
    ("nam56r_native_dp_fp8", {"model.hidden_size": 3600}, "model.hidden_size", 3592),
]  # fmt: skip


def test_no_folder_of_a_recipe_is_an_address():
    tracked = {f"feature.tracking.{name}": f"s3://{name}" for name in ("tensorboard", "wandb_dir", "mlflow")}
    tracked |= {
        "feature.tracking.wandb_project": "p",
        "feature.tracking.wandb_name": "n",
        "feature.tracking.mlflow_experiment": "e",
    }
    addresses = {"data.path": "s3://x", "data.tokenizer": "s3://t", "data.cache": "s3://c", **tracked}
    said = {p.key for p in problems_of(NATIVE, INDEXED | addresses) if p.law == "object-storage"}
    assert said == {key for key, value in addresses.items() if "://" in value} - {"feature.tracking.mlflow"}
    (problem,) = problems_of(NATIVE, APART | {"data.valid_parts": [{"weight": 1, "path": "gs://v"}]})
    assert problem.key == "data.valid_parts[0].path"


def test_ways_out_of_a_graph_name_parts_that_are_there():
    for pattern, part in ("EM", "mamba"), ("AEM", "attn"):
        for changes in GRAPHS | {"feature.cuda_graphs.modules": []}, WHOLE | {"schedule.eval_steps": 1}:
            (problem,) = problems_of(NATIVE, changes | {"model.pattern": pattern, "model.depth": len(pattern)})
            assert f"feature.cuda_graphs.modules=[{part}]`" in problem.hint


@pytest.mark.parametrize("case", NEIGHBOURS, ids=[f"{c[2]} {c[3]}" for c in NEIGHBOURS])
def test_the_last_that_stands_and_the_first_that_does_not(case):
    base, stands, key, value = case
    translated(base, stands)
    if value is not None:
        beyond = {k: v for k, v in stands.items() if k != key} | ({} if value is ... else {key: value})
        with pytest.raises(Refused):
            translated(base, beyond)


@pytest.mark.parametrize("case", REFUSALS, ids=[f"{c[2]}: {c[3]}"[:90] for c in REFUSALS])
def test_refusal(case):
    base, changes, key, part = case
    with pytest.raises(Refused) as error:
        translated(base, changes)
    found = [p for p in error.value.problems if p.key == key and part in p.message]
    assert len(found) == 1, error.value.problems


@pytest.mark.parametrize(
    ("base", "kind", "key", "width", "share"),
    [
        (DESIGN, "mamba3", "rope_fraction", ("state_dim", 128), 0.3),
        (DESIGN, "mamba3", "rope_fraction", ("state_dim", 128), 0.999),
        (
            NATIVE,
            "attention",
            "rotary_percent",
            ("head_dim", 100),
            0.57,
        ),  # of which 58 columns are 57.99999999999999, and 57 to Megatron
        (NATIVE, "attention", "rotary_percent", ("head_dim", 100), 0.29),
    ],
)
def test_a_share_of_columns_is_taken_as_it_is_or_the_nearest_are_named(base, kind, key, width, share):
    at = f"model.blocks.{kind}."
    with pytest.raises(Refused) as error:
        translated(base, {at + width[0]: width[1], at + key: share})
    (problem,) = error.value.problems
    near = [float(word) for word in problem.hint.removesuffix(" fits").split(" or ")]
    assert problem.key == at + key and near[0] < share < near[-1] and near[-1] - near[0] < 2.1 / width[1]
    for value in near:
        block = translated(base, {at + width[0]: width[1], at + key: value}).plan.recipe.blocks.of(kind)
        assert (2 * block.angles if kind == "mamba3" else block.turned) == pytest.approx(value * width[1], abs=1e-9)


@pytest.mark.slow
def test_what_nobody_has_tried_is_tried_by_whoever_says_why():
    """Each law is met by a case above; waived, it is gone, the rest is refused as before, and the run says so."""
    met, stands = set(), 0
    for base, changes, *_ in REFUSALS:
        before = problems_of(base, changes)
        if laws_met := {p.law for p in before if p.law in book.WAIVABLE}:
            met |= laws_met
            waived = changes | {"allow": dict.fromkeys(laws_met, "we try it")}
            after = problems_of(base, waived)
            assert [p.message for p in after] == [p.message for p in before if p.law not in book.WAIVABLE]
            if not after:
                stands += 1
                p = translated(base, waived).plan
                assert f"[untried: {', '.join(sorted(laws_met))}]" in identity(p)
                assert len([line for line in report.tries(p) if line.endswith("we try it)")]) == len(laws_met)
    assert met == set(book.WAIVABLE) and stands > 20


def test_groups_that_lie_on_several_hosts_are_said():
    def said(nodes, gpus, **degrees):
        layout = {f"parallel.{name}": degree for name, degree in degrees.items()}
        hosts = {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus, "schedule.global_batch_size": 4 * nodes * gpus}
        return [line.partition(" are")[0] for line in report.over_hosts(translated(NATIVE, hosts | layout).plan)]

    assert said(2, 8, expert=16) == ["over hosts: expert groups"] and not said(1, 16, expert=16)
    assert not said(2, 8, expert=8, context=4, tensor=2, sequence=True)
    assert said(2, 2, context=2, tensor=2, sequence=True) == ["over hosts: context groups"]
    assert said(2, 6, context=4) == ["over hosts: context groups"]


@pytest.mark.parametrize(
    ("law", "said", "hint"),
    [
        ("whole-step-hosts", "nothing in this recipe needs `whole-step-hosts`", "take it out"),
        ("whole-step-host", "there is no law `whole-step-host` that can be waived", "`allow.whole-step-hosts`?"),
        ("gdn-graphs", "there is no law `gdn-graphs` that can be waived", "`allow.kind-untried`?"),  # its name today
    ],
)
def test_a_waiver_of_nothing_is_refused(law, said, hint):
    (problem,) = problems_of(NATIVE, {"allow": {law: "why"}})
    assert (problem.message, problem.key, problem.hint) == (said, f"allow.{law}", hint)


def test_a_substitute_of_no_layer_is_refused():
    with pytest.raises(Refused, match="must have at least 1, not 0"):
        load(NATIVE, ["model.substitute=[{letter: M, ranks: [], kind: gdn}]"])


def test_a_law_is_waived_on_the_command_line():
    words = [f"{key}={value}" for key, value in {**WHOLE, "model.hidden_dropout": 0.1}.items()]
    with pytest.raises(Refused, match="not been tried with dropout"):
        translate(load(NATIVE, words))
    assert translate(load(NATIVE, [*words, "allow.whole-step-dropout=to see"])).plan.recipe.allow == {
        "whole-step-dropout": "to see"
    }


@pytest.mark.parametrize("gemm", ["transformer_engine", "torch", "quack"])
@pytest.mark.parametrize("change", [{"parallel.expert": 2}, {"model.blocks.moe.latent_size": 512}], ids=str)
def test_the_local_dispatchers_hint_is_all_there_is_to_do(change, gemm):
    changes = LOCAL | {EXPERT_GEMM: gemm} | change
    with pytest.raises(Refused) as error:
        translated(NATIVE, changes)
    (problem,) = error.value.problems
    said = dict(word.split("=") for word in re.findall(r"`([^`]+=[^`]+)`", problem.hint))
    assert translated(NATIVE, changes | said)


def test_every_finding_is_said_at_once():
    found = refused(
        NATIVE, {"parallel.tensor": 3, "optim.min_lr": 1.0, "model.blocks.moe.top_k": 17, "data.path": "/d"}
    )
    assert {"cluster.gpus_per_node", "optim.min_lr", "model.blocks.moe.top_k", "data.path"} <= found.keys()


# Deterministic runs and overlays of layouts ---------------------------------------------------------------------------


def test_a_deterministic_run_says_so_to_megatron_and_to_its_libraries():
    plain, exact = lowered("nam56r"), lowered("nam56r", "precision.deterministic=true")
    assert not plain.by_name["deterministic_mode"].value and exact.by_name["deterministic_mode"].value
    added = {e.name: e.value for e in exact.env if e not in plain.env}
    assert added["NCCL_ALGO"] == "Ring" and added["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0" and len(added) == 4


def test_a_deterministic_run_takes_no_compiled_loss():
    with pytest.raises(Refused, match="compiled cross entropy is not deterministic"):
        lowered("nam56r", "precision.deterministic=true", "precision.cross_entropy=compiled")


def test_an_overlay_that_speaks_of_kinds_that_a_model_does_not_have_is_laid_without_them():
    """Their keys alone were taken for a kind's, and all others missed."""
    dense = load("llama_3_8b", ("+overlay=fused",))
    assert (dense.precision.cross_entropy, dense.model.blocks.mamba2, dense.model.blocks.moe) == ("fused", None, None)
    alone = ("+overlay=fused", "model.pattern=AM", "model.depth=2", "lane.blocks.M=mamba2", "lane.name=mine")
    with pytest.raises(Refused, match="nothing says what that is"):
        load("llama_3_8b", alone)
    with pytest.raises(Refused, match="3 keys are missing"):  # of a kind that a person speaks of
        load("llama_3_8b", ("+model.blocks.mamba2.heads=8", *alone))


@pytest.mark.parametrize("overlay", ["ep", "tp_sp_ep"])
def test_experts_on_several_ranks_get_a_dispatcher_that_sends_tokens(overlay):
    """The fused overlay's own does not, and was refused; whose counts are on the host takes Megatron's."""
    found = lowered("nam56r_fused", f"+overlay={overlay}")
    assert found.plan.recipe.blocks.moe.dispatcher == "gathered" and found.plan.recipe.blocks.moe.on_gpu
    assert lowered("nam56r", f"+overlay={overlay}").plan.recipe.blocks.moe.dispatcher == "alltoall"
    assert found.plan.recipe.blocks.moe.permute_fusion
