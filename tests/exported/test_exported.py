"""Exports as those have them who have transformers and nothing of ours, in the oldest and the newest that pyproject.toml allows.

Each version has an environment of its own, of exactly the packages that transformers_VERSION.txt lists, kept inside the project's: only the
first run downloads anything. Another version is another list:

    printf 'torch==2.11.0\\ntransformers==X\\naccelerate==1.15.0\\npytest==9.2.0\\n' | uv pip compile - --python-version 3.12 \\
      --python-platform x86_64-manylinux_2_28 --no-annotate --no-header -o tests/exported/transformers_newest.txt
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import drawn
import pytest
import torch
from hf_configs import CONFIGS

from nam_megatron.hf import __main__ as command
from nam_megatron.hf import export, folder
from nam_megatron.hf.model import modeling_nam
from nam_megatron.hf.opened import open_model
from nam_megatron.lint import huggingface

HERE = Path(__file__).parent
INSIDE = HERE / "inside"
VERSIONS = ("oldest", "newest")


def packages(version: str) -> Path:
    return HERE / f"transformers_{version}.txt"


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("exports")
    for name in drawn.MODELS:
        drawn.write(name, at / name)
    return at


def python_of(version: str) -> Path:
    """An environment's Python, with the packages of that version's list."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "these tests make environments with uv: pip install uv"
    at = Path(sys.prefix) / "exported" / version
    make = [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, at]
    fill = [uv, "pip", "sync", "--quiet", "--python", at / "bin" / "python", packages(version)]
    for line in (make, fill):
        made = subprocess.run(line, cwd=HERE, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
    return at / "bin" / "python"


@pytest.mark.parametrize("version", [pytest.param("oldest", marks=pytest.mark.slow), "newest"])
def test_inside(version, exports, tmp_path, pytestconfig):
    """All checks of this tier pass, in one process and without us."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "HF_"))}
    env |= {"NAM_EXPORTS": str(exports), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    line = [python_of(version), "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    line += [
        "-m",
        pytestconfig.option.markexpr,
        f"--confcutdir={INSIDE}",
        f"--rootdir={INSIDE}",
        *sorted(INSIDE.glob("check_*.py")),
    ]
    ran = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.few("newest")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_published_config_is_the_same_model_as_that_version_writes_it(version, tmp_path):
    """Names of layers and places of keys move between versions; what a file leaves out they fill in."""
    lacks = {"kimi_k2"} | ({"deepseek_v32"} if version == "oldest" else set())  # the first's code is its publisher's
    known = {name: keys for name, keys in CONFIGS.items() if keys["model_type"] not in lacks}
    line = [python_of(version), "-W", "ignore", INSIDE / "written.py", tmp_path]
    wrote = subprocess.run(line, input=json.dumps(known), capture_output=True, text=True, check=False)
    assert wrote.returncode == 0, wrote.stderr
    for name, keys in known.items():
        found, _ = huggingface.words(json.loads((tmp_path / name / "config.json").read_text()), name)
        filled = [] if "initializer_range" in keys else ["--init-method-std", str(0.02)]
        assert [word for word in found if word not in filled] == huggingface.words(keys, name)[0], name


@pytest.mark.parametrize("name", drawn.MODELS)
@torch.inference_mode()
def test_parts_of_a_sequence_compute_what_the_whole_does(exports, name, monkeypatch):
    """Chunks of the scans and blocks of queries, of which no short sequence has two; beside padding, and behind a cache."""
    model, tokens = open_model(exports / name, torch.float32), torch.arange(1, 81).view(2, 40)
    mask = (torch.arange(40) >= torch.tensor([[0], [9]])).long()

    def found():
        model(tokens[:, :26], past_key_values=(cache := modeling_nam.NamCache()))
        behind = model(tokens[:, 26:], past_key_values=cache).logits
        return model(tokens).logits, behind, model(tokens, attention_mask=mask).logits * mask[..., None]

    whole = found()
    torch.testing.assert_close(whole[1], whole[0][:, 26:], rtol=0, atol=1e-5 * whole[0].abs().max().item())
    monkeypatch.setattr(modeling_nam, "CHUNK", 6)
    monkeypatch.setattr(modeling_nam, "QUERIES", 7)
    for part, one in zip(found(), whole, strict=True):
        torch.testing.assert_close(part, one, rtol=0, atol=1e-5 * one.abs().max().item())


def test_a_position_that_is_not_learned_is_refused_behind_a_cache_too(exports):
    model, cache = open_model(exports / "learned"), modeling_nam.NamCache()
    model(torch.ones(1, 63, dtype=torch.long), past_key_values=cache)
    model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="learned_positions: 65 tokens, and 64 positions are learned"):
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)


def test_a_step_goes_to_another_device_with_all_that_it_holds():
    """As accelerate moves it between layers of several devices; what layers have chosen is shared by all of them."""
    step = modeling_nam.Step(None, 0, *torch.ones(3, 1, 2), {})
    moved = step.to("meta", non_blocking=True)
    assert moved.indices is step.indices
    assert [x.device.type for x in vars(moved).values() if torch.is_tensor(x)] == ["meta"] * 3
    assert modeling_nam.Step(None, 0, torch.ones(1, 2), None, None, {}).to("meta").seen is None


def test_tokens_that_a_layer_of_another_device_has_chosen_are_taken_over(exports, monkeypatch):
    def scatter(tensor, dim, index, value, plain=torch.Tensor.scatter):
        assert index.device == tensor.device  # as a GPU asks it, and `meta` does not
        return plain(tensor, dim, index, value)

    monkeypatch.setattr(torch.Tensor, "scatter", scatter)
    model = open_model(exports / "author")
    layers = [m for m in model.modules() if isinstance(m, modeling_nam.Dsa)]
    reader = next(m for m in layers if m.source is not None)
    chooser = next(m for m in layers if m.index == reader.source)
    step = modeling_nam.Step(None, 0, torch.arange(9)[None], None, None, {})
    x = torch.ones(1, 9, model.config.hidden_size, dtype=model.dtype)
    chooser(x, step)
    assert reader.to("meta")(x.to("meta"), step.to("meta")).shape == x.shape


def test_a_tensor_of_another_shape_is_not_drawn_anew_whatever_is_asked_of_transformers(exports):
    config = export.config_of(exports / "learned")
    config.vocab_size += 1
    with pytest.raises(ValueError, match=r"mismatched keys: .*lm_head"):
        modeling_nam.NamForCausalLM.from_pretrained(exports / "learned", config=config, ignore_mismatched_sizes=True)


def test_what_pyproject_allows_is_what_is_tested():
    """Each requirement of ours says both bounds, and each bound is a version that the checks inside run with."""
    tree = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    lists = (tree["project"]["optional-dependencies"] | tree["dependency-groups"]).values()
    said = [words for each in lists for words in each if re.match(r"transformers\b", words)]
    (oldest, newest) = (re.search(r"^transformers==(.*)$", packages(v).read_text(), re.M)[1] for v in VERSIONS)
    assert len(said) == 3 and set(said) == {f"transformers>={oldest.removesuffix('.0')},<={newest}"}


@pytest.mark.parametrize("of", ["native", "author"])
def test_an_export_from_before_a_key_computes_what_it_did(exports, of, tmp_path):
    shutil.copytree(exports / of, tmp_path / "hf")
    at = tmp_path / "hf" / "config.json"
    tree = json.loads(at.read_text())
    if "mla" in tree:
        tree["mla"]["latent_norm_epsilon"] = tree["norm_epsilon"]
    at.write_text(json.dumps(tree))
    expected = export.config_of(at.parent).to_dict()
    for key in ("glu_offset", "activation_clamp"):
        del tree[key]
    for kind, key in (("attention", "sinks"), ("mla", "latent_norm_epsilon")):
        tree.get(kind, {}).pop(key, None)
    at.write_text(json.dumps(tree))
    assert export.config_of(at.parent).to_dict() == expected


# The code of an older export ---------------------------------------------------------------------------------------------


@pytest.fixture
def older(exports, tmp_path) -> Path:
    """An export whose code is another."""
    shutil.copytree(exports / "native", tmp_path / "hf")
    code = tmp_path / "hf" / "modeling_nam.py"
    code.write_text("# older\n" + code.read_text())
    (tmp_path / "hf" / "README.md").write_text("of whoever keeps it")
    tree = folder.load_json(tmp_path / "hf" / folder.MANIFEST)
    tree["files"]["modeling_nam.py"] = {"bytes": code.stat().st_size, "sha256": folder.digest(code)}
    folder.sign(tmp_path / "hf", tree)
    folder.verified(tmp_path / "hf")
    return tmp_path / "hf"


def files(at: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in at.iterdir()}


def test_refresh_gives_an_older_export_the_present_code(exports, older, capsys):
    before = files(older)
    assert command.main(["refresh", str(older)]) == 0
    assert capsys.readouterr().out == f"{older}: modeling_nam.py replaced\n"
    after = files(older)
    assert {name for name in before if before[name] != after[name]} == {"modeling_nam.py", folder.MANIFEST}
    assert after.keys() == before.keys() and after["modeling_nam.py"] == (export.MODEL / "modeling_nam.py").read_bytes()
    assert folder.verified(older) == folder.verified(exports / "native")
    assert command.main(["refresh", str(older)]) == 0
    assert capsys.readouterr().out == f"{older}: its code is the present one\n" and files(older) == after


def test_refresh_goes_on_where_it_was_interrupted_or_done_by_hand(exports, older):
    shutil.copyfile(export.MODEL / "modeling_nam.py", older / "modeling_nam.py")
    (older / "configuration_nam.py").unlink()
    assert command.main(["refresh", str(older)]) == 0
    assert folder.verified(older) == folder.verified(exports / "native")


def test_refresh_of_what_transformers_saved(exports, tmp_path, capsys):
    """It has no manifest, and keys of its own in its config; both are ours then."""
    from nam_megatron.hf.model.modeling_nam import NamForCausalLM

    NamForCausalLM.from_pretrained(exports / "author").save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf" / folder.MANIFEST).exists()
    (tmp_path / "hf" / "modeling_nam.py").write_text("older")
    assert command.main(["refresh", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "modeling_nam.py").read_bytes() == (export.MODEL / "modeling_nam.py").read_bytes()
    assert folder.verified(tmp_path / "hf")["step"] is None
    assert export.config_of(tmp_path / "hf").to_dict() == export.config_of(exports / "author").to_dict()


@pytest.mark.parametrize("what", ["weights", "config", "another value", "model", "nothing"])
def test_refresh_refuses_what_is_no_whole_export(older, capsys, what):
    if what == "weights":
        shard = next(older.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
    elif what == "config":  # a key of a later version, signed
        tree = json.loads((older / folder.CONFIG).read_text())
        (older / folder.CONFIG).write_text(json.dumps(tree | {"rotary_scale": 2}))
        folder.write_manifest(older, {})
    elif what == "another value":  # which the present code reads, and nobody signed
        tree = json.loads((older / folder.CONFIG).read_text())
        (older / folder.CONFIG).write_text(json.dumps(tree | {"norm_epsilon": 0.5}))
    elif what == "model":
        (older / folder.MANIFEST).unlink()
        (older / folder.CONFIG).write_text('{"model_type": "llama"}')
    else:
        shutil.rmtree(older)
    before = files(older) if older.exists() else None
    assert command.main(["refresh", str(older)]) == 2
    assert str(older) in capsys.readouterr().err
    assert (files(older) if older.exists() else None) == before
