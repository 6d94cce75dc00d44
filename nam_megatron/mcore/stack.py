"""Plan -> Megatron's hybrid stack spec: the only builder of HybridStackSubmodules (torch side).

Megatron's own spec is core/models/hybrid/hybrid_layer_specs.py (megatron-core 0.19.2). Attention, MoE, MLP, Mamba-2 and
MTP are the very same modules here, so that the native lane is Megatron's model; only where a recipe says so (MoE's
`dispatcher: local`, Mamba-2's `strided`) does a subclass stand in its place. What differs: real norms on the latents of
MLA and DSA; M-slot layers routed by number; slots that the plan does not use refuse to be built instead of passing their
input through.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from nam_megatron.blocks.mla.layer import projections
from nam_megatron.errors import Problem, Refused, quoted, raise_if

# Which slot of HybridStackSubmodules builds a kind. All layers of one Megatron symbol share a slot.
SLOTS = {
    "attention": "attention_layer",
    "mla": "mla_layer",
    "dsa": "dsa_layer",
    "moe": "moe_layer",
    "mlp": "mlp_layer",
    "mamba2": "mamba_layer",
    "mamba3": "mamba_layer",
    "m2rnn": "mamba_layer",
}
# Kinds of the M slot for which Megatron has no mixer of its own.
OUR_MIXERS = ("mamba3", "m2rnn")

# Fields of each slot's spec that are meant to be empty, with the reason; any other empty field is refused, so that one
# which a later Megatron adds is refused too until somebody has looked at it.
_NO_CROSS = ("pre_cross_attn_layernorm", "cross_attention", "cross_attn_bda")
_NO_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")
_NO_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_EMPTY = {
    # The input norm is inside linear_qkv; Megatron itself puts TENorm on q and k when --qk-layernorm is given.
    "attention_layer": {
        *_NO_CROSS,
        *_NO_MLP,
        "input_layernorm",
        "self_attention.q_layernorm",
        "self_attention.k_layernorm",
    },
    # --mla-down-proj-fusion fills linear_qkv_down_proj itself, on a copy of this spec.
    "mla_layer": {*_NO_CROSS, *_NO_MLP, "self_attention.linear_qkv_down_proj"},
    "dsa_layer": {*_NO_CROSS, *_NO_MLP},
    # The norm is inside linear_fc1; the activation is the config's function.
    "mlp_layer": {*_NO_CROSS, *_NO_ATTENTION, "pre_mlp_layernorm", "mlp.activation_func"},
    # Used only with --use-te-activation-func; a backend without TE has none.
    "moe_layer": {*_NO_CROSS, *_NO_ATTENTION, "mlp.experts.activation_func", "mlp.shared_experts.activation_func"},
    # The norm is inside the mixer's in_proj.
    "mamba_layer": {"norm"},
    # The inner layers are built from the pattern with the slots above.
    "mtp_block_spec": {"layer_specs.0.mtp_model_layer"},
}


def hybrid_stack_spec(
    plan: Any, backend: BackendSpecProvider | None = None, mixers: Mapping[str, ModuleSpec] | None = None
) -> ModuleSpec:
    """The spec of the decoder (and of MTP's inner stacks) for `plan`, complete or refused.

    plan: `layers` (each with `number`, Megatron's from 1, and `kind`), `mtp`, the kinds of one MTP depth, and `recipe`.
    backend: Megatron's provider of module classes, with `linear()` for replicated ones; None is Transformer Engine.
    mixers: kind -> spec of its mixer, in place of blocks/<kind>/layer.py's. A mixer normalises its own input: its
      submodules must hold the backend's norm or its norm-and-linear.

    The norms on the latents of MLA and DSA need --qk-layernorm: Megatron's resolver refuses them without it.

    Raises:
        Refused: kernels that cannot serve the plan, a mixer without a norm, a backend that leaves a slot empty.
    """
    backend = transformer_engine_backend() if backend is None else backend
    kinds = {layer.kind for layer in plan.layers} | set(plan.mtp)
    assert kinds <= SLOTS.keys(), f"kinds without a slot: {kinds - SLOTS.keys()}"
    used = {SLOTS[kind] for kind in kinds} | ({"mtp_block_spec"} if plan.mtp else set())
    build = {
        "attention_layer": _attention,
        "mla_layer": lambda b: (_mla if megatrons(plan, "mla") else ours("mla").spec)(b, plan),
        "dsa_layer": lambda b: (_dsa if megatrons(plan, "dsa") else ours("dsa").spec)(b, plan),
        "mlp_layer": _mlp,
        "moe_layer": lambda b: _moe(b, plan),
        "mamba_layer": lambda b: _mamba(b, plan, _our_mixers(plan, b, mixers or {})),
        "mtp_block_spec": _mtp,
    }
    slots = {
        f.name: build[f.name](backend) if f.name in used else _absent(f.name) for f in fields(HybridStackSubmodules)
    }
    raise_if(_empty_slots({name: slots[name] for name in used}, plan))
    return ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**slots))


def transformer_engine_backend() -> BackendSpecProvider:
    """Megatron's TE modules.

    Raises:
        Refused: TE cannot be imported or is too old; Megatron would go on with mocks, or with one GEMM per expert.
    """
    if not te.HAVE_TE:
        hint = "install the `train` extra on a machine with Transformer Engine"
        raise Refused(Problem("Transformer Engine cannot be imported, so no trainable stack can be built", hint=hint))
    if te.TEColumnParallelGroupedLinear is None:
        raise Refused(Problem("this Transformer Engine has no grouped linear layer for the experts", hint="use 2.20.2"))
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def ours(kind: str) -> ModuleType:
    """blocks/<kind>/layer.py: `spec(backend, plan)`, and `EMPTY`, the fields of it that are meant to be empty."""
    return importlib.import_module(f"nam_megatron.blocks.{kind}.layer")


def megatrons(plan: Any, kind: str) -> bool:
    """Whether the recipe chose Megatron's own modules for this kind."""
    return getattr(plan.recipe.model.blocks, kind).kernels == "megatron"


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


def _layer(input_layernorm: Any, self_attention: ModuleSpec) -> ModuleSpec:
    norm = {} if input_layernorm is None else {"input_layernorm": input_layernorm}
    parts = TransformerLayerSubmodules(**norm, self_attention=self_attention, self_attn_bda=get_bias_dropout_add)
    return ModuleSpec(TransformerLayer, submodules=parts)


def _attention(backend: BackendSpecProvider) -> ModuleSpec:
    parts = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_layer_norm_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
    )
    return _layer(None, ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts))


def _mla(backend: BackendSpecProvider, plan: Any) -> ModuleSpec:
    parts = MLASelfAttentionSubmodules(core_attention=backend.core_attention(), **projections(backend, plan))
    mla = ModuleSpec(MLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    return _layer(backend.layer_norm(rms_norm=True), mla)


def _dsa(backend: BackendSpecProvider, plan: Any) -> ModuleSpec:
    linear = backend.linear()
    indexer = DSAIndexerSubmodules(
        linear_wq_b=linear, linear_wk=linear, k_norm=backend.layer_norm(), linear_weights_proj=linear
    )
    core = DSAttentionSubmodules(indexer=ModuleSpec(DSAIndexer, submodules=indexer))
    parts = AbsorbedMLASelfAttentionSubmodules(
        core_attention=ModuleSpec(DSAttention, submodules=core), **projections(backend, plan)
    )
    dsa = ModuleSpec(AbsorbedMLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    return _layer(backend.layer_norm(rms_norm=True), dsa)


def _mlp(backend: BackendSpecProvider) -> ModuleSpec:
    mlp = MLPSubmodules(
        linear_fc1=backend.column_parallel_layer_norm_linear(), linear_fc2=backend.row_parallel_linear()
    )
    parts = TransformerLayerSubmodules(mlp=partial(MLP.as_mlp_submodule, submodules=mlp), mlp_bda=get_bias_dropout_add)
    return ModuleSpec(MLPLayer, submodules=parts)


def _moe(backend: BackendSpecProvider, plan: Any) -> ModuleSpec:
    # num_experts only has to be given; MoELayer takes the number from the config. It is the spec that decides about
    # grouped GEMM: Megatron's own hybrid spec groups whatever --moe-grouped-gemm says.
    grouped = plan.recipe.model.blocks.moe.grouped_gemm
    moe = get_moe_module_spec_for_backend(backend, num_experts=1, moe_grouped_gemm=grouped)
    if plan.recipe.model.blocks.moe.dispatcher == "local":
        moe = partial(ours("moe").LocalMoELayer, **moe.keywords)
    parts = TransformerLayerSubmodules(
        pre_mlp_layernorm=backend.layer_norm(rms_norm=True), mlp=moe, mlp_bda=get_bias_dropout_add
    )
    return ModuleSpec(MoETransformerLayer, submodules=parts)


def _mtp(backend: BackendSpecProvider) -> ModuleSpec:
    norm = backend.layer_norm(rms_norm=True)
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=backend.column_parallel_linear(), mtp_model_layer=None, layer_norm=norm
    )
    depth = ModuleSpec(MultiTokenPredictionLayer, submodules=parts)
    return ModuleSpec(MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth]))


def _mamba(backend: BackendSpecProvider, plan: Any, mixers: Mapping[str, ModuleSpec]) -> ModuleSpec:
    mamba2 = MambaMixerSubmodules(
        in_proj=backend.column_parallel_layer_norm_linear(), out_proj=backend.row_parallel_linear()
    )
    module = ours("mamba2").StridedMambaMixer if plan.recipe.model.blocks.mamba2.strided else MambaMixer
    table = {"mamba2": ModuleSpec(module, submodules=mamba2), **mixers}
    by_number = {x.number: table[x.kind] for x in plan.layers if SLOTS[x.kind] == "mamba_layer"}
    by_depth = {i: table[kind] for i, kind in enumerate(plan.mtp, 1) if SLOTS[kind] == "mamba_layer"}
    # With Mamba-2 alone the spec is Megatron's own, without a router.
    routed = ModuleSpec(MixerRouter, params={"by_number": by_number, "by_depth": by_depth})
    mixer = routed if mixers else table["mamba2"]
    return ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add))


def _our_mixers(plan: Any, backend: BackendSpecProvider, given: Mapping[str, ModuleSpec]) -> dict[str, ModuleSpec]:
    kinds = [kind for kind in OUR_MIXERS if kind in plan.mtp or any(layer.kind == kind for layer in plan.layers)]
    mixers = {kind: given.get(kind) or ours(kind).spec(backend, plan) for kind in kinds}
    raise_if(_without_norm(mixers, backend))
    return mixers


def _without_norm(mixers: Mapping[str, ModuleSpec], backend: BackendSpecProvider) -> Iterator[Problem]:
    norms = (backend.column_parallel_layer_norm_linear(), backend.layer_norm(rms_norm=True))
    for kind, spec in mixers.items():
        if not any(value in norms for _, value in _leaves(spec)):
            hint = "use the backend's norm-and-linear for `in_proj`, as Megatron's Mamba mixer does"
            yield Problem(f"the mixer of `{kind}` has no norm for its input, and the M slot has none", hint=hint)


def _empty_slots(slots: Mapping[str, ModuleSpec], plan: Any) -> Iterator[Problem]:
    for slot, spec in slots.items():
        meant = _EMPTY[slot]
        if kind := {"mla_layer": "mla", "dsa_layer": "dsa"}.get(slot):
            meant = meant if megatrons(plan, kind) else ours(kind).EMPTY
            if not plan.recipe.model.blocks.mla.latent_norm:
                meant = meant | {"self_attention.q_layernorm", "self_attention.kv_layernorm"}
        empty = {path for path, value in _leaves(spec) if value in (None, IdentityOp, IdentityFuncOp)}
        if bad := sorted(empty - meant):
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
