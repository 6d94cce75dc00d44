"""Stage 1, conf -> Recipe: Hydra composes, OmegaConf goes out at once, strict frozen models come in.

Everything after this module sees `Recipe` only.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from nam_megatron.blocks.kinds import KINDS, Blocks
from nam_megatron.errors import Problem, Refused
from nam_megatron.features.names import Features
from nam_megatron.setting import Config, Name

Letter = Literal["A", "E", "M", "R"]
Kind = Literal[tuple(KINDS)]  # type: ignore[valid-type]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Degree = Annotated[int, Field(ge=1, le=65536)]


class Letters(Config):
    """The kind of block at each letter of the pattern."""

    A: Kind
    E: Kind
    M: Kind
    R: Kind


class LaneBlocks(Config):
    """The kind of block a lane puts at M and R."""

    M: Kind
    R: Kind


class Substitute(Config):
    """Another kind at some ranks of a letter; ranks count within the letter, from 0."""

    letter: Letter
    ranks: tuple[NonNegativeInt, ...]
    kind: Kind


class Model(Config):
    family: Name
    pattern: Annotated[str, Field(min_length=1, max_length=8192)]
    depth: Annotated[int, Field(ge=1, le=4096)]
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    seq_length: PositiveInt
    tied_embeddings: bool
    normalization: Literal["RMSNorm", "LayerNorm"]
    norm_epsilon: PositiveFloat
    linear_bias: bool
    activation: Literal["squared_relu", "swiglu", "gelu"]
    hidden_dropout: Fraction
    attention_dropout: Fraction
    rotary_base: PositiveInt
    init_std: PositiveFloat
    letters: Letters
    substitute: tuple[Substitute, ...]
    blocks: Blocks


class Lane(Config):
    name: Name
    tensor: Degree
    sequence: bool
    blocks: LaneBlocks


class Parallel(Config):
    tensor: Degree
    sequence: bool
    pipeline: Degree
    virtual_pipeline: Degree
    context: Degree
    expert: Degree
    expert_tensor: Degree


class Precision(Config):
    name: Name
    params: Literal["bf16"]
    grad_reduce: Literal["fp32", "bf16"]
    cross_entropy: Literal["megatron", "compiled", "fused"]
    fused_grad_accumulation: bool
    norm_kernels: Literal["transformer_engine", "cudnn"]


class Optim(Config):
    name: Literal["adamw", "muon"]
    lr: PositiveFloat
    min_lr: NonNegativeFloat
    decay: Literal["constant", "linear", "cosine", "inverse-square-root"]
    warmup_steps: NonNegativeInt
    weight_decay: NonNegativeFloat
    beta1: Fraction
    beta2: Fraction
    eps: PositiveFloat
    clip_grad: NonNegativeFloat


class Schedule(Config):
    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    train_steps: PositiveInt
    decay_steps: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**31)]  # numpy takes 32 bits, and Megatron adds the rank's offset
    eval_steps: NonNegativeInt
    eval_interval: PositiveInt
    log_interval: PositiveInt
    save: Name | None
    load: Name | None
    save_interval: PositiveInt | None
    stop_every: PositiveInt | None
    timeout_minutes: PositiveInt
    manual_gc_interval: NonNegativeInt


class Data(Config):
    name: Literal["mock", "indexed", "built"]
    path: Name | None
    split: Name | None
    tokenizer: Name | None
    workers: NonNegativeInt


class ProcessGroups(Config):
    """GiB of NCCL's buffers on a rank for each kind of process group that has more than one member."""

    data: NonNegativeFloat
    tensor: NonNegativeFloat
    pipeline: NonNegativeFloat
    context: NonNegativeFloat
    expert: NonNegativeFloat


class Device(Config):
    name: Name
    capability: tuple[NonNegativeInt, NonNegativeInt]
    memory_gb: PositiveFloat
    total_gib: PositiveFloat
    runtime_gib: NonNegativeFloat
    groups_gib: ProcessGroups
    allocator_gib: NonNegativeFloat
    headroom_gib: NonNegativeFloat
    bf16_tflops: PositiveFloat
    gemm_tflops: PositiveFloat
    link: Name
    gemm_floor_tflops: PositiveFloat
    allreduce_floor_gbs: PositiveFloat


class Storage(Config):
    """Folders by what becomes of their files: kept (data, checkpoints), thrown away (caches, logs, temp), the record of runs."""

    durable: Name
    scratch: Name
    receipts: Name


class Cluster(Config):
    """Hosts of one kind. `waivers`: preflight findings that these hosts cannot satisfy, by name, and why."""

    name: Name
    nodes: Degree
    gpus_per_node: Degree
    storage: Storage
    waivers: dict[Name, Name]


class Preset(Config):
    name: Name
    alias_of: Name | None
    family: Name
    about: Name


class Recipe(Config):
    """What a person meant, every value of it."""

    preset: Preset
    model: Model
    lane: Lane
    parallel: Parallel
    feature: Features
    precision: Precision
    optim: Optim
    schedule: Schedule
    data: Data
    device: Device
    cluster: Cluster
    assumptions: dict[Name, Name]

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same weights: world / (tensor * pipeline * context)."""
        p = self.parallel
        return self.world_size // (p.tensor * p.pipeline * p.context)

    @property
    def expert_data_parallel(self) -> int:
        """Ranks that hold the same experts: world / (pipeline * expert * expert_tensor)."""
        p = self.parallel
        return self.world_size // (p.pipeline * p.expert * p.expert_tensor)


def conf_dir() -> Path:
    """The folder of configs: beside the package in a checkout, inside it in a wheel."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def load(preset: str = "nam56r", overrides: Iterable[str] = ()) -> Recipe:
    """Compose and check a recipe in this process.

    Args:
        preset: a name in conf/preset.
        overrides: Hydra overrides, e.g. `lane=nemo_native`, `cluster.gpus_per_node=4`.

    Raises:
        Refused: with every finding.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from nam_megatron.origin import Origin, hydra_problem

    words = [f"preset={preset}", *overrides]
    before = GlobalHydra.instance().hydra  # a caller inside a Hydra app (diff=...) gets its own back
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            try:
                cfg = compose("recipe", overrides=words)
            except Exception as err:  # whatever Hydra raises, it raises over what it was given
                raise Refused(hydra_problem(err)) from None
            return from_config(cfg, Origin("recipe", words))
    finally:
        GlobalHydra.instance().hydra = before


def from_config(cfg: DictConfig, origin: Any = None, without: Iterable[str] = ()) -> Recipe:
    """A composed Hydra config as a Recipe. `without`: top-level keys that belong to the command, not the recipe.

    Raises:
        Refused: unknown and missing keys, wrong types, values out of range, dangling interpolations.
    """
    try:
        tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        absent = sorted(OmegaConf.missing_keys(cfg))
        raise Refused((Problem(f"key `{k}` must be given", k, _missing_hint(k)) for k in absent), origin) from None
    except OmegaConfBaseException as err:
        key = getattr(err, "full_key", None) or None
        raise Refused(Problem(_first_line(err), key, "`${...}` names a key of the composed config"), origin) from None
    for key in without:
        tree.pop(key, None)
    if features := list(_feature_as_a_group(origin.overrides if origin else ())):
        raise Refused(features, origin)
    recipe = from_tree(tree, origin)
    if renamed := list(_lane_in_name_only(recipe)):
        raise Refused(renamed, origin)
    return recipe


def _feature_as_a_group(overrides: Iterable[str]) -> Iterator[Problem]:
    """`feature=fp8` would put the keys of one feature in the place of all of them."""
    for text in overrides:
        key, _, name = text.partition("=")
        if key == "feature" and name in Features.model_fields:
            hint = f"features are switched by key, e.g. `feature.{name}.{keys_at((key, name))[0]}=...`"
            yield Problem(f"`{name}` is one feature, and `feature` is all of them", key, hint)


def _lane_in_name_only(recipe: Recipe) -> Iterator[Problem]:
    """A lane is part of a run's identity: under the name of a file in conf/lane stands what that file says."""
    file = conf_dir() / "lane" / f"{recipe.lane.name}.yaml"
    if not file.is_file():
        return
    said, given = OmegaConf.to_container(OmegaConf.load(file)), recipe.lane.model_dump()
    pairs = {key: (said[key], given[key]) for key in ("tensor", "sequence")}
    pairs |= {f"blocks.{letter}": (said["blocks"][letter], kind) for letter, kind in given["blocks"].items()}
    for key, (there, here) in pairs.items():
        if there != here:
            instead = "write a lane of your own" if key.startswith("blocks.") else f"set `parallel.{key}`"
            hint = f"{instead}, or give this lane another name: `lane.name=NAME`"
            yield Problem(f"lane `{recipe.lane.name}` has `{there}`, not `{here}`", f"lane.{key}", hint)


def from_tree(tree: Mapping[str, Any], origin: Any = None) -> Recipe:
    """A plain nested mapping as a Recipe."""
    try:
        recipe = Recipe.model_validate(_tuples(tree))
    except ValidationError as err:
        raise Refused((_problem(e) for e in err.errors(include_url=False)), origin) from None
    if endless := list(_endless(recipe.model_dump())):
        raise Refused((Problem("an integer of more than 63 bits", key) for key in endless), origin)
    return recipe


def to_tree(recipe: Recipe) -> dict[str, Any]:
    """A Recipe as plain JSON-able data; `from_tree(to_tree(r)) == r`."""
    return recipe.model_dump(mode="json")


def _tuples(node: Any) -> Any:
    """Lists as tuples, all the way down: strict frozen models take no lists."""
    if isinstance(node, Mapping):
        return {k: _tuples(v) for k, v in node.items()}
    return tuple(map(_tuples, node)) if isinstance(node, (list, tuple)) else node


def _endless(node: Any, key: str = "") -> Iterator[str]:
    """Keys of integers that no flag takes and whose digits Python may refuse to print."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _endless(value, f"{key}.{name}" if key else name)
    elif isinstance(node, tuple):
        for value in node:
            yield from _endless(value, key)
    elif isinstance(node, int) and node.bit_length() > 63:
        yield key


def _first_line(err: Exception) -> str:
    return str(err).splitlines()[0].rstrip(".") if str(err) else type(err).__name__


def _missing_hint(key: str | None) -> str | None:
    return f"give it: `{re.sub(r'\[(\d+)\]', r'.\1', key)}=...`" if key else None


def _dotted(loc: Iterable[Any]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def keys_at(loc: Iterable[Any]) -> tuple[str, ...]:
    """Names of the keys that exist under `loc`, the parts of a key; none where `loc` itself does not exist."""
    model: Any = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        args = getattr(annotation, "__args__", ())
        model = next((t for t in (annotation, *args) if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if model is None:
            return ()
    return tuple(model.model_fields)


def keys_hint(loc: Sequence[Any]) -> str:
    """For somebody who wrote a key under `loc` that does not exist. At the top a command has words of its own."""
    names = keys_at(loc) if loc else ()
    return f"there are: {', '.join(names)}" if names else "`--cfg job` prints every key there is"


def _problem(error: Mapping[str, Any]) -> Problem:
    """One pydantic error in our words."""
    kind, loc, value = error["type"], error["loc"], error.get("input")
    key = _dotted(loc)
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(loc[-1]), keys_at(loc[:-1]), 1)
        meant = f", did you mean `{close[0]}`?" if close else ""
        hint = None if close else keys_hint(loc[:-1])
        return Problem(f"unknown key `{loc[-1]}`{meant}", _dotted(loc[:-1]) or key, hint, place=key)
    if kind == "missing" and isinstance(loc[-1], int):
        return Problem(f"item {loc[-1]}, counted from 0, is missing", _dotted(loc[:-1]))
    if kind == "missing":
        return Problem(f"key `{loc[-1]}` is missing", _dotted(loc[:-1]) or key, _missing_hint(key), place=key)
    if kind == "invalid_key" or loc[-1:] == ("[key]",):
        return Problem(f"{_shown(value)} cannot be a key", _dotted(loc[: -1 if kind == "invalid_key" else -2]) or None)
    shown = _shown(value)
    if kind == "literal_error":
        close = difflib.get_close_matches(
            str(value), [w.strip("'") for w in error["ctx"]["expected"].replace(" or ", ", ").split(", ")], 1
        )
        meant = f"did you mean `{close[0]}`?" if close else None
        return Problem(f"{shown} is not one of {error['ctx']['expected']}", key, meant)
    if kind == "string_pattern_mismatch":
        return Problem(f"{shown} begins with a blank or `-`, or has a control character", key)
    if kind == "too_long":
        return Problem(
            f"must have at most {error['ctx']['max_length']} items, not {error['ctx']['actual_length']}", key
        )
    text = error["msg"].replace("String should", "must").replace("Input should be", "must be")
    for theirs, ours in TYPES.items():
        text = re.sub(theirs, ours, text)
    wrong_type = kind.endswith("_type") or kind == "int_from_float"
    kind_of = f" ({type(value).__name__})" if wrong_type and isinstance(value, (bool, int, float, str)) else ""
    return Problem(f"{text}, not {shown}{kind_of}", key or None)


# Pydantic's names of types, and what a person who writes YAML calls them.
TYPES = {
    r"a valid tuple": "a list",
    r"a valid dictionary.*": "a mapping",
    r"a valid integer": "an integer",
    r"a valid boolean": "true or false",
    r"a valid": "a",
}


def _shown(value: Any) -> str:
    """A value as YAML has it, shortened."""
    try:
        text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a set or a date; an integer of thousands of digits
        text = f"{type(value).__name__}"
    return text if len(text) < 80 else text[:77] + "..."
