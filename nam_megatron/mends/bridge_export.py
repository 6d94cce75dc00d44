"""No conversion of a model of ours by a converter that does not know it (torch side)."""

from functools import wraps
from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

from nam_megatron.errors import Refused
from nam_megatron.mends import Plan


def install(plan: Plan) -> None:
    """Have Bridge's converters refuse it."""
    convert = MegatronModelBridge.stream_weights_megatron_to_hf
    MegatronModelBridge.stream_weights_megatron_to_hf = _ours_alone(convert)


def _ours_alone(convert: Any) -> Any:
    """Bridge looks for a converter by the export's class, and never whether the model is one it knows."""

    @wraps(convert)
    def converted(self: Any, megatron_model: Any, *words: Any, **named: Any) -> Any:
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        if any(hasattr(getattr(model, "config", None), "nam_recipe") for model in models):
            message = (
                f"`{type(self).__name__}` does not know this model: its attention has another position embedding or"
                " kind, and its Mamba-3, M2RNN, DSA, MLA or MTP layers would be left out or taken for others"
            )
            raise Refused(message, hint="`python -m nam_megatron.hf export`, or AutoBridge on such an export")
        return convert(self, megatron_model, *words, **named)

    return converted
