"""Mixture of experts: Megatron's MoELayer with a shared expert, symbol `E`."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import lcm
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nam_megatron.blocks import NO_KERNEL, Block, residual
from nam_megatron.packages import QUACK, QUACK_KEY
from nam_megatron.words.setting import OURS, Package, Row, Setting
from nam_megatron.words.site import Layer, Site
from nam_megatron.words.sizes import ROUTING, UNMEASURED, Line, Param, Sizes, Work


class Moe(Block):
    """Mixture of experts with a shared expert: Megatron's own."""

    kind = "moe"
    title = "MoE"
    colour = "bright_yellow"
    hue = "#f0a92e"
    letters = ("E",)
    symbol = "E"
    slot = "moe_layer"
    tried = ("tensor", "sequence", "context", "expert", "fp8", "graphs", "mtp")
    adapted = ("linear_fc1", "linear_fc2")
    unadapted = MappingProxyType({"router": "another choice of experts is another load on them, and their bias stays"})
    graph_parts = ("moe_router", "moe_preprocess")
    activates = True
    absent = MappingProxyType({"transformer.num_moe_experts": None})
    recomputed = ("moe", "moe_act", "shared_experts")
    without_gpu = (
        *((key, True, False, NO_KERNEL) for key in ("permute_fusion", "router_fusion", "fused_router_gradient")),
        ("shared_overlap", True, False, "no streams"),
        ("expert_gemm", "quack", "torch", "QuACK's kernels"),
    )
    trains = ("aux_loss_coeff", "z_loss_coeff", "balancing", "expert_bias_update_rate", "capacity_factor")

    experts: Annotated[PositiveInt, Row("routed experts", "num_experts", ("transformer.num_moe_experts",))]
    top_k: Annotated[PositiveInt, Row("experts per token", "moe_router_topk")]
    expert_hidden_size: Annotated[
        PositiveInt, Row("width of an expert; unset, Megatron takes ffn_hidden_size", "moe_ffn_hidden_size")
    ]
    shared_expert_hidden_size: Annotated[NonNegativeInt, Row("width of the shared expert; 0 for none")]
    shared_expert_gate: Annotated[
        bool,
        Row("the shared expert's output is weighed by a sigmoid of the token", "moe_shared_expert_gate", was=False),
    ]
    score_function: Annotated[
        Literal["sigmoid", "softmax"], Row("of the router; Megatron's default is softmax", "moe_router_score_function")
    ]
    pre_softmax: Annotated[
        bool,
        Row("softmax over all experts, of which the chosen keep their share; false: over the chosen alone",
            "moe_router_pre_softmax", was=False),
    ]  # fmt: skip
    routed_scaling: Annotated[
        PositiveFloat | None,
        Row("factor on what the routed experts add; null: 1", "moe_router_topk_scaling_factor", was=None),
    ]
    group_limit: Annotated[
        tuple[PositiveInt, PositiveInt] | None,
        Row("[groups, chosen]: a token's experts are all in so many of so many groups; null: no groups", was=None),
    ]
    expert_bias: Annotated[bool, Row("bias that balances without a loss", "moe_router_enable_expert_bias")]
    expert_bias_update_rate: Annotated[
        NonNegativeFloat | None, Row("step of that bias", "moe_router_bias_update_rate")
    ] = None
    router_dtype: Annotated[
        Literal["fp32", "fp64"] | None,
        Row("of the router's logits and scores; null: that of the weights", "moe_router_dtype"),
    ]
    balancing: Annotated[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"], Row("loss that balances the experts")
    ]
    aux_loss_coeff: Annotated[NonNegativeFloat, Row("weight of that loss; unset, Megatron has 0: no balancing")]
    z_loss_coeff: Annotated[
        PositiveFloat | None, Row("weight of the router's z-loss; null: none", "moe_z_loss_coeff", was=None)
    ]
    dispatcher: Annotated[
        Literal["alltoall", "allgather", "local", "gathered"],
        Row(
            "how tokens travel to experts; two are ours: local, no expert on another GPU, and gathered, every GPU of the experts gets all "
            "tokens and the host waits for none",
            executes="how tokens travel",
        ),
    ]
    grouped_gemm: Annotated[bool, Row("all local experts in one GEMM", "moe_grouped_gemm")]
    expert_gemm: Annotated[
        Literal["transformer_engine", "torch", "quack"],
        Row("whose grouped GEMM; torch's and QuACK's (the extra `quack`, Hopper) read the experts' counts on the GPU, and no host waits",
            executes="the same products; a microbatch's gradient is rounded before it is added, but for QuACK's with "
            "`precision.fused_grad_accumulation`", was="transformer_engine"),
    ]  # fmt: skip
    permute_fusion: Annotated[
        bool, Row("TE's fused permutation", "moe_permute_fusion", executes="the same permutation, fused")
    ]
    router_fusion: Annotated[
        bool, Row("TE's fused scores, top-k and balance", "moe_router_fusion", executes="the same formula, fused")
    ]
    fused_router_gradient: Annotated[
        bool,
        Row("one kernel makes the router's gradient of the layer's input and adds the experts' and the shared expert's to it",
            executes="the same sums; the router's products keep all of fp32, where Transformer Engine's GEMM takes TF32", was=False),
    ]  # fmt: skip
    shared_overlap: Annotated[
        bool,
        Row("the shared expert on a stream of its own beside the dispatch", executes="when the shared expert runs"),
    ]
    fused_weighted_squared_relu: Annotated[
        bool,
        Row("the activation and its weighing by the router in one kernel", "use_fused_weighted_squared_relu",
            executes="the same formula, fused"),
    ]  # fmt: skip
    capacity_factor: Annotated[
        PositiveFloat | None, Row("rows an expert takes, over the mean; null: dropless", "moe_expert_capacity_factor")
    ]

    pad_to_capacity: Annotated[
        bool,
        Row("experts get as many rows as their capacity, the missing ones of zeros", "moe_pad_expert_input_to_capacity",
            executes="the same rows, and rows that weigh nothing", was=False),
    ]  # fmt: skip
    latent_size: Annotated[
        PositiveInt | None,
        Row("width of a token for the routed experts, projected to and from (Nemotron-3 Super); null: the model's", "moe_latent_size",
            was=None),
    ]  # fmt: skip

    @property
    def on_gpu(self) -> bool:
        """Whether the experts' counts stay on the GPU."""
        return self.expert_gemm in ("torch", "quack")

    @property
    def dispatcher_is_ours(self) -> bool:
        """Megatron is told allgather then, which gathers nothing where nothing is elsewhere; blocks/moe/layer.py."""
        return self.dispatcher in ("local", "gathered")

    @property
    def has_losses(self) -> bool:
        """Whether routers have losses of their own, which Megatron logs."""
        return self.balancing != "none" or self.z_loss_coeff is not None

    @property
    def gathers(self) -> bool:
        """Whether every rank of an expert group gets all tokens, and has rows for whatever the router may choose."""
        return self.dispatcher == "gathered"

    @property
    def _told(self) -> str:
        return "allgather" if self.dispatcher_is_ours else self.dispatcher

    def settings(self, site: Site) -> Iterator[Setting]:
        shared, pin = self.shared_expert_hidden_size or None, partial(Setting, beside="shared_expert_hidden_size")
        name = "moe_shared_expert_intermediate_size"
        yield Setting(name, shared, "one shared expert; 0 for none", "shared_expert_hidden_size")
        why = "a stream of its own beside the dispatch"
        yield pin("moe_shared_expert_overlap", self.shared_overlap, why, "shared_overlap")
        groups, chosen = self.group_limit or (None, None)
        yield Setting("moe_router_num_groups", groups, "group-limited routing", "group_limit")
        yield Setting("moe_router_group_topk", chosen, "groups that a token's experts are in", "group_limit")
        fields: dict[str, Any] = {"transformer.moe_router_load_balancing_type": self.balancing}
        name = "moe_router_load_balancing_type"
        yield Setting(name, (self.balancing,), "balancing loss", "balancing", fields=fields)
        why, fields = "unset means 0: no balancing", {"transformer.moe_aux_loss_coeff": self.aux_loss_coeff}
        yield Setting("moe_aux_loss_coeff", (self.aux_loss_coeff,), why, "aux_loss_coeff", fields=fields)
        pin = partial(Setting, beside="aux_loss_coeff")
        yield pin("moe_input_jitter_eps", None, "no jitter")
        yield Setting("moe_token_dispatcher_type", self._told, "Megatron's default is allgather", "dispatcher")
        pin = partial(Setting, beside="capacity_factor")
        yield pin("moe_apply_probs_on_input", False, "probabilities weigh the experts' output")

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        if not self.expert_bias:
            yield "expert_bias_update_rate", "there is no expert bias"

    def captured(self, line: Line, parts: frozenset[str]) -> bool:
        inside = ("input", "norm statistics", "norm output", "router", "shared expert", "shared expert's gate")
        return "moe_router" in parts and line.name in inside

    def packages(self) -> Iterator[Package]:
        if self.expert_gemm == "quack":
            for package in QUACK:
                yield Package(package, f"`{QUACK_KEY}`", OURS)

    def expects(self, site: Site) -> Mapping[str, Any]:
        groups, chosen = self.group_limit or (None, None)
        return {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": chosen,
            "moe_shared_expert_intermediate_size": self.shared_expert_hidden_size or None,
            "moe_shared_expert_overlap": self.shared_overlap,
            "moe_token_dispatcher_type": self._told,
        }

    def stands(self, layers: Sequence[Layer], site: Site) -> Mapping[str, Any]:
        placed = {"expert_parallel": site.expert, "expert_tensor_parallel": site.expert_tensor}
        placed["experts_per_rank"] = self.experts // site.expert
        return {"experts": self.experts, "top_k": self.top_k, **placed}

    def parts(self) -> Iterator[str]:
        yield "experts"
        if self.shared_expert_hidden_size:
            yield "shared_experts"

    def part(self, param: Param) -> str | None:
        if param.shard == "expert":
            return "experts"
        return "shared_experts" if ".shared_experts." in param.name else None

    def requantised(self, site: Site) -> tuple[int, int]:
        return 0, site.hidden_size if self.shared_expert_hidden_size and not site.keeps("shared_experts") else 0

    def alone(self, site: Site) -> Iterator[str]:
        if site.linear_bias and not self.grouped_gemm:
            yield "Megatron's spec of hybrid layers groups experts whatever is said, and grouped ones stop beside biases"

    def small(self, site: Site) -> Mapping[str, int]:
        widths = {"expert_hidden_size": 32, "shared_expert_hidden_size": 48}
        return {"experts": max(4, 2 * site.expert), "top_k": 2} | widths

    def _sizes(self, z: Sizes) -> Sizes:
        """E experts, k of them a token, f wide; a shared one of fs; u projections in; R rows a rank's experts get, or could get of gathered
        tokens, of width l or h."""
        z = z.own(E=self.experts, k=self.top_k, f=self.expert_hidden_size, fs=self.shared_expert_hidden_size, u=z.gates)
        z = z.own(l=self.latent_size) if self.latent_size else z
        if self.gathers:  # for whatever the router may choose
            return z.own(R=z.value("e Ts") * min(self.top_k, self.experts // z.site.expert))
        return z.own(
            R=z.value("k Ts et" if self.pad_to_capacity else "k Ts et imbalance") * (self.capacity_factor or 1)
        )

    @property
    def _width(self) -> str:
        """Of a routed expert's rows, in formulas."""
        return "l" if self.latent_size else "h"

    def params(self, z: Sizes, layer: Layer | None) -> Iterator[Param]:
        h, f, fs, count = z.site.hidden_size, self.expert_hidden_size, self.shared_expert_hidden_size, self.experts
        yield from z.norm("pre_mlp_layernorm.", h)
        yield Param("mlp.router.weight", (count, h), "replicated", "router")
        if latent := self.latent_size:
            for name, shape in (("fc1", (latent, h)), ("fc2", (h, latent))):
                yield Param(f"mlp.{name}_latent_proj.weight", shape, "replicated", "weight")
                if z.site.linear_bias:
                    yield Param(f"mlp.{name}_latent_proj.bias", shape[:1], "replicated", "other")
        width = latent or h
        yield Param("mlp.experts.linear_fc1.weight*", (z.gates * f, width), "expert", "weight", count)
        yield Param("mlp.experts.linear_fc2.weight*", (width, f), "expert", "weight", count)
        if z.site.linear_bias:
            yield Param("mlp.router.bias", (count,), "replicated", "other")
            yield Param("mlp.experts.linear_fc1.bias*", (z.gates * f,), "expert", "other", count)
            yield Param("mlp.experts.linear_fc2.bias*", (width,), "expert", "other", count)
        if fs:
            yield Param("mlp.shared_experts.linear_fc1.weight", (z.gates * fs, h), "tensor", "weight")
            yield Param("mlp.shared_experts.linear_fc2.weight", (h, fs), "tensor", "weight")
            if self.shared_expert_gate:
                yield Param("mlp.shared_experts.gate_weight", (1, h), "replicated", "router")

    def activations(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        if "moe" in z.recompute:
            yield from residual(z.own(w=2))
            return
        yield from residual(z.own(w=2), "layernorm")  # router and shared expert keep it in bf16, under FP8 too
        why = "logits, scores, an int64 sort over all experts, maps, probabilities"
        yield z.line("router", "Ts (22 E + 24 k) + 8 R", why, mark="" if self.router_dtype else UNMEASURED)
        experts = z.in_bf16("experts")
        yield experts.line(
            "rows for experts",
            f"w R {self._width}",
            "room for whatever the router may choose"
            if self.gathers
            else "sorted, as received; input of the first projection",
            bucket=ROUTING,
        )
        yield z.line("dispatch counts", "8 et e E", "tokens for each expert from each rank, int64", bucket=ROUTING)
        if self.latent_size:
            yield z.line("latents", "2 Ts l", "the experts' sum, input of the projection back", mark=UNMEASURED)
        mark = "" if z.site.activation == "squared_relu" else UNMEASURED
        yield z.line("first projection", "2 R u f / et", "input of the activation", mark=mark)
        if "moe_act" not in z.recompute:
            if z.gates == 1 and not self.fused_weighted_squared_relu:
                yield z.line("activation", "2 R f / et", "kept to weigh it by the router's probabilities", mark=mark)
            yield experts.line("weighed activation", "w R f / et", "input of the second projection", mark=mark)
        if self.shared_expert_hidden_size and "shared_experts" not in z.recompute:
            shared = z.in_bf16("shared_experts")
            yield shared.line("shared expert", "(2 u + w) T fs / t", "first projection and activation", mark=mark)
            if self.shared_expert_gate:
                why = "the shared expert's output, its gate and the gate's logit"
                yield z.line("shared expert's gate", "2 Ts h + 4 Ts", why, mark=UNMEASURED)

    def working(self, z: Sizes, layer: Layer | None) -> Iterator[Line]:
        z = self._sizes(z)
        x = self._width
        received = f" + 4 e Ts {x}" if self.gathers else f" + 2 R {x}" if z["e"] > 1 else ""
        why = (
            "permuted rows, the experts' output and the unsorted rows, all held by Python frames, and the shared output"
        )
        if self.latent_size:
            yield z.line("forward", "6 R l + 2 Ts h + 2 Ts l" + received, why, bucket=ROUTING, mark=UNMEASURED)
            yield z.line(
                "backward",
                "4 R l + 2 Ts h + 2 Ts l" + received,
                "the same on the way back",
                bucket=ROUTING,
                mark=UNMEASURED,
            )
            return
        yield z.line("forward", "2 (3 R + Ts) h" + received, why, bucket=ROUTING)
        yield z.line("backward", "2 (2 R + Ts) h" + received, "the same on the way back", bucket=ROUTING)
        if self.on_gpu and not z.site.lora:
            added = self.expert_gemm == "quack" and z.site.fused_grad_accumulation
            why = "a microbatch's gradients of the first projection, before they are added"
            if not added:
                yield z.line("backward", "2 E u f h", why, bucket=ROUTING, mark=UNMEASURED)
            bucketed = z.site.sharded and z.site.overlap_grad_reduce and not z.site.muon
            # Megatron pads the end of a bucket to a multiple of this; Muon's weights lie in no bucket.
            if bucketed and z.site.hidden_size * self.expert_hidden_size % lcm(128, int(z["Ne"])):
                if added:
                    yield z.line("backward", "4 E u f h", why + ", in fp32", bucket=ROUTING, mark=UNMEASURED)
                why = "a copy of a projection's weights, which the padded end of a bucket parts"
                yield z.line("forward", "2 E u f h", why, bucket=ROUTING, mark=UNMEASURED)

    def flops(self, z: Sizes, layer: Layer | None) -> Iterator[Work]:
        z = self._sizes(z)
        yield z.work("router", "2 h E", "", redone=("moe",))
        if self.latent_size:
            yield z.work("latents", "4 h l", "to the experts and back", redone=("moe",))
        yield z.work("experts", f"2 (u + 1) k {self._width} f", "the k active ones", redone=("moe",))
        if self.shared_expert_hidden_size:
            yield z.work("shared expert", "2 (u + 1) h fs", "", redone=("moe", "shared_experts"))
            if self.shared_expert_gate:
                yield z.work("shared expert's gate", "2 h", "", redone=("moe", "shared_experts"))
