"""Dense feed-forward layer of `model.ffn_hidden_size`: Megatron's MLPLayer, symbol `-`."""

from collections.abc import Iterator

from nam_megatron.blocks import Block, residual
from nam_megatron.words.site import Layer
from nam_megatron.words.sizes import UNMEASURED, Line, Param, Sizes, Work


class Mlp(Block):
    """A dense feed-forward layer of `model.ffn_hidden_size`."""

    kind = "mlp"
    title = "MLP"
    colour = "yellow"
    hue = "#b98a4b"
    letters = ("E",)
    symbol = "-"
    slot = "mlp_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp")
    adapted = ("linear_fc1", "linear_fc2")
    graph_parts = ("mlp",)
    activates = True
    recomputed = ("mlp",)

    def _sizes(self, z: Sizes) -> Sizes:
        """F wide; u projections in."""
        return z.own(F=z.site.ffn_hidden_size, u=z.gates)

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, width = z.site.hidden_size, z.site.ffn_hidden_size
        yield from z.norm("mlp.linear_fc1.layer_norm_", h)
        yield from z.column("mlp.linear_fc1", z.gates * width, h)
        yield from z.row("mlp.linear_fc2", h, width)

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        if "mlp" in z.recompute:
            yield z.line("input", "2 Ts h", "the norm is inside the checkpoint")
            return
        mark = "" if z.site.activation == "squared_relu" else UNMEASURED
        yield from residual(z)
        yield z.line("first projection", "2 T u F / t", "input of the activation", mark=mark)
        yield z.line("activation", "w T F / t", "input of the second projection", mark=mark)

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        yield z.line("forward", "2 Ts h", "the layer's output")
        yield z.line(
            "backward", "2 T u F / t + 2 h F / t + 2 T h", "gradients of the activation, of a weight, of the input"
        )

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        yield self._sizes(z).work("projections", "2 (u + 1) h F", "", redone=("mlp",))
