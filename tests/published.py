"""Tiny models of public families, made and saved by transformers itself with random weights."""

import json
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.lint import lint, recipe
from nam_megatron.recipe import from_tree, to_tree

FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BASE = FILE["parts"]["base"]
# name -> (class of transformers, its config)
ALL: dict[str, tuple[str, dict[str, Any]]] = {
    name: (said["class"], reduce(or_, [FILE["parts"][part] for part in said["parts"]], {}) | said["config"])
    for name, said in (FILE["models"] | FILE["described"]).items()
}
MODELS = {name: ALL[name] for name in FILE["models"]}


def built(name: str, **more: Any) -> Any:
    """The model, with what its class begins with."""
    kind, keys = ALL[name]
    config = getattr(transformers, f"{kind}Config")(**BASE | keys | more)
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config)


def write(name: str, to: Path, **more: Any) -> Any:
    """The model in bf16, saved to a folder in several shards."""
    torch.manual_seed(7)
    model = built(name, **more)
    with torch.no_grad():
        for at, tensor in model.state_dict().items():  # so that nothing stands where it began
            if tensor.is_floating_point():
                far = 0.1 if "norm" in at or "bias" in at else 0.03
                tensor.add_(torch.randn_like(tensor) * far)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(to, max_shard_size="40KB")
    return model


def lowering(folder: Path, **changes: Any) -> Lowering:
    """The recipe of a folder's config.json, on one GPU. changes: by dotted key, with `__` for the dot."""
    path = folder / "config.json"
    made = recipe.make(lint(path.read_text(), str(path)), Path("published.yaml"))
    tree = to_tree(made.recipe)
    tree["cluster"] |= {"nodes": 1, "gpus_per_node": 1}
    tree["data"]["workers"] = 0
    if dsa := tree["model"]["blocks"].get("dsa"):
        dsa["indexer_loss_coeff"] = 0.001  # training's, which no config says
    for key, value in changes.items():
        *parents, last = key.split("__")
        at = tree
        for parent in parents:
            at = at[parent]
        at[last] = value
    return translate(from_tree(tree))


def keys(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
