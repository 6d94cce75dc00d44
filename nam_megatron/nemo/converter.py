"""Exports in Megatron-Bridge's AutoBridge (torch side). Registered with the container:

    import nam_megatron.nemo.container
    bridge = AutoBridge.from_hf_pretrained("out/hf", trust_remote_code=True)
    models = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(models, "out/again")

Weights go through a distributed checkpoint in a temporary folder, which all ranks must see: so they are those of `nam_megatron.hf`, which
is proven, and of any layout. Another converter is refused a model of ours: Bridge would ask no one.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple, MegatronModelBridge
from megatron.core import dist_checkpointing
from megatron.core.models.hybrid.hybrid_model import HybridModel

from nam_megatron.compile.argv import load_plan
from nam_megatron.compile.lower import Lowering
from nam_megatron.errors import Refused, raise_if
from nam_megatron.hf import check, describe, distributed, export
from nam_megatron.judge.resume import PLAN
from nam_megatron.tracker import RELEASE


@MegatronModelBridge.register_bridge(source="NamForCausalLM", target=HybridModel, model_type="nam")
class NamBridge(MegatronModelBridge):
    """The export's model, on one device unless the provider's layout is changed before it builds."""

    container: Callable[[Lowering], Any]  # container.py says it, which has this registered, too

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Of the plan that the export holds. Raises Refused where it is another model than config.json's."""
        path = _folder(hf_pretrained)
        lowering = load_plan(path / PLAN)
        raise_if(export.differences(path, describe.config(lowering.plan)))
        return self.container(check.one_device(lowering, plain=False)).model

    def mapping_registry(self) -> Any:
        message = "there are no mappings by name: an export's tensors are joined of several"
        raise Refused(message, hint="`load_weights_hf_to_megatron`, `stream_weights_megatron_to_hf`")

    def load_weights_hf_to_megatron(
        self, hf_pretrained: Any, megatron_model: Any, allowed_mismatched_params: list[str] | None = None
    ) -> list[Any]:
        model, path = _one(megatron_model), _folder(hf_pretrained)
        with _shared_folder() as folder:
            if _rank() == 0:
                export.load(path, path / PLAN, folder / "ckpt", lambda _: None)
            _barrier()
            state = dist_checkpointing.load(_state(model), str(folder / "ckpt" / RELEASE))
            missing = [key for key in model.load_state_dict(state, strict=False)[0] if not key.endswith("_extra_state")]
            assert not missing, missing
        return [model]

    def stream_weights_megatron_to_hf(
        self, megatron_model: Any, hf_pretrained: Any, cpu: bool = True, **_: Any
    ) -> Iterable[HFWeightTuple]:
        """Every tensor of the export, on every rank, on the CPU."""
        model, config = _one(megatron_model), getattr(hf_pretrained, "config", hf_pretrained)
        with _shared_folder() as folder:
            step = folder / "step"
            if _rank() == 0:
                step.mkdir()
            _barrier()
            dist_checkpointing.save(_state(model), str(step))
            source = distributed.Checkpoint(step)
            for tensor in describe.tensors(config.to_dict()):
                yield HFWeightTuple(tensor.name, source.joined(tensor))


def _folder(hf_pretrained: Any) -> Path:
    """Where an export lies."""
    config = getattr(hf_pretrained, "config", hf_pretrained)
    return Path(getattr(hf_pretrained, "model_name_or_path", None) or config.name_or_path)


def _one(models: Any) -> Any:
    models = models if isinstance(models, list) else [models]
    if len(models) != 1:
        raise Refused("virtual pipeline stages are not converted", hint="build the model without them")
    return models[0]


def _state(model: Any) -> Any:
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    return inner.sharded_state_dict(metadata={"dp_cp_group": inner.pg_collection.dp_cp})


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder of rank 0's, under its TMPDIR, on every rank."""
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryDirectory()) if _rank() == 0 else None]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(said)
        yield Path(str(said[0]))
        _barrier()  # nobody reads it any more
