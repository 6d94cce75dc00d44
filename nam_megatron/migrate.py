"""nam migrate FILE ...: a file of presets, overlays or models in today's words, on stdout

Keys move. What is a record, a plan.json or a receipt, is read with today's keys wherever it is read; what a person wrote is refused with
them, and this prints the file anew. Of a model's own file what says how it is executed belongs to the preset, and is printed behind it.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import yaml

from nam_megatron.errors import OK, Problem, Refused, finish, not_there, raise_if
from nam_megatron.words.regular import irregular

# What only executes lay beside what computes until 2026-11-27.
_EXECUTING = """
    mla.kernels dsa.kernels dsa.query_pieces
    moe.dispatcher moe.expert_gemm moe.permute_fusion moe.router_fusion moe.fused_router_gradient moe.shared_overlap
    moe.fused_weighted_squared_relu moe.pad_to_capacity
    mamba2.strided mamba2.strided_norm mamba2.padded_projection
    mamba3.kernels mamba3.recompute mamba3.keep_states mamba3.keep_prepared mamba3.chunk mamba3.head_pieces
    m2rnn.kernels m2rnn.padded_projection
"""
MOVED: Mapping[str, str] = {f"model.blocks.{key}": f"execution.{key}" for key in _EXECUTING.split()}
# What plans of a CPU demanded until 2026-11-28, and nothing reads there.
OF_GPUS = ("PYTORCH_ALLOC_CONF", "NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")
MEANS = 1  # of the recipe in a receipt: 1 since Megatron-FSDP is told of gradients in fp32
OF_MODEL = "model."  # what a key of a model's own file lacks


def recipe(tree: Any) -> Any:
    """The recipe of a record with today's keys; of kinds from before a key of theirs, with the section in which it lies."""
    if not isinstance(tree, Mapping) or "execution" in tree or not isinstance(model := tree.get("model"), Mapping):
        return tree
    if not isinstance(blocks := model.get("blocks"), Mapping):
        return tree
    execution: dict[str, dict[str, Any]] = {}
    for new in MOVED.values():
        _, kind, name = new.split(".")
        if isinstance(blocks.get(kind), Mapping):
            said = execution.setdefault(kind, {})
            if name in blocks[kind]:
                said[name] = blocks[kind][name]
    kept = {
        kind: {k: v for k, v in keys.items() if f"model.blocks.{kind}.{k}" not in MOVED}
        if isinstance(keys, Mapping)
        else keys
        for kind, keys in blocks.items()
    }
    return {"wishes": [], **tree, "model": {**model, "blocks": kept}, "execution": execution}


def plan(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A plan.json with today's keys."""
    settings = tree["settings"] if isinstance(tree.get("settings"), list) else ()
    told = any(isinstance(s, Mapping) and s.get("name") == "megatron_fsdp_main_grads_dtype" for s in settings)
    found = {**tree, "recipe": _bf16_gradients(recipe(tree.get("recipe")), told)}
    if settings:
        found["settings"] = [
            {**s, "key": MOVED.get(s["key"], s["key"])}
            if isinstance(s, Mapping) and isinstance(s.get("key"), str)
            else s
            for s in settings
        ]
    cluster, env = (found["recipe"].get("cluster") if isinstance(found["recipe"], Mapping) else None), found.get("env")
    if isinstance(cluster, Mapping) and cluster.get("processor") == "cpu" and isinstance(env, Mapping):
        found["env"] = {name: value for name, value in env.items() if name not in OF_GPUS}
    return found


def receipt(tree: Mapping[str, Any]) -> Any:
    """The recipe of a receipt with today's keys. It holds no settings: `means` tells what a trainer was told."""
    return _bf16_gradients(recipe(tree.get("recipe")), bool(tree.get("means")))


def _bf16_gradients(recipe: Any, told: bool) -> Any:
    """Megatron-FSDP that was not told of fp32 gradients kept them in bf16."""
    try:
        untold = recipe["feature"]["megatron_fsdp"]["enabled"] is True and not told
        return {**recipe, "precision": {**recipe["precision"], "grad_reduce": "bf16"}} if untold else recipe
    except (KeyError, TypeError):
        return recipe  # it is refused elsewhere, or has no such feature


def word(text: str) -> str:
    """A word of a recorded command line."""
    key, sign, value = text.partition("=")
    bare = key.lstrip("+~")
    return key[: len(key) - len(bare)] + MOVED.get(bare, bare) + sign + value


def moved(key: str) -> Problem | None:
    """For somebody who wrote a key where it lay once."""
    if (new := MOVED.get(key)) is None:
        return None
    hint = f"write `{new}` in its place; `nam migrate FILE` prints a file in today's words"
    message = f"`{key}` says how a layer is executed, and lies in `execution` now"
    return Problem(message, key=key, hint=hint, law="key-moved")


def left(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys of a composed recipe that lie where they lay once."""
    for old in MOVED:
        node: Any = tree
        for part in old.split("."):
            node = node.get(part) if isinstance(node, Mapping) and part in node else ...
        if node is not ... and (problem := moved(old)):
            yield problem


# A file of a person's ---------------------------------------------------------------------------------------------------


def text(written: str, name: str) -> str:
    """A YAML file with today's keys: its other lines as they are. Raises Refused where what comes of it would say something else."""
    try:
        root, tree = yaml.compose(written, Loader=yaml.SafeLoader), yaml.safe_load(written)
    except (yaml.YAMLError, RecursionError) as err:
        why = str(err).splitlines()[0]
        raise Refused(f"`{name}` is no YAML: {why}", hint="mend it first", law="file-not-yaml") from None
    if not isinstance(root, yaml.MappingNode) or not isinstance(tree, dict):
        return written
    package = PACKAGE.search(written)
    under = f"{package[1]}." if package else OF_MODEL if "blocks" in tree else ""
    under = "" if under == "_global_." else under
    keys = {key.removeprefix(under): new for key, new in MOVED.items() if key.startswith(under)}
    wanted, said = _moved(tree, keys)
    if not said:
        return written
    try:
        anew = _edited(written, root, keys, not under)
        same = yaml.safe_load(anew) == (
            wanted if under else {**wanted, "execution": _with(tree.get("execution"), said)}
        )
    except (yaml.YAMLError, LookupError, AttributeError):
        same = False
    if not same:
        each = ", ".join(f"`{under}{key}` to `{new}`" for key, new in keys.items() if new in said)
        message = (
            f"`{name}` is written in a way that is left to you: anchors, braces around all of it, or a key said twice"
        )
        raise Refused(message, hint=f"move {each}", law="file-not-migrated")
    if not under:
        return anew
    head = "# Of the preset, or an overlay, and not of this file:\n"
    lines = yaml.safe_dump({"execution": _with(None, said)}, sort_keys=False).splitlines()
    return anew.rstrip("\n") + "\n" + head + "".join(f"# {line}\n" for line in lines)


PACKAGE = re.compile(r"^#\s*@package[ \t]+(\S+)", re.MULTILINE)


def _moved(tree: Mapping[str, Any], keys: Mapping[str, str], above: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """A tree without what moved and the sections that this empties; and what they said, by today's keys."""
    left: dict[str, Any] = {}
    said: dict[str, Any] = {}
    for name, value in tree.items():
        if new := keys.get(f"{above}{name}"):
            said[new] = value
        elif isinstance(value, dict):
            inner, below = _moved(value, keys, f"{above}{name}.")
            said |= below
            if inner or not below:
                left[name] = inner
        else:
            left[name] = value
    return left, said


def _with(execution: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """Raises LookupError: a key that both places say."""
    found = {kind: dict(keys or {}) for kind, keys in (execution or {}).items()}
    for key, value in said.items():
        _, kind, last = key.split(".")
        if last in found.setdefault(kind, {}):
            raise LookupError(key)
        found[kind][last] = value
    return found


def _edited(written: str, root: yaml.MappingNode, keys: Mapping[str, str], whole: bool) -> str:
    """The text without what moved. whole: of a whole recipe's file, and with it where it lies now."""
    edits: list[tuple[int, int, str]] = []
    taken: dict[str, list[str]] = {}
    if _take(written, root, "", keys, edits, taken):
        edits = [(*_span(written, root, index, set(range(len(root.value)))), "") for index in range(len(root.value))]
    there = {str(name.value): value for name, value in root.value}
    end = ""
    if whole and isinstance(section := there.get("execution"), yaml.MappingNode) and section.value:
        kinds = {str(name.value): value for name, value in section.value}
        for kind, said in taken.items():
            into, items = (kinds[kind], said) if kind in kinds else (section, [f"{kind}: {{{', '.join(said)}}}"])
            edits.append(_into(into, items))
    elif whole:
        if section is not None:  # empty: it is written again
            index = list(there).index("execution")
            edits.append((*_span(written, root, index, {index}), ""))
        end = "execution:\n" + "".join(f"  {kind}: {{{', '.join(said)}}}\n" for kind, said in taken.items())
    for start, stop, instead in sorted(edits, reverse=True):
        written = written[:start] + instead + written[stop:]
    return (written.rstrip("\n") + "\n" if written.strip() else "") + end if end else written


def _into(section: yaml.Node, items: Sequence[str]) -> tuple[int, int, str]:
    """An edit that writes pairs before the first of a mapping's."""
    if section.flow_style:
        at = section.start_mark.index + 1
        return at, at, ", ".join(items) + ", " * bool(section.value)
    first = section.value[0][0].start_mark
    return first.index, first.index, "".join(f"{item}\n{' ' * first.column}" for item in items)


def _take(
    written: str,
    node: yaml.MappingNode,
    above: str,
    keys: Mapping[str, str],
    cuts: list[tuple[int, int, str]],
    taken: dict[str, list[str]],
) -> bool:
    """Note what to cut out of a mapping, and what was said there; whether nothing is left of it."""
    gone = set()
    for index, (name, value) in enumerate(node.value):
        key = f"{above}{name.value}"
        if new := keys.get(key):
            _, kind, last = new.split(".")
            taken.setdefault(kind, []).append(
                f"{last}: {written[value.start_mark.index : value.end_mark.index].strip()}"
            )
            gone.add(index)
        elif isinstance(value, yaml.MappingNode) and value.value:
            below: list[tuple[int, int, str]] = []
            if _take(written, value, f"{key}.", keys, below, taken):
                gone.add(index)
            else:
                cuts += below
    if len(gone) == len(node.value) and gone:
        return True
    cuts += [(*_span(written, node, index, gone), "") for index in gone]
    return False


def _span(written: str, node: yaml.MappingNode, index: int, gone: Set[int]) -> tuple[int, int]:
    """Where a pair stands, with what parts it from its neighbours, some of which go too: whole lines, or what lies between commas."""
    name, value = node.value[index]
    if node.flow_style:
        if any(other not in gone for other in range(index + 1, len(node.value))):
            return name.start_mark.index, node.value[index + 1][0].start_mark.index
        return node.value[index - 1][1].end_mark.index if index else name.start_mark.index, value.end_mark.index
    while isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
        value = value.value[-1][1]  # a block's own end is where the next one begins
    last = len(written[: value.end_mark.index].rstrip())
    end = written.find("\n", max(last, name.end_mark.index))
    return written.rfind("\n", 0, name.start_mark.index) + 1, len(written) if end < 0 else end + 1


def command(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").rstrip())
        return OK
    raise_if(irregular(map(Path, words)))
    for name in words:
        try:
            sys.stdout.write(text(Path(name).read_text(encoding="utf-8"), name))
        except FileNotFoundError:
            raise Refused(not_there(Path(name))) from None
        except (OSError, ValueError) as err:
            raise Refused(f"`{name}` cannot be read: {err}", hint="name a YAML file", law="file-unreadable") from None
    return OK


if __name__ == "__main__":
    finish(lambda: command(sys.argv[1:]))
