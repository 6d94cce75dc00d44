"""generate() of exports against whole passes without cache or mask; and what forward refuses."""

import sys

import pytest
import torch
import transformers
from conftest import EXPORTS, opened, random
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, pipeline

NEW = 6
MODES = [{"use_cache": cache, "mask": mask} for cache in (True, False) for mask in (True, False)]


def greedy(model, prompt: torch.Tensor, new: int = NEW) -> torch.Tensor:
    """The continuation [b, new], each token by a whole pass."""
    tokens = prompt
    for _ in range(new):
        with torch.no_grad():
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
    return tokens[:, prompt.size(1) :]


def generated(model, tokens: torch.Tensor, mask: bool | torch.Tensor = True, **more) -> torch.Tensor:
    masked = {"attention_mask": torch.ones_like(tokens) if mask is True else mask} if mask is not False else {}
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens, **masked, **settings | more)[:, tokens.size(1) :]


@pytest.fixture
def its(model):
    """The module that the model's code is."""
    return sys.modules[type(model).__module__]


def padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of a batch, padded on the left."""
    most = max(p.size(1) for p in prompts)
    pad = torch.nn.functional.pad
    tokens, masks = (
        torch.cat([pad(x, (most - x.size(1), 0)) for x in rows]) for rows in (prompts, [p * 0 + 1 for p in prompts])
    )
    return tokens, masks


@pytest.mark.parametrize("how", MODES, ids=str)
def test_greedy_words_are_those_of_whole_passes(model, how):
    tokens = random(2, 9)
    assert torch.equal(generated(model, tokens, **how), greedy(model, tokens))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_padded_batch_is_each_alone(model, use_cache):
    prompts = [random(1, n, seed=n) for n in (3, 11, 6)]
    tokens, mask = padded(prompts)
    alone = torch.cat([greedy(model, prompt) for prompt in prompts])
    assert torch.equal(generated(model, tokens, mask, use_cache=use_cache), alone)
    assert torch.equal(generated(model, tokens, False, use_cache=use_cache), alone)  # transformers sees the pads


def test_beams_are_the_same_with_a_cache_and_without(model):
    tokens, mask = padded([random(1, 4), random(1, 7, seed=1)])
    with_it, without = (generated(model, tokens, mask, num_beams=3, use_cache=cache) for cache in (True, False))
    assert torch.equal(with_it, without)


def test_drawn_words_are_the_same_with_a_cache_and_without(model):
    found = []
    for cache in (True, False):
        torch.manual_seed(3)
        found.append(generated(model, random(2, 5), do_sample=True, top_k=40, use_cache=cache, num_return_sequences=2))
    assert torch.equal(*found)


def test_a_cache_of_ones_own_and_one_to_go_on_with(model, its):
    tokens = random(1, 8)
    whole = greedy(model, tokens, 2 * NEW)
    for cache in (its.NamCache(), its.NamCache(64)):
        first = generated(model, tokens, past_key_values=cache)
        assert torch.equal(first, whole[:, :NEW]) and cache.get_seq_length() == 7 + NEW
        again = torch.cat((tokens, first), 1)
        assert torch.equal(generated(model, again, past_key_values=cache), whole[:, NEW:])


def test_embeddings_go_in_where_no_ngrams_are_asked(model):
    tokens = random(2, 6)
    given = {
        "inputs_embeds": model.get_input_embeddings()(tokens),
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
    }
    if model.config.ngrams:
        with pytest.raises(ValueError, match="inputs_embeds: this model embeds n-grams"):
            model.generate(**given)
    else:
        assert torch.equal(model.generate(**given), greedy(model, tokens))
        given["attention_mask"] = torch.ones_like(tokens)
        assert torch.equal(model.generate(**given), greedy(model, tokens))


def test_a_pipeline_of_two(name, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"pad": 0} | {f"w{i}": i for i in range(1, 96)}, unk_token="pad"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", padding_side="left")
    model = opened(name)
    prompts = [random(1, n, seed=n) for n in (4, 7)]
    texts = [" ".join(f"w{t}" for t in prompt[0].tolist()) for prompt in prompts]
    for batch in (1, 2):
        made = pipeline("text-generation", model, tokenizer=tokenizer, batch_size=batch, device="cpu")
        said = made(texts, max_new_tokens=NEW, do_sample=False, return_full_text=False)
        for (one,), prompt in zip(said, prompts, strict=True):
            assert one["generated_text"].split() == tokenizer.decode(greedy(model, prompt)[0]).split()


def test_saved_and_opened_again(model, name, tmp_path):
    model.save_pretrained(tmp_path / "again")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert other.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(generated(other, random(1, 5)), greedy(model, random(1, 5)))
    assert (tmp_path / "again" / "modeling_nam.py").read_text() == (EXPORTS / name / "modeling_nam.py").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(name, model, dtype):
    tokens = random(2, 9)
    narrow = opened(name, dtype)
    out = narrow(tokens).logits
    cosine = torch.cosine_similarity(out.float(), model(tokens).logits, dim=-1)
    assert out.dtype == dtype and cosine.median() > 0.98
    assert generated(narrow, tokens).shape == (2, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned"], scope="session")
def test_compiled_it_is_the_same(model):
    """Of the model that torch traces within seconds."""
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(random(2, 9)).logits, model(random(2, 9)).logits, rtol=1e-5, atol=1e-5)


class Adapted(torch.nn.Module):
    """A layer with an adapter beside it, as PEFT puts in its place."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.in_features = layer, layer.in_features
        self.adapter = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


@pytest.mark.parametrize("name", ["author", "latent"], scope="session")
def test_adapters_of_matrices_that_mla_takes_apart(model):
    """Steps by the cache see them as whole passes do."""
    before, tokens = model(random(2, 9)).logits, random(2, 9)
    for layer in model.model.layers:
        for part in ("q_up", "kv_up"):
            if hasattr(layer.mixer, part):
                setattr(layer.mixer, part, Adapted(getattr(layer.mixer, part)))
    assert not torch.allclose(model(tokens).logits, before, atol=0.1)
    assert torch.equal(generated(model, tokens), greedy(model, tokens))


# Positions, masks, and what else forward takes ---------------------------------------------------------------------------


@torch.no_grad()
def test_positions_that_are_the_masks_are_served(model):
    tokens = random(2, 9)
    want = model(tokens).logits
    for first in (0, 3):
        got = model(tokens, position_ids=torch.arange(first, first + 9)[None]).logits
        if first == 0 or not model.config.learned_positions:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        else:
            assert not torch.allclose(got, want, atol=1e-2)
    tokens, mask = padded([random(1, 4), random(1, 9)])
    plain = model(tokens, attention_mask=mask).logits
    for pads in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, pads)
        got = model(tokens, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(got[mask == 1], plain[mask == 1])


PACKED = [
    [0, 1, 2, 3, 0, 1, 2, 3, 4],
    [0, 1, 2, 3, 4, 5, 6, 7, 0],
    [0, 1, 2, 4, 5, 6, 7, 8, 9],
    [0] * 9,
    [8, 7, 6, 5, 4, 3, 2, 1, 0],
]


@pytest.mark.parametrize("positions", PACKED, ids=str)
@pytest.mark.parametrize("mask", [False, True])
def test_packed_positions_are_refused(model, positions, mask):
    tokens = random(1, 9)
    masked = {"attention_mask": torch.ones_like(tokens)} if mask else {}
    with pytest.raises(ValueError, match="position_ids: each row is one document"):
        model(tokens, position_ids=torch.tensor([positions]), **masked)


def test_positions_behind_a_cache_go_on(model, its):
    cache = its.NamCache()
    model(random(1, 4), past_key_values=cache)
    for wrong in (torch.arange(5)[None], torch.zeros(1, 5, dtype=torch.long), torch.arange(5, 10)[None]):
        with pytest.raises(ValueError, match="position_ids: each row is one document"):
            model(random(1, 5), past_key_values=cache, position_ids=wrong)
    with pytest.raises(ValueError, match=r"position_ids: \[1, 9\], not \[1, 5\]"):
        model(random(1, 5), past_key_values=cache, position_ids=torch.arange(9)[None])
    model(random(1, 5), past_key_values=cache, position_ids=torch.arange(4, 9)[None])
    assert cache.length == 9


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([1, 1, 2, 2], "0 for padding, else 1"),
        ([0.0, 0.0, 0.0, -1e9], "0 for padding, else 1"),
        ([1, 0, 1, 1], "on one side"),
        ([1, 1, 1], r"\[1, 3\], not \[1, 4\]"),
    ],
)
def test_masks_that_say_something_else_are_refused(model, mask, said):
    with pytest.raises(ValueError, match=f"attention_mask: .*{said}"):
        model(random(1, 4), attention_mask=torch.tensor([mask]))


def test_an_unknown_argument_is_refused_by_name(model):
    for name in ("cu_seq_lens_q", "token_type_ids", "output_router_logits", "seq_idx", "head_mask", "shift_labels"):
        with pytest.raises(TypeError, match=name):
            model(random(1, 4), **{name: torch.zeros(1, 4)})
    with pytest.raises(ValueError, match="temprature"):
        generated(model, random(1, 4), temprature=0.5)


def test_what_it_cannot_serve_is_refused_by_name(model, its):
    tokens = random(1, 4)
    embeds = model.get_input_embeddings()(tokens)
    refused = {
        "input_ids: either these or inputs_embeds": {"input_ids": tokens, "inputs_embeds": embeds},
        "output_attentions": {"input_ids": tokens, "output_attentions": True},
        "past_key_values: another cache than `cache`": {
            "input_ids": tokens,
            "cache": its.NamCache(),
            "past_key_values": its.NamCache(),
        },
        "past_key_values: a NamCache, not DynamicCache": {"input_ids": tokens, "cache": DynamicCache()},
        r"labels: \[1, 3\], not \[1, 4\]": {"input_ids": tokens, "labels": tokens[:, 1:]},
        "logits_to_keep: none beside labels": {"input_ids": tokens, "labels": tokens, "logits_to_keep": 2},
    }
    for said, given in refused.items():
        with pytest.raises(ValueError, match=said):
            model(**given)
    with pytest.raises(ValueError, match="input_ids"):
        model()
    with pytest.raises(ValueError, match="NamCache, not StaticCache"):
        model(tokens, past_key_values=StaticCache(model.config, max_cache_len=8))


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_caches_of_others_are_refused(model, kind):
    with pytest.raises(ValueError, match=f"(?s)cache_implementation.*{kind}|{kind}.*cache"):
        generated(model, random(1, 4), cache_implementation=kind)


def test_batches_that_are_packed_are_refused(model):
    with pytest.raises(ValueError, match="generate_batch: it packs sequences"):
        model.generate_batch([[1, 2, 3], [4, 5]], generation_config=transformers.GenerationConfig(max_new_tokens=2))


def test_assisted_generation_is_refused(model, name):
    with pytest.raises(ValueError, match="stateful"):
        generated(model, random(1, 4), assistant_model=opened(name))
    with pytest.raises(ValueError, match="stateful"):
        generated(model, random(1, 4), prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("setting", [{"attn_implementation": "eager"}, {"experts_implementation": "batched_mm"}])
def test_ways_to_compute_that_it_has_not_are_refused(name, setting):
    ((key, way),) = setting.items()
    with pytest.raises(ValueError, match=f"{key}: .*, not `{way}`"):
        opened(name, **setting)
    assert opened(name, attn_implementation="sdpa")


@torch.no_grad()
def test_what_comes_out(model):
    tokens = random(2, 5)
    out = model(tokens, output_hidden_states=True, use_cache=True)
    assert len(out.hidden_states) == 1 + len(model.config.layer_kinds) and out.past_key_values.length == 5
    kept = torch.tensor([1, 4])
    torch.testing.assert_close(model(tokens, logits_to_keep=kept).logits, out.logits[:, kept])
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, out.logits[:, -2:])
    (logits,) = model(tokens, return_dict=False)
    torch.testing.assert_close(logits, out.logits)
    loss, _ = model(tokens, labels=tokens, return_dict=False)
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    )
    model.config.output_hidden_states = True
    assert len(model(tokens).hidden_states) == len(out.hidden_states)
