"""Public models as presets: the published parameters exactly, what Megatron builds, and the way back from the launch."""

from pathlib import Path

import pytest
from presets import PUBLIC, lowered

from benchmarks import nam52
from nam_megatron.budget import parameters
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.lint import lint, recipe
from nam_megatron.verify import VERIFIED, verify

# Those of transformers 5.12.1's own modules of the published config, counted on the meta device.
PUBLISHED = {
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3_2": 671_877_929_216,  # without its layer of token prediction
    "deepseek_v3_yarn": 671_026_404_352,  # the same
    "glm_4_5_air": 106_852_245_504,  # the same
    "glm_4_7_flash": 29_943_390_976,  # the same
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "kimi_k2": 1_026_408_209_408,
    "llama_3_1_8b": 8_030_261_248,
    "deepseek_v3": 671_026_404_352,  # without its layer of token prediction
    "llama_3_8b": 8_030_261_248,
    "mixtral_8x7b": 46_702_792_704,
    "nemotron_3_nano_30b_a3b": 31_577_937_344,
    "nemotron_3_super_120b_a12b": 120_668_687_360,  # without its layer of token prediction
    "nemotron_h_56b": 56_324_350_464,
    "nemotron_nano_9b_v2": 8_888_227_328,
    "moonlight_16b_a3b": 15_960_108_544,
    "qwen3_0_6b": 596_049_920,
    "qwen3_5_0_8b": 752_393_024,  # of text, without its layer of token prediction
    "qwen3_8b": 8_190_735_360,
    "nemotron_h_8b": 8_100_852_736,
    "qwen3_30b_a3b": 30_532_122_624,
    "seed_oss_36b": 36_151_104_512,
    "qwen3_next_80b_a3b": 79_674_391_296,  # without its layer of token prediction
}
# What stock Megatron, given these arguments, would train as another model.
OURS = {name: {"mla"} for name in ("deepseek_v2_lite", "glm_4_7_flash", "moonlight_16b_a3b")}
OURS |= {"kimi_k2": {"yarn"}, "llama_3_1_8b": {"llama_rope"}}


def test_every_preset_of_a_public_model_is_asked():
    assert set(PUBLIC) == PUBLISHED.keys()


UNPUBLISHED = {"glm_4_7_flash": {"init_std"}}  # what its config.json does not say


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_model_has_its_parameters_and_is_what_megatron_builds(name, oracle):
    lowering = lowered(name)
    assert parameters(lowering.plan)[0] == PUBLISHED[name]
    assert {seam.owner for seam in lowering.plan.ours} == OURS.get(name, set()), "stock Megatron trains it"
    assert not lowering.plan.substitutions
    assert lowering.plan.recipe.assumptions.keys() == UNPUBLISHED.get(name, set())
    verdict = verify(lowering, oracle)
    assert (verdict.refused, verdict.mismatches, verdict.unknown, verdict.word) == (None, (), (), VERIFIED)


EPSILON = "model.blocks.mla.latent_norm_epsilon"  # which no argument of Megatron's says
UNTOLD = {"deepseek_v2_lite": "null", "moonlight_16b_a3b": "1e-6", "glm_4_7_flash": "1e-6"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_model_comes_back_from_its_launch(name):
    lowering = lowered(name)
    found = lint(argv.run_script(lowering), "run.sh")
    made = recipe.make(found, Path("back.yaml"))
    assert not found.findings and found.model.count.total == PUBLISHED[name]
    assert made.refused is None and not (made.lost or made.added or made.keyless)
    given = [f"{EPSILON}={UNTOLD[name]}"] if name in UNTOLD else []
    assert made.unsaid == ((EPSILON,) if given else ())
    again, told = (
        {n: s.value for n, s in side.by_name.items() if n != "ffn_hidden_size" or "mlp" in lowering.plan.kinds}
        for side in (translate(recipe._load(made.yaml, "back", given)), lowering)
    )
    assert again == told


def test_candidates_for_nam52_are_counted_as_the_page_says(monkeypatch):
    """Those of NAM56R's widths with MLA; the whole page takes half a minute."""
    monkeypatch.setattr(nam52, "ATTENTION", {"MLA": nam52.ATTENTION["MLA"]})
    found, page = list(nam52.rows({})), nam52.DOCS.read_text()
    assert len(found) == 2 + 2 and all(row in page for row in found)
