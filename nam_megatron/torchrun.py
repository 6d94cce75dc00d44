"""torchrun, ended as its ranks were: python -m nam_megatron.torchrun --nproc-per-node 8 -m nam_megatron.train --nam-plan plan.json ...

torch.distributed.run ends with 1 and a traceback of its own whatever a rank said. Here the exit code is the worst rank's, of one
that a signal ended 128 and its number. After a refusal, which the ranks have said, nothing follows; after anything else torchrun's
table of the ranks does. What torchrun itself cannot do fails as it always does.
"""

import logging
import signal
import sys
from collections.abc import Iterable
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


def command() -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

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
