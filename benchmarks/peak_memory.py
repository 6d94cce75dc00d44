"""Peak memory by phase, step times, losses and gradient norms of a plan's training, as JSON.

    torchrun --nproc-per-node N benchmarks/peak_memory.py --out peak.json [--profile trace.json] [--stock] [--balanced] [--blocks] \\
        --nam-plan plan.json $(args)

It is nam_megatron.train with a clock and a gauge around each step, so it trains exactly the plan, all of its steps; translate one with
`data=mock schedule.train_steps=12` or so. Steps 1 and 2 hold compilation and autotuning: the median time leaves them out.

--profile FILE  torch.profiler's trace of the first rank's last step; its kernels by kind (benchmarks/kernels.py) go into the report,
                and the median time leaves the step out.
--stock         Megatron's own builder and default stack of layers in place of ours, on the same arguments: the baseline.
--balanced      Every expert gets as many tokens as any other, whatever the router has learned: what no GPU of an expert group waits for.
--blocks        Forward and backward times of each layer (benchmarks/blocks.py), of the first rank.
"""

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernels

from nam_megatron import train
from nam_megatron.errors import REFUSED, Refused, raise_if
from nam_megatron.packages import installed

if TYPE_CHECKING:
    from blocks import Marks

WARM_UP = 2
PACKAGES = (
    "torch", "megatron-core", "transformer-engine", "triton", "mamba-ssm", "causal-conv1d", "quack-kernels", "nvidia-cutlass-dsl",
    "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
)  # fmt: skip


class Meter:
    """Measures each call of Megatron's train_step, and writes `out` after the last.

    The first phase is everything before the first step: model, optimizer, data. Each later one begins where the one before it ended,
    so what happens between two steps (logging, graph capture) counts to the second. Bytes are torch's; `device_used` is the driver's
    figure, other processes on the device included.
    """

    def __init__(self, out: Path, plan: Path, trace: Path | None = None, blocks: "Marks | None" = None):
        self.out, self.plan, self.trace, self.blocks = out, plan, trace, blocks
        self.kernels: dict[str, Any] | None = None
        self.peaks: list[dict[str, int]] = []
        self.steps: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Put the meter around the train_step that Megatron's training loop calls."""
        from megatron.training import training

        training.train_step = self.around(training.train_step)

    def around(self, train_step: Callable[..., tuple]) -> Callable[..., tuple]:
        import torch
        from megatron.training import get_args

        def measured(forward_step: Any, samples: Any, model: list[torch.nn.Module], *rest: Any, **named: Any) -> tuple:
            torch.cuda.synchronize()
            if not self.peaks:
                self.mark()
            args, done = get_args(), named["iteration"] + 1
            last = done == args.train_iters or bool(args.exit_interval and done % args.exit_interval == 0)
            if self.blocks:
                self.blocks.begin(model)
            begin = time.perf_counter()
            with self.profiled(last):
                result = train_step(forward_step, samples, model, *rest, **named)
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            if self.blocks:
                self.blocks.end()
            losses, skipped, norm = result[0], result[1], result[5]
            losses = {name: float(value) for name, value in losses.items()}
            self.steps.append(
                {
                    "seconds": seconds,
                    "losses": losses,
                    "grad_norm": None if norm is None else float(norm),
                    "skipped": skipped,
                }
            )
            self.mark()
            if last:
                self.report(model)
            return result

        return measured

    @contextlib.contextmanager
    def profiled(self, last: bool) -> Iterator[None]:
        """Trace the kernels of the last step, where a trace is wanted; of the CPU nothing, which would make the gaps longer.

        A host without a working profiler has its times all the same: `kernels` then says why there are none.
        """
        import torch

        if not last or self.trace is None or torch.distributed.get_rank() > 0:
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                activity = torch.profiler.ProfilerActivity.CUDA
                profile = stack.enter_context(torch.profiler.profile(activities=[activity]))
            except (AssertionError, RuntimeError) as err:
                self.kernels = {"error": str(err)}
                yield
                return
            yield
        try:
            profile.export_chrome_trace(str(self.trace))
            self.kernels = kernels.table(json.loads(self.trace.read_text()))
        except (RuntimeError, OSError, ValueError) as err:
            self.kernels = {"error": str(err)}

    def mark(self) -> None:
        """End a phase."""
        import torch

        self.peaks.append(
            {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        )
        torch.cuda.reset_peak_memory_stats()

    def report(self, model: list[Any]) -> None:
        """Collect all ranks and write the file on the first."""
        import torch

        free, total = torch.cuda.mem_get_info()
        setup, first, *later = self.peaks
        mine = {
            "parameters": sum(p.numel() for chunk in model for p in chunk.parameters()),
            "peak": {
                "setup": setup,
                "first_step": first,
                "steady": {k: max(p[k] for p in later or [first]) for k in first},
            },
            "peak_by_step": self.peaks[1:],
            "device_used": total - free,
            "seconds": [step["seconds"] for step in self.steps],
            "losses": [step["losses"] for step in self.steps],
        }
        world = torch.distributed.get_world_size()
        ranks: list[Any] = [None] * world
        torch.distributed.all_gather_object(ranks, mine)
        if torch.distributed.get_rank() > 0:
            return
        losses = ranks[-1].pop("losses")  # the last rank holds the last pipeline stage, as in Megatron's log
        seconds = [max(rank["seconds"][i] for rank in ranks) for i in range(len(self.steps))]
        for rank in ranks:
            rank.pop("losses", None)
        steady = slice(WARM_UP, len(seconds) - bool(self.trace))
        document = {
            "plan_sha256": hashlib.sha256(self.plan.read_bytes()).hexdigest(),
            "device": torch.cuda.get_device_name(),
            "world_size": world,
            "versions": versions(),
            "median_step_seconds": statistics.median(seconds[steady] or seconds),
            "kernels": self.kernels,
            "peak_bytes": {k: {m: max(r["peak"][k][m] for r in ranks) for m in v} for k, v in ranks[0]["peak"].items()},
            "steps": [
                {"seconds": t, "losses": loss, "grad_norm": step["grad_norm"], "skipped": step["skipped"]}
                for t, loss, step in zip(seconds, losses, self.steps, strict=True)
            ],
            "ranks": ranks,
        }
        if self.blocks:
            document["blocks"] = self.blocks.report(steady)
        self.out.write_text(json.dumps(document, indent=1) + "\n")


def versions() -> dict[str, str | None]:
    """Of the packages that decide speed and memory; None for what is not installed."""
    return {name: installed(name) for name in PACKAGES}


def stock() -> None:
    """From here on, the trainer builds what Megatron builds by itself from the same arguments."""
    from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args

    from nam_megatron.runtime import pretrain

    pretrain.settings = lambda args, _: pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))


def balanced() -> None:
    """From here on, routers choose by random logits (core/transformer/moe/router.py of megatron-core 0.19.2)."""
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def forced(self: TopKRouter, *args: Any, **kwargs: Any) -> Any:
        self.config.moe_router_force_load_balancing = True
        return forward(self, *args, **kwargs)

    TopKRouter.forward = forced


def marks_of(words: list[str]) -> "Marks":
    """For the layers of the plan that is to be trained. Raises Refused for a plan whose layers cannot be timed."""
    import blocks

    plan = train.load(train.split(words)[0]).plan
    raise_if(blocks.unfit(plan))
    return blocks.Marks(plan)


def main(words: list[str], started: float) -> int:
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--blocks", action="store_true")
    own = words[: words.index("--nam-plan")] if "--nam-plan" in words else words
    options, words = parser.parse_args(own), words[len(own) :]
    try:
        marks = marks_of(words) if options.blocks else None
    except Refused as refused:
        return train.stop(int(os.environ.get(train.RANK, 0)), REFUSED, refused.render())

    def before() -> None:
        Meter(options.out, train.split(words)[0], options.profile, marks).attach()
        if options.stock:
            stock()
        if options.balanced:
            balanced()

    return train.main(words, started, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], time.time()))
