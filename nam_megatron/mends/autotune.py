"""A Triton kernel's configuration chosen without a clock, for runs that are equal to the last bit (torch side).

`triton.autotune` (Triton 3.6.0, runtime/autotuner.py) times each configuration of a kernel when a process first runs it. Two that are
nearly as fast change places from one process to the next, and where they add in another order the two runs part. TRITON_CACHE_AUTOTUNING=1
would keep the timings, on each host its own, but not those of kernels with a `pre_hook`, which are most of mamba-ssm's backward pass.
"""

from collections.abc import Callable
from typing import Any

from triton.runtime.autotuner import Autotuner

from nam_megatron.mends import Plan

FITS, FITS_NOT = [0.0] * 3, [float("inf")] * 3  # milliseconds: of the median and two quantiles


def install(plan: Plan) -> None:
    """Have every kernel take the middle one of its configurations or, where that does not fit, the next one.

    Lists of configurations go by the size of their tiles. A kernel that has run before keeps what it has.
    """
    prune = Autotuner.prune_configs

    def from_the_middle(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        found, self.nam_fits = prune(self, kwargs), False
        middle = len(found) // 2
        return [*found[middle:], *reversed(found[:middle])]

    def first_that_fits(self: Any) -> Callable[..., list[float]]:
        def time_of(call: Callable[[], None], quantiles: object) -> list[float]:
            if self.nam_fits:
                return FITS_NOT
            call()  # raises where it does not fit
            self.nam_fits = True
            return FITS

        return time_of

    def as_without_a_disk(self: Any, key: object, configs: object, choose: Callable[[], None]) -> bool:
        choose()
        return False

    Autotuner.nam_fits = False
    Autotuner.prune_configs = from_the_middle
    Autotuner.do_bench = property(first_that_fits)
    Autotuner.check_disk_cache = as_without_a_disk
