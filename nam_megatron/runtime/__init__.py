"""Torch side: everything that imports torch or Megatron at module level, but for the layers in blocks/."""
