"""A step's forward and backward passes as one CUDA graph: Megatron's, with the looks at loss and gradients that it drops (torch side).

Megatron (0.19.2, core/full_cuda_graph.py) runs a few steps eagerly, captures one and replays it from then on: no Python runs in between,
so nothing of a microbatch can be looked at while it runs, and the arguments have to say that nothing is. What is looked at here is what
a replay has left, before the update: the sum of the microbatches' losses, and the norm of each buffer of gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.training import training
from torch import Tensor

BLIND = (
    "the step was replayed as one CUDA graph, and no layer could be looked at: `feature.cuda_graphs.impl=none` names it"
)


def provide(begin: Callable[[], None], look: Callable[[Tensor], None]) -> None:
    """Have Megatron's training loop look at what a replay has left.

    begin: called before each replay, as each microbatch that runs in Python calls it. look: gets the loss of all its microbatches.
    """

    class Looked(FullCudaGraphWrapper):
        def __call__(self, *args: Any, **named: Any) -> Any:
            if self.cuda_graph["training"] is not None:
                begin()
            reports = super().__call__(*args, **named)
            if self.cuda_graph["training"] is not None:
                look(torch.stack([report["lm loss"][0] for report in reports]).sum())
            for chunk in named["model"]:
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    group.check_grads(check_for_nan_or_inf=True, check_for_large=False)
            return reports

    training.FullCudaGraphWrapper = Looked
