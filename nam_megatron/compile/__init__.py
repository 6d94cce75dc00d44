"""A config to a plan to what Megatron is told: compose, sources, plan, lower, argv."""
