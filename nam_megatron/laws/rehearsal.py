"""Laws on a run on a CPU, `cluster=cpu`: it refuses what asks for a GPU."""

from collections.abc import Iterator
from typing import Any

from nam_megatron.laws.law import OURS, UNTRIED, Law, Words
from nam_megatron.recipe import Recipe
from nam_megatron.rehearsal import ANY, CPU_DOES_WITHOUT, SWITCHES

SEEN = "prove/cpu.py, which has no stand-in for it"


def _asks_for_a_gpu(recipe: Recipe) -> Iterator[Words]:
    for key, asked, instead, why in CPU_DOES_WITHOUT if recipe.cluster.processor == "cpu" else ():
        value = _at(recipe, key)
        if asked is ANY and value is not None:
            switch = f"{key}.{SWITCHES[key]}"
            yield {"key": switch, "what": f"a CPU has {why}", "way": f"`{switch}=none`"}
        elif value is not None and value == asked:
            said, way = str(asked).lower(), f"`{key}={str(instead).lower()}`"
            yield {"key": key, "what": f"`{said}` asks for what a CPU has not: {why}", "way": way}


def _at(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key; None where something above it does not stand."""
    here: Any = recipe
    for name in key.split("."):
        here = getattr(here, name, None)
    return here


LAWS = (
    Law(id="cpu-asks-for-gpu", category=OURS, key="cluster.processor",
        when=_asks_for_a_gpu, title="a run on a CPU with a kernel, CUDA graphs or FP8", says="{what}", source=SEEN),
    Law(id="cpu-async-save", category=OURS, key="schedule.async_save",
        when=lambda cluster, schedule: cluster.processor == "cpu" and schedule.async_save,
        says="Megatron's process that writes checkpoints in the background asks for a GPU",
        way="`schedule.async_save=false`", source="core/dist_checkpointing/strategies/async_utils.py, async_loop"),
    Law(id="cpu-muon", category=UNTRIED, key="feature.muon.enabled",
        when=lambda cluster, muon: cluster.processor == "cpu", says="Muon has not been tried on a CPU",
        way="`optim=adamw`"),
)  # fmt: skip
