"""The verbs with a recipe: Hydra composes it as for every other command."""

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from launch import finding, signature, slurm
from launch.context import Context
from launch.job import TRAINERS
from launch.redact import Redactor
from nam_megatron import app
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, Problem, Refused, raise_if
from nam_megatron.lower import translate
from nam_megatron.origin import Origin
from nam_megatron.recipe import Recipe

KEYS = (
    "format",
    "revision",
    "dirty",
    "over_memory",
    "trainer",
    "sanity",
    "port",
    "hang",
    "lock",
    "diagnostic",
    "sign",
    "image",
    "time",
    "rdma",
)
TEXTS = ("revision", "lock", "diagnostic", "sign", "image", "time", "rdma")
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

    def task(recipe: Recipe, words: Mapping[str, Any], origin: Origin) -> int:
        sys.stderr.write(origin.unnamed_preset(recipe.preset.name))
        context = Context(translate(recipe), checked(verb, words), overrides, os.environ)
        return {"show": show, "check": check, "run": train}[verb](context)

    sys.argv[1:] = rest
    app.run("launch", KEYS, task)


def telltale(overrides: Sequence[str], environ: Mapping[str, str]) -> Iterator[Problem]:
    """Words of the command line that hold a secret: they would stand in scripts, in `ps`, in the history of the shell."""
    redactor = Redactor(environ)
    for number, word in enumerate(overrides, 1):
        if redactor.betrays(word):
            key = word.partition("=")[0]
            hint = "leave it in a file or a variable of the host that needs it"
            yield Problem(
                f"word {number} of the command line holds a secret", key if not redactor.betrays(key) else None, hint
            )


def checked(verb: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """The command's words, each of its type. Raises Refused."""
    problems = []
    if words["format"] not in FORMATS[verb]:
        hint = f"there are: {', '.join(FORMATS[verb])}"
        problems.append(Problem(f"no format `{words['format']}` of {verb}", "format", hint))
    for key, allowed in CHOICES.items():
        if words[key] not in allowed:
            problems.append(Problem(f"`{key}` is {' or '.join(allowed)}, not `{words[key]}`", key))
    if words["sanity"] not in (None, True, False) or type(words["sanity"]) is int:
        problems.append(Problem("`sanity` is true, false or null", "sanity"))
    if type(words["port"]) is not int or not 1024 <= words["port"] < 65536:
        problems.append(Problem("`port` is a number from 1024 to 65535", "port"))
    if type(words["hang"]) not in (int, float) or not 0 <= words["hang"] < 1e6:
        problems.append(Problem("`hang` is a number of seconds, 0 for never", "hang"))
    if words["time"] is not None and not TIME.fullmatch(str(words["time"])):
        hint = "`[D-]HH:MM:SS`; Hydra reads one without quotes as a number: `'time=\"24:00:00\"'`"
        problems.append(Problem(f"`{words['time']}` is no time limit", "time", hint))
    if lacking := signature.key_objections(words["sign"]):
        problems.append(lacking)
    for key in TEXTS:
        # A hash of digits alone arrives as a number; one with an `e` in it would have arrived as another.
        if words[key] is not None and (type(words[key]) not in (str, int) or words[key] == ""):
            problems.append(Problem(f"`{key}` takes one word", key, f"put it into quotes: `'{key}=\"...\"'`"))
    raise_if(problems)
    return {k: str(v) if k in TEXTS and v is not None else v for k, v in words.items()}


def show(context: Context) -> int:
    from launch import show

    sys.stdout.write(show.text(context))
    return OK


def check(context: Context) -> int:
    from launch import preflight

    report = preflight.check(context)
    found, software = report.findings, preflight.fingerprint(report.facts)
    form = {"auto": "text"}.get(context.words["format"], context.words["format"])
    sys.stdout.write(finding.render(found, form, socket.gethostname(), software))
    return OK if finding.passed(found) else FINDINGS


def train(context: Context) -> int:
    from launch import run

    if not_built := context.lowering.plan.not_built:
        sys.stderr.write("".join(f"error: `{s.owner}` is not built: {s.missing}\n" for s in not_built))
        return INCOMPLETE
    if context.words["trainer"] == "megatron":
        raise_if(context.lowering.plan.bridges_alone)
    nodes = context.cluster.nodes
    if nodes > 1 and slurm.JOB not in context.environ:
        hint = "`python -m launch show ... format=sbatch > job.sh`, and `sbatch job.sh`"
        raise Refused(Problem(f"{nodes} nodes, and this is no Slurm job", "cluster.nodes", hint))
    if nodes > 1 and len(found := slurm.hosts(context.environ)) != nodes:
        raise Refused(Problem(f"this Slurm job has {len(found)} nodes, and the plan is for {nodes}", "cluster.nodes"))
    return run.run(context)
