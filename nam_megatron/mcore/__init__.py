"""One file per Megatron version."""
