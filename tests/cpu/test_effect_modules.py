"""A layer reads what its recipe says: for each kind every key that computes, changed, changes the layer that is built, or is refused.

Three layers of one kind are built as the trainer builds them: the plan's arguments through Megatron's parser and config into its
HybridModel with our stack. What is compared of the first layer, on the same input: parameters and their initial values, its output
and every gradient; of an epsilon, that each norm has it. That Megatron's config holds the value is verify's business; here no module
may pass it by.
"""

import contextlib
import copy
import io
import logging
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from presets import written
from test_effect import others

from nam_megatron.blocks.kinds import KINDS
from nam_megatron.budget import parameters
from nam_megatron.compile.argv import argv
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.errors import Refused
from nam_megatron.lint import lint
from nam_megatron.prove import cut, proof, ranks
from nam_megatron.recipe import config_at, load, parsed, resolved, to_tree
from nam_megatron.report import plan_text, strip
from nam_megatron.translate import write

SEED = 3
# A whole model that has it; three layers of attention between residual streams, or after embeddings of n-grams; three layers of a kind
# whose angles are scaled.
MTP, MHC, NGRAMS = "MTP", "mHC", "n-grams"
ANGLES = {
    "Llama's angles": ("attention", "llama_rope", {"factor": 4.0}),
    **{
        f"YaRN of {kind}": (kind, "yarn", {"factor": 4.0, "mscale_all_dim": 0.5})
        for kind in ("attention", "mla", "dsa")
    },
}
PARTS = {
    MHC: ("attention", "mhc", {"streams": 4, "kernels": "naive"}),
    NGRAMS: ("attention", "ngram_hash", {"enabled": True, "buckets": 50, "document_end": 7}),
}
ADDED = PARTS | ANGLES
SECTION = {MTP: "feature.mtp"} | {which: f"feature.{name}" for which, (_, name, _) in ADDED.items()}
# What a kind is taken from: a preset and the letter that it stands at there.
OF = {
    "attention": ("nam56r_native_dp", "A"),
    "mla": ("nam56r", "A"),
    "dsa": ("nam56r", "A"),
    "moe": ("nam56r_native_dp", "E"),
    "mlp": ("nam56r_native_dp", "E"),
    "mamba2": ("nam56r_native_dp", "M"),
    "gdn": ("qwen3_next_80b_a3b", "M"),
    "mamba3": ("nam56r", "M"),
    "m2rnn": ("nam56r", "R"),
}
# Keys of the model around the layers: they have to change anything of it.
AROUND = {"model.depth", "model.vocab_size", "model.tied_embeddings", "model.blocks.dsa.full_every", "model.seq_length",
          "model.learned_positions"}  # fmt: skip
# Keys that a kind may pass by, and why.
PASSED_BY = {
    "model.num_attention_heads": {
        "moe",
        "mlp",
        "mamba2",
        "gdn",
        "mamba3",
        "m2rnn",
    },  # of attention; Megatron's parser wants one
    "model.linear_bias": {"mamba2", "mamba3", "m2rnn"},  # as the key's own words say
}
# Other values than test_effect's where those say nothing on so small a model.
BETTER = {
    "model.learned_positions": [1024],  # of attention refused beside RoPE
    "model.blocks.moe.capacity_factor": [0.5],
    "model.blocks.attention.window": [8],
    "model.blocks.moe.group_limit": [[2, 1]],
    "model.blocks.m2rnn.gradient_clip": [1e-6],
    "model.blocks.moe.balancing": ["seq_aux_loss"],  # in one microbatch of one rank the global loss is the batch's
    "feature.mhc.epsilon": [0.25],
    "feature.yarn.original_length": [512],  # at whole columns of so narrow heads
    "feature.yarn.beta_fast": [128.0],
    "feature.yarn.beta_slow": [8.0],
    "feature.ngram_hash.document_end": [66, 20],  # tokens that come
    "model.letters": [],
    "model.pattern": [],
    "model.substitute": [],
}


# Keys that add parameters, and one that takes some away.
ADDING = [
    ("moe", "shared_expert_gate"),
    ("moe", "latent_size"),
    ("attention", "qkv_bias"),
    ("attention", "output_gate"),
    ("attention", "learned_positions"),
    ("mla", "q_lora_rank"),
]
NO_LATENT = {"q_lora_rank": None}


def test_every_kind_is_asked():
    assert OF.keys() == KINDS.keys()


OF_KINDS = [*((kind, None) for kind in KINDS), *ADDING, *(("attention", feature) for feature in PARTS)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "key"), OF_KINDS)
def test_every_place_tells_the_same_of_a_kind(kind, key, tmp_path):
    """Plan, strip, lint of the written plan, the budget's parameters, and the real model's; of a key or a feature that adds some, too."""
    tree = with_feature(key) if key in ADDED else alone(kind)
    on = {key: True} if key and key not in ADDED else {}
    given = {"q_lora_rank": NO_LATENT, "latent_size": {"latent_size": 16}}.get(key, on)
    if key == "learned_positions":
        given, tree["model"][key] = {"position_embedding": "none"}, 1024
    tree["model"]["blocks"][kind] |= given
    if key == "q_lora_rank":
        tree["execution"][kind]["kernels"] = "megatron"
    lowering = translate(resolved(parsed(tree), lambda key: False))
    plan = lowering.plan
    assert {layer.kind for layer in plan.layers} == {kind}
    assert strip(plan)[2] == KINDS[kind].symbol * len(plan.layers) and KINDS[kind].title in plan_text(lowering)
    write(lowering, tmp_path / "out")
    told = lint((tmp_path / "out/plan.json").read_text(), "plan.json")
    assert told.model.layers == tuple((layer.number, kind) for layer in plan.layers)
    proof.warm()
    (ended,) = ranks.fork(1, lambda: in_a_process(lambda: print(built(lowering)["parameters"])))
    assert ended.code == 0, ended.err
    assert int(ended.out.split()[-1]) == parameters(plan)[0] == told.model.count.total


def alone(kind: str) -> dict[str, Any]:
    """The recipe of three layers of one kind, small enough for a CPU, as a tree; of twelve where layers share a top-k."""
    preset, letter = OF[kind]
    said = (f"model.letters.E={kind}",) if kind == "mlp" else ()
    tree = to_tree(cut.pair(load(preset, said), "cpu", 1).reference.plan.recipe)
    depth = 12 if kind == "dsa" else 3
    tree["model"] |= {"pattern": depth * letter, "depth": depth, "substitute": [], "letters": {letter: kind}}
    tree["feature"].pop("mtp", None)
    return to_tree(resolved(parsed(tree), lambda key: False))


def with_mtp() -> dict[str, Any]:
    return to_tree(cut.pair(load("nam56r"), "cpu", 1).reference.plan.recipe)


def with_feature(which: str) -> dict[str, Any]:
    kind, name, keys = ADDED[which]
    tree = alone(kind)
    tree["feature"][name] = written("nam56r")["feature"][name] | keys
    return tree


def changed(tree: dict[str, Any], key: str, value: Any) -> Lowering:
    tree = copy.deepcopy(tree)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    node[last] = value
    return translate(resolved(parsed(tree), lambda said: said == key))


def asked(kind: str, tree: dict[str, Any]) -> dict[str, list[Lowering]]:
    """The plans to build instead, by key: at most two other values of every key that computes. Refused ones are no plan."""
    found = {}
    section = SECTION.get(kind, "model")
    part = tree["feature"][section.partition(".")[2]] if kind in SECTION else tree["model"]
    for key, value in cut.leaves(part, section):
        *parents, last = key.split(".")
        config = config_at(parents)
        assert config is not None, key
        if config.row(last).executes:
            continue
        tried = next((v for k, v in BETTER.items() if f"{key}.".startswith(f"{k}.")), None)
        found[key] = []
        for other in others(value, config.model_fields[last].annotation) if tried is None else tried:
            with contextlib.suppress(Refused):
                found[key].append(changed(tree, key, other))
            if len(found[key]) == 2:
                break
    return found


def unread(kind: str, only: str = "") -> list[str]:
    """Keys whose other value leaves what is built as it is; of those that begin with `only`."""
    tree = with_mtp() if kind == MTP else with_feature(kind) if kind in ADDED else alone(kind)
    before = built(translate(resolved(parsed(tree), lambda key: False)))
    assert len([what for what in before if of_a_layer(what)]) > 5
    silent = set()
    for key, plans in asked(kind, tree).items():
        for plan in plans if key.startswith(only) else ():
            now = built(plan)
            different = {what for what in before.keys() | now.keys() if before.get(what) != now.get(what)}
            if kind not in (MTP, NGRAMS) and key not in AROUND:
                different = {what for what in different if of_a_layer(what)}
            if key == "model.norm_epsilon" and any(
                before[what] == now[what] for what in before if what.startswith("eps ")
            ):
                different = set()
            if not different and kind not in PASSED_BY.get(key, ()):
                silent.add(key)
    return sorted(silent)


def of_a_layer(what: str) -> bool:
    return what == "output" or "decoder.layers.0." in what


def built(lowering: Lowering) -> dict[str, float]:
    """A number for each thing to be seen of the model of a plan; for a process of its own, see `in_a_process`."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import global_vars
    from megatron.training.arguments import parse_and_validate_args

    from nam_megatron.mends import install
    from nam_megatron.runtime import pretrain, stack

    sys.argv = ["train", *(word for word in argv(lowering) if word != "--bf16")]
    global_vars.unset_global_variables()
    DSAIndexerLossLoggingHelper.tracker, MTPLossLoggingHelper.tracker = {}, {}
    get_moe_metrics_tracker().metrics.clear()
    install.single("yarn")
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_and_validate_args()
    global_vars.set_args(args)
    settings = pretrain.settings(args, stack.hybrid_stack_spec(lowering.plan))
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = pretrain.NamModelBuilder(settings.model).build_model(groups, True, True).train()
    for hook in settings.model.pre_wrap_hooks:
        hook([model])
    seen = {f"start {name}": number(p) for name, p in model.named_parameters()}
    seen["parameters"] = sum(p.numel() for p in model.parameters())
    seen |= {f"eps {name}": module.eps for name, module in model.named_modules() if hasattr(module, "eps")}

    r = lowering.plan.recipe.model
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(r.seq_length, 2, r.hidden_size, generator=generator)
    tokens = torch.randint(0, r.vocab_size, (2, r.seq_length + 1), generator=generator)

    def same_input(layer, positional, named):
        assert "hidden_states" in named
        return positional, named | {"hidden_states": inputs.clone().requires_grad_()}

    def see(layer, positional, output):
        seen["output"] = number(output[0] if isinstance(output, tuple) else output)

    first = model.decoder.layers[0]
    if not lowering.plan.recipe.feature.ngram_hash:  # which the layers would not see
        first.register_forward_pre_hook(same_input, with_kwargs=True)
    first.register_forward_hook(see)
    mask = torch.ones(1, 1, r.seq_length, r.seq_length).triu(1).bool()
    positions = torch.arange(r.seq_length).expand(2, -1)
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    loss.sum().backward()
    seen["loss"] = number(loss)
    seen |= {f"gradient {name}": number(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    if settings.model.transformer.moe_router_enable_expert_bias:
        _update_router_expert_bias([model], settings.model.transformer)
        seen |= {f"end {name}": number(b) for name, b in model.named_buffers() if name.endswith("expert_bias")}
    return seen


def number(tensor: torch.Tensor) -> int:
    tensor = tensor.detach().to_dense().float().contiguous()  # a table's gradient is sparse
    return zlib.crc32(repr(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())


def in_a_process(job: Callable[[], object]) -> None:
    from megatron.core import parallel_state

    logging.disable(logging.WARNING)
    torch.distributed.init_process_group(backend="gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    job()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [*OF, *SECTION])
def test_a_layer_reads_what_its_recipe_says(kind):
    proof.warm()
    (ended,) = ranks.fork(1, lambda: in_a_process(lambda: print("unread:", *unread(kind))))
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1].split()[1:] == []


def test_a_softmax_before_the_choice_weighs_otherwise():
    """Its own test: it stands with softmax scores alone, and they without an expert bias."""

    def told():
        tree = alone("moe")
        tree["model"]["blocks"]["moe"] |= {"score_function": "softmax", "expert_bias": False}
        tree["model"]["blocks"]["moe"].pop("expert_bias_update_rate", None)
        plans = [changed(tree, "model.blocks.moe.pre_softmax", value) for value in (False, True)]
        print("outputs:", *(built(plan)["output"] for plan in plans))

    proof.warm()
    (ended,) = ranks.fork(1, lambda: in_a_process(told))
    assert ended.code == 0, ended.err
    _, after, before = ended.out.splitlines()[-1].split()
    assert after != before


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "key"), [("dsa", "model.attention_dropout"), ("mamba2", "model.norm_epsilon")])
def test_a_key_that_a_layer_passes_by_would_be_found(kind, key, monkeypatch):
    """As both were, until their kinds refused another value: Megatron's config held it, and no line read it."""
    monkeypatch.setattr(KINDS[kind], "fixed", {})
    proof.warm()
    (ended,) = ranks.fork(1, lambda: in_a_process(lambda: print("unread:", *unread(kind, key))))
    assert ended.out.splitlines()[-1].split()[1:] == [key], ended.err
