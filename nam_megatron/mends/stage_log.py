"""Losses of indexers and routers in the log of a pipeline whose stages do not all have one (torch side)."""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from nam_megatron.mends import Plan


def install(models: Sequence[torch.nn.Module], plan: Plan) -> None:
    """Let a pipeline stage without a DSA or an MoE layer take part in the log's sums of indexers' and routers' losses.

    Megatron 0.19.2 sums indexers' over the pipeline on the stages that have recorded one
    (DSAIndexerLossLoggingHelper.reduce_loss_in_tracker), and routers' as so many numbers as the model has layers where one was recorded,
    as it has MoE layers elsewhere (training_log and Megatron-Bridge's, MoEMetricsTracker.ensure_initialized): the first log line would
    wait for the others for ever.
    """
    config: TransformerConfig = models[0].config
    nothing = torch.zeros((), device=torch.cuda.current_device())
    if getattr(config, "dsa_indexer_loss_coeff", None):
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(nothing, 1, config.num_layers)
    if config.num_moe_experts:
        record, layers = get_moe_metrics_tracker().record, config.num_layers + (config.mtp_num_layers or 0)
        sequences = parallel_state.get_tensor_and_context_parallel_group()
        everything = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        record("load_balancing_loss", nothing, 1, layers, reduce_group=sequences)
        record("seq_load_balancing_loss", nothing, 1, layers, reduce_group=sequences)
        record("global_load_balancing_loss", nothing, 1, layers, reduce_group=everything, needs_dp_avg=False)
        record("z_loss", nothing, 1, layers, avg_group=everything)
