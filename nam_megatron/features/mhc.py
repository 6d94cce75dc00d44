"""Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams mixed between layers."""

from typing import ClassVar

from pydantic import NonNegativeInt

from nam_megatron.features import Feature


class Mhc(Feature):
    name: ClassVar[str] = "mhc"
    missing: ClassVar[str | None] = "the hyper-connection layer"

    streams: NonNegativeInt

    @property
    def on(self) -> bool:
        return self.streams > 0
