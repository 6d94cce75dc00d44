"""One rank of our command where there is no GPU: what a runner starts that makes its own processes."""

import sys
from pathlib import Path

import conftest  # noqa: F401  before all that imports Megatron

# isort: split
import check_train
import pretend
import torch

if __name__ == "__main__":
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    (rank,) = pretend.fork(1, lambda: check_train.by_loop("ours", Path(), sys.argv[3:]))
    print(rank.out, rank.err, sep="\n", flush=True)
    sys.exit(rank.code)
