"""Files that were merged once are merged again when, and only when, one that counts is another; what comes out is Hydra's own."""

import os
import shutil

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from nam_megatron.compile import files
from nam_megatron.compile.compose import composed
from nam_megatron.compile.sources import word
from nam_megatron.conf import conf_dir
from nam_megatron.errors import Refused

CHOICE = ["preset=nam56r_smoke", "optim=muon", "+overlay=fused"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["optim.lr=0.5", "model.blocks.moe={top_k: 2}"],
        ["++allow.x=why", "~data.workers", "cluster={gpus_per_node: 3}"],
        ["lane=nemo_native", "model.letters.A=gqa"],
    ],
)
def test_what_is_composed_is_what_hydra_composes(words):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        theirs = compose("recipe", overrides=[*CHOICE, *words])
        merged = GlobalHydra.instance().config_loader().compute_defaults_list("recipe", [*CHOICE, *words], "RUN")
    for _ in range(2):
        ours, sources = composed("recipe", [*CHOICE, *words])
        assert ours == theirs
        laid = [(d.config_path, d.package) for d, path in sources._merged]
        assert laid == [(d.config_path, d.package) for d in merged.defaults if not d.config_path.startswith("hydra")]


def test_words_of_values_merge_no_file_again_and_leave_nothing_behind(monkeypatch):
    plain, _ = composed("recipe", CHOICE)
    monkeypatch.setattr(files.Folder, "load_config", None)
    changed, _ = composed("recipe", [*CHOICE, "optim.lr=0.5", "model.depth=7"])
    changed.data.workers = 9
    assert (changed.optim.lr, changed.model.depth) == (0.5, 7)
    assert composed("recipe", CHOICE)[0] == plain


def test_a_file_that_is_written_to_or_added_is_seen(tmp_path, monkeypatch):
    def optim(*words):
        return composed("recipe", words or [f"hydra.searchpath=[{tmp_path}]", "preset=mine"])[0].optim

    mine = tmp_path / "preset" / "mine.yaml"
    mine.parent.mkdir()
    head = "# @package _global_\ndefaults: [nam56r_smoke, {/more@optim: mine}, _self_]\n"
    mine.write_text(head + "optim: {lr: 0.5}\n")
    with pytest.raises(Refused, match="mine"):
        optim()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.yaml").write_text("beta1: 0.25\n")
    assert (optim().lr, optim().lr) == (0.5, 0.5)
    was = mine.stat()
    mine.write_text(head + "optim: {lr: 0.2}\n")  # of the same size and, as a copy may be, the same time
    os.utime(mine, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (optim().lr, optim().beta1) == (0.2, 0.25)
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other" / "preset" / "mine.yaml"
    other.parent.mkdir(parents=True)
    other.write_text(head + "optim: {lr: 0.3}\n")
    shutil.copytree(tmp_path / "more", tmp_path / "other" / "more")
    relative = ["preset=mine", "hydra.searchpath=['.']"]
    assert optim(*relative).lr == 0.2
    monkeypatch.chdir(tmp_path / "other")
    assert optim(*relative).lr == 0.3


def test_a_program_with_hydra_of_its_own_keeps_it():
    """What is refused in our words is not ours to refuse in another's."""
    with pytest.raises(Refused, match="given twice"):
        word("x={a:1,a:2}", ())
    (of_others,) = OverridesParser.create().parse_overrides(["x={a:1,a:2}"])
    assert of_others.value() == {"a": 2}
