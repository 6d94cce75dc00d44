"""What Megatron's MLA reads of YaRN and no argument of Megatron's sets (torch side).

megatron-core 0.19.2, training/argument_utils.py: `--yarn-original-max-position-embeddings` and the betas go to GQA's config alone; MLA's
has fields for them, which stay at 4096, 32 and 1. A stock launch of Kimi-K2, whose betas are both 1, trains other angles.
"""

from argparse import Namespace
from functools import wraps
from typing import Any

from megatron.training import argument_utils

from nam_megatron.mends import Plan

FIELDS = ("original_max_position_embeddings", "beta_fast", "beta_slow")


def install(plan: Plan | None) -> None:
    """Hand MLA's config what the arguments say, where Megatron hands GQA's its own."""
    upstream = argument_utils._apply_yarn_config_from_args

    @wraps(upstream)
    def applied(config: Any, args: Namespace) -> None:
        upstream(config, args)
        if getattr(config, "rope_type", None) == "yarn" and args.yarn_original_max_position_embeddings is not None:
            for name in FIELDS:
                value = getattr(args, f"yarn_{name}")
                assert value is not None, f"a plan with YaRN says {name}"
                setattr(config, name, value)

    argument_utils._apply_yarn_config_from_args = applied
