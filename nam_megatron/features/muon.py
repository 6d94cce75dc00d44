"""Muon for matrices (Keller Jordan, 2024), AdamW for the rest: Megatron's --optimizer muon."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nam_megatron.errors import Problem
from nam_megatron.features import Switch
from nam_megatron.setting import Setting


class Muon(Switch):
    name: ClassVar[str] = "muon"

    momentum: Annotated[float, Field(ge=0, lt=1)]
    nesterov: bool
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"]
    ns_steps: PositiveInt
    tp_mode: Literal["blockwise", "duplicated", "distributed"]
    extra_scale_factor: PositiveFloat
    split_qkv: bool

    def settings(self, plan) -> Iterator[Setting]:
        if not self.on:
            return
        yield Setting(
            "optimizer", "muon", "takes every 2-D parameter but embeddings: router and indexer included", "enabled"
        )
        yield Setting("muon_momentum", self.momentum, "momentum", "momentum")
        yield Setting("muon_nesterov", self.nesterov, "Nesterov momentum", "nesterov")
        yield Setting("muon_scale_mode", self.scale_mode, "scale of an update", "scale_mode")
        yield Setting(
            "muon_extra_scale_factor", self.extra_scale_factor, "further scale of an update", "extra_scale_factor"
        )
        yield Setting("muon_num_ns_steps", self.ns_steps, "Newton-Schulz iterations", "ns_steps")
        yield Setting("muon_coefficient_type", "quintic", "Newton-Schulz polynomial")
        yield Setting("muon_fp32_matmul_prec", "medium", "precision of its products")
        yield Setting("muon_tp_mode", self.tp_mode, "Megatron 0.20 changes the default", "tp_mode")
        yield Setting(
            "muon_split_qkv", self.split_qkv, "queries, keys and values are orthogonalised apart", "split_qkv"
        )
        yield Setting("muon_scalar_optimizer", "adam", "for everything that is not a matrix")

    def check(self, plan) -> Iterator[Problem]:
        f = plan.recipe.feature
        for other in (f.megatron_fsdp, f.fsdp2):
            if other.on:
                yield Problem(
                    f"Muon does not run under `{other.name}`",
                    "feature.muon.enabled",
                    f"set `feature.{other.name}.enabled=false`",
                )
