"""The verbs with a recipe: Hydra composes it as for every other command."""

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from launch import finding
from launch.context import Context
from launch.record import receipt, signature
from launch.record.compare import flat
from launch.record.redact import Redactor
from launch.run import slurm
from launch.run.job import TRAINERS
from nam_megatron import app, report
from nam_megatron.compile.lower import translate
from nam_megatron.compile.sources import Sources
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, Problem, Refused, raise_if
from nam_megatron.launcher import called
from nam_megatron.recipe import Recipe, to_tree

KEYS = (*slurm.SCREEN, *slurm.RUN)
TEXTS = ("revision", "lock", "diagnostic", "sign", "host", "image", "time", "rdma")
CHOICES = {"dirty": ("refuse", "store"), "over_memory": ("refuse", "allow"), "trainer": tuple(TRAINERS)}
TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)", re.ASCII)
FORMATS = {
    "show": ("auto", "torchrun", "sbatch", "kubernetes", "trainjob"),
    "check": ("auto", "text", "json", "markdown", "line"),
    "run": ("auto",),
}


def run(verb: str, rest: list[str]) -> NoReturn:
    overrides = tuple(rest)
    raise_if(telltale(overrides, os.environ))
    contexts: list[Context] = []

    def task(recipe: Recipe, words: Mapping[str, Any], sources: Sources) -> int:
        sys.stderr.write(sources.unnamed_preset(recipe.preset.name))
        sweep = len(sources.points) > 1
        raise_if(kept(recipe, os.environ))
        said = tuple(word.text for word in sources.words) + tuple(sources.search) if sweep else overrides
        contexts.append(Context(translate(recipe), checked(verb, words), said, os.environ))
        if sweep and verb == "show":
            return array(contexts, len(sources.points))
        if sweep and verb == "run":
            return train_one(contexts)
        return {"show": show, "check": check, "run": train}[verb](contexts[-1])

    sys.argv[1:] = rest
    app.run("launch", KEYS, task)


def array(contexts: Sequence[Context], points: int) -> int:
    """The points of a sweep as one Slurm array, once all of them are here. Raises Refused."""
    cluster, form = contexts[-1].cluster, contexts[-1].words["format"]
    if form != "sbatch":
        hint = "`format=sbatch` is a Slurm array of them; or leave `--multirun` out"
        raise Refused("a sweep is several runs", key="format", hint=hint)
    if (cluster.nodes, cluster.gpus_per_node) != (contexts[0].cluster.nodes, contexts[0].cluster.gpus_per_node):
        hint = "a script for each cluster: one sweep each"
        raise Refused("the points of a Slurm array have the same hosts", key="cluster", hint=hint)
    if len(contexts) == points:
        said = [context.overrides for context in contexts]
        first, *others = (context.lowering for context in contexts)
        sys.stdout.write(slurm.sbatch(first, said[0], contexts[0].words["time"], said, others))
    return OK


def train_one(contexts: Sequence[Context]) -> int:
    """The last of these runs of a sweep. Who ends one, ends them all."""
    code = train(contexts[-1])
    made = [folder for context in contexts for folder in context.made]  # others may write into the folder, too
    if made and receipt.read(made[-1])["outcome"]["end"] == "interrupted":
        raise KeyboardInterrupt
    if len(contexts) > 1:
        sys.stderr.write(called(f"compare the sweep: python -m launch report {shlex.join(map(str, made))}\n"))
    return code


def telltale(overrides: Sequence[str], environ: Mapping[str, str]) -> Iterator[Problem]:
    """Words of the command line that hold a secret: they would stand in scripts, in `ps`, in the history of the shell."""
    redactor = Redactor(environ)
    for number, word in enumerate(overrides, 1):
        if redactor.betrays(word):
            key = word.partition("=")[0]
            message = f"word {number} of the command line holds a secret"
            hint = "leave it in a file or a variable of the host that needs it"
            yield Problem(message, key=key if not redactor.betrays(key) else None, hint=hint)


def kept(recipe: Recipe, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Values of a preset that hold a secret: they would stand in the run's plan, and on the command lines of its ranks."""
    redactor = Redactor(environ)
    for key, value in flat(to_tree(recipe), "").items():
        if any(
            redactor.betrays(word) for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)
        ):
            hint = "the run's `plan.json` has every value: leave it in a file or a variable of the host that needs it"
            yield Problem("a value of the preset holds a secret", key=key.removeprefix("."), hint=hint)


def checked(verb: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """The command's words, each of its type. Raises Refused."""
    problems = []
    if words["format"] not in FORMATS[verb]:
        hint = f"there are: {', '.join(FORMATS[verb])}"
        problems.append(Problem(f"no format `{words['format']}` of {verb}", key="format", hint=hint))
    for key, allowed in CHOICES.items():
        if words[key] not in allowed:
            problems.append(Problem(f"`{key}` is {' or '.join(allowed)}, not `{words[key]}`", key=key))
    if words["sanity"] not in (None, True, False) or type(words["sanity"]) is int:
        problems.append(Problem("`sanity` is true, false or null", key="sanity"))
    if type(words["port"]) is not int or not 1024 <= words["port"] < 65536:
        problems.append(Problem("`port` is a number from 1024 to 65535", key="port"))
    if type(words["hang"]) not in (int, float) or not 0 <= words["hang"] < 1e6:
        problems.append(Problem("`hang` is a number of seconds, 0 for never", key="hang"))
    if words["time"] is not None and not TIME.fullmatch(str(words["time"])):
        hint = "`[D-]HH:MM:SS`; Hydra reads one without quotes as a number: `'time=\"24:00:00\"'`"
        problems.append(Problem(f"`{words['time']}` is no time limit", key="time", hint=hint))
    if lacking := signature.key_objections(words["sign"]):
        problems.append(lacking)
    for key in TEXTS:
        # A hash of digits alone arrives as a number; one with an `e` in it would have arrived as another.
        if words[key] is not None and (type(words[key]) not in (str, int) or words[key] == ""):
            problems.append(Problem(f"`{key}` takes one word", key=key, hint=f"put it into quotes: `'{key}=\"...\"'`"))
    raise_if(problems)
    return {k: str(v) if k in TEXTS and v is not None else v for k, v in words.items()}


def show(context: Context) -> int:
    from launch import show

    sys.stdout.write(show.text(context))
    sys.stderr.writelines(f"note: {line}\n" for line in report.denied(context.lowering.plan))
    if found := tuple(unfit(context)):
        sys.stderr.write(f"note: `run` would refuse it:\n{Refused(found).render()}")
    return OK


def unfit(context: Context) -> Iterator[Problem]:
    """Why the trainer that is named would not train this plan."""
    if context.words["trainer"] == "megatron":
        yield from context.lowering.plan.bridges_alone
    elif context.cluster.processor == "cpu":
        hint = "name a cluster with GPUs: `list=clusters`; or `trainer=megatron`"
        yield Problem("Megatron-Bridge does not train on a CPU here", key="trainer", hint=hint)


def check(context: Context) -> int:
    from launch.host import preflight

    checked = preflight.check(context)
    found, software = checked.findings, preflight.fingerprint(checked.facts | preflight.shared(context))
    form = {"auto": "text"}.get(context.words["format"], context.words["format"])
    sys.stdout.write(finding.render(found, form, socket.gethostname(), software))
    return OK if finding.passed(found) else FINDINGS


def train(context: Context) -> int:
    from launch.run import run

    if not_built := context.lowering.plan.not_built:
        sys.stderr.write("".join(f"error: `{s.owner}` is not built: {s.missing}\n" for s in not_built))
        return INCOMPLETE
    raise_if(unfit(context))
    nodes = context.cluster.nodes
    if nodes > 1 and slurm.JOB not in context.environ:
        hint = "`python -m launch show ... format=sbatch > job.sh`, and `sbatch job.sh`"
        raise Refused(f"{nodes} nodes, and this is no Slurm job", key="cluster.nodes", hint=hint)
    if nodes > 1 and len(found := slurm.hosts(context.environ)) != nodes:
        raise Refused(f"this Slurm job has {len(found)} nodes, and the plan is for {nodes}", key="cluster.nodes")
    return run.run(context)
