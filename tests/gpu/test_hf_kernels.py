"""Our kernels inside an exported model against its plain torch: whole passes, prefills, steps, gradients.

With TRITON_INTERPRET=1 the same on a CPU, where no step is captured (tests/blocks/test_interpreted.py does that).
"""

import copy
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from nam_megatron.blocks.mamba3 import naive
from nam_megatron.blocks.mamba3.step import step
from nam_megatron.errors import Refused
from nam_megatron.generate import Options, decode
from nam_megatron.hf import fused
from nam_megatron.hf.fused import fuse
from nam_megatron.hf.model.configuration_nam import NamConfig
from nam_megatron.hf.model.modeling_nam import Dsa, Experts, M2Rnn, Mamba3, NamCache, NamForCausalLM

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"

SIZES = {
    "attention": {
        "head_dim": 16, "query_groups": 2, "qk_norm": True, "qkv_bias": False, "output_gate": False, "rotary_dim": 16,
        "window": 24, "unwindowed_every": 0,
    },
    "mla": {
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16, "latent_norm": True,
        "latent_norm_epsilon": 1e-5,
    },
    "dsa": {"indexer_heads": 2, "indexer_head_dim": 32, "top_k": 12},
    "moe": {
        "experts": 5, "top_k": 2, "expert_hidden_size": 24, "shared_expert_hidden_size": 16, "shared_expert_gate": False,
        "score_function": "sigmoid", "expert_bias": True, "pre_softmax": False, "routed_scaling": 1.5, "groups": 1,
        "chosen_groups": 1, "latent_size": 0, "router_dtype": "fp32",
    },
    "mlp": {},
    "mamba2": {"heads": 4, "head_dim": 16, "state_dim": 16, "groups": 2, "conv_width": 4},
    "gdn": {"key_heads": 2, "key_head_dim": 16, "value_heads": 4, "value_head_dim": 16, "conv_width": 4},
    "mamba3": {"heads": 4, "head_dim": 16, "state_dim": 32, "groups": 2, "mimo_rank": 4, "angles": 8},
    "m2rnn": {"k_dim": 16, "v_dim": 16, "heads": 3, "conv_width": 4},
}  # fmt: skip
AUTHOR = ["dsa", "moe", "mamba3", "dsa", "m2rnn", "mla", "moe"]
NATIVE = ["attention", "moe", "mamba2", "attention", "mlp", "gdn"]


if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))
    import interpreter

    @pytest.fixture(autouse=True)
    def mended(monkeypatch):
        interpreter.mend(monkeypatch)


def config(kinds: list[str], **more) -> NamConfig:
    used = {*kinds, *more.get("mtp_kinds", ())} | ({"mla"} if "dsa" in kinds else set())
    sources = [None if kind != "dsa" or i == kinds.index("dsa") else kinds.index("dsa") for i, kind in enumerate(kinds)]
    return NamConfig(
        layer_kinds=kinds, index_sources=sources, vocab_size=96, hidden_size=64, ffn_hidden_size=48, num_attention_heads=4,
        max_position_embeddings=512, learned_positions=0, normalization="RMSNorm", norm_epsilon=1e-5, zero_centered_norms=False,
        rotary_base=10000,
        **{kind: SIZES[kind] for kind in SIZES if kind in used}, **{"linear_bias": False, "activation": "squared_relu"} | more,
    )  # fmt: skip


def drawn(made: NamConfig, dtype: torch.dtype = torch.bfloat16) -> NamForCausalLM:
    torch.manual_seed(0)
    model = NamForCausalLM(made)
    for name, parameter in model.named_parameters():
        wide = parameter.dim() > 1 and "mimo" not in name
        parameter.data = torch.randn_like(parameter) * (parameter.size(-1) ** -0.5 if wide else 0.3)
        if "norm" in name or "mimo" in name:
            parameter.data += 1
        kept = parameter.dtype == torch.float32 and any(key in name for key in model._keep_in_fp32_modules_strict)
        parameter.data = parameter.data.to(DEVICE, torch.float32 if kept or name.endswith("mixer.D") else dtype)
    return model.eval()


def both(kinds: list[str], **more) -> tuple[NamForCausalLM, NamForCausalLM]:
    plain = drawn(config(kinds, **more))
    model = copy.deepcopy(plain)
    fuse(model)
    return plain, model


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 96, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor, least: float = 0.999) -> None:
    """Each position's logits point the same way, but where a rounding has turned a choice."""
    cosine = torch.nn.functional.cosine_similarity(got.float(), want.float(), dim=-1).flatten()
    assert got.isfinite().all() and cosine.median() > least, cosine.sort().values[:5]


@pytest.fixture
def unplain(monkeypatch):
    """Plain torch where kernels have a part is an error from then on."""

    def stop(*_, **__):
        raise AssertionError("plain torch has computed what a kernel should")

    def begin():
        for kind, part in ((Dsa, "attended"), (Experts, "forward"), (Mamba3, "mix"), (M2Rnn, "scan")):
            monkeypatch.setattr(kind, part, stop)

    return begin


@pytest.mark.parametrize("length", [2, 70] if INTERPRETED else [2, 70, 200])
@pytest.mark.parametrize("kinds", [AUTHOR, NATIVE], ids=["author", "native"])
@torch.no_grad()
def test_a_whole_pass(kinds, length, unplain):
    plain, model = both(kinds)
    tokens = random(2, length)
    want = plain(tokens).logits
    unplain()
    close(model(tokens).logits, want)


@torch.no_grad()
def test_predictions_ahead(unplain):
    plain, model = both(["dsa", "moe"], mtp_kinds=["dsa", "mamba3", "moe"], mtp_depths=1)
    tokens = random(1, 33)
    want = plain(tokens, mtp=True).hidden_states[0]
    unplain()
    close(model(tokens, mtp=True).hidden_states[0], want, least=0.995)


GATED = {"activation": "quick_geglu", "glu_offset": 1.0, "activation_clamp": 0.5, "linear_bias": True}


@pytest.mark.parametrize(
    ("kind", "more"), [*((kind, {}) for kind in ("dsa", "moe", "mamba3", "m2rnn")), ("moe", GATED)], ids=str
)
def test_a_layers_output_and_gradients(kind, more):
    """Of one layer, where no choice is turned by another: against fp32, as near as plain torch."""
    plain, model = both([kind], **more)
    exact = drawn(config([kind], **more), torch.float32)
    exact.load_state_dict(plain.state_dict())
    want, plain_found, got = map(differentiated, (exact, plain, model))
    assert got.keys() == plain_found.keys()
    for name, value in got.items():
        off, allowed = (error(v, want[name]) for v in (value, plain_found[name]))
        # What Mamba-3's dt_bias sums over tokens cancels to a tenth or two: what bf16 leaves of it is the luck of the draw, 0.7 to 6 %.
        least = 0.1 if (kind, name) == ("mamba3", "layers.0.mixer.dt_bias") else 0.01
        assert off <= 1.5 * allowed + least, (name, off, allowed)


@pytest.mark.parametrize(("kind", "part"), [("mamba3", "mix"), ("m2rnn", "scan")])
def test_the_same_in_fp32_without_a_rounding_to_hide_behind(kind, part):
    exact = drawn(config([kind]), torch.float32)
    model = copy.deepcopy(exact)
    mixer = model.model.layers[0].mixer
    side = import_module(f"nam_megatron.blocks.{kind}.serve")
    setattr(mixer, part, partial(getattr(side, f"_{part}"), mixer))
    want, got = differentiated(exact.double()), differentiated(model)
    assert got.keys() == want.keys()
    assert all(error(got[name], want[name]) < 1e-3 for name in want), {n: error(got[n], want[n]) for n in want}


def differentiated(model: NamForCausalLM) -> dict[str, torch.Tensor]:
    """Output and gradients of its layers, by name. The same numbers on a CPU and on a GPU."""
    torch.manual_seed(0)
    x, out = (torch.randn(2, 37, 64).to(DEVICE, torch.bfloat16).to(model.lm_head.weight.dtype) for _ in range(2))
    model.requires_grad_(True)
    x.requires_grad_()
    y = model.model(x, model._step(x, None, None, None))
    y.backward(out)
    return {"y": y, "x": x.grad} | {n: p.grad for n, p in model.model.named_parameters() if p.grad is not None}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("kinds", [AUTHOR, NATIVE], ids=["author", "native"])
@pytest.mark.parametrize("most", [160] if INTERPRETED else [160, None])
@torch.inference_mode()
def test_prefill_and_steps(kinds, most):
    plain, model = both(kinds)
    tokens, found = random(1 if INTERPRETED else 2, 140), []
    for each in (plain, model):
        cache = NamCache(most)
        parts = [each(tokens[:, :128], past_key_values=cache).logits]
        parts += [each(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(128, 134)]
        parts += [each(tokens[:, 134:137], past_key_values=cache).logits]
        parts += [each(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(137, 140)]
        assert cache.length == 140
        if most and each is model:
            assert (fused._DECODERS[cache].graph is None) == INTERPRETED
        found.append((torch.cat(parts, 1), cache))
    (want, kept), (got, cache) = found
    for where in (slice(0, 128), slice(128, 140)):
        close(got[:, where], want[:, where])
    assert {(i, n): t.shape for i, layer in cache.layers.items() for n, t in layer.items()} == {
        (i, n): t.shape for i, layer in kept.layers.items() for n, t in layer.items()
    }


@pytest.mark.parametrize("kinds", [AUTHOR, NATIVE], ids=["author", "native"])
@torch.inference_mode()
def test_a_batch_of_unequal_lengths_is_each_alone(kinds):
    _, model = both(kinds)
    prompts = [random(n, seed=n).tolist() for n in (3, 17, 9, 1)]
    width = 17
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=DEVICE)
    more, cache = random(4, 5, seed=3), NamCache(64)
    together = [model(tokens, attention_mask=mask, past_key_values=cache).logits[:, -1]]
    for i in range(5):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        together.append(model(more[:, i : i + 1], attention_mask=mask, past_key_values=cache).logits[:, -1])
    for row, prompt in enumerate(prompts):
        whole = torch.cat((torch.tensor(prompt, device=DEVICE), more[row]))[None]
        close(torch.stack([out[row] for out in together]), model(whole).logits[0, len(prompt) - 1 :])


@torch.inference_mode()
def test_beams_and_another_cache_between():
    """Steps that were captured follow a cache whose sequences are exchanged, and belong to their cache alone."""
    plain, model = both(AUTHOR)
    tokens, order, found = random(3, 24), torch.tensor([2, 0, 0], device=DEVICE), []
    for each in (plain, model):
        cache, other = NamCache(64), NamCache(48)
        each(tokens[:, :16], past_key_values=cache)
        each(tokens[:2, :12], past_key_values=other)
        out = []
        for i in range(16, 24):
            out.append(each(tokens[:, i : i + 1], past_key_values=cache).logits)
            out.append(each(tokens[:2, i - 4 : i - 3], past_key_values=other).logits)
            if i == 19:
                cache.reorder_cache(order)
        found.append(torch.cat(out))
    close(found[1], found[0])


@pytest.mark.parametrize("learned", ["model.embed_tokens.weight", "model.layers.0.mixer.dt_bias"])
def test_gradients_through_a_cache(learned):
    """Of the tokens, and of a weight of a layer that is frozen but for it."""
    plain, model = both(["mamba3", "m2rnn"])
    tokens, found = random(1, 20), []
    for each in (plain, model):
        each.requires_grad_(False).get_parameter(learned).requires_grad_(True)
        cache = NamCache()
        each(tokens[:, :12], past_key_values=cache)
        each(tokens[:, 12:], past_key_values=cache).logits.float().logsumexp(-1).sum().backward()
        found.append(each.get_parameter(learned).grad.float())
    torch.testing.assert_close(found[1], found[0])


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["mamba3", "attention"])
def test_masks_that_change_between_steps(kind):
    """A pad between tokens, of any type of number, and no mask at last: no pad has been."""
    plain, model = both([kind])
    tokens, found = random(2, 14), []
    for each in (plain, model):
        cache, mask, out = NamCache(32), torch.ones(2, 8, device=DEVICE), []
        mask[0, :3] = 0
        each(tokens[:, :8], attention_mask=mask, past_key_values=cache)
        for i in range(8, 14):
            mask = torch.nn.functional.pad(mask, (0, 1), value=float(i != 10))
            mask[0, -1] = 1
            logits = each(tokens[:, i : i + 1], attention_mask=mask if i < 13 else None, past_key_values=cache).logits
            out += [logits[0], logits[1]][: 1 + (i != 10)]
        found.append(torch.cat(out))
    cosine = torch.nn.functional.cosine_similarity(found[1].float(), found[0].float(), dim=-1)
    assert cosine.min() > 0.995, cosine


def test_a_cache_that_was_filled_in_inference_mode_and_one_that_was_not():
    plain, model = both(["mamba3", "attention"])
    tokens, found, modes = random(2, 12), [], [torch.no_grad, torch.inference_mode]
    for each in (plain, model):
        for most in (16, None):
            cache, out = NamCache(most), []
            for i in range(4, 12):
                with modes[i % 3 == 2 or (i == 4 and not most)]():
                    part = slice(0 if i == 4 else i, i + 1)
                    out.append(each(tokens[:, part], past_key_values=cache).logits[:, -1].clone())
                    if i == 9 and most is None:
                        cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
            found.append(torch.stack([logits.clone() for logits in out]))
    close(torch.cat(found[2:]), torch.cat(found[:2]))


@torch.inference_mode()
def test_a_cache_of_more_or_fewer_sequences():
    for model in both(["mamba3"]):
        for most in (16, None):
            cache = NamCache(most)
            model(random(2, 5), past_key_values=cache)
            for rows in (1, 3):
                with pytest.raises(ValueError, match=f"a cache of 2 sequences, and a batch of {rows}"):
                    model(random(rows, 1), past_key_values=cache)
        for size in ((0, 4), (2, 0)):
            with pytest.raises(ValueError, match="{} sequences of {} tokens".format(*size)):
                model(random(*size))


@torch.inference_mode()
def test_ngrams_of_a_prompt_that_is_shorter():
    """And residual streams, and YaRN: what else a step may have in it when it is captured."""
    more = {"ngrams": {"order": 4, "heads": 1, "buckets": 50, "width": 8, "document_end": 7}}
    more["mhc"] = {"streams": 2, "sinkhorn_steps": 3, "epsilon": 1e-6}
    more["yarn"] = {"factor": 4.0, "original_length": 64, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5,
                    "rounded": True}  # fmt: skip
    plain, model = both(["attention", "mla"], **more)
    tokens, found = random(2, 8), []
    for each in (plain, model):
        cache = NamCache(16)
        found.append(torch.cat([each(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(8)], 1))
    close(found[1], found[0])


def test_a_model_that_has_left_bf16():
    _, model = both(["mamba3"])
    with pytest.raises(ValueError, match="computes in bf16, and the model in float32"):
        model.float()(random(1, 4))


@torch.inference_mode()
def test_words_that_are_decoded():
    _, model = both(NATIVE)
    prompts = [random(n, seed=n).tolist() for n in (5, 5)]
    steps = list(decode(model, prompts, Options(12)))
    again = list(decode(model, prompts, Options(12)))
    assert steps == again and len(steps) == 12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mamba3": SIZES["mamba3"] | {"head_dim": 24}}, "power of two from 16, not 24"),
        ({"m2rnn": SIZES["m2rnn"] | {"v_dim": 64}}, "value widths of 16 and 32, not 64"),
        ({"mla": SIZES["mla"] | {"kv_lora_rank": 48}}, "latents of (16, 32, 64, 128), not 48"),
        ({"moe": SIZES["moe"] | {"expert_hidden_size": 20}}, "widths that 8 divides, not 20"),
    ],
)
def test_sizes_that_no_kernel_takes(change, said):
    made = config(AUTHOR)
    for name, value in change.items():
        setattr(made, name, value)
    with pytest.raises(Refused) as refused:
        fuse(drawn(made))
    assert said in str(refused.value)


def test_weights_of_another_type():
    with pytest.raises(Refused, match="in bf16, and the weights are float32"):
        fuse(drawn(config(NATIVE), torch.float32))


# The step of Mamba-3 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [naive.Shape(4, 16, 32, 2, 4, 8), naive.Shape(2, 64, 128, 1, 1, 64), naive.Shape(3, 32, 64, 3, 2, 5)]
)
def test_one_token_is_the_scans(shape, dtype):
    """Three steps from a random state, of 2 sequences in memory full of NaN, against fp64."""
    h, p, n, _, r, a = shape
    torch.manual_seed(1)
    packed = torch.randn(3, 2, sum(shape.parts.values()), device=DEVICE).to(dtype)
    names = ("mimo_x", "mimo_z", "mimo_o") if r > 1 else ()
    weights = naive.Weights(
        *(torch.randn(h, device=DEVICE) for _ in range(2)), *(torch.randn(h, r, n, device=DEVICE) for _ in range(2)),
        *(1 + 0.1 * torch.randn(n, device=DEVICE).to(dtype) for _ in range(2)), **{k: torch.randn(h, r, p, device=DEVICE) for k in names},
    )  # fmt: skip
    sizes = ((h, a), (h, p, n), (h, r, n), (h, p))
    state = naive.State(*(torch.randn(2, *size, device=DEVICE) for size in sizes))
    state = state._replace(k=state.k.to(dtype), x=state.x.to(dtype))
    doubled = naive.Weights(*(None if w is None else w.double() for w in weights))
    want, after = naive.scan(packed.double(), doubled, shape, naive.State(*(x.double() for x in state)))
    for token in range(3):
        rows = torch.full((2, packed.size(2) + 7), torch.nan, device=DEVICE, dtype=dtype)
        rows[:, :-7] = packed[token]
        got = step(rows[:, :-7], weights, shape, state)
        limit = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), want[token], rtol=limit, atol=limit * want.abs().max().item())
    for mine, right in zip(state, after, strict=True):
        limit = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(mine.double(), right, rtol=limit, atol=limit * right.abs().max().item())
