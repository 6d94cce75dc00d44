"""The exported model in this process, of an export or straight of a checkpoint; no code of the folder runs (torch side)."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nam_megatron.blocks.exported import Tensor
from nam_megatron.compile.argv import load_plan
from nam_megatron.data import identity as content
from nam_megatron.data import tokenizer
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.hf import describe, distributed, folder
from nam_megatron.hf import export as exports
from nam_megatron.hf.export import config_for, config_of, plan_of, trained_tokenizer
from nam_megatron.hf.model.configuration_nam import NamConfig
from nam_megatron.hf.model.modeling_nam import NamForCausalLM
from nam_megatron.runtime import checksums

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEP, HASH = re.compile(r"iter_\d{7,}|release"), re.compile(r"[0-9a-f]{64}")


def open_model(
    path: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", kernels: str = "torch"
) -> NamForCausalLM:
    """The model in `path`, an export or a checkpoint folder, ready to run. kernels: as NamForCausalLM.from_pretrained takes it.

    Raises:
        Refused: neither of both, one that is damaged, a device that is not there, one or a model that the kernels do not serve.
    """
    raise_if(absent(device, kernels))
    if is_export(path):
        folder.verified(path)
        config = config_of(path)
        tensors = list(describe.tensors(config.to_dict()))
        read = folder.reader(path, tensors)
    else:
        step = distributed.step_folder(path)
        plan = load_plan(plan_of(path, step)).plan
        config = config_for(plan)
        tensors = list(describe.tensors(config.to_dict()))
        read = exports.checked(step, plan).joined
    if kernels != "torch":
        from nam_megatron.hf import fused

        raise_if(fused.unserved(config, dtype))  # before the weights are read
    model = _built(config, tensors, read, dtype, device)
    if kernels != "torch":
        fused.fuse(model)
    return model


def absent(device: str, kernels: str = "torch") -> Iterator[Problem]:
    """A device that this host cannot run on, or that the kernels cannot; for whoever reads much before a model is opened."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        yield Problem(f"no device `{device}`", hint="there are: cpu, cuda, cuda:0, ...")
    elif found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        yield Problem(f"this host has no `{device}`", hint="`--device cpu`")
    elif found.type == "cpu" and kernels != "torch":
        hint = "`--device cuda`, or leave out `--kernels`"
        yield Problem(f"the kernels of `{kernels}` compute on a GPU, not on `{device}`", hint=hint)


def is_export(path: Path) -> bool:
    return (path / folder.MANIFEST).is_file() or (path / folder.CONFIG).is_file()


def tokenizer_of(path: Path) -> Path:
    """The folder of the tokenizer that goes with an export or a checkpoint. Raises Refused."""
    if is_export(path):
        found: Path | None = path
    else:
        plan = plan_of(path, distributed.step_folder(path))
        found = trained_tokenizer(plan, load_plan(plan).plan)
    if found is None or not (found / tokenizer.FILE).is_file():
        at = f": it is not in `{found}`" if found not in (None, path) else ""
        raise Refused(f"no tokenizer goes with `{path}`{at}", hint="give one: `--tokenizer FOLDER`")
    return found


def identity(path: Path) -> dict[str, Any]:
    """What a result is bound to: the step; the hash of an export's weights, None: a checkpoint; and the hash of the checkpoint's
    checksums, which its export repeats. unproven: what of these nothing but the export's own manifest says.

    That the files are so is looked at where the model is opened. Raises Refused for what says nothing of itself.
    """
    if is_export(path):
        said = folder.load_json(path / folder.MANIFEST)
        hashes = {name: str(sha) for name, sha in (content.hashes(said) or {}).items() if name.endswith(".safetensors")}
        if said.get("weights") != folder.fingerprint(hashes):
            hint = "export again, or copy the whole folder"
            raise Refused(f"`{path / folder.MANIFEST}` says other `weights` than its shards are", hint=hint)
        step, checkpoint = said.get("step"), said.get("checkpoint")
        if not (step is None or STEP.fullmatch(str(step))) or not (
            checkpoint is None or HASH.fullmatch(str(checkpoint))
        ):
            raise Refused(f"`{path / folder.MANIFEST}` says a `step` or `checkpoint` that is none", hint="export again")
        unproven = [key for key in ("step", "checkpoint") if said.get(key) is not None]
        return {"step": step, "weights": said["weights"], "checkpoint": checkpoint, "unproven": unproven}
    step = distributed.step_folder(path)
    bound = checksums.whole(step) if (step / checksums.NAME).is_file() else None
    return {"step": step.name, "weights": None, "checkpoint": bound, "unproven": []}


def another_tokenizer(path: Path, given: Path) -> Iterator[Problem]:
    """Where a model, an export or a checkpoint, has learned other tokens than those of the folder `given`, as far as they are known."""
    at = path if is_export(path) else plan_of(path, distributed.step_folder(path)).parent
    if not exports.same_tokens(*exports.known_tokens(at), given):
        message = f"`{given}` is another tokenizer than that of `{at}`: its numbers stand for other texts"
        yield Problem(message, hint="give the one that the model was trained with")
        return
    with contextlib.suppress(Refused):  # nobody knows one
        yield from exports.other_ends(tokenizer_of(path), given, at)


def of_text(path: Path) -> dict[str, Any]:
    """`identity` of what reads text: its tokenizer is unproven where nothing says which tokens the model has learned."""
    found = identity(path)
    return found if known_tokens(path) else {**found, "unproven": [*found["unproven"], "tokenizer"]}


def known_tokens(path: Path) -> bool:
    """Whether anything says which tokens a model has learned."""
    return any(exports.known_tokens(path if is_export(path) else plan_of(path, distributed.step_folder(path)).parent))


def _built(
    config: NamConfig, tensors: list[Tensor], read: Callable[[Tensor], torch.Tensor], dtype: torch.dtype, device: str
) -> NamForCausalLM:
    with torch.device("meta"):
        model = NamForCausalLM(config)

    def placed(tensor: Tensor) -> Any:
        # fp32 parameters stay so beside bf16, and are no narrower than the rest.
        kept = torch.promote_types(dtype, torch.float32) if tensor.dtype == "F32" else dtype
        return read(tensor).to(device, kept)

    state = {tensor.name: placed(tensor) for tensor in tensors}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)
