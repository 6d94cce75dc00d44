"""What the server of tests/command.py has composed before it forks: the first time, Hydra and its parsers cost more than the run."""

from nam_megatron.compile.compose import composed

for preset in ("nam56r_smoke", "nam56r", "nam56r_native_dp"):
    composed("translate", [f"preset={preset}"])
