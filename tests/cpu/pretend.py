"""The whole training program on a CPU: Megatron's pretrain() in forked ranks over gloo, with CUDA, NCCL and TE pretended.

`fork(world, job)` runs `job()` as each rank of a torchrun would see it. Both stand in nam_megatron/prove; imported here, they make the
parent warm. What it cannot show: kernels, streams and their overlap, CUDA graphs, memory, NCCL. The harness does the same for a bare model.
"""

import harness  # noqa: F401
import megatron.core.datasets.helpers
import megatron.core.models.mimo.optimizer
import megatron.core.tokenizers.text.models.gpt_tokenizer  # noqa: F401
import modules  # noqa: F401

from nam_megatron.prove.cpu import FusedAdam, pretended  # noqa: F401
from nam_megatron.prove.proof import warm
from nam_megatron.prove.ranks import Rank, fork  # noqa: F401
from nam_megatron.runtime import checkpoint, pretrain, tracking  # noqa: F401

warm()
