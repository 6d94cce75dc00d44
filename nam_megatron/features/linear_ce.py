"""Output projection and cross entropy in one pass. Megatron 0.19.2 has it for GPT, for no hybrid."""

from nam_megatron.features import Switch


class LinearCe(Switch):
    """Output projection and cross entropy in one pass."""

    name = "linear_ce"
    missing = "the fused output layer"
