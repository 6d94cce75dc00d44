"""Manifold-constrained hyper-connections around Megatron's hybrid layers (arXiv 2512.24880, equations 5 to 9; torch side).

n residual streams of width h stand where one stood. Of a token's streams x [n, h], r = x flattened over its root mean square, each layer
F, norm included, makes

    read  = sigmoid(alpha_pre W_pre r + b_pre)           [n]      what F gets: read x
    write = 2 sigmoid(alpha_post W_post r + b_post)      [n]      how F's output is dealt to the streams
    mix   = Sinkhorn(alpha_res W_res r + b_res)          [n, n]   what each stream keeps of all: doubly stochastic
    x'    = mix x + write^T F(read x)

The streams begin as copies of the embedding; their mean goes into the final norm. MTP takes that, as it does without streams, and its own
layers keep one residual. Names, shapes, initial values, Sinkhorn's order (rows, then columns) and the two epsilons are those of
Megatron-LM's HyperConnectionModule (pull request 4531, merged after 0.19.2), but for what holds the values: the parameters stay fp32 here,
as the paper has them. Written against HybridStack of megatron-core 0.19.2; plain torch.

Between layers a tensor is [s, b, n h], stream by stream. The maps are computed in fp32. A layer keeps its streams once, its own output, and
the coefficients: plain torch computes what lies between once more in the backward pass, our kernels (mhc_kernel.py) have no need to.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nam_megatron.features.mhc import Mhc
from nam_megatron.runtime.mhc_kernel import Read, Write

RESIDUALS = ("self_attn_bda", "mlp_bda", "mamba_bda")  # where Megatron's layers add theirs; each of ours has one


def sinkhorn(logits: Tensor, steps: int, epsilon: float) -> Tensor:
    """[..., n, n] -> positive matrices whose rows and columns sum to one, as near as `steps` normalisations of both come.

    The largest of a row is taken out first: the first normalisation of the rows would divide it out. In logarithms: a column that is next
    to nothing in every row grows by 1 / epsilon a step, and so would its gradient, beyond what fp32 holds.
    """
    least, m = math.log(epsilon), logits - logits.amax(-1, keepdim=True)
    for _ in range(steps):
        m = m - m.logsumexp(-1, keepdim=True).clamp(min=least)
        m = m - m.logsumexp(-2, keepdim=True).clamp(min=least)
    return m.exp()


class HyperConnection(MegatronModule):
    """The maps of one layer. Every parameter is whole on each tensor rank.

    streams: n. sinkhorn_steps: normalisations of rows and columns. initial_scale: of alpha. epsilon: beside the root mean square, and the
    least sum that Sinkhorn divides by. kernels: `fused`, ours for bf16 streams, or `naive`, plain torch.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        streams: int,
        sinkhorn_steps: int,
        initial_scale: float,
        epsilon: float,
        kernels: str,
    ):
        super().__init__(config)
        self.streams, self.steps, self.epsilon = streams, sinkhorn_steps, epsilon
        self.fused = kernels == "fused"
        new = {"device": torch.cuda.current_device(), "dtype": torch.float32}
        maps = streams * (streams + 2)
        self.mapping_proj = nn.Linear(streams * config.hidden_size, maps, bias=False, **new)
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            setattr(self, name, nn.Parameter(torch.full((1,), initial_scale, **new)))
        self.bias = nn.Parameter(torch.zeros(maps, **new))
        if config.perform_initialization:
            nn.init.xavier_uniform_(self.mapping_proj.weight)
        for parameter in self.parameters():
            parameter.keep_in_fp32 = True
            # Under sequence parallelism each rank sees its own tokens; Megatron sums what is marked so over the tensor group.
            parameter.sequence_parallel = config.sequence_parallel

    def made(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, n h]: each stream a copy."""
        return x.repeat(1, 1, self.streams)

    def folded(self, streams: Tensor) -> Tensor:
        """[s, b, n h] -> [s, b, h]: their mean."""
        return self._apart(streams).mean(2).to(streams.dtype)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[s, b, n h] -> what the layer gets [s, b, h], write [s, b, n], mix [s, b, n, n], and the streams for `write`.

        Passing them on saves a sum of two gradients as large as they are.
        """
        if self.fused:
            alpha = self._alpha()
            return Read.apply(
                streams, self.mapping_proj.weight, alpha, self.bias, self.streams, self.steps, self.epsilon
            )
        return *_again(self._read, streams), streams

    def write(self, streams: Tensor, output: Tensor, write: Tensor, mix: Tensor) -> Tensor:
        """The streams after the layer, [s, b, n h]. output: the layer's, without a residual, [s, b, h]."""
        if self.fused:
            return Write.apply(streams, output, write, mix)
        return _again(self._write, streams, output, write, mix)

    def _alpha(self) -> Tensor:
        """That of each logit."""
        n = self.streams
        return torch.cat([self.alpha_pre.expand(n), self.alpha_post.expand(n), self.alpha_res.expand(n * n)])

    def _apart(self, streams: Tensor) -> Tensor:
        """[s, b, n, h] in fp32, or in fp64 where the streams are."""
        return streams.to(torch.promote_types(streams.dtype, torch.float32)).unflatten(-1, (self.streams, -1))

    def _read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, n = self._apart(streams), self.streams
        every = x.flatten(2)
        scale = every.norm(dim=-1, keepdim=True) / math.sqrt(every.size(-1)) + self.epsilon  # at zero a root has NaN
        logits = self._alpha() * (self.mapping_proj(every) / scale) + self.bias
        read, write, mix = logits.split([n, n, n * n], -1)
        taken = (read.sigmoid().unsqueeze(-1) * x).sum(2).to(streams.dtype)
        return taken, 2 * write.sigmoid(), sinkhorn(mix.unflatten(-1, (n, n)), self.steps, self.epsilon)

    def _write(self, streams: Tensor, output: Tensor, write: Tensor, mix: Tensor) -> Tensor:
        dealt = write.unsqueeze(-1) * output.to(write.dtype).unsqueeze(2)
        return (mix @ self._apart(streams) + dealt).flatten(2).to(streams.dtype)


def _again(function: Callable[..., Any], *given: Tensor) -> Any:
    """Keeps `given` alone; what lies between is computed once more in the backward pass."""
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def without_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """In place of Megatron's get_bias_dropout_add: bias and dropout, and nothing added."""

    def bias_dropout(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        output, bias = output_with_bias
        output = output if bias is None else output + bias
        return nn.functional.dropout(output, prob, training)

    return bias_dropout


class Connected:
    """Before a layer class of Megatron's among its bases: the layer of one mixer, between streams. Inside MTP it stays as it is."""

    makes = folds = False  # whether it is the first, the last of the stack

    def __init__(self, *args: Any, hyper_connection: Mapping[str, Any], **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Of Megatron's layers of 0.19.2 MLA alone gets no name, and MLPs alone get no flag.
        self.connected = not (kwargs.get("is_mtp_layer") or (kwargs.get("name") or "").startswith("mtp"))
        if self.connected:
            self.hyper_connection = HyperConnection(self.config, **hyper_connection)  # type: ignore[attr-defined]
            (residual,) = (name for name in RESIDUALS if getattr(self, name, None) is get_bias_dropout_add)
            setattr(self, residual, without_residual)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if not self.connected:
            return forward(hidden_states, *args, **kwargs)
        maps = self.hyper_connection
        streams = maps.made(hidden_states) if self.makes else hidden_states
        taken, write, mix, streams = maps.read(streams)
        found = forward(taken, *args, **kwargs)
        output, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, None)
        streams = maps.write(streams, output, write, mix)
        streams = maps.folded(streams) if self.folds else streams
        return streams if rest is None else (streams, *rest)


class ConnectedStack(HybridStack):
    """HybridStack whose first layer makes the streams and whose last one folds them, before the final norm."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.pre_process:
            self.layers[0].makes = True
        if self.post_process:
            self.layers[-1].folds = True
        if self.pp_group.size() > 1:
            # Else pipeline stages take what arrives for one stream: of this config Megatron's schedules read how wide it is. So each
            # tensor's shape travels before it.
            self.config.variable_seq_lengths = True


def build(mhc: Mhc, stack: ModuleSpec, layers: Mapping[str, ModuleSpec]) -> ModuleSpec:
    return connected(stack, layers, **mhc.model_dump())


def connected(stack: ModuleSpec, slots: Mapping[str, ModuleSpec], **keys: Any) -> ModuleSpec:
    """The spec of a stack with the layers of `slots` between streams. keys: HyperConnection's."""
    for slot, layer in slots.items():
        params = {**(layer.params or {}), "hyper_connection": keys}
        setattr(
            stack.submodules, slot, ModuleSpec(_connected(layer.module), params=params, submodules=layer.submodules)
        )
    assert stack.module is HybridStack
    return ModuleSpec(ConnectedStack, submodules=stack.submodules, metainfo=stack.metainfo)


@cache
def _connected(layer: type) -> type:
    return type(f"Connected{layer.__name__}", (Connected, layer), {})
