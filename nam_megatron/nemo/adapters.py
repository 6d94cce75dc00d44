"""Bridge's low-rank adapters on layers of ours (torch side). Made for megatron-bridge 0.6.2.

An adapter takes part where its module is called, and where our MLA and DSA read the weight of a module that they do not call: around
such a module stands one whose weight is the sum of both (`LoRALinear.weight`), with gradients for the adapter.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.lora import LoRA
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.utils import unwrap_model

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Refused


def lora(plan: Plan) -> LoRA | None:
    """What a recipe's adapters are to Bridge."""
    feature = plan.recipe.feature.lora
    if feature is None:
        return None
    return LoRA(target_modules=feature.modules(plan.site), dim=feature.rank, alpha=feature.alpha)


def stand(models: Sequence[torch.nn.Module], plan: Plan) -> None:
    """See that adapters stand where the recipe has them, and that nothing but them is trained.

    Raises:
        Refused: a module that got none, or a weight that would be trained besides.
    """
    feature = plan.recipe.feature.lora
    if feature is None:
        return
    adapted, trained = set(), set()
    for model in unwrap_model(list(models)):
        adapted |= {n.rpartition(".")[2] for n, module in model.named_modules() if isinstance(module, AdapterWrapper)}
        trained |= {name for name, p in model.named_parameters() if p.requires_grad and ".adapter." not in name}
        for mixer in model.modules():
            _whole(mixer)
        # The layers' recompute asks whether its input has a gradient, and behind a table that stays the first one's has none.
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(_learns)
    missing = set(feature.modules(plan.site)) - adapted
    if missing or trained:
        what = f"`{sorted(missing)[0]}` has no adapter" if missing else f"`{sorted(trained)[0]}` would be trained too"
        raise Refused(f"the adapters do not stand as the recipe has them: {what}", key="feature.lora.targets")


def _whole(mixer: torch.nn.Module) -> None:
    """Bridge takes the adapter of whatever is called `mixer.in_proj` apart as Mamba-2 packs it, by sizes that others do not have."""
    packed = getattr(mixer, "in_proj", None)
    if isinstance(packed, AdapterWrapper) and not isinstance(mixer, MambaMixer):
        packed.adapter.base_linear_name = packed.adapter.base_linear_name.replace("mixer.in_proj", "mixer.packed")


def _learns(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
