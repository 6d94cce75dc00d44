"""The series of mends: complete records, no replacement outside of it, and both trainers alike. Installed: cpu/test_mends_installed.py."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from launch.host import changes, patches
from nam_megatron.compile.lower import translate
from nam_megatron.mends import Moment, Trainer
from nam_megatron.mends.series import MENDS, SERIES, needed
from nam_megatron.recipe import load

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "nam_megatron" / "mends"
NO_MENDS = {"__init__", "series", "install"}
UPSTREAM = {"megatron", "transformer_engine", "torch", "triton", "mamba_ssm", "nemo", "nemo_run", "flash_attn", "quack"}
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
# They pretend a GPU, or answer what Megatron would do; nothing of theirs trains for anybody.
PRETENDERS = {
    "nam_megatron/prove/cpu.py",
    "nam_megatron/prove/ranks.py",
    "nam_megatron/prove/worker.py",
    "nam_megatron/runtime/oracle.py",
    "nam_megatron/runtime/uncompiled.py",
    "nam_megatron/torchrun.py",  # torch's agent, of a command that is that and no more
}
# The mends that one trainer alone takes; any other is both trainers'.
ONE_TRAINERS = {
    Trainer.MEGATRON: {"stage", "step_rate", "events", "tracker", "whole_step", "yarn"},
    Trainer.BRIDGE: {
        "bridge_step_rate",
        "bridge_events",
        "bridge_save_time",
        "bridge_helpers",
        "bridge_evaluation",
        "bridge_answers",
        "bridge_exit",
        "bridge_export",
    },
}


def plan(*overrides, preset="nam56r_smoke"):
    return translate(load(preset, overrides)).plan


@pytest.mark.parametrize("mend", SERIES, ids=lambda mend: mend.name)
def test_a_record_says_everything(mend):
    assert all(getattr(mend, field.name) for field in fields(mend) if field.name != "upstream")
    assert re.fullmatch(r"[A-Z`].*[a-z0-9`]\.", mend.fault) and mend.fault.count(". ") == 0
    assert all(re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", link) for link in mend.upstream)
    assert not mend.drop_when.endswith(".")
    for place in mend.places:
        assert re.fullmatch(r"[\w.]+:[\w.]+", place.name) and re.fullmatch(r"[0-9a-f]{64}", place.sha256)
    for name in mend.tests:
        file, _, function = name.partition("::")
        assert re.search(rf"^\s*def {function}\(", (ROOT / file).read_text(), re.MULTILINE), name


def test_a_mend_is_a_record_and_a_file():
    files = {path.stem for path in FOLDER.glob("*.py")} - NO_MENDS
    assert files == set(MENDS) and len(MENDS) == len(SERIES)
    for name in files:
        tree = ast.parse((FOLDER / f"{name}.py").read_text())
        (install,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "install"]
        given = {Moment.COMMAND: ["run"], Moment.START: ["plan"]}.get(MENDS[name].moment, ["models", "plan"])
        assert [argument.arg for argument in install.args.args] == given, name


def test_no_two_mends_meet_at_a_place():
    names = [place.name for mend in SERIES for place in mend.places]
    assert len(names) == len(set(names))


def test_moments_follow_one_another():
    """A mend that stands behind another in the series is not installed before it."""
    order = [list(Moment).index(mend.moment) for mend in SERIES]
    assert order == sorted(order)


def test_bridges_name_of_a_function_is_set_once_that_function_is():
    names = list(MENDS)
    assert names.index("shipped_helpers") < names.index("bridge_helpers")


def test_both_trainers_take_the_same_but_for_those_that_are_one_trainers():
    alone = {t: {m.name for m in SERIES if m.trainers == (t,)} for t in Trainer}
    assert alone == ONE_TRAINERS
    assert all(mend.trainers == tuple(Trainer) for mend in SERIES if mend.name not in set().union(*alone.values()))


STATE = ["group_order", "master_weights", "experts_apart"]  # of Adam's, sharded by Megatron's DDP
ALWAYS = ["step_rate", "events", "shipped_helpers", "checksums", "tracker", "marked_fp32", "padding", "stage_log"]


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (["optim=muon", *(f"feature.distributed_optimizer.{key}=false" for key in ("enabled", "overlap_param_gather"))], []),
        ([], STATE),
        (["schedule.save=/c", "schedule.save_interval=1", "schedule.async_save=true"], ["background", *STATE]),
        (["cluster=h200_2", "parallel.context=2"], ["context", *STATE]),
        (["precision.deterministic=true", "precision.cross_entropy=megatron"], ["autotune", *STATE]),
        (["precision.cross_entropy=fused"], ["mtp_counts", *STATE]),
        (["feature.mtp.depths=1", "feature.mtp.pattern=AE"], ["mtp_routers", *STATE]),
        (["precision.fused_grad_accumulation=true"], ["wgrad", *STATE]),
        (["feature.megatron_fsdp.enabled=true", "cluster=h200_2"], ["fsdp"]),
        (["feature.yarn.factor=4.0"], ["yarn", *STATE]),
        (["feature.llama_rope.factor=8.0"], ["llama_rope", *STATE]),
        (["data=built", "data.path=/set"], ["sample_order", *STATE]),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_gets_what_it_needs(overrides, more):
    found = [mend.name for mend in needed(plan(*overrides), Trainer.MEGATRON)]
    assert set(found) == {*ALWAYS, *more} and len(found) == len(ALWAYS + more)
    assert found == [name for name in MENDS if name in found]


# One queue --------------------------------------------------------------------------------------------------------------


def test_the_page_is_made_of_the_queue():
    made = "\n".join(changes.markdown(list(changes.changes(patches.queues(), SERIES)))) + "\n"
    assert (ROOT / "docs" / "mends.md").read_text() == made, (
        "python -m launch patch list format=markdown > docs/mends.md"
    )


def test_patches_and_mends_say_the_same_of_themselves():
    queue = list(changes.changes(patches.queues(), SERIES))
    assert [c.name for c in queue if c.places] == list(MENDS) and len(queue) > len(SERIES)
    for change in queue:
        assert tuple(change.trailers) == patches.TRAILERS and all(change.trailers.values()), change.name
        for name in change.trailers["Test"].split(", "):
            assert (ROOT / name.partition("::")[0]).is_file(), name


def test_no_patch_changes_a_file_where_a_mend_has_its_place():
    """Its source would have one hash before `patch apply` and another one after."""
    places = {place.name.partition(":")[0].replace(".", "/") + ".py" for mend in SERIES for place in mend.places}
    patched = {
        line.removeprefix("+++ b/")
        for queue in patches.queues()
        for name in queue.series
        for line in (queue.folder / name).read_text().splitlines()
        if line.startswith("+++ ")
    }
    assert patched and not patched & places


# No replacement outside of the series -----------------------------------------------------------------------------------


def last(node: ast.expr) -> str:
    """The name that is called, of whatever it is an attribute."""
    return getattr(node, "attr", getattr(node, "id", ""))


def replaced(source: str) -> list[str]:
    """What the code puts into modules, classes and functions of others: assignments to their attributes, however they are written."""
    tree, theirs = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            theirs |= {
                (a.asname or a.name).partition(".")[0] for a in node.names if a.name.partition(".")[0] in UPSTREAM
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in UPSTREAM:
            theirs |= {a.asname or a.name for a in node.names}

    def named(node: ast.expr) -> bool:
        return str(getattr(node, "value", "")).partition(".")[0] in UPSTREAM

    def of_theirs(node: ast.expr) -> bool:
        while True:
            if isinstance(node, ast.Attribute | ast.Subscript):
                if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
                    return named(node.slice)
                node = node.value
            elif isinstance(node, ast.Call) and last(node.func) in ("vars", "getattr") and node.args:
                node = node.args[0]
            elif isinstance(node, ast.Call) and last(node.func) == "import_module" and node.args:
                return named(node.args[0])
            else:
                return isinstance(node, ast.Name) and node.id in theirs

    kept = (ast.Attribute, ast.Name, ast.Call)
    for node in ast.walk(tree):  # other names for the same
        if isinstance(node, ast.Assign) and isinstance(node.value, kept) and of_theirs(node.value):
            theirs |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and last(node.func) in SETTERS and node.args:
            targets = [ast.Attribute(node.args[0], "?")]
        elif last(getattr(node, "func", None)) == "update" and ast.unparse(node.func).endswith(
            ("__dict__.update", ")).update")
        ):
            targets = [node.func]
        found += [
            f"{getattr(node, 'lineno', 0)}: {ast.unparse(target)}"
            for target in targets
            if isinstance(target, ast.Attribute | ast.Subscript) and of_theirs(target)
        ]
    return found


def test_nothing_is_replaced_outside_of_the_series():
    found = {}
    for path in sorted([*ROOT.glob("nam_megatron/**/*.py"), *ROOT.glob("launch/**/*.py")]):
        name = str(path.relative_to(ROOT))
        if path.parent != FOLDER and name not in PRETENDERS and (lines := replaced(path.read_text())):
            found[name] = lines
    assert found == {}, "a replacement is a mend: a record in mends/series.py and a file beside it"


def test_within_a_mends_file_only_install_replaces():
    """Importing one changes nothing."""
    for mend in SERIES:
        source = (FOLDER / f"{mend.name}.py").read_text()
        top = [node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert replaced("\n".join(map(ast.unparse, top))) == [], mend.name


@pytest.mark.parametrize(
    "code",
    [
        "from megatron.core.pipeline_parallel import schedules\nschedules.forward = None",
        "import megatron.core.utils\nmegatron.core.utils._te_version = 1",
        "import megatron.core.utils as u\ndef f():\n    u.a, x = 1, 2",
        "def f():\n    from megatron.training import training\n    setattr(training, 'x', 1)",
        "from triton.runtime.autotuner import Autotuner\nAutotuner.do_bench = property(id)",
        "from megatron.core import mpu\nm = mpu\nm.get = None",
        "from megatron.core.full_cuda_graph import W\nW.graph['training'] = None",
        "from transformer_engine.pytorch import Linear\ndel Linear.forward",
        "from importlib import import_module\nm = import_module('megatron.core.utils')\nm.x = 1",
        "from megatron.core import mpu\nvars(mpu)['get'] = None",
        "from megatron.core import mpu\nmpu.__dict__.update(get=None)",
        "from megatron.core import mpu\ntype.__setattr__(mpu.Group, 'size', 1)",
        "import sys\nsys.modules['megatron.core.mpu'] = object()",
    ],
)
def test_a_replacement_is_seen(code):
    assert len(replaced(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "from nam_megatron import train\ntrain.x = 1",
        "import sys\nsys.argv = sys.modules['hydra'].x = []",
        "class A:\n    x = 1\nvars(A)['x'] = 2",
        "import torch\nx = torch.zeros(1)\nx.mark = 1",
        "self.x = 1",
    ],
)
def test_what_is_ours_is_no_replacement(code):
    assert replaced(code) == []
