"""Presets outside the checkout (docs/presets.md): found, listed, compared, counted; never confused with the library's."""

from pathlib import Path

import pytest
from command import warm

from nam_megatron.budget import parameters
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.recipe import load

OUTSIDE = Path(__file__).parent / "presets_outside"
# Parameters: ours, and those of transformers 5.12.1's own modules of the published config, counted on the meta device.
PUBLISHED = {"jamba_mini": (51_460_000_640, 51_570_323_328)}


def outside(name: str, *overrides: str):
    return translate(load(name, [f"hydra.searchpath=['{OUTSIDE}']", *overrides]))


def preset(folder: Path, name: str, text: str = "", called: str | None = None) -> None:
    """A preset over nam56r_smoke, in a folder of one's own."""
    (folder / "preset").mkdir(exist_ok=True)
    (folder / "preset" / f"{name}.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - nam56r_smoke\n  - _self_\npreset: {{name: {called or name}}}\n{text}"
    )


def test_every_file_outside_is_counted():
    assert {path.stem for path in (OUTSIDE / "preset").glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_hybrids_that_are_not_nam(name):
    p = outside(name).plan
    assert parameters(p)[0] == PUBLISHED[name][0]
    assert not p.not_built and not p.substitutions and not p.ours, "stock Megatron trains it"
    assert not p.recipe.assumptions, "a value that its file gives is no assumption of ours"


def test_what_jamba_is_off_by_is_its_mixer():
    """Mamba-1's x and dt projections and its A and D of every channel, against B, C and dt in Mamba-2's packed projection."""
    ours, theirs = PUBLISHED["jamba_mini"]
    h, inner, state, rank, heads = 4096, 8192, 16, 256, 128
    mamba1 = inner * (rank + 2 * state) + (rank + 1) * inner + inner * state + inner + rank + 2 * state
    mamba2 = h * (2 * state + heads) + 2 * state * (4 + 1) + 3 * heads + inner
    assert theirs - ours == 28 * (mamba1 - mamba2)


def test_a_key_that_every_model_gives_may_stand_unread_in_its_own_file_alone():
    """No layer of Qwen3-Next is a dense MLP, and a model without `ffn_hidden_size` would miss a key."""
    assert outside("qwen3_next_80b_a3b").plan.recipe.model.ffn_hidden_size == 5632
    with pytest.raises(Refused, match="nothing reads this: no layer is a dense MLP"):
        outside("qwen3_next_80b_a3b", "model.ffn_hidden_size=8")


def test_list_and_diff_see_the_folder(tmp_path):
    preset(tmp_path, "mine")
    preset(tmp_path, "wrong", "model: {depht: 12}\n")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "slow.yaml").write_text(
        "# @package _global_\n# A smaller step. Of ours.\noptim: {lr: 1.0e-4}\n"
    )
    rows = warm("--config-dir", ".", "list=presets", cwd=tmp_path).out.splitlines()
    assert [row.split()[0] for row in rows if str(tmp_path) in row] == ["mine", "wrong"]
    assert any(row.startswith("wrong ") and "refused: unknown key `depht`" in row for row in rows)
    rows = warm("--config-dir", ".", "list=overlays", cwd=tmp_path).out.splitlines()
    assert f"A smaller step ({tmp_path})" in next(row for row in rows if row.startswith("slow "))
    ran = warm("--config-dir", ".", "conf=nam56r_smoke", "diff=mine", cwd=tmp_path)
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "the same arguments")
    ran = warm(f"hydra.searchpath=[{tmp_path}]", "conf=mine", "+overlay=slow", "diff=mine", cwd="/")
    assert ran.code == 0 and "lr" in ran.out.splitlines()[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize(("text", "key"), [("model: small", "model"), ("model: {blocks: 3}", "model.blocks")])
def test_a_section_that_is_none_is_refused_by_key_and_file(tmp_path, text, key):
    preset(tmp_path, "mine", text)
    ran = warm("--config-dir", ".", "conf=mine", cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err.startswith("error: must be a mapping, not ") and f"@ {key} ({tmp_path}/preset/mine.yaml:6)" in ran.err
    )
    assert "mine  " in warm("--config-dir", ".", "list=presets", cwd=tmp_path).out


HEAD, CALLED = "# @package _global_\ndefaults:\n", "preset: {name: mine, alias_of: null, family: mine, about: x}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "  - lane: own_dp\n" + CALLED, "another of a group is `override /GROUP: NAME`"),
        (
            HEAD + "  - override /lane: own_dp\n  - /overlay@_global_: tp_sp\n" + CALLED,
            "`override` is the last of `defaults`",
        ),
        (HEAD + "  - optional /overlay@_global_: nobodys\n" + CALLED, "it is left out without a word"),
        (HEAD + "  - nam56r_smoke\n" + CALLED + "model: [mla]\n", "`preset/mine` has a list where a section belongs"),
        (HEAD + "  - override /lane: own_dp\n", "write `preset: {name: ..., alias_of: ..., family: ..., about: ...}`"),
    ],
)
def test_a_preset_that_is_written_wrong_is_told_what_to_write(tmp_path, text, said):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "mine.yaml").write_text(text)
    ran = warm("--config-dir", ".", "conf=mine", cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err and "command line" not in ran.err, ran.err


def test_a_folder_with_blanks_and_quotes(tmp_path):
    folder = tmp_path / "a b,c'd"
    folder.mkdir()
    preset(folder, "mine")
    assert warm("--config-dir", str(folder), "conf=nam56r_smoke", "diff=mine", cwd=tmp_path).code == 0


def refused(*words: str, cwd: Path) -> str:
    ran = warm(*words, cwd=cwd)
    assert (ran.code, ran.out) == (2, "")
    return ran.err


def test_the_path_of_a_preset_is_not_said_to_be_absent(tmp_path):
    preset(tmp_path, "zebra")
    said = refused("conf=./preset/zebra.yaml", cwd=tmp_path)
    assert "no preset `./preset/zebra.yaml`, and `preset/zebra.yaml` is a file" in said
    assert "`--config-dir . conf=zebra`" in said
    (tmp_path / "zebra").write_text("a preset without a suffix")
    assert "there is no `config.json` or preset `./zebra`" in refused("conf=./zebra", cwd=tmp_path)


def test_a_shadowed_name_is_refused(tmp_path):
    """Hydra would take the library's and say nothing."""
    preset(tmp_path, "nam56r_native_dp")
    assert refused("--config-dir", ".", "conf=nam56r_native_dp", cwd=tmp_path) == (
        "error: two files are preset `nam56r_native_dp`: conf/preset/nam56r_native_dp.yaml and "
        f"{tmp_path}/preset/nam56r_native_dp.yaml\n\nhint: give yours another name; Hydra would take the first\n"
    )
    assert "is given twice" in refused("--config-dir", "..", "conf=nam56r_smoke", "--config-dir", ".", cwd=tmp_path)
    assert "`` is no folder of configs" in refused("--config-dir", "", "conf=nam56r_smoke", cwd=tmp_path)
    assert "written without dashes, `conf=VALUE`" in refused(
        "--conf", "nam56r_smoke", "--config-dir", ".", cwd=tmp_path
    )
    assert "two files are preset `nam56r_native_dp`" in refused("--config-dir", ".", "conf=nam56r_smoke", cwd=tmp_path)
    assert warm("--config-dir", ".", "conf=nam56r", "format=lines", cwd=tmp_path).code == 0, (
        "it stands on none of the two"
    )


def test_a_file_is_named_by_a_path_without_detours(tmp_path):
    preset(tmp_path, "mine", text="optim:\n  lr: ???\n")
    text = refused("--config-dir", f"../{tmp_path.name}", "conf=mine", cwd=tmp_path)
    assert f"({tmp_path}/preset/mine.yaml:" in text


def test_a_preset_under_the_name_of_another_is_refused(tmp_path):
    preset(tmp_path, "mine", called="nam56r_smoke")
    text = refused("--config-dir", ".", "conf=mine", cwd=tmp_path)
    assert text.startswith(
        f"error: preset `mine` calls itself `nam56r_smoke` @ preset.name ({tmp_path}/preset/mine.yaml:5)"
    )


BATCH = "schedule.global_batch_size=32"
HOSTS = "cluster: {name: mine, nodes: 2}\n"


@pytest.mark.parametrize(
    ("text", "word", "stands", "whole"),
    [
        (HOSTS, "cluster=h200_4", "`cluster.name=mine` and `cluster.nodes=2`", "cluster.name=h200_4 cluster.nodes=1"),
        ("cluster: {nodes: 2}\n", "cluster=h200_4", "`cluster.nodes=2`", "cluster.nodes=1"),
        ("optim: {name: adamw}\n", "optim=muon", "`optim.name=adamw`", "optim.name=muon"),
    ],
)
def test_what_the_command_line_chooses_a_preset_may_not_make_another_of(text, word, stands, whole, tmp_path):
    preset(tmp_path, "mine", text)
    said = refused("--config-dir", ".", "conf=mine", word, cwd=tmp_path)
    assert said.startswith(f"error: `{word}` is chosen, and a file behind it says {stands} @ ")
    assert f"({tmp_path}/preset/mine.yaml:6)" in said
    assert f"hint: say it on the command line, too: `{whole}`; or let the file choose in its `defaults`: " in said
    assert warm("--config-dir", ".", "conf=mine", word, BATCH, *whole.split(), cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (HOSTS, "cluster.gpus_per_node=8"),
        ("cluster: {nodes: 2}\n", "cluster=h200_2x8"),
        ("optim: {lr: 1.0e-4}\n", "optim=muon"),
    ],
)
def test_what_a_preset_sets_beside_a_choice_stands(text, word, tmp_path):
    preset(tmp_path, "mine", text)
    assert warm("--config-dir", ".", "conf=mine", word, BATCH, cwd=tmp_path).code == 0


def test_what_an_overlay_chooses_the_command_line_may_not_make_another_of(tmp_path):
    said = refused("conf=nam56r_fused", "optim=adamw", "+overlay=[fused,muon]", cwd=tmp_path)
    assert said.startswith("error: `optim=adamw` is chosen, and the overlay `muon` chooses `muon` @ optim ")
    assert "hint: leave one of them out, or take `optim=muon`" in said
    assert load("nam56r_fused", ["+overlay=muon", "optim=muon"]).optim.name == "muon"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_yarn", "deepseek_v3_2", "kimi_k2", "glm_4_5_air"])
def test_hosts_of_the_command_line_are_those_of_a_preset_with_hosts(name):
    assert load(name).cluster.nodes > 1
    other = load(name, ["cluster=h200_1"]).cluster
    assert (other.name, other.nodes, other.gpus_per_node) == ("h200_1", 1, 1)


@pytest.mark.parametrize("folder", ["/nowhere", "pkg://json"])
def test_a_folder_that_is_none_is_refused(folder, tmp_path):
    text = refused(f"hydra.searchpath=['{folder}']", "conf=nam56r_smoke", cwd=tmp_path)
    assert text.startswith(f"error: `{folder.removeprefix('pkg://')}` is no folder of configs\n"), (
        "no warning of Hydra's"
    )


def test_a_key_that_no_file_gives(tmp_path):
    text = refused("--config-dir", str(OUTSIDE), "conf=qwen3_next_80b_a3b", "model.blocks.mlp={}", cwd=tmp_path)
    assert text == "error: no file gives `mlp` @ model.blocks\n\nhint: to add it: `+model.blocks.mlp=...`\n"


OVERLAYS = {
    "whole": "  pattern: AM\n  depth: 2\n  letters: {M: mamba2}\n  blocks:\n"
    "    mamba2: {heads: 128, head_dim: 64, state_dim: 128, groups: 8}\n"
    "lane: {name: mine, blocks: {M: mamba2}}\n",
    "misspelt": "  blocks: {mamba22: {heads: 8}}\n",
    "key": "  blocks: {mamba2: {hedas: 8}}\n",
    "value": "  blocks: {moe: {experts: many}}\n",
    "list": "  blocks: {moe: [1, 2]}\n",
    "number": "  blocks: 7\n",
}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("misspelt", "unknown key `mamba22`, did you mean `mamba2`?"),
        ("key", "unknown key `hedas`, did you mean `heads`?"),
        ("value", "must be an integer, not "),
        ("list", "must be a mapping, not "),
        ("number", "must be a mapping, not 7"),
    ],
)
def test_what_an_overlay_says_wrongly_of_a_kind_that_a_model_lacks_is_not_left_out(name, said, tmp_path):
    folder = overlays(tmp_path)
    with pytest.raises(Refused) as refused:
        load("llama_3_8b", [folder, f"+overlay={name}"])
    assert any(said in problem.message for problem in refused.value.problems)


def test_a_kind_that_an_overlay_gives_whole_stands_beside_one_that_another_speaks_of(tmp_path):
    """The library's `fused` has keys of experts, which this model does not get."""
    recipe = load("llama_3_8b", [overlays(tmp_path), "+overlay=[fused,whole]"])
    assert recipe.blocks.mamba2.heads == 128 and recipe.blocks.moe is None


def overlays(folder: Path) -> str:
    """The override that finds OVERLAYS."""
    (folder / "overlay").mkdir()
    for name, text in OVERLAYS.items():
        (folder / "overlay" / f"{name}.yaml").write_text(f"# @package _global_\nmodel:\n{text}")
    return f"hydra.searchpath=['{folder}']"
