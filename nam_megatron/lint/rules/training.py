"""Sharding, optimizer, checkpoints, data."""

import re
from collections.abc import Iterator
from functools import partial

from nam_megatron.lint.model import Model, known
from nam_megatron.lint.rules.laws import law
from nam_megatron.lint.rules.parser import forked
from nam_megatron.lint.rules.rule import FAIL, OPEN, VALIDATE, WRONG, Rule, each
from nam_megatron.lint.rules.terms import trap
from nam_megatron.lint.values import Args


def _fsdp2(a: Args, m: Model) -> Iterator[str]:
    if a.use_torch_fsdp2:
        wrong = {
            "pipeline parallelism": m.pp > 1, "expert parallelism": m.ep > 1,
            "`--use-distributed-optimizer`": a.use_distributed_optimizer,
            "gradient accumulation fusion, on by default (`--no-gradient-accumulation-fusion`)": a.gradient_accumulation_fusion,
            f"`--ckpt-format {a.ckpt_format}`": a.ckpt_format not in ("torch_dist", "torch_dcp"),
            "tied embeddings (`--untie-embeddings-and-output-weights`)": not a.untie_embeddings_and_output_weights,
            "`--fp16`": a.fp16,
        }  # fmt: skip
        yield from (what for what, is_so in wrong.items() if is_so)


def _lone_experts(a: Args, m: Model) -> bool:
    if m.plan or not (a.use_megatron_fsdp and m.moe) or a.calculate_per_token_loss:
        return False
    summed = a.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    beside = m.dp * m.cp * m.tp // (m.ep * m.etp)  # ranks with the same experts
    return summed and beside == 1 and m.dp * m.cp > 1 and a.global_batch_size != m.need("micro_batch_size") * m.dp


def _iterations_and_samples(a: Args, m: Model) -> Iterator[str]:
    if a.train_iters and not a.skip_train:
        yield from (
            f"{a.written(n)}\t" for n in ("train_samples", "lr_decay_samples", "lr_warmup_samples") if a.value(n)
        )
    if a.train_samples and not a.train_iters and not a.skip_train:
        yield from (f"{a.written(n)}\t" for n in ("lr_decay_iters", "lr_warmup_iters") if a.value(n))
    if a.lr_warmup_fraction is not None and (a.lr_warmup_iters or a.lr_warmup_samples):
        yield f"{a.written('lr_warmup_fraction')}\t"


def _documents(a: Args, m: Model) -> Iterator[str]:
    """Flags of the data set that make something which no layer of this model takes."""
    older = forked(a) and not a.said("transformer_impl")  # an older Megatron's layers take the mask
    masked = (older or a.transformer_impl == "local") and not (m.recurrent or m.dsa)
    if any("packed" in t.about for t in a.trouble) or any("packed" in flag for flag in a.foreign):
        return  # a fork keeps documents apart in its own way
    idle = {"reset_attention_mask": _unread(m)} if a.reset_attention_mask and not masked else {}
    if a.reset_position_ids and m.positions != "learned_absolute":
        idle["reset_position_ids"] = f"`--position-embedding-type {m.positions}` takes no position ids"
    if idle:
        yield f"{' '.join(a.written(name) for name in idle)}\t{'; '.join(idle.values())}"


def _unread(m: Model) -> str:
    if m.recurrent:
        return "a recurrent layer's state goes through every document, and Transformer Engine's causal attention takes no mask"
    return "Transformer Engine's causal attention takes no mask"


def _annealed(a: Args, m: Model) -> Iterator[str]:
    """WSD whose decay begins before its warm-up ends, or before the run does: it never holds the rate that is said."""
    for unit in ("iters", "samples"):
        decay, total = getattr(a, f"lr_wsd_decay_{unit}"), getattr(a, f"lr_decay_{unit}") or getattr(a, f"train_{unit}")
        warm = getattr(a, f"lr_warmup_{unit}") or 0
        if a.lr_decay_style == "WSD" and decay and total and decay + warm > total:
            kept = f"{warm} of warm-up and " if warm else ""
            yield f"{a.written(f'lr_wsd_decay_{unit}')}\t{kept}{decay} of decay in {total}"


UNLIKELY = {"init_method_std": 0.2, "weight_decay": 1.0, "lr": 0.1}  # from here on, a digit is wrong
LONG = 1000  # steps; a shorter run is a trial, whose schedule is often that of the long one


def _apart(a: Args, m: Model) -> Iterator[str]:
    """Lengths of the schedule that do not go with the length of the training: a digit too few, or another unit."""
    for unit in ("iters", "samples"):
        batch = 1 if unit == "iters" else known(lambda: a.global_batch_size)
        train, decay, warm = (
            known(partial(getattr, a, f"{n}_{unit}")) or 0 for n in ("train", "lr_decay", "lr_warmup")
        )
        share = known(lambda: a.lr_warmup_fraction) or warm / (decay or train or 1)
        if train < LONG * (batch or LONG) or known(lambda: a.lr_decay_style) == "constant":
            continue
        if 0 < decay <= train / 5:
            yield f"{a.written(f'lr_decay_{unit}')}\t{1 - decay / train:.0%} of the training is at --min-lr"
        elif 5 * train <= decay < 50 * train:  # beyond that a trial, whose schedule is that of the long run
            yield f"{a.written(f'lr_decay_{unit}')}\tthe training ends at {train / decay:.0%} of it, far above --min-lr"
        elif share >= 0.5:
            name = "lr_warmup_fraction" if a.lr_warmup_fraction else f"lr_warmup_{unit}"
            yield f"{a.written(name)}\t{share:.0%} of the schedule is warm-up"
        if unit == "samples" and batch and 0 < warm < 10 * batch and not a.finetune:
            yield f"{a.written('lr_warmup_samples')}\ta step is {batch} samples: {warm / batch:.1f} steps"


def _restarts(a: Args) -> bool:
    """Whether a second start reads what this run saved."""
    where = {name: a.given[name][-1][2].split(" ", 1)[-1] for name in a.sure("save", "load")}
    return len(where) == 2 and where["save"] == where["load"] and not re.fullmatch("[A-Z]+|your", where["save"])


def _own_folder(a: Args, m: Model) -> Iterator[str]:
    """A run that reads its own checkpoints: a second start begins with what it lacks then. One that saves at its end has no middle."""
    at_its_end = known(lambda: 0 < (a.train_iters or 0) <= (a.save_interval or 0))
    if _restarts(a) and not a.pretrained_checkpoint and not a.mock_data and not at_its_end:
        if a.finetune:
            yield f"{a.written('finetune')}\tit counts from step 0 again, with a new optimizer, from the weights of its last save"
        elif a.no_load_optim:
            yield f"{a.written('no_load_optim')}\tmoments and master weights begin anew in the middle of the schedule"


def _schedule(a: Args, m: Model) -> Iterator[str]:
    """What the learning rate's schedule refuses as it is made, after all else is built."""
    if a.lr_decay_style == "WSD" and a.lr_wsd_decay_iters is None and a.lr_wsd_decay_samples is None:
        yield f"{a.written('lr_decay_style')}\twithout the length of its decay\tadd `--lr-wsd-decay-iters`"
    for unit in ("iters", "samples"):
        warm, total = getattr(a, f"lr_warmup_{unit}"), getattr(a, f"lr_decay_{unit}") or getattr(a, f"train_{unit}")
        if warm and total and warm >= total:
            yield f"{a.written(f'lr_warmup_{unit}')}\t{warm} of warm-up, and the decay ends at {total}\tlower it"
    if (
        a.start_weight_decay is not None
        and a.end_weight_decay is not None
        and a.end_weight_decay < a.start_weight_decay
    ):
        yield f"{a.written('end_weight_decay')}\tbelow --start-weight-decay\traise it"


RULES = (
    Rule("documents-not-apart", WRONG, "reset_attention_mask|reset_position_ids", _documents,
        "no layer reads it: documents of a sample see one another (Megatron-LM issues 2357, 415)",
        "only `--eod-mask-loss` does what it says; packed sequences keep documents apart (`--sft`), where the layers take them",
        "core/transformer/attention.py, core/extensions/transformer_engine.py TEDotProductAttention"),
    Rule("schedule", FAIL, "lr_decay_style", _schedule, "the learning rate's schedule refuses it", "change one of them",
        "core/optimizer_param_scheduler.py"),
    Rule("schedule-apart", OPEN, "lr_decay_iters", _apart,
        "a length of the learning rate's schedule that hardly goes with the training's",
        "check its unit and its digits", "core/optimizer_param_scheduler.py get_lr"),
    Rule("restart-anew", OPEN, "finetune", _own_folder, "--load is --save, so that a restart reads what this run saved",
        "give the first weights as `--pretrained-checkpoint`, or start again without it",
        "training/checkpointing.py load_checkpoint"),
    Rule("restart-strict", FAIL, "dist_ckpt_strictness",
        lambda a, m: _restarts(a)
            and not m.plan
            and a.dist_ckpt_strictness == "raise_all"
            and a.ckpt_format == "torch_dist"
            and a.rerun_mode != "disabled",
        "a restart stops at its own checkpoint (`Missing keys ... rerun_state_machine_state`): the state of reruns is saved also where "
            "none is pending, and is asked for only where one is (Megatron-LM issue 7428, pull request 7222)",
        "add `--rerun-mode disabled` from the first start on, or use `--dist-ckpt-strictness raise_unexpected`",
        "core/rerun_state_machine.py state_dict, validate_state_dict, training/checkpointing.py load_checkpoint"),
    Rule("wsd-too-long", WRONG, "lr_wsd_decay_iters", _annealed,
        "the decay has begun before the rate is reached: it is never the one that is said",
        "shorten the decay, or train longer", "core/optimizer_param_scheduler.py get_lr"),
    Rule(
        "resume-learning-rate",
        OPEN,
        "override_opt_param_scheduler",
        lambda a, m: a.override_opt_param_scheduler
        and a.launch.kind != "container"  # there it is on unless said
        and bool(a.load)
        and not (a.no_load_optim or a.finetune),
        "optimizer state is found by its group's own --lr and --min-lr since 0.19: if the checkpoint was written with others, it does not "
        "load (`Could not find parameter group with key`), whatever this says (Megatron-LM issues 1138, 963, pull request 4705)",
        "keep both as they were, or begin anew: `--no-load-optim`, `--finetune`",
        "core/optimizer/optimizer.py param_group_identifier_keys",
    ),
    Rule("offload-resume", OPEN, "optimizer_cpu_offload",
        lambda a, m: not a.elsewhere
            and a.optimizer_cpu_offload
            and not a.mock_data
            and bool(a.load or a.pretrained_checkpoint),
        "an optimizer on the CPU keeps copies of the weights of its own: after a checkpoint losses that begin anew were reported, with its "
            "state (Megatron-LM issues 1842, 2775) and, of weights alone, with the cause (pull request 5071)",
        "compare the first loss with the last one before, or keep the optimizer on the GPU",
        "core/optimizer/cpu_offloading/hybrid_optimizer.py"),
    *map(trap, ("fsdp-hybridep", "fsdp-checkpoints", "fsdp-optimizer")),
    Rule("fsdp-pipeline", FAIL, "pipeline_model_parallel_size|use_megatron_fsdp", law("fsdp-pipeline"),
        "Megatron-FSDP's mesh has no place for pipeline stages, and its ranks do not add up", "use one of them",
        "core/distributed/fsdp/mcore_fsdp_adapter.py _get_dp_tp_mesh"),
    Rule("fsdp-lone-experts", WRONG, "expert_model_parallel_size|use_megatron_fsdp", _lone_experts,
        "each expert is on one data rank alone: the sum of its gradients is scaled again with each microbatch, so that the first ones "
            "hardly count (Megatron-LM issue 6660 tells of its kin)",
        "fewer expert parallel ranks, `--calculate-per-token-loss`, or no FSDP",
        "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py _bucket_group_gradient_reduce"),
    *map(trap, ("fsdp-indexer",)),
    Rule("fsdp2", FAIL, "use_torch_fsdp2", _fsdp2, "torch FSDP2 refuses it", "leave one of them out", VALIDATE),
    *map(trap, ("fsdp-tensor",)),
    Rule("checkpoint-shifted", WRONG, "dist_ckpt_optim_fully_reshardable",
        lambda a, m: not m.plan
            and all((a.dist_ckpt_optim_fully_reshardable, a.use_distributed_optimizer, a.overlap_grad_reduce, a.save))
            and (a.ckpt_format == "torch_dist" and not a.no_save_optim and not m.fsdp),
        "from a gradient buffer's second bucket on, master weights and moments are saved shifted by the padding of the buckets before "
        "(mended in Megatron-LM pull request 5077), and a run that goes on from such a checkpoint trains with other weights; buckets of "
        "parameters whose sizes 128 and the data-parallel ranks divide have no padding, unless it is asked for",
        "leave it out, or take a Megatron with that change",
        "core/optimizer/distrib_optimizer.py sharded_param_state_fully_reshardable"),
    Rule("checkpoint-format", FAIL, "ckpt_format",
        lambda a, m: (a.ckpt_format == "fsdp_dtensor" and not a.use_megatron_fsdp)
            or (a.verify_integrity and a.ckpt_format != "torch_dist")
            or (a.ckpt_format == "torch_dcp" and (not a.use_torch_fsdp2 or m.tp > 1 or m.pp > 1))
            or (a.optimizer not in ("adam", "sgd") and a.ckpt_format not in ("torch", "torch_dist")),
        "this format is for another setup", "use `--ckpt-format torch_dist`", VALIDATE),
    Rule("rampup-ignored", WRONG, "rampup_batch_size",
        lambda a, m: a.said("rampup_batch_size") and a.step_batch_size_schedule is None,
        "ignored: every step takes the whole global batch from the first one on",
        "say `--step-batch-size-schedule` and `--train-samples`, without `--global-batch-size`",
        "training/global_vars.py set_global_variables, core/num_microbatches_calculator.py"),
    Rule("batch-schedule-steps", WRONG, "step_batch_size_schedule",
        lambda a, m: bool(a.step_batch_size_schedule) and bool(a.train_iters) and a.global_batch_size is None,
        "in iterations the learning rate's decay and the data are counted by micro batch x data parallel samples a step, whatever it says",
        "count in samples: `--train-samples`, `--lr-decay-samples`, `--lr-warmup-samples`",
        "training/training.py get_optimizer_param_scheduler"),
    Rule("unlikely-value", OPEN, "",
        lambda a, m: each(a, (n for n in a.sure(*UNLIKELY) if a.optimizer == "adam" and getattr(a, n) >= UNLIKELY[n])),
        "ten times what published runs have, or more", "look at its digits", "core/optimizer/optimizer_config.py"),
    Rule("learning-rates", FAIL, "min_lr", law("min-lr-above-lr"), "above --lr", "lower it", VALIDATE),
    Rule("iterations-and-samples", FAIL, "", _iterations_and_samples,
        "iterations and samples, or two warm-ups, in one launch", "keep one kind", VALIDATE),
    *map(trap, ("save-interval",)),
    Rule("data-sources", FAIL, "mock_data|data_path",
        lambda a, m: sum(any(a.said(name) and bool(a.value(name)) for name in names)
                         for names in (("mock_data",), ("data_path",), ("train_data_path", "valid_data_path", "test_data_path"))) > 1,
        "more than one source of data", "keep one", VALIDATE),
)  # fmt: skip
