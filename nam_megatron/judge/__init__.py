"""Whether two plans are the same model, and what Megatron must hold of one."""
