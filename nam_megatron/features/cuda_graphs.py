"""CUDA graphs of parts of layers, or one of all microbatches of a step: Megatron's --cuda-graph-impl and --cuda-graph-modules."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt

from nam_megatron.blocks import GraphPart
from nam_megatron.features import Feature
from nam_megatron.words.setting import Env, Row, Setting
from nam_megatron.words.site import Site
from nam_megatron.words.sizes import GRAPHS, Line, Sizes, Stage

STOCK_DSA = "stock DSA synchronises with the host and cannot be captured"
LAUNCHED = "the same kernels, launched at once"
NO_MODULES: dict[str, Any] = {"transformer.cuda_graph_modules": []}


class CudaGraphs(Feature):
    """CUDA graphs of parts of layers, or of a step's forward and backward passes as a whole."""

    name = "cuda_graphs"
    switch = "impl"

    impl: Annotated[
        Literal["none", "transformer_engine", "local", "full_iteration"],
        Row(
            "who captures the modules, or full_iteration: all of a step but the update",
            "cuda_graph_impl",
            executes=LAUNCHED,
        ),
    ]
    modules: Annotated[tuple[GraphPart, ...], Row("parts that are captured", executes=LAUNCHED)]
    warmup_steps: Annotated[
        NonNegativeInt, Row("eager steps before capture", "cuda_graph_warmup_steps", executes=LAUNCHED)
    ]

    @property
    def on(self) -> bool:
        return self.impl != "none"

    @property
    def whole(self) -> bool:
        """Whether one graph holds all microbatches of a step."""
        return self.impl == "full_iteration"

    def settings(self, site: Site) -> Iterator[Setting]:
        fields = None if self.modules else NO_MODULES
        yield Setting("cuda_graph_modules", self.modules or None, "parts that are captured", "modules", fields=fields)
        why = "graphs need TE's; Megatron would switch it on behind the recipe"
        yield Setting("te_rng_tracker", True, why, "impl", beside="", fields=("rng.te_rng_tracker",))
        if self.impl == "local":
            scope = ("transformer.inference_cuda_graph_scope",)
            why = "Megatron's own graphs want a scope for inference, which training does not read"
            yield Setting(
                "inference_cuda_graph_scope", "layer", why, "impl", beside="", fields=scope, executes=LAUNCHED
            )

    @classmethod
    def off(cls) -> Iterator[Setting]:
        yield Setting("cuda_graph_impl", "none", "no graphs", executes=LAUNCHED)
        yield Setting("cuda_graph_modules", None, "no graphs", fields=NO_MODULES, executes=LAUNCHED)
        yield Setting("cuda_graph_warmup_steps", 3, "no graphs", executes=LAUNCHED)
        yield Setting("te_rng_tracker", False, "only graphs need it", fields=("rng.te_rng_tracker",), executes=LAUNCHED)

    def env(self) -> Iterator[Env]:
        if self.on:
            yield Env("NCCL_GRAPH_REGISTER", "0", "graphs with expandable segments read freed memory otherwise")

    def alone(self, site: Site) -> Iterator[str]:
        moe = site.blocks.moe
        if self.whole and moe and "moe" in site.kinds and not moe.pad_to_capacity:
            yield "Megatron's own experts have the host wait for their counts, and cannot be captured in a graph of the step"
        if site.blocks.dsa and (self.whole or "attn" in self.modules):
            yield STOCK_DSA

    def activations(self, z: Sizes, stage: Stage) -> Iterator[Line]:
        """What graphs add to the eager budget: of a whole step its samples, else all captured layers at once, as no backward pass precedes
        a forward pass.
        """
        if self.whole:
            z = z.own(samples=z.site.global_batch_size)
            yield z.line(
                "static inputs",
                "28 samples S",
                "tokens, labels and positions in int64, masks in fp32, of all microbatches",
                bucket=GRAPHS,
            )
            return

        def layers(*modules: str) -> int:
            parts = set(modules) & set(self.modules)
            return sum(bool(parts & set(z.site.blocks.of(layer.kind).graph_parts)) for layer in stage.layers)

        z = z.own(layers=layers(*self.modules), attention=layers("attn"), routed=layers("moe_preprocess"))
        more = {"bucket": GRAPHS}
        yield z.line("static inputs", "2 Ts h layers", "of each captured layer, outside the pool", **more)
        yield z.line(
            "static masks", "b s S attention", "a bool mask for each attention layer, outside the pool", **more
        )
        z = z.own(R=z.value(f"{moe.top_k if (moe := z.site.blocks.moe) else 0} Ts et imbalance"))
        why = "permuted rows, shared output and residual, which eager code frees"
        yield z.line("static outputs of routing", "(2 R h + 4 Ts h) routed", why, place="reserved", **more)
