"""Laws on FP8, and on whose kernels run."""

from collections.abc import Callable, Iterator, Sequence

from nam_megatron.compile.plan import Plan
from nam_megatron.errors import quoted
from nam_megatron.features.fp8 import Fp8
from nam_megatron.features.recompute import Recompute
from nam_megatron.laws.law import CONTRADICTION, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.laws.memory import selective
from nam_megatron.laws.sizes import FP8_ROW
from nam_megatron.packages import FLASH_KEY
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.layout import Parallel
from nam_megatron.recipe.model import Model
from nam_megatron.words.sizes import Sizes

AT = "feature.fp8."
RECIPE, PARTS, KEPT = AT + "recipe", AT + "bf16_parts", AT + "keep_inputs"
CONFIG = "core/transformer/transformer_config.py"
ENGINE = "Transformer Engine 2.20, pytorch/quantization.py"
EXTRA_STATE = "Transformer Engine 2.20, pytorch/_extra_state.py"
PICKLED = "a checkpoint has the scales of delayed scaling as a pickle, which Transformer Engine refuses to open"
DISCARDING = ("moe_act", "layernorm")
FLASH_WIDTH = 128  # of heads that FlashAttention 4 has been tried with


# Of these matrices ranks share the columns, of all others the rows.
COLUMNS = "linear_proj", "linear_fc2", "out_proj"
# What a width comes of, by a part of its matrix's name; else of its kind's keys.
WIDTHS = {
    "mlp.linear_fc": "ffn_hidden_size", "latent_proj": "blocks.moe.latent_size", "mlp.experts.": "blocks.moe.expert_hidden_size",
    "mlp.shared_experts.": "blocks.moe.shared_expert_hidden_size", "linear_qkv": "blocks.attention.head_dim",
    "q_down_proj": "blocks.mla.q_lora_rank", "kv_down_proj": "blocks.mla.kv_lora_rank",
}  # fmt: skip


def _uneven_widths(fp8: Fp8, plan: Plan) -> Iterator[Words]:
    """Each once. Of a mixer's input projection only the columns: its rows have laws of their own."""
    site, seen = plan.site, set()
    for kind, matrix, widths in _matrices(fp8, plan):
        for width in widths[matrix.endswith("in_proj") :]:
            if width % FP8_ROW and width not in seen:
                seen.add(width)
                key = next((key for part, key in WIDTHS.items() if part in matrix), f"blocks.{kind}")
                key = "hidden_size" if width == site.hidden_size else key
                yield {"key": f"model.{key}", "width": width, "matrix": matrix}


def _matrices(fp8: Fp8, plan: Plan) -> Iterator[tuple[str, str, Sequence[int]]]:
    """(kind, name, rows and columns on a rank) of what layers multiply in FP8."""
    site = plan.site
    shares = {"replicated": 1, "tensor": site.tensor, "expert": site.expert_tensor}
    for kind, layer in [*((layer.kind, layer) for layer in site.layers), *((kind, None) for kind in site.mtp)]:
        for param in site.blocks.of(kind).params(Sizes.of(site), layer):
            if fp8.quantises(site, kind, layer.number if layer else None, param):
                widths = list(param.shape)
                widths[any(name in param.name for name in COLUMNS)] //= shares[param.shard]
                yield kind, param.name.removesuffix("*").removesuffix(".weight"), widths


def _too_many_edges(fp8: Fp8, model: Model, parallel: Parallel) -> Iterator[Words]:
    most = model.depth // parallel.pipeline
    for name in ("bf16_layers_at_start", "bf16_layers_at_end"):
        if (getattr(fp8, name) or 0) > most:
            yield {"key": AT + name, "most": most}


def _flash_widths(plan: Plan) -> dict[str, tuple[int, int]]:
    """Kind -> the widths of its heads' queries and values, of the kinds whose core attention is chosen."""
    blocks, kinds = plan.recipe.blocks, plan.kinds | set(plan.mtp)
    widths = {}
    if blocks.attention and "attention" in kinds:
        widths["attention"] = blocks.attention.head_dim, blocks.attention.head_dim
    if blocks.mla and "mla" in kinds:
        widths["mla"] = blocks.mla.qk_head_dim + blocks.mla.qk_rope_head_dim, blocks.mla.v_head_dim
    return widths


def _flash(recipe: Recipe) -> bool:
    return recipe.precision.attention_kernels == "flash_attention_4"


def _odd_heads(plan: Plan, recipe: Recipe) -> Iterator[Words]:
    for kind, (queries, values) in _flash_widths(plan).items():
        fit = queries % 8 == values % 8 == 0 and max(queries, values) <= FLASH_WIDTH
        if _flash(recipe) and not fit:
            yield {"kind": kind, "queries": queries, "values": values}


def _window(recipe: Recipe) -> bool:
    block = recipe.blocks.attention
    return block is not None and block.window is not None


def _sinks(recipe: Recipe) -> bool:
    block = recipe.blocks.attention
    return block is not None and block.sinks


def graphs_of_parts(recipe: Recipe) -> bool:
    graphs = recipe.feature.cuda_graphs
    return graphs is not None and bool(graphs.modules)


def flash_untried(what: str, asked: Callable[[Recipe], object], said: str) -> Law:
    return Law(
        id=f"flash4-{what}",
        category=UNTRIED,
        key=FLASH_KEY,
        when=lambda recipe: _flash(recipe) and asked(recipe),
        says=f"FlashAttention 4 has not been tried with {said}",
        way=f"set `{FLASH_KEY}=transformer_engine`",
    )


def inputs_untried(what: str, asked: Callable[[Recipe], object], said: str) -> Law:
    return Law(
        id=f"fp8-inputs-{what}",
        category=UNTRIED,
        key=KEPT,
        when=lambda fp8, recipe: fp8.keep_inputs and asked(recipe),
        says=f"keeping FP8 inputs has not been tried with {said}",
        way=f"set `{KEPT}=false`",
    )


def _recompute_of_parts(recipe: Recipe) -> bool:
    recompute = recipe.feature.recompute
    return recompute is not None and recompute.granularity != "full"


def delayed(
    what: str, category: str, asked: Callable[[Recipe], object], says: str, key: str, off: str, source: str
) -> Law:
    """A law on delayed scaling. key: what stands in its way; off: the value that takes it away."""
    return Law(
        id=f"fp8-delayed-{what}",
        category=category,
        key=key if key.startswith(AT) else RECIPE,
        when=lambda fp8, recipe: fp8.recipe == "delayed" and asked(recipe),
        says=says,
        way=f"set `{RECIPE}=tensorwise`, or `{key}={off}`",
        source=source,
    )


def _delayed_discarding(fp8: Fp8, recompute: Recompute) -> Words | None:
    found = [part for part in selective(recompute) if part in DISCARDING]
    return {"parts": quoted(found)} if fp8.recipe == "delayed" and found else None


def _fp8(recipe: Recipe) -> Fp8:
    assert recipe.feature.fp8 is not None
    return recipe.feature.fp8


LAWS = (
    Law(id="compiled-loss-deterministic", category=WRONG, key="precision.cross_entropy",
        when=lambda precision: precision.deterministic and precision.cross_entropy == "compiled",
        says="Megatron's compiled cross entropy is not deterministic",
        way="set `precision.cross_entropy=fused`, or `megatron`", source="core/fusions/fused_cross_entropy.py"),
    Law(id="flash4-of-nothing", category=CONTRADICTION, key=FLASH_KEY,
        when=lambda recipe, plan: _flash(recipe) and not _flash_widths(plan),
        says="no layer has a core attention that this would choose", way=f"set `{FLASH_KEY}=transformer_engine`"),
    Law(id="flash4-width", category=UNTRIED, key=FLASH_KEY,
        when=_odd_heads, title="FlashAttention 4 has not been tried with heads of these widths",
        says="heads of {kind} are {queries} and {values} wide, and FlashAttention 4 has been tried up to "
            f"{FLASH_WIDTH}, in steps of 8", way=f"set `{FLASH_KEY}=transformer_engine`"),
    flash_untried("window", _window, "a window"),
    flash_untried("sinks", _sinks, "sinks"),
    flash_untried("context", lambda r: r.parallel.context > 1, "context ranks"),
    flash_untried("dropout", lambda r: r.model.attention_dropout > 0, "dropout"),
    flash_untried("deterministic", lambda r: r.precision.deterministic, "`precision.deterministic`"),
    flash_untried("documents", lambda r: r.data.sft, "packed documents"),
    flash_untried("graphs", graphs_of_parts, "CUDA graphs of parts of layers"),
    Law(id="fused-gradients-fsdp", category=REFUSES, key="precision.fused_grad_accumulation",
        when=lambda precision, megatron_fsdp: precision.fused_grad_accumulation,
        says="Megatron-FSDP does not keep the buffer that gradients would be added to", way="set it to false",
        source="core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"),
    Law(id="cudnn-norms-fsdp", category=REFUSES, key="precision.norm_kernels",
        when=lambda precision, megatron_fsdp: precision.norm_kernels == "cudnn",
        says="cuDNN's norms want weights at multiples of 16 bytes, and Megatron-FSDP packs a norm's behind whatever is before it",
        way="set it to transformer_engine", source="core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py"),
    Law(id="fp8-parts-of-nothing", category=CONTRADICTION, key=PARTS,
        when=lambda fp8, plan: fp8.bf16_parts
            and not any(fp8.standing(plan.site))
            and {"parts": " or ".join(fp8.bf16_parts)}, says="this model has no {parts} to keep in bf16",
        way="set it to []"),
    Law(id="fp8-parts-ungrouped-experts", category=OURS, key=PARTS,
        when=lambda fp8, moe, plan: "experts" in fp8.standing(plan.site) and not moe.grouped_gemm,
        says="experts without grouped GEMM are in FP8 with all other layers", way="leave `experts` out",
        source="nam_megatron/runtime/bf16_parts.py"),
    Law(id="fp8-parts-graphs", category=UNTRIED, key=PARTS,
        when=lambda fp8, plan, recipe: any(fp8.standing(plan.site)) and graphs_of_parts(recipe),
        says="CUDA graphs of parts of layers have not been tried with parts in bf16",
        way="set it to [], or `feature.cuda_graphs.impl=none`"),
    Law(id="fp8-parts-fp8-weights", category=CONTRADICTION, key=PARTS,
        when=lambda fp8: fp8.bf16_parts and fp8.param_gather,
        says="weights that are gathered in FP8 are FP8 in all parts", way=f"set it to [], or `{AT}param_gather=false`"),
    Law(id="fp8-delayed-bf16-layers", category=REFUSES, key=AT + "first_last_bf16",
        when=lambda fp8: fp8.recipe == "delayed" and fp8.first_last_bf16,
        says="delayed scaling excludes bf16 edge layers",
        way=f"set `{RECIPE}=tensorwise`, or `{AT}first_last_bf16=false`", source=CONFIG),
    delayed(
        "inputs",
        CONTRADICTION,
        lambda r: _fp8(r).keep_inputs,
        "delayed scaling keeps FP8 inputs by itself",
        KEPT,
        "false",
        ENGINE,
    ),
    Law(id="fp8-delayed-discarding", category=REFUSES, key=RECIPE,
        when=_delayed_discarding, says="delayed scaling excludes recompute of `moe_act` and `layernorm`",
        way=f"set `{RECIPE}=tensorwise`, or leave {{parts}} out of `feature.recompute.modules`", source=CONFIG),
    delayed("save", REFUSES, lambda r: r.schedule.save, PICKLED, "schedule.save", "null", EXTRA_STATE),
    delayed("load", REFUSES, lambda r: r.schedule.load, PICKLED, "schedule.load", "null", EXTRA_STATE),
    delayed(
        "evaluations",
        WRONG,
        lambda r: r.schedule.eval_steps,
        "evaluations would change the scales of delayed scaling, and so what is trained",
        "schedule.eval_steps",
        "0",
        ENGINE,
    ),
    Law(id="fp8-delayed-recompute", category=UNTRIED, key=RECIPE,
        when=lambda fp8, mamba3: fp8.recipe == "delayed" and mamba3.recompute != "none",
        says="delayed scaling has not been tried with a projection that is computed again",
        way=f"set `{RECIPE}=tensorwise`, or `execution.mamba3.recompute=none`"),
    inputs_untried("blockwise", lambda r: _fp8(r).recipe == "blockwise", "scaling `blockwise`"),
    inputs_untried("recompute", _recompute_of_parts, "recompute of parts of layers"),
    inputs_untried("graphs", graphs_of_parts, "CUDA graphs of parts of layers"),
    inputs_untried("adapters", lambda r: r.feature.lora, "adapters"),
    Law(id="fp8-inputs-of-nothing", category=CONTRADICTION, key=KEPT,
        when=lambda fp8, plan: fp8.keep_inputs and not fp8.quantises_twice(plan.site),
        says="this model has no attention and no shared experts in FP8 whose inputs would be quantised twice",
        way=f"set `{KEPT}=false`"),
    Law(id="fp8-weights-unsharded", category=REFUSES, key=AT + "param_gather",
        when=lambda fp8, feature: fp8.param_gather
            and not (feature.distributed_optimizer.enabled or feature.megatron_fsdp),
        says="FP8 all-gather needs sharded weights", way="set `feature.distributed_optimizer.enabled=true`",
        source="training/arguments.py"),
    Law(id="bf16-layers-beyond-stage", category=REFUSES, key=AT + "bf16_layers_at_start",
        when=_too_many_edges, says="more bf16 layers than the {most} of a pipeline stage", source=CONFIG),
    Law(id="fp8-widths-uneven", category=REFUSES, key="model.hidden_size",
        when=_uneven_widths, says="FP8 GEMMs need widths that 16 divides, not {width} of `{matrix}` on a rank",
        source="cuBLAS: FP8 GEMMs want widths that 16 divides"),
)  # fmt: skip
