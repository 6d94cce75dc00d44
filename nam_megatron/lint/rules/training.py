"""Sharding, optimizer, checkpoints, data."""

from collections.abc import Iterator

from nam_megatron.lint.model import Model
from nam_megatron.lint.rules.rule import COST, FAIL, FRAGILE, VALIDATE, WRONG, Rule
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


RULES = (
    Rule(
        "fsdp-checkpoints",
        FAIL,
        "ckpt_format|use_megatron_fsdp",
        lambda a, m: a.use_megatron_fsdp and a.ckpt_format != "fsdp_dtensor",
        "Megatron-FSDP writes one checkpoint format only",
        "add `--ckpt-format fsdp_dtensor`",
        VALIDATE,
    ),
    Rule(
        "fsdp-optimizer",
        FAIL,
        "optimizer",
        lambda a, m: m.fsdp and a.optimizer not in ("adam", "sgd"),
        "FSDP trains with adam or sgd",
        "use adam, or no FSDP",
        VALIDATE,
    ),
    Rule(
        "fsdp-pipeline",
        FAIL,
        "pipeline_model_parallel_size|use_megatron_fsdp",
        lambda a, m: a.use_megatron_fsdp and m.pp > 1,
        "Megatron-FSDP's mesh has no place for pipeline stages, and its ranks do not add up",
        "use one of them",
        "core/distributed/fsdp/mcore_fsdp_adapter.py _get_dp_tp_mesh",
    ),
    Rule(
        "fsdp-lone-experts",
        WRONG,
        "expert_model_parallel_size|use_megatron_fsdp",
        _lone_experts,
        "each expert is on one data rank alone: the sum of its gradients is scaled again with each microbatch, so that the first ones "
        "hardly count (Megatron-LM issue 6660 tells of its kin)",
        "fewer expert parallel ranks, `--calculate-per-token-loss`, or no FSDP",
        "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py _bucket_group_gradient_reduce",
    ),
    Rule(
        "fsdp-indexer",
        WRONG,
        "tensor_model_parallel_size|use_megatron_fsdp",
        lambda a, m: not m.plan and a.use_megatron_fsdp and m.tp > 1 and m.dsa and bool(a.dsa_indexer_loss_coeff),
        "tensor ranks sum the gradients of DSA's indexer where they would average them: FSDP does not hand the mark on",
        "one tensor rank, or no FSDP",
        "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py _init_optimizer_named_parameters",
    ),
    Rule("fsdp2", FAIL, "use_torch_fsdp2", _fsdp2, "torch FSDP2 refuses it", "leave one of them out", VALIDATE),
    Rule(
        "fsdp-tensor",
        COST,
        "use_megatron_fsdp|use_torch_fsdp2",
        lambda a, m: m.fsdp and (m.tp > 1 or m.cp > 1),
        "tensor and context parallelism want CUDA_DEVICE_MAX_CONNECTIONS=1, FSDP forbids it: one of them loses its overlap",
        "use one of them",
        VALIDATE,
    ),
    Rule(
        "checkpoint-shifted",
        WRONG,
        "dist_ckpt_optim_fully_reshardable",
        lambda a, m: not m.plan
        and all((a.dist_ckpt_optim_fully_reshardable, a.use_distributed_optimizer, a.overlap_grad_reduce, a.save))
        and (a.ckpt_format == "torch_dist" and not a.no_save_optim and not m.fsdp),
        "from a gradient buffer's second bucket on, master weights and moments are saved shifted by the padding of the buckets before "
        "(mended in Megatron-LM pull request 5077), and a run that goes on from such a checkpoint trains with other weights; buckets of "
        "parameters whose sizes 128 and the data-parallel ranks divide have no padding, unless it is asked for",
        "leave it out, or take a Megatron with that change",
        "core/optimizer/distrib_optimizer.py sharded_param_state_fully_reshardable",
    ),
    Rule(
        "checkpoint-format",
        FAIL,
        "ckpt_format",
        lambda a, m: (a.ckpt_format == "fsdp_dtensor" and not a.use_megatron_fsdp)
        or (a.verify_integrity and a.ckpt_format != "torch_dist")
        or (a.ckpt_format == "torch_dcp" and (not a.use_torch_fsdp2 or m.tp > 1 or m.pp > 1))
        or (a.optimizer not in ("adam", "sgd") and a.ckpt_format not in ("torch", "torch_dist")),
        "this format is for another setup",
        "use `--ckpt-format torch_dist`",
        VALIDATE,
    ),
    Rule(
        "muon-tp-mode",
        FRAGILE,
        "muon_tp_mode|optimizer",
        lambda a, m: a.optimizer in ("muon", "dist_muon") and not a.said("muon_tp_mode"),
        "blockwise today; Megatron 0.20 has another default",
        "say `--muon-tp-mode`",
        "core/optimizer/optimizer_config.py",
    ),
    Rule(
        "dist-muon",
        FRAGILE,
        "optimizer",
        lambda a, m: a.optimizer == "dist_muon",
        "deprecated",
        "use `--optimizer muon --use-distributed-optimizer`",
        VALIDATE,
    ),
    Rule(
        "rampup-ignored",
        WRONG,
        "rampup_batch_size",
        lambda a, m: a.said("rampup_batch_size") and a.step_batch_size_schedule is None,
        "ignored: every step takes the whole global batch from the first one on",
        "say `--step-batch-size-schedule` and `--train-samples`, without `--global-batch-size`",
        "training/global_vars.py set_global_variables, core/num_microbatches_calculator.py",
    ),
    Rule(
        "batch-schedule-steps",
        WRONG,
        "step_batch_size_schedule",
        lambda a, m: bool(a.step_batch_size_schedule) and bool(a.train_iters) and a.global_batch_size is None,
        "in iterations the learning rate's decay and the data are counted by micro batch x data parallel samples a step, whatever it says",
        "count in samples: `--train-samples`, `--lr-decay-samples`, `--lr-warmup-samples`",
        "training/training.py get_optimizer_param_scheduler",
    ),
    Rule(
        "learning-rates",
        FAIL,
        "min_lr",
        lambda a, m: a.lr is not None and a.min_lr > a.lr,
        "above --lr",
        "lower it",
        VALIDATE,
    ),
    Rule(
        "iterations-and-samples",
        FAIL,
        "",
        _iterations_and_samples,
        "iterations and samples, or two warm-ups, in one launch",
        "keep one kind",
        VALIDATE,
    ),
    Rule(
        "save-interval",
        FAIL,
        "save",
        lambda a, m: a.said("save") and not a.save_interval,
        "--save without --save-interval",
        "add it",
        VALIDATE,
    ),
    Rule(
        "data-sources",
        FAIL,
        "mock_data|data_path",
        lambda a, m: a.mock_data
        + bool(a.value("data_path"))
        + any(map(bool, map(a.value, ("train_data_path", "valid_data_path", "test_data_path"))))
        > 1,
        "more than one source of data",
        "keep one",
        VALIDATE,
    ),
)
