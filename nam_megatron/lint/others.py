"""Megatron's fields in the words of programs around it: verl, SkyRL, NeMo-RL, Primus, in their YAML and as words behind their command.

A program is a record of the groups that hold Megatron's fields. What a field says becomes the flag of its argument, by the spelling that
Megatron-Bridge has for it (container.py); a field without a flag is noted by name. What is not said, the program decides: it is open.
"""

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import yaml

from nam_megatron.lint.container import SECTIONS, SPELLED
from nam_megatron.lint.shell import OPEN
from nam_megatron.targets import Flag, Target
from nam_megatron.targets.target import AS_TEXT, as_text

Tree = Mapping[str, Any]
# Of TransformerConfig, which Megatron's parser calls otherwise.
CONFIG = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "freeze_moe_router": None,
}
BRIDGE = "Megatron-Bridge"
BESIDE = {"enabled", "env_vars"}
# A word behind a command: `a.b.c=value`, with Hydra's `+` and `++` in front.
WORD = re.compile(r"\+{0,2}((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|[A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Program:
    """Who reads the words.

    groups: dotted groups of fields, each with the section of Megatron-Bridge's container whose spelling it has, `args` for Megatron's own
    names; `*` is any name. named: single keys and the arguments they are. gpus: keys whose product is the number of GPUs that train;
    marks: keys that must be there. own: fields that have Megatron's name and values of the program's.
    apart: a key whose `false` or absence leaves open how many of those do something else. model: where it names the model. needs: a field
    that counts only where another one is true. worded: what it says in words of its own, as Megatron's arguments.
    """

    name: str
    groups: Mapping[str, str]
    named: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[tuple[str, str], ...] = ()
    apart: str | None = None
    model: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    worded: Callable[[Tree], "Worded"] | None = None


class Worded(NamedTuple):
    """Arguments, how many GPUs they are for, and whether another backend than Megatron trains."""

    arguments: Mapping[str, Any]
    gpus: int | None = None
    otherwise: bool = False


AREAL = re.compile(r"megatron(?:\[\w+\])?:(?:\(?attn:(\w+)\|ffn:(\w+)|(\w+))")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DENSE = {
    "t": "tensor_model_parallel_size", "p": "pipeline_model_parallel_size", "c": "context_parallel_size", "e": "expert_model_parallel_size",
}  # fmt: skip


def _areal(tree: Tree) -> Worded:
    """`actor.backend: megatron:d2t4`, or older `allocation_mode`, has the sizes; beside them precision, schedule and recompute.

    `(attn:d1p2t4|ffn:d1p2t1e4)` has those of the experts apart, which are not cut by tensor parallelism else."""

    def one(place: str) -> Any:
        return next(at(tree, f"actor.{place}"), None)

    backend = one("backend") or tree.get("allocation_mode") or ""
    found = AREAL.search(str(backend).replace(" ", ""))
    if found is None:
        return Worded({}, otherwise=bool(re.search(r"fsdp|archon", str(backend))))
    dense, experts = (
        {k: int(n) for k, n in re.findall(r"([dtpce])(\d+)", t or "")} for t in (found[1] or found[3], found[2])
    )
    said: dict[str, Any] = {name: dense.get(letter, 1) for letter, name in DENSE.items()} | {
        "sequence_parallel": dense.get("t", 1) > 1
    }
    if "e" in dense | experts:
        said |= {DENSE["e"]: (dense | experts)["e"], "expert_tensor_parallel_size": experts.get("t", 1)}
    optimizer, lr, ratio = (one(f"optimizer.{name}") for name in ("type", "lr", "min_lr_ratio"))
    small = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    said |= small if optimizer == "adam_bf16" else {}
    said |= {"optimizer": optimizer.removesuffix("_bf16")} if isinstance(optimizer, str) else {}
    dtype = "bfloat16" if optimizer == "adam_bf16" else one("dtype")
    said |= {DTYPES[dtype]: True} if dtype in ("bfloat16", "float16") else {}
    said |= {"lr_decay_style": style} if (style := one("optimizer.lr_scheduler_type")) else {}
    with suppress(TypeError, ValueError):  # YAML takes 1e-6 for a text
        said["min_lr"] = float(ratio) * float(lr)
    megatron = one("megatron")
    for name, value in megatron.items() if isinstance(megatron, dict) else ():
        if name.endswith("_dtype") and isinstance(value, str) and value in DTYPES:
            said.setdefault(name, DTYPES[value])
        if name.startswith("recompute_") and value is not None and one("gradient_checkpointing"):
            said[name] = value
    fp8 = one("megatron.fp8_config")
    for name, value in fp8.items() if isinstance(fp8, dict) else ():
        said[{"mode": "fp8", "param": "fp8_param_gather"}.get(name, name if "bf16" in name else f"fp8_{name}")] = value
    gpus = math.prod(dense.get(letter, 1) for letter in "dtpc")
    return Worded(said, gpus)


def _verl(tree: Tree) -> Worded:
    return Worded({}, otherwise=next(at(tree, "actor_rollout_ref.actor.strategy"), None) in ("fsdp", "fsdp2", "veomni"))


OPTIMIZER = ("lr", "weight_decay", "clip_grad", "lr_decay_style")  # of verl's, under Megatron's names


def _under(group: str, **inner: str) -> dict[str, str]:
    return {group: "model", **{f"{group}.{name}": section for name, section in inner.items()}}


PROGRAMS = (
    Program(
        "verl",
        {
            **_under("actor_rollout_ref.actor.megatron", override_transformer_config="model", override_ddp_config="ddp"),
            **_under("engine", override_transformer_config="model", override_ddp_config="ddp"),
            **_under("actor_rollout_ref.actor.mindspeed", llm_kwargs="args"),  # MindSpeed-LLM's, in Megatron's names
            **dict.fromkeys(("actor_rollout_ref.actor.optim.override_optimizer_config", "optim.override_optimizer_config"), "optimizer"),
        },
        {f"{group}.{key}": key for group in ("actor_rollout_ref.actor.optim", "optim") for key in OPTIMIZER},
        (("trainer.nnodes", "trainer.n_gpus_per_node"),),
        model=("actor_rollout_ref.model.path", "model.path"),
        own=("spec",),
        worded=_verl,
    ),
    Program(
        "SkyRL",
        {
            name: section
            for group in ("trainer.policy.megatron_config", "megatron_config")
            for name, section in _under(
                group, transformer_config_kwargs="model", optimizer_config_kwargs="optimizer", ddp_config="ddp"
            ).items()
        },
        {"trainer.policy.optimizer_config.lr": "lr", "optimizer_config.lr": "lr"},
        (
            ("trainer.placement.policy_num_nodes", "trainer.placement.policy_num_gpus_per_node"),
            ("placement.num_nodes", "placement.num_gpus_per_node"),
        ),
        model=("trainer.policy.model.path", "model.path"),
    ),
    Program(
        "NeMo-RL",
        _under("policy.megatron_cfg", optimizer="optimizer", scheduler="scheduler", distributed_data_parallel_config="ddp"),
        {"policy.max_total_sequence_length": "seq_length", "policy.train_micro_batch_size": "micro_batch_size",
         "policy.train_global_batch_size": "global_batch_size"},
        (("cluster.num_nodes", "cluster.gpus_per_node"),),
        apart="policy.generation.colocated.enabled",
        model=("policy.model_name",),
        needs=dict.fromkeys(("recompute_granularity", "recompute_modules"), "activation_checkpointing")
        | dict.fromkeys(("cuda_graph_modules", "cuda_graph_warmup_steps"), "cuda_graph_impl")
        | {"offload_modules": "fine_grained_activation_offloading"},
    ),
    Program(
        "ROLL",
        {"actor_train.strategy_args.strategy_config": "model", "student.strategy_args.strategy_config": "model"},
        {"actor_train.training_args.learning_rate": "lr", "actor_train.training_args.weight_decay": "weight_decay"},
        model=("pretrain",),
    ),
    Program(
        "RLinf",
        dict.fromkeys(("actor.model", "actor.megatron", "actor.optim"), "args"),
        marks=("runner", "actor"),
        model=("rollout.model.model_path",),
        own=("normalization", "optimizer", "precision", "position_embedding_type", "seed"),
    ),
    Program(
        "AReaL",
        {"actor.megatron": "model", "actor.megatron.ddp": "ddp"},
        {"actor.optimizer.lr": "lr", "actor.optimizer.weight_decay": "weight_decay", "actor.optimizer.beta1": "adam_beta1",
         "actor.optimizer.beta2": "adam_beta2", "actor.optimizer.eps": "adam_eps", "actor.optimizer.gradient_clipping": "clip_grad"},
        model=("actor.path",),
        own=("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "main_grads_dtype",
             "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        worded=_areal,
    ),
    # The words behind its run_recipe.py and its like, laid over a recipe: containers in YAML are container.py's.
    Program(BRIDGE, {section: section for section in SECTIONS}),
    Program(
        "NeMo",
        {"model": "args", "model.optim": "args"},
        {"model.encoder_seq_length": "seq_length"},
        (("trainer.num_nodes", "trainer.devices"),),
        marks=("trainer", "exp_manager"),
        own=("normalization", "optimizer", "name", "precision", "params_dtype", "seed", "position_embedding_type", "dist_ckpt_format",
             "openai_gelu", "apply_residual_connection_post_layernorm"),
    ),
    Program("Primus", {"modules.*.overrides": "args"}, model=("modules.*.model",)),
)  # fmt: skip


@dataclass(frozen=True)
class Said:
    """What a text says of Megatron in another program's words. words: for Megatron's parser. env: of the training's processes.

    forks: see follow.py."""

    program: str
    words: tuple[str, ...]
    notes: tuple[str, ...]
    gpus: int | None
    env: Mapping[str, str | None] = field(default_factory=dict)
    forks: tuple[Any, ...] = ()


def of_command(words: Iterable[str], target: Target) -> Said | None:
    """Of the words behind a command; None where no program here has such."""
    tree: dict[str, Any] = {}
    words = list(words)
    recipe = any(re.search("run_recipe|bridge", word) or word == "--recipe" for word in words)
    for word in words:
        if found := WORD.fullmatch(word.removeprefix("--")):
            *groups, name = found[1].split(".")
            place = tree
            for group in groups:
                inner = place.get(group)
                place[group] = place = inner if isinstance(inner, dict) else {}
            place[name] = _value(found[2])
    return of_tree(tree, target, recipe=recipe)


def without_megatron(tree: Tree) -> bool:
    """Whether another backend trains what a YAML of NeMo-RL or verl says, whose sizes are then its own or those of generation."""
    fsdp = _verl(tree).otherwise and not any(at(tree, "actor_rollout_ref.actor.megatron"))
    return fsdp or (any(at(tree, "policy.dtensor_cfg")) and not any(at(tree, "policy.megatron_cfg")))


def of_tree(tree: Tree, target: Target, elsewhere: bool = False, recipe: bool = False) -> Said | None:
    """Of a YAML; None where no program here writes such. elsewhere: it starts from other files. recipe: of words over one of Bridge's.

    A YAML with four of Bridge's sections is laid over a recipe as well."""
    for program in PROGRAMS:
        if program.name == BRIDGE and not recipe and sum(isinstance(tree.get(s), dict) for s in program.groups) < 4:
            continue
        if not all(mark in tree for mark in program.marks):
            continue
        groups = [
            (place, found, section)
            for place, section in program.groups.items()
            for found in at(tree, place)
            if isinstance(found, dict)
        ]
        worded = program.worded(tree) if program.worded else Worded({})
        if fields := [*_fields(program, tree, groups, worded)]:
            words, without = flags(fields, target)
            if not words:
                continue
            misspelt = [name for name in without if nearly(name, target)]
            words += [f"--{name.replace('_', '-')}=" for name in misspelt]
            notes = [
                f"{program.name}'s words: what they leave out is its to decide, by its own defaults and by the model's config"
            ]
            if model := next((v for place in program.model for v in at(tree, place) if isinstance(v, str)), None):
                notes.append(f"the model is another file's: {_plain(model)}")
            without = [name for name in without if name not in BESIDE and name not in misspelt]
            if without:
                notes.append(
                    f"of {program.name} alone, or fields that no flag of Megatron's says: {', '.join(without)}"
                )
            off = [f"`{place}.enabled` is false" for place, found, _ in groups if found.get("enabled") is False]
            if off := off + ["another backend trains"] * worded.otherwise:
                notes.append(f"{off[0]}: as it stands nothing here is Megatron's to train")
            env = [found["env_vars"] for _, found, _ in groups if isinstance(found.get("env_vars"), dict)]
            said = {str(k): None if v is None else str(v) for held in env for k, v in held.items()}
            return Said(
                program.name,
                tuple(words),
                tuple(notes),
                None if off else worded.gpus or _gpus(program, tree, elsewhere),
                said,
            )
    return None


def flags(fields: Iterable[tuple[str, str, Any]], target: Target) -> tuple[list[str], list[str]]:
    """(section, field, value) as words of Megatron's parser, the last value of each field; and the fields that it has no flag for."""
    said: dict[str, dict[str, Any]] = {}
    without: dict[str, None] = {}
    held: dict[str, dict[str, Any]] = {}
    last = {(section, name): value for section, name, value in fields}  # which may be None: taken back
    for (section, name), value in last.items():
        held.setdefault(section, {})[name] = value
    for (section, name), value in last.items():
        rule = SPELLED.get(f"{section}.{name}", SPELLED.get(name)) if not _open(value) else None
        pairs = (
            list(rule(value, held[section]))
            if rule
            else [(CONFIG.get(name, name) if section != "args" else name, value)]
        )
        for dest, word in pairs:
            flag = target.by_dest.get(dest or "") or target.by_name(f"--{dest}".replace("_", "-"))
            if flag is None:
                without[name] = None
            elif word is not None and word != []:
                # Two fields for one thing, with two values: both are told.
                other = {} if rule else {n: v for n, v in said.get(flag.dest, {}).items() if name != n and v != word}
                said[flag.dest] = other | {name: word}
    words = [
        w for dest, values in said.items() for value in values.values() for w in _words(target.by_dest[dest], value)
    ]
    return words, list(without)


def _words(flag: Flag, value: Any) -> list[str]:
    """A flag without a value as `--flag true` or `--flag false`, as programs with underscores have it."""
    if flag.action != "store":
        positive = flag.action != "store_false"
        return [flag.name, value if _open(value) else str(bool(value) is positive).lower()]
    if isinstance(value, (list, tuple)):
        if flag.nargs:
            return [flag.name, *map(str, value)]
        return [f"{flag.name}={as_text(flag, value) if flag.type in AS_TEXT else ','.join(map(str, value))}"]
    return [flag.name, *str(value).split()] if flag.nargs else [f"{flag.name}={value}"]


def _fields(
    program: Program, tree: Tree, groups: Sequence[tuple[str, Mapping[str, Any], str]], worded: Worded
) -> Iterator[tuple[str, str, Any]]:
    inner = {at.rpartition(".")[2] for at in program.groups}
    for _, found, section in groups:
        for name, value in found.items():
            need = found.get(program.needs.get(name, ""), True)
            if (
                name not in program.own
                and need not in (False, "none", None)
                and not (isinstance(value, dict) or (name in inner and value is None))
            ):
                yield section, str(name), value
    yield from (("args", dest, value) for dest, value in worded.arguments.items())
    if groups or worded.arguments:
        yield from (
            ("args", dest, v) for key, dest in program.named.items() for v in at(tree, key) if not isinstance(v, dict)
        )


def at(tree: Any, path: str) -> Iterator[Any]:
    """What stands at a dotted path, `*` any name."""
    name, _, rest = path.partition(".")
    if isinstance(tree, dict):
        for inner in tree.values() if name == "*" else [tree[name]] if name in tree else []:
            if rest:
                yield from at(inner, rest)
            else:
                yield inner


def _gpus(program: Program, tree: Tree, elsewhere: bool) -> int | None:
    if program.apart and next(at(tree, program.apart), not elsewhere) is not True:
        return None
    for keys in program.gpus:
        counts = [n for key in keys for n in at(tree, key) if type(n) is int and 0 < n < 100_000]
        if len(counts) == 2:
            return counts[0] * counts[1]
    return None


def _value(text: str) -> Any:
    """A word's value, as YAML reads it; text with a hole in it as it stands."""
    if _open(text):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _open(value: Any) -> bool:
    return isinstance(value, str) and OPEN in value


def _plain(text: str) -> str:
    from nam_megatron.lint.follow import shown

    return shown(text)


@cache
def closest(name: str, target: Target) -> str | None:
    """The flag of Megatron's that a name is most like, of those that share letters enough: no others can match."""
    asked = _letters(name)
    near = [n for n, has in _spelt(target) if 2 * (has & asked).bit_count() >= 0.75 * (len(n) + len(name))]
    return next(iter(difflib.get_close_matches(name, near, 1, 0.75)), None)


@cache
def _spelt(target: Target) -> tuple[tuple[str, int], ...]:
    return tuple((n, _letters(n)) for n in (*target.flags, *(a for f in target.flags.values() for a in f.aliases)))


def _letters(word: str) -> int:
    """A bit for each letter's first place in a word, its second, ...: what two words share is what both have of each letter."""
    seen: Counter[str] = Counter()
    bits = 0
    for letter in word:
        bits |= 1 << (ord(letter) % 128 + 128 * seen[letter])
        seen[letter] += 1
    return bits


MISSPELT = 0.94


@cache
def _unflagged(target: Target) -> frozenset[str]:
    """Fields of Megatron's configs that stand in the list of those which no key decides, whatever their flags are called."""
    listed = target.reviewed_file.read_text(encoding="utf-8") if target.reviewed_file else ""
    return frozenset(re.findall(r"\b(?:transformer|ddp|optimizer)\.(\w+)", listed))


def nearly(field: str, target: Target) -> bool:
    """Whether a name is no argument or field of Megatron's, and a letter or two away from one."""
    name = f"--{field}".replace("_", "-")
    close = closest(name, target)
    if close is None or name == f"{close}s" or field in _unflagged(target):  # `data_paths`, a list of the program's own
        return False
    pairs = zip(re.split("-+", name), re.split("-+", close), strict=False)
    # `ep_comm_overlap` is of another thing
    if any(one != other and max(len(one), len(other)) < 3 for one, other in pairs):
        return False
    # `..._optim_step` is a shorter word for another's `..._optimizer_step`, and no slip.
    return abs(len(name) - len(close)) < 3 and difflib.SequenceMatcher(None, name, close).ratio() >= MISSPELT
