"""What Megatron's MLA reads of YaRN and no argument of Megatron's sets (torch side).

megatron-core 0.19.2, training/argument_utils.py: `--yarn-original-max-position-embeddings` and the betas go to GQA's config alone; MLA's
has fields for them, which stay at 4096, 32 and 1. A stock launch of Kimi-K2, whose betas are both 1, trains other angles.
"""

from argparse import Namespace
from typing import Any

FIELDS = ("original_max_position_embeddings", "beta_fast", "beta_slow")


def provide(config: Any, args: Namespace) -> None:
    """Hand MLA's config what the arguments say; another config is left alone."""
    if getattr(config, "rope_type", None) == "yarn":
        for name in FIELDS:
            value = getattr(args, f"yarn_{name}")
            assert value is not None, f"a plan with YaRN says {name}"
            setattr(config, name, value)
