"""The Megatron versions that plans can be compiled for. A new one is a file and a flag dump here, and its line below."""

from functools import cache
from importlib import import_module

from nam_megatron.targets.target import Flag, Target

__all__ = ["NAMES", "Flag", "Target", "current", "target"]

NAMES = ("v0_19",)


@cache
def target(name: str) -> Target:
    """The target of that name (one of NAMES)."""
    assert name in NAMES, name
    found = import_module(f"nam_megatron.targets.{name}").TARGET
    assert isinstance(found, Target), name
    return found


def current() -> Target:
    """The Megatron that the commands speak of: the newest. Libraries take a target as an argument instead of asking."""
    return target(NAMES[-1])
