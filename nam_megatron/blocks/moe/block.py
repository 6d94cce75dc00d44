"""Mixture of experts: Megatron's MoELayer with a shared expert, symbol `E`."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nam_megatron.blocks import Block, divides
from nam_megatron.errors import Problem
from nam_megatron.setting import Setting


class Moe(Block):
    kind: ClassVar[str] = "moe"
    symbol: ClassVar[str] = "E"
    title: ClassVar[str] = "MoE"

    experts: PositiveInt
    top_k: PositiveInt
    expert_hidden_size: PositiveInt
    shared_expert_hidden_size: NonNegativeInt
    score_function: Literal["sigmoid", "softmax"]
    expert_bias: bool
    expert_bias_update_rate: NonNegativeFloat
    router_dtype: Literal["fp32", "fp64"]
    balancing: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
    aux_loss_coeff: NonNegativeFloat
    dispatcher: Literal["alltoall", "allgather"]
    grouped_gemm: bool
    permute_fusion: bool
    capacity_factor: PositiveFloat | None

    def settings(self, plan) -> Iterator[Setting]:
        yield Setting("num_experts", self.experts, "routed experts", "experts")
        yield Setting("moe_router_topk", self.top_k, "experts per token", "top_k")
        yield Setting(
            "moe_ffn_hidden_size", self.expert_hidden_size, "unset means ffn_hidden_size", "expert_hidden_size"
        )
        shared = self.shared_expert_hidden_size or None
        yield Setting(
            "moe_shared_expert_intermediate_size", shared, "one shared expert; 0 for none", "shared_expert_hidden_size"
        )
        yield Setting("moe_shared_expert_gate", False, "the shared expert is added ungated")
        yield Setting("moe_shared_expert_overlap", False, "no overlap of the shared expert with the dispatch")
        yield Setting(
            "moe_router_score_function", self.score_function, "Megatron's default is softmax", "score_function"
        )
        yield Setting("moe_router_pre_softmax", False, "scores are normalised over the chosen experts")
        yield Setting(
            "moe_router_enable_expert_bias", self.expert_bias, "bias that balances without a loss", "expert_bias"
        )
        yield Setting(
            "moe_router_bias_update_rate", self.expert_bias_update_rate, "step of that bias", "expert_bias_update_rate"
        )
        yield Setting("moe_router_dtype", self.router_dtype, "unset means the parameters' dtype", "router_dtype")
        yield Setting("moe_router_load_balancing_type", (self.balancing,), "balancing loss", "balancing")
        yield Setting("moe_aux_loss_coeff", (self.aux_loss_coeff,), "unset means 0: no balancing", "aux_loss_coeff")
        yield Setting("moe_z_loss_coeff", None, "no z-loss")
        yield Setting("moe_input_jitter_eps", None, "no jitter")
        yield Setting("moe_router_topk_scaling_factor", None, "no scaling of the router's weights")
        yield Setting("moe_router_num_groups", None, "no group-limited routing")
        yield Setting("moe_token_dispatcher_type", self.dispatcher, "Megatron's default is allgather", "dispatcher")
        yield Setting("moe_grouped_gemm", self.grouped_gemm, "all local experts in one GEMM", "grouped_gemm")
        yield Setting("moe_permute_fusion", self.permute_fusion, "TE's fused permutation", "permute_fusion")
        yield Setting("moe_expert_capacity_factor", self.capacity_factor, "unset: dropless", "capacity_factor")
        yield Setting("moe_pad_expert_input_to_capacity", False, "no padding to the capacity")
        yield Setting("moe_apply_probs_on_input", False, "probabilities weigh the experts' output")
        yield Setting("moe_latent_size", None, "experts at full width")

    def check(self, plan) -> Iterator[Problem]:
        at, p = "model.blocks.moe.", plan.recipe.parallel
        if self.top_k > self.experts:
            yield Problem(f"top-k {self.top_k} of {self.experts} experts", at + "top_k")
        yield from divides(at + "experts", self.experts, p.expert, "experts", "parallel.expert")
        yield from divides(
            at + "expert_hidden_size",
            self.expert_hidden_size,
            p.expert_tensor,
            "expert width",
            "parallel.expert_tensor",
        )
        yield from divides(
            at + "shared_expert_hidden_size",
            self.shared_expert_hidden_size,
            p.tensor,
            "shared expert width",
            "parallel.tensor",
        )
        if self.expert_bias and self.score_function != "sigmoid":
            yield Problem("an expert bias needs sigmoid scores", at + "expert_bias", f"set `{at}expert_bias=false`")
        if self.top_k == 1 and self.score_function == "softmax":
            yield Problem(
                "softmax over one chosen expert has no gradient", at + "top_k", "use sigmoid scores or top-k above 1"
            )
        if self.balancing == "none" and self.aux_loss_coeff:
            yield Problem(
                f"aux_loss_coeff {self.aux_loss_coeff} without a balancing loss", at + "aux_loss_coeff", "set it to 0.0"
            )
        if p.tensor > 1 and not p.sequence:
            yield Problem(
                "MoE under tensor parallelism trains only with sequence parallelism",
                "parallel.sequence",
                "set `parallel.sequence=true`",
            )
