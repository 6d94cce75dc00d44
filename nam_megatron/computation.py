"""What a plan computes, apart from how, where and how fast: the one table, for resuming a run and for comparing runs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nam_megatron.errors import Problem, Refused

# Recipe keys that leave the trained model as it is but for the order of sums; a key stands for all below it. Whatever is not here
# computes. The parallel layout is here: the next step is the same one in another order. The micro batch is not: the experts' balance
# is judged in each.
EXECUTION: dict[str, str] = {
    "preset": "names and a sentence",
    "assumptions": "sentences",
    "lane.name": "a name; its blocks and layout are compared themselves",
    "lane.tensor": "`parallel` says what is used",
    "lane.sequence": "`parallel` says what is used",
    "parallel": "who computes what",
    "cluster": "the hosts",
    "device": "for the forecast and the checks before a run",
    "precision.name": "a name",
    "precision.cross_entropy": "the same formula by another program",
    "precision.fused_grad_accumulation": "the same sums",
    "precision.norm_kernels": "the same formula by another program",
    "schedule.log_interval": "what is printed",
    "schedule.eval_steps": "what is looked at",
    "schedule.eval_interval": "what is looked at",
    "schedule.save": "where checkpoints go",
    "schedule.save_interval": "when they are written",
    "schedule.load": "where they come from",
    "schedule.stop_every": "when a command ends",
    "schedule.timeout_minutes": "how long a rank waits",
    "schedule.manual_gc_interval": "when Python tidies up",
    "data.workers": "who reads",
    "feature.cuda_graphs": "the same kernels, launched at once",
    "feature.recompute": "the same values, computed twice",
    "feature.distributed_optimizer.overlap_grad_reduce": "when gradients travel",
    "feature.distributed_optimizer.overlap_param_gather": "when weights travel",
    "feature.distributed_optimizer.reshardable": "what a checkpoint looks like",
    "feature.megatron_fsdp.strategy": "what is sharded",
    "feature.fsdp2.reshard_after_forward": "when weights are let go",
    "model.blocks.mla.kernels": "the same formulas by another program",
    "model.blocks.dsa.kernels": "the same formulas by another program",
    "model.blocks.mamba3.kernels": "the same formulas by another program",
    "model.blocks.m2rnn.kernels": "the same formulas by another program",
    "model.blocks.mamba2.strided": "the same kernels on the same values",
    "model.blocks.moe.permute_fusion": "the same permutation, fused",
    "model.blocks.moe.dispatcher": "how tokens travel",
    "model.blocks.moe.router_fusion": "the same formula, fused",
    "model.blocks.moe.fused_weighted_squared_relu": "the same formula, fused",
    "model.blocks.moe.shared_overlap": "when the shared expert runs",
    "settings.log_throughput": "what is printed",
    "settings.exit_signal_handler": "how a command ends",
    "settings.check_for_nan_in_loss_and_grad": "what is looked at",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A recipe key, or `settings.NAME` where a setting without a key differs; None for a value that one side lacks."""

    key: str
    before: Any
    after: Any

    @property
    def computes(self) -> bool:
        return not executes(self.key)


def executes(key: str) -> bool:
    """Whether a recipe key (`parallel.tensor`) is one of EXECUTION."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in EXECUTION)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """How two plans (the trees of plan.json) differ: their recipes, and the settings that no recipe key decides."""
    sides = [_flat(tree["recipe"], "") | _pins(tree) for tree in (before, after)]
    for key in dict.fromkeys((*sides[0], *sides[1])):
        there, here = (side.get(key) for side in sides)
        if there != here:
            yield Difference(key, there, here)


def _pins(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without a key: what this version of the compiler decides by itself. Its Megatron is one of them."""
    pins = {f"settings.{s['name']}": s["value"] for s in tree["settings"] if s["key"] is None}
    return pins | {"megatron_core": tree["megatron_core"]}


def _flat(node: Any, key: str) -> dict[str, Any]:
    """Nested mappings as {dotted key: leaf}; a list is a leaf."""
    if isinstance(node, Mapping):
        return {k: v for name, child in node.items() for k, v in _flat(child, f"{key}.{name}" if key else name).items()}
    return {key: node}


def read(path: Path) -> dict[str, Any]:
    """A plan.json as it stands, which another version may have written. Raises Refused."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not {"recipe", "settings", "megatron_core"} <= tree.keys():
            raise ValueError("it is no plan")
    except OSError as err:
        raise Refused(Problem(f"`{path}` cannot be read: {err.strerror}", "schedule.load")) from None
    except (ValueError, AttributeError, RecursionError) as err:
        raise Refused(Problem(f"`{path}` cannot be understood: {err}", "schedule.load")) from None
    return tree
