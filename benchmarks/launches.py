"""How well lint reads the launches of others: read, judged by Megatron's own parser and configs, changed, and carried into a recipe.

    uv run --group test python benchmarks/launches.py FOLDER [OUT [carried]]

FOLDER holds launches that others published (not in this repository) and index.json: repository, commit, path and file of each. Writes
benchmarks/launches.json. No GPU. Takes about a second a launch and a half more for each change. `carried` leaves the changes as they
stand in OUT, which a new key of recipes does not move, and does the rest.

- read: lint in text and as JSON, and with `recipe=`; nothing may raise anything but a refusal.
- judged: Megatron cannot take most of them as they stand: variables are unset, flags are a fork's or an older version's. A launch is
  brought to 0.19.2 by leaving out what Megatron's parser has not, `somewhere` for paths, a vocabulary where none is said, and a number of
  GPUs that the layout divides. One that still has an open number is not judged. Then Megatron builds its configs or refuses, and lint's
  "will fail" is right or wrong.
- changed: of a launch that Megatron takes, flags are dropped, given another value, misspelt, added; Megatron says what became of it. A
  refusal must be a new "will fail"; another model or training must be told apart by the description or by a finding.
- carried: the recipe that lint writes is translated, and Megatron's model config of its arguments compared with that of the launch's,
  field by field, layers by number and kind. `equal`, or different and listed as not carried over, or different in silence.
"""

import hashlib
import json
import random
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.judge import same
from nam_megatron.lint import Report, describe, follow, lint, recipe, report
from nam_megatron.lint.model import known
from nam_megatron.lint.recipe import _gpus
from nam_megatron.lint.rules import cards
from nam_megatron.lint.rules.rule import DEFAULT, FAIL
from nam_megatron.lint.values import Open, harmless
from nam_megatron.recipe import load
from nam_megatron.runtime.oracle import Answer, Oracle
from nam_megatron.targets import current
from nam_megatron.verify import expectations

TARGET = current()
CHANGES = {"dropped": 5, "changed": 6, "misspelt": 1, "added": 3}  # of a launch
SILENT = {"CUDA_DEVICE_MAX_CONNECTIONS": None, "PYTORCH_CUDA_ALLOC_CONF": None, "NCCL_GRAPH_REGISTER": None}
TRAINING = ("optimizer", "scheduler", "train", "dataset", "rng", "ddp", "validation", "data")
# Of Megatron's model configs, what depends on how layers are counted and named: compared as layers by number and kind.
LAYERS = re.compile(
    r"transformer\.(num_layers|moe_layer_freq|linear_attention_freq|mtp_num_layers|mtp_hybrid.*|is_hybrid_model|num_layers_in_.*|window_attn_skip_freq|"
    r"experimental_attention_variant|pipeline.*|.*_pipeline_.*|virtual.*|output_layer_init_method|init_method|embedding_init_method)|"
    r"model\.(hybrid_.*|builder|.*spec.*)"
)


# The same formula by another program, or what is watched: in configs, and no model.
KERNELS = frozenset(
    f"{'' if '.' in name else 'transformer.'}{name}"
    for name in (
        "transformer_impl", "attention_backend", "recompute_method", "recompute_num_layers", "moe_grouped_gemm", "cuda_graph_impl",
        "cuda_graph_modules",
        "bias_activation_fusion",
        "apply_rope_fusion", "moe_ncclep_static_shape", "moe_ncclep_zero_copy", "moe_permute_fusion_into_hybridep",
        "moe_pad_experts_for_cuda_graph_inference", "use_grouped_gemm_for_dense_mlp", "train.exit_signal_handler", "rng.te_rng_tracker",
        "ddp.check_for_nan_in_grad", "model.should_pad_vocab", "model.seq_length", "recompute_granularity", "recompute_modules",
        "fp8_interval", "moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms",
    )
)  # fmt: skip
# How numbers are rounded: another training of the same model.
PRECISION = frozenset(
    f"transformer.{name}"
    for name in ("bf16", "fp16", "attention_softmax_in_fp32", "apply_query_key_layer_scaling", "fp8_amax_compute_algo",
                 "fp8_amax_history_len", "fp8_margin", "calculate_per_token_loss", "disable_bf16_reduced_precision_matmul",
                 "fp32_residual_connection")
)  # fmt: skip
# Checked by Megatron's trainer, after its configs stand.
LATER = re.compile(r"missing-flag without --(lr|train-iters).*|dsa-rotate.*")


# Refused for what is installed, or for want of the tokenizer that is not here.
ENVIRONMENT = re.compile("not installed|from TransformerEngine, but not found|--vocab-size must be specified")


def reviewed(*classes: str) -> frozenset[str]:
    groups = yaml.safe_load(TARGET.reviewed_file.read_text(encoding="utf-8"))
    fields = [f for g in groups if g["class"] in classes for f in g["fields"]]
    return frozenset(next(iter(f)) if isinstance(f, dict) else f for f in fields)


def executed() -> frozenset[str]:
    """Fields of Megatron's configs that say how and where, not what."""
    found = set(reviewed("execution", "derived")) | KERNELS
    for preset in ("nam56r", "nam56r_nemo_native", "deepseek_v3_yarn", "qwen3_next_80b_a3b"):
        lowering = translate(load(preset))
        any_field: Mapping[str, Any] = {f"{c}.{n}": None for c in TARGET.configs for n in TARGET.by_dest}
        found |= {field for field, _, key in expectations(lowering, any_field) if key and same.executes(key)}
    return frozenset(found)


@dataclass(frozen=True)
class Case:
    """A launch in Megatron 0.19.2's own words."""

    words: tuple[tuple[str, ...], ...]  # flag by flag
    env: Mapping[str, str | None]
    gpus: int
    script: str
    name: str  # of its file, which may say what model it is

    def report(self) -> Report:
        exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in self.env.items() if v is not None)
        line = " ".join(shlex.quote(w) for flag in self.words for w in flag)
        return lint(f"{exports}torchrun --nproc-per-node {self.gpus} {self.script} {line}\n", self.name)

    def ask(self, oracle: Oracle) -> Answer:
        return oracle.ask([w for flag in self.words for w in flag], self.gpus, (9, 0), SILENT | dict(self.env))


def case(found: Report) -> Case | str:
    """The launch as 0.19.2 could take it; or why it cannot be judged."""
    a, m = found.args, found.model
    words: list[tuple[str, ...]] = []
    for name, given in a.given.items():
        if name in ("use_checkpoint_args", "local_rank"):  # there is neither a checkpoint nor a launcher here
            continue
        flag, value, _ = given[-1]
        flag = flag if TARGET.by_name(flag) else flag.replace("_", "-")  # another program's spelling
        said = TARGET.by_name(flag)
        if isinstance(value, Open):
            if not value.names:
                continue  # no value of this flag: another version's
            if not harmless(name, TARGET):
                return f"open: {flag}"
            words.append((flag, "somewhere"))
        elif said is None or said.action != "store":
            words.append((flag,)) if value is not TARGET.by_dest[name].default else None
        else:
            spoken = given[-1][2].split(" ", 1)
            text = spoken[1] if len(spoken) > 1 else ""
            values = text.split() if said.nargs else [text]
            words.append((f"{flag}={text}",) if text.startswith("-") else (flag, *values))
    if not a.any_said("vocab_size", "padded_vocab_size"):
        words.append(("--vocab-size", "32000"))
    gpus = known(lambda: _gpus(a, m))
    if gpus is None:
        return "open: layout"
    script = "pretrain_hybrid.py" if known(lambda: m.hybrid) else "pretrain_gpt.py"
    env = {k: v for k, v in found.launch.env.items() if v is not None and not follow.holes(v)}
    if known(lambda: m.tp * m.cp > 1 and not m.fsdp):  # what lint's note says is wanted
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return Case(tuple(words), env, gpus, script, found.name)


# Changes ------------------------------------------------------------------------------------------------------------------


def changes(one: Case, rng: random.Random) -> Iterator[tuple[str, str, Case]]:
    """(kind, what, the launch with it)."""

    def with_words(words: Iterator | list) -> Case:
        return replace(one, words=tuple(words))

    order = list(range(len(one.words)))
    rng.shuffle(order)
    for i in order[: CHANGES["dropped"]]:
        yield "dropped", one.words[i][0].split("=")[0], with_words([*one.words[:i], *one.words[i + 1 :]])
    valued = [(i, new) for i in order if (new := another(one.words[i], rng))]
    for i, new in valued[: CHANGES["changed"]]:
        yield "changed", " ".join(new), with_words([*one.words[:i], new, *one.words[i + 1 :]])
    for i in order[: CHANGES["misspelt"]]:
        flag = one.words[i][0]
        at = rng.randrange(3, len(flag.split("=")[0]))
        new = (flag[:at] + flag[at + 1 :], *one.words[i][1:])
        yield "misspelt", new[0], with_words([*one.words[:i], new, *one.words[i + 1 :]])
    said = {w[0].split("=")[0] for w in one.words}
    switches = [f for f in TARGET.flags.values() if f.action == "store_true" and f.name not in said]
    for flag in rng.sample(switches, CHANGES["added"]):
        yield "added", flag.name, with_words([*one.words, (flag.name,)])


def another(words: tuple[str, ...], rng: random.Random) -> tuple[str, ...] | None:
    """The flag with another value of its type; None of a switch, a path or a name."""
    flag = TARGET.by_name(words[0].split("=")[0])
    if flag is None or flag.action != "store" or len(words) != 2:
        return None
    value = words[1]
    if flag.choices:
        others = [str(c) for c in flag.choices if str(c) != value]
        return (words[0], rng.choice(others)) if others else None
    if flag.type == "int" and re.fullmatch(r"\d+", value):
        return words[0], str(rng.choice([int(value) * 2, int(value) + 1, int(value) // 2]) or 1)
    if flag.type == "float":
        return words[0], f"{float(value) * 1.5 or 0.1:g}"
    return None


def told(found: Report) -> tuple[Mapping[str, str], Counter]:
    rows = dict(describe.rows(found.args, found.model))
    return rows, Counter((f.id, f.severity, f.flag) for f in found.findings)


def outcome(one: Case, before: Answer, base: Report, oracle: Oracle, execution: frozenset[str]) -> dict[str, Any]:
    """What Megatron makes of a changed launch, and what lint says of it that it did not say before."""
    answer, found = one.ask(oracle), one.report()
    rows, findings = told(found)
    new = findings - told(base)[1]
    tells = {
        "finding": bool(new), "default": bool(new) and all(s == DEFAULT for _, s, _ in new),
        "fails": any(s == FAIL for _, s, _ in new), "description": rows != told(base)[0],
    }  # fmt: skip
    if answer.error and ENVIRONMENT.search(answer.error):
        return {"megatron": "not judged", "error": answer.error[:160], **tells}
    # a launcher may set it: a note says that it is wanted
    if answer.error and "CUDA_DEVICE_MAX_CONNECTIONS" in answer.error:
        tells["fails"] |= any("CUDA_DEVICE_MAX_CONNECTIONS" in note for note in describe.notes(found.args, found.model))
    if answer.error:
        return {"megatron": "refuses", "error": answer.error[:160], **tells}
    both = before.values.keys() | answer.values
    differ = {
        f for f in both if meant(f, before.values.get(f), base) != meant(f, answer.values.get(f), found)
    } - execution
    differ = {f for f in differ if not idle(found).fullmatch(f)}
    model = sorted(f for f in differ if f.startswith(("transformer.", "model.")) and f not in PRECISION)
    training = sorted(f for f in differ if f.split(".")[0] in TRAINING or f in PRECISION)
    word = "another model" if model else "another training" if training else "the same"
    return {"megatron": word, "fields": (model or training)[:6], **tells}


# The way back -------------------------------------------------------------------------------------------------------------


def carried(found: Report, theirs: Answer, oracle: Oracle, execution: frozenset[str]) -> dict[str, Any]:
    """What becomes of a launch in the recipe that lint writes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preset").mkdir()
        try:
            made = recipe.write(found, f"{folder}/preset/launch.yaml")
        except Refused as refused:
            return {"recipe": "none", "why": refused.problems[0].message}
        listed = {"listed": made.lost[:12], "keyless": made.keyless}
        if made.refused:
            return {"recipe": "refused", "why": made.refused.splitlines()[0], **listed}
        lowering = translate(load("launch", [f"hydra.searchpath=[file://{folder}]"]))
    plan = lowering.plan
    r = plan.recipe
    env = {e.name: e.value for e in lowering.env}
    ours = oracle.ask(argv.argv(lowering), r.world_size, r.device.capability, env, [s.owner for s in plan.ours])
    if ours.error:
        return {"recipe": "Megatron refuses it", "why": ours.error[:160], **listed}
    kinds = [layer.kind for layer in plan.layers]
    layers = [k for _, k in found.model.layers]
    differ = ["layers"] if kinds != layers or plan.mtp_depths != found.model.mtp_depths else []
    attention = r.blocks.attention
    own = [layer.rank for layer in plan.layers if layer.kind == "attention"] if attention and attention.window else []
    differ += ["windows"] if tuple(map(attention.windowed, own) if attention else ()) != found.model.windowed else []
    unread = idle(found)
    for field in sorted(f for f in theirs.values.keys() & ours.values if f.startswith(("transformer.", "model."))):
        if field not in execution | PRECISION and not LAYERS.fullmatch(field) and not unread.fullmatch(field):
            was, now = (meant(field, side.values.get(field), found) for side in (theirs, ours))
            if was != now:
                differ.append(f"{field}: {was} -> {now}")
    if padded(found) != r.model.vocab_size:
        differ.append(f"vocabulary: {padded(found)} -> {r.model.vocab_size}")
    silent = not listed["listed"] and not listed["keyless"]
    return {
        "recipe": "equal" if not differ else "different in silence" if silent else "different",
        "differ": differ,
        **listed,
    }


def meant(field: str, value: Any, found: Report) -> Any:
    """A value that says the same in two ways, in one of them."""
    match field.partition(".")[2], value:
        case ("moe_z_loss_coeff", 0.0) | ("seq_len_interpolation_factor", 1):
            return None
        case "mamba_num_heads", None:
            return found.model.mamba_heads
    return value


def idle(found: Report) -> re.Pattern[str]:
    """Fields of Megatron's configs that nothing in this model reads."""
    m = found.model
    names = (
        ["model\\.vocab_size", "transformer\\.moe_router_num_groups|transformer\\.moe_router_group_topk"]
        if (found.args.moe_router_num_groups in (None, 1))
        else ["model\\.vocab_size"]
    )
    names += [] if "mlp" in m.kinds else [r"transformer\.ffn_hidden_size"]
    names += [] if found.args.moe_router_score_function == "softmax" else [r"transformer\.moe_router_pre_softmax"]
    names += [] if m.moe else [r"transformer\.moe_.*"]
    names += [] if m.mtp_depths else [r"transformer\.mtp_.*"]
    names += [] if "mamba2" in m.kinds else [r"transformer\.mamba_.*"]
    names += [] if m.dsa else [r"transformer\.dsa_.*"]
    names += (
        []
        if "attention" in m.kinds
        else [r"transformer\.(kv_channels|num_query_groups)", r"model\.position_embedding_type"]
    )
    names += [] if found.args.first_last_layers_bf16 else [r"transformer\.num_layers_at_(start|end)_in_bf16"]
    names += [] if m.yarn else [r"transformer\.(rope_type|mscale.*|rotary_scaling_factor)"]
    names += [] if m.positions in ("rope", "yarn", "mrope") else [r"model\.rotary_percent"]
    names += [] if m.positions == "mrope" else [r"transformer\.mrope_section"]
    return re.compile("|".join(names))


def padded(found: Report) -> int:
    """Rows of the embedding as Megatron pads them (training/tokenizer, vocab_size_with_padding)."""
    a = found.args
    multiple = a.make_vocab_size_divisible_by * a.tensor_model_parallel_size
    return a.padded_vocab_size or -(-a.vocab_size // multiple) * multiple


# All of it ----------------------------------------------------------------------------------------------------------------


def one_launch(
    folder: Path,
    entry: Mapping[str, str],
    oracle: Oracle,
    execution: frozenset[str],
    before: Mapping[tuple[str, str], Any] | None = None,
) -> dict[str, Any]:
    """before: changes of an earlier run, by repository and path, to be taken over."""
    text = (folder / entry["file"]).read_text(encoding="utf-8")
    done: dict[str, Any] = {k: entry[k] for k in ("repository", "commit", "path")}
    try:
        found = lint(text, entry["path"])
        report.text(found), report.as_json(found)
    except Refused as refused:
        return done | {"read": "refused", "why": refused.problems[0].message}
    except Exception:
        return done | {"read": "traceback", "why": traceback.format_exc()[-800:]}
    done["card"] = cards.named(found.args) is not None
    done |= {"read": "ok", "arguments": len(found.args.given), "findings": dict(Counter(f.id for f in found.findings))}
    try:
        recipe.make(found, Path("launch.yaml"))
    except Refused:
        pass
    except Exception:
        return done | {"read": "traceback", "why": traceback.format_exc()[-800:]}
    one = case(found)
    if isinstance(one, str):
        return done | {"judged": one}
    base, answer = one.report(), one.ask(oracle)
    fails = [f"{f.id} {f.flag}: {f.detail}" for f in base.findings if f.severity == FAIL]
    if answer.error is None:
        fails = [f for f in fails if not LATER.match(f)]
    done |= {"judged": answer.error or "accepted", "fails": fails}
    if answer.error:
        return done
    done["carried"] = carried(base, answer, oracle, execution)
    if before is not None:
        return done | {"changes": before[entry["repository"], entry["path"]]}
    rng = random.Random(hashlib.sha256(entry["file"].encode()).hexdigest())
    done["changes"] = [
        {"kind": kind, "what": what, **outcome(changed, answer, base, oracle, execution)}
        for kind, what, changed in changes(one, rng)
    ]
    return done


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({part / whole:.1%})" if whole else "")


def summary(launches: list[dict[str, Any]]) -> dict[str, Any]:
    judged = [x for x in launches if x.get("judged") and not x["judged"].startswith("open")]
    accepted = [x for x in judged if x["judged"] == "accepted"]
    refused = [x for x in judged if x["judged"] != "accepted"]
    planted = [c for x in accepted for c in x["changes"]]
    of = {
        w: [c for c in planted if c["megatron"] == w]
        for w in ("refuses", "another model", "another training", "the same")
    }
    in_cards = [c for x in accepted if x["card"] for c in x["changes"] if c["megatron"] == "another model"]
    back = Counter(x["carried"]["recipe"] for x in accepted)
    return {
        "launches": len(launches), "repositories": len({x["repository"] for x in launches}),
        "tracebacks": sum(x["read"] == "traceback" for x in launches), "refused by lint": sum(x["read"] == "refused" for x in launches),
        "judged by Megatron": len(judged), "of these accepted": len(accepted),
        "refused by Megatron, lint says so": share(sum(bool(x["fails"]) for x in refused), len(refused)),
        "accepted by Megatron, lint says it fails": share(sum(bool(x["fails"]) for x in accepted), len(accepted)),
        "planted": {
            "refused by Megatron, found": share(sum(c["fails"] for c in of["refuses"]), len(of["refuses"])),
            **{
                f"{word}, in findings or description": share(sum(c["finding"] or c["description"] for c in of[word]), len(of[word]))
                for word in ("another model", "another training")
            },
            **{f"another model by a {kind} flag, as a finding": share(sum(c["finding"] for c in of["another model"] if c["kind"] == kind),
               sum(c["kind"] == kind for c in of["another model"])) for kind in ("dropped", "changed", "added")},
            **{f"another model by a {kind} flag, of a launch that names a published one, as a finding":
               share(sum(c["finding"] for c in in_cards if c["kind"] == kind), sum(c["kind"] == kind for c in in_cards))
               for kind in ("dropped", "changed")},
            "the same, a new finding": share(sum(c["finding"] for c in of["the same"]), len(of["the same"])),
        },
        "carried into a recipe": dict(back) | {"equal": share(back["equal"], len(accepted))},
    }  # fmt: skip


def bare(one: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a launch without its text: flags without values, how much was listed and not what."""
    found = dict(one)
    if "fails" in found:
        found["fails"] = [fail.split(" ")[0] for fail in found["fails"]]
    if "carried" in found:
        found["carried"] = {k: len(v) if k in ("listed", "keyless") else v for k, v in found["carried"].items()}
    if "changes" in found:
        found["changes"] = [c | {"what": c["what"].split(" ")[0]} for c in found["changes"]]
    return found


def page(tree: Mapping[str, Any]) -> str:
    """The tables of docs/lint.md."""
    lines = ["| of launches of others | |", "|---|---|"]
    for name, value in tree["summary"].items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        lines += [f"| {': '.join(filter(None, (name, inner)))} | {number} |" for inner, number in pairs]
    lines += ["", "| repository | commit | launches | taken by Megatron once in its words |", "|---|---|---|---|"]
    for repository in sorted({x["repository"] for x in tree["launches"]}):
        of = [x for x in tree["launches"] if x["repository"] == repository]
        lines.append(
            f"| {repository} | {of[0]['commit'][:10]} | {len(of)} | {sum(x.get('judged') == 'accepted' for x in of)} |"
        )
    return "\n".join(lines) + "\n"


def main(folder: Path, out: Path, again: bool) -> None:
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    before = None
    if again:
        stands = json.loads(out.read_text(encoding="utf-8"))["launches"]
        before = {(x["repository"], x["path"]): x.get("changes") for x in stands}
    execution = executed()
    start, launches = time.time(), []
    with Oracle() as oracle:
        for entry in index:
            launches.append(one_launch(folder, entry, oracle, execution, before))
            print(
                f"{time.time() - start:6.0f} s  {len(launches)} of {len(index)}", end="\r", file=sys.stderr, flush=True
            )
    tree = {"megatron_core": TARGET.pin, "changes_a_launch": CHANGES, "summary": summary(launches)}
    print(json.dumps(tree["summary"], indent=1))
    rows = ",\n".join(json.dumps(bare(x)) for x in launches)
    out.write_text(f'{json.dumps(tree, indent=1)[:-2]},\n "launches": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_suffix(".json"),
        sys.argv[3:] == ["carried"],
    )
