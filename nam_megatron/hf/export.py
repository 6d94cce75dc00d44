"""Megatron's checkpoint to a folder that transformers opens, and back (torch side). On a CPU host, a tensor at a time."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nam_megatron.blocks.exported import Tensor
from nam_megatron.compile.argv import load_plan, plan_json
from nam_megatron.compile.lower import Lowering
from nam_megatron.compile.plan import Plan
from nam_megatron.data import identity as content
from nam_megatron.data import manifest as dataset
from nam_megatron.data import tokenizer
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.hf import describe, distributed, folder
from nam_megatron.hf.adapters import Merged
from nam_megatron.hf.model.configuration_nam import COMPUTES, OPTIONAL, NamConfig
from nam_megatron.judge.resume import DATA, HASHED, PLAN, SIGNED, foreign
from nam_megatron.runtime import checksums
from nam_megatron.words.whole import digest, write_whole

MODEL = Path(__file__).parent / "model"
GENERATION = "generation_config.json"
CODE = ("configuration_nam.py", "modeling_nam.py")
AUTO = {"AutoConfig": "configuration_nam.NamConfig", "AutoModelForCausalLM": "modeling_nam.NamForCausalLM"}
Say = Callable[[str], None]
ADDRESS = re.compile(r"(?<=://)[^\s\"]+")


def export(
    checkpoint: Path, out: Path, tokens: Path | None, say: Say, shard_bytes: int = folder.MOST
) -> dict[str, Any]:
    """Write the newest step of `checkpoint` to `out`; the manifest that was written.

    tokens: the tokenizer's folder; None: that of imported weights or of the dataset the plan was trained on, if we built it.

    Raises:
        Refused: a checkpoint or plan that cannot be exported, a tokenizer that does not fit, an `out` that is there.
    """
    lowering, step, tokens = opened(checkpoint, tokens, say)
    config = config_for(lowering.plan, merged=True)
    source = checked(step, lowering.plan)
    tensors = list(describe.tensors(config.to_dict()))
    with folder.making(out) as part:
        manifest = _fill(part, source, tensors, config, lowering, tokens, say, shard_bytes)
    return manifest


def opened(checkpoint: Path, tokens: Path | None, say: Say) -> tuple[Lowering, Path, Path | None]:
    """What a checkpoint's plan is, its newest step, and the tokenizer that goes with it. Raises Refused."""
    step = distributed.step_folder(checkpoint)
    at = plan_of(checkpoint, step)
    lowering = load_plan(at)
    plan = lowering.plan
    raise_if(describe.objections(plan, merged=True))
    if tokens is None:
        tokens = trained_tokenizer(at, plan)
        if tokens is not None and not (tokens / tokenizer.FILE).is_file():
            said = f"the tokenizer of the run's dataset is not in `{tokens}`"
            raise Refused(said, hint="give it: `--tokenizer FOLDER`")
    if tokens is not None:
        fits(tokens, plan.recipe.model.vocab_size)
        if not same_tokens(*known_tokens(at.parent), tokens):
            said = f"`{tokens}` is another tokenizer than that of `{at.parent}`: its numbers stand for other texts"
            raise Refused(said, hint="give the one that the model was trained with")
        raise_if(other_ends(trained_tokenizer(at, plan), tokens, at.parent))
    say(f"tokenizer: {tokens or 'none, since the run had no dataset of ours; `--tokenizer FOLDER` gives one'}")
    return lowering, step, tokens


def checked(step: Path, plan: Plan) -> distributed.Checkpoint:
    """A step's tensors, which are whole and the plan's. Raises Refused."""
    raise_if(Problem(f"checkpoint `{step}` is damaged: {what}") for what in checksums.damage(step))
    raise_if(Problem(f"checkpoint `{step}` {why}") for why in foreign(step))
    tensors = list(describe.tensors(describe.config(plan)))
    source = Merged(step, plan, tensors) if plan.recipe.feature.lora else distributed.Checkpoint(step)
    if strangers := sorted(source.strangers(distributed.model_keys(tensors))):
        raise Refused(Problem(f"`{step}` holds `{key}`, and the plan has no such tensor") for key in strangers[:8])
    return source


def _fill(
    part: Path,
    source: distributed.Checkpoint,
    tensors: list[Tensor],
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
    ends, generation = special(tokens)
    folder.write_json(part / folder.CONFIG, _tree(config, ends))
    folder.write_json(part / GENERATION, {"use_cache": True, **generation})
    for name in CODE:
        shutil.copyfile(MODEL / name, part / name)
    # An export is published: what MLflow's address has before its host, and as a query, is not.
    public = ADDRESS.sub(lambda found: re.split("[?#]", found[0].rpartition("@")[2])[0], plan_json(lowering))
    (part / PLAN).write_text(public, encoding="utf-8")
    if tokens is not None:
        tokenizer.copy(tokens, part)
    said = {"step": source.step.name, "weights": folder.fingerprint(hashes), "checkpoint": checksums.whole(source.step)}
    folder.write_manifest(part, hashes, **said)
    return folder.load_json(part / folder.MANIFEST)


def _tree(config: NamConfig, ends: dict[str, int]) -> dict[str, Any]:
    """config.json. What transformers would write besides are its defaults, other ones in each version."""
    more = {"architectures": ["NamForCausalLM"], "auto_map": AUTO, "dtype": "bfloat16", "model_type": "nam", **ends}
    return {k: v for k, v in config.to_dict().items() if k in COMPUTES} | more


def refresh(export: Path) -> list[str]:
    """Give an export the present code, in place; the files that were others. Weights and tokenizer stay as they are, and a signed config.

    What transformers or Bridge saved again, without a manifest, gets our config and a manifest, which says no step.

    Raises:
        Refused: no export, a damaged one, a config that the present code does not read, or a folder with more than was saved.
    """
    signed = (export / folder.MANIFEST).exists()
    manifest = folder.load_json(export / folder.MANIFEST) if signed else {}
    raise_if(folder.damage(export, manifest, but=CODE) if signed else ())
    config = config_of(export, saved=not signed)
    new = {name: (MODEL / name).read_bytes() for name in CODE}
    if not signed:
        folder.reader(export, list(describe.tensors(config.to_dict())))
        shards = {path.name for path in export.glob("model*.safetensors")}
        raise_if(folder.strangers(export, {*SAVED, *CODE, *shards}))
        ends = {name: token for name in ENDS if (token := getattr(config, name, None)) is not None}
        new[folder.CONFIG] = folder.as_json(_tree(config, ends))
    old = [name for name, code in new.items() if not (at := export / name).is_file() or at.read_bytes() != code]
    try:
        for name in old:
            write_whole(export / name, new[name])
        if signed:
            files = {
                name: {"bytes": len(code), "sha256": hashlib.sha256(code).hexdigest()} for name, code in new.items()
            }
            folder.sign(export, manifest | {"files": manifest["files"] | files})
        else:
            hashes = {name: folder.digest(export / name) for name in shards}
            folder.write_manifest(export, hashes, step=None, weights=folder.fingerprint(hashes), checkpoint=None)
            old.append(folder.MANIFEST)
    except OSError as err:
        raise Refused(f"`{err.filename}` cannot be written: {err.strerror}") from None
    return old


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
    with folder.making(out) as part:
        # The shards are memory-mapped, and their parts are views: nothing is copied before it is written.
        parts = {key: value for tensor in tensors for key, value in folder.cut(tensor, read(tensor))}
        say(f"{len(parts)} tensors, {sum(v.nbytes for v in parts.values()) / 1e9:.2f} GB")
        distributed.write(part, parts, lowering)
        keep_tokenizer(export, part)


def keep_tokenizer(weights: Path, part: Path) -> None:
    """Copy the tokenizer that lies beside weights, if there is one, to where a checkpoint has it."""
    if (weights / tokenizer.FILE).exists():
        (part / dataset.TOKENIZER).mkdir()
        tokenizer.copy(weights, part / dataset.TOKENIZER)


def config_for(plan: Plan, merged: bool = False) -> NamConfig:
    """The config of a plan's export, adapters `merged` or none. Raises Refused: a model that cannot be exported."""
    raise_if(describe.objections(plan, merged))
    try:
        return NamConfig(**describe.config(plan))
    except ValueError as err:
        raise Refused(f"the export takes no such model: {err}") from None


ENDS = ("eos_token_id", "pad_token_id")
BESIDE = {"model_type", "auto_map", "architectures", "dtype", *ENDS}
# What transformers saves besides shards and code, and what stays beside it.
SAVED = (
    folder.CONFIG, folder.INDEX, GENERATION, "chat_template.jinja", "special_tokens_map.json", tokenizer.FILE,
    tokenizer.CONFIG, PLAN,
)  # fmt: skip


def config_of(export: Path, saved: bool = False) -> NamConfig:
    """config.json of an export, every key checked; no code of the folder runs.

    saved: whether transformers may have written it, which adds keys of its own.

    Raises:
        Refused: another model's, or a key that is missing, unknown or out of range.
    """
    at = export / folder.CONFIG
    tree = folder.load_json(at)
    if tree.get("model_type") != "nam":
        raise Refused(f"`{at}` is of a `{tree.get('model_type')}`, not of a `nam`")
    if (mapped := tree.get("auto_map")) != AUTO:
        raise Refused(f"`{at}` names other code than ours: {str(mapped)[:120]}")
    # transformers obeys whatever else stands there.
    if not saved and (strange := sorted(tree.keys() - COMPUTES - BESIDE)):
        again = f"python -m nam_megatron.hf refresh {export}"
        hint = "export again" if (export / folder.MANIFEST).exists() else f"`{again}`, if transformers saved it"
        raise Refused(f"`{at}`: `{strange[0]}` is no key of an export", hint=hint)
    tokens = {name: tree[name] for name in ENDS if name in tree and not (saved and tree[name] is None)}
    if odd := [name for name, token in tokens.items() if type(token) is not int]:
        raise Refused(f"`{at}`: `{odd[0]}` is no token", hint="export again")
    try:
        return NamConfig(**{k: v for k, v in tree.items() if k in COMPUTES}, **tokens)
    except Exception as err:
        raise Refused(f"`{at}`: {str(err)[:300]}", hint="export again") from None


def differences(export: Path, wanted: dict[str, Any]):
    """Where the export's model is not the wanted one, by key."""
    tree = config_of(export).to_dict()
    for key in [*wanted, *(key for key in (*describe.FACETS, *OPTIONAL) if key in tree and key not in wanted)]:
        if tree.get(key) != wanted.get(key):
            said = f"the export has `{key}` {_short(tree.get(key))}, and the plan {_short(wanted.get(key))}"
            yield Problem(said, hint="give the plan that was exported")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 160 else f"{text[:160]}..."


def plan_of(checkpoint: Path, step: Path) -> Path:
    """plan.json stands beside the steps, or, where a step was named, in the folder above it; of Megatron-Bridge's in one more."""
    for at in (checkpoint, step.parent, checkpoint / SIGNED, step.parent / SIGNED):
        if (at / PLAN).is_file():
            return at / PLAN
    hint = "the trainer writes it; without it nobody knows what these weights compute"
    raise Refused(f"`{checkpoint}` holds no `{PLAN}`", hint=hint)


def trained_tokenizer(at: Path, plan: Plan) -> Path | None:
    """What lies beside imported weights, or that of the dataset that a run read, if we built it. at: the plan's file."""
    beside, built = at.parent / dataset.TOKENIZER, plan.recipe.data.built
    if (beside / tokenizer.FILE).is_file():
        return beside
    return built / dataset.TOKENIZER if built else None


def known_tokens(at: Path) -> tuple[dict[str, Any] | None, str | None]:
    """What there is to know of a model's tokens: the tokenizer in its folder, or else the hash of that of the dataset that was read."""
    beside = (at / tokenizer.FILE, at / dataset.TOKENIZER / tokenizer.FILE)
    theirs = next((found for path in beside if (found := content.tokens(path))), None)
    return theirs, None if theirs else (content.stored(at / DATA) or {}).get(HASHED)


def same_tokens(theirs: dict[str, Any] | None, told: str | None, given: Path) -> bool:
    """Whether a tokenizer is what is known of a model's."""
    if not (given / tokenizer.FILE).is_file():
        return True  # whoever opens it refuses
    ours = content.tokens(given / tokenizer.FILE)
    if theirs:
        return theirs == ours
    if not told or told in (digest(given / tokenizer.FILE), content.laid_out(ours)):
        return True
    with tempfile.TemporaryDirectory() as copied:  # a dataset has one of others as it is used, which is another file
        tokenizer.copy(given, Path(copied))
        return told == digest(Path(copied, tokenizer.FILE))


def other_ends(known: Path | None, given: Path, at: Path) -> Iterator[Problem]:
    """Where a tokenizer ends documents, or pads, with other tokens than the one in `known`, a model's own.

    at: the folder of the model's plan, and of the hashes of its data, of which `known` may be a part that was changed since.
    """
    told = (content.stored(at / DATA) or {}).get(f"{dataset.TOKENIZER}/{tokenizer.CONFIG}")
    if told and known != at / dataset.TOKENIZER:
        if (ours := given / tokenizer.CONFIG).is_file() and digest(ours) == told:
            return
        if known and (theirs := known / tokenizer.CONFIG).is_file() and digest(theirs) != told:
            said = f"`{theirs}` is not what it was when the model was trained"
            yield Problem(said, hint="take it from a copy of the dataset: which token ends a text stands there")
            return
    if known in (None, given) or not all((at / tokenizer.FILE).is_file() for at in (known, given)):
        return
    if (was := special(known)[0]) != (now := special(given)[0]):
        said = f"`{given}` has {json.dumps(now)}, and `{known}`, which the model was trained with, {json.dumps(was)}"
        yield Problem(said, hint=f"name in `{tokenizer.CONFIG}` the tokens that the model has learned")


def fits(tokens: Path, vocabulary: int) -> None:
    """Raises Refused where a tokenizer has more entries than the model."""
    if (entries := tokenizer.load(tokens).get_vocab_size()) > vocabulary:
        said = f"the tokenizer in `{tokens}` has {entries} entries, and the model's vocabulary {vocabulary}"
        raise Refused(said, key="model.vocab_size", hint="give the one that the data was built with")


def special(tokens: Path | None) -> tuple[dict[str, int], dict[str, Any]]:
    """A tokenizer's special tokens as config.json names them, and as generation_config.json does: all that end a text."""
    if tokens is None:
        return {}, {}
    made = tokenizer.load(tokens)
    ids = {f"{name}_token_id": number for name, number in tokenizer.named(tokens, made).items()}
    several = tokenizer.ends(tokens, made)
    return ids, ids | ({"eos_token_id": several} if len(several) > 1 else {})
