"""Stage 7, the training process: plan.json -> stack of layers -> Megatron's pretrain(), one process per GPU (torch side).

    python -m nam_megatron.torchrun --nproc-per-node 8 -m nam_megatron.train --nam-plan plan.json $(args)

`plan.json` decides everything. The arguments after it are Megatron's, as the plan was translated; they stand on the command line so
that whoever looks at the process sees them, and differ from the plan's at the price of a refusal.

Exit codes: 0 trained, 1 the loss was not a number, the data holds what is no token or a checkpoint is damaged, 2 refused, 3 the plan
has a part that is not built; 16 and 17 are Megatron's, when it has found and repeated a wrong result.
"""

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from nam_megatron import installed, rehearsal
from nam_megatron.blocks import EMBEDDING, Gauge
from nam_megatron.budget.cost import cost
from nam_megatron.compile import argv as said
from nam_megatron.compile.lower import Lowering
from nam_megatron.compile.plan import Plan
from nam_megatron.data import indexed, manifest
from nam_megatron.errors import FINDINGS, INCOMPLETE, OK, REFUSED, Problem, Refused, quoted, raise_if
from nam_megatron.events import FILE, RECORD
from nam_megatron.words.regular import irregular
from nam_megatron.words.setting import Env

# What torchrun tells each process. Nothing else of the environment decides anything; what the plan demands of it is checked.
RANK, WORLD_SIZE, LOCAL = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
CLOSING = 15.0  # seconds that trackers and writers get to close what they have open, in a process that has failed


@dataclass(frozen=True)
class Job:
    """What the training process has to do: the plan, Megatron's arguments that it was lowered to, and the environment they need."""

    lowering: Lowering

    @property
    def plan(self) -> Plan:
        return self.lowering.plan

    @property
    def env(self) -> tuple[Env, ...]:
        return self.lowering.env

    @cached_property
    def argv(self) -> tuple[str, ...]:
        """What a launch says after the plan's name: Megatron's arguments, and the marker where only we train them."""
        return said.words(self.lowering)


def load(path: Path) -> Job:
    """Read a plan file. Raises Refused for one that is missing, damaged or of another version."""
    return Job(said.load_plan(path))


def split(words: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """The plan file and Megatron's arguments, from the command line."""
    at = words.index("--nam-plan") if "--nam-plan" in words else len(words)
    if at + 1 >= len(words):
        hint = "`python -m nam_megatron.translate conf=NAME ... out=DIR` writes one, and DIR/run.sh, which starts the training"
        raise Refused("no plan: the trainer trains what a plan file says", hint=hint, law="plan-missing")
    return Path(words[at + 1]), (*words[:at], *words[at + 2 :])


def objections(job: Job, argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Problem]:
    """What speaks against running `job` in this process, as far as it can be told without importing torch."""
    cluster, world = job.plan.recipe.cluster, job.plan.recipe.world_size
    each = cluster.gpus_per_node  # Slurm alone does not say how many a host has
    if not {RANK, WORLD_SIZE} <= environ.keys():
        processes = f"{world} process{'es' * (world != 1)}"
        yield Problem(
            "this process was not started by torchrun", hint=f"start {processes} with torchrun", law="torchrun-missing"
        )
    elif (total := int(environ[WORLD_SIZE])) != world or int(environ.get(LOCAL, each)) != each:
        hint = f"start {cluster.nodes} x {each} processes, or translate again with another `cluster`"
        said, wanted, where = (total, world, "") if total != world else (environ[LOCAL], each, " on a host")
        message = f"{said} processes{where}, and the plan is for {wanted}"
        yield Problem(message, key="cluster", hint=hint, law="processes-against-plan")
    for env in job.env:
        if env.allows(environ.get(env.name)):
            continue
        if env.value is None:
            yield Problem(
                f"{env.name} is set, and the plan needs it unset: {env.why}",
                hint=f"unset {env.name}",
                law="environment-unset",
            )
        else:
            here = f"is `{environ[env.name]}`" if env.name in environ else "is not set"
            yield Problem(
                f"{env.name} {here}, and the plan needs `{env.value}`: {env.why}",
                hint=f"export {env.name}={env.value}",
                law="environment-unset",
            )
    if tuple(argv) != job.argv:
        yield Problem(
            f"the arguments are not the plan's: {difference(argv, job.argv)}",
            hint="start run.sh, which stands beside the plan, or pass `$(python -m nam_megatron.translate conf=NAME ...)`",
            law="arguments-against-plan",
        )
    yield from unfit_data(job.plan)


def unfit_data(plan: Plan, root: Path = Path()) -> Iterator[Problem]:
    """Why the datasets of a plan cannot be trained on: one is not there, not whole, made for a larger vocabulary, or without a token in a
    share that Megatron would read. root: what relative paths are of."""
    if plan.recipe.data.built is not None:
        folder = root / plan.recipe.data.built
        try:
            made = manifest.read(folder)
        except Refused as refused:
            yield from refused.problems
            return
        found = [*manifest.damage(folder, made, thorough=False), *manifest.misfit(made, plan.recipe.model.vocab_size)]
        yield from found
        if found:
            return
    if plan.recipe.data.tokenizer is not None:
        folder = root / plan.recipe.data.tokenizer
        yield from irregular(folder.iterdir() if folder.is_dir() else (folder,), "data.tokenizer")
    yield from indexed.objections(plan.recipe, root)


def difference(given: Sequence[str], planned: Sequence[str]) -> str:
    """How two command lines differ, by flag with its values; the first few."""
    here, there = flags(given), flags(planned)
    extra, missing = [f for f in here if f not in there], [f for f in there if f not in here]
    sides = ("given only", extra), ("in the plan only", missing)
    parts = [f"{side} {listed(words)}" for side, words in sides if words]
    return "; ".join(parts) or "the same flags in another order or number"


def listed(words: Sequence[str], most: int = 3, length: int = 60) -> str:
    shown = ", ".join(f"`{w}`" if len(w) <= length else f"`{w[:length]}...`" for w in words[:most])
    return shown + (f" and {len(words) - most} more" if len(words) > most else "")


def flags(argv: Sequence[str]) -> list[str]:
    """`--lr 1 --bf16` as [`--lr 1`, `--bf16`]."""
    found: list[str] = []
    for word in argv:
        if word.startswith("--") or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def accept(words: Sequence[str], environ: Mapping[str, str], engine: bool = True) -> Job:
    """The job of this command line, checked before anything is built. engine: whether Transformer Engine is asked for its version too.

    Raises:
        Refused: no such plan; another world, other arguments or another Megatron than the plan's.
    """
    path, argv = split(words)
    job = load(path)
    raise_if(objections(job, argv, environ))
    installed.ask(job.lowering.target, engine)
    return job


def unbuilt(job: Job) -> str:
    """One line for each part of the plan that has no torch side yet; empty for a plan that can be trained."""
    return "".join(
        f"error: `{seam.owner}` is not built: {seam.missing}"
        + (f" (layers {', '.join(map(str, seam.numbers))})" if seam.numbers else "")
        + "\n"
        for seam in job.plan.not_built
    )


def main(words: Sequence[str], started: float, before: Callable[[], None] | None = None) -> int:
    """The command. Returns the exit code.

    words: what follows the module's name. started: time.time() at the start of the process. before: called once the job is accepted
    and Megatron imported, before anything is built; for measurements.
    """
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return OK
    return recorded("megatron", words, lambda: trained(words, started, before))


def recorded(trainer: str, words: Sequence[str], train: Callable[[], int]) -> int:
    """The exit code of `train`, with the events of this process around it: its start, and how it ends."""
    environ = os.environ  # noqa: TID251  the launcher's nonce, and what torchrun tells
    try:
        RECORD.start(split(words)[0], environ, trainer)
    except OSError as err:
        problem = Problem(
            f"`{FILE}` cannot be written: {err.strerror}",
            hint="make room there, and let this user write",
            law="record-not-writable",
        )
        return stop(int(environ.get(RANK, 0)), REFUSED, Refused(problem).render())
    except Refused:
        pass  # no plan: `train` says it
    with RECORD.ending():
        try:
            short_sockets()
        except Refused as refused:
            return stop(int(environ.get(RANK, 0)), REFUSED, refused.render())
        return train()


SHORT = ("/tmp", "/var/tmp", "/dev/shm")
# a path's bytes (unix(7), sun_path), and those that Python adds
SOCKET, BELOW = (107, len("/pymp-12345678/listener-12345678"))


def short_sockets() -> None:
    """Let this process and its workers have their sockets where a path leaves room for a name.

    Python 3.12 makes them below TMPDIR (multiprocessing/util.py, get_temp_dir). Where that is long a DataLoader's worker ends by `AF_UNIX
    path too long`, and the rank waits for its data without end. Raises Refused where no short folder may be written to.
    """
    if len(os.fsencode(kept := tempfile.gettempdir())) + BELOW <= SOCKET:
        return
    try:
        for tempfile.tempdir in SHORT:
            with contextlib.suppress(OSError):
                multiprocessing.util.get_temp_dir()  # which is kept, handed on to children and deleted at the end
                return
    finally:
        tempfile.tempdir = kept
    problem = f"`{kept}` is too long a path for sockets, and {quoted(SHORT)} may not be written to"
    raise Refused(problem, hint="let `TMPDIR` name a folder of a shorter path", law="not-writable")


def trained(words: Sequence[str], started: float, before: Callable[[], None] | None) -> int:
    """See `main`."""
    environ = os.environ  # noqa: TID251  what torchrun tells, compared with the plan
    rank = int(environ.get(RANK, 0))
    if rank:
        # Every rank would print the same ones: Python's (a filter would not do, since libraries set their own) and torch's of C++.
        warnings.showwarning = lambda *_, **__: None
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        job = accept(words, environ)
    except Refused as refused:
        return stop(rank, REFUSED, refused.render())
    if missing := unbuilt(job):
        return stop(rank, INCOMPLETE, missing)
    if job.plan.recipe.cluster.processor == "cpu":
        from nam_megatron.runtime import uncompiled

        uncompiled.functions()
        from nam_megatron.prove.cpu import pretended

        if not rank:
            print(f"> {rehearsal.NOTE}", flush=True)
        with pretended():
            return carried_out(job, words, started, before)
    return carried_out(job, words, started, before)


def carried_out(job: Job, words: Sequence[str], started: float, before: Callable[[], None] | None) -> int:
    """See `main`; the job is accepted."""
    rank = int(os.environ.get(RANK, 0))  # noqa: TID251  what torchrun tells

    from nam_megatron.runtime import checkpoint, heartbeat, outofmemory, padding, pretrain, stack, tracking

    heartbeat.HEART.start(split(words)[0], rank)
    if before is not None:
        before()
    try:
        raise_if([*job.plan.bridges_alone, *checkpoint.objections(job.lowering, thorough=not rank)])
        raise_if(tracking.objections(job.plan))
        if not rank:
            for note in checkpoint.untold_of(job.plan.recipe):  # before what it is asked of is written anew
                print(f"note: {note}", file=sys.stderr, flush=True)
            checkpoint.sign(job.lowering)
            print(f"> {installed.stack()}", flush=True)
            announce(job.plan)
        spec = stack.hybrid_stack_spec(job.plan)
        pretrain.run(
            said.argv(job.lowering),
            spec,
            started,
            job.plan,
            operations=operations(job.plan),
            track=tracking.tracker(job.plan),
            gauges=gauges(job.plan),
        )
    except Refused as refused:
        return stop(rank, REFUSED, refused.render())
    except outofmemory.torch.OutOfMemoryError as err:
        # The traceback follows; it names Megatron's functions, and no layer.
        where = outofmemory.where(err, job.plan)
        RECORD.end("out of memory", FINDINGS, error=str(err).splitlines()[0], **where._asdict())
        print(outofmemory.told(where, pretrain.step_now(), rank), file=sys.stderr, flush=True)
        raise
    except (pretrain.NonFinite, padding.Unfit) as stopped:
        nan = isinstance(stopped, pretrain.NonFinite)
        RECORD.end("not a number" if nan else "unfit data", FINDINGS, where=str(stopped))
        print(f"error: {stopped}", file=sys.stderr, flush=True)
        return FINDINGS
    except SystemExit as end:
        if end.code is not None:
            raise
        return stop(rank, FINDINGS, "error: Megatron gave up before the end; its reason stands above\n")
    return OK


def operations(plan: Plan) -> float:
    """Of the model for one sequence, forward and backward, a GPU's share."""
    return cost(plan).model * plan.recipe.model.seq_length / plan.recipe.world_size


def gauges(plan: Plan) -> dict[int, Gauge]:
    """What the embedding, as number 0, and the layers of the main stack measure of themselves, by number."""
    of = {layer.number: plan.recipe.blocks.of(layer.kind).gauge(layer) for layer in plan.layers}
    of[EMBEDDING] = next((feature.measures for feature in plan.recipe.feature.all() if feature.measures), None)
    return {number: gauge for number, gauge in of.items() if gauge}


def announce(plan: Plan) -> None:
    """Say what no log line of Megatron's says: how often the data will be read."""
    folder, schedule = plan.recipe.data.built, plan.recipe.schedule
    if folder is not None:
        tokens = schedule.train_steps * schedule.global_batch_size * plan.recipe.model.seq_length
        print(f"> data: {manifest.passes(manifest.read(folder), tokens)}", flush=True)


def stop(rank: int, code: int, message: str) -> int:
    """Say once why nothing is trained. Every rank comes here: the others wait, since torchrun kills all when the first one ends.

    One that is still there then has met alone what the message says.
    """
    RECORD.end({REFUSED: "refused", INCOMPLETE: "not built"}.get(code, "gave up"), code)
    if rank:
        time.sleep(10)
    print(message, end="", file=sys.stderr, flush=True)
    return code


def process(words: Sequence[str], started: float) -> NoReturn:
    """`main` as the whole of a process. One that has failed ends at once.

    At its regular end Python destroys NCCL's communicators, which wait for ranks that are in a collective, and for a CUDA graph whose
    capture broke off: seen on two H200s and on one (torch 2.11, NCCL 2.28), without end, so that torchrun never heard of the error.
    """
    try:
        code: object = main(words, started)
    except SystemExit as end:
        code = end.code
    except BaseException as err:
        sys.excepthook(type(err), err, err.__traceback__)
        code = 130 if isinstance(err, KeyboardInterrupt) else FINDINGS
    if not code:
        sys.exit(OK)
    closing = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    closing.start()
    closing.join(CLOSING)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else FINDINGS)


if __name__ == "__main__":
    # Under its own name, so that the processes which torch spawns and unpickles into find one copy of this module.
    from nam_megatron.train import process as command

    command(sys.argv[1:], time.time())
