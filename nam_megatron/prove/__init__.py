"""Does the layout of a plan compute the same model as one rank? python -m nam_megatron.prove conf=NAME."""
