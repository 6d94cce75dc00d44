"""What touches the world: hosts, processes, files outside the checkout. Nothing else in this repository does."""

import nam_megatron  # noqa: F401  first: a Ctrl-C while the rest is imported is no traceback
