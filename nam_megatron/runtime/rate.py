"""Our count of the model's operations in Megatron's step line, beside Megatron's own.

Megatron's leaves out whole layers of these families (budget/cost.py says which), so its TFLOP/s compares no two of them.
"""

import re

# Of megatron-core 0.19.2's `training_log`: what our figure is made of, and the field that it stands behind where it is there.
STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+) \|(?: throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \|)?")
BATCH = re.compile(r"global batch size: +(\d+) \|")
NAME = "model TFLOP/s/GPU"


def beside(line: str, operations: float) -> str:
    """A step line with the rate in it; any other line as it is."""
    step, batch = STEP.search(line), BATCH.search(line)
    if not step or not batch or not float(step[1]):
        return line
    rate = operations * int(batch[1]) / (float(step[1]) / 1e3) / 1e12
    return f"{line[: step.end()]} {NAME}: {rate:.1f} |{line[step.end() :]}"
