"""The command: python -m nam_megatron.nemo dump|pretrain|finetune|list|doctor conf=nam56r"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nam_megatron import app, installed, nemo, train
from nam_megatron.compile.lower import translate
from nam_megatron.compile.sources import Sources
from nam_megatron.errors import FINDINGS, OK, Problem, Refused, finish, raise_if
from nam_megatron.nemo import doctor
from nam_megatron.recipe import Recipe


def dump(recipe: Recipe, words: Mapping[str, Any], sources: Sources) -> int:
    """The container's YAML to stdout, or to the file `out`. Needs Bridge, no GPU and no Transformer Engine."""
    trains, lowering = (doctor.RESILIENCY, doctor.ENGINE), translate(recipe)
    installed.ask(lowering.target)
    raise_if(Problem(f.message, hint=f.hint) for f in doctor.findings() if f.fatal and f.name not in trains)
    with contextlib.redirect_stdout(sys.stderr):  # imports talk
        if doctor.installed(doctor.ENGINE) is None:
            from nam_megatron.nemo import engine

            engine.provide()
        from nam_megatron.nemo.container import container

        made = container(lowering)
        if words["out"] is not None:
            made.to_yaml(str(words["out"]))
            return OK
        with tempfile.NamedTemporaryFile() as file:
            made.to_yaml(file.name)
            text = Path(file.name).read_text(encoding="utf-8")
    sys.stdout.write(text)
    return OK


def finetune(recipe: Recipe, words: Mapping[str, Any], sources: Sources) -> int:
    """Train by Bridge's finetune, from a pretrained checkpoint; under torchrun, on every rank."""
    if recipe.schedule.pretrained is None:
        message = "nothing to finetune: no pretrained checkpoint is named"
        raise Refused(Problem(message, key="schedule.pretrained", hint="give it, or `pretrain` from random weights"))
    return trained(recipe)


def pretrain(recipe: Recipe, words: Mapping[str, Any], sources: Sources) -> int:
    """Train by Bridge's pretrain; under torchrun, on every rank."""
    if recipe.schedule.pretrained is not None:
        message = "`pretrain` starts from random weights, and a pretrained checkpoint is named"
        raise Refused(Problem(message, key="schedule.pretrained", hint="`finetune` starts from it"))
    return trained(recipe)


def trained(recipe: Recipe) -> int:
    from nam_megatron.nemo.train import begin

    job = train.Job(translate(recipe))
    raise_if(train.objections(job, job.argv, os.environ))
    return begin(job)


def names() -> int:
    """Every recipe function and its preset."""
    found = nemo.names()
    width = max(map(len, found))
    for name, preset in found.items():
        print(f"nam_megatron.nemo.{name:<{width}}  {preset}")
    return OK


def diagnose() -> int:
    """What is installed, and every finding."""
    for name, version in doctor.recorded().items():
        print(f"{name:<24} {version or 'not installed'}")
    code = OK
    for finding in doctor.findings():
        print(f"\n{'error' if finding.fatal else 'note'}: {finding.message}\nhint: {finding.hint}")
        code = FINDINGS if finding.fatal else code
    return code


def main() -> NoReturn:
    finish(command)


def command() -> int:
    """The first word says what to do; the rest is the recipe's."""
    task, *rest = sys.argv[1:] or [""]
    helped = not {"-h", "--help"}.isdisjoint((task, *rest))
    tasks = {"dump": dump, "pretrain": pretrain, "finetune": finetune}
    if helped and task not in tasks:
        sys.argv[1:] = ["--help"]
        app.run("nemo", ("out",), dump)
    if task in tasks:
        sys.argv[1:] = rest
        app.run("nemo", ("out",), tasks[task])
    hint = "there are: dump conf=NAME, pretrain conf=NAME, finetune conf=NAME, list, doctor"
    if task not in ("list", "doctor"):
        raise Refused(Problem(f"no task `{task}`" if task else "no task is named", hint=hint))
    if rest:
        raise Refused(Problem(f"`{task}` takes no words, and here is `{rest[0]}`", hint=hint))
    return {"list": names, "doctor": diagnose}[task]()


if __name__ == "__main__":
    main()
