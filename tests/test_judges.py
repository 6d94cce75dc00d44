"""What decides whether a run is right, on unhappy paths: verify's comparison, resume's table of what computes. No Megatron in here."""

import contextlib
import copy
import json
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from presets import lowered

from nam_megatron import verify as verdicts
from nam_megatron.blocks.mamba2.block import Mamba2
from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, Refused
from nam_megatron.features.names import FEATURES
from nam_megatron.judge import same
from nam_megatron.recipe import Recipe, config_at, load
from nam_megatron.runtime.oracle import Answer
from nam_megatron.targets import current
from nam_megatron.verify import (
    ABSENT,
    DEFAULT,
    MISMATCH,
    UNFINISHED,
    VERIFIED,
    expectations,
    reviewed_fields,
    summary,
    verify,
)
from nam_megatron.words.setting import NEEDED, Row, section

# verify: does a disagreement of any field, in any direction, come out? --------------------------------------------------------------

LOWERING = lowered("nam56r_smoke")


class Says:
    """An oracle that answers what it is told, and remembers what it was asked."""

    def __init__(self, values: Mapping, error: str | None = None, defaults: Mapping | None = None):
        self.answer, self.asked = Answer(error, values, defaults or {}), None

    def ask(self, *question):
        self.asked = question
        return self.answer


def agreeing() -> dict:
    """An answer with which everything agrees."""
    target = LOWERING.target
    among = {
        f"transformer.{s.name}": None for s in LOWERING.settings if s.fields is None and s.name not in target.renamed
    }
    among |= {field: None for fields in target.renamed.values() for field in fields}
    values = {field: value for field, value, _ in expectations(LOWERING, among)}
    for field, value in reviewed_fields(target)[0].items():
        flag = target.by_dest.get(field.split(".")[1])
        default = flag.default if flag else None
        single = isinstance(default, list) and len(default) == 1
        values.setdefault(field, value if value is not DEFAULT else default[0] if single else default)
    return json.loads(json.dumps(values))


VALUES = agreeing()


def judged(values: Mapping, lowering=LOWERING, **more):
    return verify(lowering, Says(values, **more))


def test_what_agrees_is_verified():
    oracle = Says(VALUES)
    verdict = verify(LOWERING, oracle)
    assert (verdict.word, verdict.code, verdict.mismatches, verdict.unknown) == (VERIFIED, OK, (), ())
    assert {row.field for row in verdict.rows} == VALUES.keys()
    r = LOWERING.plan.recipe
    assert oracle.asked == (
        argv.argv(LOWERING),
        r.world_size,
        r.device.capability,
        {e.name: e.value for e in LOWERING.env},
        [],
    )


def others(value: object) -> list:
    """What Megatron could hold instead, the near misses among it: 1 for true, a list cut short."""
    if isinstance(value, bool):
        return [not value, int(value), None]
    if isinstance(value, list):
        return [
            [*value, value[-1] if value else 0],
            value[:-1] if value else None,
            None,
            ["x", *value[1:]] if value else "x",
        ]
    if isinstance(value, (int, float)):
        return [value + 1, -value - 1, None, str(value), *([bool(value)] if value in (0, 1) else [])]
    return [0, False, "other"] if value is None else [value + "x", None, True]


def test_every_field_is_compared():
    for field, value in VALUES.items():
        other = others(value)[0]
        verdict = judged(VALUES | {field: other})
        assert [(row.field, row.actual) for row in verdict.mismatches] == [(field, other)]
        assert (verdict.word, verdict.code) == (MISMATCH, FINDINGS)


@pytest.mark.parametrize("direction", range(5))
def test_a_field_may_differ_in_any_direction(direction):
    wrong = {field: found[direction % len(found)] for field, value in VALUES.items() if (found := others(value))}
    assert {row.field: row.actual for row in judged(wrong).mismatches} == wrong


def test_a_field_that_is_gone_is_missed():
    """Of a reviewed default test_verify.py finds that; what a key or a pin decides is missed here."""
    for field in sorted(VALUES)[::3]:
        fewer = {k: v for k, v in VALUES.items() if k != field}
        gone = {row.field: row.actual for row in judged(fewer).mismatches}
        decided = {f for f, _, _ in expectations(LOWERING, fewer)}
        assert gone == ({field: ABSENT} if field in decided else {}) or set(gone) == {f"args.{field.split('.')[1]}"}


def test_a_field_that_nobody_knows_is_a_mismatch_where_megatron_trains_by_it():
    for config in LOWERING.target.configs:
        verdict = judged(VALUES | {f"{config}.new": None})
        assert (verdict.unknown, verdict.mismatches, verdict.word) == ((f"{config}.new",), (), MISMATCH)
        assert "mismatch: 0 fields disagree, 1 nobody has looked at" in summary(LOWERING, verdict)
    assert judged(VALUES | {"args.new": 1, "logger.new": 1}).word == VERIFIED
    other = judged(VALUES | {"transformer.hidden_size": 7})
    assert "mismatch: 1 fields disagree, 0 nobody has looked at" in summary(LOWERING, other)


@pytest.mark.parametrize("form", ["auto", "json"])
def test_a_field_that_nobody_knows_is_named(form, monkeypatch, capsys):
    oracle = contextlib.nullcontext(Says(VALUES | {"transformer.new": None}))
    monkeypatch.setattr(verdicts, "Oracle", lambda: oracle)
    code = verdicts.task(LOWERING.plan.recipe, {"format": form}, SimpleNamespace(unnamed_preset=lambda _: ""))
    assert code == FINDINGS and "transformer.new" in capsys.readouterr().out
    (derived, *_) = sorted(reviewed_fields(current())[1])
    assert judged(VALUES | {derived: "anything"}).word == VERIFIED


def test_a_reviewed_field_without_a_flag_has_the_default_of_its_config():
    field = next(
        f for f, v in reviewed_fields(current())[0].items() if v is DEFAULT and f.split(".")[1] not in current().by_dest
    )
    assert judged(VALUES | {field: 7}, defaults={field: 7}).word == VERIFIED
    assert judged(VALUES | {field: 7}, defaults={field: 8}).word == MISMATCH


def test_what_megatron_refuses_is_its_word():
    verdict = judged({}, error="no such flag")
    assert (verdict.word, verdict.refused, verdict.rows) == (MISMATCH, "no such flag", ())
    assert "Megatron refuses the arguments: no such flag" in summary(LOWERING, verdict)


def test_what_is_not_built_is_neither_verified_nor_a_mismatch(monkeypatch):
    monkeypatch.setattr(Mamba2, "missing", "the mixer")
    lowering = translate(load("nam56r_smoke"))
    verdict = judged(VALUES, lowering)
    assert (verdict.word, verdict.code) == (UNFINISHED, INCOMPLETE)
    assert summary(lowering, verdict).endswith("verdict:  incomplete: everything built agrees; not built: mamba2\n")
    assert judged(VALUES | {"transformer.hidden_size": 1}, lowering).code == FINDINGS


def test_the_table_says_each_side_by_side(monkeypatch, capsys):
    oracle = contextlib.nullcontext(
        Says(VALUES | {"transformer.hidden_size": 7, "transformer.normalization": "x" * 70})
    )
    monkeypatch.setattr(verdicts, "Oracle", lambda: oracle)
    origin = SimpleNamespace(unnamed_preset=lambda name: f"note: {name}\n")
    assert verdicts.task(LOWERING.plan.recipe, {"format": "auto"}, origin) == FINDINGS
    said = capsys.readouterr()
    assert said.err == "note: nam56r_smoke\n"
    head, hidden, norm = (line.split("  ") for line in said.out.partition("\n\n")[2].splitlines())
    assert [c.strip() for c in head if c] == ["recipe key", "Megatron's field", "expected", "Megatron has", "verdict"]
    assert [c.strip() for c in hidden if c] == ["model.hidden_size", "transformer.hidden_size", "256", "7", MISMATCH]
    assert [c.strip() for c in norm if c] == [
        "model.normalization",
        "transformer.normalization",
        "RMSNorm",
        "x" * 70,
        MISMATCH,
    ]
    assert verdicts.task(LOWERING.plan.recipe, {"format": "table"}, origin) == FINDINGS
    assert len(capsys.readouterr().out.splitlines()) > len(VALUES) > 100
    with pytest.raises(Refused, match="no format `yaml`") as refused:
        verdicts.task(LOWERING.plan.recipe, {"format": "yaml"}, origin)
    assert [(p.key, p.hint) for p in refused.value.problems] == [("format", "there are: auto, table, json")]


# Resuming and comparing: which keys compute? -----------------------------------------------------------------------------------------

# The second list, reviewed apart from the rows: what may change before a run goes on. Every other key computes.
EXECUTES_TEXT = """
preset.name preset.alias_of preset.family preset.about model.family lane.name lane.tensor lane.sequence
execution.mla.kernels execution.dsa.kernels execution.mamba3.kernels execution.m2rnn.kernels
execution.moe.dispatcher execution.moe.expert_gemm execution.moe.pad_to_capacity execution.moe.permute_fusion
execution.moe.router_fusion execution.moe.fused_router_gradient
execution.moe.shared_overlap execution.moe.fused_weighted_squared_relu execution.mamba2.strided
execution.mamba2.strided_norm execution.mamba2.padded_projection execution.m2rnn.padded_projection
execution.mamba3.recompute execution.mamba3.keep_states execution.mamba3.keep_prepared
execution.mamba3.chunk execution.mamba3.head_pieces execution.dsa.query_pieces feature.fp8.keep_inputs
parallel.tensor parallel.sequence parallel.pipeline
parallel.virtual_pipeline parallel.context parallel.expert parallel.expert_tensor feature.recompute.granularity
feature.recompute.modules feature.recompute.method feature.recompute.layers feature.cuda_graphs.impl
feature.cuda_graphs.modules feature.cuda_graphs.warmup_steps feature.distributed_optimizer.overlap_grad_reduce
feature.distributed_optimizer.overlap_param_gather feature.distributed_optimizer.reshardable
feature.megatron_fsdp.strategy feature.mhc.kernels feature.tracking.tensorboard
feature.tracking.wandb_project feature.tracking.wandb_name feature.tracking.wandb_dir feature.tracking.wandb_entity
feature.tracking.mlflow feature.tracking.mlflow_experiment precision.cross_entropy precision.fused_grad_accumulation
precision.norm_kernels precision.attention_kernels precision.deterministic schedule.eval_steps schedule.eval_interval schedule.log_interval
schedule.save schedule.save_interval schedule.async_save schedule.load schedule.changes schedule.stop_every schedule.timeout_minutes
schedule.steady_timeout_seconds
schedule.manual_gc_interval data.cache data.workers device.name device.capability device.total_gib device.runtime_gib
device.groups_gib.data device.groups_gib.tensor device.groups_gib.pipeline device.groups_gib.context
device.groups_gib.expert device.groups_gib.gathered device.allocator_gib device.headroom_gib device.bf16_tflops device.gemm_tflops
device.copy_gbs
device.link device.gemm_floor_tflops device.allreduce_floor_gbs cluster.name cluster.pool cluster.nodes cluster.gpus_per_node
cluster.processor cluster.storage.durable cluster.storage.scratch cluster.storage.receipts cluster.waivers allow assumptions.key
assumptions.value assumptions.why wishes.key wishes.value wishes.by wishes.instead wishes.why
"""
EXECUTES = frozenset(EXECUTES_TEXT.split())


def keys(config, at: str = ""):
    for name, field in config.model_fields.items():
        if (inner := section(field.annotation)) and at + name != "model.substitute":
            yield from keys(inner, f"{at}{name}.")
        else:
            yield at + name


def test_the_rows_say_what_computes():
    assert sorted(k for k in keys(Recipe) if same.executes(k)) == sorted(EXECUTES)


def test_a_key_of_another_version():
    """Of a section that only executes it does, too; of any other it may compute. Retired ones are known by name."""
    assert all(map(same.executes, ("cluster.new", "device.memory_gb", "precision.name", "cluster.waivers.git")))
    may = ("schedule.new", "precision.new", "data.name.new", "new", "model.substitute[0].ranks", "new.name")
    assert not any(map(same.executes, may))


def tree(*words: str) -> dict:
    return json.loads(argv.plan_json(lowered(*words)))


WORDS = ("nam56r", "cluster=h200_2", "feature.fim.enabled=true", "data=indexed", "data.path=d", "data.tokenizer=t")
WORDS += (
    "feature.recompute.granularity=selective",
    "feature.recompute.modules=[moe_act]",
    "schedule.save=s",
    "schedule.save_interval=3",
)
BEFORE = tree(*WORDS)


def leaves(node, at=()):
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from leaves(child, (*at, name))
    else:
        yield at


def put(plan: dict, path: tuple, value: object = ...) -> dict:
    """A copy with another value there, or with nothing."""
    made = copy.deepcopy(plan)
    node = made["recipe"]
    for name in path[:-1]:
        node = node[name]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return made


def said(before: dict, after: dict) -> list[tuple]:
    return [(d.key, d.before, d.after, d.computes) for d in same.differences(before, after)]


def at(path: tuple):
    node = BEFORE["recipe"]
    for name in path:
        node = node[name]
    return node


def row(path: tuple):
    config = config_at(path[:-1])
    return config.row(path[-1]) if config and path[-1] in config.model_fields else Row("")


IDLE = ("schedule.eval_interval",)  # stands, and nothing reads it while `eval_steps` is 0
STANDING = [
    path for path in leaves(BEFORE["recipe"]) if path[-1] != "enabled" and at(path) != {} and ".".join(path) not in IDLE
]


def test_a_plan_does_not_differ_from_itself():
    assert said(BEFORE, copy.deepcopy(BEFORE)) == []


@pytest.mark.few(80)
@pytest.mark.parametrize("path", STANDING, ids=".".join)
def test_every_key_that_stands_is_compared(path):
    """Changed, taken away and added: by name, with both values, and with what the reviewed list says of it."""
    key, node = ".".join(path), at(path)
    executes = key in EXECUTES or path[0] in ("assumptions", "wishes")
    other = "another" if node != "another" else "one more"
    for value in (other, ...):
        after = put(BEFORE, path, value)
        # Of a key that came later, saying nothing means what it did before.
        there = (None if (was := row(path).was) is NEEDED else was) if value is ... else value
        expected = [(key, node, there, not executes)] if node != there else []
        assert said(BEFORE, after) == expected
    assert said(put(BEFORE, path, other), BEFORE) == [(key, other, node, not executes)]


PINS = [i for i, s in enumerate(BEFORE["settings"]) if s["key"] is None]


def test_a_key_that_one_side_cannot_be_asked_about_is_idle_where_the_other_says_so():
    """A plan of another version, of which nobody knows what nothing reads in it."""
    for key in IDLE:
        assert said(BEFORE, put(BEFORE, tuple(key.split(".")), 7)) == []
        unknown = put(BEFORE, ("schedule", "of_old"), 1)
        assert [d[0] for d in (*said(BEFORE, unknown), *said(unknown, BEFORE))] == ["schedule.of_old"] * 2


def test_every_pin_is_compared():
    """Settings that no key decides: another value, one that is gone, a new one; and the Megatron that holds them."""
    assert len(PINS) > 20
    for i in PINS:
        other, fewer = copy.deepcopy(BEFORE), copy.deepcopy(BEFORE)
        other["settings"][i]["value"] = "another"
        del fewer["settings"][i]
        s = BEFORE["settings"][i]
        name, computes = f"settings.{s['name']}", not s.get("executes")
        assert said(BEFORE, other) == [(name, s["value"], "another", computes)]
        assert [d for d in said(BEFORE, fewer)] == (
            [(name, s["value"], None, computes)] if s["value"] is not None else []
        )
        assert [d for d in said(fewer, BEFORE)] == (
            [(name, None, s["value"], computes)] if s["value"] is not None else []
        )
    assert said(BEFORE, BEFORE | {"megatron_core": "0.20"}) == [
        ("megatron_core", BEFORE["megatron_core"], "0.20", True)
    ]
    keyed = copy.deepcopy(BEFORE)  # a setting that a key decides is compared by the key
    next(s for s in keyed["settings"] if s["key"])["value"] = "another"
    assert said(BEFORE, keyed) == []


def test_a_pin_executes_where_either_side_says_so():
    i = next(i for i in PINS if not BEFORE["settings"][i].get("executes"))
    other = copy.deepcopy(BEFORE)
    other["settings"][i] |= {"value": "another", "executes": True}
    assert [d[3] for d in (*said(BEFORE, other), *said(other, BEFORE))] == [False, False]


def test_what_does_not_stand_is_not_compared():
    """Older plans hold every kind and feature."""
    recipe = BEFORE["recipe"]
    more = copy.deepcopy(BEFORE)
    more["recipe"]["model"]["blocks"] |= {"attention": {"head_dim": 1}, "gone": {"x": 1}}
    for name, feature in FEATURES.items():
        if name not in recipe["feature"]:
            for off in (False, 0, "none"):
                more["recipe"]["feature"][name] = {feature.switch: off, "x": 1}
                assert said(BEFORE, more) == [] == said(more, BEFORE), name
    assert {"mla", "dsa", "moe", "mamba3", "m2rnn", "mlp"} & recipe["model"]["blocks"].keys()
    assert same.resolved(more)["model"]["blocks"].keys() == recipe["model"]["blocks"].keys()
    more["recipe"]["feature"]["unheard_of"] = {"enabled": True}  # of another version
    assert said(BEFORE, more) == [("feature.unheard_of.enabled", None, True, True)]


def test_a_distributed_optimizer_that_is_off_stands():
    off = put(BEFORE, ("feature", "distributed_optimizer", "enabled"), False)
    assert ("feature.distributed_optimizer.enabled", True, False, True) in said(BEFORE, off)


def test_dsa_brings_the_keys_that_it_reads_of_mla():
    sparse = copy.deepcopy(BEFORE)
    for layer in sparse["layers"]:
        layer["kind"] = "dsa"
    sparse["mtp"]["kinds"] = []
    assert same.resolved(sparse)["model"]["blocks"].keys() == {"dsa", "mla"}
    sparse["mtp"]["kinds"] = ["moe"]
    assert same.resolved(sparse)["model"]["blocks"].keys() == {"dsa", "mla", "moe"}


@pytest.mark.parametrize(
    "gone", ["recipe", "settings", "megatron_core", "layers", "mtp", "recipe.model", "recipe.feature"]
)
def test_a_plan_that_lacks_a_part_is_none(tmp_path, gone):
    plan = copy.deepcopy(BEFORE)
    *at, last = gone.split(".")
    del (plan[at[0]] if at else plan)[last]
    for text in (json.dumps(plan), "{", "[]", "[" * 100_000):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(Refused, match="cannot be understood") as refused:
            same.read(tmp_path / "plan.json")
        assert refused.value.problems[0].key == "schedule.load"
    (tmp_path / "plan.json").write_text(json.dumps(BEFORE))
    assert same.read(tmp_path / "plan.json") == BEFORE
    with pytest.raises(Refused, match="cannot be read"):
        same.read(tmp_path / "nothing")
