"""Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams mixed between layers."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import NonNegativeInt

from nam_megatron.features import Feature
from nam_megatron.setting import Row
from nam_megatron.sizes import ESTIMATED, FEATURES, Line, Param, Sizes, Stage, Work


class Mhc(Feature):
    """Manifold-constrained hyper-connections: residual streams mixed between layers."""

    name = "mhc"
    switch = "streams"
    missing = "the hyper-connection layer"

    streams: Annotated[NonNegativeInt, Row("residual streams; 0: off")]

    # As designed (equations 5 to 9 of the paper), not as built.

    def _sizes(self, z: Sizes, layers: int) -> Sizes:
        """n streams; m mixing coefficients a token and layer: read, write and the n x n residual map."""
        return z.own(n=self.streams, m=2 * self.streams + self.streams**2, layers=layers)

    def params(self, z: Sizes, stage: Stage) -> Iterator[Param]:
        mixes, layers = 2 * self.streams + self.streams**2, len(stage.layers)
        yield Param("mhc.projection", (mixes, self.streams * z.model.hidden_size), "replicated", "weight", layers)
        yield Param("mhc.bias", (mixes,), "replicated", "other", layers)
        yield Param("mhc.scale", (3,), "replicated", "other", layers)

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        z = self._sizes(z, len(stage.layers))
        why = "the streams before each layer, where one residual is counted with the layer"
        yield z.line("residual streams", "2 (n - 1) Ts h layers", why, bucket=FEATURES, mark=ESTIMATED)
        why = "coefficients of each token in fp32, before and after twenty Sinkhorn steps that are computed again"
        yield z.line("mixing", "8 m Ts layers", why, bucket=FEATURES, mark=ESTIMATED)

    def flops(self, z: Sizes) -> Iterator[Work]:
        z = self._sizes(z, len(z.plan.layers))
        yield z.work(
            "mixing", "(2 m n h + 2 n n h + 4 n h) layers", "coefficients, and the streams' mix", mark=ESTIMATED
        )
