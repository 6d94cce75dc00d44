"""Lint's split of a GPT over pipeline stages against Megatron's own."""

import pytest
from lint_cases import GPT
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from nam_megatron.lint import lint

SPLITS = {
    "even": (8, 4, 1, {}),
    "first": (7, 3, 1, {"num_layers_in_first_pipeline_stage": 1}),
    "both ends": (9, 3, 1, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 3}),
    "embedding counts": (7, 4, 1, {"account_for_embedding_in_pipeline_split": True}),
    "ends count": (6, 2, 2, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    "virtual": (12, 2, 3, {}),
}  # fmt: skip
FLAGS = {"num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
         "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers"}  # fmt: skip


def model(layers, pipeline, extra):
    flags = GPT | {"--num-layers": str(layers), "--pipeline-model-parallel-size": str(pipeline)} | extra
    words = (word for flag, value in flags.items() for word in ([flag] if value is True else [flag, f"'{value}'"]))
    return lint(f"torchrun --nproc-per-node {pipeline} pretrain_gpt.py {' '.join(words)}").model


@pytest.mark.parametrize("name", SPLITS)
def test_stages_are_those_that_megatron_builds(name):
    layers, pipeline, virtual, fields = SPLITS[name]
    flags = {f"--{FLAGS.get(k, k).replace('_', '-')}": v if v is True else str(v) for k, v in fields.items()}
    flags |= {"--num-virtual-stages-per-pipeline-rank": str(virtual)} if virtual > 1 else {}
    config = TransformerConfig(
        num_layers=layers, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=pipeline, pipeline_dtype=float,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None, **fields,
    )  # fmt: skip
    built = [
        get_num_layers_to_build(config, stage if virtual > 1 else None, rank)
        for stage in range(virtual)
        for rank in range(pipeline)
    ]
    assert list(model(layers, pipeline, flags).stage_sizes) == built


@pytest.mark.parametrize("text", ["Et*3|(tt|)*6mL", "Ettt|(tt|)*3tm|L", "E|t,t|(t|tt)*2|L", "Ettt|tttL"])
def test_stages_of_a_layout_are_those_that_megatron_reads(text):
    theirs = PipelineParallelLayerLayout(text, 2)
    built = [theirs.layout[rank][v].count(LayerType.decoder)
             for v in range(theirs.virtual_pipeline_model_parallel_size) for rank in range(2)]  # fmt: skip
    mtp = {"--mtp-num-layers": "1"} if "m" in text else {}
    flags = mtp | {
        "--pipeline-model-parallel-layout": text,
        "--num-experts": "4",
        "--moe-layer-freq": f"[0]*{sum(built)}",
    }
    ours = model(sum(built), 2, flags)
    assert list(ours.stage_sizes) == built and len(ours.cuts) == len(built) - 1
