"""Model -> what is trained, in lines for people and as data for programs. Values nobody said are marked as Megatron's default."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from nam_megatron.errors import counted
from nam_megatron.lint.model import ATTENTION, MAMBA, TITLES, Model, known
from nam_megatron.lint.values import Args, Open, harmless


def rows(a: Args, m: Model) -> Iterator[tuple[str, str]]:
    """(label, text); a text of `?` where it hangs on a value that is not known."""

    def row(label: str, text: Callable[[], str | None]) -> Iterator[tuple[str, str]]:
        found = known(text, "?")
        if found is not None:
            yield label, found

    yield from row("model", lambda: _model(a, m))
    yield from row("layers", lambda: _layers(m))
    yield from row("MTP", lambda: _mtp(a, m))
    yield from row("parameters", lambda: _parameters(a, m))
    yield from row("width", lambda: f"hidden {m.need('hidden_size')}{_mlp(a, m)}")
    yield from row("attention", lambda: _attention(a, m))
    yield from row("positions", lambda: _positions(a, m))
    yield from row("norms", lambda: _norms(a, m))
    yield from row("activation", lambda: _activation(a, m))
    yield from row("experts", lambda: _experts(a, m))
    yield from row("Mamba", lambda: _mamba(a, m))
    yield from m.plan.rows() if m.plan else ()
    yield from row("sequence", lambda: f"{m.need('seq_length')} tokens")
    yield from row("dropout", lambda: ", ".join(f"{n} {_v(a, f'{n}_dropout')}" for n in ("hidden", "attention")))
    yield from row("embedding", lambda: _embedding(a, m))
    yield from row("precision", lambda: _precision(a, m))
    yield from row("optimizer", lambda: _optimizer(a, m))
    yield from row("layout", lambda: _layout(a, m))
    yield from row("batch", lambda: _batch(a, m))


def notes(a: Args, m: Model) -> Iterator[str]:
    """What is no trap and good to know."""
    yield from a.launch.notes
    yield from m.plan.notes() if m.plan else ()
    if a.script_flags:
        yield f"flags of the training script, not of Megatron's parser: {', '.join(dict.fromkeys(a.script_flags))}"
    if known(lambda: m.from_elsewhere):
        yield f"part of the description is elsewhere ({', '.join(m.from_elsewhere)}): what is said here is of these flags alone"
    if words := [t.about for t in a.trouble if t.rule == "unknown-variable"]:
        yield f"flags may stand in {', '.join(words)}: what is said here is of the others, and of no flag is said that it lacks"
    if paths := [
        f"{a.written(name).split()[0]} ({', '.join(f'${n}' for n in dict.fromkeys(names))})"
        for name, names in a.open_values()
        if harmless(name, a.target)
    ]:
        yield f"not set in the text, and no matter here: {', '.join(paths)}"
    if m.marked:
        ours = f"`--nam-model` says that layers are {', '.join(m.marked)} of ours"
        yield f"{ours}: stock Megatron stops at it; which and how large stands in plan.json"
    if known(lambda: "mamba2" in m.kinds and not m.hidden_mixers and not a.any_said(*MAMBA), False):
        plan = "" if m.a.launch.script and not m.ours else "; Mamba-3 and M2RNN of ours would stand in plan.json alone"
        yield f"`M` layers are taken as Mamba-2 of Megatron's default sizes: no flag says otherwise{plan}"
    if known(
        lambda: m.tp * m.cp > 1
        and not m.fsdp
        and not m.blackwell
        and "CUDA_DEVICE_MAX_CONNECTIONS" not in a.launch.env,
        False,
    ):
        yield "tensor and context parallelism demand CUDA_DEVICE_MAX_CONNECTIONS=1 on Hopper and before; the text does not export it"
    if known(lambda: a.log_throughput and m.hybrid and bool({"mla", "dsa"} & m.kinds), False):
        yield "the TFLOP/s that Megatron logs count `+` and `D` layers as 0"
    if known(lambda: a.optimizer in ("muon", "dist_muon"), False):
        yield "Muon takes every matrix but the embeddings: routers and DSA indexers included"


def data(a: Args, m: Model) -> dict[str, object]:
    """The same for programs; null where not known."""
    return {
        "kind": known(lambda: "hybrid" if m.hybrid else "gpt"),
        "num_layers": known(lambda: m.num_layers),
        "pattern": known(lambda: m.pattern),
        "layers": known(
            lambda: [{"number": n, "kind": None if m.hidden_mixers and k == "mamba2" else k} for n, k in m.layers]
        ),
        "mtp": known(lambda: {"depths": m.mtp_depths, "kinds": list(m.mtp_layers)}),
        "parameters": known(lambda: {"total": m.count.total, "active": m.count.active, "by": dict(m.count.by)}),
        "arguments": {name: _plain(a.value(name)) for name in sorted(a.given)},
        "text": dict(rows(a, m)),
    }


def _plain(value: object) -> object:
    """As JSON has it; null for what is not known, text for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return None if isinstance(value, Open) else value


def _v(a: Args, name: str) -> str:
    """A value, marked where it is Megatron's default."""
    value = getattr(a, name)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if a.said(name) else f"{text} (default)"


def _or_open(value: object) -> object:
    """A value that Megatron has no default for; `?` where the launch lacks it."""
    return "?" if value is None else value


def ranges(numbers: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as `1-3, 7`; evenly spaced ones as `1, 5, ... 49 (every 4)`."""
    if len(numbers) > 3 and len(steps := {b - a for a, b in pairwise(numbers)}) == 1 and (step := steps.pop()) > 1:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]} (every {step})"
    pieces, start = [], 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            first, last = numbers[start], numbers[i - 1]
            pieces.append(f"{first}-{last}" if last - first > 1 else ", ".join(map(str, numbers[start:i])))
            start = i
    return ", ".join(pieces)


def _model(a: Args, m: Model) -> str:
    if m.hybrid:
        return f"hybrid, {m.num_layers} layers" + (f": {m.pattern}" if m.pattern else "")
    return f"GPT, {m.num_layers} layers" + (
        "" if m.pattern is None else f" (the pattern {m.pattern} gives their number and nothing else)"
    )


def _layers(m: Model) -> str | None:
    titles = TITLES | ({"mamba2": "Mamba-2 or ours"} if m.hidden_mixers else {})
    lines = [f"{len(m.numbers(k)):>3} {titles[k]:<16} {ranges(m.numbers(k))}".rstrip() for k in TITLES if m.numbers(k)]
    return "\n".join(lines) or "none"


def _mtp(a: Args, m: Model) -> str | None:
    kinds = " + ".join(TITLES[k] for k in m.mtp_layers)
    return f"{m.mtp_depths} x ({kinds}), loss weight {a.mtp_loss_scaling_factor:g}" if m.mtp_depths else None


def _parameters(a: Args, m: Model) -> str:
    """Exact; without the embeddings where the tokenizer decides how many rows they have."""
    rest = ""
    if known(lambda: m.vocabulary) is None:
        embeddings = "two embeddings" if a.untie_embeddings_and_output_weights else "one embedding"
        rest = f" and {embeddings} of as many rows as the tokenizer has entries"
    elif m.vocabulary_is_the_tokenizers:
        rest = ", if the tokenizer has as many entries as --vocab-size says"
    active = f", {m.count.active:,} active per token" if m.count.active != m.count.total else ""
    return f"{m.count.total:,}{active}{rest}"


def _mlp(a: Args, m: Model) -> str:
    if "mlp" not in m.kinds:
        return ""
    return f", MLP {m.ffn}" + ("" if a.said("ffn_hidden_size") else " (default)")


def _attention(a: Args, m: Model) -> str | None:
    if not m.kinds & set(ATTENTION):
        return None
    lines = []
    if "attention" in m.kinds:
        kind = "MHA" if m.groups == m.heads else "MQA" if m.groups == 1 else "GQA"
        groups = f", {m.groups} key/value heads" if kind != "MHA" else ""
        lines.append(f"{kind}: {m.heads} heads of {m.head_dim}{groups}")
    if {"mla", "dsa"} & m.kinds:
        q = f"query latent {a.q_lora_rank}" if a.q_lora_rank is not None else "no query latent"
        lines.append(f"MLA: {m.heads} heads, {q}, key/value latent {_v(a, 'kv_lora_rank')}, head {_v(a, 'qk_head_dim')} + "
                     f"{_v(a, 'qk_pos_emb_head_dim')} with RoPE, value {_v(a, 'v_head_dim')}")  # fmt: skip
    if "dsa" in m.kinds:
        loss = f"{a.dsa_indexer_loss_coeff or 0:g}"
        top, heads, width = map(_or_open, (a.dsa_indexer_topk, a.dsa_indexer_n_heads, a.dsa_indexer_head_dim))
        text = f"DSA: top {top} by {heads} indexer heads of {width}, loss {loss}"
        shared: dict[int, list[int]] = {}
        for n in m.numbers("dsa"):
            if (source := m.topk_source(n)) != n:
                shared.setdefault(source, []).append(n)
        if shared:
            text += "; top-k shared " + "; ".join(f"{s} -> {', '.join(map(str, to))}" for s, to in shared.items())
        lines.append(text)
    if a.window_size is not None and "attention" in m.kinds:
        lines.append(f"window {a.window_size}")
    return "\n".join(lines)


def _positions(a: Args, m: Model) -> str:
    default = "" if a.any_said("position_embedding_type", "use_rotary_position_embeddings") else " (default)"
    table = (
        f"learned table of {_or_open(a.max_position_embeddings)}{default}"
        if m.positions == "learned_absolute"
        else None
    )
    own = []
    if m.mla and {"mla", "dsa"} & m.kinds:
        scaled = f", factor {a.rotary_scaling_factor:g}" if m.rope_type == "yarn" else ""
        own.append(
            f"MLA: {m.rope_type}{'' if a.said('rope_type') else ' (default)'}{scaled}, base {_v(a, 'rotary_base')}"
        )
    if "attention" in m.kinds and m.gpt_oss:
        own.append(f"yarn of gpt-oss by --enable-gpt-oss (factor 32 over 131072 tokens), base {_v(a, 'rotary_base')}")
    elif "attention" in m.kinds and not table:
        if m.positions in ("rope", "yarn") and not (m.hybrid and m.mla):
            scaled = f", scaled by {a.rope_scaling_factor:g}" if a.use_rope_scaling and not m.hybrid else ""
            part = f", {a.rotary_percent:.0%} of the head" if a.rotary_percent != 1 else ""
            own.append(f"{'RoPE' if m.positions == 'rope' else 'yarn'}, base {_v(a, 'rotary_base')}{part}{scaled}")
        else:
            own.append("none in attention" if m.positions != "mrope" or m.hybrid else "mrope")
    return "; ".join([*([table] if table else []), *own]) or f"none ({m.positions})"


def _norms(a: Args, m: Model) -> str:
    extra = []
    if "attention" in m.kinds:
        extra.append(
            "on queries and keys"
            if a.qk_layernorm
            else "L2 on queries and keys"
            if a.qk_l2_norm
            else "none on queries and keys"
        )
    if {"mla", "dsa"} & m.kinds:
        extra.append("on MLA's latents" if a.qk_layernorm else "none on MLA's latents")
    return ", ".join([f"{_v(a, 'normalization')}, epsilon {_v(a, 'layernorm_epsilon')}", *extra])


def _activation(a: Args, m: Model) -> str:
    default = "" if a.any_said("swiglu", "squared_relu", "quick_geglu") else " (default)"
    gate, bias = "gated" if m.gated else "not gated", "linear bias" if a.add_bias_linear else "no linear bias"
    return f"{m.activation}{default}, {gate}, {bias}"


def _experts(a: Args, m: Model) -> str | None:
    if not m.moe:
        return None
    shared = f", one shared of {a.moe_shared_expert_intermediate_size}" if a.moe_shared_expert_intermediate_size else ""
    width = f"{m.moe_ffn}" + ("" if a.said("moe_ffn_hidden_size") else " (default: the MLP's)")
    balance = "expert bias" if a.moe_router_enable_expert_bias else ""
    losses = [f"{b} {c:g}" for b, c in zip(m.balancing, m.aux_coefficients, strict=False) if c]
    drop = "dropless" if a.moe_expert_capacity_factor is None else f"capacity {a.moe_expert_capacity_factor:g}"
    routing = (
        f"scores {_v(a, 'moe_router_score_function')}, router in {a.moe_router_dtype or 'the dtype of the weights'}"
    )
    balanced = " and ".join(filter(None, [balance, *losses])) or "nothing"
    lines = (
        f"{_or_open(a.num_experts)} of {width}, top {_v(a, 'moe_router_topk')}{shared}",
        f"{routing}, balanced by {balanced}",
        f"{drop}, dispatcher {m.plan.dispatcher if m.plan else _v(a, 'moe_token_dispatcher_type')}",
    )
    return "\n".join(lines)


def _mamba(a: Args, m: Model) -> str | None:
    if "mamba2" not in m.kinds or m.hidden_mixers:
        return None
    heads = f"{m.mamba_heads}" + ("" if a.said("mamba_num_heads") else " (default)")
    return f"{heads} heads of {_v(a, 'mamba_head_dim')}, state {_v(a, 'mamba_state_dim')}, {_v(a, 'mamba_num_groups')} groups"


def _embedding(a: Args, m: Model) -> str:
    tied = "untied" if a.untie_embeddings_and_output_weights else "tied to the output (default)"
    rows_ = known(lambda: f"{m.vocabulary:,} rows", "rows as the tokenizer has entries")
    return f"{rows_}, {tied}"


def _precision(a: Args, m: Model) -> str:
    base = "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32 (default)"
    if a.fp8:
        return f"{base} with FP8 {a.fp8}, {_v(a, 'fp8_recipe')} scaling"
    return f"{base} with FP4 {a.fp4}" if a.fp4 else base


def _optimizer(a: Args, m: Model) -> str:
    names = {"adam": "AdamW"}
    rate = f"lr {a.lr:g} -> {a.min_lr:g} {_v(a, 'lr_decay_style')}" if a.lr is not None else "lr ?"
    betas = f", betas {_v(a, 'adam_beta1')} {_v(a, 'adam_beta2')}" if a.optimizer != "sgd" else ""
    sharded = ", sharded" if a.use_distributed_optimizer or m.fsdp else ""
    name = f"{names.get(a.optimizer, a.optimizer)}{sharded}"
    return f"{name}, {rate}, weight decay {_v(a, 'weight_decay')}{betas}, clip {_v(a, 'clip_grad')}"


def _layout(a: Args, m: Model) -> str:
    on = f"{counted(a.launch.gpus, 'GPU')}: " if a.launch.gpus else ""
    words = [f"tensor {m.tp}" + (" + sequence" if m.sequence_parallel else ""), f"pipeline {m.pp}", f"context {m.cp}"]
    if data_parallel := known(lambda: m.dp):
        words.append(f"data {data_parallel}")
    if m.moe:
        words += [f"expert {m.ep}", f"expert tensor {m.etp}"]
    sharding = "Megatron-FSDP" if a.use_megatron_fsdp else "torch FSDP2" if a.use_torch_fsdp2 else None
    recompute = f"recompute {m.recompute}" if m.recompute else None
    graphs = f"CUDA graphs {m.graphs}" if m.graphs != "none" else None
    return on + ", ".join([*words, *filter(None, (sharding, recompute, graphs))])


def _batch(a: Args, m: Model) -> str:
    size = a.global_batch_size or known(lambda: f"{m.need('micro_batch_size') * m.dp} (default)", "? (default)")
    return f"{_or_open(a.micro_batch_size)} per pass, {size} per step"
