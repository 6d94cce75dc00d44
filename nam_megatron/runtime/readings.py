"""What each rank says of its memory and its device, as an event and as a line of the log for whoever has no events (torch side).

    nam_megatron.readings {"rank": 0, "when": "built", "step": 0, "allocated": 1, "peak_allocated": 1, ...}

`when`: built (model and optimizer are there, before the first step), step (after steps 1, 2, 4, 8, ...), end (however it ends).
Bytes are torch's; the peaks are those since the process began. `built` also says which GPU this rank has, and whether the allocator
grows its segments as the plan's environment asks.
"""

import contextlib
import hashlib
import json
import os
import sys
from typing import Any

import torch

from nam_megatron import events
from nam_megatron.events import RECORD

MARK = "nam_megatron.readings"


class Readings:
    """Prints a reading where one is due. Costs one comparison in a microbatch, and a synchronous look at counters in few."""

    def __init__(self) -> None:
        self._next = 1

    def built(self) -> None:
        _say("built", 0, **device())

    def step(self, done: int) -> None:
        """To be called with the number of steps that are done, as often as one likes."""
        if done >= self._next:
            _say("step", done)
            while self._next <= done:
                self._next *= 2

    def end(self, done: int) -> None:
        RECORD.done = done
        _say("end", done)


def memory() -> dict[str, int]:
    return {
        "allocated": torch.cuda.memory_allocated(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def device() -> dict[str, Any]:
    """Which GPU this is: its number in this process, its place on the PCI bus as `nvidia-smi` prints it, its name, a hash of its UUID.

    expandable: whether any segment of the allocator can grow (PYTORCH_ALLOC_CONF=expandable_segments:True); None without a segment.
    """
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    place: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    segments = torch.cuda.memory_snapshot()
    return {
        "node": int(os.environ.get("GROUP_RANK", 0)),  # torchrun's number of the host
        "device": index,
        "bus": None if None in place else "{:08X}:{:02X}:{:02X}.0".format(*place),
        "name": properties.name,
        "uuid": _hidden(getattr(properties, "uuid", None)),
        "expandable": any(s.get("is_expandable", False) for s in segments) if segments else None,
    }


def _hidden(uuid: Any) -> str | None:
    """Which GPU it is, comparable and for nobody to read."""
    return None if uuid is None else hashlib.sha256(str(uuid).encode()).hexdigest()[:16]


def _source() -> str | None:
    """The code of which much was imported since the start; None where it changes at this moment, so that it is another's at the start."""
    with contextlib.suppress(OSError):
        return events.source()
    return None


def _say(when: str, step: int, **more: Any) -> None:
    """In one write: the ranks of a host share a pipe, which keeps lines of less than 4096 bytes whole."""
    found = {"step": step, **memory(), **more}
    if when == "built":
        RECORD.say("built", **found, source=_source() if RECORD.on else None)
    else:
        RECORD.say("memory", when=when, **found)
    reading = {"rank": int(os.environ["RANK"]), "when": when, **found}
    sys.stdout.write(f"{MARK} {json.dumps(reading)}\n")
    sys.stdout.flush()
