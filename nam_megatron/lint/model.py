"""Args -> Model: what Megatron 0.19.2 makes of them, as its validate_args, config classes and model builders do.

Whatever hangs on a value that is not known raises NotKnown.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any

from nam_megatron.blocks.kinds import KINDS, LETTERS
from nam_megatron.features.yarn import FIXED
from nam_megatron.lint.count import READS, Count, count, facet
from nam_megatron.lint.values import Args, Hangs, NotKnown

# Megatron's own kinds. Elsewhere attention need not be grouped.
SYMBOLS = {block.symbol: kind for kind, block in KINDS.items() if block.stock}
TITLES = {kind: block.title for kind, block in KINDS.items()} | {"attention": "attention"}
ATTENTION = LETTERS["A"]
MOST = 10_000  # layers
BLACKWELL = re.compile(r"(?<![a-z0-9])(G?B[23]00|blackwell|sm_?10[03]a?)(?![a-z0-9])", re.IGNORECASE)
PUBLISHED_MLA = re.compile(r"deepseek[-_. ]?(v[23]|r1)|kimi[-_. ]?k2|moonlight|glm[-_. ]?5", re.IGNORECASE)
STOCK_SPECS = {  # what 0.19.2 has for --spec and builds without it
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.hybrid.hybrid_layer_specs", "mamba_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
}


def _stands(*kinds: str) -> "cached_property[bool]":
    """Whether one of some kinds stands anywhere."""
    return cached_property(lambda self: bool((self.kinds if {"mlp", "moe"} & {*kinds} else self.mixers) & {*kinds}))


def _size(name: str) -> "cached_property[int]":
    return cached_property(lambda self: self.need(name))


class Model:
    """Derived values. `self.a` are the arguments themselves."""

    def __init__(self, args: Args):
        self.a = args
        script = (args.launch.script or "").rsplit("/", 1)[-1]
        self.gpt_script = "gpt" in script
        self.hybrid_script = "hybrid" in script or "mamba" in script
        self.stock_data = (self.gpt_script or self.hybrid_script) and args.of_megatron and not args.foreign
        self.plan = args.launch.plan
        self.described = args.launch.kind == "huggingface"  # a model itself, which no Megatron has read yet
        self.ours = (
            self.described
            or script.startswith("nam_megatron.")
            or "--nam-plan" in args.launch.words
            or self.plan is not None
        )

    @cached_property
    def marked(self) -> tuple[str, ...]:
        """What `--nam-model NAMES:DIGEST` names: kinds, features and sections of our trainer alone, from a plan that is not here."""
        words = self.a.launch.words
        if self.plan or "--nam-model" not in words[:-1]:
            return ()
        return tuple(words[words.index("--nam-model") + 1].partition(":")[0].split("+"))

    @property
    def pads_mamba(self) -> bool:
        """Whether Mamba-2's projection multiplies by columns of zeros, too, or may: nothing here says how our FP8 is laid out."""
        return self.plan.pads_mamba if self.plan else bool({"fp8", "mamba2"} & {*self.marked})

    @property
    def hidden_mixers(self) -> bool:
        """Whether `M` stands for layers of ours too, and nothing here says which."""
        return bool({"mamba3", "m2rnn"} & {*self.marked})

    @cached_property
    def names_blackwell(self) -> bool:
        return bool(BLACKWELL.search(f"{self.a.launch.name} {self.a.launch.text}"))

    @cached_property
    def blackwell(self) -> bool:
        """Whether the launch says that it is for Blackwell: by a device's name, or by a format of numbers that no other has."""
        return self.names_blackwell or bool(self.a.fp4) or bool(self.a.fp8 and self.a.fp8_recipe == "mxfp8")

    @cached_property
    def of_published_mla(self) -> bool:
        """Whether the launch names a published model with MLA. Each has a norm on its key/value latent."""
        return bool(PUBLISHED_MLA.search(self.a.launch.text))

    @cached_property
    def gpt_oss(self) -> bool:
        """ModelOpt's switch, in its own builder: yarn of gpt-oss in attention, whatever the position flags say."""
        return "--enable-gpt-oss" in self.a.script_flags and not self.hybrid

    @property
    def dsa_kernels(self) -> str | None:
        """Whose sparse attention runs: `megatron`, or one of ours; None where the text does not tell who trains."""
        if self.plan:
            return self.plan.kernels("dsa")
        return "megatron" if self.a.launch.script and not self.ours else None

    # Layers

    @cached_property
    def pattern(self) -> str | None:
        """The hybrid pattern, old spellings included; None without."""
        a = self.a
        text = a.hybrid_layer_pattern if a.hybrid_layer_pattern is not None else a.hybrid_override_pattern
        if a.mtp_hybrid_override_pattern is not None and a.mtp_num_layers and "/" not in (text or ""):
            if a.mtp_num_layers > MOST:
                raise NotKnown("mtp_num_layers")
            text = "/".join([text or "", *[a.mtp_hybrid_override_pattern] * a.mtp_num_layers])
        return text

    @property
    def hybrid(self) -> bool:
        """Whether a HybridModel is built: the script decides; a pattern, where its name does not say."""
        return self.hybrid_script or (self.pattern is not None and not self.gpt_script)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The main pattern and each MTP part, as written."""
        return tuple((self.pattern or "").split("/"))

    @cached_property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.parts[0].split("|"))

    @cached_property
    def bad_symbols(self) -> tuple[str, ...]:
        text = self.parts[0].replace("|", "") + "".join(self.parts[1:])
        return tuple(dict.fromkeys(c for c in text if c not in SYMBOLS))

    @cached_property
    def num_layers(self) -> int:
        """Megatron's num_layers: the pattern's letters, else what the flag says."""
        if self.pattern is not None:
            return len(self.parts[0].replace("|", ""))
        number = self.a.num_layers if self.a.num_layers is not None else self.a.encoder_num_layers
        return self.need("num_layers", number)

    @cached_property
    def layers(self) -> tuple[tuple[int, str], ...]:
        """(Megatron's layer number, kind) of every sublayer; a GPT layer has two, attention and MLP or MoE."""
        if self.plan:
            return self.plan.layers
        if (
            self.bad_symbols
            or len(self.parts[0]) > MOST
            or (self.hybrid and self.pattern is None and self.a.unsaid_layers)
        ):
            raise NotKnown("hybrid_layer_pattern")
        if self.hybrid:
            return tuple((n, SYMBOLS[c]) for n, c in enumerate(self.parts[0].replace("|", ""), 1))
        if self.num_layers > MOST:
            raise NotKnown("num_layers")
        sparse = _every(self.a.moe_layer_freq, self.num_layers, first=True) if self.a.experts else [0] * self.num_layers
        found = zip(self.gpt_mixers, ("moe" if one else "mlp" for one in sparse), strict=True)
        return tuple((n, kind) for n, layer in enumerate(found, 1) for kind in layer)

    @cached_property
    def gpt_mixers(self) -> tuple[str, ...]:
        """What mixes tokens in each layer of a GPT."""
        if self.num_layers > MOST:
            raise NotKnown("num_layers")
        linear = _every(self.a.linear_attention_freq, self.num_layers) if self.variant == "gated_delta_net" else None
        attention = "dsa" if self.variant == "dsa" else "mla" if self.mla else "attention"
        return tuple("gdn" if linear and linear[i] else attention for i in range(self.num_layers))

    def numbers(self, kind: str) -> tuple[int, ...]:
        """Megatron's numbers of the layers that have this kind."""
        return tuple(n for n, k in self.layers if k == kind)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Every kind that stands anywhere, MTP included."""
        return frozenset(k for _, k in self.layers) | frozenset(self.mtp_layers if self.hybrid else ())

    @cached_property
    def mixers(self) -> frozenset[str]:
        """Those that mix tokens, whatever a GPT's MLPs are."""
        whole = self.hybrid or self.plan or self.bad_symbols
        return self.kinds - {"mlp", "moe"} if whole else frozenset(self.gpt_mixers)

    @cached_property
    def mtp_depths(self) -> int:
        if self.hybrid:
            return len(self.parts) - 1 if any(self.parts[1:]) else 0
        return self.a.mtp_num_layers or 0

    @cached_property
    def mtp_layers(self) -> tuple[str, ...]:
        """Kinds of one MTP depth; a GPT repeats its last layer."""
        if not self.mtp_depths:
            return ()
        if self.hybrid:
            return tuple(SYMBOLS[c] for c in self.parts[1] if c in SYMBOLS)
        return tuple(k for n, k in self.layers if n == self.num_layers)

    # Attention

    @cached_property
    def variant(self) -> str | None:
        """experimental_attention_variant as the config has it."""
        return "dsa" if "D" in (self.pattern or "") else self.a.experimental_attention_variant

    @cached_property
    def mla(self) -> bool:
        return self.a.multi_latent_attention or any(c in (self.pattern or "") for c in "+D")

    @property
    def checks_dsa(self) -> bool:
        """Whether Megatron checks a DSA config."""
        return self.variant == "dsa"

    @property
    def dsa_layers(self) -> tuple[int, ...]:
        return self.numbers("dsa")

    @property
    def latent(self) -> bool:
        """Whether keys and values of some layer come from a latent."""
        return any(KINDS[kind].latent for kind in self.mixers)

    dsa, gdn, moe = _stands("dsa"), _stands("gdn"), _stands("moe")
    mamba = _stands(SYMBOLS["M"])  # Megatron's own Mamba-2
    plain_attention = _stands("attention")
    recurrent, attends, has_mlps = _stands(*LETTERS["M"]), _stands(*ATTENTION), _stands("mlp", "moe")

    heads = _size("num_attention_heads")

    @cached_property
    def head_dim(self) -> int:
        if self.a.kv_channels is not None:
            return self.a.kv_channels
        if not self.heads:
            raise NotKnown("num_attention_heads")
        return self.need("hidden_size") // self.heads

    @cached_property
    def groups(self) -> int:
        return self.a.num_query_groups if self.a.group_query_attention else self.heads

    @cached_property
    def positions(self) -> str:
        """position_embedding_type after the old flags."""
        return "rope" if self.a.use_rotary_position_embeddings else self.a.position_embedding_type

    @cached_property
    def windowed(self) -> tuple[bool, ...]:
        """Of each attention layer, in their order, whether it has the window; empty without one."""
        every = self.a.window_attn_skip_freq
        if not self.a.window_size:
            return ()
        if every == 0 or (isinstance(every, list) and len(every) < self.num_layers):
            raise NotKnown("window_attn_skip_freq")
        numbers = self.numbers("attention")
        return tuple(every is None or bool(every[n - 1] if isinstance(every, list) else n % every) for n in numbers)

    @cached_property
    def rope_fusion(self) -> bool:
        return self.a.apply_rope_fusion and self.positions == "rope"

    @cached_property
    def rope_type(self) -> str:
        """MLA's own rotary embedding."""
        return self.a.rope_type or "yarn"

    @cached_property
    def yarn(self) -> Mapping[str, Any] | None:
        """YaRN's keys, as a recipe has them, where the angles are its; a factor of 1 leaves plain RoPE's."""
        a = self.a
        found = {"factor": a.rotary_scaling_factor, "mscale": a.mscale, "mscale_all_dim": a.mscale_all_dim}
        said = {"original_length": a.yarn_original_max_position_embeddings, "beta_fast": a.yarn_beta_fast}
        said |= {"beta_slow": a.yarn_beta_slow}
        said = {name: FIXED[name] if value is None else value for name, value in said.items()}
        if self.mla and self.latent:
            of_ours = self.ours or "yarn" in self.marked
            found |= said if of_ours else FIXED
            return found if self.rope_type == "yarn" and a.rotary_scaling_factor > 1 else None
        if self.positions != "yarn" or self.gpt_oss or a.rotary_scaling_factor <= 1:
            return None
        return found | said | {"rounded": a.yarn_correction_range_round_to_int is not False}

    @property
    def plain_query(self) -> bool:
        """Whether MLA without a query latent is ours, without Megatron's norm of the whole width."""
        return "mla" in self.marked or bool(self.plan) or self.described

    @property
    def latent_epsilon(self) -> float:
        """Of the norms of latents: Megatron's is that of all norms; transformers' classes of DeepSeek's layers have their own always."""
        return 1e-6 if self.described else self.a.layernorm_epsilon

    @property
    def llama_factor(self) -> float | None:
        """What scales the angles as Llama-3.1's: our trainer by the flag's, Megatron's GPT by 8 whatever it says; None where nothing."""
        ours = "llama_rope" in self.marked or bool(self.plan)
        if not self.a.use_rope_scaling or self.positions != "rope" or self.mla or (self.hybrid and not ours):
            return None
        return self.a.rope_scaling_factor if self.hybrid or self.described else 8.0

    @property
    def expert_groups(self) -> tuple[int, int] | None:
        """(groups, chosen) where routing is limited by them: not by all groups (Kimi-K2's one of one), nor by groups of one expert."""
        groups, chosen = self.a.moe_router_num_groups or 1, self.a.moe_router_group_topk or 0
        return (groups, chosen) if self.moe and 0 < chosen < groups < (self.a.num_experts or 0) else None

    def topk_source(self, number: int) -> int:
        """The DSA layer whose top-k layer `number` uses: itself, or the one it shares with (megatron-core 0.19.2, dsa.py)."""
        frequency, offset = self.a.dsa_indexer_topk_freq, max(self.a.dsa_indexer_skip_topk_offset, 1)
        return number if frequency < 2 or number <= offset else number - (number - offset) % frequency

    # Widths

    @cached_property
    def gated(self) -> bool:
        return self.a.swiglu or self.a.quick_geglu

    @cached_property
    def activation(self) -> str:
        a = self.a
        named = [
            n
            for n, on in (("SwiGLU", a.swiglu), ("squared ReLU", a.squared_relu), ("quick GeGLU", a.quick_geglu))
            if on
        ]
        return named[0] if named else "GELU"

    @cached_property
    def ffn(self) -> int:
        if self.a.ffn_hidden_size is not None:
            return self.a.ffn_hidden_size
        hidden = self.need("hidden_size")
        return int((4 * hidden * 2 / 3) / 64) * 64 if self.a.swiglu else 4 * hidden

    @cached_property
    def moe_ffn(self) -> int:
        return self.a.moe_ffn_hidden_size if self.a.moe_ffn_hidden_size is not None else self.ffn

    @cached_property
    def mamba_heads(self) -> int:
        return self.a.mamba_num_heads or 2 * self.need("hidden_size") // max(self.a.mamba_head_dim, 1)

    @cached_property
    def mamba_projection(self) -> int:
        """Columns of the packed input projection: z, x, B, C, dt."""
        a = self.a
        return 2 * self.mamba_heads * a.mamba_head_dim + 2 * a.mamba_num_groups * a.mamba_state_dim + self.mamba_heads

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the embedding, as far as flags tell: a tokenizer of another size decides otherwise."""
        if self.a.padded_vocab_size is not None:
            return self.a.padded_vocab_size
        size, multiple = self.need("vocab_size"), self.a.make_vocab_size_divisible_by * self.tp
        if multiple < 1:
            raise NotKnown("vocab_size")
        return size if not self.a.pad_vocab_size else math.ceil(size / multiple) * multiple

    @property
    def vocabulary_is_the_tokenizers(self) -> bool:
        """Whether the tokenizer decides and not the flags."""
        return (
            self.a.padded_vocab_size is None
            and self.a.tokenizer_type not in ("NullTokenizer", None)
            and self.a.pad_vocab_size
        )

    @cached_property
    def count(self) -> Count:
        """Parameters of the whole model; without embeddings where their size is not known."""
        if self.plan:
            return self.plan.count
        if self.hidden_mixers:
            raise NotKnown("--nam-model")
        if dumb := next((kind for kind in sorted(self.kinds) if not facet(kind)), None):
            raise NotKnown(dumb)
        a = self.a
        plain = {name: getattr(a, name) for name in READS}
        plain |= {
            "hidden_size": self.need("hidden_size"), "heads": self.heads, "groups": self.groups, "head_dim": self.head_dim,
            "ffn": self.ffn, "moe_ffn": self.moe_ffn, "gated": self.gated, "experts": a.num_experts or 0,
            "mamba_heads": self.mamba_heads, "vocabulary": lacks(lambda: self.vocabulary, 0),
            "plain_query": self.plain_query, "tied": not a.untie_embeddings_and_output_weights,
            "learned_positions": self.need("max_position_embeddings") if self.positions == "learned_absolute" else 0,
        }  # fmt: skip
        if any(v is None for k, v in plain.items() if k.startswith("dsa_") and self.dsa):
            raise NotKnown("dsa_indexer")
        # Those of token prediction are numbered from 1 again.
        numbers = (*self.dsa_layers, *(n for n, kind in enumerate(self.mtp_layers, 1) if kind == "dsa"))
        indexers = frozenset(n for n in numbers if self.topk_source(n) == n)
        return count(plain, self.layers, self.mtp_layers, self.mtp_depths, indexers)

    # Layout

    tp, pp = _size("tensor_model_parallel_size"), _size("pipeline_model_parallel_size")
    cp, ep = _size("context_parallel_size"), _size("expert_model_parallel_size")

    @cached_property
    def etp(self) -> int:
        return self.tp if self.a.expert_tensor_parallel_size is None else self.need("expert_tensor_parallel_size")

    @cached_property
    def sequence_parallel(self) -> bool:
        return self.a.sequence_parallel and self.tp > 1

    @cached_property
    def dp(self) -> int:
        """Ranks with the same weights; not known without the number of GPUs."""
        size = self.tp * self.pp * self.cp
        if not self.a.launch.gpus or size < 1 or self.a.launch.gpus % size:
            raise NotKnown("world size")
        return self.a.launch.gpus // size

    @property
    def virtual(self) -> bool:
        """Whether a pipeline rank holds several stages."""
        a = self.a
        stages = (a.num_layers_per_virtual_pipeline_stage, a.num_virtual_stages_per_pipeline_rank)
        cut = bool(a.pipeline_model_parallel_layout) or any(s is not None for s in stages)
        return self.pp > 1 and (cut or len(self.segments) > self.pp)

    @property
    def shares_context(self) -> bool:
        """Whether --hierarchical-context-parallel-sizes multiply to the context parallel size."""
        return math.prod(self.a.hierarchical_context_parallel_sizes) == self.cp

    @property
    def offloads_by_te(self) -> bool:
        return self.a.launch.env.get("NVTE_CPU_OFFLOAD_V1") == "1"

    @cached_property
    def unrolled_stages(self) -> str:
        """--pipeline-model-parallel-layout without its commas and repetitions, empty if there is none."""
        text = (self.a.pipeline_model_parallel_layout or "").replace(",", "")
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # as Megatron unrolls it, in this order
            if any(int(times) > MOST for _, times in re.findall(repeated, text)) or len(text) > MOST:
                raise NotKnown("pipeline split")
            text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
        return text

    @cached_property
    def stage_list(self) -> tuple[str, ...] | None:
        """--pipeline-model-parallel-layout, a word of `E`, `t`, `m`, `L` a segment; None without, and in a hybrid."""
        if self.a.pipeline_model_parallel_layout is None or self.hybrid or self.pp < 2:
            return None
        text = self.unrolled_stages
        if text.count("t") != self.num_layers or set(text) - set("EtmL|") or (text.count("|") + 1) % self.pp:
            raise NotKnown("pipeline split")
        return tuple(text.split("|"))

    @cached_property
    def stage_sizes(self) -> tuple[int, ...]:
        """Layers of each pipeline segment in their order, virtual stages apart; rank r holds the segments r, r + pipeline, ..."""
        a, stages = self.a, self.pp
        if len(self.segments) > 1:
            return tuple(map(len, self.segments))
        if self.stage_list:
            return tuple(stage.count("t") for stage in self.stage_list)
        if stages < 2 or stages > self.num_layers:
            return (self.num_layers,)
        first, last = a.decoder_first_pipeline_num_layers, a.decoder_last_pipeline_num_layers
        embedding, loss = (
            not self.hybrid and end
            for end in (a.account_for_embedding_in_pipeline_split, a.account_for_loss_in_pipeline_split)
        )
        rest = self.num_layers + embedding + loss - (first or 0) - (last or 0)
        middle = stages - (first is not None) - (last is not None)
        if rest < 0 or (middle and rest % middle):
            raise NotKnown("pipeline split")
        sizes = [first] * (first is not None) + ([rest // middle] * middle if middle else [])
        sizes += [last] * (last is not None)
        chunk, chunks = a.num_layers_per_virtual_pipeline_stage, a.num_virtual_stages_per_pipeline_rank
        if not self.hybrid and (chunk or chunks):
            chunks = chunks or max(sizes[0] // chunk, 1)
            if not 0 < chunks <= self.num_layers or any(size % chunks for size in sizes):
                raise NotKnown("pipeline split")
            sizes = [size // chunks for size in sizes] * chunks
        sizes[0] -= embedding
        sizes[-1] -= loss
        return tuple(sizes)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Layer numbers after which a pipeline segment ends."""
        return tuple(accumulate(self.stage_sizes[:-1]))

    @cached_property
    def stages(self) -> tuple[frozenset[str], ...]:
        """The kinds of layers that each pipeline rank holds, MTP's with the last one's unless a layout says otherwise."""
        if not 0 < self.pp <= len(self.stage_sizes):
            raise NotKnown("pipeline split")
        held: list[set[str]] = [set() for _ in range(self.pp)]
        for number, kind in self.layers:
            held[bisect_left(self.cuts, number) % self.pp].add(kind)
        with_mtp = next((i for i, stage in enumerate(self.stage_list or ()) if "m" in stage), -1)
        held[with_mtp % self.pp] |= set(self.mtp_layers)
        return tuple(map(frozenset, held))

    def uneven(self, kind: str) -> bool:
        """Whether some pipeline ranks hold layers of a kind, and others none."""
        return self.pp > 1 and len({kind in stage for stage in self.stages}) == 2

    # Execution

    @cached_property
    def fsdp(self) -> bool:
        return self.a.use_megatron_fsdp or self.a.use_torch_fsdp2

    @cached_property
    def recompute(self) -> str | None:
        if self.a.elsewhere and self.a.said("recompute_granularity"):  # the others are older flags' alone
            return self.a.recompute_granularity
        return (
            "selective" if self.a.recompute_activations or self.a.moe_layer_recompute else self.a.recompute_granularity
        )

    @cached_property
    def graphs(self) -> str:
        if self.a.elsewhere and self.a.said("cuda_graph_impl"):
            return self.a.cuda_graph_impl
        said = "transformer_engine" if self.a.external_cuda_graph else self.a.cuda_graph_impl
        said = "local" if self.a.enable_cuda_graph else said
        # The spelling before 0.19: Megatron takes the scope for the implementation.
        scopes = (self.a.value(name) for name in ("cuda_graph_modules", "cuda_graph_scope_deprecated"))
        whole = any(isinstance(words, (list, tuple)) and "full_iteration" in words for words in scopes)
        return "full_iteration" if whole and said in ("none", "local") else said

    @cached_property
    def graph_words(self) -> tuple[str, ...]:
        """What is to be captured, as it is said: modules, and scopes of earlier Megatrons."""
        return tuple(self.a.cuda_graph_modules or self.a.cuda_graph_scope_deprecated or ())

    @cached_property
    def graph_modules(self) -> tuple[str, ...]:
        return tuple(word for word in self.graph_words if not word.startswith("full"))

    @cached_property
    def balancing(self) -> tuple[str, ...]:
        value = self.a.moe_router_load_balancing_type
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)

    @property
    def balanced_by_loss(self) -> bool:
        return any("aux_loss" in b for b in self.balancing) and any(self.aux_coefficients)

    @property
    def unbalanced(self) -> bool:
        """Whether experts are to be balanced by losses whose coefficients are all 0."""
        losses = any("aux_loss" in b for b in self.balancing) and not self.balanced_by_loss
        return self.moe and losses and not self.a.moe_router_enable_expert_bias

    @cached_property
    def aux_coefficients(self) -> tuple[float, ...]:
        value = self.a.moe_aux_loss_coeff
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)

    @cached_property
    def from_elsewhere(self) -> tuple[str, ...]:
        """Flags that hand the model's description to a file this tool does not see."""
        a = self.a
        names = {
            "--use-checkpoint-args": a.use_checkpoint_args, "--yaml-cfg": a.yaml_cfg,
            "--heterogeneous-layers-config-path": a.heterogeneous_layers_config_path,
            "--heterogeneous-layers-config-encoded-json": a.heterogeneous_layers_config_encoded_json,
            "pretrain_retro.py's project": "retro" in (a.launch.script or ""),
        }  # fmt: skip
        return tuple(name for name, value in names.items() if value)

    @property
    def sequence(self) -> int:
        """Tokens of a sample, under either of its names."""
        a = self.a
        return self.need("seq_length", a.encoder_seq_length if a.seq_length is None else a.seq_length)

    def need(self, name: str, value: Any = None) -> int:
        """A positive number that Megatron cannot do without; not known if the launch lacks it."""
        value = getattr(self.a, name) if value is None else value
        if value is None or value < 1:
            raise NotKnown(name)
        return value


def _every(frequency: int | list[int] | None, layers: int, first: bool = False) -> list[int]:
    """A frequency as a list: every n-th layer is 1 from the `first` on, or all but every n-th are 1.

    A list of another length, 0 and nothing stop Megatron, and a rule says so. Here a list is cut or its last entry goes on, and every
    layer counts: the rest of the report stands.
    """
    if isinstance(frequency, list):
        if not frequency:
            raise NotKnown("layer frequency")
        return (frequency + frequency[-1:] * layers)[:layers]
    frequency = abs(frequency or 1)
    if first:
        return [int(i % frequency == 0) for i in range(layers)]
    return [int((i + 1) % frequency != 0) for i in range(layers)]


def known(function: Callable[[], Any], otherwise: Any = None) -> Any:
    """`function()`, or `otherwise` where that hangs on a value that is not known."""
    try:
        return function()
    except NotKnown:
        return otherwise


def lacks(function: Callable[[], Any], otherwise: Any = None) -> Any:
    """`function()`, or `otherwise` where the launch lacks what it asks for; raises what hangs on a condition."""
    try:
        return function()
    except Hangs:
        raise
    except NotKnown:
        return otherwise
