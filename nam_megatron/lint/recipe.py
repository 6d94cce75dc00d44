"""Model -> the nearest recipe of ours: a preset file, and an honest list of what it does not carry over.

The file is composed, checked and translated before it is written; the list is the difference between what the launch tells
Megatron and what the recipe's own arguments do. What the launch does not say, and what no recipe can, is `???` there: a value of our
own models is nobody's choice here. It is checked with those in the holes.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from nam_megatron.blocks import GraphPart
from nam_megatron.blocks.attention.read import UNTURNED
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.argv import words
from nam_megatron.compile.lower import Lowering, translate, unchecked
from nam_megatron.compile.plan import plan
from nam_megatron.errors import FINDINGS, OK, Problem, Refused, raise_if
from nam_megatron.features.fim import Fim
from nam_megatron.features.fp8 import Fp8
from nam_megatron.features.megatron_fsdp import OVERLAPS
from nam_megatron.features.muon import Muon
from nam_megatron.launcher import called
from nam_megatron.lint import Report
from nam_megatron.lint.count import facet
from nam_megatron.lint.follow import holes
from nam_megatron.lint.model import STOCK_SPECS, SYMBOLS, Model, known
from nam_megatron.lint.read import Launch
from nam_megatron.lint.values import Args, NotKnown, Open
from nam_megatron.recipe import Optim, Recipe, at, load, to_tree
from nam_megatron.recipe.resolve import UNREAD, latent
from nam_megatron.targets import current
from nam_megatron.words.taken import taken
from nam_megatron.words.whole import write_whole

WRITTEN_BY = " by nam_megatron.lint"
BLANK = "?"  # no path
UNSAID = "???"  # a value that is to be given, as Hydra has it
LETTER = {kind: block.letters[0] for kind, block in KINDS.items()}
Tree = dict[str, Any]


@dataclass
class Made:
    """The preset and what it leaves behind. recipe: with values of ours where the file leaves one to be given. refused: why our compiler
    would not translate it; None: it does."""

    path: Path
    yaml: str
    recipe: Recipe
    lost: list[str] = field(default_factory=list)  # other values than the launch's
    added: list[str] = field(default_factory=list)  # pinned by the recipe, left to Megatron by the launch
    keyless: list[str] = field(default_factory=list)  # arguments that no recipe of ours has
    unsaid: tuple[str, ...] = ()  # keys that the file leaves to be given
    refused: str | None = None

    @property
    def exit_code(self) -> int:
        return FINDINGS if self.refused or self.unsaid else OK

    def text(self) -> str:
        """For stderr: where it is, and what it does not carry over."""
        say = [
            f"wrote {self.path}: put it into conf/preset/, or FOLDER/preset/ for `--config-dir FOLDER`, then "
            + called(f"`python -m nam_megatron.translate conf={self.path.stem}`")
        ]
        if self.refused:
            say.append("translate refuses it as it stands (exit code 1):")
            say += [f"  {line}" for line in self.refused.splitlines() if line]
        if self.unsaid:
            say.append(
                f"translate asks for what the launch does not say or no recipe can (exit code 1): {', '.join(self.unsaid)}"
            )
        say += ["not carried over:", *(f"  {line}" for line in self.lost)] if self.lost else []
        say += [f"without a key in a recipe: {', '.join(self.keyless)}"] if self.keyless else []
        say += [f"said by the recipe, left to Megatron by the launch: {', '.join(self.added)}"] if self.added else []
        return (
            "\n".join(
                say
                if self.lost or self.refused or self.keyless or self.unsaid
                else [*say, "everything that a layer reads is carried over"]
            )
            + "\n"
        )


def write(report: Report, out: str) -> Made:
    """Write the nearest recipe.

    Raises:
        Refused: if there is none near, or the file cannot be written.
    """
    path = Path(out)
    if not path.stem.isidentifier() or path.suffix not in (".yaml", ".yml"):
        message = f"`{out}` is no file name for a preset"
        raise Refused(message, key="recipe", hint="letters, digits and `_`, ending in .yaml")
    try:
        raise_if(taken(path.parent, "recipe", beside_record=True))
        _keep(path)
        made = make(report, path)
        write_whole(path, made.yaml)
    except OSError as err:
        raise Refused(f"cannot write `{out}`: {err.strerror}", key="recipe", hint="name a file you may write") from None
    return made


def _keep(path: Path) -> None:
    """Refuse to write over what somebody else has written."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        lines = []
    if not any(line.startswith("# From ") and line.endswith(WRITTEN_BY) for line in lines[:3]):
        raise Refused(f"`{path}` exists, and lint has not written it", key="recipe", hint="name another file")


BESIDE_STEPS = ("save", "save_interval", "async_save", "load", "eval_steps", "eval_interval")


def make(report: Report, path: Path, stepping: bool = False) -> Made:
    """The preset's text, checked; nothing is written. stepping: somebody else's without checkpoints and evaluations, which no step is."""
    a, m = report.args, report.model
    lost: list[str] = []
    if m.hidden_mixers:
        hint = "lint the run.sh that stands beside its plan.json"
        raise Refused("no recipe: what `--nam-model` stands for is not in the text", key="recipe", hint=hint)
    try:
        groups, wanted = _groups(a, m), _ours(m, path.stem) or _wanted(a, m, path.stem, lost)
    except NotKnown as err:
        raise Refused(f"no recipe: `{err}` is not known", key="recipe", hint=_missing(a, str(err))) from None
    if stepping and m.plan is None:
        for key in BESIDE_STEPS:
            wanted["schedule"].pop(key, None)
    text, recipe, unsaid = _composed(wanted, groups, path.stem, _comment(report.name), lost, whole=m.described)
    made = Made(path, text, recipe, lost, unsaid=unsaid)
    lowering: Lowering | None = None
    try:
        lowering = translate(recipe)
    except Refused as refused:
        made.refused = refused.render()
        lowering = as_it_stands(recipe, lost)
    if lowering is not None:
        _compare(a, m, lowering, made)
    else:
        made.lost += [f"{a.written(name)}: not compared" for name in a.given if name not in OTHER_WAYS]
    if m.described and (other := [line for line in (*made.lost, *made.keyless) if line.startswith("--")]):
        hint = "Megatron has it: train from the arguments that lint describes"
        raise Refused(
            Problem(f"no recipe of ours says `{line.partition(' ->')[0].partition(': ')[0]}`", key="recipe", hint=hint)
            for line in other
        )
    return made


def _missing(a: Args, name: str) -> str:
    """What to do where a recipe cannot be made for want of a value."""
    if a.launch.program:
        made = "the words that Megatron gets, a `run_config.yaml`, or a checkpoint"
        return f"{a.launch.program} decides the rest of the model: give what it makes of it, {made}"
    flag = a.target.by_dest.get(name)
    if flag is None:
        return f"`python -m nam_megatron.lint {a.launch.name}` says what is open"
    if name in a.given:
        open_ = a.value(name)
        names = ", ".join(open_.names) if isinstance(open_, Open) else ""
        return f"put a value in for `{a.written(name)}`{f' ({names})' if names else ''}"
    if a.elsewhere or a.launch.partial:
        return "the text leaves the model to another file: lint the words that Megatron gets"
    return f"add `{flag.name} VALUE`"


def as_it_stands(recipe: Any, lost: list[str]) -> Lowering | None:
    """What a recipe that translate refuses would tell Megatron; with our own layout if it is the layout that leaves no plan."""
    plain = recipe.parallel.model_copy(update={"pipeline": 1, "virtual_pipeline": 1})
    uncut = recipe.model.model_copy(update={"pattern": recipe.model.pattern.replace("|", "")})
    for tried in (recipe, recipe.model_copy(update={"parallel": plain, "model": uncut})):
        try:
            return unchecked(plan(tried), current())
        except (Refused, AssertionError, ArithmeticError, LookupError, TypeError, ValueError):
            continue
    lost.append("there is no plan of this recipe: its arguments cannot be compared with the launch's")
    return None


def _composed(
    wanted: Tree, groups: Tree, name: str, source: str, lost: list[str], whole: bool = False
) -> tuple[str, Any, tuple[str, ...]]:
    """The text of what differs from the groups' own values, its recipe with those in the holes, and the holes' keys; values that our
    schema does not take are listed.

    whole: of the model, render every value: a published one is no difference from a model of ours.
    """
    header = {k: wanted["preset"][k] for k in ("name", "alias_of", "family", "about")}
    base = _base(tuple(groups.items()))
    base = {**base, "preset": {**base["preset"], **header}}

    def rendered(tree: Tree) -> str:
        model = {"model": tree["model"]} if whole else {}
        return _yaml(groups, {"preset": header, **_difference(tree, base), **model}, source)

    unsaid = [key for key, value in _leaves(wanted) if value == UNSAID]
    for key in unsaid:
        _drop(wanted, base, key)
    for _ in range(20):
        try:
            recipe = _load(rendered(wanted), name)
        except Refused as refused:
            for problem in refused.problems:
                key = (problem.key or "").split("[")[0]
                if not problem.message.startswith(UNREAD):  # what nothing reads is nothing lost
                    lost.append(f"{problem.key}: {problem.message}")
                    unsaid += [key] if key not in unsaid and at(base, key) is not None else []
                if not _drop(wanted, base, key, absent=whole):
                    raise
            continue
        for key in unsaid:
            _put(wanted, key, UNSAID)
        return rendered(wanted), recipe, tuple(unsaid)
    raise AssertionError("dropping keys does not end")


@cache
def _base(groups: tuple[tuple[str, str], ...]) -> Tree:
    """What the groups alone say. What one leaves to be given is a blank, so that the launch's own value is a difference."""
    head = {"preset": {"name": "base", "alias_of": None, "family": "base", "about": "base"}}
    blanks = {"data": {"path": BLANK, "tokenizer": BLANK}} if ("data", "indexed") in groups else {}
    return to_tree(_load(_yaml(dict(groups), {**head, **blanks}, "groups"), "base"))


def _comment(name: str) -> str:
    """The input's name for a comment: without its folder, in one line."""
    return "".join(c for c in name.rsplit("/", 1)[-1] if c.isprintable()) or "a launch"


def _load(text: str, name: str, given: Sequence[str] = ()) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preset").mkdir()
        (Path(folder) / "preset" / f"{name}.yaml").write_text(text, encoding="utf-8")
        return load(name, [f"hydra.searchpath=[file://{folder}]", *given])


def _drop(wanted: Tree, base: Tree, key: str, absent: bool = False) -> bool:
    """Put the base's value at a dotted key (list indices left off); absent: put nothing there, which leaves the base's."""
    *parents, last = key.split("[")[0].split(".")
    for part in parents:
        wanted, base = wanted.get(part, {}), base.get(part, {})
    if last not in wanted or (wanted[last] == base.get(last) and not absent):
        return False
    if last in base and not absent:
        wanted[last] = base[last]
    else:
        del wanted[last]
    return True


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield from _leaves(value, f"{path}{key}.") if isinstance(value, Mapping) else [(f"{path}{key}", value)]


def _put(tree: Tree, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _difference(wanted: Mapping[str, Any], base: Mapping[str, Any]) -> Tree:
    found: Tree = {}
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):  # `mlp: {}` says that it stands
            if inner := _difference(value, base[key]):
                found[key] = inner
        elif base.get(key) != value:
            found[key] = value
    return found


# Rendering

ORDER = (
    "preset", "model", "execution", "parallel", "precision", "optim", "schedule", "data", "feature", "cluster", "assumptions",
)  # fmt: skip


def _yaml(groups: Mapping[str, str], tree: Mapping[str, Any], source: str) -> str:
    lines = [
        "# @package _global_",
        "# yaml-language-server: $schema=../schema.json#/$defs/Recipe",
        f"# From {source}{WRITTEN_BY}",
        "defaults:",
    ]
    lines += [f"  - override /{group}: {option}" for group, option in groups.items()] + ["  - _self_"]
    for key in sorted(tree, key=lambda k: ORDER.index(k) if k in ORDER else len(ORDER)):
        lines += _node(key, tree[key], 0)
    return "\n".join(lines) + "\n"


def _node(key: str, value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, Mapping) and value:
        return [f"{pad}{key}:", *(line for k, v in value.items() for line in _node(k, v, depth + 1))]
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        return [f"{pad}{key}:", *(f"{pad}  - {_flow(v)}" for v in value)]
    return [f"{pad}{key}: {_flow(value)}"]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as text
    if isinstance(value, str):
        if value == UNSAID or (value.isidentifier() and value.lower() not in RESERVED):
            return value
        return json.dumps(value.replace("${", "\\${"), ensure_ascii=False)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


# What the launch says, in a recipe's words -------------------------------------------------------------------------------

CLUSTERS = {1: "h200_1", 2: "h200_2", 4: "h200_4", 8: "h200_8", 16: "h200_2x8"}


def _groups(a: Args, m: Model) -> Tree:
    return {
        "model": "nam56r",
        "lane": m.plan.lane if m.plan else "own_dp" if m.gdn else "nemo_native" if m.tp > 1 else "native_dp",
        "precision": "fp8_tensorwise" if a.fp8 and a.fp8_recipe == "tensorwise" else "bf16",
        "optim": "muon" if a.optimizer in ("muon", "dist_muon") else "adamw",
        "data": "indexed" if _indexed(a) else "mock",
        "cluster": CLUSTERS.get(_gpus(a, m), "h200_8"),
    }


def _gpus(a: Args, m: Model) -> int:
    """GPUs of the launch; where it does not say, the least number from 8 up that the layout divides."""
    if a.launch.gpus:
        return a.launch.gpus
    dense, sparse = max(m.tp * m.pp * m.cp, 1), max(m.etp * m.ep * m.pp, 1)
    return next((n for n in range(8, 100_000) if n % dense == 0 and n % sparse == 0), 8)


def _indexed(a: Args) -> bool:
    path = a.value("data_path")
    known_path = isinstance(path, list) and len(path) == 1
    return bool(
        known_path
        and a.tokenizer_type == "HuggingFaceTokenizer"
        and isinstance(a.value("tokenizer_model"), str)
        and a.split
    )


def _ours(m: Model, name: str) -> Tree | None:
    """The recipe of a plan of ours, under another name."""
    if m.plan is None:
        return None
    tree = to_tree(m.plan.lowering.plan.recipe)
    return {**tree, "preset": {**tree["preset"], "name": name, "alias_of": None}}


NO_LAYERS = "a hybrid's layers are `--hybrid-layer-pattern PATTERN`, in letters M G * D + - E; `pretrain_gpt.py` builds `--num-layers N`"


def _wanted(a: Args, m: Model, name: str, lost: list[str]) -> Tree:
    """Everything a recipe can say of the launch. What no recipe can say at all goes into `lost`."""
    if m.bad_symbols or not m.layers:
        raise Refused("no recipe: the launch builds no layers", key="recipe", hint=NO_LAYERS)
    lost += [f"{flag}: of the training script, not of Megatron's parser" for flag in dict.fromkeys(a.script_flags)]
    lost += [f"{flag}: what it names is not read" for flag in m.from_elsewhere]
    lost += a.launch.unsaid
    if "rampup_batch_size" in a.given:
        lost.append(
            f"{a.written('rampup_batch_size')}: Megatron 0.19.2 ignores it; every step has the whole batch, as in the recipe"
        )
    about = f"{'Hybrid' if m.hybrid else 'GPT'} of a linted launch"
    preset = {"name": name, "alias_of": None, "family": name, "about": about}
    if _model_alone(a):
        whose = "a config.json" if a.launch.kind == "huggingface" else "this launch"
        lost.append(
            f"all but the model, of which alone {whose} speaks: layout, precision, data, cluster and training are our defaults'"
        )
        computes = {k: v for k, v in _features(a, m).items() if k in OF_MODELS}
        features = {"feature": computes} if computes else {}
        return {
            "preset": preset,
            **_apart(_model(a, m, name, lost)),
            **features,
            **{k: dict(v) for k, v in TRAINING.items()},
            **_cluster(_gpus(a, m)),
        }
    gpus = _gpus(a, m)
    if not a.launch.gpus:
        lost.append(f"number of GPUs: the launch does not say it; the recipe has {gpus}")
    tree: Tree = {
        "preset": preset,
        **_apart(_model(a, m, name, lost)),
        "parallel": {"tensor": m.tp, "sequence": m.sequence_parallel, "pipeline": m.pp, "virtual_pipeline": _virtual(m), "context": m.cp,
                     "expert": m.ep, "expert_tensor": m.etp if m.moe else 1},
        "precision": {"grad_reduce": "bf16" if _bf16_gradients(a) else "fp32",
                      "cross_entropy": "compiled" if a.cross_entropy_loss_fusion else "megatron",
                      "fused_grad_accumulation": a.gradient_accumulation_fusion, "norm_kernels": _norm_kernels(a, lost),
                      "deterministic": a.deterministic_mode},
        "optim": _optim(a),
        "schedule": _schedule(a, m),
        "feature": _features(a, m),
    }  # fmt: skip
    tree |= _cluster(gpus)
    data: Tree = {"workers": a.num_workers}
    if _indexed(a):
        data |= {"path": a.value("data_path")[0], "split": a.split, "tokenizer": a.tokenizer_model}
    tree["data"] = data
    return tree


def _bf16_gradients(a: Args) -> bool:
    return a.megatron_fsdp_main_grads_dtype != "fp32" if a.use_megatron_fsdp else a.grad_reduce_in_bf16


def _cluster(gpus: int) -> Tree:
    nodes = gpus // 8 if gpus % 8 == 0 else 1
    own = {"name": f"h200_{gpus}", "nodes": nodes, "gpus_per_node": gpus // nodes}
    return {} if gpus in CLUSTERS else {"cluster": own}


# What only a training says.
TRAINING = {
    "schedule": dict.fromkeys(("micro_batch_size", "global_batch_size", "train_steps"), UNSAID),
    "optim": dict.fromkeys(("lr", "min_lr", "warmup_steps"), UNSAID),
}
# Features that a description of a model has.
OF_MODELS = ("yarn", "llama_rope", "mtp")


def _model_alone(a: Args) -> bool:
    """Whether a launch describes a model and no training."""
    return a.given.keys().isdisjoint(("micro_batch_size", "global_batch_size", "lr", "train_iters", "train_samples"))


def _sequence(a: Args, m: Model, lost: list[str]) -> int | str:
    if a.seq_length is None and a.encoder_seq_length is None and _model_alone(a) and a.max_position_embeddings:
        lost.append(f"sequence length: not said; {a.max_position_embeddings} positions, or `model.seq_length`")
        return a.max_position_embeddings
    return known(lambda: m.sequence, UNSAID)


def _norm_kernels(a: Args, lost: list[str]) -> str:
    names = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")
    said = {a.launch.env.get(name) == "1" for name in names}
    if len(said) > 1:
        lost.append(f"{' and '.join(names)}: our recipes set both or none; none is set")
    return "cudnn" if said == {True} else "transformer_engine"


def _model(a: Args, m: Model, name: str, lost: list[str]) -> Tree:
    letters = "".join(LETTER[k] for _, k in m.layers)
    usual = {letter: _commonest([k for _, k in m.layers if LETTER[k] == letter]) for letter in "AEM"}
    attention = latent(m.kinds) or usual["A"]
    kinds = {
        "A": attention or "attention",
        "E": usual["E"] or "moe",
        "M": usual["M"] or SYMBOLS["M"],
        "R": SYMBOLS["M"],
    }
    kinds = {letter: kind for letter, kind in kinds.items() if letter in letters}
    substitute = []
    for letter, kind in kinds.items():
        places = [k for _, k in m.layers if LETTER[k] == letter]
        for other in dict.fromkeys(k for k in places if k != kind):
            substitute.append(
                {"letter": letter, "ranks": [i for i, k in enumerate(places) if k == other], "kind": other}
            )
    if not m.hybrid:
        lost.append(f"GPT layers: {m.num_layers} layers of two parts become {len(m.layers)} layers of one, of the same computation; "
                    "initial values of output layers are scaled otherwise")  # fmt: skip
    length = _sequence(a, m, lost)
    positions = (a.max_position_embeddings or length) if m.positions == "learned_absolute" else None
    return {
        "family": name, "pattern": _pattern(m, letters), "depth": len(letters), "hidden_size": m.need("hidden_size"),
        "ffn_hidden_size": m.ffn, "num_attention_heads": m.heads, "vocab_size": known(lambda: m.vocabulary, UNSAID),
        "seq_length": length, "learned_positions": positions, "tied_embeddings": not a.untie_embeddings_and_output_weights,
        "normalization": a.normalization, "norm_epsilon": a.layernorm_epsilon,
        "zero_centered_norms": a.layernorm_zero_centered_gamma, "linear_bias": a.add_bias_linear,
        **_activation(a, m), "hidden_dropout": a.hidden_dropout, "attention_dropout": a.attention_dropout, "rotary_base": a.rotary_base,
        "init_std": UNSAID if m.described and "init_method_std" not in a.given else a.init_method_std,
        "letters": kinds, "substitute": substitute, "blocks": _blocks(m, lost),
    }  # fmt: skip


def _activation(a: Args, m: Model) -> Tree:
    """The activation, and what a quick GeGLU has beside; of others the comparison lists it. A recipe's is clamped."""
    name = m.activation.lower().replace(" ", "_")
    if name != "quick_geglu":
        return {"activation": name}
    if a.activation_func_clamp_value is None:
        return {"activation": f"{name} without a clamp"}
    clamp = a.activation_func_clamp_value
    return {"activation": name, "glu_offset": a.glu_linear_offset, "activation_clamp": clamp}


def _pattern(m: Model, letters: str) -> str:
    """The letters with their cuts, or the shortest piece whose repetition they are."""
    scale = 1 if m.hybrid else 2
    if m.pp > 1 and all(m.stage_sizes) and not _model_alone(m.a):  # our segments have layers: else our planner cuts
        cuts = [0, *(c * scale for c in m.cuts), len(letters)]
        return "|".join(letters[a:b] for a, b in pairwise(cuts))
    return next(
        letters[:n]
        for n in range(1, len(letters) + 1)
        if all(letters[i] == letters[i % n] for i in range(len(letters)))
    )


def _virtual(m: Model) -> int:
    return max(len(m.stage_sizes) // m.pp, 1) if m.pp > 1 else 1


def _commonest(kinds: list[str]) -> str | None:
    return max(kinds, key=kinds.count) if kinds else None


def _blocks(m: Model, lost: list[str]) -> Tree:
    needed = m.kinds.union(*(KINDS[kind].needs for kind in m.kinds))
    if dumb := [KINDS[kind].title for kind in KINDS if kind in needed and not facet(kind)]:
        text = f"no recipe: {', '.join(dumb)} cannot be said in Megatron's arguments"
        raise Refused(text, key="recipe", hint="lint the run.sh that stands beside its plan.json")
    return {kind: facet(kind).keys(m.a, m, lost) for kind in KINDS if kind in needed}


def _apart(model: Tree) -> Tree:
    """A model, and apart from it how its layers are executed."""
    execution = {
        kind: {key: keys.pop(key) for key in KINDS[kind].keys(executes=True) if key in keys}
        for kind, keys in model["blocks"].items()
    }
    return {"model": model, "execution": {kind: keys for kind, keys in execution.items() if keys}}


def _warmup(a: Args) -> int:
    if a.lr_warmup_fraction is not None:
        return int(a.lr_warmup_fraction * (_decay(a) or 0))
    return a.lr_warmup_iters or _steps(a, a.lr_warmup_samples) or 0


def _steps(a: Args, samples: int | None) -> int | None:
    return samples // a.global_batch_size if samples and a.global_batch_size else None


def _optim(a: Args) -> Tree:
    found = Optim.of_arguments(a) | {
        "warmup_steps": _warmup(a),
        "wsd_steps": a.lr_wsd_decay_iters or _steps(a, a.lr_wsd_decay_samples),
    }
    found["lr"] = UNSAID if found["lr"] is None else found["lr"]
    return found if a.lr_decay_style == "WSD" else {k: v for k, v in found.items() if not k.startswith("wsd_")}


def _decay(a: Args) -> int | None:
    return a.lr_decay_iters or _steps(a, a.lr_decay_samples) or _train(a)


def _train(a: Args) -> int | None:
    return a.train_iters or _steps(a, a.train_samples)


def _schedule(a: Args, m: Model) -> Tree:
    batch = known(lambda: a.global_batch_size or m.need("micro_batch_size") * m.dp, UNSAID)
    micro, steps = known(lambda: m.need("micro_batch_size"), UNSAID), known(lambda: _train(a))
    found = {"micro_batch_size": micro, "global_batch_size": batch, "train_steps": UNSAID if steps is None else steps,
             "decay_steps": known(lambda: _decay(a)),
             "seed": a.seed, "eval_steps": a.eval_iters, "eval_interval": a.eval_interval, "log_interval": a.log_interval}  # fmt: skip
    if all(isinstance(a.value(n), (str, int)) for n in ("save", "save_interval")):
        found |= {
            "save": a.save,
            "save_interval": a.save_interval,
            "async_save": a.async_save and not a.use_megatron_fsdp,
        }
    if a.manual_gc:
        found["manual_gc_interval"] = a.manual_gc_interval
    if isinstance(a.value("load"), str):
        found["load"] = a.load
    return {k: v for k, v in found.items() if v is not None}


def _features(a: Args, m: Model) -> Tree:
    muon = a.optimizer in ("muon", "dist_muon")
    anyway = OVERLAPS.get(str(a.data_parallel_sharding_strategy), ()) if a.use_megatron_fsdp else ()
    bound = muon or a.use_megatron_fsdp
    found: Tree = {
        "distributed_optimizer": {
            "enabled": a.use_distributed_optimizer or a.use_megatron_fsdp,
            **{name: getattr(a, name) or name in anyway for name in ("overlap_grad_reduce", "overlap_param_gather")},
            "reshardable": a.dist_ckpt_optim_fully_reshardable and a.use_distributed_optimizer and not bound,
        },
    }  # fmt: skip
    if m.yarn:
        found["yarn"] = dict(m.yarn)
    if m.llama_factor is not None:
        found["llama_rope"] = {"factor": m.llama_factor}
    if m.mtp_depths:
        inner = "".join("-" if kind == "mlp" else LETTER[kind] for kind in m.mtp_layers)
        found["mtp"] = {"depths": m.mtp_depths, "pattern": inner, "loss_weight": a.mtp_loss_scaling_factor}
    if m.recompute:
        full = m.recompute == "full"
        found["recompute"] = {
            "granularity": m.recompute,
            "modules": [] if full else list(a.recompute_modules or ("core_attn",)),
            "method": a.recompute_method if full else None,
            "layers": a.recompute_num_layers if full else None,
        }
    # Whole layers have no key, whole steps one on the GPUs of one host, and no part of a layer captures a dense MLP beside MoE: the
    # comparison lists them.
    parts = [part for part in get_args(GraphPart) if part != "mlp" or not m.moe]
    if m.graphs != "none" and (captured := [part for part in m.graph_modules if part in parts]):
        found["cuda_graphs"] = {"impl": m.graphs, "modules": captured, "warmup_steps": a.cuda_graph_warmup_steps}
    elif m.graphs == "full_iteration" and a.launch.gpus in range(1, 9) and m.pp == 1:
        found["cuda_graphs"] = {"impl": m.graphs, "modules": [], "warmup_steps": a.cuda_graph_warmup_steps}
    if a.use_megatron_fsdp:
        found["megatron_fsdp"] = {"enabled": True, "strategy": a.data_parallel_sharding_strategy}
    if a.fp8:
        found["fp8"] = Fp8.of_arguments(a) | {"recipe": a.fp8_recipe}
    if muon:
        found["muon"] = {"enabled": True} | Muon.of_arguments(a)
    if a.fim_data:
        rows = {name: Fim.row(name).argument for name in Fim.model_fields}
        given = {name: a.value(argument) for name, argument in rows.items() if argument}
        found["fim"] = {n: v for n, v in given.items() if v is not None and not isinstance(v, Open)}
    return found


# What the recipe tells Megatron, against what the launch does ------------------------------------------------------------

# Arguments whose effect is a derived value; compared by that.
DERIVED: dict[str, Callable[[Model], Any]] = {
    "hybrid_layer_pattern": lambda m: (m.layers, m.mtp_layers, m.mtp_depths, m.cuts) if m.hybrid else None,
    "hidden_size": lambda m: m.a.hidden_size,
    "ffn_hidden_size": lambda m: m.ffn if "mlp" in m.kinds else None,
    "kv_channels": lambda m: m.head_dim if "attention" in m.kinds else None,
    "num_query_groups": lambda m: m.groups if "attention" in m.kinds else None,
    "group_query_attention": lambda m: m.groups != m.heads if "attention" in m.kinds else None,
    "moe_ffn_hidden_size": lambda m: m.moe_ffn if m.moe else None,
    "mamba_num_heads": lambda m: m.mamba_heads if m.mamba else None,
    "padded_vocab_size": lambda m: known(lambda: m.vocabulary),
    "vocab_size": lambda m: known(lambda: m.vocabulary),
    "mtp_num_layers": lambda m: m.mtp_depths,
    "multi_latent_attention": lambda m: m.mla,
    "experimental_attention_variant": lambda m: m.variant,
    "expert_tensor_parallel_size": lambda m: m.etp if m.moe else None,
    "sequence_parallel": lambda m: m.sequence_parallel,
    "apply_rope_fusion": lambda m: m.rope_fusion,
    "position_embedding_type": lambda m: "rope" if m.positions == "yarn" and not m.yarn and not m.gpt_oss else m.positions,
    "window_attn_skip_freq": lambda m: m.windowed,
    "rotary_percent": lambda m: m.a.rotary_percent if m.positions not in UNTURNED else None,
    "rotary_base": lambda m: m.a.rotary_base if m.positions not in UNTURNED or m.mla else None,
    "rope_type": lambda m: ("yarn" if m.yarn else "rope") if m.mla else None,  # yarn of factor 1 is plain RoPE
    # A factor and mscale-all-dim together scale MLA's softmax whatever the angles.
    "rotary_scaling_factor": lambda m: m.a.rotary_scaling_factor if m.yarn or (m.mla and m.a.mscale_all_dim) else 1.0,
    "mscale": lambda m: m.yarn["mscale"] if m.yarn else None,
    "mscale_all_dim": lambda m: m.a.mscale_all_dim if m.yarn or (m.mla and m.a.rotary_scaling_factor > 1) else 0.0,
    "yarn_original_max_position_embeddings": lambda m: m.yarn["original_length"] if m.yarn else None,
    "yarn_beta_fast": lambda m: m.yarn["beta_fast"] if m.yarn else None,
    "yarn_beta_slow": lambda m: m.yarn["beta_slow"] if m.yarn else None,
    "yarn_correction_range_round_to_int": lambda m: m.yarn.get("rounded") if m.yarn else None,
    "use_rope_scaling": lambda m: m.llama_factor is not None,
    "rope_scaling_factor": lambda m: m.llama_factor,
    "add_qkv_bias": lambda m: m.a.add_qkv_bias or m.a.add_bias_linear,
    "bias_gelu_fusion": lambda m: m.a.bias_gelu_fusion and m.activation == "GELU" and m.a.add_bias_linear,
    "bias_swiglu_fusion": lambda m: m.a.bias_swiglu_fusion and m.a.swiglu,
    # Megatron-FSDP reads another.
    "accumulate_allreduce_grads_in_fp32": lambda m: (m.a.accumulate_allreduce_grads_in_fp32 or m.a.bf16)
    and not (m.a.grad_reduce_in_bf16 or m.a.use_megatron_fsdp),
    "grad_reduce_in_bf16": lambda m: m.a.grad_reduce_in_bf16 and not m.a.use_megatron_fsdp,
    "recompute_granularity": lambda m: m.recompute,
    "cuda_graph_impl": lambda m: m.graphs,
    "cuda_graph_modules": lambda m: m.graph_modules if m.graphs != "none" else (),
    "te_rng_tracker": lambda m: m.a.te_rng_tracker or m.graphs != "none",
    "dataloader_type": lambda m: m.a.dataloader_type or "single",
    "lr_decay_iters": lambda m: _decay(m.a),
    "train_iters": lambda m: _train(m.a),
    "embedding_init_method_std": lambda m: m.a.embedding_init_method_std or m.a.init_method_std,
    "lr_wsd_decay_iters": lambda m: _optim(m.a).get("wsd_steps"),
    "lr_wsd_decay_style": lambda m: _optim(m.a).get("wsd_shape"),
    "lr_warmup_iters": lambda m: _warmup(m.a),
    "moe_shared_expert_gate": lambda m: m.a.moe_shared_expert_gate and bool(m.a.moe_shared_expert_intermediate_size),
    "moe_router_pre_softmax": lambda m: m.a.moe_router_pre_softmax and m.a.moe_router_score_function == "softmax",
    "moe_router_num_groups": lambda m: m.expert_groups,
    "moe_router_group_topk": lambda m: m.expert_groups,
    "moe_aux_loss_coeff": lambda m: m.aux_coefficients,
    "moe_router_load_balancing_type": lambda m: m.balancing,
    "eval_interval": lambda m: m.a.eval_interval if m.a.eval_iters else None,
    "max_position_embeddings": lambda m: m.a.max_position_embeddings if m.positions == "learned_absolute" else None,
    "muon_nesterov": lambda m: m.a.muon_nesterov if "muon" in m.a.optimizer else None,
    "spec": lambda m: None if tuple(m.a.spec or ()) in STOCK_SPECS else m.a.spec,
    "dsa_indexer_skip_topk_offset": lambda m: [m.topk_source(n) for n in m.dsa_layers],
    "dsa_indexer_topk_freq": lambda m: [m.topk_source(n) for n in m.dsa_layers],
}  # fmt: skip
# Where a GPT's pipeline is cut: `|` in the recipe's pattern.
SPLIT = {
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
}  # fmt: skip
# Said by a launch in another way, or only about other arguments above.
OTHER_WAYS = {
    "num_layers", "encoder_num_layers", "hybrid_override_pattern", "mtp_hybrid_override_pattern", "moe_layer_freq",
    "linear_attention_freq",
    "deprecated_use_mcore_models",
    "use_rotary_position_embeddings", "recompute_activations", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope_deprecated",
    "rampup_batch_size",
    "train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples", "lr_warmup_fraction", "make_vocab_size_divisible_by",
}  # fmt: skip

# Flags that set another argument.
OLD_WAYS = {
    "cuda_graph_impl": ("enable_cuda_graph", "external_cuda_graph"),
    "cuda_graph_modules": ("cuda_graph_scope_deprecated",),
}


def _compare(a: Args, m: Model, lowering: Lowering, made: Made) -> None:
    plan = replace(m.plan, lowering=lowering) if m.plan else None
    theirs = Args(Launch(lowering.target, words(lowering), "words", "", gpus=a.launch.gpus, plan=plan))
    other = Model(theirs)
    models = {name for name, s in lowering.by_name.items() if s.owner in {"model", "mtp", *KINDS}}
    for name in dict.fromkeys([*lowering.by_name, *a.given]):
        if _model_alone(a) and not m.plan and name not in models and name not in a.given:
            continue  # said once, of all of them
        if name in lowering.by_name and lowering.by_name[name].key in made.unsaid:
            continue
        if name == "position_embedding_type" and "model.learned_positions" in made.unsaid:
            continue
        if name == "experimental_attention_variant" and m.gdn:  # `G` in the recipe's pattern
            continue
        if name in OTHER_WAYS or (name == "hybrid_layer_pattern" and not m.hybrid):
            continue
        if name in SPLIT and known(lambda: tuple(2 * cut for cut in m.cuts)) == known(lambda: other.cuts):
            continue
        if name not in lowering.by_name and name in a.given:
            if name in DERIVED and (ours := _derived(other, name)) is not None and ours == _derived(m, name):
                continue  # the pattern says how many layers of token prediction
            made.keyless.append(a.written(name))
            continue
        if isinstance(a.value(name), Open):
            made.lost.append(f"{a.written(name)} (not known here) -> {_said(theirs, name)}")
            continue
        if _derived(m, name) == _derived(other, name):
            continue
        was, now = _said(a, name), _said(theirs, name)
        if name not in a.given and name not in DERIVED:
            made.added.append(now)
        elif was != now:  # of equal words another flag, which is listed, makes something else
            made.lost.append(f"{was} -> {now}")


def _derived(m: Model, name: str) -> Any:
    """What comes of an argument, by DERIVED or as it stands; None where that is not known."""
    derive = DERIVED.get(name)
    return known(lambda: _plain(derive(m) if derive else m.a.value(name)))


def _said(a: Args, name: str) -> str:
    """As written; as `name = value` where it stands on Megatron's default."""
    if written := [n for n in (name, *OLD_WAYS.get(name, ())) if n in a.given]:
        return a.written(written[0])
    value = a.value(name)
    return f"{name} unset" if value is None else f"{name} = {value}"


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return None if isinstance(value, str) and holes(value) else value
