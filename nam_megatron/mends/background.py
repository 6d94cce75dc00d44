"""The process that writes a rank's checkpoints while training goes on (`schedule.async_save`), and what happens if it dies (torch side).

Megatron-Core 0.19.2 and Megatron-Bridge 0.6.2 wait for it without end: killed for memory, it would leave a rank that neither trains nor
ends. A checkpoint gets its checksums and its place in the tracker only once all ranks' processes are done with it.
"""

import multiprocessing
import os
import sys
import threading
from functools import wraps
from multiprocessing.connection import wait

from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

from nam_megatron.errors import FINDINGS
from nam_megatron.events import RECORD
from nam_megatron.mends import Plan

DIED = "error: the process that writes this rank's checkpoints has died; the newest whole checkpoint is the one the tracker names"


def install(plan: Plan) -> None:
    """Have a rank end with code 1 where its writer dies before it is told to end."""
    start, close = PersistentAsyncCaller._get_process.__func__, PersistentAsyncCaller.close

    @wraps(start)
    def started(cls, *words, **named):
        before = cls._persistent_process
        process = start(cls, *words, **named)
        if process is not before:
            process.leaves = threading.Event()
            threading.Thread(target=_watch, args=(process,), daemon=True).start()
        return process

    @wraps(close)
    def closed(self, abort=False):
        if self._persistent_process is not None:
            self._persistent_process.leaves.set()
        close(self, abort)

    PersistentAsyncCaller._get_process = classmethod(started)
    PersistentAsyncCaller.close = closed


def _watch(process) -> None:
    wait([process.sentinel])
    if not process.leaves.is_set() and threading.main_thread().is_alive():
        RECORD.end("gave up", FINDINGS)
        print(DIED, file=sys.stderr, flush=True)
        for left in multiprocessing.active_children():  # they would hold what a launcher reads open
            left.kill()
        os._exit(FINDINGS)  # the main thread may never look up again
