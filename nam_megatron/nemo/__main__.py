"""The command: python -m nam_megatron.nemo dump|pretrain|finetune|list|doctor conf=nam56r [KEY=VALUE] [SECTION.FIELD=VALUE] [--dry-run]"""

import contextlib
import logging
import shlex
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nam_megatron import app, installed, nemo
from nam_megatron.compile.lower import translate
from nam_megatron.compile.sources import Sources
from nam_megatron.environment import given
from nam_megatron.errors import FINDINGS, OK, Problem, Refused, finish, raise_if
from nam_megatron.launcher import called
from nam_megatron.nemo import doctor
from nam_megatron.nemo.words import apart, laid
from nam_megatron.packages import adding
from nam_megatron.recipe import Recipe

if TYPE_CHECKING:
    from nam_megatron.nemo.container import NamContainer


def dump(recipe: Recipe, words: Mapping[str, Any], sources: Sources, *, fields: Sequence[str]) -> int:
    """The container's YAML to stdout, or to the file `out`. Needs Bridge, no GPU and no Transformer Engine."""
    with contextlib.redirect_stdout(sys.stderr):  # imports talk
        made = here(recipe, fields)
        if words["out"] is not None:
            made.to_yaml(str(words["out"]))
            return OK
        with tempfile.NamedTemporaryFile() as file:
            made.to_yaml(file.name)
            text = Path(file.name).read_text(encoding="utf-8")
    sys.stdout.write(text)
    return OK


def here(recipe: Recipe, fields: Sequence[str]) -> "NamContainer":
    """The container, on a machine that need not train it. Raises Refused."""
    trains = (doctor.RESILIENCY, doctor.ENGINE)
    installed.ask(translate(recipe).target)
    lacking = [f for f in doctor.findings() if f.fatal and f.name not in trains]
    last = f"; {adding('nemo')} installs all that this needs"
    raise_if(Problem(f.message, hint=f.hint + last * (f is lacking[-1])) for f in lacking)
    doctor.stand_in()
    # Of what only training needs: Apex, CUDA's compiler.
    warnings.filterwarnings("ignore", module="megatron")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return laid(recipe, fields)


def trained(
    recipe: Recipe,
    words: Mapping[str, Any],
    sources: Sources,
    *,
    task: str,
    fields: Sequence[str],
    typed: Sequence[str] | None,
) -> int:
    """Train by Bridge's `task`; under torchrun, on every rank. typed: the words as they were, where nothing is to run."""
    pretrained = recipe.schedule.pretrained
    if task == "finetune" and pretrained is None:
        message = "nothing to finetune: no pretrained checkpoint is named"
        raise Refused(message, key="schedule.pretrained", hint="give it, or `pretrain` from random weights")
    if task == "pretrain" and pretrained is not None:
        message = "`pretrain` starts from random weights, and a pretrained checkpoint is named"
        raise Refused(message, key="schedule.pretrained", hint="`finetune` starts from it")
    if words["out"] is not None:
        hint = "`dump out=FILE` writes the container, `schedule.save=FOLDER` says where checkpoints go"
        raise Refused(f"`{task}` writes no such file", key="out", hint=hint)
    if typed is not None:
        return dry(recipe, fields, [task, *typed])
    from nam_megatron.nemo.train import start

    return start(recipe, fields)


def dry(recipe: Recipe, fields: Sequence[str], typed: Sequence[str]) -> int:
    """What would be started, and on how many GPUs; all is asked that can be without one. Nothing runs."""
    with contextlib.redirect_stdout(sys.stderr):
        lowering = here(recipe, fields).model.lowering
        from nam_megatron.nemo import finetune, guards

        raise_if(
            [*guards.objections(lowering, thorough=False, dry=True), *finetune.objections(lowering, thorough=False)]
        )
    r = lowering.plan.recipe
    nodes = f"--nnodes {r.cluster.nodes} --rdzv-endpoint HOST:PORT " if r.cluster.nodes > 1 else ""
    print(f"# {r.preset.name}: {r.world_size} GPUs, {r.schedule.train_steps} steps of {r.schedule.global_batch_size} sequences of "
          f"{r.model.seq_length} tokens, by Megatron-Bridge {doctor.BRIDGE}")  # fmt: skip
    for name, value in given(lowering).items():
        print(f"export {name}={shlex.quote(value)}")
    print(
        f"python -m nam_megatron.torchrun {nodes}--nproc-per-node {r.cluster.gpus_per_node} -m nam_megatron.nemo {shlex.join(typed)}"
    )
    print(called("# nothing was started; whether it fits: `python -m nam_megatron.budget` with the recipe's words"))
    return OK


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


TASKS = ("dump", "pretrain", "finetune")


def main() -> NoReturn:
    finish(command)


def command() -> int:
    """The first word says what to do; the rest is the recipe's."""
    task, *rest = sys.argv[1:] or [""]
    helped = not {"-h", "--help"}.isdisjoint((task, *rest))
    if helped and task not in TASKS:
        sys.argv[1:] = ["--help"]
        app.run("nemo", ("out",), partial(dump, fields=()))
    if task in TASKS:
        dry_run = "--dry-run" in rest and task != "dump"
        rest = [word for word in rest if word != "--dry-run"] if dry_run else rest
        sys.argv[1:], fields = apart(rest)
        run = (
            partial(dump, fields=fields)
            if task == "dump"
            else partial(trained, task=task, fields=fields, typed=rest if dry_run else None)
        )
        app.run("nemo", ("out",), run)
    hint = "there are: dump conf=NAME, pretrain conf=NAME, finetune conf=NAME, list, doctor"
    if task not in ("list", "doctor"):
        raise Refused(f"no task `{task}`" if task else "no task is named", hint=hint)
    if rest:
        raise Refused(f"`{task}` takes no words, and here is `{rest[0]}`", hint=hint)
    return {"list": names, "doctor": diagnose}[task]()


if __name__ == "__main__":
    main()
