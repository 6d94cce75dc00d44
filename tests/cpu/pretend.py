"""The whole training program on a CPU: Megatron's pretrain() in forked ranks over gloo, with CUDA, NCCL and TE pretended.

`fork(world, job)` runs `job()` as each rank of a torchrun would see it. Both stand in nam_megatron/prove; imported here, they make the
parent warm. What it cannot show: kernels, streams and their overlap, CUDA graphs, memory, NCCL. The harness does the same for a bare model.
"""

# The tokenizers import transformers, and that all it finds: two seconds of each rank that its parent spares it.
import harness  # noqa: F401
import megatron.core.tokenizers.text.libraries
import megatron.training.training  # noqa: F401
import modules  # noqa: F401
from megatron.training.argument_utils import ArgumentGroupFactory

from nam_megatron.prove.cpu import FusedAdam, pretended  # noqa: F401
from nam_megatron.prove.ranks import Rank, fork  # noqa: F401
from nam_megatron.runtime import pretrain  # noqa: F401

# What each fork would do anew: read its parser's help from source code.
ArgumentGroupFactory._get_field_docstrings = lambda *_: {}
