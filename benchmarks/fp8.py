"""What FP8 could gain at most: each projection of a preset in bf16 and in FP8, forward and backward, kernels and casts.

    python benchmarks/fp8.py [--out FILE] [--only PRESET ...]

One GPU, Transformer Engine's linear layers as training has them (tensorwise: current scaling; blockwise: 128 x 128 weights), gradients of
input and weight. The cast of a weight is left out, as if it were kept between the microbatches of a step: FP8 at its best. Experts: torch's
grouped GEMM in bf16, Transformer Engine's in FP8, rows spread evenly. Widths that 16 does not divide are rounded up. The sum over a
step of 65,536 tokens takes of each projection what is fastest; it leaves out that experts in FP8 have the host wait for counts, that a
step in FP8 is no CUDA graph, and what a fused norm before a projection would save. The output layer is not among them: Megatron 0.19.2
has no FP8 for it. What it makes of a measured step: benchmarks/tables.py.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.clock import Clock
from benchmarks.report import Report, parser
from nam_megatron.budget import static
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load
from nam_megatron.words.sizes import Sizes

STACKS = {"nam56r_fused": 2, "nam56r_native_dp_fused": 4}  # and their micro batches
STEP_TOKENS = 65536
LEAST = 256  # of either side of a matrix: routers and the like stay in bf16
REPETITIONS = 15


def projections(preset: str, micro: int) -> tuple[dict[tuple[str, int, int, int], int], int]:
    """(kind, rows, into, out) -> how many a microbatch passes, and the microbatches of a step."""
    plan = translate(load(preset, ["cluster=h200_1", f"schedule.micro_batch_size={micro}"])).plan
    tokens, moe = micro * plan.recipe.model.seq_length, plan.recipe.blocks.moe
    found: Counter[tuple[str, int, int, int]] = Counter()
    (stage,) = static.stages(plan)
    for kind, _, param in static.parts(plan, Sizes.of(plan.site), stage):
        if param.role != "weight" or len(param.shape) != 2 or min(param.shape) < LEAST:
            continue
        out, into = (-(-size // 16) * 16 for size in param.shape)
        if param.shard == "expert":  # all of a layer at once
            found[(f"{kind} experts", tokens * moe.top_k, into, out)] += 1
        else:
            found[(kind, tokens, into, out)] += param.count
    return dict(found), STEP_TOKENS // tokens


def ways(experts: int, rows: int, into: int, out: int) -> dict[str, Callable[[], object]]:
    """Forward and backward. experts: 0 for a dense projection."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    here = dict(device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(rows, into, **here, requires_grad=True), torch.randn(rows, out, **here)
    splits = [rows // max(experts, 1)] * experts

    def linear() -> Any:
        sizes = (into, out)
        more = dict(bias=False, params_dtype=torch.bfloat16)
        return te.GroupedLinear(experts, *sizes, **more) if experts else te.Linear(*sizes, **more)

    def fp8(scaling: Any) -> Callable[[], object]:
        made = linear()  # one of its own: it keeps its weights as they were cast last

        def step(first: bool = False) -> object:
            with te.autocast(enabled=True, recipe=scaling):
                y = made(x, *[splits] * bool(experts), is_first_microbatch=first)
            return torch.autograd.grad(y, [x, *made.parameters()], dy)

        step(first=True)
        return step

    weights = torch.randn(experts, out, into, **here, requires_grad=True) if experts else None
    ends = torch.tensor(splits, device="cuda").cumsum(0).to(torch.int32) if experts else None

    dense = None if experts else linear()

    def bf16() -> object:
        if dense is not None:
            return torch.autograd.grad(dense(x), [x, dense.weight], dy)
        return torch.autograd.grad(F.grouped_mm(x, weights.mT, offs=ends), [x, weights], dy)

    return {
        "bf16": bf16,
        "tensorwise": fp8(recipe.Float8CurrentScaling()),
        "blockwise": fp8(recipe.Float8BlockScaling()),
    }


def main() -> int:
    words = parser(__doc__, 500)
    words.add_argument(
        "--only", nargs="+", choices=STACKS, default=list(STACKS), help="of these presets (default: both)"
    )
    options = words.parse_args()
    report, clock = Report(options.out, options.seconds), Clock(REPETITIONS)
    report.host(step_tokens=STEP_TOKENS)
    for preset in options.only:
        found, microbatches = projections(preset, STACKS[preset])
        experts = translate(load(preset, [])).plan.recipe.blocks.moe.experts
        saved = 0.0
        for (kind, rows, into, out), count in sorted(found.items()):
            made = ways(experts if kind.endswith("experts") else 0, rows, into, out)
            ms = {}
            for name in list(made):
                ms[name] = clock(made.pop(name))
            gain = max(0.0, ms["bf16"] - min(ms.values())) * count * microbatches
            saved += gain
            report.add(
                "rows", name=f"{preset} {kind}: {rows} x {into} to {out}", a_microbatch=count, **ms, gain_ms_a_step=gain
            )
        report.add("sums", name=preset, gain_ms=saved)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
