"""What kernel benchmarks share: time, memory and error of one piece of work on a GPU, and the rank that Megatron wants."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BANDWIDTH, PEAK = 4.3e12, 750e12  # of an H200: bytes, and products and sums of bf16, a second as floors take them
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


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative to `wanted`; where that is nothing, what was found."""
    norm = wanted.double().norm()
    return ((found.double() - wanted.double()).norm() / norm).item() if norm else found.double().norm().item()


def one_rank(seed: int = 1) -> None:
    """Megatron's process groups of one GPU, and its random states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)
