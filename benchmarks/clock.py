"""Times of one piece of work on a GPU, by CUDA events."""

import statistics
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """With a dirty L2 and the host ahead of the GPU."""

    def __init__(self, repetitions: int):
        self.repetitions = repetitions
        self.dirt = torch.empty(2**28, dtype=torch.uint8, device="cuda")

    def __call__(self, work: Callable, prepare: Callable[[], Any] = lambda: None) -> float:
        """Median microseconds of `work(prepare())` on the GPU."""
        for _ in range(3):
            work(prepare())
        spans = []
        for _ in range(self.repetitions):
            given = prepare()
            self.dirt.zero_()
            torch.cuda._sleep(8_000_000)  # about 4 ms: the host queues all of `work` meanwhile
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work(given)
            end.record()
            spans.append((start, end))
            torch.cuda.synchronize()
        return 1e3 * statistics.median(a.elapsed_time(b) for a, b in spans)
