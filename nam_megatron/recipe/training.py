"""`precision`, `optim`, `schedule`: how the weights are trained."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nam_megatron.packages import FLASH_KEY, FLASH_PACKAGES
from nam_megatron.recipe.model import Fraction
from nam_megatron.words.setting import OURS, SAME, STOCK, Config, Name, Package, Row, Setting
from nam_megatron.words.site import Site

# What the next stage of a run may change. Betas and epsilon are not among them: Megatron takes a checkpoint's.
Stage = Literal[
    "optim.lr", "optim.min_lr", "optim.decay", "optim.wsd_steps", "optim.wsd_shape", "optim.warmup_steps", "optim.weight_decay",
    "optim.clip_grad", "schedule.train_steps", "schedule.decay_steps",
]  # fmt: skip
STAGE: tuple[str, ...] = get_args(Stage)


class Precision(Config):
    """Number formats, and whose kernels do what every model has."""

    params: Annotated[Literal["bf16"], Row("weights and activations")]
    grad_reduce: Annotated[Literal["fp32", "bf16"], Row("dtype in which gradients are accumulated and reduced")]
    cross_entropy: Annotated[
        Literal["megatron", "compiled", "fused"],
        Row("Megatron's, the same by torch.compile, or `fused`: ours, in Triton", executes=SAME),
    ]
    fused_grad_accumulation: Annotated[
        bool, Row("the GEMM of a weight's gradient adds it to the buffer, by TE's kernel", "gradient_accumulation_fusion",
                  ("transformer.gradient_accumulation_fusion",), executes="the same sums")
    ]  # fmt: skip
    norm_kernels: Annotated[
        Literal["transformer_engine", "cudnn"], Row("the kernels behind Transformer Engine's norms", executes=SAME)
    ]
    attention_kernels: Annotated[
        Literal["transformer_engine", "flash_attention_4"],
        Row("whose core attention GQA and MLA have: Transformer Engine's choice (cuDNN's, as a rule), or FlashAttention 4, a package "
            "beside the locked stack (the extra `flash`, Hopper)", executes=SAME, was="transformer_engine"),
    ]  # fmt: skip
    deterministic: Annotated[
        bool, Row("two runs, and a run in several commands, are equal to the last bit", "deterministic_mode",
                  ("transformer.deterministic_mode",), executes="the same sums in one order", was=False)
    ]  # fmt: skip

    def settings(self, site: Site) -> Iterator[Setting]:
        bf16, fp32 = self.params == "bf16", self.grad_reduce == "fp32"
        yield Setting("bf16", bf16, "weights and activations", "params", fields=("transformer.bf16", "optimizer.bf16"))
        yield Setting("fp16", False, "not offered", beside="params")
        fields: Any = {"ddp.grad_reduce_in_fp32": fp32}
        yield Setting("accumulate_allreduce_grads_in_fp32", fp32, "said outright", "grad_reduce", fields=fields)
        yield Setting("grad_reduce_in_bf16", not fp32, "fp32 unless said", "grad_reduce", fields=())
        if site.fsdp:  # it reads this one alone; `auto`: as the weights are, which DDP means by bf16, too
            fields = {"ddp.megatron_fsdp_main_grads_dtype": "fp32" if fp32 else None}
            why = "what Megatron-FSDP reads of it"
            yield Setting(
                "megatron_fsdp_main_grads_dtype", "fp32" if fp32 else "auto", why, "grad_reduce", fields=fields
            )
        pin = partial(Setting, beside="grad_reduce")
        yield pin("fp32_residual_connection", False, "residual stream in bf16")
        yield pin("attention_softmax_in_fp32", False, "TE's kernels keep it in fp32 themselves")
        yield pin("apply_query_key_layer_scaling", False, "no scaling by layer")
        compiled = self.cross_entropy == "compiled"
        fields = ("transformer.cross_entropy_loss_fusion",)
        yield Setting("cross_entropy_loss_fusion", compiled, "`fused` is ours", "cross_entropy", fields=fields)
        pin = partial(Setting, beside="cross_entropy")
        yield pin("cross_entropy_fusion_impl", "native", "Megatron refuses `te`")
        yield pin("fp16_lm_cross_entropy", False, "loss in fp32")
        yield pin("use_precision_aware_optimizer", False, "fp32 master weights and moments")

    def alone(self, site: Site) -> Iterator[str]:
        if self.deterministic and any(block.autotuned for block in site.blocks.all() if block.kind in site.kinds):
            yield "Triton would choose kernels by the clock, and two of Megatron's runs differ in their last bits"

    def packages(self) -> Iterator[Package]:
        if self.fused_grad_accumulation:
            instead = "nam_megatron has Transformer Engine's GEMM do it"
            yield Package(
                "APEX (fused_weight_gradient_mlp_cuda)", "`precision.fused_grad_accumulation`", STOCK, instead
            )
        if self.attention_kernels == "flash_attention_4":
            for package in FLASH_PACKAGES:
                yield Package(package, f"`{FLASH_KEY}`", OURS)


class Optim(Config):
    """The optimizer and its learning rate. Muon's own keys are `feature.muon`."""

    name: Annotated[Literal["adamw", "muon"], Row("muon: for matrices, and AdamW for the rest")]
    lr: Annotated[PositiveFloat, Row("peak learning rate", "lr", ("optimizer.lr",))]
    min_lr: Annotated[NonNegativeFloat | None, Row("where the decay ends", "min_lr", ("optimizer.min_lr",))] = None
    decay: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        Row("of the learning rate; Megatron's default is linear", "lr_decay_style", ("scheduler.lr_decay_style",)),
    ]
    wsd_steps: Annotated[
        PositiveInt | None,
        Row(
            "the last of `schedule.decay_steps`, in which WSD lets the rate fall",
            "lr_wsd_decay_iters",
            ("scheduler.lr_wsd_decay_iters",),
        ),
    ] = None
    wsd_shape: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"] | None,
        Row("of that fall; Megatron's default is exponential", "lr_wsd_decay_style", ("scheduler.lr_wsd_decay_style",)),
    ] = None
    warmup_steps: Annotated[NonNegativeInt, Row("linear warm-up", "lr_warmup_iters", ("scheduler.lr_warmup_iters",))]
    weight_decay: Annotated[
        NonNegativeFloat, Row("decoupled; Megatron's default is 0.01", "weight_decay", ("optimizer.weight_decay",))
    ]
    beta1: Annotated[Fraction, Row("first moment", "adam_beta1", ("optimizer.adam_beta1",))]
    beta2: Annotated[
        Fraction, Row("second moment; Megatron's default is 0.999", "adam_beta2", ("optimizer.adam_beta2",))
    ]
    eps: Annotated[PositiveFloat, Row("added to the root", "adam_eps", ("optimizer.adam_eps",))]
    clip_grad: Annotated[NonNegativeFloat, Row("global gradient norm; 0: none", "clip_grad", ("optimizer.clip_grad",))]

    def settings(self, site: Site) -> Iterator[Setting]:
        if self.name == "adamw":
            adam = {"optimizer.optimizer": "adam"}
            yield Setting("optimizer", "adam", "AdamW: decoupled weight decay", "name", fields=adam)
        if (steps := site.decay_steps) is not None:
            name, key, fields = "lr_decay_iters", "schedule.decay_steps", ("scheduler.lr_decay_iters",)
            yield Setting(name, steps, "steps until min_lr", key, beside="decay", fields=fields)
        yield Setting("lr_warmup_init", 0.0, "from zero", beside="warmup_steps")
        yield Setting("decoupled_lr", None, "one learning rate for all", beside="warmup_steps")
        yield Setting("weight_decay_incr_style", "constant", "no ramp", beside="weight_decay")
        yield Setting("apply_wd_to_qk_layernorm", False, "norms are not decayed", beside="weight_decay")

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        if self.decay == "constant":
            yield "min_lr", "a constant learning rate has no end"
        if self.decay != "WSD":
            yield from ((key, "the decay is not WSD") for key in ("wsd_steps", "wsd_shape"))


class Schedule(Config):
    """Batches, steps, and what happens between them."""

    micro_batch_size: Annotated[
        PositiveInt, Row("samples per forward pass and rank", "micro_batch_size", ("train.micro_batch_size",))
    ]
    global_batch_size: Annotated[
        PositiveInt, Row("samples per step", "global_batch_size", ("train.global_batch_size",))
    ]
    train_steps: Annotated[PositiveInt, Row("steps of the run", "train_iters", ("train.train_iters",))]
    decay_steps: Annotated[PositiveInt | None, Row("steps until the learning rate is at `optim.min_lr`")] = None
    # numpy takes 32 bits, and Megatron adds the rank's offset.
    seed: Annotated[int, Field(ge=0, lt=2**31), Row("weights and data order", "seed", ("rng.seed",))]
    eval_steps: Annotated[
        NonNegativeInt,
        Row("batches per evaluation; 0: none", "eval_iters", ("validation.eval_iters",), "what is looked at"),
    ]
    eval_interval: Annotated[
        PositiveInt,
        Row("steps between evaluations", "eval_interval", ("validation.eval_interval",), "what is looked at"),
    ]
    log_interval: Annotated[
        PositiveInt, Row("steps between log lines", "log_interval", ("logger.log_interval",), "what is printed")
    ]
    save: Annotated[
        Name | None,
        Row("checkpoint folder; null: none is written", "save", ("checkpoint.save",), "where checkpoints go"),
    ]
    save_interval: Annotated[
        PositiveInt | None,
        Row("steps between checkpoints", "save_interval", ("checkpoint.save_interval",), "when they are written"),
    ]
    async_save: Annotated[
        bool, Row("training goes on while a checkpoint is written, by another process of each rank", "async_save",
                  ("checkpoint.async_save",), executes="when they are written", was=False)
    ]  # fmt: skip
    load: Annotated[Name | None, Row("checkpoint to resume from", "load", ("checkpoint.load",), "where they come from")]
    pretrained: Annotated[
        Name | None,
        Row("checkpoints of a model whose newest weights it starts from, at step 0; under Megatron-Bridge", was=None),
    ]
    changes: Annotated[
        tuple[Stage, ...],
        Row("keys whose values may differ from those of the checkpoint that `load` names: the run is its next stage, with the optimizer's "
            "state and the count of steps", executes="what may differ", was=[]),
    ]  # fmt: skip
    stop_every: Annotated[
        PositiveInt | None,
        Row("end the command, with a checkpoint, at every multiple of this step; resume to go on", "exit_interval",
            ("train.exit_interval",), "when a command ends"),
    ]  # fmt: skip
    timeout_minutes: Annotated[
        PositiveInt,
        Row("a rank that waits longer than this for another ends the run", "distributed_timeout_minutes",
            ("dist.distributed_timeout_minutes",), "how long a rank waits"),
    ]  # fmt: skip
    steady_timeout_seconds: Annotated[
        PositiveInt | None,
        Row("a rank that waits longer than this for another once the first step is over ends the run; null: timeout_minutes holds",
            "distributed_timeout_seconds_after_init", ("dist.distributed_timeout_seconds_after_init",), "how long a rank waits", was=None),
    ]  # fmt: skip
    manual_gc_interval: Annotated[
        NonNegativeInt,
        Row("steps between Python's garbage collections, on all ranks at once; 0: each when it likes", "manual_gc_interval",
            ("train.manual_gc_interval",), "when Python tidies up"),
    ]  # fmt: skip

    def settings(self, site: Site) -> Iterator[Setting]:
        pin, looks = partial(Setting, beside="log_interval"), "what is looked at"
        yield pin("log_throughput", True, "Megatron's own figure beside ours", executes="what is printed")
        if site.whole_step:
            why = "Megatron captures a step only without it; our trainer looks at loss and gradients after each replay"
            yield pin("check_for_nan_in_loss_and_grad", False, why, executes=looks)
        else:
            yield pin("check_for_nan_in_loss_and_grad", True, "the house's law: never off", executes=looks)
        if self.pretrained:
            why, fields = "weights alone, at step 0", ("args.pretrained_checkpoint",)
            yield Setting("pretrained_checkpoint", self.pretrained, why, "pretrained", fields=fields)
        if self.async_save:
            pin = partial(Setting, beside="async_save", executes="when they are written")
            yield pin("async_strategy", "mcore", "Megatron's own: `nvrx` is another package's")
            yield pin("use_persistent_ckpt_worker", True, "without it Megatron takes `async_save` back")
        why = "SIGTERM ends the run after the step, with a checkpoint where `save` is"
        ends = "how a command ends"
        yield Setting("exit_signal_handler", True, why, beside="stop_every", executes=ends)
        gc = self.manual_gc_interval > 0
        fields = ("train.manual_gc",)
        yield Setting(
            "manual_gc", gc, "all ranks at once", "manual_gc_interval", beside="timeout_minutes", fields=fields
        )
        if not site.fsdp:
            pin, fields = partial(Setting, beside="manual_gc_interval"), ("checkpoint.ckpt_format",)
            yield pin("ckpt_format", "torch_dist", "sharded, readable in another layout", fields=fields)

    def unread(self, site: Site) -> Iterator[tuple[str, str]]:
        if not site.decays:
            yield "decay_steps", "a constant learning rate has no end"
        if not self.eval_steps:
            yield "eval_interval", "there are no evaluations (`schedule.eval_steps=0`)"
