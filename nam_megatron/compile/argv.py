"""Stage 5a, Lowering -> command line, in the forms people and programs want it; and plan.json, the channel into training."""

import hashlib
import json
import re
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from nam_megatron import __version__, migrate
from nam_megatron.blocks.kinds import KINDS
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.compile.plan import SECTIONS
from nam_megatron.environment import carried
from nam_megatron.errors import Problem, Refused
from nam_megatron.features.names import FEATURES
from nam_megatron.recipe import from_tree, to_tree
from nam_megatron.report import header
from nam_megatron.words.setting import Config

MARKER = "--nam-model"
TORCHRUN = "nam_megatron.torchrun"


def argv(lowering: Lowering) -> tuple[str, ...]:
    """The words Megatron's parser gets."""
    return tuple(word for s in lowering.settings for word in lowering.target.words(s))


def marker(lowering: Lowering) -> tuple[str, ...]:
    """`--nam-model NAMES:DIGEST` where stock Megatron would train something else on these arguments, or fail, and so refuses; else nothing.

    The digest is of the keys of these kinds, features and sections that no argument of Megatron's carries. The trainer compares it with
    the plan's.
    """
    p = lowering.plan
    if not p.ours and not p.alone:
        return ()
    tree = to_tree(p.recipe)
    rows: dict[str, type[Config]] = {**KINDS, **FEATURES, **{n: type(getattr(p.recipe, n)) for n in SECTIONS}}
    parts = {n: tree[n] for n in SECTIONS} | tree["model"]["blocks"] | tree["feature"]
    said = {seam.owner: parts[seam.owner] for seam in (*p.ours, *p.alone)}
    own = {k: {n: v for n, v in keys.items() if not rows[k].row(n).executes} for k, keys in said.items()}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    return MARKER, f"{'+'.join(said)}:{digest[:8]}"


def words(lowering: Lowering) -> tuple[str, ...]:
    """What a launch says: Megatron's arguments, and the marker of a model that only nam_megatron trains."""
    return (*argv(lowering), *marker(lowering))


def flags(lowering: Lowering) -> list[tuple[str, ...]]:
    """`words`, those of one flag together."""
    found = [said for s in lowering.settings if (said := lowering.target.words(s))]
    return [*found, mark] if (mark := marker(lowering)) else found


# A layer pattern: no folder holds files of such names.
LAYERS = re.compile(r"[A-Z*+|/-]*[A-Z][A-Z*+|/-]*|[*+|/-]{16,}")


def shell(lowering: Lowering) -> str:
    """Plain words for `$(...)`, which splits at blanks, takes quotes literally and patterns (`*`) for the files here.

    Raises:
        Refused: if a word is empty or has a blank, a quote, a backslash or a pattern, and would arrive as something else.
    """
    said = words(lowering)
    for word in said:
        # Any blank of Unicode's: a shell keeps a no-break space, a reader that splits as Python does would not.
        if (
            not word
            or any(c.isspace() or c in "'\"\\" for c in word)
            or (set(word) & set("*?[") and not LAYERS.fullmatch(word.rpartition("=")[2]))
        ):
            message = f"a shell would split or change `{word}` in `$(...)`"
            raise Refused(message, hint="use `out=DIR` and its run.sh, or `format=json`", law="word-splits")
    return " ".join(said) + "\n"


def lines(lowering: Lowering) -> str:
    """One flag a line, grouped by owner, with a header of comments."""
    text = [f"# {line}" if line else "#" for line in header(lowering)]
    for owner, group in groupby(lowering.settings, key=lambda s: s.owner):
        if shown := [words for s in group if (words := lowering.target.words(s))]:
            text += ["", f"# {owner}", *(shlex.join(words) for words in shown)]
    if mark := marker(lowering):
        text += ["", f"# nam_megatron: stock Megatron {_stock(lowering)}", shlex.join(mark)]
    return "\n".join(text) + "\n"


def _stock(lowering: Lowering) -> str:
    return "would train another model" if lowering.plan.ours else "would fail here, or train otherwise"


def flat_yaml(lowering: Lowering) -> str:
    """`flag: value` for tools that build the command line themselves; a flag without a value is `true`."""
    entries: dict[str, Any] = {}
    for s in lowering.settings:
        if words := lowering.target.words(s):
            values = list(s.value) if isinstance(s.value, tuple) else s.value
            name, joined, _ = words[0].removeprefix("--").partition("=")
            entries[name] = values if joined or len(words) > 1 else True
    if mark := marker(lowering):
        entries[mark[0].removeprefix("--")] = mark[1]
    return "".join(f"{k}: {json.dumps(v)}\n" for k, v in entries.items())


def run_script(lowering: Lowering) -> str:
    """A bash script beside plan.json that starts the training with torchrun."""
    cluster = lowering.plan.recipe.cluster
    text = ["#!/usr/bin/env bash", *(f"# {line}" if line else "#" for line in header(lowering)), "set -euo pipefail"]
    for env in carried(lowering):
        text += [f"export {env.name}={shlex.quote(env.value)}" if env.value is not None else f"unset {env.name}"]
    hint = "activate the environment in which it is installed with what training needs"
    text.append(
        f"python -c 'import nam_megatron' 2>&- || {{ echo 'error: no nam_megatron here: {hint}' >&2; exit 2; }}"
    )
    start = [f"exec python -m {TORCHRUN}", f"--nproc-per-node {cluster.gpus_per_node}"]
    if cluster.nodes > 1:
        start += [f"--nnodes {cluster.nodes}", '--node-rank "${NODE_RANK:?}"', '--master-addr "${MASTER_ADDR:?}"']
    else:
        start += ["--standalone"]  # a free port: two runs on one host's GPUs would meet at torchrun's own
    trainer = "nam_megatron.nemo.train" if lowering.plan.bridges_alone else "nam_megatron.train"
    start += [f"-m {trainer}", '--nam-plan "$(dirname "$0")/plan.json"']
    return "\n".join([*text, " \\\n  ".join([" ".join(start), *map(shlex.join, flags(lowering))])]) + "\n"


def plan_json(lowering: Lowering) -> str:
    """All there is to know of a plan. The recipe alone determines the rest, which is there to be read."""
    p = lowering.plan
    tree = {
        "nam_megatron": __version__,
        "megatron_core": lowering.target.pin,
        "recipe": to_tree(p.recipe),
        "world_size": p.recipe.world_size,
        "pattern": p.pattern,
        "layers": [
            {k: getattr(l, k) for k in ("number", "letter", "kind", "rank", "segment", "source")}
            | ({"variant": name} if (name := p.site.blocks.of(l.kind).variant(l)) else {})
            for l in p.layers
        ],
        "mtp": {"depths": p.mtp_depths, "kinds": list(p.mtp)},
        "departures": list(p.departures),
        "substitutions": [
            {"letter": s.letter, "designed": s.designed, "standing": s.standing, "by": s.by} for s in p.substitutions
        ],
        "not_built": [{"owner": s.owner, "missing": s.missing, "layers": list(s.numbers)} for s in p.not_built],
        "settings": [
            {"name": s.name, "value": s.value, "owner": s.owner, "key": s.key}
            | ({"executes": True} if s.executes else {})
            for s in lowering.settings
        ],
        "env": {e.name: e.value for e in lowering.env},
        "argv": list(words(lowering)),
    }
    return json.dumps(tree, indent=1) + "\n"


def load_plan(path: Path | str) -> Lowering:
    """Read a plan.json back.

    Raises:
        Refused: if it cannot be read, or if its recipe means something else to this version of nam_megatron.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise Refused(_no_plan(str(path), err.strerror or str(err))) from None
    except ValueError as err:
        raise Refused(_no_plan(str(path), str(err))) from None
    return parse_plan(text, str(path))


def parse_plan(text: str, name: str) -> Lowering:
    """`load_plan` of a text; `name` is what messages call it. Raises Refused."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise Refused(_no_plan(name, str(err))) from None
    if not isinstance(tree, dict) or "recipe" not in tree:
        raise Refused(_no_plan(name, "it holds no recipe"))
    tree = migrate.plan(tree)
    try:
        lowering = translate(from_tree(tree["recipe"]))
    except Refused as refused:
        first = refused.problems[0]
        said = f"`{name}` holds no recipe that this version would train: {first.message}"
        raise Refused(said, key=first.key, hint="translate the recipe again", law="plan-of-another-version") from None
    now = json.loads(plan_json(lowering))
    if isinstance(tree.get("argv"), list) and MARKER not in tree["argv"] and MARKER in now["argv"]:
        # written before such a plan had one; of the recipe it says nothing
        del now["argv"][now["argv"].index(MARKER) :]
    if changed := _changed(tree, now):
        said = f"`{name}` was edited, or another version means something else by its recipe: `{changed}` is another now"
        raise Refused(said, hint="translate the recipe again", law="plan-of-another-version")
    return lowering


def _changed(stored: Any, now: Any, key: str = "") -> str | None:
    """The first thing that a stored plan says and its recipe does not give any more. What came after it was written may be new."""
    if isinstance(stored, dict) and isinstance(now, dict):
        if key == "recipe" or key.startswith("recipe.") or not key:
            stored = {k: v for k, v in stored.items() if key or k != "nam_megatron"}
        elif extra := sorted(now.keys() - stored.keys()):
            return f"{key}.{extra[0]}"
        for name, value in stored.items():
            at = f"{key}.{name}" if key else name
            if name not in now:
                return at
            if found := _changed(value, now[name], at):
                return found
        return None
    return None if stored == now else key


def _no_plan(name: str, why: str) -> Problem:
    hint = "write one with `python -m nam_megatron.translate conf=NAME ... out=DIR`"
    return Problem(f"`{name}` is no plan.json: {why}", hint=hint, law="plan-unreadable")


FORMATS = {"shell": shell, "lines": lines, "json": plan_json, "yaml": flat_yaml}
