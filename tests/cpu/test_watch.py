"""What a proof sees of a step, in real modules."""

import contextlib
from pathlib import Path

import torch
from harness import Case, on_ranks
from megatron.core.transformer.moe.moe_layer import MoELayer

from nam_megatron.compile.lower import translate
from nam_megatron.prove.worker import Side, Watch
from nam_megatron.recipe import load


def test_tokens_are_counted_where_a_graph_replays_the_router():
    """Behind such a graph Megatron goes on with what it put out (megatron-core 0.19.2, TransformerLayer._te_cuda_graph_replay)."""

    def job(rig):
        watch = Watch(Side(translate(load("nam56r_smoke")), Path(), "cpu"))
        (layer,) = (m for m in rig.model.modules() if isinstance(m, MoELayer))
        layer.config.cuda_graph_impl = "transformer_engine"
        x = torch.randn(8, 2, rig.config.hidden_size)
        said = []
        with contextlib.ExitStack() as watched:
            counts: dict[str, torch.Tensor] = {}
            watch._count([rig.model], counts, watched)
            layer(x)
            said.append(counts.pop("1").tolist())
            shared = layer.shared_experts_compute(x)
            hidden, probs = layer.preprocess(x, *layer.route(x))
            layer.cudagraph_tensor_store.set(hidden_states=hidden, probs=probs, shared_expert_output=shared)
            layer(hidden)
            said.append(counts.pop("1").tolist())
        assert "dispatch" not in vars(layer)
        return said

    ((eager, replayed),) = on_ranks(Case("E", microbatches=1), job)
    assert eager == replayed and sum(eager) == 16 * 2
