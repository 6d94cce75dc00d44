"""Words -> Args: every argument of Megatron's parser with its value, said in the launch or Megatron's own default.

Reads words as argparse does (exact names, last one wins) without Megatron: from the dumped flags.
"""

import ast
import difflib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from nam_megatron.lint.follow import UNREAD, holes, shown
from nam_megatron.lint.others import closest
from nam_megatron.lint.read import Launch
from nam_megatron.targets import Flag, Target

# Parsers of pretraining scripts add these to Megatron's (megatron/post_training/arguments.py, with nvidia-modelopt installed).
OF_SCRIPTS = re.compile(
    r"--(export-.+|modelopt-enabled|enable-gpt-oss|qad-train-target|freeze-base-for-mtp|finetune-(hf-dataset|data-split)|freeze-(LM|ViT))"
)
OURS = {"--nam-plan": 1, "--nam-model": 1}  # nam_megatron.train's own

GRAPH_MODULES = (
    "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full", "full_iteration", "full_iteration_inference",
)  # fmt: skip
LONGEST_LIST = 10_000
# Scripts that add nothing to Megatron's parser but OF_SCRIPTS.
NO_GPTS = "bert|t5|ict|retro|vlm"
MEGATRONS = re.compile(rf"(.*/)?(pretrain_(gpt|hybrid|mamba|{NO_GPTS})|train_rl)\.py")
PRETRAINS = re.compile(r"(.*/)?pretrain_\w+\.py")
# What a command prints, or a variable for a model's flags.
COMPUTED = re.compile(r"^(?!\w+:[-+]).*[^\w, ]|(?<![a-z])(model(?!_parallel)|arch)(?![a-z])", re.IGNORECASE)
STRANGERS = 3  # flags of another parser: so many that nobody misspelt them
FORKED = 6  # the same of a script that is called as Megatron's own, of a fork
# A port to another device, which has a parser, checks and layers of its own.
PORT = re.compile(
    r"mindspeed|ascend|torch_npu|\bHCCL_|\bNPUS?_PER_NODE\b|--(use-fused-(rmsnorm|swiglu|rotary)|tp-2d|context-parallel-algo)\b",
    re.IGNORECASE,
)
# DeepSpeed's fork of Megatron, of which the same is true: in a line that is no comment, or in a file's name.
DEEPSPEED = re.compile(r"--zero[-_]stage\b|deepspeed|(?<![a-z])ds_(pretrain|ssh)", re.IGNORECASE)
# Words of flags that decide which model it is, in forks that were read.
SHAPING = re.compile(
    r"(?<![a-z])(attention|latent|mla|kv|gqa|mlp|(swi|ge)?glu|\w*[eis]lu|swish|rms|(rms)?norm|rope|yarn|alibi|moe|experts?|dense|gate|dims?|heads?"
    r"|multiple|intermediate|mixer|conv(2d)?|retro)(?![a-z])"
)
# Of which no model hangs: how layers run, and what samples from them.
RUNNING = re.compile(r"fus(ed|ion)|recompute|overlap|async|sglang|vllm|rollout|backend")
# What a template's engine, or a person, puts a value in for.
TEMPLATE = re.compile(r"\{\{?\s*[\w.\[\]'\"|() -]+\}?\}|<[A-Za-z][\w .-]*>|%\(?\w+\)?[s%]|@\w+@|[xX]{2,}|TODO|TBD")

# Flags of earlier Megatrons that 0.19.2 has no more, and what says it now.
REMOVED = {
    "--hybrid-attention-ratio": "write the layers out with `--hybrid-layer-pattern`",
    "--hybrid-mlp-ratio": "write the layers out with `--hybrid-layer-pattern`",
    "--use-legacy-models": "leave it out; there are only Megatron-Core models",
    "--use-custom-fsdp": "use `--use-megatron-fsdp`",
    "--moe-extended-tp": "use `--expert-tensor-parallel-size`",
    "--moe-token-dropping": "use `--moe-expert-capacity-factor`",
    "--moe-use-legacy-grouped-gemm": "use `--moe-grouped-gemm`",
    "--muon-use-nesterov": "use `--muon-nesterov`",
    "--legacy-tokenizer": "leave it out",
    "--DDP-impl": "leave it out",
    "--data-impl": "leave it out",
    "--fp8-hybrid": "use `--fp8-format hybrid`",
    "--fp8-e4m3": "use `--fp8-format e4m3`",
    "--retro-workdir": "leave it out; Megatron has no Retro any more",
    "--async-tensor-model-parallel-allreduce": "leave it out; on where it is of use",
    "--no-query-key-layer-scaling": "leave it out; off unless `--apply-query-key-layer-scaling`",
    "--retro-project-dir": "leave it out; Megatron has no Retro any more",
    "--retro-add-retriever": "leave it out; Megatron has no Retro any more",
    "--standalone-embedding-stage": "use `--account-for-embedding-in-pipeline-split`",
    "--pipeline-model-parallel-split-rank": "leave it out",
    "--encoder-tensor-model-parallel-size": "use `--tensor-model-parallel-size`",
    "--encoder-pipeline-model-parallel-size": "use `--pipeline-model-parallel-size`",
    "--no-async-tensor-model-parallel-allreduce": "leave it out",
    "--delay-param-gather": "on by default; `--no-align-param-gather` switches it off",
    "--no-delay-grad-reduce": "use `--no-align-grad-reduce`",
    "--s3-cache-path": "use `--object-storage-cache-path`",
    "--tokenizer-hf-use-fast": "on by default; `--tokenizer-hf-no-use-fast` switches it off",
    "--tokenizer-hf-include-special-tokens": "on by default; `--tokenizer-hf-no-include-special-tokens` switches it off",
    "--batch-size": "use `--micro-batch-size`",
    "--warmup": "use `--lr-warmup-fraction`",
    "--model-parallel-size": "use `--tensor-model-parallel-size`",
    "--checkpoint-activations": "use `--recompute-activations`",
}


CHOICES, WHOLE = "there are", "is no whole number"
# Arguments that are a size: whole, and 1 or more in any program that builds Megatron's layers; those of `none` may be 0, for none of it.
SIZE = re.compile(
    r"(?:(?:tensor_model|pipeline_model|context|expert_model|expert_tensor)_parallel_size|(?:eval_)?(?:micro|global)_batch_size|"
    r"(?:expert_)?tensor_parallel_num_weight_shards|num_distributed_optimizer_instances|microbatch_group_size_per_vp_stage|"
    r"num_layers_per_virtual_pipeline_stage|num_virtual_stages_per_pipeline_rank|decoder_(?:first|last)_pipeline_num_layers|"
    r"(?:encoder_)?num_layers|(?:encoder_)?seq_length|max_position_embeddings|lr_decay_(?:iters|samples)|make_vocab_size_divisible_by|"
    r"(?:moe_)?(?:ffn_)?hidden_size|kv_channels|num_attention_heads|num_query_groups|(?:kv|q)_lora_rank|(?:qk|qk_pos_emb|v)_head_dim|"
    r"moe_(?:router_topk|shared_expert_intermediate_size|latent_size)|mamba_(?:num_heads|head_dim|state_dim|num_groups)|"
    r"linear_(?:conv_kernel|(?:key|value)_head)_dim|linear_num_(?:key|value)_heads|dsa_indexer_(?:n_heads|head_dim|topk|topk_freq)|"
    r"rotary_(?:base|seq_len_interpolation_factor)|(?:log|eval)_interval|fp8_amax_history_len)"
    r"|(?P<none>num_experts|moe_router_(?:num_groups|group_topk)|mtp_num_layers|cpu_offloading_num_layers|recompute_num_layers|"
    r"(?:padded_)?vocab_size|train_(?:iters|samples)|lr_(?:warmup|wsd_decay)_(?:iters|samples)|num_layers_at_(?:start|end)_in_bf16)"
)
# what another program may mean by a word in its place
OWN_SIZE = re.compile(r"auto|none|null|default|\?{3}|", re.IGNORECASE)


class NotKnown(Exception):
    """A value that the launch leaves open, or gives in a form that Megatron's parser would not take."""


class Hangs(NotKnown):
    """Of an argument that hangs on what the text does not decide: neither its value nor that it lacks may stand in its place."""


@dataclass(frozen=True)
class Open:
    """Stands for a value that is not known. `names`: what would have to be. lacking: it may not be given at all."""

    names: tuple[str, ...]
    lacking: bool = False


@dataclass(frozen=True)
class Trouble:
    """Words the parser would stumble over. rule: the finding they make (rules.py). about: the words concerned."""

    rule: str
    about: str
    detail: str = ""
    fix: str = ""


class Args:
    """Arguments by Megatron's names: `args.hidden_size`. What is not known raises NotKnown when asked for.

    hanging: arguments that are one or another by what the text does not decide, and what that is."""

    def __init__(self, launch: Launch, hanging: Mapping[str, Open] | None = None):
        self.launch, self.target = launch, launch.target
        self.given: dict[str, list[tuple[str, Any, str]]] = defaultdict(list)  # argument -> (flag, value, as written)
        self.trouble: list[Trouble] = []
        self.script_flags: list[str] = []
        self.elsewhere = False
        self.foreign: list[str] = []  # flags of another program's parser, or of another Megatron's
        self._underscores = self._spelt_with_underscores()
        self._parse(list(launch.words))
        self.hanging = hanging or {}
        for name, on in self.hanging.items():
            flag = launch.target.by_dest[name].name
            self.given[name] = [(flag, on, f"{flag} ?")]
        self.empty = self._never_filled()
        self._estrange()
        # Whether another program reads these words and decides what they leave out: its defaults are not Megatron's.
        of_yaml = launch.kind == "yaml" and (bool(self.foreign) or launch.partial)  # what it starts from says the rest
        self.elsewhere = bool(launch.program) or of_yaml or (bool(self.foreign) and self._underscores)
        # Or words that are not here have the model, and so may have anything.
        hidden = any(t.rule == "unknown-variable" for t in self.trouble) and "hidden_size" not in self.given
        self.elsewhere |= (hidden and launch.plan is None) or self.of_no_training
        if self.of_flagscale or (launch.partial and self.foreign):  # whose parser takes 1000000.0 for a whole number
            self.trouble = [t for t in self.trouble if t.detail != WHOLE or self._no_size(t)]
        if self.elsewhere:  # its parser takes other values under the same names
            own = ("unknown-flag", "removed-flag") if launch.kind == "yaml" else ()
            self.foreign += [t.about for t in self.trouble if t.rule in own]
            self.trouble = [
                t
                for t in self.trouble
                if t.rule not in ("bad-value", "missing-value", *own) or self._no_size(t) or nearly_a_choice(t)
            ]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.target.by_dest:
            raise AttributeError(name)
        value = self.value(name)
        if isinstance(value, Open):
            raise (Hangs if name in self.hanging else NotKnown)(name)
        return value

    def value(self, name: str) -> Any:
        """The value of an argument, `Open` if it is not known; a list of one as its element."""
        if self.elsewhere and name not in self.given:
            return Open(())
        value = self.given[name][-1][1] if name in self.given else self.target.by_dest[name].default
        return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 and name in UNPACKED else value

    def said(self, *names: str) -> bool:
        """Whether the launch itself gives all of these arguments; asked of one that it may lack, not known."""
        sure = self.sure(*names)
        if len(sure) < len(names) and all(name in self.given for name in names):
            raise Hangs(next(name for name in names if name not in sure))
        return len(sure) == len(names)

    def any_said(self, *names: str) -> tuple[str, ...]:
        sure = self.sure(*names)
        if not sure and (perhaps := next((name for name in names if name in self.given), "")):
            raise Hangs(perhaps)
        return sure

    def sure(self, *names: str) -> tuple[str, ...]:
        """Those of these arguments that the launch gives, however its conditions go."""
        return tuple(n for n in names if n in self.given and not (n in self.hanging and self.hanging[n].lacking))

    def switched_off(self, name: str) -> bool:
        """Whether another program's words give a flag as false."""
        return self.elsewhere and name in self.given and self.value(name) == self.target.by_dest[name].default is False

    def written(self, name: str) -> str:
        """An argument as the launch gives it; the flag's name if it does not."""
        if self.launch.program and self.launch.kind != "script" and name in self.given:
            value = self.given[name][-1][1]
            return f"{name}={shown(self.given[name][-1][2].split(' ', 1)[-1]) if isinstance(value, Open) else _flat(value)}"
        return shown(self.given[name][-1][2]) if name in self.given else self.target.by_dest[name].name

    def _no_size(self, t: Trouble) -> bool:
        """Whether a size is no number at all, which no program's parser takes."""
        name, _, value = t.about.partition(" ")
        if t.rule != "bad-value" or t.detail != WHOLE or OWN_SIZE.fullmatch(value):
            return False
        flag, _ = self._flag(name)
        try:
            return flag is not None and bool(SIZE.fullmatch(flag.dest)) and not float(value).is_integer()
        except ValueError:
            return True

    # Reading the words, as argparse does

    def _parse(self, words: list[str]) -> None:
        at = 0
        while at < len(words):
            word, at = words[at], at + 1
            if not self._is_flag(word):
                if names := holes(word):
                    self.trouble.append(Trouble("unknown-variable", shown(word), _list(names)))
                elif word != "--":
                    stray = [word, *itertools.takewhile(lambda w: not self._is_flag(w) and not holes(w), words[at:])]
                    at += len(stray) - 1
                    cut = "" if word.strip() else "a blank behind `\\` ends the command there"
                    said = " ".join(w if w.strip() else repr(w) for w in stray)
                    self.trouble.append(Trouble("stray-word", said, cut))
                continue
            name, equals, inline = word.partition("=")
            flag, positive = self._flag(name)
            following: list[str] = []
            if not equals:
                while at + len(following) < len(words) and not self._is_flag(words[at + len(following)]):
                    following.append(words[at + len(following)])
            if flag is None:
                # of an array elsewhere
                flags = (at for at, w in enumerate(following) if any(map(self._array, holes(w))))
                taken = following[: OURS.get(name, next(flags, len(following)))]
                self._unknown(name)
            elif flag.action != "store":
                spelt = following[0] if (self._underscores or self.launch.program) and following else ""
                taken = [spelt] if spelt.lower() in ("true", "false") or holes(spelt) else []
                if taken and (names := holes(taken[0])):
                    self.given[flag.dest].append((name, Open(names), f"{name} {taken[0]}"))
                elif taken:
                    self.given[flag.dest].append((name, positive is (spelt.lower() == "true"), f"{name} {spelt}"))
                elif equals:
                    self.trouble.append(Trouble("bad-value", shown(word), "takes no value"))
                else:
                    self.given[flag.dest].append((name, positive, name))
            else:
                values = [inline] if equals else following
                count = len(values) if flag.nargs in ("+", "*") else flag.nargs if isinstance(flag.nargs, int) else 1
                taken = [] if equals else values[:count]
                self._store(flag, name, values[:count], count)
            at += len(taken)

    def _never_filled(self) -> list[str]:
        """Arrays that a script which is whole in itself expands and never fills: no environment holds an array."""
        sourced = any(note.startswith(UNREAD) for note in self.launch.notes)
        built = re.search(r"^\s*\w+\+?=\(", self.launch.text, re.MULTILINE)  # of arrays, so that the text is no extract
        if (
            self.launch.kind != "shell"
            or self.launch.partial
            or sourced
            or not built
            or "hidden_size" not in self.given
        ):
            return []
        empty = [t.detail for t in self.trouble if t.rule == "unknown-variable" and self._array(t.detail)]
        self.trouble = [t for t in self.trouble if t.rule != "unknown-variable" or t.detail not in empty]
        return empty

    def _array(self, name: str) -> bool:
        """Whether a text uses a variable as an array only, and sets it nowhere."""
        uses = re.findall(rf"\$\{{?#?{re.escape(name)}\b(\[[@*]\])?", self.launch.text)
        return bool(uses) and all(uses) and not set_where(self.launch.text, name)

    def _spelt_with_underscores(self) -> bool:
        """Whether another program's parser takes Megatron's flags under its own spelling, `--hidden_size`."""
        names, by_name = {w.partition("=")[0] for w in self.launch.words}, self.target.by_name
        spelt = [n for n in names if by_name(n) is None and by_name(n.replace("_", "-")) is not None]
        return len(spelt) >= (FORKED if self.of_megatron else STRANGERS)

    def _estrange(self) -> None:
        """Tell the flags of another parser from misspelt ones. What follows such flags belongs to them in ways that nobody knows here."""
        strange = [t for t in self.trouble if t.rule == "unknown-flag"]
        forked = self.of_megatron
        own = self._of_a_port or self.of_deepspeed or (self.launch.partial and not forked)
        least = 0.95 if len(strange) > FORKED else 0.92
        # Of one or of several: another program's word.
        numbers = {t: (f"{t.about}s", t.about.removesuffix("s")) for t in strange}
        unknown = [
            t
            for t in strange
            if not _misspelt(t, least, own) or (not forked and any(self._flag(n)[0] for n in numbers[t]))
        ]
        many = 1 if own else FORKED if forked else STRANGERS
        if len(unknown) >= STRANGERS or self.of_deepspeed:  # and it may have those that Megatron has no more
            self.foreign += dict.fromkeys(t.about for t in self.trouble if t.rule == "removed-flag")
            self.trouble = [t for t in self.trouble if t.rule != "removed-flag"]
        if not self._underscores and len(unknown) < many:
            return
        self.foreign += list(dict.fromkeys(t.about for t in unknown)) or ["names with underscores"]
        # Its flags of Megatron's names take values of its own, too.
        others = [
            t
            for t in self.trouble
            if t.rule == "bad-value" and t.detail.startswith(CHOICES) and (self.of_deepspeed or not nearly_a_choice(t))
        ]
        self.foreign += list(dict.fromkeys(t.about for t in others))
        self.trouble = [t for t in self.trouble if t not in (*unknown, *others) and t.rule != "stray-word"]

    @property
    def of_no_training(self) -> bool:
        """Whether a script of its own name is given neither layers nor a batch nor a length: it takes some of Megatron's names."""
        lengths = "num_layers encoder_num_layers hybrid_layer_pattern hybrid_override_pattern micro_batch_size train_iters train_samples"
        script = self.launch.script if self.launch.kind == "shell" and not self.launch.partial else None
        told = self.given.keys() & {*lengths.split(), "use_checkpoint_args"}
        return bool(script) and not self.of_megatron and not told

    @cached_property
    def _of_a_port(self) -> bool:
        return bool(PORT.search(self.launch.text))

    @cached_property
    def of_deepspeed(self) -> bool:
        lines = (line for line in self.launch.text.splitlines() if not line.lstrip().startswith("#"))
        return any(map(DEEPSPEED.search, (self.launch.name, *lines)))

    @property
    def experts(self) -> int:
        """Of a layer; DeepSpeed's Megatron calls a dense one that of one."""
        count = self.num_experts or 0
        return 0 if self.of_deepspeed and count == 1 else count

    @property
    def unsaid_layers(self) -> bool:
        """Whether a hybrid without a pattern has layers all the same: by an earlier Megatron's ratios, or by a fork's default."""
        return bool(self.foreign) or any(re.fullmatch("--hybrid-.*-ratio", t.about) for t in self.trouble)

    @cached_property
    def shaping(self) -> list[str]:
        """Flags of others that may decide which model it is, by the words of their names: no more is known of them."""
        spec = self.value("spec") if "spec" in self.given else []
        stock = isinstance(spec, list) and all(word.startswith("megatron.core") for word in spec[:1])
        # A word more than one of Megatron's is no misspelling: `--t5-swiglu`.
        strange = [t for t in self.trouble if t.rule == "unknown-flag" and not t.fix]
        others = dict.fromkeys(self.foreign + [t.about for t in strange if not _misspelt(t, 0.9, False)])
        own = [f for f in others if f not in REMOVED and SHAPING.search(f) and not RUNNING.search(f)]
        own += [t.about for t in self.trouble if t.rule == "unknown-variable" and COMPUTED.search(t.detail)]
        own += re.findall(rf"pretrain_(?:{NO_GPTS})\.py$", self.launch.script or "")
        patterns = [self.value(n) for n in ("hybrid_layer_pattern", "hybrid_override_pattern") if n in self.given]
        if self.foreign and "num_experts" in self.given and any(isinstance(p, str) and "E" not in p for p in patterns):
            own.append(self.written("num_experts"))  # a fork's `-` may have them
        return own if stock else ["--spec", *own]

    @cached_property
    def of_megatron(self) -> bool:
        """Whether the script is one of Megatron's own, by its name."""
        return bool(MEGATRONS.fullmatch(self.launch.script or ""))

    @cached_property
    def of_flagscale(self) -> bool:
        """Whether FlagScale starts it, which brings a Megatron of its own."""
        keys = {line.split()[0] for line in self.launch.text.splitlines() if re.match(r"\w", line)}
        return self.launch.kind == "yaml" and {"system:", "model:", "data:"} <= keys

    @property
    def forked(self) -> bool:
        """Whether a fork with a parser of its own reads these words, and so checks of its own."""
        return self.elsewhere or len(self.foreign) >= FORKED or self.of_deepspeed or self.of_flagscale

    @property
    def rebuilt(self) -> bool:
        """Whether that fork is of Megatron itself, whose layers and data may be its own: not a program on top of it."""
        changed = len(self.foreign) >= FORKED and PRETRAINS.fullmatch(self.launch.script or "")
        return bool(changed) or self.of_deepspeed

    @property
    def ported(self) -> bool:
        """Whether a fork for another device reads these words: Megatron's checks are not its own."""
        return bool(self.foreign) and self._of_a_port

    def _is_flag(self, word: str) -> bool:
        """argparse: a word with a dash in front is a flag, unless it is a negative number or has a blank in it."""
        if not word.startswith("-") or len(word) == 1 or re.fullmatch(r"-\d+|-\d*\.\d+", word):
            return False
        return " " not in word or self._flag(word.partition("=")[0])[0] is not None

    def _flag(self, name: str) -> tuple[Flag | None, bool]:
        """The flag of a name, and the truth a flag without a value stands for under it."""
        name = name.replace("_", "-") if self._underscores else name
        flag = self.target.by_name(name)
        if flag is None or name in REMOVED:
            return None, True
        return flag, not (flag.action == "store_false" or (flag.action == "boolean" and name.startswith("--no-")))

    def _unknown(self, name: str) -> None:
        if name in OURS:
            return
        if names := holes(name):  # `--$DTYPE`
            self.trouble.append(Trouble("unknown-variable", shown(name), _list(names)))
            return
        if OF_SCRIPTS.fullmatch(name):
            self.script_flags.append(name)
        elif name in REMOVED:
            self.trouble.append(Trouble("removed-flag", name, "", REMOVED[name]))
        elif self.launch.program and self.launch.kind != "script":  # others.py hands on what is nearly a field
            field, meant = (n[2:].replace("-", "_") for n in (name, closest(name, self.target) or name))
            self.trouble.append(Trouble("misspelt-field", field, f"did you mean `{meant}`?"))
        elif (named := self.target.by_dest.get(name[2:].replace("-", "_"))) and MEGATRONS.fullmatch(
            self.launch.script or ""
        ):
            # Megatron keeps it under this name, and its flag has another: no script adds it again. What it would say is open.
            self.given[named.dest].append((name, Open(()), name))
            self.trouble.append(Trouble("unknown-flag", name, f"the flag is `{named.name}`", f"use `{named.name}`"))
        else:
            close = closest(name, self.target)
            self.trouble.append(Trouble("unknown-flag", shown(name), f"did you mean `{close}`?" if close else ""))

    def _store(self, flag: Flag, name: str, words: list[str], count: int) -> None:
        written = " ".join([name, *words])
        if len(words) < count or (not words and flag.nargs == "+"):
            guarded = self._guarded(name)
            if not guarded:
                self.trouble.append(Trouble("missing-value", name))
            self.given[flag.dest].append((name, Open(guarded), written))
            return
        if names := tuple(n for w in words for n in holes(w)):
            self.given[flag.dest].append((name, Open(names), written))
            return
        try:
            values = [convert(flag, w) for w in words]
        except ValueError as err:
            if any(TEMPLATE.fullmatch(w) for w in words):
                self.given[flag.dest].append((name, Open(tuple(words)), written))
                return
            self.trouble.append(Trouble("bad-value", written, str(err)))
            self.given[flag.dest].append((name, Open(()), written))
            return
        self.given[flag.dest].append((name, values if flag.nargs else values[0], written))

    def _guarded(self, name: str) -> tuple[str, ...]:
        """The variable behind a flag that is empty unless somebody sets it, where the script looks whether it is, and ends else."""
        behind = re.findall(rf"{re.escape(name)}[ =]\"?\$\{{?(\w+)", self.launch.text)
        return tuple(dict.fromkeys(v for v in behind if re.search(rf"-z +\"?\$\{{?{v}\b", self.launch.text)))

    # Flags twice

    @cached_property
    def contradictions(self) -> tuple[str, ...]:
        """Arguments given more than once, with different values."""
        return tuple(n for n, given in self.given.items() if len({repr(value) for _, value, _ in given}) > 1)

    def worked_out(self, variables: tuple[str, ...]) -> bool:
        """Whether another program works a value out where it runs: nothing that a person who starts it could put in."""
        computed = not all(name.isidentifier() or name.isdigit() for name in variables)
        return self.launch.kind == "python" or (computed and self.launch.kind in ("yaml", "script"))

    def open_values(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Arguments whose value hangs on something the text does not say."""
        for name, given in self.given.items():
            if isinstance(given[-1][1], Open) and given[-1][1].names:
                yield name, given[-1][1].names


def alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _misspelt(unknown: Trouble, least: float, own: bool) -> bool:
    """Whether an unknown flag is a letter or two away from one of Megatron's. own: not if only dashes are, of a port's parser."""
    close = re.search("`(.*)`", unknown.detail)
    if close is None or (own and unknown.about.replace("-", "") == close[1].replace("-", "")):
        return False
    return alike(unknown.about, close[1]) >= least


# A tokenizer's class, and the library of another device: `hccl`, `sccl`.
WORDS_OF_OTHERS = re.compile("--tokenizer|--distributed-backend [a-z]*ccl$")


def nearly_a_choice(bad: Trouble) -> bool:
    """Whether a value is a letter or two away from one that the flag takes: misspelt in any program's words."""
    if bad.rule != "bad-value" or not bad.detail.startswith(CHOICES) or WORDS_OF_OTHERS.match(bad.about):
        return False
    value, choices = bad.about.partition(" ")[2], bad.detail.removeprefix(CHOICES).strip().split(", ")
    close = difflib.get_close_matches(value, choices, 1, 0.75)
    # `adamw` is a word of its own, and `rmsnorm` another program's spelling.
    return bool(close) and not value.startswith(close[0]) and value.lower() != close[0].lower()


def _flat(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)


UNPACKED = {"moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type"}


def convert(flag: Flag, text: str) -> Any:
    """A word as the flag's type.

    Raises:
        ValueError: with what is wrong, for people.
    """
    kind = flag.type
    if kind in ("int", "float"):
        try:
            value: Any = int(text) if kind == "int" else float(text)
        except ValueError:
            raise ValueError(WHOLE if kind == "int" else "is no number") from None
    elif kind == "_parse_cuda_graph_modules_arg":
        if text not in GRAPH_MODULES:
            raise ValueError(f"there are {', '.join(GRAPH_MODULES[:6])}")
        value = text
    elif kind == "tuple_type":
        if not re.fullmatch(r"\(*\s*-?\d{1,9}\s*(,\s*-?\d{1,9}\s*)*\)*", text):
            raise ValueError("is no list of whole numbers")
        value = tuple(int(i) for i in re.findall(r"-?\d+", text))
    elif kind in ("moe_freq_type", "la_freq_type", "no_rope_freq_type"):
        value = _frequency(text)
    else:
        value = bool(text) if kind == "bool" else text
    if flag.choices and value not in flag.choices:
        raise ValueError(f"{CHOICES} {', '.join(map(str, flag.choices))}")
    return value


def _frequency(text: str) -> int | list[int]:
    """`4`, or a Python list expression such as `([0]*3+[1]*5)`."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [value(e) for e in elements]
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Mult(), right):
                a, b = value(left), value(right)
                size = (len(a) if isinstance(a, list) else a) * (len(b) if isinstance(b, list) else b)
                if abs(size) > LONGEST_LIST:
                    raise ValueError
                return a * b
        raise ValueError

    try:
        found = value(ast.parse(text.strip(), mode="eval").body) if "[" in text and len(text) < 2000 else int(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError("is neither a whole number nor a list such as ([0]*3+[1]*5)") from None
    if isinstance(found, list) and not all(isinstance(i, int) for i in found):
        raise ValueError("is no flat list")
    return found


def harmless(name: str, target: Target) -> bool:
    """Whether an argument is a path or a name, which nothing here depends on."""
    flag = target.by_dest[name]
    return (
        flag.action == "store"
        and flag.type in ("str", None)
        and not flag.choices
        and name not in ("hybrid_layer_pattern", "hybrid_override_pattern", "spec")
    )


@lru_cache(4096)
def set_where(text: str, name: str) -> tuple[int, ...]:
    return tuple(n for n, line in enumerate(text.splitlines(), 1) if _sets(name, line))


def _sets(name: str, line: str) -> bool:
    """Whether a line of a shell script or of Python sets a variable."""
    word = re.escape(name)
    return bool(
        re.search(
            rf"(?:^|[\s;(&]){word}\+?\s*=(?!=)|\b(?:for|read(?: -\w+)*|mapfile(?: -\w+)*|-v)\s+{word}\b|\$\{{{word}:?=",
            line,
        )
    )


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(names))
