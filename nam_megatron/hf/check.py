"""The same tokens through Megatron's model and through the export: where do they part? (torch side)

Megatron's model is built from the plan, on one device whatever the layout was, from the checkpoint's weights.

In bf16 kernels that round elsewhere choose another expert or key where two are nearly alike, and such a position is off by what was
chosen. So there the export takes Megatron's choices, one after another, and how many of them it would have made otherwise is told beside
what it computes from them.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nam_megatron import installed
from nam_megatron.compile.argv import argv, load_plan
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.errors import Refused, raise_if
from nam_megatron.hf import describe, distributed
from nam_megatron.hf.export import differences, plan_of
from nam_megatron.hf.model.modeling_nam import Dsa, Router
from nam_megatron.hf.opened import DTYPES, absent, identity, open_model
from nam_megatron.recipe import at, from_tree, to_tree
from nam_megatron.recipe.data import mock
from nam_megatron.rehearsal import CPU_DOES_WITHOUT
from nam_megatron.runtime import checksums

# Worst that passes: of bf16 what the issue of every exporter asks for, of fp32 the rounding of sums in another order.
COSINE, KL, RELATIVE = 0.9999, 1e-3, 1e-5
# Of the worst position in bf16, which a median does not see: 0.9997 has been measured, and 0.96 where Megatron's own DSA chose otherwise.
LEAST = 0.9
# Logits that are compared at a time: of a long window and a large vocabulary a copy in fp64 is tens of GB.
PIECE = 2**25
# Of one layer's choices that a rounding may turn.
OTHERWISE = 0.05


@dataclass(frozen=True)
class Run:
    """logits [b, s, vocabulary]; layers: each layer's output [b, s, h]; ahead: the hidden states of the MTP depths. fp32, on the CPU.

    experts, keys: of each layer that chooses, what it chose: [b s, k] and [b, s, k]. otherwise: of a run that took another's choices, the
    share of each layer's that it would not have made. own: each layer's output, had it got the other run's input.
    """

    logits: Tensor
    layers: tuple[Tensor, ...]
    ahead: tuple[Tensor, ...]
    experts: Sequence[Tensor] = ()
    keys: Sequence[Tensor] = ()
    otherwise: Sequence[float] = ()
    own: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """cosine: the median over positions, and the least; kl: mean over positions; relative: largest difference over the largest
    value. greedy: share of positions with the same best token. layers, ahead: relative, by layer and MTP depth. own: of layers, each given
    what Megatron's got. depths: the median cosine of each MTP depth's hidden states. otherwise: the largest share of one layer's experts or
    keys that the export would not have chosen. unproven: what so few tokens do not show.
    """

    dtype: str
    cosine: float
    least: float
    kl: float
    relative: float
    greedy: float
    layers: tuple[float, ...]
    ahead: tuple[float, ...]
    own: tuple[float, ...]
    depths: tuple[float, ...] = ()
    otherwise: float = 0.0
    unproven: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        if self.dtype == "fp32":
            return max((self.relative, *self.ahead)) <= RELATIVE
        alike = min((self.cosine, *self.depths)) >= COSINE and self.least >= LEAST
        return alike and self.kl <= KL and self.otherwise <= OTHERWISE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, **installed.stack().as_dict()}


def check(checkpoint: Path, export: Path, tokens: Tensor, dtype: str, device: str, plain: bool = False) -> Outcome:
    """Compare an export with the checkpoint it was made of. tokens: [b, s] on the CPU. plain: our layers in plain torch on Megatron's
    side, as in fp32 they always are, so that what their kernels round is left out. Raises Refused."""
    step = distributed.step_folder(checkpoint)
    lowering = load_plan(plan_of(checkpoint, step))
    installed.ask(lowering.target, engine=True)
    raise_if(describe.objections(lowering.plan))
    config = describe.config(lowering.plan)
    raise_if(differences(export, config))
    if 0 < (learned := config["learned_positions"]) < tokens.size(1):
        said = f"{tokens.size(1)} tokens, and the model has learned {learned} positions"
        raise Refused(said, hint=f"`--length {learned}` or less")
    if not torch.cuda.device_count():
        hint = "run it on a training host; `--device` says where the export computes"
        raise Refused("Megatron's side needs a GPU, and this host has none", hint=hint)
    raise_if(absent(device))
    theirs = megatron(one_device(lowering, plain or dtype == "fp32"), step, tokens, dtype)
    found = compare(theirs, exported(export, tokens, dtype, device, theirs, follows=dtype == "bf16"), dtype)
    s = tokens.size(1)
    few = (f"`{key}` of {most} leaves out none of {s} tokens" for key, most in choosing(config).items() if s <= most)
    return replace(found, unproven=tuple(few))


def choosing(c: dict[str, Any]) -> dict[str, int]:
    """Of how many tokens a query sees all, by the key that says how many it sees at most."""
    keys = {kind: getattr(facet, "MOST_KEYS", None) for kind, facet in describe.FACETS.items() if kind in c}
    return {f"{kind}.{key}": most for kind, key in keys.items() if key and (most := c[kind][key])}


def length(c: dict[str, Any]) -> int:
    """Tokens of a sequence that show all that a model chooses, where it was trained on so many."""
    return min(c["max_position_embeddings"], 2 * max((128, *choosing(c).values())))


def exported(path: Path, tokens: Tensor, dtype: str, device: str, theirs: Run, follows: bool) -> Run:
    """The export's side. follows: it takes their choices."""
    model, tokens = open_model(path, DTYPES[dtype], device), tokens.to(device)
    shares = follow(model, theirs) if follows else []
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
        ahead = model(tokens, mtp=True, logits_to_keep=1).hidden_states if model.config.mtp_depths else ()
        otherwise = tuple(shares)
        for layer, before in zip(model.model.layers[1:], theirs.layers, strict=False):
            layer.register_forward_pre_hook(partial(_given, before))
        own = model(tokens, output_hidden_states=True, logits_to_keep=1).hidden_states[1:]
    return replace(_kept(out.logits, out.hidden_states[1:], ahead), otherwise=otherwise, own=_moved(own))


def _given(before: Tensor, layer: Any, words: tuple[Any, ...]) -> tuple[Any, ...]:
    """A layer's words with `before` as its input."""
    x, *rest = words
    return before.to(x), *rest


def follow(model: Any, chosen: Run) -> list[float]:
    """Let the exported model choose as was chosen. The list fills with the share that it would have chosen otherwise, pass by pass."""
    shares: list[float] = []
    routers = [m for m in model.modules() if isinstance(m, Router)]
    indexers = [m for m in model.modules() if isinstance(m, Dsa) and m.indexer is not None]
    pairs = [*zip(routers, chosen.experts, strict=True)]
    if chosen.keys:  # Megatron's own DSA does not say which it chose
        pairs += zip(indexers, chosen.keys, strict=True)
    for module, choices in pairs:
        module.__dict__["pick"] = partial(_taken, module.pick, choices.to(model.device), shares)
    return shares


def _taken(pick: Any, chosen: Tensor, shares: list[float], scores: Tensor, *first: int) -> Tensor:
    """`chosen` in the place of pick(scores, *first). Keys come in blocks of queries, of which first is the first's number."""
    for query in first:
        chosen = chosen[:, query : query + scores.size(1)]
    none, there = torch.zeros_like(scores, dtype=torch.bool), scores > -torch.inf
    own, others = (none.scatter(-1, these, True) & there for these in (pick(scores, *first), chosen))
    shares.append(((own & ~others).sum() / own.sum()).item())
    return chosen


def _kept(logits: Tensor, layers: Sequence[Tensor], ahead: Sequence[Tensor]) -> Run:
    return Run(logits.cpu().float(), _moved(layers), _moved(ahead))


def _moved(group: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.float().cpu() for x in group)


def compare(a: Run, b: Run, dtype: str) -> Outcome:
    rows = max(1, PIECE // a.logits.size(-1))
    pieces = zip(*(side.logits.flatten(0, 1).split(rows) for side in (a, b)), strict=True)
    cosine, kl, greedy, off, *largest = map(torch.cat, zip(*(_by_position(*pair) for pair in pieces), strict=True))
    if not all(made.isfinite().all() for made in (*largest, *a.ahead, *b.ahead)):
        raise Refused("logits or hidden states of MTP that are not finite: these weights are of no use")
    return Outcome(
        dtype,
        cosine.median().item(),
        cosine.min().item(),
        kl.mean().item(),
        (off.max() / largest[0].max()).item(),
        greedy.float().mean().item(),
        tuple(_relative(*pair) for pair in zip(a.layers, b.layers, strict=True)),
        tuple(_relative(*pair) for pair in zip(a.ahead, b.ahead, strict=True)),
        tuple(_relative(*pair) for pair in zip(a.layers, b.own, strict=True)),
        tuple(_cosine(*pair).median().item() for pair in zip(a.ahead, b.ahead, strict=True)),
        max(b.otherwise, default=0.0),
    )


def _by_position(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Of logits: cosine, KL, whether the best token is one, the largest difference and the largest value of either, each [positions]."""
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    kl, greedy = (p.exp() * (p - q)).sum(-1), x.argmax(-1) == y.argmax(-1)
    return _cosine(x, y), kl, greedy, *(made.abs().amax(-1) for made in (x - y, x, y))


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1)


def of_another(checkpoint: Path, export: Path) -> str | None:
    """What to say where the export was made of another checkpoint: a run that went on, say. An import of it is another too."""
    made, step = identity(export), distributed.step_folder(checkpoint)
    if not made["checkpoint"] or made["checkpoint"] == checksums.whole(step):
        return None
    return f"`{export}` was exported from another checkpoint, `{made['step']}`, than `{step}`"


def _relative(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / x.abs().max()).item()


def report(outcome: Outcome, kinds: list[str]) -> Iterator[str]:
    """For a person."""
    cosine = f"cosine {outcome.cosine:.6f} (median), {outcome.least:.6f} (least)"
    yield f"{outcome.dtype}: {cosine}, KL {outcome.kl:.2e} (mean), relative {outcome.relative:.2e}"
    yield f"same best token at {100 * outcome.greedy:.2f} % of the positions"
    if outcome.dtype == "bf16":
        yield f"with the same experts and keys; of one layer's the export had chosen {100 * outcome.otherwise:.2f} % otherwise at most"
    for index, (kind, off, own) in enumerate(zip(kinds, outcome.layers, outcome.own, strict=True), 1):
        yield f"  layer {index:3d} {kind:10s} {off:.2e}  {own:.2e} by itself"
    for depth, (off, alike) in enumerate(zip(outcome.ahead, outcome.depths, strict=True), 1):
        yield f"  MTP {depth} {off:.2e}, cosine {alike:.6f} (median)"
    limits = f"cosine {COSINE} or more, in MTP too, {LEAST} at least, KL {KL:.0e} or less, {100 * OTHERWISE:.0f} % otherwise or less"
    asked = f"relative {RELATIVE:.0e} or less, in MTP too" if outcome.dtype == "fp32" else limits
    yield f"{'the same' if outcome.passed else 'they differ'}: asked for is {asked}"
    for said in outcome.unproven:
        yield f"unproven: {said}"
    if not outcome.passed:
        worst = max(range(len(kinds)), key=outcome.own.__getitem__)
        yield f"they part most in layer {worst + 1} ({kinds[worst]})"
        if outcome.dtype == "bf16":
            yield "`--plain` leaves out what the kernels of our layers round, `--dataset FOLDER` asks about text instead of random tokens"


# Megatron's side -----------------------------------------------------------------------------------------------------


def one_device(lowering: Lowering, plain: bool) -> Lowering:
    """The same model on one device. plain: without the kernels of our layers, which are of bf16."""
    tree = to_tree(lowering.plan.recipe)
    sizes = {key: 1 for key in tree["parallel"] if key != "sequence"}
    tree["parallel"] |= {**sizes, "sequence": False}
    tree["cluster"] |= {"nodes": 1, "gpus_per_node": 1}
    tree["model"]["pattern"] = tree["model"]["pattern"].replace("|", "")
    tree["schedule"] |= {"save": None, "load": None, "save_interval": None}
    tree["precision"]["attention_kernels"] = "transformer_engine"  # a package beside the lock, which need not be here
    tree["precision"]["fused_grad_accumulation"] = False  # no gradient is computed, and the fusion wants APEX
    tree["data"] = mock(tree["data"])
    how = tree["execution"]
    # Nothing is short of memory, and lengths are any.
    for block in lowering.plan.blocks:
        keys = how.get(block.kind, {})
        keys |= {key: 1 for key in keys if key.endswith("_pieces")}
        # Refused where one GPU's columns need no zeros.
        keys |= dict(block.unneeded(replace(lowering.plan.site, tensor=1)))
    if plain:
        for key, asked, instead, _ in CPU_DOES_WITHOUT:
            above, _, last = key.rpartition(".")
            if last.startswith(("kernels", "keep_")) and at(tree, key) == asked:
                at(tree, above)[last] = instead
        if how.get("moe"):
            how["moe"]["expert_gemm"] = "transformer_engine"  # torch's is of bf16, on few GPUs
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
    from megatron.core.transformer.module import Float16Module
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.training import initialize_megatron  # by this name tests replace it

    from nam_megatron.mends import install
    from nam_megatron.runtime import pretrain, stack

    words = [word for word in argv(lowering) if dtype != "fp32" or word != "--bf16"]
    install.single("shipped_helpers", "marked_fp32", "yarn")
    given, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        args = parse_and_validate_args()
        spec = stack.hybrid_stack_spec(lowering.plan)
        config = pretrain.settings(args, spec)
        initialize_megatron()
    finally:
        sys.argv = given
    model = pretrain.NamModelBuilder(config.model).build_model(ProcessGroupCollection.use_mpu_process_groups())
    for hook in spec.metainfo.get("hooks", []):  # of features beside the layers
        (model,) = hook([model])
    model = model.to(torch.cuda.current_device())
    if dtype == "bf16":
        model = Float16Module(config.model.transformer, model).module
    state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
    model.load_state_dict(dist_checkpointing.load(state, str(step)), strict=False)
    return model.eval()


def rank_zero(lowering: Lowering) -> None:
    """torchrun's variables for one process, and what the plan demands of the environment."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")  # any that is free: nobody else looks for it
    for env in lowering.env:
        if not env.allows(os.environ.get(env.name)):
            env.put(os.environ)


@torch.no_grad()
def observed(model: Any, tokens: Tensor) -> Run:
    """What a HybridModel makes of tokens [b, s]."""
    from megatron.core.transformer.moe.router import TopKRouter

    from nam_megatron.blocks.dsa.layer import SparseAttention

    layers: list[Tensor] = []
    ahead: list[Tensor] = []
    experts: list[Tensor] = []
    keys: list[Tensor] = []
    b, s = tokens.shape

    def keep(where: list[Tensor]) -> Any:
        def hook(module: Any, inputs: Any, out: Any) -> None:
            where.append((out[0] if isinstance(out, tuple) else out).transpose(0, 1))

        return hook

    hooks = [layer.register_forward_hook(keep(layers)) for layer in model.decoder.layers]
    if hasattr(model, "mtp"):
        hooks += [depth.final_layernorm.register_forward_hook(keep(ahead)) for depth in model.mtp.layers]

    def routed(router: Any, inputs: Any, out: Any) -> None:
        experts.append(out[1].view(s, b, -1).transpose(0, 1).flatten(0, 1).float().topk(router.topk, -1).indices.cpu())

    def selected(select: Any, scores: Tensor) -> Any:
        selection = select(scores)  # of whole sequences
        if hasattr(selection, "indices"):
            # -1 stands behind queries that see fewer keys, all of which they take
            keys.append(selection.indices.clamp(min=0).long().cpu())
        else:
            most = selection.selected.sum(-1).max().item()
            keys.append(selection.selected.float().topk(most, -1).indices.cpu())
        return selection

    for module in model.modules():
        if isinstance(module, TopKRouter):
            hooks.append(module.register_forward_hook(routed))
        elif isinstance(module, SparseAttention) and module.indexer is not None:
            module.__dict__["_select"] = partial(selected, module._select)
    positions = torch.arange(s, device=tokens.device).expand(b, s)
    # An explicit mask (true: not seen): stock DSA with index reuse hangs the shared top-k on it.
    later = torch.ones(b, 1, s, s, dtype=torch.bool, device=tokens.device).triu(1)
    logits = model(tokens, positions, later)
    for hook in hooks:
        hook.remove()
    for module in model.modules():
        module.__dict__.pop("_select", None)
    return replace(_kept(logits, layers, ahead), experts=experts, keys=keys)
