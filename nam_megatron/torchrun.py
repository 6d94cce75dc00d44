"""torchrun, ended as its ranks were: python -m nam_megatron.torchrun --nproc-per-node 8 -m nam_megatron.train --nam-plan plan.json ...

torch.distributed.run ends with 1 and a traceback of its own whatever a rank said. Here the exit code is the worst rank's, of one
that a signal ended 128 and its number. After a refusal, which the ranks have said, nothing follows; after anything else torchrun's
table of the ranks does. What torchrun itself cannot do fails as it always does.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

from nam_megatron.errors import INCOMPLETE, REFUSED, finish

SAID = (REFUSED, INCOMPLETE)  # why nothing was trained stands on the screen already
LOGGER = "torch.distributed.elastic.multiprocessing.api"


class Held(logging.Filter):
    """Keeps what torchrun logs of ranks that it ends, until it is known whether a rank had refused."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if said.startswith(("Sending process ", *(f"failed (exitcode: {code})" for code in SAID))):
            self.records.append(record)
            return False
        self.release()
        return True

    def release(self) -> None:
        logger, held, self.records = logging.getLogger(LOGGER), self.records, []
        for record in held:
            logger.callHandlers(record)


def worst(codes: Iterable[int]) -> int:
    """The exit code of several ranks, a signal's below 0. Those that torchrun's own SIGTERM ended followed another."""
    own = [code for code in codes if code != -signal.SIGTERM] or [-signal.SIGTERM]
    return 128 - min(own) if min(own) < 0 else next((code for code in own if code not in SAID), max(own))


def pass_on() -> None:
    """Hand each SIGTERM to the ranks, and wait for them: they finish their step and save. torchrun alone would kill them after 30 seconds.

    Of several hosts alone, where Slurm brings the signal to all of them, and kills what is there when its time is over.
    """
    from torch.distributed.elastic.multiprocessing import api

    begun: list[api.PContext] = []
    start, own = api.PContext.start, api._terminate_process_handler

    def started(context: api.PContext) -> None:
        begun.append(context)
        start(context)

    def handler(number: int, frame: FrameType | None) -> None:
        heard = False
        for pid in [pid for context in begun for pid in context.pids().values()] if number == signal.SIGTERM else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                heard = True
        if not heard:
            own(number, frame)

    api.PContext.start, api._terminate_process_handler = started, handler


def command() -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if any(word.startswith("--nnodes=") and word != "--nnodes=1" for word in sys.argv):
        pass_on()
    held = Held()
    logging.getLogger(LOGGER).addFilter(held)
    try:
        run.main()
    except ChildFailedError as failed:
        code = worst(failure.exitcode for failure in failed.failures.values())
        if code not in SAID:
            held.release()
            sys.stderr.write(f"{str(failed).strip()}\n")
        return code
    except BaseException:
        held.release()
        raise
    return 0


def main() -> NoReturn:
    finish(command)


if __name__ == "__main__":
    main()
