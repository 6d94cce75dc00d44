"""The command as users run it: forms of output, files, questions, exit codes, and what is said about bad input."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import TRANSLATE, cold, on_terminal, unbuilt, warm
from presets import ALL, FLAGS, NAMES, lowered

from nam_megatron import report
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import budget
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.features.names import FEATURES
from nam_megatron.recipe import conf_dir, load
from nam_megatron.translate import unset

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def here(tmp_path):
    """An empty folder to run in; what a command leaves there is seen."""
    yield tmp_path
    assert not {"outputs", "multirun", ".hydra", "multirun.yaml"} & {p.name for p in tmp_path.rglob("*")}


def one_error(ran, *parts):
    """Exit code 2, nothing on stdout, no traceback, one error and one hint."""
    assert (ran.code, ran.out) == (2, ""), ran
    assert "Traceback" not in ran.err and "Error executing job" not in ran.err
    assert ran.err.startswith("error: ") and ran.err.count("error: ") == 1, ran.err
    assert ran.err.count("\nhint: ") == 1, ran.err
    for part in parts:
        assert part in ran.err, ran.err


# Forms --------------------------------------------------------------------------------------------------------------


def test_in_a_pipe_it_is_plain_words(here):
    ran = cold("conf=nam56r", cwd=here)
    assert ran.code == 0
    assert ran.out.split() == list(argv.words(lowered("nam56r")))
    assert ran.out.count("\n") == 1
    # What the words alone would not tell: a cut tile, and which layers stock Megatron would take for others.
    told = [*report.tiling(lowered("nam56r").plan), *report.only_here(lowered("nam56r").plan)]
    assert ran.err == "".join(f"note: {line}\n" for line in told) and len(told) == 4
    assert "--nam-model dsa+mamba3+m2rnn:" in ran.out
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("words", [(), ("format=json",), ("format=lines",), ("out=d",)])
def test_a_pipe_gets_nothing_of_what_is_not_built(words, here):
    ran = warm("conf=nam56r", *words, cwd=here, before=unbuilt)
    assert (ran.code, ran.out, list(here.iterdir())) == (3, "", [])
    assert ran.err == (
        "error: mamba3 is not built (the mixer): nothing is written that would train without it\n\n"
        "hint: `python -m nam_megatron.budget` prices it; `explain=` and `diff=` answer about it\n"
    )


def test_stock_megatron_refuses_the_marker_and_takes_the_rest(oracle):
    """A product that only we train says so in an argument of its own; one that Megatron trains rightly has none."""
    for name, ours in (("nam56r", True), ("nam56r_native_dp", False), ("nam52_h200_dense_no_mhc_recovery_v1", True)):
        lowering = lowered(name)
        env = {e.name: e.value for e in lowering.env}
        said = argv.words(lowering)
        assert ("--nam-model" in said) is ours
        answer = oracle.ask(said, 8, (9, 0), env)
        assert ("unrecognized arguments: --nam-model" in (answer.error or "")) is ours
        assert oracle.ask(argv.argv(lowering), 8, (9, 0), env).error is None


def test_the_words_survive_a_shells_substitution(here):
    """`$(...)` splits the words exactly as argv has them, although the pattern has stars and plus signs."""
    script = (
        f'printf "%s\\n" $({sys.executable} -m {TRANSLATE} conf=nam56r_nemo_native parallel.pipeline=2 2>/dev/null)'
    )
    done = subprocess.run(["bash", "-c", script], cwd=here, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.splitlines() == list(argv.words(lowered("nam56r_nemo_native", "parallel.pipeline=2")))


@pytest.mark.parametrize("form", ["shell", "lines", "json", "yaml"])
def test_formats(form, here):
    ran = warm("conf=nam56r", f"format={form}", cwd=here)
    assert ran.code == 0
    assert ran.out == argv.FORMATS[form](lowered("nam56r"))
    assert ran == warm("conf=nam56r", f"format={form}", cwd=here), "byte-identical twice"


@pytest.mark.parametrize("blank", [" ", "\N{NO-BREAK SPACE}"], ids=["space", "no-break space"])
def test_a_word_that_a_reader_would_split_is_refused_in_shell_form_only(here, blank):
    words = ("conf=nam56r_native_dp", "data=indexed", f"data.path='/my{blank}data/x'", "data.tokenizer=/t")
    one_error(warm(*words, cwd=here), f"change `/my{blank}data/x` in `$(...)`", "out=DIR")
    assert warm(*words, "format=lines", cwd=here).code == 0
    assert warm(*words, "out=d", cwd=here).code == 0
    shown = subprocess.run(
        ["bash", "-n", "d/run.sh"], cwd=here, check=True, timeout=600, capture_output=True, text=True
    )
    assert shown.stderr == ""
    assert f"'/my{blank}data/x'" in (here / "d" / "run.sh").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_conf_preset_and_both_spellings_agree(name):
    """`conf=NAME` is `preset=NAME`; only the conf= of the words, not of a value, is rewritten."""
    if name == "nam56r_smoke":
        ran = warm(f"preset={name}", "lane.name='conf=y'")
        assert ran.out == warm(f"conf={name}", "lane.name='conf=y'").out != ""
    said = [] if lowered(name).plan.not_built else list(argv.words(lowered(name)))
    assert warm(f"conf={name}").out.split() == said


# Files --------------------------------------------------------------------------------------------------------------


def test_out_writes_three_files(here):
    ran = warm("conf=nam56r_smoke", "out=a/b", cwd=here)
    assert (ran.code, ran.out, ran.err.splitlines()[0]) == (0, "", "wrote a/b/args.txt, run.sh, plan.json")
    folder = here / "a" / "b"
    assert sorted(p.name for p in folder.iterdir()) == ["args.txt", "plan.json", "run.sh"]
    lowering = lowered("nam56r_smoke")
    assert (folder / "args.txt").read_text() == argv.lines(lowering)
    assert argv.load_plan(folder / "plan.json") == lowering
    subprocess.run(["bash", "-n", folder / "run.sh"], check=True, timeout=600)
    assert os.access(folder / "run.sh", os.X_OK)


def test_out_says_what_it_replaces(here):
    for _ in ("new", "the same plan"):
        ran = warm("conf=nam56r_smoke", "out=d", cwd=here)
        assert ran.err.startswith("wrote d/args.txt, run.sh, plan.json\n") and "replaced" not in ran.err
    (here / "d" / "mine.txt").write_text("mine")
    ran = warm("conf=nam56r_native_dp", "out=d", cwd=here)
    assert ran.code == 0 and ran.err.startswith("note: replaced args.txt, run.sh, plan.json in d: of another plan")
    assert argv.load_plan(here / "d" / "plan.json") == lowered("nam56r_native_dp")
    assert sorted(p.name for p in (here / "d").iterdir()) == ["args.txt", "mine.txt", "plan.json", "run.sh"]


def test_a_pipe_where_a_file_would_be_written_is_refused(here):
    os.mkfifo(here / "plan.json")
    one_error(warm("conf=nam56r_smoke", "out=.", cwd=here), "`plan.json` is a pipe, and no file @ out", "take it away")


@pytest.mark.parametrize("name", ["args.txt", "run.sh", "plan.json"])
def test_out_replaces_nothing_that_is_not_its_own(name, here):
    (here / name).write_text("#!/bin/sh\n{}\n")
    one_error(
        warm("conf=nam56r_smoke", "out=.", cwd=here), f"`{name}` was not written by `translate` @ out", "another folder"
    )
    assert [(p.name, p.read_text()) for p in here.iterdir()] == [(name, "#!/bin/sh\n{}\n")]


def test_out_leaves_alone_what_says_of_itself_what_it_is(here):
    """The plan of checkpoints was replaced with a note; of an export, a record or a step, whatever had come to them was damage."""
    assert warm("conf=nam56r_smoke", "out=runs", cwd=here).code == 0
    (here / "runs" / "latest_checkpointed_iteration.txt").write_text("2")
    assert warm("conf=nam56r_smoke", "out=runs", cwd=here).code == 0  # the same plan
    was = (here / "runs" / "plan.json").read_text()
    other = ("conf=nam56r_smoke", "schedule.seed=7")
    one_error(warm(*other, "out=runs", cwd=here), "`runs/plan.json` says what the checkpoints beside it are", "another")
    for number, name in enumerate(("nam_export.json", "nam_export.json", "receipt.json", "integrity.json")):
        (here / str(number)).mkdir()
        (here / str(number) / name).touch()
        below = "1/in/it" if number == 1 else number
        one_error(warm(*other, f"out={below}", cwd=here), "nothing else belongs there @ out", "a place of its own")
        assert [path.name for path in (here / str(number)).iterdir()] == [name]
    (here / "link").symlink_to("1/in")
    one_error(warm(*other, "out=link/it", cwd=here), "nothing else belongs there @ out", "a place of its own")
    assert warm(*other, "out=1/../beside", cwd=here).code == 0
    assert (here / "runs" / "plan.json").read_text() == was


def test_out_writes_all_files_or_none(here):
    (here / "plan.json").mkdir()
    one_error(warm("conf=nam56r_smoke", "out=.", cwd=here), "cannot write to `.`")
    assert [p.name for p in here.iterdir()] == ["plan.json"]


def test_run_script_hands_torchrun_every_word(here):
    """Run with a Python that prints what it gets: the words, the plan and the environment."""
    for name in ("nam56r_nemo_native", "nam56r_native_dp_fp8"):
        assert warm(f"conf={name}", f"out={name}", cwd=here).code == 0
        fake = here / "bin"
        fake.mkdir(exist_ok=True)
        says = '[ "$1" = -c ] || printf "%s\\n" "$@" "C=${CUDA_DEVICE_MAX_CONNECTIONS-unset}"'
        (fake / "python").write_text(f"#!/bin/sh\n{says}\n")
        (fake / "python").chmod(0o755)
        env = {"PATH": f"{fake}:{os.environ['PATH']}", "CUDA_DEVICE_MAX_CONNECTIONS": "7"}
        done = subprocess.run(
            [here / name / "run.sh"], env=env, capture_output=True, text=True, check=True, timeout=600, cwd="/"
        )
        *words, connections = done.stdout.splitlines()
        start = words.index("nam_megatron.train")
        assert words[:start] == ["-m", "nam_megatron.torchrun", "--nproc-per-node", "8", "--standalone", "-m"]
        assert words[start + 1 : start + 3] == ["--nam-plan", str(here / name / "plan.json")]
        assert words[start + 3 :] == list(argv.words(lowered(name)))
        assert connections == ("C=1" if name == "nam56r_nemo_native" else "C=unset")


def test_run_script_of_several_nodes_wants_its_rank(here):
    assert warm("conf=nam56r_native_dp", "cluster=h200_2x8", "parallel.pipeline=2", "out=d", cwd=here).code == 0
    (here / "python").write_text("#!/bin/sh\n")
    (here / "python").chmod(0o755)
    for path, missing in ((f"{here}:/usr/bin:/bin", "NODE_RANK"), ("/usr/bin:/bin", "no nam_megatron here")):
        env = {"PATH": path}
        done = subprocess.run(
            [here / "d" / "run.sh"], capture_output=True, text=True, check=False, timeout=600, env=env
        )
        assert done.returncode != 0 and missing in done.stderr


def test_an_edited_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    text = argv.plan_json(lowered("nam56r_smoke"))
    tree = json.loads(text)
    path.write_text(text)
    assert argv.load_plan(path) == lowered("nam56r_smoke")
    edits = {
        "an argument": lambda t: t["argv"].remove("--bf16"),
        "a setting": lambda t: t["settings"][3].update(value=8),
        "a layer": lambda t: t["layers"][0].update(kind="mla"),
        "the recipe": lambda t: t["recipe"]["model"].update(hidden_size=512),
        "the recipe, wrongly": lambda t: t["recipe"]["model"].update(hidden_size=512.5),
        "a Megatron": lambda t: t.update(megatron_core="9.9.9"),
        "a variable less": lambda t: t["env"].popitem(),
        "a key more": lambda t: t["recipe"]["model"]["blocks"].update(
            attention={"head_dim": 64, "query_groups": 8, "qk_norm": False}
        ),
    }
    for what, edit in edits.items():
        edited = json.loads(text)
        edit(edited)
        assert edited != tree, what
        path.write_text(json.dumps(edited, indent=1) + "\n")
        with pytest.raises(Refused):
            argv.load_plan(path)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"{}", b"3", b'{"recipe": 3}', b'{"recipe": {}}', b"\xff", b"[" * 100000, b"9" * 5000],
)
def test_a_file_that_is_no_plan_is_refused(content, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Refused) as refused:
        argv.load_plan(path)
    text = refused.value.render()
    assert str(path) in text and "hint: " in text
    assert not re.search(r"Errno|: 'recipe'|indices|subscriptable", text), "Python's words for it say nothing to a user"


# Questions ----------------------------------------------------------------------------------------------------------


def answer(*words):
    ran = warm(*words)
    assert (ran.code, ran.err) == (0, ""), ran
    return {line.split(None, 1)[0]: line.split(None, 1)[1] for line in ran.out.splitlines()[1:]}


def line_of(file, key):
    lines = (conf_dir() / file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if re.match(rf" *{key}:", line))


def test_explain_what_a_file_sets():
    assert answer("conf=nam56r", "explain=--rotary-base") == {
        "says": "--rotary-base 500000",
        "owner": "model",
        "set": f"model.rotary_base @ conf/model/nam56r.yaml:{line_of('model/nam56r.yaml', 'rotary_base')}",
        "why": "RoPE theta",
        "default": "10000 in Megatron 0.19.2",
    }


def test_explain_what_the_lane_sets_through_a_link():
    said = answer("conf=nam56r_nemo_native", "explain=--tensor-model-parallel-size")
    assert said["says"] == "--tensor-model-parallel-size 2"
    assert said["set"] == f"parallel.tensor @ conf/lane/nemo_native.yaml:{line_of('lane/nemo_native.yaml', 'tensor')}"


def test_explain_what_a_preset_sets_over_the_model():
    said = answer("conf=nam56r_native_dp_fp8", "explain=--mamba-num-heads")
    assert said["set"] == (
        f"model.blocks.mamba2.heads @ conf/preset/nam56r_native_dp_fp8.yaml:{line_of('preset/nam56r_native_dp_fp8.yaml', 'mamba2')}"
    )


def test_explain_what_a_preset_inherits_from_another():
    said = answer("conf=nam56r_author_dp", "explain=--mtp-loss-scaling-factor")
    assert said["set"].startswith("feature.mtp.loss_weight @ conf/feature/mtp.yaml:")


def test_explain_what_the_command_line_sets():
    said = answer("conf=nam56r", "model.rotary_base=10000", "explain=rotary_base")
    assert said["set"] == "model.rotary_base @ command line: model.rotary_base=10000"
    assert said["says"] == "--rotary-base 10000"


def test_explain_what_a_word_of_a_group_sets():
    said = answer("conf=nam56r", "lane=nemo_native", "explain=--sequence-parallel")
    assert said["set"].startswith("parallel.sequence @ conf/lane/nemo_native.yaml:")


def test_explain_what_is_pinned():
    said = answer("conf=nam56r", "explain=--attention-backend")
    assert said["set"] == "pinned by device"
    assert answer("conf=nam56r", "explain=--moe-z-loss-coeff")["says"] == "(no word needed for None)"


def test_explain_a_list_as_a_word_gives_it():
    graphs = ("conf=nam56r_native_dp", "+overlay=graphs")
    modules = "[attn,mamba,moe_router,moe_preprocess]"
    assert answer(*graphs, "explain=feature.cuda_graphs.modules")["here"] == modules
    assert answer(*graphs, "explain=--cuda-graph-modules")["default"] == "[] in Megatron 0.19.2"
    assert answer(*graphs, "explain=precision.deterministic")["here"] == "false"
    assert answer(*graphs, "explain=data.path")["here"] == "null"
    assert (
        answer(*graphs, f"feature.cuda_graphs.modules={modules}", "explain=feature.cuda_graphs.modules")["here"]
        == modules
    )


def test_explain_what_is_not_set():
    ran = warm("conf=nam56r", "explain=--group-query-attention")
    assert ran.out.startswith("--group-query-attention\n  says    (no word needed for False)")
    assert warm("conf=nam56r", "explain=--wandb-project").out == (
        "--wandb-project\n  not set by this recipe; Megatron's default is None\n"
    )


def test_explain_a_section_a_marker_and_a_key_by_its_end():
    assert answer("conf=nam56r", "explain=lane")["here"] == "author_dp"
    assert answer("conf=nam56r", "explain=--nam-model")["says"].startswith("--nam-model dsa+mamba3+m2rnn:")
    assert warm("conf=nam56r", "explain=moe.top_k").err.endswith("written whole: `model.blocks.moe.top_k`\n")


def test_explain_a_key_that_no_file_gives(here):
    """Another key's line is not its place."""
    words = ["--config-dir", str(Path(__file__).parent / "presets_outside"), "conf=jamba_mini"]
    assert "set" not in answer(*words, "explain=model.blocks.mla.q_lora_rank")


def test_explain_a_flag_that_does_not_exist(here):
    one_error(
        warm("conf=nam56r", "explain=--rotary-bas", cwd=here),
        "Megatron 0.19.2 has no flag `--rotary-bas` @ explain (command line: explain=--rotary-bas)",
        "hint: did you mean `--rotary-base`?",
    )


def test_diff():
    ran = warm("conf=nam56r", "diff=nam56r_nemo_native")
    assert ran.code == 0
    assert "-pattern *EMEMEM" not in ran.out and "-pattern *EME*EME*EMM" in ran.out
    assert "+pattern +EMEDEME" in ran.out
    rows = dict(line.split(None, 1) for line in ran.out.splitlines() if line.startswith(("tensor_model", "num_query")))
    assert rows["tensor_model_parallel_size"].split() == ["2", "1"]
    assert (
        rows["num_query_groups"].split(None, 1) == ["8", "           (not set)"]
        or "(not set)" in rows["num_query_groups"]
    )
    assert warm("conf=nam56r", "diff=nam56r").out == "the same arguments\n"
    words = (
        "preset.family=mine",
        "model.blocks.moe.group_limit=[4,2]",
        "cluster.waivers={}",
        "cluster.waivers.gpus=why",
    )
    *_, title, family, limit, waiver = warm("conf=nam56r", *words, "diff=nam56r").out.splitlines()
    assert family.split() == ["preset.family", "nam56r", "mine", "executes"]
    assert limit.split() == ["model.blocks.moe.group_limit", "null", "[4,", "2]", "computes"]
    assert waiver.split() == ["cluster.waivers.gpus", "(not", "there)", "why", "executes"]
    # Many keys are no argument of Megatron's.
    other = warm("conf=nam56r", "precision.cross_entropy=fused", "optim.lr=0.002", "diff=nam56r").out
    *_, title, loss, rate = (line.split() for line in other.splitlines())
    assert (title, loss) == (["recipe", "nam56r", "this"], ["precision.cross_entropy", "megatron", "fused", "executes"])
    assert rate == ["optim.lr", "0.0003", "0.002", "computes"]
    assert "\nlr " in other and "cross_entropy" not in other.split("recipe")[0]
    alias = warm("conf=nam56r", "diff=nam56r_author_dp").out
    assert alias.endswith("the same arguments\n") and "+nam56r: " in alias


def test_list():
    ran = warm("list=presets")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == ALL
    assert re.search(r"^nam56r_author_dp +alias of nam56r$", ran.out, re.M)
    assert re.search(r"^nam56r_smoke +NAM56R's pattern, everything small", ran.out, re.M)
    # Which GPUs have room, as each preset's own budget has it.
    for name, said, fitting in (
        ("nam56r", "fits 8 x h200", {"h200"}),
        ("nam56r_nemo_native", "fits 8 x h100 or h200", {"h100", "h200"}),
        ("mixtral_8x7b", "too large for 8 x h100 or h200", set()),
    ):
        assert re.search(rf"^{name} .*; {said}$", ran.out, re.M), name
        assert {d for d in ("h100", "h200") if budget(lowered(name, f"device={d}").plan).fits} == fitting


def test_a_flag_that_no_recipe_sets_says_why():
    """Each is a flag of Megatron's, and no preset sets it."""
    assert unset() and unset().keys() <= FLAGS.keys()
    for name in NAMES:
        assert not {word.partition("=")[0] for word in argv.words(lowered(name))} & unset().keys(), name
    said = warm("conf=nam56r", "explain=--optimizer-cpu-offload").out
    assert "precision-aware" in said and "docs/articles.md" in said


def test_list_of_overlays():
    """One line each, the first sentence of the file's comment; each can be laid over a preset."""
    ran = warm("list=overlays")
    assert (ran.code, ran.err) == (0, "")
    rows = dict(line.split(None, 1) for line in ran.out.splitlines())
    assert sorted(rows) == sorted(path.stem for path in (conf_dir() / "overlay").glob("*.yaml"))
    assert rows["tp_sp"] == "Every matrix in two tensor ranks, with sequence parallelism"
    assert ". " not in rows["fused"], "its comment has several sentences"


def test_what_is_left_out_of_an_overlay_has_its_way_over_none():
    """`extras` wants other GEMMs of experts than `fused`, and a dense model has neither."""
    over = "overlay fused wants execution.moe.expert_gemm=torch, and gets quack: extras wants another"
    for preset, told in (("llama_3_8b", False), ("nam56r_native_dp", True)):
        ran = warm(f"conf={preset}", "+overlay=[fused,extras]")
        assert ran.code == 0
        assert (f"note: {over}\n" in ran.err) == told
        assert ("overlay fused is laid without execution.moe.permute_fusion" in ran.err) != told


@pytest.mark.parametrize(
    ("preset", "without"),
    [
        ("nemotron_h_8b", "execution.mamba2.padded_projection, feature.fp8.bf16_parts"),
        ("nemotron_3_nano_30b_a3b", "execution.mamba2.padded_projection"),
        ("llama_3_8b", "execution.mamba2.padded_projection, feature.fp8.bf16_parts"),
    ],
)
def test_an_overlay_is_laid_without_what_a_model_has_no_use_for(preset, without):
    ran = warm(f"conf={preset}", "+overlay=fp8", "format=json")
    assert ran.code == 0
    assert f"note: overlay fp8 is laid without {without}: nothing here has a use for it\n" in ran.err
    recipe = json.loads(ran.out)["recipe"]
    mamba2, parts = recipe["execution"].get("mamba2"), recipe["feature"]["fp8"]["bf16_parts"]
    assert not (mamba2 and mamba2["padded_projection"])
    assert bool(parts) == ("bf16_parts" not in without)


def test_what_an_overlay_is_laid_without_is_refused_by_hand():
    for preset, word, said in (
        ("nemotron_h_8b", "execution.mamba2.padded_projection=true", "18,560 columns on each GPU, which 16 divides"),
        ("llama_3_8b", "feature.fp8.bf16_parts=[m2rnn]", "this model has no m2rnn to keep in bf16"),
    ):
        ran = warm(f"conf={preset}", "+overlay=fp8", word)
        assert ran.code == 2 and said in ran.err and ran.err.count("error: ") == 1


def test_an_overlay_pads_what_needs_it():
    """8,248 columns, of which 16 divides no whole number; M2RNN's 1,580 where 8 does not."""
    assert load("nam56r_native_dp_fused", ["+overlay=fp8"]).execution.mamba2.padded_projection
    assert load("nam56r_fused").execution.m2rnn.padded_projection
    assert not load("nam56r_fused", ["model.blocks.m2rnn.heads=40"]).execution.m2rnn.padded_projection


def test_lists_of_words():
    """Every lane, kind, feature and key, one line each, as the code has them."""
    lines = {name: warm(f"list={name}").out.splitlines() for name in ("lanes", "kinds", "features", "keys")}
    first = {name: [line.split()[0] for line in found] for name, found in lines.items()}
    assert first["lanes"] == sorted(path.stem for path in (conf_dir() / "lane").glob("*.yaml"))
    assert all("gives up" in line for line in lines["lanes"])
    assert first["kinds"] == list(KINDS) and first["features"] == [
        f"feature.{n}.{f.switch}" for n, f in FEATURES.items()
    ]
    assert not any("not built" in line for found in lines.values() for line in found)
    unwritten = warm("list=kinds", before=unbuilt).out.splitlines()
    assert [line.split()[0] for line in unwritten if line.endswith("(not built: the mixer)")] == ["mamba3"]
    assert {"optim.lr", "model.blocks.moe.top_k", "feature.mtp.depths"} <= set(first["keys"])
    assert len(set(first["keys"])) == len(first["keys"])
    assert any(line.endswith("default is softmax (sigmoid, softmax)") for line in lines["keys"]), "what it takes"


def test_a_preset_that_nobody_named_is_said():
    ran = warm("format=json")
    assert ran.err.startswith("note: no `conf=`: the preset nam56r\n") and ran.out == argv.plan_json(lowered("nam56r"))
    assert "conf=" not in warm("preset=nam56r", "format=json").err


# Hydra's own manners ------------------------------------------------------------------------------------------------


def test_cfg_job(here):
    ran = warm("conf=nam56r", "model.depth=13", "--cfg", "job", cwd=here)
    assert ran.code == 0
    assert "  depth: 13\n" in ran.out and "tensor: ${lane.tensor}" in ran.out
    assert list(here.iterdir()) == []


def test_help_names_groups_and_examples(here):
    ran = warm("--help", cwd=here)
    assert ran.code == 0
    assert "python -m nam_megatron.translate conf=nam56r" in ran.out
    assert re.search(r"^lane: author_dp, native_dp, nemo_native, own_dp$", ran.out, re.M)


def test_info(here):
    ran = warm("conf=nam56r_nemo_native", "--info", "defaults", cwd=here)
    assert ran.code == 0
    assert "lane/nemo_native" in ran.out


def test_multirun(here):
    ran = warm("--multirun", "conf=nam56r_smoke,nam56r_native_dp", cwd=here)
    assert ran.code == 0
    assert [line.split() for line in ran.out.splitlines()] == [
        list(argv.words(lowered(name))) for name in ("nam56r_smoke", "nam56r_native_dp")
    ]
    assert list(here.iterdir()) == []


def test_a_sweep_writes_each_point_into_a_folder_of_its_own(here):
    ran = warm("-m", "conf=nam56r_smoke", "optim.lr=1e-3,4e-4", "lane=native_dp,author_dp", "out=sweep", cwd=here)
    assert ran.code == 0, ran.err
    points = sorted(path.name for path in (here / "sweep").iterdir())
    assert points == [f"{i}-optim.lr={lr},lane={lane}" for i, (lr, lane) in enumerate(
        (lr, lane) for lr in ("0.001", "0.0004") for lane in ("native_dp", "author_dp"))]  # fmt: skip
    plans = [json.loads((here / "sweep" / name / "plan.json").read_text())["recipe"] for name in points]
    assert [(plan["optim"]["lr"], plan["lane"]["name"]) for plan in plans] == [
        (lr, lane) for lr in (1e-3, 4e-4) for lane in ("native_dp", "author_dp")
    ]


def test_a_sweep_says_what_its_points_have_in_common_once(here):
    ran = warm("-m", "conf=nam56r", "+overlay=[fused,fp8]", "optim.lr=1e-4,3e-4", "out=sweep", cwd=here)
    notes = [line for line in ran.err.splitlines() if line.startswith("note: ")]
    assert ran.code == 0 and len(notes) == len(set(notes)) > 3
    assert {line.split()[2] for line in notes if line.startswith("note: overlay")} == {"fused", "fp8"}


def test_multirun_as_the_last_word(here):
    ran = warm("conf=nam56r_smoke", "schedule.seed=1,2", "--multirun", cwd=here)
    assert (ran.code, ran.out.count("\n")) == (0, 2)


@pytest.mark.parametrize("word", ["hydra.mode=MULTIRUN", "hydra.sweep.dir=x", "+hydra/launcher=basic", "~hydra.help"])
def test_words_for_hydra_itself_are_refused(word, here):
    """Nothing would read them: a command composes, and runs each point of a sweep itself."""
    one_error(warm("conf=nam56r_smoke", word, cwd=here), f"`{word}`: nothing reads this", "`--multirun` runs a sweep")


def test_a_multirun_with_a_refusal_runs_the_rest_and_exits_with_2(here):
    ran = warm("--multirun", "conf=nam56r_smoke", "model.depth=0,12", cwd=here)
    assert ran.code == 2
    assert ran.out.split() == list(argv.words(lowered("nam56r_smoke")))
    assert ran.err.startswith(
        "error: must be greater than or equal to 1, not 0 @ model.depth (command line: model.depth=0)"
    )


def test_shell_completion(here):
    script = warm("-sc", "install=bash", cwd=here)
    assert script.code == 0
    assert "complete -o nospace -o default -F hydra_bash_completion" in script.out
    done = subprocess.run(
        [sys.executable, "-m", TRANSLATE, "-sc", "query=bash"],
        env=os.environ | {"COMP_LINE": "nam-megatron-translate lane=n", "COMP_POINT": "29"},
        cwd=here, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.split() == ["lane=native_dp", "lane=nemo_native"]


# A terminal ---------------------------------------------------------------------------------------------------------


def test_on_a_terminal_there_is_a_table():
    ran = on_terminal("conf=nam56r", columns=200, before=unbuilt)
    assert ran.code == 3
    assert ESCAPE.search(ran.out)
    text = ESCAPE.sub("", ran.out)
    lines = [line.rstrip() for line in text.splitlines()]
    assert "AEMEAEMEAEMR" * 4 + "AEME" in lines
    assert "+EMEDEMEDEMMDEME+EMEDEMMDEMEDEME+EMMDEMEDEMEDEMM+EME" in lines
    assert "1        10        20        30        40        50" in lines
    assert any(line.startswith("NOT BUILT: mamba3 (the mixer, layers 3, 7, ") for line in lines)
    assert "DSA        9  5, 9, 13, 21, 25, 29, 37, 41, 45" in lines
    for s in lowered("nam56r").settings:
        assert s.why.split()[0] in text
    assert re.search(r"^dsa +--experimental-attention-variant", text, re.M)


def test_no_color_is_honoured():
    ran = on_terminal("conf=nam56r", env={"NO_COLOR": "1"})
    assert "AEMEAEMEAEMR" in ESCAPE.sub("", ran.out)
    colours = [code for code in ESCAPE.findall(ran.out) if re.search(r"\[(3|4|9|10)[0-7]", code)]
    assert colours == []


def test_a_narrow_terminal_folds_the_strip():
    text = ESCAPE.sub("", on_terminal("conf=nam56r", columns=42).out)
    rows = [line.rstrip() for line in text.splitlines()]
    at = next(i for i, row in enumerate(rows) if row.startswith("AEMEAEME"))
    assert rows[at] + rows[at + 3] == "AEMEAEMEAEMR" * 4 + "AEME"
    assert max(map(len, rows)) <= 42


@pytest.mark.parametrize("columns", [42, 80, 120, 150, 200])
def test_no_name_is_broken_on_a_terminal(columns):
    text = ESCAPE.sub("", on_terminal("conf=nam56r", columns=columns).out)
    words = set(re.sub(r":(?=\s)", " ", text).split())
    whole = lowered("nam56r")
    names = {s.owner for s in whole.settings} | {s.key for s in whole.settings if s.key}
    names |= {(whole.target.words(s) or [s.name])[0] for s in whole.settings}
    assert {name for name in names - words if len(name) <= columns - 6} == set()
    assert max(map(len, text.splitlines())) <= columns


def test_a_lane_that_gives_blocks_up_says_so_on_the_terminal():
    text = ESCAPE.sub("", on_terminal("conf=nam56r_nemo_native", columns=200).out)
    assert "gives up M2RNN at R (4 layers): lane nemo_native puts Mamba-2 there" in text
    assert "gives up Mamba-3 at M (13 layers): lane nemo_native puts Mamba-2 there" in text


# Bad input ----------------------------------------------------------------------------------------------------------

BAD = {
    "unknown preset": (["conf=nam56"], "no preset `nam56` @ preset", "hint: did you mean `nam56r`? there are: "),
    "override typo": (["conf=nam56r", "model.dept=3"], "unknown key `dept`, did you mean `depth`? @ model"),
    "a group with a plus": (["conf=nam56r", "+lane=native_dp"], "leave the `+` out: `lane=NAME`"),
    "overlay as a group": (["conf=nam56r", "overlay=fused"], "to lay one over the preset: `+overlay=NAME`"),
    "overlay in the place of the preset's": (["conf=nam56r_fused", "overlay=tp_sp"], "lay one over the preset: `+overlay=NAME`"),
    "group typo": (["conf=nam56r", "lanes=nemo_native"], "unknown key `lanes`, did you mean `lane`?"),
    "option typo": (["conf=nam56r", "lane=nemo"], "no lane `nemo` @ lane", "author_dp, native_dp, nemo_native, own_dp"),
    "a config.json without its key": (["/d/config.json"], "`/d/config.json` is no KEY=VALUE", "a published model is `conf=/d/config.json`"),
    "a run's receipt": (["/d/receipt.json"], "is no KEY=VALUE", "a run's page is `python -m launch report /d/receipt.json`"),
    "a plan": (["/d/plan.json"], "is no KEY=VALUE", "`python -m nam_megatron.budget /d/plan.json` says what it costs"),
    "a preset without its key": (["nam56r"], "`nam56r` is no KEY=VALUE", "a preset is `conf=nam56r`"),
    "a preset of somebody": (["conf=jamba"], "no preset `jamba`", "one of your own is found by `--config-dir FOLDER`"),
    "a kind by its title": (["conf=nam56r", "model.letters.A=GQA"], "is not one of 'attention'", "did you mean `attention`?"),
    "a kind that the lane replaces": (["conf=nam56r_native_dp", "model.blocks.mamba3.state_dim=64"], "no layer is Mamba-3",
        "lane `native_dp` puts `mamba2` at `M`; with `lane=own_dp` the model's `mamba3` stands there"),
    "no override": (["conf=nam56r", "model.depth"], "cannot read the override `model.depth`"),
    "quotes": (["conf=nam56r", "model.pattern='A"], "cannot read the override `model.pattern='A`"),
    "format": (["conf=nam56r", "format=nonsense"], "no format `nonsense` @ format", "auto, shell, lines, json, yaml"),
    "list": (["list=models"], "cannot list `models` @ list", "`list=presets`"),
    "two questions": (["conf=nam56r", "explain=--lr", "diff=nam56r_smoke"], "`explain` and `diff` answer different questions"),
    "a list into files": (["list=presets", "out=d"], "a list is printed, not written @ out"),
    "an answer in another form": (["conf=nam56r", "explain=--lr", "format=json"], "`explain` has one form @ format"),
    "a path for a name": (["conf=conf/preset/nam56r.yaml"], "no preset `conf/preset/nam56r.yaml`", "did you mean `nam56r`?"),
    "a feature as the group": (["conf=nam56r", "feature=mtp"], "error: `feature=mtp`: `mtp` is one feature, and `feature` is all of them\n",
        "e.g. `feature.mtp.depths=...`; `~feature.mtp` turns it off"),
    "nothing laid over all": (["conf=nam56r", "feature={}"],
        "`feature={}` is laid over what stands there, and leaves `mtp`, `recompute` and `cuda_graphs`\n",
        "`~feature.NAME` turns one off"),
    "nothing laid over one of all": (["conf=nam56r", "feature={mtp: { }}"], "and leaves `depths`, `loss_weight` and `pattern`"),
    "a key given and taken away": (["conf=nam56r_native_dp_fp8", "feature.fp8.recipe=delayed", "~feature.fp8"],
        "`feature.fp8.recipe=delayed` is given, and `~feature.fp8` takes it away", "keep one of them"),
    "a mapping given and taken away": (["conf=nam56r_native_dp_fp8", "feature={fp8: {recipe: delayed}}", "~feature.fp8"],
        "is given, and `~feature.fp8` takes it away"),
    "a key given below one that is none": (["conf=nam56r", "feature.mtp.depths=2", "feature.mtp=null"],
        "`feature.mtp.depths=2` is given, and `feature.mtp=null` takes it away"),
    "a list of features": (["conf=nam56r", "feature=[mtp]"], "`feature=[mtp]`: `feature` is no list", "features are switched by key"),
    "a feature as the group, added": (["conf=nam56r", "+feature=mtp"], "has a `feature` already", "features are switched by key"),
    "a file for a preset": (["conf=nam56r.yaml"], "preset `nam56r.yaml` calls itself `nam56r`", "hint: leave `.yaml` out: `nam56r`"),
    "a word of the command": (["conf=nam56r", "ouput=d"], "unknown key `ouput`, did you mean `out`?"),
    "another word of it": (["cnf=nam56r"], "unknown key `cnf`, did you mean `conf`?"),
    "a key without its section": (["conf=nam56r", "micro_batch_size=4"], "unknown key `micro_batch_size`\n",
        "hint: a recipe key is written whole: `schedule.micro_batch_size`\n"),
    "a key without some of its sections": (["conf=nam56r", "moe.top_k=4"], "unknown key `moe`\n",
        "hint: a recipe key is written whole: `model.blocks.moe.top_k`\n"),
    "a config.json's name of a key": (["conf=nam56r", "num_local_experts=4"],
        "hint: what others call `num_local_experts` is `model.blocks.moe.experts` here\n"),
    "the same below its section": (["conf=nam56r", "model.num_hidden_layers=4"],
        "`num_hidden_layers` is `model.depth` here, where attention and the MLP after it are two layers\n"),
    "another trainer's": (["conf=nam56r", "tp=2"], "unknown key `tp`\n", "hint: what others call `tp` is `parallel.tensor` here\n"),
    "the same, where a key elsewhere is called so": (["conf=nam56r", "model.width=512"], "`width` is `model.hidden_size` here\n"),
    "the same, asked about": (["conf=nam56r", "explain=learning_rate"], "no flag `--learning-rate`", "is `optim.lr` here\n"),
    "the same, asked about with its section": (["conf=nam56r", "explain=optim.wd"], "no key `optim.wd`", "is `optim.weight_decay` here\n"),
    "a kind's, by the model's": (["conf=nam56r_native_dp", "model.blocks.mamba2.num_heads=4"], "did you mean `heads`?"),
    "a pattern of none": (["conf=nam56r", "feature.mtp.depths=1", "feature.mtp.pattern=AX"], "no pattern of layers", "M and R as in"),
    "what follows from others": (["conf=nam56r", "parallel.dp=2"], "unknown key `dp` @ parallel\n", "ranks are what `cluster.nodes` x"),
    "Megatron's name of several keys": (["conf=nam56r", "num_query_groups=4"], "is `model.blocks.attention.query_groups` here"),
    "the same, with a plus": (["conf=nam56r", "+moe.top_k=4"], "unknown key `moe` @ moe", "whole: `model.blocks.moe.top_k`\n"),
    "a key without what lies between": (["conf=nam56r", "model.top_k=4"], "unknown key `top_k` @ model\n",
        "hint: a recipe key is written whole: `model.blocks.dsa.top_k` or `model.blocks.moe.top_k`\n"),
    "a feature without its switch": (["conf=nam56r", "recompute=full"], "unknown key `recompute`\n",
        "written whole: `execution.mamba3.recompute` or `feature.recompute.granularity`\n"),
    "what a lane has under its name": (["conf=nam56r", "sequence=true"], "written whole: `parallel.sequence`\n"),
    "half of a name": (["conf=nam56r", "feature.fp8.bf16_parts=[rates]"], "did you mean `mamba3_rates`?"),
    "half of two names": (["conf=nam56r", "feature.fp8.bf16_parts=[expert]"], "did you mean `experts` or `shared_experts`?"),
    "the word of another command": (["conf=nam56r", "against=nam56r_smoke"], "unknown key `against`, did you mean `diff`?"),
    "a key of what does not stand": (["conf=nam56r_native_dp", "model.blocks.m2rnn.heads=3"],
        "no layer is M2RNN @ model.blocks.m2rnn (command line: model.blocks.m2rnn.heads=3)"),
    "a key that a feature lacks": (["conf=nam56r", "feature.fp8.enabled=true"], "unknown key `enabled` @ feature.fp8",
        "hint: there are: recipe, format, "),
    "the same, added": (["conf=nam56r", "+feature.fp8.enabled=true"], "unknown key `enabled`", "hint: there are: recipe, "),
    "diff": (["conf=nam56r", "diff=nam"], "no preset `nam` @ diff (command line: diff=nam)", "did you mean `nam56r`?"),
    "diff of nothing": (["conf=nam56r", "diff="], "`diff` takes one word, not `` @ diff"),
    "out of no name": (["conf=nam56r", "out="], "`out` takes one word, not `` @ out"),
    "out of a list": (["conf=nam56r", "out=[a]"], "`out` takes one word, not `['a']` @ out"),
    "out where nothing can be written": (["conf=nam56r", "out=/proc/x/y"], "cannot write to `/proc/x/y`"),
    "a word that links to nothing": (["conf=nam56r", "diff=${a.b}"], "'a.b' not found @ diff (command line: diff=${a.b})"),
    "a folder that is not there": (["--config-dir", "/nowhere", "conf=nam56r"], "`/nowhere` is no folder of configs"),
    "a link to nothing": (["conf=nam56r", "model.depth=${a.b}"], "'a.b' not found @ model.depth (command line: "),
    "not UTF-8": (["conf=nam56r", "model.pattern=\udcff"], "cannot read the override"),
    "a whole number that is none": (["conf=nam56r", "model.depth=9" + "9" * 5000], "limit (4300 digits)"),
    "a group's name of 9,000 letters": (["conf=nam56r", "x" * 9000 + "=1"], "name too long"),
    "an empty key": (["conf=nam56r", "+="], "Hydra cannot make sense of this: AssertionError"),
    "a sweep without multirun": (["conf=nam56r", "model.depth=1,2"], "`model.depth=1,2` has several values",
        "add `--multirun` as the last word"),
    "a command's word in the recipe": (["conf=nam56r", "model.format=json"], "unknown key `format` @ model"),
    "a key twice": (["conf=nam56r", "model.depth=13", "model.depth=14"], "`model.depth` is given twice: `13` and `14`"),
    "a value twice": (["conf=nam56r", "lane=native_dp", "lane=native_dp"], "`lane` is given twice"),
    "a preset twice": (["conf=nam56r", "preset=nam56r_smoke"], "`conf` is given twice: `nam56r` and `nam56r_smoke`"),
    "a key twice, once added": (["conf=nam56r", "++model.depth=14", "+model.depth=13"], "`model.depth` is given twice: `14` and"),
    "a key twice, once in a mapping": (["conf=nam56r", "model={depth: 13}", "model.depth=14"], "`model.depth` is given twice: `13` and"),
    "a key twice in one mapping": (["conf=nam56r", "model={mtp: {x: 1}, depth: 13, depth: 14}"], "`depth` is given twice: `13` and `14`"),
    "a key twice in a mapping of a list": (["conf=nam56r", "data.parts=[{path: a, path: a}]"], "`path` is given twice: `a` and"),
    "an overlay twice": (["conf=nam56r", "+overlay=fused", "+overlay=tp_sp"], "`overlay` is given twice: `fused` and `tp_sp`",
        "to lay all: `+overlay=[fused,tp_sp]`"),
    "a layout": (["conf=nam56r", "parallel.expert=16"], "8 GPUs cannot hold pipeline 1 x expert 16 x expert tensor 1 = 16 @ "
        "parallel.expert (command line: parallel.expert=16)"),
}  # fmt: skip


def test_a_launch_script_is_for_lint(here):
    (here / "train.sh").write_text("torchrun pretrain_gpt.py")
    one_error(warm("train.sh", cwd=here), "`train.sh` is no KEY=VALUE", "lint train.sh`", "budget train.sh`")


def test_mappings_that_share_no_key_are_not_contradictory():
    apart = warm("conf=nam56r_smoke", "schedule={seed: 7}", "schedule={train_steps: 9}")
    assert apart.code == 0
    assert apart.out == warm("conf=nam56r_smoke", "schedule.seed=7", "schedule.train_steps=9").out


@pytest.mark.parametrize("case", BAD)
def test_bad_words(case, here):
    words, *parts = BAD[case]
    one_error(warm(*words, cwd=here), *parts)
    assert list(here.iterdir()) == []


FILES = {
    "not UTF-8": (b'a: "\xff"\n', "preset/mine.yaml is not UTF-8: invalid start byte at byte 4", "save it as UTF-8"),
    "not YAML": (b"a: [1\nb: 2\n", "preset/mine.yaml:2 is not YAML: expected ',' or ']'", "check quotes"),
    "tabs": (b"a:\n\tb: 2\n", "preset/mine.yaml:2 is not YAML: found character '\\t'", "check quotes"),
    "a key twice": (b"# @package _global_\na: 1\na: 2\n", "preset/mine.yaml:3 is not YAML: found duplicate key a", "check quotes"),
    "base 8": (b"# @package _global_\nmodel: {depth: 010}\n", "preset/mine.yaml:2: `010` is 8 in YAML", "leading zero"),
    "no name": (b"# @package _global_\nmodel:\n  null: 3\n", "preset/mine.yaml:3: `null` cannot be a key", "a key is a name"),
    "a list for a name": (b"# @package _global_\n? [a]\n: 3\n", "preset/mine.yaml:2: a list or mapping cannot be a key", "name"),
    "base 60": (b"# @package _global_\na: &a [1, 1:30.5, *a]\n", "preset/mine.yaml:2: `1:30.5` is 90.5 in YAML", "colon"),
    "a control character": (b"a: 1\x00\n", "preset/mine.yaml is not YAML: unacceptable character #x0000", "check quotes"),
    "a Python object": (
        b"# @package _global_\na: !!python/name:os.system\n", "preset/mine.yaml:2: `!!python/name:os.system` is of no value", "tag"),
    "a set": (b"# @package _global_\nmodel:\n  letters: [!!set {A, B}]\n", "preset/mine.yaml:3: `!!set` is of no value", "tag"),
    "defaults that are none": (b"# @package _global_\ndefaults: 3\n", "defaults must be a list (got int)", "--help"),
    "a default that is not there": (
        b"# @package _global_\ndefaults:\n  - nam56r\n  - override /lane: nemo\n  - _self_\n", "no lane `nemo` @ lane", "author_dp"),
    "a file that includes itself": (b"# @package _global_\ndefaults:\n  - mine\n", "includes itself", "look at its `defaults`"),
}  # fmt: skip
GOOD = b"# @package _global_\ndefaults:\n  - nam56r\n  - _self_\n"


@pytest.mark.parametrize("case", FILES)
def test_bad_files(case, here):
    content, *parts = FILES[case]
    (here / "preset").mkdir()
    (here / "preset" / "mine.yaml").write_bytes(content)
    one_error(warm("--config-dir", ".", "conf=mine", cwd=here), *parts)


def test_a_date_is_text(here):
    (here / "preset").mkdir()
    (here / "preset" / "mine.yaml").write_bytes(GOOD + b"schedule: {seed: 2026-11-30}\n")
    assert 'must be an integer, not "2026-11-30" (str)' in warm("--config-dir", ".", "conf=mine", cwd=here).err


def test_a_file_of_ones_own(here):
    """--config-dir adds presets; a mistake in one names its line, and a right one works."""
    file = here / "preset" / "mine.yaml"
    file.parent.mkdir()
    file.write_bytes(GOOD + b"model:\n  depht: 12\n")
    ran = warm("--config-dir", ".", "conf=mine", cwd=here)
    assert ran.code == 2
    assert ran.err == f"error: unknown key `depht`, did you mean `depth`? @ model ({file}:6)\n"
    file.write_bytes(GOOD + b"model:\n  depth: 13.0\n")
    ran = warm("--config-dir", ".", "conf=mine", cwd=here)
    assert ran.err == f"error: must be an integer, not 13.0 (float) @ model.depth ({file}:6)\n"
    file.write_bytes(GOOD + b"schedule: {seed: 7}\npreset: {name: mine}\n")
    ran = warm("--config-dir", ".", "conf=mine", "format=lines", cwd=here)
    assert ran.code == 0 and ran.out.startswith("# mine: ")


def test_an_unreadable_file(here):
    file = here / "preset" / "mine.yaml"
    file.parent.mkdir()
    file.symlink_to(file)
    one_error(warm("--config-dir", ".", "conf=mine", cwd=here), "mine")


def test_hydras_own_options_are_checked(here):
    ran = warm("--cfg", "nonsense", cwd=here)
    assert ran.code == 2 and "invalid choice: 'nonsense'" in ran.err


def test_every_finding_is_on_stderr_with_its_place(here):
    ran = warm("conf=nam56r", "optim.lr=x", "model.blocks.moe.top_k=2.5", "+parallel.tensr=2", cwd=here)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "error: must be an integer, not 2.5 (float) @ model.blocks.moe.top_k (command line: model.blocks.moe.top_k=2.5)\n"
        "error: unknown key `tensr`, did you mean `tensor`? @ parallel (command line: +parallel.tensr=2)\n"
        'error: must be a number, not "x" (str) @ optim.lr (command line: optim.lr=x)\n'
    )


def test_a_mistake_of_ours_stays_a_traceback(here, monkeypatch):
    """Only composing is forgiven: a ValueError of our own is not dressed up as the user's."""
    code = (
        "import sys\nfrom nam_megatron import translate\n"
        "def broken(recipe): raise ValueError('ours')\n"
        "translate.translate = broken\nsys.argv = ['x', 'conf=nam56r']\ntranslate.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    assert "ValueError: ours" in done.stderr


# Pipes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["shell", "json"])
def test_a_reader_that_has_read_enough(form, here):
    """`| head` closes the pipe early: no traceback, whether the output fits the buffer or not."""
    script = f"set -o pipefail; {sys.executable} -m {TRANSLATE} conf=nam56r_native_dp format={form} | head -c 20"
    done = subprocess.run(["bash", "-c", script], cwd=here, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, len(done.stdout)) == (0, 20) and "Traceback" not in done.stderr


# Every command ends by `errors.finish`.
COMMANDS = {
    "translate": (TRANSLATE, "conf=nam56r_native_dp", "format=json"),
    "budget": ("nam_megatron.budget", "conf=nam56r_smoke"),
    "lint": ("nam_megatron.lint", "-"),
    "data": ("nam_megatron.data", "--help"),
    "nemo": ("nam_megatron.nemo", "list"),
    "schema": ("nam_megatron.schema",),
    "commands": ("nam_megatron",),
    "launch show": ("launch", "show", "conf=nam56r_smoke"),
    "launch receipts": ("launch", "receipts", "gaps=allowed"),
    "launch stack": ("launch", "stack"),
}


def ended(words, redirection):
    """Exit code and stderr of `python -m words redirection` in a shell. Python's buffer is on, whatever the caller has."""
    text = f"set -o pipefail; echo --num-layers 2 --train-iters 5 | {sys.executable} -m {' '.join(words)} {redirection}"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=conf_dir().parent, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.few(4)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_full_and_a_stdout_that_is_closed(name):
    code, said = ended(COMMANDS[name], ">/dev/full")
    assert said.endswith("error: cannot write: No space left on device\n\nhint: give it somewhere with room\n")
    code_closed, said = ended(COMMANDS[name], ">&-")
    assert (code, code_closed, "error" in said) == (2, 1 if name == "lint" else 0, False)


def test_a_stdin_that_is_closed_is_empty():
    assert "there is no Megatron flag in `-`" in ended(COMMANDS["lint"], "<&-")[1]


@pytest.mark.slow
def test_every_command_can_be_read_in_part():
    for name in ("nemo", "schema", "launch stack"):
        assert ended(COMMANDS[name], "| head -c 20 >/dev/null") == (0, "")


def finished(body):
    code = f"import os, signal, subprocess, sys\nfrom nam_megatron.errors import finish\ndef command():\n    {body}\nfinish(command)\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)


def test_ctrl_c_is_a_line():
    done = finished("print('begun'); os.kill(os.getpid(), signal.SIGINT); signal.pause()")
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "interrupted\n")


def test_a_second_ctrl_c_while_python_ends_is_nothing():
    code = "import sys; sys.argv = ['-m']; import nam_megatron, atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_not_stdout_is_a_failure():
    """A child that died (Megatron, say) must not look like a reader that has read enough, nor a checkpoint's disk like stdout's."""
    done = finished("p = subprocess.Popen('true', stdin=-1); p.wait(); p.stdin.write(b'x' * 10); p.stdin.flush()")
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr
    done = finished("open('/dev/full', 'w').write('x' * 100000)")
    assert done.returncode == 2 and done.stderr.startswith("error: cannot write: No space left on device\n")


def test_a_reader_that_leaves_changes_nothing(tmp_path):
    """The command goes on to its end and its exit code, stderr closed or not."""
    target = tmp_path / "target"
    body = (
        f"print('x' * 10**6, flush=True); sys.stderr.write('y' * 10**6); open({str(target)!r}, 'w').close(); return 7"
    )
    code = f"import sys\nfrom nam_megatron.errors import finish\ndef command():\n    {body}\nfinish(command)\n"
    script = f"set -o pipefail; {shlex.quote(sys.executable)} -c {shlex.quote(code)} 2>&1 | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr, target.exists()) == (7, "", True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch", "stack", "lock=a", "--lock=b"), "`lock` is given twice: `a` and `b`"),
        (
            ("launch", "check", "cluster.waivers.git=a", "'cluster.waivers={git: b}'"),
            "`cluster.waivers.git` is given twice",
        ),
        (("nam_megatron.nemo", "dump", "out=a", "out=b"), "`out` is given twice: `a` and `b`"),
        (("nam_megatron.nemo",), "no task is named"),
        (("nam_megatron.nemo", "list", "all"), "`list` takes no words, and here is `all`"),
        (("nam_megatron.schema", "conf=nam56r"), "this takes no words, and here is `conf=nam56r`"),
    ],
)
def test_words_that_other_commands_do_not_take(words, said):
    code, err = ended(words, "")
    assert code == 2 and err.startswith(f"error: {said}"), err


@pytest.mark.parametrize(
    "words", [("nam_megatron.nemo", "list"), ("nam_megatron.schema",), ("nam_megatron.runtime.dump",)]
)
def test_help_is_help(words):
    done = subprocess.run(
        [sys.executable, "-m", *words, "--help"],
        cwd=conf_dir().parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert f"python -m {words[0]}" in done.stdout and "{" not in done.stdout


def test_a_checkout_somewhere_else(tmp_path):
    """Nothing depends on the folder the package lies in."""
    shutil.copytree(
        conf_dir().parent / "nam_megatron",
        tmp_path / "place" / "nam_megatron",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(conf_dir(), tmp_path / "place" / "conf")
    ran = cold("conf=nam56r_smoke", "format=json", cwd=tmp_path / "place")
    assert ran.out == argv.plan_json(translate(load("nam56r_smoke")))


@pytest.mark.parametrize(
    "key", ["model.depth", "model.letters.M", "model.substitute", "feature.mtp.depths", "feature.mtp.pattern"]
)
def test_a_key_that_is_part_of_the_pattern_says_the_pattern(key):
    assert "--hybrid-layer-pattern " in warm("conf=nam56r", "feature.mtp.depths=1", f"explain={key}").out
    assert "--hybrid" not in warm("conf=nam56r", "feature.mtp.depths=1", "explain=feature.mtp.loss_weight").out
