"""With what every parameter begins: Megatron's rule or the authors', by name; none is left out."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import harness
from harness import Case, on_ranks
from test_m2rnn import spec as m2rnn
from test_mamba3 import mixer as mamba3

STD, LAYERS = 0.05, 6
# of what is added to the residual stream; Megatron's rule for hybrids, GPT's has 2 layers
SCALED = STD / math.sqrt(LAYERS)

# Parameter -> how it is drawn: a number is the deviation of a normal distribution, a text a constant or a test of its own.
DRAWN = {
    "embedding.word_embeddings.weight": STD, "output_layer.weight": STD, "decoder.final_norm.weight": "one",
    "layer_norm_weight": "one", "layernorm.weight": "one", "norm_weight": "one",
    "linear_q_down_proj.weight": STD, "linear_kv_down_proj.weight": STD, "linear_q_up_proj.weight": STD, "linear_kv_up_proj.weight": STD,
    "linear_proj.weight": SCALED, "indexer.linear_wq_b.weight": STD, "indexer.linear_wk.weight": STD,
    "indexer.linear_weights_proj.weight": STD, "indexer.k_norm.bias": "zero", "router.weight": STD,
    "linear_fc1.weight": STD, "linear_fc2.weight": SCALED, 
    "mixer.in_proj.weight": STD, "mixer.out_proj.weight": SCALED, "k_norm.weight": "one", "B_norm.weight": "one", "C_norm.weight": "one",
    "mixer.B_bias": "one", "mixer.C_bias": "one", "mixer.D": "one", "mixer.mimo_x": "half", "mixer.mimo_z": "one", "mixer.mimo_o": "half",
    "mixer.dt_bias": "steps", "mixer.A_log": "decays", "mixer.conv1d_weight": STD, "mixer.conv1d_bias": "zero",
    "mixer.state_weight": "identity",
}  # fmt: skip


def constant(value: float):
    return lambda p: bool((p == value).all())


def steps(p: torch.Tensor) -> bool:
    """softplus of it is log-uniform between 0.001 and 0.1."""
    dt = torch.nn.functional.softplus(p.double())
    spread = ((dt.log() - math.log(0.001)) / math.log(100)).sort().values
    even = (torch.arange(len(p)) + 0.5) / len(p)
    return bool((dt > 0.00099).all() and (dt < 0.101).all() and (spread - even).abs().max() < 1.6 / math.sqrt(len(p)))


def decays(p: torch.Tensor) -> bool:
    """exp of it is uniform between 0 and 16."""
    even = (torch.arange(len(p)) + 0.5) / len(p)
    return bool((p.exp().div(16).sort().values - even).abs().max() < 1.6 / math.sqrt(len(p)))


RULES = {"one": constant(1), "zero": constant(0), "half": constant(0.5), "steps": steps, "decays": decays}
RULES["identity"] = lambda p: torch.equal(p, torch.eye(p.shape[-1]).expand_as(p))


def drawn(p: torch.Tensor, std: float) -> bool:
    """A normal sample of this deviation: in width, middle and tails."""
    few = 5 / math.sqrt(2 * p.numel())
    tails = (p.abs() > 2 * std).float().mean().item()
    return abs(p.std().item() / std - 1) < few and p.mean().abs().item() < few * std and 0.02 < tails < 0.075


def test_every_parameter_begins_as_its_authors_have_it(monkeypatch):
    monkeypatch.setattr(harness, "fill", lambda model: None)
    mixers = {"m2rnn": m2rnn(heads=64)} | mamba3(heads=64)
    case = Case("+D-E3R", config=dict(init_method_std=STD), mixers=mixers)
    ((found, biases),) = on_ranks(case, lambda rig: (
        {name: p.detach().clone() for name, p in rig.model.named_parameters()},
        {name: b.detach().clone() for name, b in rig.model.named_buffers() if "expert_bias" in name},
    ))  # fmt: skip
    assert len(biases) == 1 and not any(b.any() for b in biases.values())
    wrong = []
    for name, p in found.items():
        rules = [end for end in DRAWN if name.rstrip("0123456789").endswith(end)]
        assert rules, f"no rule for {name}"
        rule = DRAWN[max(rules, key=len)]
        if not (RULES[rule](p) if isinstance(rule, str) else drawn(p, rule)):
            wrong.append((name, rule, p.std().item(), p.mean().item()))
    assert wrong == []
