"""How a launch's arguments become a kind's keys, and its parameters, for `read.py` of its folder: lint asks.

Such a file has
    keys(a, m, lost)        the kind's part of a recipe. a: Megatron's arguments by name; m: what Megatron makes of them (lint/model.py);
                            lost: what a recipe cannot say of it is added there
    count(v, chooses, all)  parameters of a layer from plain numbers (lint/model.py, Model.count). chooses: whether it chooses keys by
                            itself; all: all its experts, or those of one token
A kind without one cannot be said in Megatron's arguments.
"""

from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, Any]


def norm(v: Numbers) -> int:
    """Weights of a norm for each channel."""
    return 2 if v["normalization"] == "LayerNorm" else 1


def feed_forward(v: Numbers, inner: int, outer: int, biased: int) -> int:
    """Two projections, the first of them twice where it is gated."""
    first = inner * (2 if v["gated"] else 1)
    return outer * first + biased * first + inner * outer + biased * outer
