"""What a pretrain script does around Megatron's pretrain(), which the megatron-core 0.19.2 wheel leaves out (torch side).

The repository's pretrain_hybrid.py and pretrain_gpt.py (core_v0.19.0) say what the pieces have to do. Packed sequences, distillation
and the straggler detector are theirs alone: an argument that asks for one is refused here.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine, get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    unwrap_model,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0, set_startup_timestamps
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.config.container import PretrainConfigContainer
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.global_vars import get_signal_handler
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from nam_megatron.blocks import Gauge
from nam_megatron.compile.plan import Plan
from nam_megatron.errors import Problem, Refused, raise_if
from nam_megatron.events import RECORD, early
from nam_megatron.mends import Trainer, install, whole_step
from nam_megatron.runtime import checkpoint, cross_entropy, hosts, record, word_embedding
from nam_megatron.runtime.gauges import GAUGES
from nam_megatron.runtime.heartbeat import HEART
from nam_megatron.runtime.nonfinite import Watch
from nam_megatron.runtime.readings import Readings

# What this process says of its memory in the log.
READINGS = Readings()
# What one microbatch is made of.
BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
# Arguments that a dataset's config has by their own names; of those that it has with FIM, what follows `fim_`.
OF_DATA = (
    "split", "multiple_validation_sets", "full_validation", "num_dataset_builder_threads", "reset_position_ids", "reset_attention_mask",
    "eod_mask_loss", "object_storage_cache_path", "mid_level_dataset_surplus", "allow_ambiguous_pad_tokens", "context_parallel_size",
    "data_parallel_size",
)  # fmt: skip
OF_FIM = ("rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix")
# A loss this many times the largest one seen is called spiky.
SPIKY = 10
# Arguments of the pretrain scripts whose other half is not here: given, they would do nothing or something else.
UNSERVED = (
    "spec", "yaml_cfg", "sft", "dataloader_inter_document_masking", "hybrid_context_parallel", "logits_load_dir", "log_straggler",
    "inprocess_restart",
)  # fmt: skip


class NonFinite(Exception):
    """The loss is NaN or infinite and the run cannot go on; the message says where it began."""


class NamModelBuilder(HybridModelBuilder):
    """Megatron's builder of hybrid models, without its way back to the default stack."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        assert self._model_config.hybrid_stack_spec is not None, "no stack: Megatron would build its default one"
        return super().build_model(pg_collection, pre_process, post_process, vp_stage)


class NamModelConfig(HybridModelConfig):
    """Megatron's config of hybrid models, built by our builder."""

    builder: ClassVar[str] = f"{NamModelBuilder.__module__}.{NamModelBuilder.__qualname__}"


def run(
    argv: Sequence[str],
    stack: ModuleSpec,
    started: float,
    plan: Plan,
    *,
    operations: float,
    track: Callable[[str], None] | None = None,
    gauges: Mapping[int, Gauge] = MappingProxyType({}),
) -> None:
    """Train the model of `argv` (Megatron's arguments) with the layers of `stack`; returns on every rank once training is over.

    started: time.time() when the process began. plan: what `argv` and `stack` were made of. operations, track: see install.Run. gauges:
    by layer number, what the log is to say of it; see gauges.py.

    Raises:
        Refused: `argv` holds an argument that would not be served.
        NonFinite: the loss is not a number. The other ranks may be waiting for this one: end the process. So they may for
        padding.Unfit: the data holds what is no token.
        SystemExit: Megatron ends the run early: code 0 after a signal or a time limit, 16 or 17 after a failed check, None when a
            checkpoint cannot be read, which Python would report as success.
    """
    sys.argv = [sys.argv[0], *argv]  # Megatron's parser reads nothing else
    set_startup_timestamps(program_start=started, main_entry=time.time())
    install.command(install.Run(plan, operations, track, partial(begin, blind=True), look), Trainer.MEGATRON)
    GAUGES.expect(gauges)
    args = parse_and_validate_args()
    try:
        config = settings(args, stack)
        config.model.post_wrap_hooks.append(partial(install.wrapped, plan=plan))
        config.model.post_wrap_hooks.append(partial(hosts.one_for_all, recipe=plan.recipe))
        if plan.recipe.precision.cross_entropy == "fused":
            config.model.pre_wrap_hooks.append(cross_entropy.provide)
        if args.gradient_accumulation_fusion:
            config.model.pre_wrap_hooks.append(word_embedding.provide)
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    except SystemExit as end:
        signalled = args.exit_signal_handler and get_signal_handler()._signal_received
        RECORD.leaving = early(end.code, steps_done(args), signalled, args.exit_interval)
        if end.code is not None:  # without a code one rank may be alone
            leave()
        raise
    finally:
        READINGS.end(steps_done(args))
        HEART.end()
        whole_step.release()
    leave()


def steps_done(args: Namespace) -> int:
    """`curr_iteration` is that of the last one begun, whether it ended or not."""
    return getattr(args, "consumed_train_samples", 0) // args.global_batch_size


def leave() -> None:
    """Close the process group; left to the interpreter's end, every rank warns about it."""
    whole_step.release()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def settings(args: Namespace, stack: ModuleSpec) -> PretrainConfigContainer:
    """Megatron's container of configs with our model in it.

    Raises Refused for arguments that nothing here would act on.
    """
    problems = [
        Problem(f"`--{name.replace('_', '-')}` is not served by this trainer", hint="take it out of the recipe")
        for name in UNSERVED
        if getattr(args, name)
    ]
    raise_if(problems)
    model = hybrid_config_from_args(args, model_config_cls=NamModelConfig)
    model.hybrid_stack_spec = stack
    if stack:
        model.pre_wrap_hooks += stack.metainfo.get("hooks", [])  # of features that stand beside the layers
    return pretrain_cfg_container_from_args(args, model)


# Batches


def has_mtp(args: Namespace, vp_stage: int | None) -> bool:
    """Whether this stage holds the MTP layers: in a hybrid model always the last one."""
    return mtp_on_this_rank(mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)


def reads_data(args: Namespace, vp_stage: int | None) -> bool:
    """Whether this pipeline stage needs any part of a microbatch."""
    return is_first_or_last_pipeline_stage(vp_stage) or has_mtp(args, vp_stage)


def get_batch(
    samples: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None
) -> dict[str, torch.Tensor | None]:
    """This rank's part of the next microbatch, by the names of BATCH; None for what its pipeline stage does not need.

    Tokens, labels, loss mask and position ids are [microbatch, sequence / context parallel size]; the attention mask, where the
    arguments ask for one, is [microbatch, 1, sequence / context parallel size, sequence]. The first tensor rank alone reads
    `samples` and broadcasts.
    """
    args = get_args()
    if not reads_data(args, vp_stage):
        return dict.fromkeys(BATCH)
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tensor_rank == 0:
        assert samples is not None, "Megatron gives the first tensor rank an iterator"
        sample = next(samples)
        batch = {name: sample[name].cuda(non_blocking=True) if name in sample else None for name in BATCH}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {name: batch[name] for name in BATCH}


# Loss and step


def loss_func(
    loss_mask: torch.Tensor, watch: Watch | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss of a microbatch, the number of tokens it sums over, and what Megatron logs.

    loss_mask, output: [microbatch, sequence], 0 or 1 and the losses per token. `watch` saw this forward pass.

    Megatron divides each microbatch's sum by its own count and averages over microbatches and ranks, so a token of a microbatch with
    masked ones (padding, as fill-in-the-middle makes it) weighs a little more. The loss it logs is the sum of sums over the sum of
    counts.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if not captured(args := get_args()):
        check(loss.detach(), watch.verdict if watch else None)
        if looked_for(args):
            HEART.looked()
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def in_one_graph(args: Namespace) -> bool:
    """Whether all microbatches of a step are one CUDA graph."""
    return args.cuda_graph_impl == "full_iteration"


def captured(args: Namespace) -> bool:
    """Whether what runs now is recorded for a graph of the whole step, and nothing can be looked at."""
    return in_one_graph(args) and torch.cuda.is_current_stream_capturing()


def looked_for(args: Namespace) -> bool:
    """Whether NaN and infinity are looked for. Megatron captures a step only where its arguments deny it: see whole_step.py."""
    return args.check_for_nan_in_loss_and_grad or in_one_graph(args)


def look(loss: torch.Tensor) -> None:
    """At the loss of a microbatch that ran in a graph."""
    check(loss, (lambda: whole_step.BLIND) if watched(get_rerun_state_machine()) else None)


def check(loss: torch.Tensor, verdict: Callable[[], str] | None) -> None:
    """Stop the run at a NaN or infinite loss, report a spiky one; both only where it is looked for.

    verdict: says where it began; None for a step that will be repeated to find out.

    Megatron's rerun state machine repeats the step on all ranks to see if the value comes back, saves a checkpoint of the state
    before it and exits. It skips the first step, and cannot save without `--save`; then the run ends here.
    """
    args, machine = get_args(), get_rerun_state_machine()
    if looked_for(args):
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,  # the forward pass is deterministic
                fatal=True,
            )
        if verdict is not None and not loss.isfinite():
            message = f"{whereabouts()}: the loss is {loss.item()}; {verdict()}"
            if args.save is None or not machine.first_iteration_complete:
                raise NonFinite(message)
            report(message)
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=SPIKY, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def step_now() -> int:
    """The step under way, from 1; before the first one is begun 1 as well."""
    return getattr(get_args(), "curr_iteration", 0) + 1


def whereabouts() -> str:
    return f"step {step_now()}, rank {torch.distributed.get_rank()}"


BAD_GRADIENT = "a gradient is no number; `Unexpected result` in the log says on which rank"


@cache
def report(message: str) -> None:
    """To stderr, each message once, however many microbatches say it."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def watched(machine: RerunStateMachine) -> bool:
    """Whether the next forward pass should look for the first module with a non-finite output.

    That costs a pass over every layer's output, so: in the first step, which Megatron does not check, and when it repeats a step.
    """
    if machine.get_mode() == RerunMode.DISABLED or not looked_for(get_args()):
        return False
    return not machine.first_iteration_complete or machine.state == RerunState.RERUNNING_IN_PLACE


def begin(blind: bool) -> None:
    """A microbatch begins, or the replay of all of a step: tell whoever counts. blind: it is in a graph, and nothing can be measured."""
    args = get_args()
    READINGS.step(args.curr_iteration)
    HEART.step(args.curr_iteration, blind)
    GAUGES.step(args.curr_iteration, args.log_interval, blind)


def forward_step(
    samples: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, partial]:
    """One microbatch through this pipeline stage: its output and the function that makes the loss of the last stage's."""
    timers = get_timers()
    begin(blind=captured(get_args()))
    timers("batch-generator", log_level=2).start()
    batch = get_batch(samples, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    watch = Watch(unwrap_model(model)) if watched(get_rerun_state_machine()) else None
    try:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    finally:
        if watch is not None:
            watch.close()
    # An inner stage says it itself: the last one will only see that it came from elsewhere.
    if watch is not None and batch["labels"] is None and watch.began_here():
        report(f"{whereabouts()}: NaN or Inf, {watch.verdict()}")
    return output, partial(loss_func, batch["loss_mask"], watch)


# Data


def datasets(sizes: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test datasets of at least `sizes` samples; None on ranks that read none, and for splits that are empty."""
    args = get_args()
    if not vp_stage:
        HEART.built()
        READINGS.built()  # Megatron asks for data once model and optimizer are there
        step = getattr(args, "iteration", 0)
        raise_if(checkpoint.exchanged(args.load, step))
        record.loaded(step, args.load)
    kind, config = dataset_config(args)

    def built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and reads_data(args, vp_stage)

    print_rank_0(f"> building train, validation and test datasets ({kind.__name__}) ...")
    return BlendedMegatronDatasetBuilder(kind, list(sizes), built_here, config).build()


# Megatron's mark of a provider that it may call on every rank; without it, ranks that read nothing would miss the builder's barriers.
datasets.is_distributed = True  # type: ignore[attr-defined]  # of a function


def dataset_config(args: Namespace) -> tuple[type[GPTDataset] | type[MockGPTDataset], GPTDatasetConfig]:
    """The class of the training data and its config: mock, fill-in-the-middle or plain. Raises Refused."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    given = blend is not None or blend_per_split is not None
    # Megatron reads "no data" as "mock data".
    raise_if(
        [Problem("mock data and a data path at once", key="data")] * (args.mock_data and given)
        + [Problem("no training data: neither a data path nor mock data", key="data")]
        * (not args.mock_data and not given)
        + [Problem("fill-in-the-middle of mock data", key="feature.fim")] * (args.mock_data and args.fim_data)
    )
    tokenizer = get_tokenizer()
    if not args.mock_data and tokenizer.vocab_size > args.padded_vocab_size:
        text = f"the tokenizer has {tokenizer.vocab_size} entries, and the model's vocabulary {args.padded_vocab_size}"
        raise Refused(text, key="model.vocab_size", hint="use another tokenizer, or a model with a larger vocabulary")
    common = {name: getattr(args, name) for name in OF_DATA} | dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    if not args.fim_data:
        return MockGPTDataset if args.mock_data else GPTDataset, GPTDatasetConfig(**common)
    tokens = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    raise_if(unknown_tokens(tokenizer, tokens))
    own = {f"fim_{name}": getattr(args, f"fim_{name}") for name in OF_FIM}
    return GPTFIMDataset, GPTFIMDatasetConfig(**common, **own, fim_extra_tokens=tokens)


def unknown_tokens(tokenizer: Any, tokens: dict[str, str]) -> list[Problem]:
    """FIM tokens that the tokenizer lacks, and would map to the unknown token or to none; an end of documents that is not its own, at
    which Megatron would part no two documents."""
    words = list(tokens.values())
    ids = tokenizer._tokenizer.tokens_to_ids(words)
    back = [None if i is None else tokenizer._tokenizer.ids_to_tokens([i])[0] for i in ids]
    found = [
        Problem(
            f"the tokenizer has no token `{word}`",
            key=f"feature.fim.{name}_token",
            hint="name tokens that it was trained with",
        )
        for (name, word), known in zip(tokens.items(), back, strict=True)
        if known != word
    ]
    if not found and dict(zip(tokens, ids, strict=True))["eod"] != tokenizer.eod:
        said = f"documents of this tokenizer do not end with `{tokens['eod']}`"
        found = [Problem(said, key="feature.fim.eod_token", hint="name its `eos_token`")]
    return found
