"""Checkpoints in Hugging Face's form: export, import, check."""

KERNELS = ("torch", "nam_megatron")  # what may compute an exported model
