"""Layout bugs, each planted in the ranks of a layout: what an upstream mistake or one of ours would do, and nothing that crashes.

A bug is a function that patches Megatron or our layers in a process that ends soon. CASES are the layouts they are planted in.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from nam_megatron.prove.proof import Bench
from nam_megatron.recipe import load

# (preset, overrides, steps): the author stack in two tensor ranks; native layers, experts and data over two ranks; two copies of each
# expert; two stages; two ranks that share each sequence.
CASES = {
    "tensor": ("nam56r", ("cluster=h200_2", "parallel.tensor=2", "parallel.sequence=true"), 1),
    "data": ("nam56r_native_dp", ("cluster=h200_2", "parallel.expert=2"), 2),
    "copies of experts": ("nam56r_native_dp", ("cluster=h200_4", "parallel.expert=2"), 1),
    "pipeline": ("nam56r", ("cluster=h200_2", "parallel.pipeline=2"), 1),
    "context": ("nam56r", ("cluster=h200_2", "parallel.context=2"), 1),
    "sharded": ("nam56r", ("cluster=h200_2", "feature.megatron_fsdp.enabled=true", "parallel.expert=2"), 1),
    "sharded tensors": (
        "nam56r",
        ("cluster=h200_2", "feature.megatron_fsdp.enabled=true", "parallel.tensor=2", "parallel.sequence=true"),
        1,
    ),
}


# The package has a function of that name.
FINALIZE = "megatron.core.distributed.finalize_model_grads"


@dataclass(frozen=True)
class Bug:
    """kind: the kind of layer that the command has to name, where the bug is in one. resumed: it is one of reading a checkpoint."""

    case: str
    plant: Callable[[], None]
    kind: str | None = None
    what: str | None = None
    resumed: bool = False


BUGS: dict[str, Bug] = {}


def bug(case: str, kind: str | None = None, what: str | None = None, resumed: bool = False) -> Callable:
    def keep(plant: Callable[[], None]) -> Callable[[], None]:
        BUGS[plant.__name__] = Bug(case, plant, kind, what, resumed)
        return plant

    return keep


def around(owner: Any, name: str) -> Callable:
    """Replace `owner.name` by a function that gets the old one first."""

    def put(wrapper: Callable) -> None:
        old = getattr(owner, name)
        setattr(owner, name, wraps(old)(lambda *args, **named: wrapper(old, *args, **named)))

    return put


def with_gradients(change: Callable[[str, torch.nn.Parameter], None], after: bool = True) -> None:
    """Let `change` see every parameter when its gradient is complete, or just before the tensor ranks' sum."""
    finalize = import_module(FINALIZE)

    @around(finalize, "_allreduce_non_tensor_model_parallel_grads")
    def changed(old, model, *args, **named):
        def every() -> None:
            for chunk in model:
                for name, parameter in chunk.named_parameters():
                    change(name, parameter)

        if not after:
            every()
        old(model, *args, **named)
        if after:
            every()


# Tensor and sequence parallelism -------------------------------------------------------------------------------------


@bug("tensor", what="gradient")
def gradients_of_replicated_weights_are_not_summed():
    finalize = import_module(FINALIZE)

    finalize._allreduce_non_tensor_model_parallel_grads = lambda *_, **__: None


@bug("tensor", kind="MTP mla", what="gradient")
def latent_norms_count_twice():
    """What Megatron does to them under tensor without sequence parallelism."""

    def double(name, p):
        if "q_layernorm" in name or "kv_layernorm" in name:
            p.main_grad *= 2

    with_gradients(double)


@bug("tensor", kind="moe", what="gradient")
def the_routers_gradient_stays_on_its_rank():
    def forget(name, p):
        if "router.weight" in name:
            p.sequence_parallel = False

    with_gradients(forget, after=False)


@bug("tensor", kind="mamba3", what="output")
def a_checkpoint_gives_each_rank_the_others_heads():
    from nam_megatron.blocks.mamba3.layer import Mamba3Mixer

    @around(Mamba3Mixer, "sharded_state_dict")
    def swapped(old, self, prefix="", *args, **named):
        found, key = old(self, prefix, *args, **named), f"{prefix}D"
        there = found[key].global_offset[-1]
        here = (*found[key].global_offset[:-1], found[key].local_shape[-1] - there)
        found[key] = replace(found[key], global_offset=here)
        return found


@bug("tensor", kind="dsa", what="output")
def a_reusing_layer_gets_the_first_microbatchs_top_k():
    from nam_megatron.blocks.dsa.layer import Shelf

    def put(self, source, selection):
        self.selections.setdefault(source, selection)

    Shelf.put, Shelf.take = put, lambda self, source, layer: self.selections[source]


@bug("tensor", kind="moe", what="gradient")
def the_balancing_loss_is_dropped():
    from megatron.core.transformer.moe.router import TopKRouter

    TopKRouter.attach_and_log_load_balancing_loss = lambda self, activation, *_, **__: activation


@bug("tensor", kind="dsa", what="gradient")
def the_indexer_learns_from_the_first_ranks_heads():
    """This rank's heads alone would be no bug: the loss is linear in them, and ranks' gradients are averaged."""
    from nam_megatron.blocks.dsa import naive

    @around(naive, "indexer_kl")
    def first(old, q, k, w, scores, query, key, scale, group, factor):
        query = query.contiguous().clone()
        torch.distributed.broadcast(query, 0, group=group)
        return old(q, k, w, scores, query, key, scale, None, factor)


@bug("tensor", kind="dsa", what="gradient")
def the_indexers_loss_counts_twice():
    from nam_megatron.blocks.dsa import naive

    around(naive, "indexer_kl")(lambda old, *args: 2 * old(*args))


@bug("tensor", what="gradient")
def mtps_loss_is_dropped():
    from megatron.core.transformer import multi_token_prediction as mtp

    mtp.MTPLossAutoScaler.apply = lambda output, loss: output


@bug("tensor", what="output")
def the_sequence_is_gathered_in_another_order():
    from megatron.core.tensor_parallel import mappings

    around(mappings, "_gather_along_first_dim")(lambda old, *a, **k: torch.cat(old(*a, **k).chunk(2)[::-1]))


@bug("tensor", what="output")
def row_parallel_outputs_are_not_summed():
    from megatron.core.tensor_parallel import layers

    def halves(x, group=None, **_):
        return x.chunk(group.size())[group.rank()] * 1.0

    layers.reduce_scatter_to_sequence_parallel_region = halves


@bug("tensor", what="loss")
def the_softmax_sums_over_this_ranks_words():
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Loss

    @around(Loss, "calculate_cross_entropy_loss")
    def alone(old, exp_logits, predicted, sums):
        return old(exp_logits, predicted, exp_logits.sum(-1))


@bug("tensor", kind="mamba3", what="output")
def a_recurrence_sees_its_own_positions_angles_alone():
    from nam_megatron.blocks.mamba3.layer import Mamba3Mixer

    def repeated(self, packed):
        rest, own = packed.split([packed.size(-1) - self.parts["angles"], self.parts["angles"]], -1)
        return torch.cat([rest, own, own], -1)

    Mamba3Mixer._with_all_angles = repeated


@bug("tensor", kind="mamba3", what="gradient")
def mamba3s_shared_norms_lose_the_other_ranks_groups():
    def forget(name, p):
        if "C_norm" in name:
            p.sequence_parallel = False

    with_gradients(forget, after=False)


@bug("tensor", what="norm")
def a_shard_is_not_marked_as_one():
    """As Transformer Engine's sinks are, which Megatron's norm counts on the first rank alone."""
    from megatron.core.distributed import DistributedDataParallel as Ddp

    @around(Ddp, "__init__")
    def made(old, self, *args, **named):
        old(self, *args, **named)
        parameter = next(p for name, p in self.named_parameters() if name.endswith("linear_proj.weight"))
        parameter.tensor_model_parallel = False


# Data and experts ----------------------------------------------------------------------------------------------------


def _scaled(which: str, factor: float) -> None:
    from megatron.core.distributed import DistributedDataParallel as Ddp

    @around(Ddp, "__init__")
    def made(old, self, *args, **named):
        old(self, *args, **named)
        for buffer in getattr(self, which):
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor *= factor


@bug("data", what="gradient")
def data_parallel_gradients_are_summed_not_averaged():
    _scaled("buffers", 2.0)


@bug("data", kind="moe", what="gradient")
def experts_gradients_are_divided_by_their_own_ranks():
    _scaled("expert_parallel_buffers", 2.0)


@bug("data", what="gradient")
def gradients_are_not_reduced():
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    Group.start_grad_sync = Group.finish_grad_sync = lambda self, *_, **__: None


@bug("data", what="gradient")
def one_replica_adds_nothing():
    """Of a run nobody notices it: all ranks have the same weights afterwards."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    @around(Group, "start_grad_sync")
    def lost(old, self, *args, **named):
        for bucket in self.buckets:
            bucket.grad_data.mul_(torch.distributed.get_rank() != 1)
        return old(self, *args, **named)


@bug("copies of experts", kind="moe", what="gradient")
def copies_of_an_expert_keep_their_own_gradients():
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    for name in ("start_grad_sync", "finish_grad_sync"):

        @around(Group, name)
        def alone(old, self, *args, **named):
            experts = not all(getattr(p, "allreduce", True) for bucket in self.buckets for p in bucket.params)
            return None if experts else old(self, *args, **named)


@bug("data", what="weight")
def the_schedule_counts_one_ranks_samples():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    around(OptimizerParamScheduler, "step")(lambda old, self, increment: old(self, increment // 2))


@bug("data", what="weight")
def updated_weights_are_not_gathered():
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    Group.start_param_sync = Group.finish_param_sync = lambda self, *_, **__: None


def _unsummed(old, *args, **named):
    reduce, torch.distributed.all_reduce = torch.distributed.all_reduce, lambda *_, **__: None
    try:
        return old(*args, **named)
    finally:
        torch.distributed.all_reduce = reduce


@bug("data", kind="moe", what="weight")
def the_experts_bias_sees_this_ranks_tokens():
    around(import_module(FINALIZE), "get_updated_expert_bias")(_unsummed)


@bug("data", kind="moe", what="output")
def each_rank_holds_the_others_experts():
    from nam_megatron.prove.cpu_modules import GroupedLinear

    @around(GroupedLinear, "sharded_state_dict")
    def swapped(old, self, *args, **named):
        found = old(self, *args, **named)
        for tensor in found.values():
            axis = tensor.prepend_axis_num - 1
            place = list(tensor.global_offset)
            place[axis] = (place[axis] + self.num_gemms) % tensor.global_shape[axis]
            tensor.global_offset = tuple(place)
        return found


@bug("data", what="gradient")
def routed_probabilities_lose_half_their_gradient_on_the_way():
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    @around(Dispatcher, "token_dispatch")
    def half(old, self, rows, probs):
        return old(self, rows, 0.5 * probs + 0.5 * probs.detach())


@bug("data", kind="moe", what="gradient")
def the_balancing_loss_counts_twice():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    around(MoEAuxLossAutoScaler, "set_loss_scale")(lambda old, scale: old(2 * scale))


@bug("data", what="weight")
def the_norm_that_clips_is_of_this_ranks_shard():
    from megatron.core.optimizer import optimizer

    around(optimizer, "get_grad_norm_fp32")(_unsummed)


@bug("data", kind="embedding", what="output")
def all_ranks_read_the_same_samples():
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler as Sampler

    @around(Sampler, "__init__")
    def first(old, self, *args, **named):
        old(self, *args, **named | {"data_parallel_rank": 0})


@bug("data", what="gradient")
def a_microbatchs_gradient_is_lost():
    from nam_megatron.runtime import pretrain

    seen = []

    @around(pretrain, "loss_func")
    def lost(old, *args):
        loss, tokens, report = old(*args)
        seen.append(loss)
        return loss * (len(seen) % 2), tokens, report


@bug("data", resumed=True, what="weight")
def adams_moments_are_not_read():
    from megatron.training import training

    @around(training, "load_checkpoint")
    def forgotten(old, model, optimizer, *args, **named):
        step = old(model, optimizer, *args, **named)
        for part in optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
        return step


@bug("data", resumed=True, what="weight")
def adams_step_begins_anew():
    from megatron.training import training

    @around(training, "load_checkpoint")
    def forgotten(old, model, optimizer, *args, **named):
        step = old(model, optimizer, *args, **named)
        for part in optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                group["step"] = 0
        return step


# Pipeline ------------------------------------------------------------------------------------------------------------


@bug("pipeline")
def a_stage_computes_the_first_microbatch_again():
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    kept = []

    @around(P2PCommunicator, "_communicate")
    def stale(old, self, **named):
        before, after, *rest = old(self, **named)
        if before is not None:
            kept.append(before)
            before = kept[0].detach().clone().requires_grad_()
        return before, after, *rest


@bug("pipeline", kind="embedding", what="gradient")
def the_embedding_of_mtp_is_another_than_the_first_stages():
    finalize = import_module(FINALIZE)

    finalize._allreduce_word_embedding_grads = lambda *_, **__: None


@bug("pipeline", what="gradient")
def a_stage_gets_half_the_gradient():
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    @around(P2PCommunicator, "_communicate")
    def half(old, self, **named):
        before, after, *rest = old(self, **named)
        return before, None if after is None else after * 0.5, *rest


# A sequence over two ranks ---------------------------------------------------------------------------------------------


@bug("context", what="output")
def chunks_stay_in_the_order_of_the_ranks():
    from nam_megatron.runtime import context

    context._in_order = lambda x, c: x


@bug("context", what="gradient")
def what_others_do_with_my_keys_is_lost():
    from nam_megatron.runtime import context

    around(context, "gather_from_sequence_parallel_region")(lambda old, x, group: old(x, False, group))


@bug("context", kind="dsa", what="output")
def a_query_sees_the_keys_of_the_others_chunk():
    from nam_megatron.blocks.dsa import layer

    around(layer, "own_chunks")(lambda old, group: (1 - group.rank(), 2 + group.rank()))


@bug("context", kind="m2rnn", what="output")
def every_rank_takes_the_first_ranks_heads():
    from nam_megatron.blocks.m2rnn import layer

    around(layer, "share")(lambda old, x, group: x.chunk(group.size())[0])


@bug("context", kind="m2rnn", what="output")
def the_norm_over_all_heads_is_of_this_ranks():
    from nam_megatron.blocks.m2rnn.layer import M2RnnMixer

    @around(M2RnnMixer, "_gate")
    def alone(old, self, *args):
        self.head_group = self.tp_group
        return old(self, *args)


@bug("context", kind="mamba3", what="gradient")
def biases_have_the_gradients_of_one_ranks_heads():
    with_gradients(lambda name, p: p.main_grad.mul_(0.5) if name.endswith("mixer.B_bias") else None)


@bug("context", what="gradient")
def the_mean_is_of_each_ranks_own_tokens():
    from nam_megatron.mends import context

    context._mean = lambda count, group: count


@bug("context", kind="dsa", what="gradient")
def the_indexers_loss_counts_once_for_each_rank():
    from nam_megatron.mends import context

    context._without_ranks = lambda group: None


# Megatron-FSDP as 0.19.2 has it -----------------------------------------------------------------------------------------


@bug("sharded", kind="moe", what="gradient")
def a_sum_is_scaled_with_each_microbatch():
    from nam_megatron.mends import fsdp

    fsdp._scale_once = lambda *_: None


@bug("sharded tensors", kind="dsa", what="gradient")
def what_ranks_average_is_summed():
    from nam_megatron.mends import fsdp

    fsdp.AVERAGED = "no_such_mark"


def found(bench: Any, bug: Bug) -> tuple[bool, str]:
    """Whether the command finds a bug, and names what the bug says it has to; and what it says."""
    part = bench.judged((bench.resumed if bug.resumed else bench.start)(bug.plant))
    first = part.first
    if part.broken or first is None:
        return False, part.broken or "everything agrees"
    named = bug.kind in (None, first.kind) and bug.what in (None, first.what)
    return named, f"{first.what} of {first.name}, step {first.step}, {first.kind}: off by {first.off:.1e}"


def main() -> None:
    """Plant every bug: python tests/prove/planted.py [FILE]"""
    said = []
    for case, (preset, overrides, steps) in CASES.items():
        with Bench(load(preset, overrides), steps=steps) as bench:
            bench.limit_s = 120.0  # a bug that has ranks wait for each other is none of these
            assert not bench.begin().broken
            assert not (first := bench.start().first), first
            for name, bug in BUGS.items():
                if bug.case == case:
                    ok, text = found(bench, bug)
                    said.append({"bug": name, "case": case, "found": ok, "said": text})
                    print(f"{'found ' if ok else 'MISSED'} {name}: {text}", flush=True)
    print(f"{sum(s['found'] for s in said)} of {len(said)} found")
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps(said, indent=1) + "\n")
    sys.exit(not all(s["found"] for s in said))


if __name__ == "__main__":
    main()
