"""Text -> Launch: the words Megatron's parser would get, the environment, the number of GPUs.

Three kinds of text: a list of words (`--hidden-size 4096 ...`, over any number of lines), a shell script, YAML or JSON; and our plan.json.
"""

import json
import os.path
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nam_megatron.errors import Problem, Refused, quoted
from nam_megatron.lint import checkpoint, container, follow, huggingface, others, python
from nam_megatron.lint.shell import Lexer, ShellError
from nam_megatron.targets import Target
from nam_megatron.targets.target import Flag
from nam_megatron.words.nested import Loader, compose

if TYPE_CHECKING:
    from nam_megatron.lint.ours import Planned

LONGEST = 1_000_000  # characters
# one of them says any launch
TRAINS = ("--micro-batch-size", "--global-batch-size", "--lr", "--train-iters", "--train-samples")
NESTED = 8  # references to references
DEEPEST, MOST = 30, 5_000  # YAML: levels, entries
# of a YAML: other files, no flags
BASES = {"extends", "extend", "defaults", "bases", "base", "_base_", "inherits", "inherit_from"}
FLAGSCALE = {"save": "checkpoints", "load": "checkpoints", "tensorboard_dir": "tensorboard"}  # filled by its runner
NODES = re.compile("node|world_size|gpu|nproc", re.IGNORECASE)  # variables that say how many GPUs there are
ENVIRONMENT = re.compile(r"env(ironment)?(_?va?rs?)?", re.IGNORECASE)
# The first line of a YAML or JSON: `key:`, `- item`, `---`, an opening bracket that is no test of a shell's.
YAML = re.compile(r"""(-\s+)?["']?[\w.-]+["']?\s*:(\s|$)|-\s|---$|[{\[]\s*(["'\]}]|$)|\{\s*[\w.-]+\s*:""")
INDIRECT = re.compile(r"\$\{!|\b(declare|local|typeset)\s+-n\b")  # a variable by a name that another holds
TEST = re.compile(r"\[\s.*\s\]\s*(&&|\|\||;)")  # of a shell
# Of the number of nodes, in NVIDIA's examples; or GPUs that the script is called with.
TO_CHANGE = re.compile(
    r"#.*\bchange for multi-?node|^\s*\w*(nodes?|gpus?|nproc)\w*=[\"']?\$\{?\d", re.IGNORECASE | re.MULTILINE
)
PLACE = re.compile(
    r"""^(\s*(?:export\s+)?\w+=["']?[^\s"'<]*|\s*--[a-z][\w-]+\s+)<([\w./ (),:-]+)>(?:[ \t]*\(e\.g\..*\))?""",
    re.MULTILINE,
)  # a value to be put in, `DIR="<path>"`, `--save <path>`


@dataclass(frozen=True)
class Launch:
    """What starts a training.

    target: the Megatron whose parser reads it. words: for that parser; a hole (see follow.py) where the text leaves something open.
    env: what the text exports, None where it unsets. script: the training script or module, None if the text names none. gpus: world
    size, None if not known. partial: only variables for another script to use, so that flags may be missing. plan: of our own trainer,
    where it can be read. unsaid: what the text says of its model and the words do not. name: of the file. supposed: the
    number of GPUs is the script's own default for what its environment says. program: another one that
    reads the text, and decides what it leaves out. forks: conditions that the text does not decide. spent: steps
    that a reading of a shell script took. perhaps: flags that branches append, and whether no fork is of those.
    """

    target: Target
    words: tuple[str, ...]
    kind: str
    text: str
    env: Mapping[str, str | None] = field(default_factory=dict)
    script: str | None = None
    gpus: int | None = None
    notes: tuple[str, ...] = ()
    partial: bool = False
    plan: "Planned | None" = None
    unsaid: tuple[str, ...] = ()
    name: str = "-"
    supposed: bool = False
    program: str | None = None
    forks: tuple[follow.Fork, ...] = ()
    spent: int = 0
    perhaps: Mapping[str, bool] = field(default_factory=dict)

    def on(self, gpus: int) -> "Launch":
        """The same launch on so many GPUs."""
        return replace(self, gpus=gpus, supposed=False)

    def lines(self, flag: str) -> tuple[int, ...]:
        """The lines of the text that say `flag`."""
        bare = self.kind in ("yaml", "container") or (self.program and self.kind != "script")
        name, dashes = flag.lstrip("-"), "--" if flag.startswith("-") and not bare else "(?:--)?"
        found = re.compile(rf"(?<![\w-]){dashes}({re.escape(name)}|{re.escape(name.replace('-', '_'))})(?![\w-])")
        lines = enumerate(self.text.splitlines(), 1)
        return tuple(n for n, line in lines if not line.lstrip().startswith("#") and found.search(line))


def read(text: str, target: Target, name: str = "-", decided: Mapping[str, bool] | None = None) -> Launch:
    """Find the launch in a text. `name`: the file it is from, or `-`; what the text says of its own folder is looked up there. decided:
    how conditions are taken that the text does not decide.

    Raises:
        Refused: if there is none, or if our trainer would not take the plan that it starts with.
    """
    if len(text) > LONGEST:
        raise Refused(f"`{name}` has {len(text):,} characters, which no launch has")
    text = (
        text.replace("\r\n", "\n")
        .translate({ord(c): None for c in (follow.OPEN, follow.CLOSE, follow.BLANK, "\0")})
        .removeprefix("\ufeff")
    )
    first = next((line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    try:
        if YAML.match(first) and not TEST.match(first):
            launch = _yaml(text, target, name)
        elif first.startswith("-"):
            launch = _plain(text, target)
        elif python.is_python(first, name):
            launch = _python(text, target, decided or {})
        else:
            launch = _shell(text, target, name, decided or {})
    except SyntaxError as err:
        raise Refused(f"`{name}` is no Python: {err.msg} in line {err.lineno}", hint=FORMS) from None
    except (ShellError, yaml.YAMLError, RecursionError, ValueError) as err:
        what = " ".join(str(err).split()).replace('in "<unicode string>",', "at") or "nested too deep"
        raise Refused(f"`{name}` cannot be read: {what}", hint=FORMS) from None
    if not _flags(launch.words, target):
        raise Refused(_no_config(text, name) or _no_launch(launch, name))
    return replace(_planned(launch, name), name=name)


def stored(path: Path, target: Target) -> Launch:
    """The launch whose arguments a checkpoint's file holds.

    Raises:
        Refused: it holds none that can be read safely.
    """
    args = checkpoint.stored(path)
    found, left = checkpoint.words(args, target)
    world = args.get("world_size")
    gpus = world if isinstance(world, int) and 0 < world < 1_000_000 else None
    return Launch(target, tuple(found), "checkpoint", "", gpus=gpus, notes=tuple(left), unsaid=tuple(left))


def of_file(name: str) -> str | Path:
    """What `lint` takes of a file: its text, `-` for standard input's; a path, where it is a checkpoint's. Raises Refused."""
    path = Path(name)
    if (path / "config.json").is_file():  # the folder of a published model
        path = path / "config.json"
    try:
        if name != "-" and (path.is_dir() or checkpoint.is_file(path)):
            return checkpoint.file_of(path)
        with nullcontext(sys.stdin.buffer) if name == "-" else open(path, "rb") as file:
            data = file.read(4 * LONGEST + 4)  # a device has no end
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise Refused(f"cannot read `{name}`: {reason}", hint="name a file, or `-` for standard input") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise Refused(f"`{name}` is not UTF-8: {err.reason} at byte {err.start}", hint="save it as UTF-8") from None


def _no_config(text: str, name: str) -> Problem | None:
    """Why a text that looks like a config.json of Hugging Face's is none."""
    whole = "give it whole, as it was published, or its folder"
    try:
        root = json.loads(text)
    except ValueError as err:
        return Problem(f"`{name}` is no JSON: {err}", hint=whole) if name.endswith(".json") else None
    except RecursionError:
        return None
    if not name.endswith(".json") or not isinstance(root, dict):
        return None
    lacking = [key for key in ("model_type", "vocab_size") if key not in root]
    if lacking:
        return Problem(f"`{name}` has no {quoted(lacking)}, as a config.json of Hugging Face has", hint=whole)
    return None


def _no_launch(launch: Launch, name: str) -> Problem:
    if launch.kind == "shell" and (there := len(_in_text(launch.text, launch.target))):
        where = "stand where its own defaults do not lead, or where a program makes the command"
        what = f"no command that `{name}` runs as it stands has a Megatron flag; {there} {where}"
        return Problem(what, hint="set in the text what its conditions ask for, or give the command alone")
    return Problem(f"there is no Megatron flag in `{name}`", hint=FORMS)


FORMS = "give a list of flags, a script that starts a training, or a YAML of flags"


def _planned(launch: Launch, name: str) -> Launch:
    """A launch of our own trainer with the plan that it names, if that can be read from here; nothing else is looked for."""
    if "--nam-plan" not in launch.words[:-1]:
        return launch
    word = launch.words[launch.words.index("--nam-plan") + 1]
    if name != "-":
        word = word.replace(follow.hole('dirname "$0"'), str(Path(name).parent))
    if follow.holes(word) or not os.path.isfile(word):
        note = f"`{follow.shown(word)}` cannot be read from here: what it says beyond its flags is not known"
        return replace(launch, notes=(*launch.notes, note))
    from nam_megatron.compile.argv import load_plan  # Hydra, only for those who want it
    from nam_megatron.lint.ours import Planned

    plan = Planned(load_plan(word))
    note = f"layers, parameters and kernels are those of the plan of {plan.name} in `{word}`"
    return replace(launch, plan=plan, notes=(*launch.notes, note))


def _plain(text: str, target: Target) -> Launch:
    follower = follow.Follower(follow.Run())
    words = [follower.joined(token.parts) for token in Lexer(text, plain=True).tokens()]
    return Launch(target, tuple(words), "words", text, partial=not _trains(words))


def _python(text: str, target: Target, decided: Mapping[str, bool]) -> Launch:
    if (said := python.read(text, target, decided)) is None:
        return Launch(target, (), "python", text)
    kind, program = ("python", said.program) if said.program else ("script", "the script")
    return Launch(target, said.words, kind, text, notes=said.notes, partial=True, program=program, forks=said.forks)


# Shell --------------------------------------------------------------------------------------------------------------------


def _shell(text: str, target: Target, name: str, decided: Mapping[str, bool]) -> Launch:
    filled = PLACE.sub(lambda found: found[1] + follow.hole(found[2]), text)
    run = follow.run(filled, None if name == "-" else Path(name).parent, decided)

    def flags(command: tuple) -> int:
        return _flags(_split(command[0], target)[1], target)

    made = Launch(target, (), "shell", text, forks=tuple(run.forks), spent=run.spent, perhaps=run.appended)
    best: Any = max(run.commands, key=flags, default=((), {}))
    notes, other = (
        list(run.notes),
        "its condition cannot be told here; the launch that it decides about is read as if it held",
    )
    uncalled = "nothing here calls this function; the launch in it is read as if it were called"
    for several, note in (
        (run.perhaps, f"line {{}}: {other}"),
        (run.uncalled, f"line {{}}: {uncalled}"),
        (run.printed, "nothing here starts this launch: the text only prints it"),
    ):
        if not flags(best) and flags(found := max(several, key=flags, default=((),))):
            best = found
            notes.append(note.format(*found[2:]))
    others = {c[0] for c in (*run.commands, *run.perhaps) if 2 * flags(c) > flags(best)} - {best[0]}
    if others:
        notes.append(
            f"the text has {len(others) + 1} launches: read is the one with the most flags, the first of equals"
        )
    (launcher, words, script), env = _split(best[0], target), best[1]
    if launcher[:3] == ("ray", "job", "submit"):  # which hides double quotes, and blanks, from its shell
        words = [re.sub(r"^'(\S*)'$", r"\1", word) for word in words]
    if not flags(best) and (launch := _of_another(run, made)):
        return launch
    if partial := not _flags(words, target):  # a file that only sets variables, for another script to use
        held = [run.variables, *run.left.values()]
        loose = next(filter(None, map(_held, held)), [])
        words = [re.sub(r"^(['\"])(\S*)\1$", r"\2", word) for word in loose]  # as `eval` has them, by whom it is used
        launcher, script, env = (), None, run.env
        notes.append("no command here has Megatron's flags: those that variables hold are taken, in their order")
    hidden = INDIRECT.search(text) or any(note.startswith(follow.UNREAD) for note in run.notes)
    for name, value in run.variables.items() if not hidden else ():
        lacks = [w for w in _words(value) if _is_flag(w, target) and w not in words]
        if lacks and name not in run.env and not re.search(rf"\$\{{?#?{name}\b", text):
            notes.append(f"`{name}` is handed on to nothing here, nor what stands in it: {', '.join(lacks)}")
    if not _flags(words, target):
        return made
    if script is None and any(follow.HOLE.fullmatch(word) or word.endswith(".sh") for word in launcher):
        partial = True
        notes.append(
            "what is started is not read here, and may have flags of its own: of no flag is said that it lacks"
        )
    notes += _defaults(run.unset)
    if (there := len(_in_text(text, target))) > 3 * (here := _flags(words, target)):
        notes.append(
            f"the text has {there} of Megatron's flags, and the launch that is read {here}: no command here has the others"
        )
        partial = True
    gpus = _gpus(launcher, text, run.variables)
    by_default = any(NODES.search(name) for name in run.unset) or bool(TO_CHANGE.search(text))
    made = replace(made, words=tuple(words), env=env, script=script, gpus=gpus, notes=tuple(notes))
    return replace(made, partial=partial, supposed=by_default)


def _of_another(run: follow.Run, made: Launch) -> Launch | None:
    """The launch of a program that has Megatron's fields in words of its own; the one that says most."""
    perhaps = [(words, env) for words, env, _ in (*run.perhaps, *run.uncalled)]
    commands = [*run.commands, *perhaps]
    found = [(said, env) for words, env in commands if (said := others.of_command(words, made.target))]
    if not found:
        return None
    said, env = max(found, key=lambda one: len(one[0].words))
    notes = [*run.notes, *said.notes, *_defaults(run.unset)]
    if several := len({other.words for other, _ in found}) - 1:
        notes.append(f"the text has {several + 1} launches: read is the one that says most")
    env = {**env, **said.env}
    return replace(made, words=said.words, env=env, gpus=said.gpus, notes=tuple(notes), program=said.program)


def _held(variables: Mapping[str, str | list[str]]) -> list[str]:
    """The words of the variables that start with a flag."""
    lists = map(_words, variables.values())
    return [w for found in lists if found[:1] and found[0].startswith("--") for w in found]


def _words(value: str | list[str]) -> list[str]:
    return list(value) if isinstance(value, list) else value.split()


def _flags(words: tuple[str, ...] | list[str], target: Target) -> int:
    return sum(_is_flag(w, target) for w in words)


def _is_flag(word: str, target: Target) -> bool:
    """Whether a word is a flag of Megatron's, underscores for dashes taken, too."""
    return word.startswith("--") and target.by_name(word.split("=")[0].replace("_", "-")) is not None


def _in_text(text: str, target: Target) -> set[str]:
    """Megatron's flags that stand anywhere, but for comments."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {w for line in lines for w in re.findall(r"(?<![\w-])--[a-z][\w-]*", line) if _is_flag(w, target)}


def _trains(words: list[str]) -> bool:
    """Whether words that nothing starts say a training, and not a model alone."""
    return any(word.partition("=")[0] in TRAINS for word in words)


def _split(words: tuple[str, ...], target: Target) -> tuple[tuple[str, ...], list[str], str | None]:
    """A command as (launcher's words, Megatron's words, training script or module)."""
    for i, word in enumerate(words):
        module = (
            word in ("-m", "--module")
            and i + 1 < len(words)
            and not re.match(r"torch\.distributed|(nam_megatron\.)?torchrun", words[i + 1])
        )
        if module or (word.endswith(".py") and not word.startswith("-")):
            at = i + module
            while at + 1 < len(words) and re.fullmatch(r"[^-]\S*\.py", words[at + 1]):  # one that starts another
                at += 1
            return words[:i], list(words[at + 1 :]), words[at]
    for i, word in enumerate(words):
        if _is_flag(word, target):
            return words[:i], list(words[i:]), None
    return words, [], None


def _gpus(launcher: tuple[str, ...], text: str, variables: Mapping[str, str | list[str]]) -> int | None:
    """World size: torchrun's processes times nodes, Slurm's tasks, or a variable WORLD_SIZE."""

    def count(names: str, words: str) -> int | None:
        match = re.search(rf"(?:^|\s)(?:{names})(?:[=\s:]|gpu:)*(\d{{1,6}})(?=\s|$)", words)
        return int(match[1]) if match else None

    words = " ".join(launcher)
    if launcher[:3] == ("ray", "job", "submit"):  # Ray's workers train, not Slurm's tasks
        return None
    if "--nproc" in words:
        each = count("--nproc[-_]per[-_]node", words)
        nodes = count("--nnodes", words) if "--nnodes" in words else 1
        return each * nodes if each and nodes else None
    # which asks its own environment, and no variable of the script
    if re.match(r"(\S*/)?torchrun\b", words) and not follow.holes(words):
        return None
    directives = re.findall(r"^\s*#SBATCH\s+(.*)$", text, re.MULTILINE)
    slurm = " ".join([*directives, words if words.startswith("srun") else ""])
    if total := count("-n|--ntasks", slurm):
        return total
    each, nodes = count("--ntasks-per-node|--gpus-per-node|--gres", slurm), count("-N|--nodes", slurm)
    if each:
        return each * (nodes or 1)
    world = variables.get("WORLD_SIZE")
    return int(world) if isinstance(world, str) and world.isascii() and world.isdigit() and len(world) < 7 else None


# YAML ---------------------------------------------------------------------------------------------------------------------


def _yaml(text: str, target: Target, name: str) -> Launch:
    path = None if name == "-" else Path(name)
    root, read_ = _with_bases(compose(text), path)
    entries: list[tuple[tuple[str, ...], str, Any]] = []
    notes = [f"starts from {', '.join(map(str, read_))}, which is read with it"] * bool(read_)
    bases: list[str] = []
    env: dict[str, str | None] = {}
    words: list[str] = []
    unset: dict[str, str | None] = {}
    if isinstance(root, yaml.SequenceNode):  # a list of words
        words = [
            w for node in root.value[:MOST] if isinstance(node, yaml.ScalarNode) for w in _holes(node.value).split()
        ]
    elif isinstance(root, yaml.MappingNode):
        keys = {k.value: v for k, v in root.value if isinstance(k, yaml.ScalarNode)}
        if {"nam_megatron", "recipe", "argv"} <= keys.keys():  # our own plan.json
            from nam_megatron.compile.argv import parse_plan  # Hydra, only for those who want it
            from nam_megatron.lint.ours import Planned

            plan = Planned(parse_plan(text, name))
            return Launch(target, plan.argv, "plan", text, plan.env, gpus=plan.gpus, plan=plan)
        if "model_type" in keys and (config := huggingface.config(text)):
            described, left = huggingface.words(config, name)
            return Launch(
                target, tuple(described), "huggingface", text, partial=True, notes=tuple(left), unsaid=tuple(left)
            )
        if (root_of_bridge := _of_bridge(keys, text)) is not None:
            return _bridge(root_of_bridge, text, target, name)
        plain = _tree(root, unset)
        bases = [file for key in keys.keys() & BASES for file in _files(keys[key])]
        if others.without_megatron(plain):
            return Launch(target, (), "yaml", text)
        if said := others.of_tree(plain, target, bool(bases)):
            notes += [*said.notes, *_defaults(unset)]
            if bases:
                notes.append(f"more of the description is in other files, which are not read: {', '.join(bases)}")
            return Launch(
                target, said.words, "yaml", text, said.env, gpus=said.gpus, notes=tuple(notes), program=said.program
            )
        bases, unset = [], {}
        if isinstance(argv := keys.get("argv"), yaml.SequenceNode):
            words = [_holes(node.value) for node in argv.value[:MOST] if isinstance(node, yaml.ScalarNode)]
        else:
            entries = _one_launch(list(_entries(root, env, bases)), target, notes)
            if {"system", "model", "data"} <= keys.keys():
                given = {name for _, name, node in entries if not _null(node)}
                folders = {n: yaml.ScalarNode("", f"${{experiment.exp_dir}}/{f}") for n, f in FLAGSCALE.items()}
                entries += [((), name, node) for name, node in folders.items() if name not in given]
    if len(mapped := [n for _, n, node in entries if _names_one(n, node, target)]) > 2:
        what = f"`{name}` says {quoted(mapped[:3])} by names, as a table of another program's fields does: nothing is started with it"
        raise Refused(what, hint=FORMS)
    if len(prose := [n for _, n, node in entries if _tells(n, node, target)]) > 1:
        what = f"`{name}` tells of {quoted(prose)} in sentences, as a text for people does: nothing is started with it"
        raise Refused(what, hint=FORMS)
    dashed = any(name.startswith("--") for _, name, _ in entries)
    if swept := [name for _, name, node in entries if _swept(name, node, target)]:
        if all(isinstance(node, yaml.SequenceNode) for _, name, node in entries if _flag(name, target)):
            swept = [n for _, n, _ in entries if (flag := _flag(n, target)) and not flag.nargs]  # `[1]` of lists, too
        notes.append(
            f"lists where a flag takes one value, as a sweep has them: read is the first of each, {len(swept)} here"
        )
        entries = [
            (path, name, node.value[0] if name in swept and node.value else node) for path, name, node in entries
        ]
    for _, name, node in entries:
        if name.startswith("--") or not dashed:
            words += _entry(name, _with_default(node, unset), target, dashed)
    notes += _defaults(unset)
    if bases:
        notes.append(f"more of the description is in other files, which are not read: {', '.join(bases)}")
    trains = any(word.partition("=")[0] in TRAINS for word in words)
    # Another program's class has the rest, or another file: this one describes a model.
    partial = bool(bases) or not trains or (isinstance(root, yaml.MappingNode) and "_target_" in keys)
    heirs = _heirs(path) if path and not partial else []
    if heirs:
        notes.append(f"others start from it, and may say what it leaves out: {', '.join(heirs)}")
    partial = partial or bool(heirs)
    return Launch(target, tuple(words), "yaml", text, env, notes=tuple(notes), partial=partial)


def _swept(name: str, node: yaml.Node, target: Target) -> bool:
    """Whether a list stands where a flag takes one value, and not a list in one text."""
    flag = _flag(name, target)
    return isinstance(node, yaml.SequenceNode) and flag is not None and not (flag.nargs or flag.type in others.AS_TEXT)


def _flag(name: str, target: Target) -> Flag | None:
    return target.by_name("--" + name.lstrip("-").replace("_", "-")) or target.by_dest.get(name.replace("-", "_"))


def _names_one(name: str, node: yaml.Node, target: Target) -> bool:
    """Whether a number is said by the name of a field."""
    flag = _flag(name, target)
    field_ = r"[a-z]\w*_\w+"
    return bool(flag and flag.type in ("int", "float")) and bool(re.fullmatch(field_, str(node.value)))


def _tells(name: str, node: yaml.Node, target: Target) -> bool:
    """Whether a sentence stands where a flag takes a number or one of a few words."""
    flag = _flag(name, target)
    sentence = re.match(r"[A-Za-z]+(?:[,:;]? [a-z]+){3}", str(node.value))
    return bool(flag and (flag.choices or flag.type in ("int", "float")) and sentence)


def _defaults(unset: Mapping[str, str | None]) -> list[str]:
    """Notes on the variables and the arguments that are taken as not given, each with the text's own default that is read for it."""
    said = {name: f"{name}={_short(follow.shown(value))}" if value else name for name, value in sorted(unset.items())}
    names = ", ".join(text for name, text in said.items() if name.isidentifier())
    given = ", ".join(f"${text}" for name, text in said.items() if name == "@" or name.isdigit())
    return [f"taken as not set in your environment (the text's own defaults are read): {names}"] * bool(names) + [
        f"taken as called without arguments, which may say otherwise: {given}"
    ] * bool(given)


def _short(text: str) -> str:
    return text if len(text) < 41 else f"{text[:37]}..."


def _tree(root: yaml.MappingNode, unset: dict[str, str | None]) -> dict[str, Any]:
    """A YAML as its program would have it: defaults of the environment's in, `${a.b}` as what stands there, other `${}` as holes."""

    left = MOST

    def settle(node: yaml.Node, depth: int = 0) -> yaml.Node:
        nonlocal left
        left -= 1
        if depth > DEEPEST or not left:  # aliases of aliases are a tree as well
            raise yaml.YAMLError("nested too deep" if left else f"more than {MOST} values")
        if isinstance(node, yaml.MappingNode):
            pairs = [(k, settle(v, depth + 1)) for k, v in node.value if k.tag != "tag:yaml.org,2002:merge"]
            return yaml.MappingNode(node.tag, pairs)
        if isinstance(node, yaml.SequenceNode):
            return yaml.SequenceNode(node.tag, [settle(v, depth + 1) for v in node.value])
        return _with_default(node, unset)

    built = yaml.constructor.SafeConstructor()
    tree = built.construct_document(settle(root))

    def resolved(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {str(k): resolved(v, depth) for k, v in value.items()}
        if isinstance(value, list):
            return [resolved(v, depth) for v in value]
        if isinstance(value, str) and "$" in value:
            place = re.fullmatch(r"\$\{([\w.]+)\}", value)
            there = next(others.at(tree, place[1]), value) if place and depth < NESTED else value
            return _holes(value) if there is value or isinstance(there, (dict, list)) else resolved(there, depth + 1)
        return value

    return resolved(tree)


def _of_bridge(keys: Mapping[str, yaml.Node], text: str) -> dict[str, Any] | None:
    """What a YAML of Megatron-Bridge's or Nemotron's says; None of another one."""
    places = (keys.get(name) for name in ("model", container.RECIPE))
    named = (k.value for node in places if isinstance(node, yaml.MappingNode) for k, _ in node.value)
    if container.CLASS not in named:
        return None
    root = yaml.load(text, Loader=Loader)  # composed already, so neither deep nor large
    return root if isinstance(root, dict) and container.kind(root) else None


def _bridge(root: dict[str, Any], text: str, target: Target, name: str) -> Launch:
    env = {str(k): None if v is None else str(v) for k, v in (root.get("env_vars") or {}).items()}
    if found := container.plan(root, name):
        from nam_megatron.compile.argv import parse_plan  # Hydra, only for those who want it
        from nam_megatron.lint.ours import Planned

        plan = Planned(parse_plan(found[0], name))
        return Launch(target, plan.argv, "plan", text, {**plan.env, **env}, gpus=plan.gpus, notes=found[1], plan=plan)
    try:
        words, notes = container.words(root, target)
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
    ) as err:  # whatever a field of another shape makes a rule raise
        raise Refused(f"`{name}` is no container as Bridge writes it: {err}", hint=FORMS) from None
    partial = not isinstance(root.get("train"), dict)  # a description of a model alone, as those beside a converted one
    return Launch(target, tuple(words), "container", text, env, notes=tuple(notes), partial=partial)


Entries = list[tuple[tuple[str, ...], str, Any]]


def _one_launch(entries: Entries, target: Target, notes: list[str]) -> Entries:
    """Without the groups that say a flag otherwise than one with more of Megatron's flags: another launch, or another program's."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for path, name, node in entries:
        listed = " ".join(str(v.value) for v in node.value) if isinstance(node, yaml.SequenceNode) else ""
        pairs = (
            [(name, node.value)]
            if isinstance(node, yaml.ScalarNode)
            else re.findall(r"--([\w-]+)(?:[= ](?!--)(\S*))?", listed)
        )
        for flag, value in pairs:
            said = flag.lstrip("-").replace("-", "_")
            if said in target.by_dest or target.by_name("--" + said.replace("_", "-")):
                groups.setdefault(path, {}).setdefault(said, value)
    taken: dict[str, str] = {}
    others = []
    for path, flags in sorted(groups.items(), key=lambda group: -len(group[1])):
        if any(taken.get(name, value) != value for name, value in flags.items()):
            others.append(path)
        else:
            taken |= flags
    if others:
        names = ", ".join(".".join(path) or "the top" for path in others)
        notes.append(f"not read, since a group with more of Megatron's flags says some of theirs otherwise: {names}")
    return [entry for entry in entries if entry[0] not in others]


def _entries(
    root: yaml.MappingNode, env: dict[str, str | None], bases: list[str]
) -> Iterator[tuple[tuple[str, ...], str, yaml.Node]]:
    """(groups, name, value) of every `name: value` whose value is no group; environment variables and other files to start from go
    into `env` and `bases`."""
    stack, seen, path, groups = [iter(root.value)], 0, [""], [root]
    while stack:
        pair = next(stack[-1], None)
        if pair is None:
            stack.pop()
            path.pop()
            groups.pop()
            continue
        key, node = pair
        if (seen := seen + 1) > MOST or len(stack) > DEEPEST:
            raise yaml.YAMLError("more entries than a launch has")
        if _of_bases(key):
            bases += _files(node)
        elif isinstance(node, yaml.MappingNode):
            if isinstance(key.value, str) and ENVIRONMENT.fullmatch(key.value):
                pairs = [(k.value, v) for k, v in node.value if isinstance(v, yaml.ScalarNode)]
                env |= {str(k): None if _null(v) else str(v.value) for k, v in pairs}
            elif key.value != "auto_tuner":  # what FlagScale may try
                stack.append(iter(node.value))
                path.append(str(key.value))
                groups.append(node)
        elif isinstance(key, yaml.ScalarNode) and not key.value.startswith("_"):  # `_target_` and its kin are Hydra's
            yield tuple(path[1:]), key.value, _referred(node, groups)


def _referred(node: yaml.Node, groups: list[yaml.MappingNode]) -> yaml.Node:
    """What OmegaConf has for `${a.b}` and `${.b}`, which is beside it; the node itself where it is no such, or another's."""
    for _ in range(NESTED):
        found = re.fullmatch(r"\$\{(\.*)([A-Za-z_]\w*(?:\.\w+)*)\}", str(node.value))
        if not found or len(found[1]) > len(groups):
            break
        groups, there = groups[: len(groups) - len(found[1]) + 1 if found[1] else 1], None
        for name in found[2].split("."):
            pairs = groups[-1].value if there is None else there.value if isinstance(there, yaml.MappingNode) else []
            there = next((value for key, value in pairs if key.value == name), yaml.Node("", "", None, None))
            groups = [*groups, there] if isinstance(there, yaml.MappingNode) else groups
        if not isinstance(there, yaml.ScalarNode):
            break
        node = there
    return node


def _of_bases(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value in BASES


def _files(node: yaml.Node, own: bool = False) -> Iterator[str]:
    """The files that a YAML starts from: names, a list of them, or Hydra's `group: option`. own: `_self_`, too, where it stands."""
    match node:
        case yaml.ScalarNode(value=str(name)):
            yield from [name] if name and (own or name != "_self_") and not _null(node) else []
        case yaml.SequenceNode(value=list(nodes)):
            for inner in nodes[:MOST]:
                yield from _files(inner, own)
        case yaml.MappingNode(value=list(pairs)):
            for key, inner in pairs[:MOST]:
                yield f"{key.value}: {inner.value}" if isinstance(inner, yaml.ScalarNode) else str(key.value)


def _with_bases(
    root: yaml.Node | None, path: Path | None, above: frozenset[Path] = frozenset()
) -> tuple[yaml.Node | None, list[str]]:
    """A YAML over the files that it starts from, where they lie beside it, and their names; the others are left to be named."""
    if path is None or not isinstance(root, yaml.MappingNode) or len(above) > NESTED or path in above:
        return root, []
    read_: list[str] = []
    own = yaml.MappingNode(root.tag, [])
    layers, at = [yaml.MappingNode(root.tag, [])], None  # the later over the earlier; which of them are under `own`
    for key, node in root.value:
        if _of_bases(key):
            away = []
            for file in _files(node, own=True):
                if file == "_self_":
                    at = len(layers)
                    continue
                base, group, package = _base(path, file)
                if base is None:
                    said = f"{file} (over this one)" if at else file
                    away.append(yaml.ScalarNode("tag:yaml.org,2002:str", said))
                    continue
                text = base.read_text(encoding="utf-8")
                inner, more = _with_bases(compose(text), base, above | {path})
                package = "_global_" if "@package _global_" in text else package or group.replace("/", ".")
                for name in reversed(package.split(".") if package not in ("", "_global_") else []):
                    inner = yaml.MappingNode(root.tag, [(yaml.ScalarNode("tag:yaml.org,2002:str", name), inner)])
                layers += [inner] if isinstance(inner, yaml.MappingNode) else []
                read_ += [base.name, *more]
            node = yaml.SequenceNode("tag:yaml.org,2002:seq", away)
            if not away:
                continue
        own.value.append((key, node))
    return reduce(_over, [*layers[:at], own, *layers[at or len(layers) :]]) if read_ else own, read_


def _over(under: yaml.MappingNode, over: yaml.MappingNode) -> yaml.MappingNode:
    """One tree laid over another."""
    pairs = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, node) for key, node in under.value}
    for key, node in over.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else id(key)
        below = pairs.get(name, (key, node))[1]
        both = isinstance(below, yaml.MappingNode) and isinstance(node, yaml.MappingNode) and below is not node
        pairs[name] = key, _over(below, node) if both else node
    return yaml.MappingNode(over.tag, [*pairs.values()])


def _base(path: Path, file: str) -> tuple[Path | None, str, str]:
    """What a YAML names as a base, where it lies beside it, its group and its package."""
    group, _, option = file.rpartition(": ")
    group, _, package = group.removeprefix("override ").lstrip("/").partition("@")
    return _beside(path, f"{group}/{option}" if group else option), group, package


def _beside(path: Path, name: str) -> Path | None:
    """The file that a YAML names as a base, from its own folder or the one above."""
    for folder in (path.parent, path.parent.parent):
        for file in (
            folder / name.lstrip("/"),
            folder / f"{name.lstrip('/')}.yaml",
            folder / f"{name.lstrip('/')}.yml",
        ):
            if file.suffix in (".yaml", ".yml") and file.is_file() and file.stat().st_size < LONGEST and file != path:
                return file
    return None


def _heirs(path: Path) -> list[str]:
    """The YAMLs beside one that name it as what they start from."""
    found = []
    for file in sorted(file for file in path.parent.glob("*.y*ml") if file != path)[:MOST]:
        text = file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size < LONGEST else ""
        with suppress(yaml.YAMLError):
            root = compose(text) if re.search(rf"\b{re.escape(path.stem)}\b", text) else None
            pairs = root.value if isinstance(root, yaml.MappingNode) else []
            named = (one for key, node in pairs if _of_bases(key) for one in _files(node))
            found += [file.name] * any(
                (base := _base(file, one)[0]) and base.resolve() == path.resolve() for one in named
            )
    return found


def _null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _holes(text: str) -> str:
    """`$NAME`, `${NAME}` and what OmegaConf resolves, `${group.name}`, as holes."""
    return re.sub(r"\$(?:([A-Za-z_]\w*)|\{([^${}]+)\})", lambda m: follow.hole(m[1] or m[2]), text)


def _with_default(node: yaml.Node, unset: dict[str, str | None]) -> yaml.Node:
    """`${NAME:4}` and `${oc.env:NAME,4}` as 4; a default of nothing as nothing."""
    found = re.fullmatch(
        r"\$\{(?:oc\.env:\s*(?=\w)|(?=[A-Z_\d]+:))([A-Za-z_]\w*)\s*(?::-?|,)([^${}]*)\}", str(node.value)
    )
    if not found:
        return node
    unset[found[1]] = found[2].strip()
    inner = compose(found[2])
    return yaml.ScalarNode("tag:yaml.org,2002:null", "") if inner is None else inner


def _entry(name: str, node: yaml.Node, target: Target, dashed: bool = False) -> list[str]:
    """One entry as words. `name` is a flag with or without dashes, or the name of Megatron's argument. dashed: a shell gets the values,
    which takes quotes away, and a backslash for the next letter's sake."""
    flag_name = name if name.startswith("--") else "--" + name.replace("_", "-")
    flag = target.by_name(flag_name)
    dest = name.lstrip("-").replace("-", "_")
    if flag is None and (found := target.by_dest.get(dest)) is not None:
        flag, flag_name = found, found.name
    if _null(node):
        return []
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:bool":
        truth = node.value.lower() in ("true", "yes", "on")
        if (
            flag is not None
            and flag.action in ("store_true", "store_false")
            and flag.name[2:].replace("-", "_") != dest
        ):
            # named as the argument, not as the flag
            return [flag_name] if truth is (flag.action == "store_true") else []
        if flag is not None and flag.action == "boolean" and not truth:
            return [flag_name.replace("--", "--no-", 1)]
        return [flag_name] if truth else []
    if isinstance(node, yaml.SequenceNode):
        values = [_holes(v.value) for v in node.value[:MOST] if isinstance(v, yaml.ScalarNode)]
        if flag is None:  # a list of words, of which an item may hold several
            return [flag_name, *(w for v in values for w in (v.split() if v.startswith("--") else [v]))]
        return [flag_name, *values] if flag.nargs else [flag_name, f"[{','.join(values)}]"]
    value = _holes(str(node.value))
    value = re.sub(r"^(['\"])(.*)\1$", r"\2", re.sub(r"\\+(.)", r"\1", value)) if dashed else value
    if flag is not None and flag.nargs and not value.startswith("["):
        return [flag_name, *value.split()]
    if flag is not None and flag.nargs and (match := re.fullmatch(r"\[(.*)\]", value)):
        return [flag_name, *match[1].replace(",", " ").split()]
    if flag is not None and flag.action == "store" and not flag.nargs:
        return [f"{flag_name}={value}"]
    return [flag_name, value]
