"""Where each key goes, at values that are all different and none a default: what two swapped rows would not survive.

The second list beside the rows: written from what the keys mean, and read against Megatron by test_verify.py.
"""

import pytest
from presets import lowered

from nam_megatron.blocks.kinds import KINDS, LETTERS
from nam_megatron.compile.plan import plan
from nam_megatron.errors import Refused
from nam_megatron.recipe import Recipe, Substitute, config_at, from_tree, to_tree
from nam_megatron.targets import current
from nam_megatron.verify import reviewed_fields
from nam_megatron.words.setting import CONNECTIONS, Env

# name -> (preset, what makes the rest legal, "key value argument", arguments that are computed from these)
ODD = {
    "as designed": (
        "nam56r",
        ("execution.mla.kernels=megatron", "execution.dsa.kernels=megatron", "data=indexed", "feature.fim.enabled=true"),
        """
        model.hidden_size 1824 hidden_size
        model.num_attention_heads 57 num_attention_heads
        model.ffn_hidden_size 2000 ffn_hidden_size
        model.seq_length 2048 seq_length
        model.vocab_size 32768 vocab_size
        model.rotary_base 10007 rotary_base
        model.init_std 0.013 init_method_std
        model.blocks.mla.q_lora_rank 40 q_lora_rank
        model.blocks.mla.kv_lora_rank 44 kv_lora_rank
        model.blocks.mla.qk_head_dim 56 qk_head_dim
        model.blocks.mla.qk_rope_head_dim 26 qk_pos_emb_head_dim
        model.blocks.mla.v_head_dim 72 v_head_dim
        model.blocks.dsa.indexer_heads 12 dsa_indexer_n_heads
        model.blocks.dsa.indexer_head_dim 80 dsa_indexer_head_dim
        model.blocks.dsa.top_k 100 dsa_indexer_topk
        model.blocks.dsa.indexer_loss_coeff 0.007 dsa_indexer_loss_coeff
        model.blocks.moe.experts 24 num_experts
        model.blocks.moe.top_k 3 moe_router_topk
        model.blocks.moe.expert_hidden_size 640 moe_ffn_hidden_size
        model.blocks.moe.shared_expert_hidden_size 704 moe_shared_expert_intermediate_size
        model.blocks.moe.expert_bias_update_rate 0.004 moe_router_bias_update_rate
        model.blocks.moe.router_dtype fp64 moe_router_dtype
        model.blocks.moe.capacity_factor 1.25 moe_expert_capacity_factor
        feature.mtp.loss_weight 0.23 mtp_loss_scaling_factor
        optim.lr 0.0011 lr
        optim.min_lr 0.00013 min_lr
        optim.decay inverse-square-root lr_decay_style
        optim.warmup_steps 17 lr_warmup_iters
        optim.weight_decay 0.019 weight_decay
        optim.beta1 0.83 adam_beta1
        optim.beta2 0.87 adam_beta2
        optim.eps 3e-07 adam_eps
        optim.clip_grad 0.77 clip_grad
        schedule.micro_batch_size 2 micro_batch_size
        schedule.global_batch_size 48 global_batch_size
        schedule.train_steps 70 train_iters
        schedule.decay_steps 61 lr_decay_iters
        schedule.seed 4321 seed
        schedule.eval_steps 6 eval_iters
        schedule.eval_interval 29 eval_interval
        schedule.log_interval 5 log_interval
        schedule.save /s save
        schedule.save_interval 13 save_interval
        schedule.load /l load
        schedule.stop_every 31 exit_interval
        schedule.timeout_minutes 9 distributed_timeout_minutes
        schedule.steady_timeout_seconds 90 distributed_timeout_seconds_after_init
        schedule.manual_gc_interval 23 manual_gc_interval
        data.split '90,9,1' split
        data.tokenizer /t tokenizer_model
        data.workers 7 num_workers
        feature.fim.rate 0.21 fim_rate
        feature.fim.spm_rate 0.34 fim_spm_rate
        feature.fim.prefix_token p fim_prefix_token
        feature.fim.middle_token m fim_middle_token
        feature.fim.suffix_token s fim_suffix_token
        feature.fim.pad_token q fim_pad_token
        feature.fim.eod_token e fim_eod_token
        """,
        {"data.path=/d": {"data_path": ("/d",), "mock_data": False, "fim_data": True, "tokenizer_type": "HuggingFaceTokenizer"},
         "feature.mtp.depths=2": {"max_position_embeddings": 2048, "padded_vocab_size": 32768, "manual_gc": True},
         "model.blocks.moe.aux_loss_coeff=0.0006": {"moe_aux_loss_coeff": (0.0006,)}},
    ),
    "native": (
        "nam56r_native_dp",
        ("cluster=h200_2x8", "cluster.nodes=3", "parallel.sequence=true", "execution.moe.dispatcher=allgather", "lane.blocks.R=mamba2"),
        """
        model.hidden_dropout 0.11 hidden_dropout
        model.attention_dropout 0.12 attention_dropout
        model.blocks.attention.head_dim 40 kv_channels
        model.blocks.attention.query_groups 14 num_query_groups
        model.blocks.attention.qk_norm true qk_layernorm
        model.blocks.mamba2.heads 80 mamba_num_heads
        model.blocks.mamba2.head_dim 32 mamba_head_dim
        model.blocks.mamba2.state_dim 96 mamba_state_dim
        model.blocks.mamba2.groups 16 mamba_num_groups
        parallel.tensor 2 tensor_model_parallel_size
        parallel.pipeline 3 pipeline_model_parallel_size
        parallel.expert 4 expert_model_parallel_size
        """,
        {"schedule.global_batch_size=48": {"group_query_attention": True, "sequence_parallel": True, "expert_tensor_parallel_size": 1,
         "context_parallel_size": 1, "use_distributed_optimizer": True, "moe_token_dispatcher_type": "allgather"}},
    ),
    "fp8": (
        "nam56r_native_dp_fp8",
        ("feature.fp8.first_last_bf16=true", "feature.cuda_graphs.impl=transformer_engine", "feature.mtp.depths=1"),
        """
        feature.fp8.recipe tensorwise fp8_recipe
        feature.fp8.format e4m3 fp8
        feature.fp8.bf16_layers_at_start 2 num_layers_at_start_in_bf16
        feature.fp8.bf16_layers_at_end 5 num_layers_at_end_in_bf16
        feature.cuda_graphs.warmup_steps 7 cuda_graph_warmup_steps
        """,
        {"feature.cuda_graphs.modules=[mamba]": {"cuda_graph_modules": ("mamba",), "cuda_graph_impl": "transformer_engine",
         "first_last_layers_bf16": True, "te_rng_tracker": True}},
    ),
    "muon": (
        "nam56r_native_dp",
        ("optim=muon", "feature.muon.nesterov=false", "feature.recompute.granularity=full"),
        """
        feature.muon.momentum 0.91 muon_momentum
        feature.muon.ns_steps 7 muon_num_ns_steps
        feature.muon.extra_scale_factor 0.31 muon_extra_scale_factor
        feature.muon.scale_mode unit_rms_norm muon_scale_mode
        feature.recompute.method block recompute_method
        feature.recompute.layers 11 recompute_num_layers
        """,
        {"parallel.context=2": {"optimizer": "muon", "muon_nesterov": False, "recompute_granularity": "full", "context_parallel_size": 2}},
    ),
}  # fmt: skip


def read(word: str) -> object:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word, word.strip("'"))


def odd(name: str):
    preset, legal, table, computed = ODD[name]
    rows = [row.split() for row in table.strip().splitlines()]
    return rows, computed, lowered(preset, *legal, *computed, *(f"{key}={value}" for key, value, _ in rows))


@pytest.mark.parametrize("name", ODD)
def test_each_value_arrives_where_it_means_something(name):
    rows, computed, lowering = odd(name)
    expected = {argument: read(value) for _, value, argument in rows} | {
        k: v for more in computed.values() for k, v in more.items()
    }
    assert {argument: lowering.by_name[argument].value for argument in expected} == expected
    keys = {argument: key for key, _, argument in rows}
    assert {argument: lowering.by_name[argument].key for argument in keys} == keys


def test_no_two_values_are_equal_and_none_is_the_default():
    """Else a swap could go unseen, or a drop."""
    for name in ODD:
        rows, _, lowering = odd(name)
        numbers = [value for _, value, _ in rows if value != "true"]
        assert len(set(numbers)) == len(numbers)
        defaults = {s.name: lowering.target.by_dest[s.name].default for s in lowering.settings}
        assert [argument for _, value, argument in rows if defaults[argument] == read(value)] == []


def test_every_config_that_decides_what_is_trained_is_read():
    """Of the others (how it logs, where it saves) only the fields of keys are."""
    decide = {
        "transformer", "model", "optimizer", "ddp", "train", "scheduler", "rerun_state_machine", "rng", "validation",
    }  # fmt: skip
    assert set(current().configs) == decide
    assert {
        field.split(".")[0] for field in (*reviewed_fields(current())[0], *reviewed_fields(current())[1])
    } <= decide | {"args"}


# A kind is what it says ----------------------------------------------------------------------------------------------------------------

STANDS = {  # kind -> (Megatron's symbol, where it may stand)
    "attention": ("*", "A"), "mla": ("+", "A"), "dsa": ("D", "A"), "moe": ("E", "E"), "mlp": ("-", "E"), "mamba2": ("M", "MR"),
    "gdn": ("G", "MR"), "mamba3": ("M", "MR"), "m2rnn": ("M", "R"),
}  # fmt: skip


def test_every_kind_has_its_symbol_and_its_letters():
    found = {
        kind: (cls.symbol, "".join(letter for letter in "AEMR" if kind in LETTERS[letter]))
        for kind, cls in KINDS.items()
    }
    assert found == STANDS


def test_a_stored_lane_may_leave_a_letter_to_the_model():
    tree = to_tree(lowered("nam56r_native_dp").plan.recipe)
    assert tree["lane"]["blocks"].pop("R") == "mamba2"
    tree["model"]["letters"]["R"] = "mamba2"
    assert [layer.kind for layer in plan(from_tree(tree)).layers if layer.letter == "R"] == ["mamba2"] * 4
    del tree["lane"]["tensor"]
    with pytest.raises(Refused):
        from_tree(tree)


@pytest.mark.parametrize(
    ("value", "never", "allowed", "forbidden"),
    [(None, None, (None, "1", "8"), ()), (None, "1", (None, "8"), ("1",)), ("1", None, ("1",), (None, "8", ""))],
)
def test_what_a_platform_may_force(value, never, allowed, forbidden):
    """How many connections a device has, where a plan wants it unset, and nothing else."""
    wanted = Env(CONNECTIONS, value, "why", never=never)
    assert [wanted.allows(here) for here in (*allowed, *forbidden)] == [True] * len(allowed) + [False] * len(forbidden)
    assert not Env("NCCL_ALGO", None, "why").allows("Ring") and Env("NCCL_ALGO", "Ring", "why").allows("Ring")
    for before in ({}, {CONNECTIONS: "32", "OTHER": "x"}):
        environ = dict(before)
        wanted.put(environ)
        assert environ.get(CONNECTIONS) == value and environ.get("OTHER") == before.get("OTHER")
        assert (CONNECTIONS in environ) == (value is not None)


def test_the_section_of_a_key():
    assert config_at(()) is Recipe
    assert [
        config_at(loc) for loc in (("nope",), ("nope", "model"), ("model", "depth"), ("model", "nope", "blocks"))
    ] == [None] * 4
    assert config_at(("model", "substitute", 0)) is config_at(("model", "substitute")) is Substitute
