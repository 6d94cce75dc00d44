"""Strictness of the recipe, through Hydra as a user meets it, and the exact text of what is said about mistakes."""

import copy
import inspect
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from presets import ALL, NAMES, lowered

from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.compile.plan import plan
from nam_megatron.errors import Refused
from nam_megatron.features.megatron_fsdp import MegatronFsdp
from nam_megatron.features.muon import Muon
from nam_megatron.judge import same
from nam_megatron.recipe import Recipe, conf_dir, from_tree, load, to_tree
from nam_megatron.recipe.keys import FOLLOWS, TRAINERS, config_at, keys_at, whole_hint
from nam_megatron.recipe.layout import Parallel
from nam_megatron.words.setting import NEEDED, Config, section

# overrides -> the whole text, line numbers as {file:key}
MESSAGES = {
    "a fraction": (
        ["model.depth=52.5"],
        "error: must be an integer, not 52.5 (float) @ model.depth (command line: model.depth=52.5)",
    ),
    "a boolean": (
        ["parallel.tensor=true"],
        "error: must be an integer, not true (bool) @ parallel.tensor (command line: parallel.tensor=true)",
    ),
    "a quoted number": (
        ['model.hidden_size="8"'],
        'error: must be an integer, not "8" (str) @ model.hidden_size (command line: model.hidden_size="8")',
    ),
    "a whole float": (
        ["schedule.train_steps=10.0", "schedule.decay_steps=10"],
        "error: must be an integer, not 10.0 (float) @ schedule.train_steps (command line: schedule.train_steps=10.0)",
    ),
    "a number for a switch": (
        ["feature.muon.enabled=1"],
        "error: must be true or false, not 1 (int) @ feature.muon.enabled (command line: feature.muon.enabled=1)",
    ),
    "no character": (
        ["schedule.save=''"],
        "error: must have at least 1 character, not \"\" @ schedule.save (command line: schedule.save='')",
    ),
    "not a number": (["optim.lr=nan"], "error: must be a finite number, not nan @ optim.lr (command line: optim.lr=nan)"),
    "infinite": (["optim.lr=inf"], "error: must be a finite number, not inf @ optim.lr (command line: optim.lr=inf)"),
    "null": (["model.depth=null"], "error: must be an integer, not null @ model.depth (command line: model.depth=null)"),
    "out of range": (
        ["schedule.seed=-1"],
        "error: must be greater than or equal to 0, not -1 @ schedule.seed (command line: schedule.seed=-1)",
    ),
    "a list for a number": (
        ["model.depth=[1,2]"],
        "error: must be an integer, not [1, 2] @ model.depth (command line: model.depth=[1,2])",
    ),
    "a number for a list": (
        ["model.substitute=3"],
        "error: must be a list, not 3 (int) @ model.substitute (command line: model.substitute=3)",
    ),
    "a number for a section": (
        ["model.blocks.mla=3"],
        "error: must be a mapping, not 3 (int) @ model.blocks.mla (command line: model.blocks.mla=3)",
    ),
    "a choice that is none": (
        ["model.normalization=RMSnorm"],
        "error: \"RMSnorm\" is not one of 'RMSNorm' or 'LayerNorm' @ model.normalization "
        "(command line: model.normalization=RMSnorm)\n\nhint: did you mean `RMSNorm`?",
    ),
    "a misspelt key": (
        ["model.hiden_size=8"],
        "error: unknown key `hiden_size`, did you mean `hidden_size`? @ model\n\n"
        "hint: `--cfg job` prints every key there is",
    ),
    "a misspelt key, forced": (
        ["+model.hiden_size=8"],
        "error: unknown key `hiden_size`, did you mean `hidden_size`? @ model (command line: +model.hiden_size=8)",
    ),
    "a misspelt section": (
        ["modl.depth=8"],
        "error: unknown key `modl`, did you mean `model`?\n\nhint: `--cfg job` prints every key there is",
    ),
    "a misspelt option": (["lane=nemonative"], "error: no lane `nemonative` @ lane\n\nhint: did you mean `nemo_native`? "
        "there are: author_dp, native_dp, nemo_native, own_dp"),
    "a key taken away": (
        ["~model.depth"],
        "error: key `depth` is missing @ model (command line: ~model.depth)\n\nhint: give it: `+model.depth=...`",
    ),
    "keys taken away": (
        ["~model.depth", "~model.vocab_size", "~optim.lr"],
        "error: 2 keys are missing: `depth` and `vocab_size` @ model (command line: ~model.depth)\n\n"
        "hint: give them in the file, or each by itself: `+model.depth=...`; "
        "docs/reference.md and `nam list keys` say what each is\n\n"
        "error: key `lr` is missing @ optim (command line: ~optim.lr)\n\nhint: give it: `+optim.lr=...`",
    ),
    "half of two keys' names": (
        ["+model.blocks.mamba={heads: 3}"],
        "error: unknown key `mamba`, did you mean `mamba2` or `mamba3`? @ model.blocks (command line: +model.blocks.mamba={heads: 3})",
    ),
    "a key that must be given": (
        ["model.depth=???"],
        "error: key `model.depth` must be given @ model.depth (command line: model.depth=???)\n\n"
        "hint: give it: `model.depth=...`",
    ),
    "a key that must be given and that another is linked to": (
        ["schedule.train_steps=???"],
        "error: key `schedule.train_steps` must be given @ schedule.train_steps (command line: schedule.train_steps=???)\n\n"
        "hint: give it: `schedule.train_steps=...`",
    ),
    "two keys that must be given": (
        ["data=indexed"],
        "error: 2 keys must be given: `data.path` ({data/indexed.yaml:path}) and `data.tokenizer` (line {data/indexed.yaml:tokenizer})\n\n"
        "hint: give them in the file or the command: `data.path=... data.tokenizer=...`",
    ),
    "a link to nothing": (
        ["model.depth=${model.dept}"],
        "error: Interpolation key 'model.dept' not found @ model.depth (command line: model.depth=${model.dept})\n\n"
        "hint: `${...}` names a key of the composed config",
    ),
    "a key that is there": (
        ["+model.depth=8"],
        "error: `model.depth` is there already @ model.depth\n\nhint: leave the `+` out",
    ),
    "no override": (
        ["model.depth"],
        "error: cannot read the override `model.depth`\n\n"
        "hint: it is read as KEY=VALUE; a value with blanks or signs needs quotes of its own: KEY=\"'...'\"",
    ),
    "several values": (
        ["model.depth=1,2"],
        "error: `model.depth=1,2` has several values\n\n"
        "hint: a list is `KEY=[a,b]`, one text `'model.depth=\"1,2\"'`; to sweep, add `--multirun` as the last word",
    ),
    "a group without a name": (
        ["lane=null"],
        "error: a group of configs takes the name of one of them\n\nhint: write GROUP=NAME; `--help` lists both",
    ),
    "an item short": (
        ["device.capability=[9]"],
        "error: item 1, counted from 0, is missing @ device.capability (command line: device.capability=[9])",
    ),
    "more than a flag takes": (
        ["schedule.manual_gc_interval=9999999999999999999999"],
        "error: an integer of more than 63 bits @ schedule.manual_gc_interval "
        "(command line: schedule.manual_gc_interval=9999999999999999999999)",
    ),
    "an item in a list": (
        ["model.substitute=[{letter: A, ranks: [1], kind: dsa, rank: 3}]"],
        "error: unknown key `rank`, did you mean `ranks`? @ model.substitute[0] "
        "(command line: model.substitute=[{letter: A, ranks: [1], kind: dsa, rank: 3}])",
    ),
    "a word that would be read as a flag": (
        ["schedule.save=--bf16", "schedule.save_interval=5"],
        'error: "--bf16" begins with a blank or `-`, or has a control character @ schedule.save '
        "(command line: schedule.save=--bf16)",
    ),
    "a folder for a name": (
        ["preset.name=../../etc"],
        'error: "../../etc" cannot be a file\'s name @ preset.name (command line: preset.name=../../etc)\n\n'
        "hint: letters, digits, `_`, `.` and `-`",
    ),
    "a line that would end a comment": (
        ['preset.about="x\nrm -r y"'],
        'error: "x\\nrm -r y" begins with a blank or `-`, or has a control character @ preset.about '
        '(command line: preset.about="x\nrm -r y")',
    ),
    "a value set in a file, wrong by what it links to": (
        ["schedule.train_steps=0"],
        "error: must be greater than 0, not 0 @ schedule.train_steps (command line: schedule.train_steps=0)\n"
        "error: must be greater than 0, not 0 @ schedule.decay_steps (command line: schedule.train_steps=0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MESSAGES)
def test_message(case):
    overrides, text = MESSAGES[case]
    with pytest.raises(Refused) as refused:
        load("nam56r", overrides)
    assert refused.value.render() == at_lines(text) + "\n"


def test_every_finding_is_said_at_once():
    with pytest.raises(Refused) as refused:
        load("nam56r", ["model.depth=0", "optim.lr=x", "model.blocks.moe.top_k=2.5", "+parallel.tensr=2"])
    keys = [p.key for p in refused.value.problems]
    assert keys == ["model.depth", "model.blocks.moe.top_k", "parallel", "optim.lr"]


FOLLOWED = {  # what somebody types -> what the hint says, which is then typed instead or too
    "a key of a kind, taken away": (["~model.blocks.moe.top_k"], "+model.blocks.moe.top_k=4"),
    "a key that hangs on another": (["~model.blocks.moe.expert_bias_update_rate"], "++model.blocks.moe.expert_bias_update_rate=0.1"),
    "no depth of full recompute": (
        ["feature.recompute.granularity=full"], "feature.recompute.method=uniform feature.recompute.layers=1",
    ),
    "no part to recompute": (["feature.recompute.granularity=selective"], "feature.recompute.modules=[core_attn]"),
    "no part to capture": (["feature.cuda_graphs.impl=transformer_engine"], "feature.cuda_graphs.modules=[attn]"),
    "plain data parallel": (
        ["feature.distributed_optimizer.enabled=false"], "feature.distributed_optimizer.overlap_param_gather=false",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "then"), FOLLOWED.values(), ids=FOLLOWED)
def test_a_hint_helps_who_follows_it_literally(words, then):
    with pytest.raises(Refused) as refused:
        translate(load("nam56r", words))
    hint = refused.value.problems[0].hint
    assert all(word.split("=")[0] in hint for word in then.split()), hint
    translate(load("nam56r", [*words, *then.split()]))


def test_one_key_of_a_kind_that_does_not_stand():
    """It says that none stands, and asks for no more keys of it."""
    with pytest.raises(Refused) as refused:
        load("nam56r_native_dp", ["~model.blocks.mamba3", "+model.blocks.mamba3.heads=4", "lane=native_dp"])
    (problem,) = refused.value.problems
    assert problem.message == "no layer is Mamba-3"


def test_a_letter_that_is_not_in_the_pattern_has_no_kind():
    with pytest.raises(Refused, match="the pattern has no `R`"):
        load("nam56r_native_dp", ["model.pattern=AEME", "model.letters.R=m2rnn"])
    assert load("nam56r_native_dp", ["model.pattern=AEME"]).model.letters.R is None


ALL_M = "model.substitute=[{letter: M, ranks: [0,1,2,3,4,5,6,7,8,9,10,11,12], kind: gdn}]"
OUTDONE = {
    "the lane's": ("nam56r_native_dp", ["model.letters.M=gdn"], ("model.letters.M", "puts `mamba2` at `M`", "lane.blocks.M=gdn")),
    "the designed lane's": ("nam56r", ["model.letters.M=mamba2"], ("model.letters.M", "puts `mamba3` at `M`", "lane=own_dp")),
    "at R": ("nam56r_native_dp", ["model.letters.R=mamba3"], ("model.letters.R", "puts `mamba2` at `R`", "lane.blocks.R=mamba3")),
    "nothing": ("nam56r_native_dp", ["model.letters.M=null"], ("model.letters.M", "puts `mamba2` at `M`", "leave it out")),
    "all letters at once": ("nam56r_native_dp", ["model.letters={R: mamba2, M: gdn}"], ("model.letters.M", "`mamba2` at `M`", "")),
    "beside a lane of one's own": ("nam56r", ["model.letters.M=gdn", "lane.blocks.M=mamba2", "lane.name=mine"],
                                   ("model.letters.M", "lane `mine` puts `mamba2` at `M`", "")),
    "an illegal one": ("nam56r", ["model.letters.M=m2rnn"], ("model.letters.M", "`m2rnn` cannot stand at `M`", "mamba2")),
    "a letter that is substituted": ("nam56r", ["lane=own_dp", "model.letters.M=mamba2", "model.activation=swiglu", ALL_M],
                                     ("model.letters.M", "no `M` is `mamba2`", "leave some ranks out")),
    "a lane that is substituted": ("nam56r_native_dp", ["model.activation=swiglu", ALL_M],
                                   ("lane.blocks.M", "no `M` is `mamba2`", "lane=own_dp")),
    "experts that are substituted": ("nam56r_native_dp", [
        "model.pattern=AEME", "model.depth=4", "model.letters.E=mlp", "model.substitute=[{letter: E, ranks: [0, 1], kind: moe}]"],
        ("model.letters.E", "no `E` is `mlp`", "leave some ranks out")),
}  # fmt: skip


def test_a_model_that_is_chosen_and_a_preset_that_makes_another_of_it():
    with pytest.raises(Refused) as refused:
        load("nam56r_native_dp", ["model=nam56r"])
    (problem,) = refused.value.problems
    assert (
        "`model.letters.A=attention`" in problem.message
        and "model.letters.A=mla model.substitute=[{letter: A," in problem.hint
    )
    whole = re.search(r"`(model\.letters.*?)`; or", problem.hint)[1]
    as_it_is = load("nam56r_native_dp", ["model=nam56r", *re.split(r" (?=model\.)", whole)])
    assert as_it_is.model.substitute[0].kind == "dsa" and load("nam56r", ["model=nam52r"]).model.family == "NAM52R"


def test_a_layout_of_a_lane_that_another_key_outdoes():
    """A lane's file is where layouts begin; what is typed is meant."""
    words = ["lane.tensor=2", "lane.sequence=true", "lane.name=mine"]
    with pytest.raises(Refused) as refused:
        load("nam56r_native_dp", [*words, "parallel.tensor=4"])
    assert [p.key for p in refused.value.problems] == ["lane.tensor"]
    assert load("nam56r_native_dp", words).parallel.tensor == 2
    assert load("nam56r_native_dp", ["lane=nemo_native", "parallel.tensor=4"]).parallel.tensor == 4


@pytest.mark.parametrize("case", OUTDONE.values(), ids=OUTDONE)
def test_a_letter_is_what_was_said_or_refused(case):
    name, words, (key, message, hint) = case
    with pytest.raises(Refused) as refused:
        load(name, words)
    (problem,) = refused.value.problems
    assert problem.key == key and message in problem.message and hint in problem.hint


@pytest.mark.parametrize(
    ("words", "kind", "count"),
    [
        (["lane=own_dp", "model.letters.M=mamba2"], "mamba2", 13),
        (["lane.blocks.M=mamba2", "lane.name=mine"], "mamba2", 13),
        (["model.letters.M=mamba3"], "mamba3", 13),  # what stands there anyway
        (["model.letters.A=dsa"], "mla", 0),
        (["model.substitute=[{letter: M, ranks: [3], kind: mamba2}]"], "mamba2", 1),
    ],
)
def test_a_letter_that_has_its_way(words, kind, count):
    assert len(plan(load("nam56r", words)).numbers(kind)) == count


def test_a_letter_of_a_preset_of_ones_own_loses_to_no_lane(tmp_path):
    """A model's file is a design, from which lanes may depart; what a preset or an overlay says is meant."""
    for group in ("preset", "overlay"):
        (tmp_path / group).mkdir()
    head = "# @package _global_\n"
    said = "model: {letters: {M: gdn}}\n"
    (tmp_path / "overlay" / "delta.yaml").write_text(head + said)
    (tmp_path / "preset" / "mine.yaml").write_text(
        f"{head}defaults: [nam56r_native_dp, _self_]\npreset: {{name: mine}}\n{said}"
    )
    search = f"hydra.searchpath=[file://{tmp_path}]"
    for name, words in (("mine", []), ("nam56r_native_dp", ["+overlay=delta"])):
        with pytest.raises(Refused) as refused:
            load(name, [search, *words])
        assert [p.key for p in refused.value.problems] == ["model.letters.M"]
        assert f"{tmp_path}/" in refused.value.render()
        assert plan(load(name, [search, *words, "lane=own_dp", "model.activation=swiglu"])).numbers("gdn")


def test_a_kind_whose_letter_is_not_written():
    with pytest.raises(Refused) as refused:
        load("nam56r_native_dp", ["model.pattern=EMEM", "model.blocks.attention.head_dim=64"])
    assert "write `A` into `model.pattern`" in refused.value.problems[0].hint


def test_a_misspelt_preset_is_guessed():
    with pytest.raises(Refused) as refused:
        load("nam56r_nemo_nativ")
    (problem,) = refused.value.problems
    assert problem.message == "no preset `nam56r_nemo_nativ`"
    assert problem.hint.startswith("did you mean `nam56r_nemo_native`? there are: " + ", ".join(ALL))


def test_a_wrong_value_in_a_file_names_its_line(tmp_path, monkeypatch):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    file = tmp_path / "conf" / "model" / "nam56r.yaml"
    file.write_text(
        file.read_text().replace("hidden_size: 3584", "hidden_size: 3584.5").replace("\nnorm_epsilon", "\nnorm_epsilom")
    )
    for module in ("conf", "compile.compose", "compile.files", "compile.sources"):
        monkeypatch.setattr(f"nam_megatron.{module}.conf_dir", lambda: tmp_path / "conf")
    with pytest.raises(Refused) as refused:
        load("nam56r")
    lines = [line for line in refused.value.render().splitlines() if line.startswith("error")]
    here, there = at_lines("{model/nam56r.yaml:hidden_size}"), at_lines("{model/nam56r.yaml:norm_epsilon}")
    assert lines == [
        f"error: must be an integer, not 3584.5 (float) @ model.hidden_size ({here})",
        f"error: unknown key `norm_epsilom`, did you mean `norm_epsilon`? @ model ({there})",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name):
    recipe = lowered(name).plan.recipe
    assert from_tree(to_tree(recipe)) == recipe


def later(cls: type[Config], at: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that came after plans had been stored without them, and what these meant."""
    for name, field in cls.model_fields.items():
        if inner := section(field.annotation):
            yield from later(inner, f"{at}{name}.")
        if (was := cls.row(name).was) is not NEEDED:
            yield f"{at}{name}", was


CAME_LATER = dict(later(Recipe))


def test_every_key_that_came_later_has_the_value_that_older_plans_meant():
    asked = set()
    for name in ("nam56r", "nam56r_native_dp", "nam56r_native_dp_fp8"):
        recipe = lowered(name).plan.recipe
        tree = to_tree(recipe)
        for key, was in CAME_LATER.items():
            node = tree
            *parents, last = key.split(".")
            for parent in parents:
                node = node.get(parent, {})
            if node:
                assert node.pop(last, None) == was
                asked.add(key)
        assert from_tree(tree) == recipe
    assert asked == CAME_LATER.keys()


@pytest.mark.parametrize("name", ["nam56r", "nam56r_native_dp", "nam56r_native_dp_fp8"])
def test_a_plan_without_keys_that_came_later_computes_the_same(name):
    """A run of then can be resumed."""
    plan = json.loads(argv.plan_json(lowered(name)))
    older = copy.deepcopy(plan)
    for key in CAME_LATER:
        node = older["recipe"]
        *parents, last = key.split(".")
        for parent in parents:
            node = node.get(parent, {})
        node.pop(last, None)
    assert older != plan and list(same.differences(older, plan)) == []


WHOLE = ("cluster=h200_1", "feature.cuda_graphs.impl=full_iteration")


@pytest.mark.parametrize(
    ("preset", "words", "ways"),
    [
        ("llama_3_8b", ("feature.fp8.recipe=blockwise",), 2),
        ("llama_3_8b", ("feature.fp8.recipe=tensorwise", "feature.fp8.param_gather=true"), 2),
        ("llama_3_8b", ("feature.recompute.granularity=selective", "feature.recompute.modules=[core_attn]"), 1),
        (
            "nam56r_fused",
            (
                "+overlay=fp8",
                "feature.fp8.recipe=blockwise",
                "feature.fp8.keep_inputs=false",
                "feature.fp8.bf16_parts=[experts,latents,m2rnn]",
            ),
            2,
        ),
    ],
)
def test_each_way_out_of_a_graph_of_the_whole_step_is_one(preset, words, ways):
    """A hint does not lead into the next refusal."""
    asked = [*WHOLE, *words]
    with pytest.raises(Refused) as refused:
        translate(load(preset, asked))
    hint = next(p.hint for p in refused.value.problems if "has not been tried with" in p.message)
    found = [re.findall(r"`([\w.]+=[^`]+)`", way) for way in hint.split(", or ")]
    assert sum(map(bool, found)) == ways
    for given in filter(None, found):
        keys = {word.partition("=")[0] for word in given}
        translate(load(preset, [*(word for word in asked if word.partition("=")[0] not in keys), *given]))


def test_parts_in_bf16_are_a_set():
    (one, other) = (
        load("nam56r_fused", ("+overlay=fp8", f"feature.fp8.bf16_parts={parts}"))
        for parts in ("[experts,latents,m2rnn]", "[m2rnn,experts,latents,experts]")
    )
    assert one == other


ALIASES = {
    "nam52_h200_moe_no_dsa_ref_v1": "nam52_h200_dense_ref_v1",
    "nam52r_h200_prod_candidate_v1": "nam52r_h200_4full_9sparse_candidate_v1",
    "nam56r_author_dp": "nam56r",
}


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_its_target_under_another_name(name):
    alias = lowered(name)
    target = lowered(alias.plan.recipe.preset.alias_of)
    ours, theirs = to_tree(alias.plan.recipe), to_tree(target.plan.recipe)
    assert ours["preset"].pop("name") == name
    assert ours["preset"].pop("alias_of") == theirs["preset"].pop("name")
    assert theirs["preset"].pop("alias_of") is None, "an alias of an alias"
    assert ours == theirs
    assert alias.settings == target.settings


def test_the_aliases_are_the_published_ones():
    targets = {name: lowered(name).plan.recipe.preset.alias_of for name in NAMES}
    assert {name: target for name, target in targets.items() if target} == ALIASES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_knows_its_own_name(name):
    assert lowered(name).plan.recipe.preset.name == name


@pytest.mark.parametrize(
    "name, meaning",
    [
        ("current", "what a wave of runs took as its baseline, another preset in the next wave"),
        ("HEAD", "whatever was launched from HEAD, so a revision and no recipe"),
        ("head", "whatever was launched from HEAD, so a revision and no recipe"),
        ("v19c", "the tag of a wave of runs"),
    ],
)
def test_names_of_runs_are_no_presets(name, meaning):
    with pytest.raises(Refused) as refused:
        load(name)
    assert refused.value.render() == (
        f"error: `{name}` is no preset but {meaning} @ preset\n\n"
        f"hint: name the preset that was run; its receipt says which. There are: {', '.join(ALL)}\n"
    )


def test_a_lane_does_not_change_the_attention_or_mtp():
    """`lane=nemo_native` is layout and the blocks at M and R; only the preset of that name chooses GQA and no MTP."""
    ours = lowered("nam56r", "lane=nemo_native")
    assert ours.plan.pattern == lowered("nam56r").plan.pattern
    assert {"mla", "dsa", "mamba2"} <= ours.plan.kinds
    assert ours.by_name["tensor_model_parallel_size"].value == 2
    assert [s.designed for s in ours.plan.substitutions] == ["mamba3", "m2rnn"]


def test_a_recipe_cannot_be_changed():
    recipe = lowered("nam56r").plan.recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.model.depth = 3
    with pytest.raises(ValueError, match="frozen"):
        recipe.blocks.mla.q_lora_rank = 3


def models(model=Recipe):
    """Every model in the recipe's tree."""
    yield model
    for field in model.model_fields.values():
        for t in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if inspect.isclass(t) and hasattr(t, "model_fields"):
                yield from models(t)


def test_no_value_has_its_default_in_python():
    """None is no value: it marks what may not stand at all."""
    fields = ((f"{m.__name__}.{n}", f) for m in models() for n, f in m.model_fields.items())
    assert {name for name, field in fields if not field.is_required() and field.default is not None} == set()


def leaves(tree, path=()):
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


TREE = to_tree(lowered("nam56r").plan.recipe)


@pytest.mark.parametrize("path", [".".join(p) for p, _ in leaves(TREE)])
def test_no_leaf_is_coerced(path):
    """A value of every other type is refused at every leaf, and the message names the leaf."""
    *parents, last = path.split(".")
    for wrong in (1, 1.5, True, "1", "x", None, [1], {"x": 1}, float("nan")):
        tree = copy.deepcopy(TREE)
        node = tree
        for key in parents:
            node = node[key]
        if path == "model.depth" and wrong == 1:
            continue  # an integer, and refused for what it does to the pattern
        node[last] = wrong
        try:
            got = to_tree(from_tree(tree))
        except Refused as refused:
            for problem in refused.problems:
                assert (problem.key or "").startswith(path), f"{path} = {wrong!r}: {problem}"
            continue
        for key in parents:
            got = got[key]
        assert got.get(last) == wrong or (got.get(last) is None and wrong is None)
        assert type(got.get(last)) is type(wrong) or (type(got.get(last)), type(wrong)) == (float, int), (
            f"{path}: {wrong!r}"
        )


def test_a_context_manager_of_hydra_is_left_alone():
    """`load` inside a Hydra app (diff=...) gives the app its own Hydra back."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert translate(load("nam56r_smoke")).plan.recipe.model.depth == 12
        assert compose("recipe").model.depth == 52


def at_lines(text: str) -> str:
    """`{data/mock.yaml:name}` -> conf/data/mock.yaml:LINE, behind `line ` LINE alone, so that a comment more in a file breaks no test."""

    def line(match):
        before, file, key = match.groups(default="")
        lines = (conf_dir() / file).read_text().splitlines()
        number = next(i for i, l in enumerate(lines, 1) if re.match(rf" *{key}:", l))
        return f"{before or f'conf/{file}:'}{number}"

    return re.sub(r"(line )?\{([\w/]+\.yaml):(\w+)\}", line, text)


@pytest.mark.parametrize(
    ("items", "says"), [("[9,0,1]", "must have at most 2 items, not 3"), ("[9]", "item 1, counted from 0, is missing")]
)
def test_a_list_of_another_length_is_refused_by_its_key(items, says):
    with pytest.raises(Refused) as refused:
        load("nam56r", [f"device.capability={items}"])
    (problem,) = refused.value.problems
    assert says in problem.message and problem.key.startswith("device.capability")


@pytest.mark.parametrize("preset", ["nam56r_native_dp", "nam56r"])
def test_the_base_of_angles_is_read_wherever_a_layer_has_them(preset):
    told = {s.name: s.value for s in translate(load(preset, ["model.rotary_base=10007"])).settings}
    assert told["rotary_base"] == 10007


def test_a_stored_recipe_with_a_key_that_nothing_reads_is_refused():
    """DeepSeek-V3's YaRN turns MLA, whose ramp is always at whole columns."""
    tree = to_tree(load("deepseek_v3_yarn"))
    tree["feature"]["yarn"]["rounded"] = True
    with pytest.raises(Refused, match="nothing reads this") as refused:
        from_tree(tree)
    assert [p.key for p in refused.value.problems] == ["feature.yarn.rounded"]


def test_a_rank_lacks_what_stands_in_none_of_its_segments():
    """Segments are dealt out one rank after the other: of four, two ranks have 0 and 2, and 1 and 3."""
    layout = Parallel.model_construct(pipeline=2, virtual_pipeline=2)
    site = SimpleNamespace(layers=[SimpleNamespace(segment=segment) for segment in (0, 1, 2, 3)])
    for has in itertools.product((False, True), repeat=4):
        assert layout._lacks([*has], site) == (not (has[0] or has[2]) or not (has[1] or has[3])), has


def test_tensor_ranks_of_experts_alone_share_matrices_of_muons():
    muon = Muon.model_construct()
    for tensor, expert_tensor in itertools.product((1, 2), repeat=2):
        site = SimpleNamespace(kinds={"attention"}, tensor=tensor, expert_tensor=expert_tensor)
        assert bool([*muon.unread(site)]) == (tensor == expert_tensor == 1)


def test_lone_experts_are_scaled_again_only_where_their_gradients_are_sharded_and_summed():
    for strategy, several, peers in itertools.product(
        ("optim", "optim_grads", "optim_grads_params"), (False, True), (1, 2)
    ):
        site = SimpleNamespace(
            kinds={"moe"}, blocks=SimpleNamespace(dsa=None), tensor=1, micro_batch_size=1, data_parallel=4,
            global_batch_size=8 if several else 4, expert_data_parallel=peers,
        )  # fmt: skip
        found = [*MegatronFsdp.model_construct(strategy=strategy).alone(site)]
        assert bool(found) == (strategy != "optim" and several and peers == 1)


def test_what_other_trainers_call_a_key_leads_to_one():
    """And is told: nothing else that is said of a word stands before it."""
    for name, key in TRAINERS.items():
        parents = key.split(".")[:-1]
        assert config_at(parents) and key.split(".")[-1] in keys_at(parents), key
        assert whole_hint([f"{parents[0] if parents else 'model'}.{name}"]).startswith(
            f"what others call `{name}` is `{key}` here"
        )
    assert all(f"`{key}`" in whole_hint([name]) for name, why in FOLLOWS.items() for key in why.split("`")[1::2])
