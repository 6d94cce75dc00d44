"""A step's forward and backward passes as one CUDA graph: Megatron's, with the looks at loss and gradients that it drops (torch side).

Megatron (0.19.2, core/full_cuda_graph.py) runs a few steps eagerly, captures one and replays it from then on: no Python runs in between,
so nothing of a microbatch can be looked at while it runs, and the arguments have to say that nothing is. What is looked at here is what
a replay has left, before the update: each microbatch's loss, and the norm of each buffer of gradients. While the GPU replays, the next
step's samples are read, for which it would wait. The graph is not quite what was captured: see graph_fills.py.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.training import training

from nam_megatron.errors import raise_if
from nam_megatron.mends.install import Run
from nam_megatron.runtime import graph_fills

BLIND = (
    "the step was replayed as one CUDA graph, and no layer could be looked at: `feature.cuda_graphs.impl=none` names it"
)


def install(run: Run) -> None:
    """Have Megatron's training loop look at what a replay has left.

    run.begin is called before each replay, as each microbatch that runs in Python calls it. run.look gets the loss of each microbatch, and
    not their sum: Megatron's machine knows a bad value again by its number in the step, after a checkpoint in an eager one.

    Raises:
        Refused: this host cannot change a graph.
    """
    raise_if(graph_fills.unserved())
    assert run.begin is not None and run.look is not None, "our trainer gives both"
    begin, look = run.begin, run.look

    class Looked(FullCudaGraphWrapper):
        def __call__(self, *args: Any, **named: Any) -> Any:
            if self.cuda_graph["training"] is not None:
                begin()
            elif get_rerun_state_machine().state == RerunState.RERUNNING_IN_PLACE:
                # It names the layer only if it runs eagerly again, and is not captured.
                self.curr_iteration["training"] -= 1
            # Megatron makes the graph that it captures into where it captures.
            made, torch.cuda.CUDAGraph = torch.cuda.CUDAGraph, graph_fills.FilledByKernels
            try:
                reports = super().__call__(*args, **named)
            finally:
                torch.cuda.CUDAGraph = made
            if self.cuda_graph["training"] is not None:
                read_ahead(named["data_iterator"], named["num_microbatches"])
                if reports:  # those of the last pipeline stage
                    for loss in torch.stack([report["lm loss"][0] for report in reports]).cpu():
                        look(loss)
            look_at_gradients(named["model"])
            return reports

    training.FullCudaGraphWrapper = Looked


def release() -> None:
    """Let go of the graph, if there is one: NCCL does not end a communicator while a graph holds its kernels, and waits without end.

    Before the process group is destroyed, and before a process ends alone.
    """
    graph = FullCudaGraphWrapper.cuda_graph["training"]
    if graph is not None:
        FullCudaGraphWrapper.cuda_graph["training"] = FullCudaGraphWrapper.result["training"] = None
        graph.reset()


def look_at_gradients(model: Sequence[Any]) -> None:
    """Megatron's look at the norm of each bucket, after a step, replayed or not. It waits for the GPU twice a bucket; here once for all,
    where it would say nothing of any.

    model: its chunks, as DDP has wrapped them.
    """
    machine = get_rerun_state_machine()
    groups = [g for chunk in model for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    if machine.state == RerunState.INITIAL_RUN and machine.mode != RerunMode.REPORT_DETERMINISM_STATS:
        norms = [bucket.grad_data.norm(p=2) for group in groups for bucket in group.buckets]
        if not norms or bool(torch.stack(norms).isfinite().all()):
            return
    for group in groups:
        group.check_grads(check_for_nan_or_inf=True, check_for_large=False)


class Ahead:
    """An iterator, of which some is read before it is asked for. Below Megatron's RerunDataIterator, which keeps what a step got."""

    def __init__(self, source: Iterator[Any]):
        self.source, self.read = source, deque[Any]()

    def __next__(self) -> Any:
        return self.read.popleft() if self.read else next(self.source)

    def fill(self, count: int) -> None:
        """Have `count` at hand, or as many as there are."""
        while len(self.read) < count:
            try:
                self.read.append(next(self.source))
            except StopIteration:
                return


def read_ahead(iterators: Any, count: int) -> None:
    """Read the next `count` microbatches. iterators: Megatron's RerunDataIterator, None, or a list of them."""
    for of_chunk in iterators if isinstance(iterators, list) else [iterators]:
        if of_chunk is None:
            continue
        if not isinstance(of_chunk.iterable, Ahead):
            of_chunk.iterable = Ahead(of_chunk.iterable)
        of_chunk.iterable.fill(count)
