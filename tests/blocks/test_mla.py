"""Our MLA layer inside Megatron's real HybridModel on a CPU, against the stock layer; and its decoding.

kernel.py is checked by tests/gpu/test_mla.py, which this file also runs in Triton's interpreter.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
import interpreter
import megatron.core.tensor_parallel.random as rng
from harness import Case, RankFailed, on_ranks, recipe_of, train
from megatron.core.packed_seq_params import PackedSeqParams

from nam_megatron.blocks.mla import naive

CASE = Case("+-+")
YARN = dict(rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=16, mscale=1.0)
YARN |= dict(mscale_all_dim=0.5)
MTP = Case("+-+/+-")
BARE = replace(CASE, latent_norm=False, config=dict(qk_layernorm=False))
RECOMPUTED = dict(recompute_granularity="selective", recompute_modules=["mla_up_proj", "layernorm"])


@pytest.fixture
def ours(monkeypatch):
    """Slot `+` holds our layer."""

    def install(kernels: str = "naive") -> None:
        def recipe(*args, **kwargs):
            made = recipe_of(*args, **kwargs)
            harness.say(made, "mla", kernels=kernels)
            return made

        monkeypatch.setattr(harness, "recipe_of", recipe)

    # Megatron's checkpoints keep the GPU's random state; nothing here is random.
    monkeypatch.setattr(rng, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(rng, "_set_cuda_rng_state", lambda *_, **__: None)
    install()
    return install


@pytest.fixture(scope="module")
def stock():
    """One step with Megatron's own layers, by configuration."""
    cases = {"rope": CASE, "yarn": replace(CASE, config=YARN), "no latent norms": BARE, "mtp": MTP}
    return {name: train(case) for name, case in cases.items()}


def same(found, wanted):
    assert found.gradients.keys() == wanted.gradients.keys(), "other checkpoint names"
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-6)
    for key, gradient in wanted.gradients.items():
        error = (found.gradients[key] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"gradient of {key}: off by {error:.1e}"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("wanted", "case"),
    [
        ("rope", CASE),
        ("rope", replace(CASE, tp=2)),
        ("rope", replace(CASE, cp=2)),
        ("rope", replace(CASE, config=RECOMPUTED)),
        ("yarn", replace(CASE, tp=2, config=YARN | RECOMPUTED)),
        ("no latent norms", BARE),
        ("mtp", replace(MTP, pattern="+-|+/+-", pp=2)),
    ],
    ids=["tp1", "tp2_sp", "cp2", "recomputed", "yarn_tp2_sp_recomputed", "no_latent_norms", "mtp_pp2"],
)
def test_it_is_megatrons_model(ours, stock, wanted, case):
    same(train(case), stock[wanted])


def test_queries_without_a_latent_have_no_norm_of_their_own(monkeypatch):
    """Stock Megatron fuses one, of the whole width, into their projection; both layouts are one model."""

    def recipe(*args, **kwargs):
        made = recipe_of(*args, **kwargs)
        harness.say(made, "mla", q_lora_rank=None)
        return made

    monkeypatch.setattr(harness, "recipe_of", recipe)
    case = replace(CASE, config=dict(q_lora_rank=None))
    wanted = train(case)
    names = {key.partition("self_attention.")[2] for key in wanted.gradients if "self_attention" in key}
    down, up = "linear_kv_down_proj.weight", "linear_kv_up_proj.weight"
    assert names == {"linear_q_proj.weight", down, up, "kv_layernorm.weight", "linear_proj.weight"}
    same(train(replace(case, tp=2)), wanted)


def test_weights_that_are_only_read_are_waited_for(ours):
    """Megatron's DDP with overlapped all-gather waits in the pre-forward hook of each module that has parameters."""

    def job(rig):
        block, waited = rig.model.decoder.layers[0], set()
        owners = {name: m for name, m in block.named_modules() if list(m.parameters(recurse=False))}
        for name, module in owners.items():
            module.register_forward_pre_hook(lambda *_, name=name: waited.add(name))
        block(torch.zeros(4, 1, 64), None)
        return set(owners), waited

    ((owners, waited),) = on_ranks(CASE, job)
    assert owners == waited and "self_attention.kv_layernorm" in owners


def attention(rig):
    return rig.model.decoder.layers[0].self_attention


@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences_start_at_zero(ours, padded):
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=7, max_seqlen_kv=7)
    if padded:
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = ends
        packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    x = torch.randn(13, 1, 64, generator=torch.Generator().manual_seed(6))

    def job(rig):
        whole = attention(rig).get_query_key_value_tensors(x, packed_seq_params=packed)[:3]
        parts = [attention(rig).get_query_key_value_tensors(part)[:3] for part in x.split([5, 1, 7])]
        return [t.detach() for t in whole], [torch.cat(p).detach() for p in zip(*parts, strict=True)]

    ((whole, parts),) = on_ranks(CASE, job)
    for packed_part, part in zip(whole, parts, strict=True):
        torch.testing.assert_close(packed_part, part.squeeze(1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_positions_under_context_parallelism_cover_each_sequence_once(size):
    ends = torch.tensor([0, 8, 24, 32])
    ranks = [naive.packed_positions(ends, 32 // size, 99, rank, size) for rank in range(size)]
    for start, end in itertools.pairwise(ends):
        part = torch.cat([r[start // size : end // size] for r in ranks])
        assert sorted(part.tolist()) == list(range(end - start))
    if size == 2:
        assert ranks[0][4:12].tolist() == [0, 1, 2, 3, 12, 13, 14, 15], "the first chunk and the last, as TE splits"


def test_tokens_behind_the_last_sequence_stay_inside_the_table():
    assert naive.packed_positions(torch.tensor([0, 3]), 8, 4).tolist() == [0, 1, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (dict(layernorm_zero_centered_gamma=True), "centred at zero"),
        (dict(rotary_percent=0.5), "part of the rope head"),
    ],
)
def test_a_config_that_no_recipe_leads_to_is_our_mistake(ours, config, said):
    with pytest.raises(RankFailed, match=f"AssertionError: our projections do not serve .*{said}"):
        on_ranks(replace(CASE, config=config), lambda rig: None)


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    interpreter.passes("tests/gpu/test_mla.py")
