"""Laws of our compiler that a launch is enough to be asked about: one predicate for both.

A law takes sections of a recipe by name. Here they are read from a launch: each key that is an argument of Megatron's by the row of that
key, and what a launch says in other words by the model that is made of it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nam_megatron.blocks.dsa.block import Dsa
from nam_megatron.blocks.gdn.block import Gdn
from nam_megatron.blocks.moe.block import Moe
from nam_megatron.features.distributed_optimizer import DistributedOptimizer
from nam_megatron.features.fp8 import Fp8
from nam_megatron.features.megatron_fsdp import MegatronFsdp
from nam_megatron.features.recompute import Recompute
from nam_megatron.laws.book import LAWS
from nam_megatron.laws.law import met
from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.rule import listed
from nam_megatron.lint.values import Args, NotKnown
from nam_megatron.recipe.model import Model as ModelKeys
from nam_megatron.recipe.training import Optim
from nam_megatron.words.setting import Config

BY_ID = {law.id: law for law in LAWS}


class Section:
    """A section of a recipe as a launch gives it. said: keys that it says in other words."""

    def __init__(self, keys: type[Config], a: Args, **said: object):
        self._keys, self._a, self._said = keys, a, said

    def __getattr__(self, name: str) -> Any:
        if name in self._said:
            return self._said[name]
        argument = self._keys.row(name).argument
        if argument is None:
            raise NotKnown(name)
        return getattr(self._a, argument)


def _sharding(a: Args, m: Model) -> SimpleNamespace:
    shards = Section(DistributedOptimizer, a, enabled=a.use_distributed_optimizer)
    return SimpleNamespace(distributed_optimizer=shards, megatron_fsdp=m.fsdp)


def _recompute(a: Args, m: Model) -> Section:
    return Section(Recompute, a, granularity=m.recompute, modules=tuple(listed(a.recompute_modules or ())))


def _graphs(a: Args, m: Model) -> SimpleNamespace:
    return SimpleNamespace(impl=m.graphs, whole=m.graphs == "full_iteration", modules=m.graph_modules)


# What a launch has of a recipe, by the names that laws take; None where it does not stand.
READ: dict[str, Callable[[Args, Model], Any]] = {
    "model": lambda a, m: Section(ModelKeys, a),
    "parallel": lambda a, m: SimpleNamespace(tensor=m.tp, pipeline=m.pp, sequence=a.sequence_parallel),
    "plan": lambda a, m: SimpleNamespace(kinds=m.kinds),
    "feature": _sharding,
    "optim": lambda a, m: Section(Optim, a) if a.lr is not None else None,
    "moe": lambda a, m: Section(Moe, a) if m.moe and a.num_experts else None,
    Dsa.kind: lambda a, m: Section(Dsa, a) if m.checks_dsa else None,
    Gdn.kind: lambda a, m: Section(Gdn, a) if m.gdn else None,
    "fp8": lambda a, m: Section(Fp8, a, recipe=a.fp8_recipe) if a.fp8 or a.fp8_param_gather else None,
    "recompute": lambda a, m: _recompute(a, m) if m.recompute else None,
    "cuda_graphs": lambda a, m: _graphs(a, m) if m.graphs != "none" else None,
    "megatron_fsdp": lambda a, m: Section(MegatronFsdp, a) if a.use_megatron_fsdp else None,
}


def law(name: str) -> Callable[[Args, Model], bool]:
    """The predicate of a law, for a rule: whether a launch breaks it."""
    asked = BY_ID[name]

    def when(a: Args, m: Model) -> bool:
        found = {part: READ[part](a, m) for part in asked.about}
        return None not in found.values() and met(asked, found)

    return when
