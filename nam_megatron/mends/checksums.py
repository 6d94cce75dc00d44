"""A checksum for every file of a checkpoint, in both of our formats (torch side). The file, and its reader: runtime/checksums.py."""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed import checkpoint as dcp

from nam_megatron.mends import Plan
from nam_megatron.runtime.checksums import write


def install(plan: Plan) -> None:
    """Have each checkpoint that this process saves from now on get its checksums, before the tracker names it."""
    dist_checkpointing.save = _followed(dist_checkpointing.save, lambda words, named: words[1])
    dcp.save = _followed(dcp.save, lambda words, named: named["storage_writer"].path)


def _followed(save: Callable, folder_of: Callable[[tuple, dict], Any]) -> Callable:
    @wraps(save)
    def saved(*words: Any, **named: Any) -> Any:
        request, folder = save(*words, **named), Path(folder_of(words, named))
        if hasattr(request, "finalize_fns"):  # saved in the background
            request.finalize_fns.append(partial(write, folder))
        else:
            write(folder)
        return request

    return saved
