"""Laws on how and on what is trained: optimizer, schedule, data, tracking."""

import re
from collections.abc import Iterator, Mapping
from os.path import normpath

from nam_megatron.features.names import Features
from nam_megatron.features.tracking import Tracking
from nam_megatron.laws.law import CONTRADICTION, MATHS, OURS, REFUSES, UNTRIED, WRONG, Law, Words
from nam_megatron.recipe import Recipe
from nam_megatron.recipe.data import KEYS, Data
from nam_megatron.recipe.training import Optim, Schedule

TRACKED = "feature.tracking."
ARGUMENTS, BRIDGE = "training/arguments.py", "Megatron-Bridge 0.6.2, nam_megatron/nemo"
BLENDS = ("parts", "valid_parts")  # of `data`
HOLD_OUT = "`99,1,0`"
SPLIT = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){2}", re.ASCII)


def _named_otherwise(optim: Optim, feature: Features) -> Words | None:
    on = feature.muon is not None
    return {"muon": "on" if on else "off"} if (optim.name == "muon") != on else None


def _no_fall(optim: Optim, schedule: Schedule) -> bool:
    return schedule.decay_steps is not None and optim.warmup_steps >= schedule.decay_steps


def _long_fall(optim: Optim, schedule: Schedule) -> bool:
    steps = schedule.decay_steps
    return steps is not None and not _no_fall(optim, schedule) and (optim.wsd_steps or 0) > steps - optim.warmup_steps


def _uneven_batch(schedule: Schedule, recipe: Recipe) -> Words | None:
    ranks = recipe.data_parallel
    multiple = schedule.micro_batch_size * ranks
    return {"ranks": ranks, "multiple": multiple} if ranks and schedule.global_batch_size % multiple else None


def _remote(recipe: Recipe) -> Iterator[Words]:
    """Keys of places that are no folders of this host."""
    sections = {"cluster.storage": recipe.cluster.storage, "schedule": recipe.schedule, "data": recipe.data}
    for at, section in (sections | {"feature.tracking": recipe.feature.tracking}).items():
        for key, text in _texts(section.model_dump() if section else None, at):
            if "://" in text and key != f"{TRACKED}mlflow":  # its client takes addresses
                yield {"key": key, "path": text}


def _texts(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, inner in node.items():
            yield from _texts(inner, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for i, inner in enumerate(node):
            yield from _texts(inner, f"{key}[{i}]")


def _twice(data: Data) -> Iterator[Words]:
    for name in BLENDS:
        paths = [normpath(part.path) for part in getattr(data, name) or ()]
        yield from ({"key": f"data.{name}", "path": path} for path in sorted({p for p in paths if paths.count(p) > 1}))


def _trained_on(data: Data) -> Iterator[Words]:
    trained = {normpath(part.path) for part in data.parts or ()}
    return ({"path": part.path} for part in data.valid_parts or () if normpath(part.path) in trained)


def _lacking(data: Data) -> Iterator[Words]:
    for name in KEYS[data.name]:
        optional = name in ("cache", "valid_parts") or (name == "split" and data.valid_parts is not None)
        if not optional and getattr(data, name) is None:
            yield {"key": f"data.{name}", "name": name}


def _needless(data: Data) -> Iterator[Words]:
    for name in ("path", "parts", "valid_parts", "split", "tokenizer", "cache", "prompt", "answer"):
        if name not in KEYS[data.name] and getattr(data, name) is not None:
            right = " or ".join(f"`data={kind}`" for kind, keys in KEYS.items() if name in keys)
            own = "its folder has one of its own: " if data.name == "built" else ""
            yield {"key": f"data.{name}", "name": name, "way": f"{own}leave it out, or set {right}"}


def _weights(data: Data) -> tuple[float, ...]:
    """Of train, valid and test; none where there is no split, or what stands there is none."""
    return tuple(map(float, data.split.split(","))) if data.split and SPLIT.fullmatch(data.split) else ()


def _wandb_lacks(tracking: Tracking) -> Iterator[Words]:
    for name in ("wandb_name", "wandb_dir"):
        if tracking.wandb_project and not getattr(tracking, name):
            yield {"key": TRACKED + name, "name": name}


def _half_of_mlflow(tracking: Tracking) -> Words | None:
    if bool(tracking.mlflow) == bool(tracking.mlflow_experiment):
        return None
    return {"key": TRACKED + ("mlflow_experiment" if tracking.mlflow else "mlflow")}


LAWS = (
    Law(id="muon-by-name", category=CONTRADICTION, key="optim.name",
        when=_named_otherwise, says="the optimizer is called {optim.name} and Muon is {muon}",
        way="set `optim=muon` or `optim=adamw`"),
    Law(id="lr-above-one", category=UNTRIED, key="optim.lr",
        when=lambda optim: optim.lr > 1,
        says="a learning rate of {optim.lr:g} moves each weight by more than 1 in a step",
        way="a rate of 3e-4 is written with its minus"),
    Law(id="min-lr-above-lr", category=REFUSES, key="optim.min_lr",
        when=lambda optim: optim.min_lr is not None and optim.min_lr > optim.lr,
        says="min_lr {optim.min_lr} is above lr {optim.lr}", source="core/optimizer_param_scheduler.py"),
    Law(id="warmup-beyond-decay", category=REFUSES, key="optim.warmup_steps",
        when=_no_fall, says="warm-up of {optim.warmup_steps} steps leaves nothing of {schedule.decay_steps}",
        way="warm up for fewer: `optim.warmup_steps=0` is none", source="core/optimizer_param_scheduler.py"),
    Law(id="fall-beyond-decay", category=MATHS, key="optim.wsd_steps",
        when=_long_fall,
        says="a fall of {optim.wsd_steps} steps does not fit between warm-up {optim.warmup_steps} and {schedule.decay_steps}",
        way="make it smaller"),
    Law(id="later-timeout-longer", category=CONTRADICTION, key="schedule.steady_timeout_seconds",
        when=lambda schedule: (schedule.steady_timeout_seconds or 0) > 60 * schedule.timeout_minutes,
        says="later steps may wait {schedule.steady_timeout_seconds} s, and the first, which compiles, {schedule.timeout_minutes} min",
        way="give the first step the longer one"),
    Law(id="batch-uneven", category=REFUSES, key="schedule.global_batch_size",
        when=_uneven_batch,
        says="global batch {schedule.global_batch_size} is not a multiple of micro batch {schedule.micro_batch_size} x data parallel "
            "{ranks}", way="{multiple} and its multiples fit", source="core/num_microbatches_calculator.py"),
    Law(id="save-without-interval", category=CONTRADICTION, key="schedule.save_interval",
        when=lambda schedule: (schedule.save is None) != (schedule.save_interval is None),
        says="`save` and `save_interval` go together", way="give both or neither"),
    Law(id="async-save-of-nothing", category=CONTRADICTION, key="schedule.async_save",
        when=lambda schedule: schedule.async_save and schedule.save is None,
        says="nothing is saved, in the background or not", way="set `schedule.save`, or false"),
    Law(id="async-save-fsdp", category=OURS, key="schedule.async_save",
        when=lambda schedule, megatron_fsdp: schedule.async_save,
        says="Megatron-FSDP hands its checkpoints to another package, and they would get no checksums",
        way="set it to false", source="nam_megatron/mends/checksums.py"),
    Law(id="object-storage", category=OURS, key="schedule.save",
        when=_remote,
        says="`{path}` is an address: Megatron's client for object storage is off, and a folder of that name would be made",
        way="name a mounted folder; copy to and from object storage before and after", source="core/msc_utils.py"),
    Law(id="stop-without-save", category=CONTRADICTION, key="schedule.stop_every",
        when=lambda schedule: schedule.stop_every and schedule.save is None,
        says="a run that stops on its way and saves nothing", way="set `schedule.save`, or null"),
    Law(id="blend-of-nothing", category=CONTRADICTION, key="data.parts",
        when=lambda data: ({"key": f"data.{name}", "name": name} for name in BLENDS if getattr(data, name) == ()),
        says="a blend of nothing", way="give its datasets: `data.{name}=[{{weight: 1, path: PREFIX}}]`"),
    Law(id="blend-twice", category=CONTRADICTION, key="data.parts",
        when=_twice, says="the blend has `{path}` twice", way="give it one weight"),
    Law(id="valid-trained-on", category=CONTRADICTION, key="data.valid_parts",
        when=_trained_on, says="evaluations of `{path}`, which is trained on",
        way="take other datasets, or `data.valid_parts=null` with a `data.split`, which parts each"),
    Law(id="valid-without-evaluations", category=CONTRADICTION, key="data.valid_parts",
        when=lambda data, schedule: data.valid_parts is not None and not schedule.eval_steps,
        says="datasets for evaluations, and no evaluations", way="`schedule.eval_steps=10`, or leave them out"),
    Law(id="split-beside-valid", category=REFUSES, key="data.split",
        when=lambda data: data.split is not None and data.valid_parts is not None,
        says="a split beside datasets of which none is split", way="`data.split=null`",
        source="core/datasets/blended_megatron_dataset_config.py"),
    Law(id="data-incomplete", category=CONTRADICTION, key="data.path",
        when=_lacking, says="{data.name} data without `{name}`", way="give it: `{key}=...`"),
    Law(id="data-unread", category=CONTRADICTION, key="data.path",
        when=_needless, says="{data.name} data with a `{name}`", way="choose the kind of data that has one"),
    Law(id="answers-without-model", category=CONTRADICTION, key="schedule.pretrained",
        when=lambda data, schedule: data.sft and schedule.pretrained is None,
        says="answers are learned by a pretrained model, and none is named",
        way="give the folder of its checkpoints: `schedule.pretrained=FOLDER`"),
    Law(id="prompt-is-answer", category=CONTRADICTION, key="data.answer",
        when=lambda data: data.sft and data.prompt is not None and data.prompt == data.answer,
        says="`{data.prompt}` is both prompt and answer", way="name another field"),
    Law(id="answers-evaluations", category=OURS, key="schedule.eval_steps",
        when=lambda data, schedule: data.sft and schedule.eval_steps,
        says="evaluations on prompts and answers are not carried over: they would end with the first pass over them",
        way="set it to 0", source=BRIDGE),
    Law(id="answers-mtp", category=WRONG, key="feature.mtp.depths",
        when=lambda data, plan: data.sft and plan.mtp,
        says="Megatron-Bridge does not tell MTP which tokens are the answer: its loss would be of the prompts too",
        way="set it to 0; a checkpoint with MTP loads without", source=BRIDGE),
    Law(id="answers-fim", category=CONTRADICTION, key="feature.fim.enabled",
        when=lambda data, fim: data.sft, says="fill-in-the-middle of prompts and answers", way="set it to false"),
    Law(id="answers-context", category=OURS, key="parallel.context",
        when=lambda data, parallel: data.sft and parallel.context > 1,
        says="prompts and answers have been shown on whole sequences alone", way="set it to 1", source=BRIDGE),
    Law(id="answers-capacity", category=WRONG, key="model.blocks.moe.capacity_factor",
        when=lambda data, moe: data.sft and moe.capacity_factor is not None,
        says="padding behind an answer would take places of experts, and tokens be dropped for it",
        way="set it to null: dropless", source="core/transformer/moe/moe_utils.py"),
    Law(id="answers-shared-top-k", category=REFUSES, key="execution.dsa.kernels",
        when=lambda data, dsa, plan: data.sft and plan.index_reuse and dsa.kernels == "megatron",
        says="Megatron's DSA hands a top-k on only where samples have masks, and these have none",
        way="`fused`, or `model.blocks.dsa.full_every=1`",
        source="core/transformer/experimental_attention_variant/dsa.py"),
    Law(id="split-malformed", category=REFUSES, key="data.split",
        when=lambda data: data.split is not None and not _weights(data), says="`{data.split}` is no split",
        way="three weights for train,valid,test: `99,1,0`", source="core/datasets/blended_megatron_dataset_config.py"),
    Law(id="split-without-training", category=CONTRADICTION, key="data.split",
        when=lambda data: _weights(data) and not _weights(data)[0], says="nothing is left for training",
        way=f"{HOLD_OUT} holds out one document in a hundred"),
    Law(id="split-without-evaluations", category=CONTRADICTION, key="data.split",
        when=lambda data, schedule: schedule.eval_steps and _weights(data) and not _weights(data)[1],
        says="evaluations and no documents for them", way=f"{HOLD_OUT}, or `schedule.eval_steps=0`"),
    Law(id="fim-of-random-tokens", category=REFUSES, key="feature.fim.enabled",
        when=lambda fim, data: data.name == "mock", says="fill-in-the-middle on mock data",
        way="set `data=built data.path=...`", source=ARGUMENTS),
    Law(
        id="wandb-without-tensorboard",  # everything that training_log gives to W&B stands under `if writer`, TensorBoard's
        category=WRONG,
        key=TRACKED + "tensorboard",
        when=lambda tracking: tracking.wandb_project and not tracking.tensorboard,
        says="Megatron writes to Weights & Biases only beside TensorBoard",
        way="name a folder for its events",
        source="training/training.py",
    ),
    Law(id="wandb-incomplete", category=CONTRADICTION, key=TRACKED + "wandb_name",
        when=_wandb_lacks, says="Weights & Biases without `{name}`", way="give it"),
    Law(id="wandb-without-project", category=CONTRADICTION, key=TRACKED + "wandb_project",
        when=lambda tracking: not tracking.wandb_project
            and (tracking.wandb_name or tracking.wandb_dir or tracking.wandb_entity),
        says="keys of Weights & Biases without `wandb_project`", way="name it, or null the others"),
    Law(id="mlflow-incomplete", category=CONTRADICTION, key=TRACKED + "mlflow",
        when=_half_of_mlflow, says="`mlflow` and `mlflow_experiment` go together", way="give both or neither"),
)  # fmt: skip
