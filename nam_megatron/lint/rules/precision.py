"""Precision and kernels."""

import re
from collections.abc import Iterator

from nam_megatron.lint.follow import holes
from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.laws import law
from nam_megatron.lint.rules.rule import CONFIG, COST, FAIL, VALIDATE, Rule, each
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import Args

FP8_ONLY = ("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")

# What deterministic mode takes of the environment, where a launch sets it.
DETERMINISTIC = {
    "NCCL_ALGO": r"\s*(Ring|CollnetDirect|CollnetChain|\^NVLS)\s*(,\s*(Ring|CollnetDirect|CollnetChain|\^NVLS)\s*)*",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8|:16:8",
    "MAMBA_DETERMINISTIC": "(1.*)?",
}


def _deterministic(a: Args, m: Model) -> Iterator[str]:
    if a.deterministic_mode:
        yield from (a.written(n) + "\t" for n in ("cross_entropy_loss_fusion", "tp_comm_overlap") if getattr(a, n))
        for name, accepted in DETERMINISTIC.items():
            value = a.launch.env.get(name)
            if value is not None and not holes(value) and not re.fullmatch(accepted, value):
                yield f"{name}={value}\t\tunset {name}"


def _without_fp8(a: Args, m: Model) -> Iterator[str]:
    if not a.fp8:
        yield from each(a, (*FP8_ONLY, *["first_last_layers_bf16"] * (not a.fp4)))
    elif a.transformer_impl == "local" and not m.hybrid:
        yield f"{a.written('fp8')}\tno layer of `--transformer-impl local` computes in it\tleave `--transformer-impl local` out"


def _edges(a: Args, m: Model) -> Iterator[str]:
    if a.fp8 and a.first_last_layers_bf16:
        most = m.num_layers // m.pp
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if not 0 <= getattr(a, name) <= most:
                yield f"{a.written(name)}\ta pipeline stage has {most}"


HOPPER = re.compile(r"(?<![a-z0-9])(H[12]00|H800|H20|GH200|hopper|sm_?90a?)(?![a-z0-9])", re.IGNORECASE)


def _chip(a: Args, m: Model) -> Iterator[str]:
    """Formats of numbers that the device which the launch names does not have."""
    named = HOPPER.search(a.launch.text)
    if named and not m.names_blackwell:
        if a.fp4:
            yield f"{a.written('fp4')}\t{named[0]} has no FP4\tuse FP8"
        if a.fp8 and a.fp8_recipe == "mxfp8":
            yield f"--fp8-recipe mxfp8\t{named[0]} has no block-scaled FP8 of that kind\tuse `--fp8-recipe blockwise` or `tensorwise`"


RULES = (
    Rule("wrong-chip", FAIL, "fp8_recipe|fp4", _chip, "the device that this launch names cannot compute it",
        "use a format that it has",
        "transformer_engine 2.20 pytorch/quantization.py check_mxfp8_support, check_nvfp4_support"),
    Rule("deterministic", FAIL, "deterministic_mode", _deterministic, "deterministic mode refuses it", "leave it out",
        "training/determinism.py"),
    Rule("fp8-edges", FAIL, "num_layers_at_start_in_bf16", _edges, "more layers stay in bf16 than a pipeline stage has",
        "lower it", CONFIG),
    *map(trap, ("fp32", "two-precisions")),
    Rule("fp8-flags-ignored", COST, "", _without_fp8, "ignored: FP8 is not on", "add `--fp8-format hybrid`", CONFIG),
    *map(trap, ("fp8-gather-without-fp8", "fp8-and-fp4")),
    Rule("fp8-mamba-width", FAIL, "mamba_num_heads|fp8",
        lambda a, m: bool(a.fp8)
            and m.mamba
            and not m.pads_mamba
            and m.mamba_projection % 16 > 0
            and f"2 heads x width + 2 groups x state + heads = {m.mamba_projection}",
        "FP8 wants Mamba's input projection in multiples of 16", "choose the heads so, e.g. a multiple of 16",
        "core/ssm/mamba_mixer.py"),
    Rule("fp8-delayed-edges", FAIL, "first_last_layers_bf16", law("fp8-delayed-bf16-layers"),
        "delayed scaling, the default recipe, refuses bf16 edge layers", "add `--fp8-recipe tensorwise`", CONFIG),
    Rule("fp8-delayed-recompute", FAIL, "recompute_modules", law("fp8-delayed-discarding"),
        "delayed scaling, the default recipe, refuses their recompute", "add `--fp8-recipe tensorwise`", CONFIG),
    Rule("fp8-gather", FAIL, "fp8_param_gather", law("fp8-weights-unsharded"), "needs sharded weights",
        "add `--use-distributed-optimizer`", VALIDATE),
    *map(trap, ("fused-cross-entropy-te",)),
)  # fmt: skip
