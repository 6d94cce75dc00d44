"""What it costs that tokens travel between two GPUs while a GEMM runs: NCCL, and copy engines over memory that both map.

    python benchmarks/travel.py --out FILE [--gpus N]

An expert layer of NAM56R at micro batch 4: bf16 [16384, 3584] of each rank to all (`gather`), and the sum of what all have for it back
(`scatter`). The baseline is NCCL, with what blocks/moe/travel.py calls; beside it torch's low-contention collectives over symmetric memory
(torch 2.11, torch/distributed/_symmetric_memory), of a plain tensor and of one that lies there. Each is held against NCCL's values. Times
are medians of replays of a graph of 8 rounds, in ms a round: alone, and beside the GEMMs of a shared expert, whose own time is `gemm`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from nam_megatron.blocks.moe import travel

TOKENS, HIDDEN, ROUNDS, REPLAYS = 16384, 3584, 8, 20
MINUTE = timedelta(minutes=1)  # a rank that failed alone leaves the other waiting
Way = Callable[[], Callable[[], object]]  # starts; what it gives waits and returns what arrived


def nccl(send: travel.Send, x: Tensor) -> Way:
    def start() -> Callable[[], object]:
        out, work = send(x, dist.group.WORLD)
        return lambda: (work.wait(), out)[1]

    return start


def low(operation: Callable[..., Tensor], *words: object) -> Way:
    def start() -> Callable[[], object]:
        out = operation(*words, dist.group.WORLD.group_name)
        return lambda: torch.ops._c10d_functional.wait_tensor(out)

    return start


def mapped(x: Tensor) -> Tensor:
    """The same values in memory that all ranks map."""
    own = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(own, dist.group.WORLD.group_name)
    return own.copy_(x)


def rounds(way: Way | None, beside: Callable[[], object] | None) -> float:
    def once() -> None:
        arrived = way() if way else None
        if beside:
            beside()
        if arrived:
            arrived()

    for _ in range(3):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            once()
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended) / ROUNDS)
    return round(statistics.median(times), 4)


def measured(rank: int, ranks: int, port: int, out: Path) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks, timeout=MINUTE)
    draw = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=draw)
    all_of_them = torch.randn(ranks * TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=draw)
    weight = torch.randn(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=draw)
    there, back = torch.ops.symm_mem._low_contention_all_gather, torch.ops.symm_mem._low_contention_reduce_scatter
    ways = {
        "gather": {"NCCL": nccl(travel.gather, x), "copied": low(there, x), "mapped": low(there, mapped(x))},
        "scatter": {
            "NCCL": nccl(travel.scatter, all_of_them),
            "copied": low(back, all_of_them, "sum"),
            "mapped": low(back, mapped(all_of_them), "sum"),
        },
    }

    def gemms() -> None:
        for _ in range(4):
            x @ weight

    found: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "gpus": ranks,
        "torch": torch.__version__,
        "gemm": rounds(None, gemms),
    }
    for what, of in ways.items():
        expected = of["NCCL"]()()
        for name, way in of.items():
            try:
                torch.testing.assert_close(way()(), expected, rtol=2e-2, atol=2e-2)
                found[f"{what}, {name}"] = {"alone": rounds(way, None), "beside": rounds(way, gemms)}
            # A way that this host has not, or that is wrong: the others are told.
            except (AssertionError, RuntimeError) as error:
                found[f"{what}, {name}"] = str(error).splitlines()[0]
            if rank == 0:
                out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(what, name, found[f"{what}, {name}"], flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file that gets what was measured")
    parser.add_argument("--gpus", type=int, default=2)
    asked = parser.parse_args()
    if torch.cuda.device_count() < asked.gpus:
        print(f"{asked.gpus} GPUs are asked for, and there are {torch.cuda.device_count()}", file=sys.stderr)
        return 1
    torch.multiprocessing.spawn(measured, (asked.gpus, 29577, asked.out), nprocs=asked.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
