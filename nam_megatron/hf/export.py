"""Megatron's checkpoint to a folder that transformers opens, and back (torch side). On a CPU host, a tensor at a time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nam_megatron.argv import load_plan, plan_json
from nam_megatron.data import manifest as dataset
from nam_megatron.data import tokenizer
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.hf import describe, distributed, folder
from nam_megatron.hf.model.configuration_nam import COMPUTES, OPTIONAL, NamConfig
from nam_megatron.lower import Lowering
from nam_megatron.plan import Plan
from nam_megatron.runtime import checksums
from nam_megatron.runtime.checkpoint import PLAN, SIGNED

MODEL = Path(__file__).parent / "model"
CODE = ("configuration_nam.py", "modeling_nam.py")
AUTO = {
    "AutoConfig": "configuration_nam.NamConfig",
    "AutoModelForCausalLM": "modeling_nam.NamForCausalLM",
}
Say = Callable[[str], None]


def export(
    checkpoint: Path, out: Path, tokens: Path | None, say: Say, shard_bytes: int = folder.MOST
) -> dict[str, Any]:
    """Write the newest step of `checkpoint` to `out`; the manifest that was written.

    tokens: the tokenizer's folder; None: that of imported weights or of the dataset the plan was trained on, if we built it.

    Raises:
        Refused: a checkpoint or plan that cannot be exported, a tokenizer that does not fit, an `out` that is there.
    """
    step = distributed.step_folder(checkpoint)
    at = plan_of(checkpoint, step)
    lowering = load_plan(at)
    plan = lowering.plan
    config = config_for(plan)
    if tokens is None:
        tokens = trained_tokenizer(at, plan)
        if tokens is not None and not (tokens / tokenizer.FILE).is_file():
            said = f"the tokenizer of the run's dataset is not in `{tokens}`"
            raise Refused(Problem(said, None, "give it: `--tokenizer FOLDER`"))
    if tokens is not None:
        fits(tokens, plan.recipe.model.vocab_size)
    say(f"tokenizer: {tokens or 'none, since the run had no dataset of ours; `--tokenizer FOLDER` gives one'}")
    raise_if(Problem(f"checkpoint `{step}` is damaged: {what}") for what in checksums.damage(step))
    source = distributed.Checkpoint(step)
    tensors = list(describe.tensors(config.to_dict()))
    if strangers := sorted(source.strangers(distributed.model_keys(tensors))):
        raise Refused(Problem(f"`{step}` holds `{key}`, and the plan has no such tensor") for key in strangers[:8])
    part = _fresh(out)
    try:
        manifest = _fill(part, source, tensors, config, lowering, tokens, say, shard_bytes)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return manifest


def _fill(
    part: Path,
    source: distributed.Checkpoint,
    tensors: list[describe.Tensor],
    config: NamConfig,
    lowering: Lowering,
    tokens: Path | None,
    say: Say,
    shard_bytes: int,
) -> dict[str, Any]:
    files, hashes, done = folder.shards(tensors, shard_bytes), {}, 0
    total = sum(tensor.nbytes for tensor in tensors)
    for name, group in files:
        hashes[name] = folder.write_shard(part / name, group, source.joined)
        done += sum(tensor.nbytes for tensor in group)
        say(f"{name}: {done / 1e9:.2f} of {total / 1e9:.2f} GB")
    folder.write_index(part, files)
    ends = _special(tokens) if tokens is not None else {}
    more = {"architectures": ["NamForCausalLM"], "auto_map": AUTO, "dtype": "bfloat16", "model_type": "nam", **ends}
    # What transformers would write besides are its defaults, other ones in each version.
    tree = {k: v for k, v in config.to_dict().items() if k in COMPUTES} | more
    _write_json(part / folder.CONFIG, tree)
    _write_json(part / "generation_config.json", {"use_cache": True, **ends})
    for name in CODE:
        shutil.copyfile(MODEL / name, part / name)
    (part / PLAN).write_text(plan_json(lowering), encoding="utf-8")
    if tokens is not None:
        tokenizer.copy(tokens, part)
    said = {
        "step": source.folder.name,
        "weights": folder.fingerprint(hashes),
        "checkpoint": checksums.whole(source.folder),
    }
    folder.write_manifest(part, hashes, **said)
    return folder.load_json(part / folder.MANIFEST)


def load(export: Path, plan: Path, out: Path, say: Say) -> None:
    """Write an export as Megatron weights that a run of `plan` starts from: `schedule.load=OUT`.

    Raises:
        Refused: a damaged export, a plan whose model is another, an `out` that is there.
    """
    folder.verified(export)
    lowering = load_plan(plan)
    raise_if(describe.objections(lowering.plan))
    config = describe.config(lowering.plan)
    raise_if(differences(export, config))
    tensors = list(describe.tensors(config))
    read = folder.reader(export, tensors)
    part = _fresh(out)
    try:
        # The shards are memory-mapped, and their parts are views: nothing is copied before it is written.
        parts = {key: value for tensor in tensors for key, value in folder.cut(tensor, read(tensor))}
        say(f"{len(parts)} tensors, {sum(v.nbytes for v in parts.values()) / 1e9:.2f} GB")
        distributed.write(part, parts, lowering)
        if (export / tokenizer.FILE).is_file():
            (part / dataset.TOKENIZER).mkdir()
            tokenizer.copy(export, part / dataset.TOKENIZER)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def config_for(plan: Plan) -> NamConfig:
    """The config of a plan's export. Raises Refused: a model that cannot be exported."""
    raise_if(describe.objections(plan))
    try:
        return NamConfig(**describe.config(plan))
    except ValueError as err:
        raise Refused(Problem(f"the export takes no such model: {err}")) from None


BESIDE = {"model_type", "auto_map", "architectures", "dtype", "eos_token_id", "pad_token_id"}


def config_of(export: Path) -> NamConfig:
    """config.json of an export, every key checked; no code of the folder runs. Raises Refused."""
    at = export / folder.CONFIG
    tree = folder.load_json(at)
    if tree.get("model_type") != "nam":
        raise Refused(Problem(f"`{at}` is of a `{tree.get('model_type')}`, not of a `nam`"))
    if (mapped := tree.get("auto_map")) != AUTO:
        raise Refused(Problem(f"`{at}` names other code than ours: {str(mapped)[:120]}"))
    # transformers obeys whatever else stands there.
    if strange := sorted(tree.keys() - COMPUTES - BESIDE):
        raise Refused(Problem(f"`{at}`: `{strange[0]}` is no key of an export", None, "export again"))
    tokens = {name: tree[name] for name in ("eos_token_id", "pad_token_id") if name in tree}
    if odd := [name for name, token in tokens.items() if type(token) is not int]:
        raise Refused(Problem(f"`{at}`: `{odd[0]}` is no token", None, "export again"))
    try:
        return NamConfig(**{k: v for k, v in tree.items() if k in COMPUTES}, **tokens)
    except Exception as err:
        raise Refused(Problem(f"`{at}`: {str(err)[:300]}", None, "export again")) from None


def differences(export: Path, wanted: dict[str, Any]):
    """Where the export's model is not the wanted one, by key."""
    tree = config_of(export).to_dict()
    for key in [*wanted, *(key for key in (*describe.BLOCKS, *OPTIONAL) if key in tree and key not in wanted)]:
        if tree.get(key) != wanted.get(key):
            said = f"the export has `{key}` {_short(tree.get(key))}, and the plan {_short(wanted.get(key))}"
            yield Problem(said, None, "give the plan that was exported")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 160 else f"{text[:160]}..."


def plan_of(checkpoint: Path, step: Path) -> Path:
    """plan.json stands beside the steps, or, where a step was named, in the folder above it; of Megatron-Bridge's in one more."""
    for at in (checkpoint, step.parent, checkpoint / SIGNED, step.parent / SIGNED):
        if (at / PLAN).is_file():
            return at / PLAN
    hint = "the trainer writes it; without it nobody knows what these weights compute"
    raise Refused(Problem(f"`{checkpoint}` holds no `{PLAN}`", None, hint))


def trained_tokenizer(at: Path, plan: Plan) -> Path | None:
    """What lies beside imported weights, or that of the dataset that a run read, if we built it. at: the plan's file."""
    beside, built = at.parent / dataset.TOKENIZER, plan.recipe.data.built
    if (beside / tokenizer.FILE).is_file():
        return beside
    return built / dataset.TOKENIZER if built else None


def fits(tokens: Path, vocabulary: int) -> None:
    """Raises Refused where a tokenizer has more entries than the model."""
    if (entries := tokenizer.load(tokens).get_vocab_size()) > vocabulary:
        said = f"the tokenizer in `{tokens}` has {entries} entries, and the model's vocabulary {vocabulary}"
        raise Refused(Problem(said, "model.vocab_size", "give the one that the data was built with"))


def _special(tokens: Path) -> dict[str, int]:
    return {f"{name}_token_id": number for name, number in tokenizer.named(tokens, tokenizer.load(tokens)).items()}


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _fresh(out: Path) -> Path:
    if out.exists():
        raise Refused(Problem(f"`{out}` is there already", None, "name another folder"))
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
    except OSError as err:
        raise Refused(Problem(f"`{part}` cannot be made: {err.strerror}")) from None
    return part
