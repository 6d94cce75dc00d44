"""Checkpoints in Hugging Face's form: export, import, check."""
