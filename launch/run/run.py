"""`launch run`: a receipt, the checks, one torchrun, and the receipt sealed with what came of it."""

import contextlib
import hashlib
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from launch import finding
from launch.context import Context
from launch.host import host_id, patches, preflight
from launch.record import outcome, receipt, signature
from launch.record.receipt import Receipt
from launch.record.redact import Redactor, Stream
from launch.run import hang, job, slurm
from launch.run.process import Interrupted, Process, Signals, ignore
from launch.run.terminal import Terminal
from nam_megatron import migrate
from nam_megatron.compile.argv import plan_json
from nam_megatron.errors import FINDINGS, OK, REFUSED, Refused, raise_if
from nam_megatron.events import Record
from nam_megatron.judge import identity
from nam_megatron.launcher import called
from nam_megatron.mends import Trainer
from nam_megatron.mends.series import needed
from nam_megatron.words.taken import taken

Start = Callable[..., list[str]]
# What a trainer or a person wrote is kept from everybody else: no list of shapes knows every vendor's secrets.
PRIVATE = 0o600


def run(context: Context, start: Start = job.words) -> int:
    """Check, train, and leave a receipt. Returns the exit code.

    start: makes the words that are started, see `job.words`; the tests put a small trainer there.
    Raises Refused where no receipt can be written, or another launch has the port.
    """
    with receipt.writing(context.receipts):
        raise_if(taken(context.receipts, "cluster.storage.receipts"))
        raise_if(taken(context.scratch, "cluster.storage.scratch"))
    with receipt.own(context.receipts):
        pass  # its salt is in the marks of paths
    for name in receipt.seal_lost(context.receipts, outcome.of_run):
        sys.stderr.write(f"note: {name} lost its launcher; it is sealed now\n")
    with port_held(context.words["port"]), Signals() as signals:
        preset = context.lowering.plan.recipe.preset.name
        about = known(context) | {"nonce": secrets.token_hex(16)}
        opened = receipt.open_receipt(context.receipts, preset, about, context.redactor)
        context.made.append(opened.folder)
        sys.stderr.write(f"receipt: {opened.folder}\n")
        verdict: Verdict | int = Verdict("failed", FINDINGS, "the launcher broke down")
        try:
            verdict = attempt(context, opened, signals, start)
        except Interrupted:
            verdict = Verdict("interrupted", FINDINGS, f"{signals.seen[0]} before the training was started")
        except Refused as refused:
            verdict = Verdict("refused", REFUSED, refused.problems[0].message)
            sys.stderr.write(refused.render())
        finally:
            signals.do(ignore)
            came = outcome.of_run(opened.folder, opened.content)
            if isinstance(verdict, int):
                verdict = ended(verdict, came, opened.content["job"], signals.seen)
            came |= {"reason": verdict.reason, "signals": signals.seen}
            sys.stderr.write(outcome.summary({**came, "end": verdict.end}, context.cluster.unit))
            opened.seal(verdict.end, came)
            page = f"its page: python -m launch report {shlex.quote(str(opened.folder))}\n"
            sys.stderr.write(f"sealed: {opened.folder / receipt.FILE}\n{called(page)}")
            if key := context.words.get("sign"):
                signature.sign(opened.folder, key)
    return verdict.code


class Verdict(NamedTuple):
    """end: one of receipt.ENDS. code: the launcher's exit code."""

    end: str
    code: int
    reason: str | None


def known(context: Context) -> dict[str, Any]:
    """What a receipt says before anything was imported or started."""
    return {
        "lineage": job.lineage(context),
        "box": the_box(context),
        "words": list(context.overrides),
        "source": context.source.facts(),
        "patches": installed(),
        "mends": {mend.name: mend.sha256 for mend in needed(context.lowering.plan, Trainer(context.words["trainer"]))},
        "stands": identity.stands(context.lowering.plan),
        "recipe": job.recipe(context.lowering),
        "means": migrate.MEANS,
        "job": job.facts(context),
        "environ": context.redactor.environ(context.child_environ),
        "forecast": job.forecast(context.lowering),
    }


def the_box(context: Context) -> dict[str, str | None]:
    """Which host this is, by the name that it has in this folder. Raises Refused."""
    found, asked = host_id.box(context.receipts, context.environ), context.words.get("host")
    if asked and context.cluster.nodes > 1:
        raise Refused(f"`{asked}` would name one of {context.cluster.nodes} hosts", key="host", hint="leave it out")
    return {**found, "name": host_id.named(context.receipts, found, asked)}


def patched(queue: patches.Queue) -> dict[str, str | None]:
    """The hash of the installed packages' files and what they are by that: pristine, patched, foreign."""
    try:
        tree = queue.tree(patches.installed(queue))
    except (Refused, OSError):
        return {"state": "not installed", "tree": None}
    return {"state": queue.word(tree), "tree": tree}


def attempt(context: Context, opened: Receipt, signals: Signals, start: Start) -> Verdict | int:
    """Check and train. Returns torchrun's exit code, or the verdict where it was not left to finish. Raises Refused, Interrupted."""
    with signals.raising():
        report = preflight.check(context)
    found = [{"name": f.name, "level": f.level, "message": f.message} for f in report.findings]
    opened.record(host=report.facts, findings=found)
    sys.stderr.write(finding.render(report.findings, "text", socket.gethostname()))
    if not finding.passed(report.findings):
        if context.cluster.processor == "gpu" and "gpus" not in report.facts:  # said among much else
            sys.stderr.write("note: this host shows no GPU: `cluster=cpu` rehearses the run on its CPU\n")
        return Verdict("refused", FINDINGS, f"preflight: {finding.verdict(report.findings)}")
    with signals.raising():
        data = job.data(context)
    opened.record(data=data)
    with receipt.writing(opened.folder):
        (opened.folder / receipt.PLAN).write_text(plan := plan_json(context.lowering), encoding="utf-8")
        if context.source.diff:
            diff = context.redactor.secrets(context.source.diff)
            with open(os.open(opened.folder / receipt.DIFF, os.O_WRONLY | os.O_CREAT, PRIVATE), "wb") as file:
                file.write(diff.encode("utf-8", "surrogateescape"))
    nonce = opened.content["nonce"]
    environ = {**context.child_environ, **job.inside(opened.folder, nonce)}
    with receipt.writing(context.scratch, key="cluster.storage.scratch"):
        Path(environ["TMPDIR"]).mkdir(parents=True, exist_ok=True)
    several = slurm.hosts(context.environ) if context.cluster.nodes > 1 else ()
    head, name = (several[0], context.environ[slurm.JOB]) if several else ("", "")
    words = start(context, opened.folder / receipt.PLAN, head, name)
    sha = hashlib.sha256(plan.encode()).hexdigest()
    opened.record(job={**opened.content["job"], "command": words, "launcher_pid": os.getpid()}, plan={"sha256": sha})
    signals.look()
    try:
        code = train(words, environ, context, opened.folder, nonce, signals)
        if code or not (other := changed(context, opened.content)):
            return code
        return Verdict("failed", FINDINGS, f"{other} is no longer what it was when the run began")
    except Hung as hung:
        return Verdict("failed", FINDINGS, f"it hung: {hung}")
    except OSError as err:
        problem = receipt.unwritable(opened.folder, err)
        sys.stderr.write(Refused(problem).render())
        return Verdict("failed", FINDINGS, problem.message)


def changed(context: Context, content: Mapping[str, Any]) -> str | None:
    """What of a run is not what its receipt tells of: it may have read either."""
    if installed() != content["patches"]:
        return "the installed Megatron"
    with contextlib.suppress(Refused):
        return None if job.data(context) == content["data"] else "the data"
    return "the data"


def installed() -> dict[str, Any]:
    """What is here of what we have patches for."""
    return {q.name: patched(q) for q in patches.queues()}


def ended(code: int, came: Mapping[str, Any], job: Mapping[str, Any], signals: Sequence[str]) -> Verdict:
    """What torchrun's exit code means. 0 is a success only if all ranks say that they finished the last step, and no event is missing."""
    last, planned, but = came["last_step"], job["train_steps"], came["hole"]
    if came["trainer_exit_code"] is not None:  # a library may end the process with 0 all the same
        but = but or f"a rank says: {came['reason']}"
    if code == 0 and but:
        last = None
    if code == 0 and last is not None and last >= planned:
        return Verdict("completed", OK, f"{signals[0]} came too late to matter" if signals else None)
    if code == 0 and job["stop_every"] and last and last % job["stop_every"] == 0:
        return Verdict("completed", OK, f"stopped at step {last} of {planned}, as `schedule.stop_every` says")
    if signals:
        return Verdict("interrupted", FINDINGS, f"{signals[0]}; torchrun ended with {code}")
    if code == 0 and but:
        return Verdict("failed", FINDINGS, f"torchrun ended with 0, but {but}")
    if code == 0:
        where = "without saying at which step" if last is None else f"at step {last} of {planned}"
        return Verdict("interrupted", FINDINGS, f"the trainer ended {where}")
    if came["trainer_exit_code"] == REFUSED:
        return Verdict("refused", REFUSED, came["reason"])
    return Verdict(
        "failed", FINDINGS, f"torchrun ended with {code}: {came['reason'] or 'no rank and no line of the log says why'}"
    )


class Hung(Exception):
    """A rank did not go on for as long as `hang` allows; the message says why."""


def train(
    words: Sequence[str], environ: Mapping[str, str], context: Context, folder: Path, nonce: str, signals: Signals
) -> int:
    """Start `words`, keep and show what they print, and wait. Returns the exit code.

    Raises OSError where the log cannot be written, Hung where the run was ended for want of a heartbeat.
    """
    recipe, failure = context.lowering.plan.recipe, None
    terminal = Terminal(recipe.schedule.train_steps, folder, nonce, quiet=recipe.cluster.processor == "cpu")
    record = Record()
    try:
        record.open(folder, nonce, None)
        with Log(folder / receipt.LOG, context.redactor) as log:
            log.clock(outcome.STARTED)
            record.say("launched")
            begun = time.clock_gettime(time.CLOCK_BOOTTIME)
            with Process(words, environ, context.checkout) as process:
                signals.do(process.end)
                with hang.Watch(folder, recipe.world_size, context.words["hang"], process.kill) as watch:
                    for lines in process.lines():
                        lines = log.without_secrets(lines)
                        if failure is None:
                            try:
                                log.write(lines)
                            except OSError as err:
                                # Nobody would know what came of it: stop as for a signal, and keep the pipe from filling.
                                failure = err
                                process.end()
                        terminal.lines(lines)
                code = process.wait()
            record.say("over", code=code, wall=time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
            if failure is not None:
                raise failure
            log.clock(outcome.ENDED)
            if watch.found and code:
                raise Hung(watch.found)
            return code
    finally:
        terminal.close()
        record.close()


class Log:
    """The log of a run, without secrets. Raises OSError where it cannot be written."""

    def __init__(self, path: Path, redactor: Redactor):
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE), "ab")  # noqa: SIM115  closed by __exit__
        self._stream = Stream(redactor)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be flushed was raised before
            self._file.close()

    def without_secrets(self, said: Sequence[str]) -> list[str]:
        """The lines as the log and the terminal get them, whether or not the disk has room."""
        return "\n".join(self._stream.lines(said)).split("\n")

    def write(self, lines: Sequence[str]) -> None:
        """All at once."""
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()

    def clock(self, what: str) -> None:
        """A line with the local time, as Megatron's have it."""
        self.write([f"[{datetime.now():%Y-%m-%d %H:%M:%S.%f}] {what}"])


@contextlib.contextmanager
def port_held(port: int) -> Iterator[None]:
    """No second launch on this host takes the port between our look at it and torchrun's binding. Ends with this process."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0nam_megatron.launch.{port}")
        except OSError:
            hint = f"give this one another: `port={port + 1 if port < 65535 else 29500}`"
            raise Refused(f"another launch on this host has port {port}", key="port", hint=hint) from None
        yield
