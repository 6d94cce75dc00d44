"""Public models as presets: the published parameters exactly, what Megatron builds, and the way back from the launch."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hf_configs import CONFIGS
from presets import PUBLIC, changed, lowered

from benchmarks import nam52
from nam_megatron.budget import parameters
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.hf import describe as export
from nam_megatron.hf import native
from nam_megatron.judge.same import flat
from nam_megatron.lint import lint, recipe
from nam_megatron.recipe import to_tree
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
    "solar_open_100b": 102_651_793_408,
    "qwen3_next_80b_a3b": 79_674_391_296,  # without its layer of token prediction
}
# What stock Megatron, given these arguments, would train as another model.
OURS = {name: {"mla"} for name in ("deepseek_v2_lite", "glm_4_7_flash", "moonlight_16b_a3b")}
OURS |= {"kimi_k2": {"yarn"}, "llama_3_1_8b": {"llama_rope"}}


def test_every_preset_of_a_public_model_is_asked():
    assert set(PUBLIC) == PUBLISHED.keys()


UNPUBLISHED = {"glm_4_7_flash": {"init_std"}, "solar_open_100b": {"init_std"}}  # what its config.json does not say


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


TRAINED = yaml.safe_load(Path(__file__).with_name("hf_trained.yaml").read_text())


def trained(name: str) -> dict[str, list]:
    """By key: whose it is, and the value, of what no config.json decides of a preset."""
    stands = flat(to_tree(lowered(name).plan.recipe))
    return {key: said for key, said in {**TRAINED["all"], **TRAINED["models"][name]}.items() if key in stands}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_no_config_decides_is_another_sources_or_ours(name):
    stands, said = flat(to_tree(lowered(name).plan.recipe)), trained(name)
    assert (
        TRAINED["models"][name].keys() <= said.keys()
        and {source for source, _ in said.values()} <= TRAINED["sources"].keys()
    )
    assert {key: stands[key] for key in said} == {key: value for key, (_, value) in said.items()}


# Other values of what is no number.
OTHER = {
    "normalization": ["LayerNorm"], "activation": ["gelu"], "position_embedding": ["none", "rope"],
    "score_function": ["softmax", "sigmoid"],
    "group_limit": [[4, 2]], "window": [64], "unwindowed_every": [2, 3], "latent_size": [64], "routed_scaling": [1.5],
    "learned_positions": [1 << 20], "q_lora_rank": [768], "latent_norm_epsilon": [3e-6], "glu_offset": [2.0], "activation_clamp": [5.0],
    "substitute": [[], [{"letter": "A", "ranks": [0], "kind": "mlp"}]],
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["deepseek_v3_2", "qwen3_next_80b_a3b", "gpt_oss_20b", "nemotron_3_super_120b_a12b", "glm_4_5_air"]
)
def test_every_value_of_a_preset_is_compared_with_something(name):
    """One wrong value in each key of its model: no model, or another than config.json's, or a key of the table above."""
    theirs, seen = export.counted(native.described(CONFIGS[name], "config.json")), 0
    for key, value in flat(to_tree(lowered(name).plan.recipe)).items():
        last = key.rpartition(".")[2]
        if not key.startswith(("model.", "feature.yarn", "feature.llama_rope")) or key in trained(name):
            continue
        if last in ("family", "pattern", "depth", "name") or key.startswith("model.letters"):
            continue  # a title; and the layers, which `layer_kinds` holds
        others = OTHER.get(last) or [not value if isinstance(value, bool) else value * 2 or 64]
        other = next(v for v in others if v != value)
        with contextlib.suppress(Refused):
            assert export.counted(export.config(translate(changed(name, {key: other})).plan)) != theirs, key
        seen += 1
    assert seen > 20
