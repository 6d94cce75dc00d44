"""Time and memory of one piece of work on a GPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

HERTZ = 2e9  # about an H200's, or a little above


class Clock:
    """By CUDA events, with a dirty L2 and the host ahead of the GPU, so that launches cost nothing."""

    def __init__(self, repetitions: int):
        self.repetitions = repetitions
        self.dirt = torch.empty(2**28, dtype=torch.uint8, device="cuda")

    def __call__(self, work: Callable, prepare: Callable[[], Any] | None = None) -> float:
        """Median milliseconds of `work(prepare())` on the GPU, without `prepare`; of `work()` where nothing is to be prepared."""
        queued, spans = 0.0, []
        # The first three warm up, and the last of them says how long the host needs.
        for i in range(-3, self.repetitions):
            given = (prepare(),) if prepare else ()
            self.dirt.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            if i >= 0:
                torch.cuda._sleep(int(HERTZ * max(4e-3, 1.5 * queued)))
            begin = time.perf_counter()
            start.record()
            work(*given)
            end.record()
            if i < 0:
                queued = time.perf_counter() - begin
            else:
                spans.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in spans)


def memory(forward: Callable[[], Any], backward: Callable[[Any], object] = lambda _: None) -> tuple[int, int]:
    """Bytes above what was there before: kept from forward() for `backward` of its output, that output too, and at the highest."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    kept = torch.cuda.memory_allocated() - before
    backward(out)
    return kept, torch.cuda.max_memory_allocated() - before


def by_kernel(work: Callable[[], object], passes: int = 5) -> dict[str, tuple[float, float]]:
    """Milliseconds and launches of each kernel in one run of `work` as torch's profiler sees them, the longest first."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(passes):
            work()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    return {e.key: (e.device_time_total / 1e3 / passes, e.count / passes) for e in events if e.device_time_total}
