"""From a Hydra recipe of a hybrid language model to exactly what Megatron-Core must be told."""

__version__ = "0.1.0"
