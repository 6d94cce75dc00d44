"""The same tokens through Megatron's model and through the export: where do they part? (torch side)

Megatron's model is built from the plan, on one device whatever the layout was, from the checkpoint's weights.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nam_megatron.argv import argv, load_plan
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.hf import describe, distributed
from nam_megatron.hf.export import differences, plan_of
from nam_megatron.hf.opened import open_model
from nam_megatron.lower import Lowering, translate
from nam_megatron.recipe import from_tree, to_tree

# Worst that passes: of bf16 what the issue of every exporter asks for, of fp32 the rounding of sums in another order.
COSINE, KL, RELATIVE = 0.9999, 1e-3, 1e-5
OURS = ("mla", "dsa", "mamba3", "m2rnn")


@dataclass(frozen=True)
class Run:
    """logits [b, s, vocabulary]; layers: each layer's output [b, s, h]; ahead: the hidden states of the MTP depths. fp32, on the CPU."""

    logits: Tensor
    layers: tuple[Tensor, ...]
    ahead: tuple[Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    """cosine: the median over positions, and the least; kl: mean over positions; relative: largest difference over the largest
    value. greedy: share of positions with the same best token. layers, ahead: relative, by layer and MTP depth.

    In bf16 a rounding may turn a choice, of an expert or of a key, and the position is off by what was chosen: so the median.
    """

    dtype: str
    cosine: float
    least: float
    kl: float
    relative: float
    greedy: float
    layers: tuple[float, ...]
    ahead: tuple[float, ...]

    @property
    def passed(self) -> bool:
        if self.dtype == "fp32":
            return max((self.relative, *self.ahead)) <= RELATIVE
        return self.cosine >= COSINE and self.kl <= KL

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def check(checkpoint: Path, export: Path, tokens: Tensor, dtype: str, device: str) -> Outcome:
    """Compare an export with the checkpoint it was made of. tokens: [b, s] on the CPU. Raises Refused."""
    step = distributed.step_folder(checkpoint)
    lowering = load_plan(plan_of(checkpoint, step))
    raise_if(describe.objections(lowering.plan))
    raise_if(differences(export, describe.config(lowering.plan)))
    theirs = megatron(one_device(lowering, dtype), step, tokens, dtype)
    return compare(theirs, exported(export, tokens, dtype, device), dtype)


def exported(path: Path, tokens: Tensor, dtype: str, device: str) -> Run:
    """The export's side."""
    model = open_model(path, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], device)
    with torch.no_grad():
        out = model(tokens.to(device), output_hidden_states=True)
        ahead = model(tokens.to(device), mtp=True, logits_to_keep=1).hidden_states if model.config.mtp_depths else ()
    return Run(*_kept(out.logits, out.hidden_states[1:], ahead))


def _kept(logits: Tensor, *groups: Any) -> tuple:
    return logits.float().cpu(), *(tuple(x.float().cpu() for x in group) for group in groups)


def compare(a: Run, b: Run, dtype: str) -> Outcome:
    x, y = a.logits.flatten(0, 1), b.logits.flatten(0, 1)
    if not (x.isfinite().all() and y.isfinite().all()):
        raise Refused(Problem("logits that are not finite: these weights are of no use"))
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    cosine = torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1)
    return Outcome(
        dtype,
        cosine.median().item(),
        cosine.min().item(),
        (p.exp() * (p - q)).sum(-1).mean().item(),
        _relative(x, y),
        (x.argmax(-1) == y.argmax(-1)).float().mean().item(),
        tuple(_relative(*pair) for pair in zip(a.layers, b.layers, strict=True)),
        tuple(_relative(*pair) for pair in zip(a.ahead, b.ahead, strict=True)),
    )


def _relative(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / x.abs().max()).item()


def report(outcome: Outcome, kinds: list[str]) -> Iterator[str]:
    """For a person."""
    cosine = f"cosine {outcome.cosine:.6f} (median), {outcome.least:.6f} (least)"
    yield f"{outcome.dtype}: {cosine}, KL {outcome.kl:.2e} (mean), relative {outcome.relative:.2e}"
    yield f"same best token at {100 * outcome.greedy:.2f} % of the positions"
    worst, before = 0, 0.0
    for index, (kind, off) in enumerate(zip(kinds, outcome.layers, strict=True)):
        yield f"  layer {index + 1:3d} {kind:10s} {off:.2e}"
        if off - before > outcome.layers[worst] - (outcome.layers[worst - 1] if worst else 0):
            worst = index
        before = off
    for depth, off in enumerate(outcome.ahead, 1):
        yield f"  MTP {depth} {off:.2e}"
    if not outcome.passed:
        yield f"they part most in layer {worst + 1} ({kinds[worst]})"


# Megatron's side -----------------------------------------------------------------------------------------------------


def one_device(lowering: Lowering, dtype: str) -> Lowering:
    """The same model on one device. In fp32 our layers are the plain ones: their kernels are of bf16."""
    tree = to_tree(lowering.plan.recipe)
    sizes = {key: 1 for key in tree["parallel"] if key != "sequence"}
    tree["parallel"] |= {**sizes, "sequence": False}
    tree["cluster"] |= {"nodes": 1, "gpus_per_node": 1}
    tree["model"]["pattern"] = tree["model"]["pattern"].replace("|", "")
    tree["schedule"] |= {"save": None, "load": None, "save_interval": None}
    tree["precision"]["fused_grad_accumulation"] = False  # no gradient is computed, and the fusion wants APEX
    tree["data"] |= {"name": "mock", "path": None, "parts": None, "split": None, "tokenizer": None}
    blocks = tree["model"]["blocks"]
    if dtype == "fp32":
        for kind in OURS:
            if blocks.get(kind) is not None and blocks[kind].get("kernels") == "fused":
                blocks[kind]["kernels"] = "naive"
    return translate(from_tree(tree))


def megatron(lowering: Lowering, step: Path, tokens: Tensor, dtype: str) -> Run:
    """Megatron's side. What Megatron prints goes to stderr: stdout is the outcome's."""
    rank_zero(lowering)
    with contextlib.redirect_stdout(sys.stderr):
        model = built(lowering, step, dtype)
    return observed(model, tokens.to(torch.cuda.current_device()))


def built(lowering: Lowering, step: Path, dtype: str) -> Any:
    """This process's part of a HybridModel with the weights of a step, after torchrun or `rank_zero`."""
    from megatron.core import dist_checkpointing
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.training import initialize_megatron  # by this name tests replace it

    from nam_megatron.runtime import pretrain, stack

    words = [word for word in argv(lowering) if dtype != "fp32" or word != "--bf16"]
    pretrain.keep_shipped_helpers()
    given, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        args = parse_and_validate_args()
        config = pretrain.settings(args, stack.hybrid_stack_spec(lowering.plan))
        initialize_megatron()
    finally:
        sys.argv = given
    model = pretrain.NamModelBuilder(config.model).build_model(ProcessGroupCollection.use_mpu_process_groups())
    model = model.to(torch.cuda.current_device())
    if dtype == "bf16":
        model = pretrain.Float16ExceptMarked(config.model.transformer, model).module
    state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
    model.load_state_dict(dist_checkpointing.load(state, str(step)), strict=False)
    return model.eval()


def rank_zero(lowering: Lowering) -> None:
    """torchrun's variables for one process, and what the plan demands of the environment."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    for env in lowering.env:
        if env.allows(os.environ.get(env.name)):
            continue
        if env.value is None:
            del os.environ[env.name]
        else:
            os.environ[env.name] = env.value


@torch.no_grad()
def observed(model: Any, tokens: Tensor) -> Run:
    """What a HybridModel makes of tokens [b, s]."""
    layers: list[Tensor] = []
    ahead: list[Tensor] = []

    def keep(where: list[Tensor]) -> Any:
        def hook(module: Any, inputs: Any, out: Any) -> None:
            where.append((out[0] if isinstance(out, tuple) else out).transpose(0, 1))

        return hook

    hooks = [layer.register_forward_hook(keep(layers)) for layer in model.decoder.layers]
    if hasattr(model, "mtp"):
        hooks += [depth.final_layernorm.register_forward_hook(keep(ahead)) for depth in model.mtp.layers]
    b, s = tokens.shape
    positions = torch.arange(s, device=tokens.device).expand(b, s)
    # An explicit mask (true: not seen): stock DSA with index reuse hangs the shared top-k on it.
    later = torch.ones(b, 1, s, s, dtype=torch.bool, device=tokens.device).triu(1)
    logits = model(tokens, positions, later)
    for hook in hooks:
        hook.remove()
    return Run(*_kept(logits, layers, ahead))
