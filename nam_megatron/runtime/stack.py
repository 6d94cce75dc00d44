"""Plan -> Megatron's hybrid stack spec: the only builder of HybridStackSubmodules (torch side).

Megatron's own spec is core/models/hybrid/hybrid_layer_specs.py (megatron-core 0.19.2). Attention, MoE, MLP, Mamba-2 and
MTP are the very same modules, so that the native lane is Megatron's model; only where a recipe says so (MoE's `dispatcher: local`,
Mamba-2's `strided`) does a subclass stand in its place. What differs: real norms on the latents of MLA and DSA; M-slot layers routed
by number; slots that the plan does not use refuse to be built instead of passing their input through. Each kind builds its own
layer: blocks/<kind>/layer.py.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from nam_megatron import installed as versions
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem, Refused, quoted, raise_if
from nam_megatron.mends import install
from nam_megatron.packages import FLASH, FLASH_CHOICE, flash_attention, installed
from nam_megatron.targets import current

MAMBA, MTP = "mamba_layer", "mtp_block_spec"
# Fields of a layer's spec that are meant to be empty, with the reason; any other empty field is refused, so that one which a later
# Megatron adds is refused too until somebody has looked at it. Each kind has its own list: `empty` of its layer.py.
EMPTY = {
    MAMBA: {"norm"},  # inside the mixer's in_proj
    MTP: {"layer_specs.0.mtp_model_layer"},  # the inner layers are built from the pattern with the other slots
}


def hybrid_stack_spec(
    plan: Plan, backend: BackendSpecProvider | None = None, mixers: Mapping[str, ModuleSpec] | None = None
) -> ModuleSpec:
    """The spec of the decoder (and of MTP's inner stacks) for `plan`, complete or refused.

    backend: Megatron's provider of module classes, with `linear()` for replicated ones; None is Transformer Engine.
    mixers: kind -> spec of its mixer, in place of what its layer.py makes. A mixer normalises its own input: its
      submodules must hold the backend's norm or its norm-and-linear.

    The norms on the latents of MLA and DSA need --qk-layernorm: Megatron's resolver refuses them without it.

    Raises:
        Refused: kernels that cannot serve the plan, a mixer without a norm, a backend that leaves a slot empty.
    """
    versions.ask()
    if backend is None:
        backend = transformer_engine_backend()
        if plan.recipe.precision.attention_kernels == "flash_attention_4":
            from nam_megatron.runtime.flash_attention import FlashBackend

            backend = FlashBackend()
    blocks = [block for block in plan.blocks if block.kind in plan.kinds]
    slots: dict[str, Any] = {f.name: _absent(f.name) for f in fields(HybridStackSubmodules)}
    empty: dict[str, Collection[str]] = dict(EMPTY)
    for block in blocks:
        assert block.slot in slots, f"this Megatron has no slot {block.slot}"
        if block.slot != MAMBA:
            layer = torch_side(block.kind)
            slots[block.slot], empty[block.slot] = layer.spec(backend, block, plan.site), layer.empty(block, plan.site)
    if mixing := [block for block in blocks if block.slot == MAMBA]:
        given = mixers or {}
        table = {b.kind: given.get(b.kind) or torch_side(b.kind).spec(backend, b, plan.site) for b in mixing}
        raise_if(_without_norm(table, backend))
        slots[MAMBA] = _mamba(plan, table)
    if plan.mtp:
        slots[MTP] = _mtp(backend)
    standing = {n: spec for n, spec in slots.items() if not _is_absent(spec)}
    raise_if(_empty_slots(standing, empty))
    hooks = {"hooks": [partial(install.built, plan=plan)]}
    stack = ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**slots), metainfo=hooks)
    for feature in plan.recipe.feature.all():
        if feature.torch_side:
            side = import_module(f"nam_megatron.runtime.{feature.torch_side}")
            stack = side.build(feature, stack, {n: spec for n, spec in standing.items() if n != MTP})
    return stack


def torch_side(kind: str) -> Any:
    """The module that builds a kind's layer: blocks/__init__.py says what it has."""
    return import_module(f"nam_megatron.blocks.{kind}.layer")


def transformer_engine_backend() -> BackendSpecProvider:
    """Megatron's TE modules.

    Raises:
        Refused: TE cannot be imported or is too old; Megatron would go on with mocks, or with one GEMM per expert. Or it was told to take
            FlashAttention 4 by itself; where nobody said, this process tells it not to.
    """
    if not te.HAVE_TE:
        hint = "install the `train` extra on a machine with Transformer Engine"
        raise Refused("Transformer Engine cannot be imported, so no trainable stack can be built", hint=hint)
    if te.TEColumnParallelGroupedLinear is None:
        message = "this Transformer Engine has no grouped linear layer for the experts"
        raise Refused(message, hint=f"use {current().te_version}")
    os.environ.setdefault(FLASH_CHOICE, "0")  # read whenever a layer attends
    raise_if(flash_attention(installed(FLASH), os.environ))
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


class MixerRouter:
    """`module` of the M slot's mixer spec: building it builds the mixer that the plan has at that layer.

    by_number: Megatron's layer number, from 1 over the whole model -> mixer spec.
    by_depth: position from 1 within one MTP depth -> mixer spec. MTP's inner stacks restart their numbering, so only
    the module name that HybridModel hands down tells the two apart.
    """

    def __new__(
        cls,
        config: Any,
        *,
        by_number: Mapping[int, ModuleSpec],
        by_depth: Mapping[int, ModuleSpec],
        layer_number: int,
        name: str | None,
        **kwargs: Any,
    ) -> Any:
        assert name is not None, "an M-slot layer without a module name: the decoder and MTP cannot be told apart"
        table = by_depth if name.startswith("mtp") else by_number
        assert layer_number in table, f"{name}: the plan has no M-slot layer at number {layer_number}"
        return build_module(table[layer_number], config, layer_number=layer_number, name=name, **kwargs)


class AbsentSlot:
    """`module` of a slot that the plan does not use: IdentityOp would let a wrong pattern train without the layer."""

    def __new__(cls, *args: Any, slot: str, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"the plan has no layer for slot {slot}, but Megatron's pattern does")


def _absent(slot: str) -> ModuleSpec | None:
    # HybridModel itself asserts that an MTP pattern comes with a spec.
    return None if slot == "mtp_block_spec" else ModuleSpec(AbsentSlot, params={"slot": slot})


def _is_absent(spec: ModuleSpec | None) -> bool:
    return spec is None or spec.module is AbsentSlot


def _mtp(backend: BackendSpecProvider) -> ModuleSpec:
    norm = backend.layer_norm(rms_norm=True)
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=backend.column_parallel_linear(), mtp_model_layer=None, layer_norm=norm
    )
    depth = ModuleSpec(MultiTokenPredictionLayer, submodules=parts)
    return ModuleSpec(MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth]))


def _mamba(plan: Plan, table: Mapping[str, ModuleSpec]) -> ModuleSpec:
    """The M slot's layer. With Mamba-2 alone the spec is Megatron's own, without a router. table: kind -> spec of its mixer."""
    by_number = {layer.number: table[layer.kind] for layer in plan.layers if layer.kind in table}
    by_depth = {i: table[kind] for i, kind in enumerate(plan.mtp, 1) if kind in table}
    routed = ModuleSpec(MixerRouter, params={"by_number": by_number, "by_depth": by_depth})
    mixer = routed if any(not block.stock for block in plan.blocks) else next(iter(table.values()))
    return ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add))


def _without_norm(mixers: Mapping[str, ModuleSpec], backend: BackendSpecProvider) -> Iterator[Problem]:
    norms = (backend.column_parallel_layer_norm_linear(), backend.layer_norm(rms_norm=True))
    for kind, spec in mixers.items():
        if not any(value in norms for _, value in _leaves(spec)):
            hint = "use the backend's norm-and-linear for `in_proj`, as Megatron's Mamba mixer does"
            yield Problem(f"the mixer of `{kind}` has no norm for its input, and the M slot has none", hint=hint)


def _empty_slots(slots: Mapping[str, ModuleSpec], meant: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    for slot, spec in slots.items():
        empty = {path for path, value in _leaves(spec) if value in (None, IdentityOp, IdentityFuncOp)}
        if bad := sorted(empty - set(meant[slot])):
            yield Problem(f"slot `{slot}` would be built without {quoted(bad)}, which Megatron passes over in silence")


def _leaves(spec: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted field path, module class or other leaf) of a spec; looks into specs, dataclasses, partials and lists."""
    parts = None
    if isinstance(spec, ModuleSpec):
        routed = spec.module is MixerRouter
        parts = [*spec.params["by_number"].values(), *spec.params["by_depth"].values()] if routed else spec.submodules
    elif isinstance(spec, partial):
        parts = spec.keywords.get("submodules")
    elif isinstance(spec, list) or (is_dataclass(spec) and not isinstance(spec, type)):
        parts = spec
    if parts is None:
        yield path, spec
    elif isinstance(parts, list):
        for index, item in enumerate(parts):
            yield from _leaves(item, f"{path}.{index}".lstrip("."))
    else:
        for field in fields(parts):
            if field.name != "sharded_state_dict_keys_map":
                yield from _leaves(getattr(parts, field.name), f"{path}.{field.name}".lstrip("."))
