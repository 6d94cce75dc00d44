"""What is started: one torchrun over the GPUs of each host; and what is known of it before."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.finding import Finding
from nam_megatron.budget import budget, text
from nam_megatron.budget.cost import cost
from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering
from nam_megatron.data import identity
from nam_megatron.events import NONCE
from nam_megatron.judge import identity as describe
from nam_megatron.judge import resume
from nam_megatron.packages import installed
from nam_megatron.recipe import to_tree
from nam_megatron.train import unfit_data
from nam_megatron.words.setting import STOCK
from nam_megatron.words.sizes import GIB

if TYPE_CHECKING:
    from launch.context import Context

TRAINERS = {"megatron": "nam_megatron.train", "bridge": "nam_megatron.nemo.train"}
# What a trainer runs on beside the packages of launch/host/stack.toml.
PACKAGES = {"megatron": (), "bridge": ("megatron-bridge", "nvidia-resiliency-ext", "nemo-toolkit")}


def torchrun(lowering: Lowering, port: int | str, head: str, job: str) -> list[str]:
    """The words before the trainer's. head: the first host, job: the batch system's name of this job; both for several hosts only."""
    cluster = lowering.plan.recipe.cluster
    start = [sys.executable, "-m", argv.TORCHRUN, f"--nnodes={cluster.nodes}"]
    start += [f"--nproc-per-node={cluster.gpus_per_node}"]
    if cluster.nodes == 1:
        return [*start, "--master-addr=127.0.0.1", f"--master-port={port}"]
    srun = ["srun", f"--nodes={cluster.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    return [*srun, *start, "--rdzv-backend=c10d", f"--rdzv-endpoint={head}:{port}", f"--rdzv-id={job}"]


def words(context: "Context", plan: Path, head: str = "", job: str = "") -> list[str]:
    """The whole command: torchrun, one of TRAINERS, the plan, Megatron's arguments."""
    start = torchrun(context.lowering, context.words["port"], head, job)
    return [*start, *trainer(context), str(plan), *argv.words(context.lowering)]


def trainer(context: "Context") -> tuple[str, ...]:
    return ("-m", TRAINERS[context.words["trainer"]], "--nam-plan")


def shell_text(context: "Context") -> str:
    """What `run` starts, for a shell; $RUN is the folder of the run, and the word in its events."""
    lowering, envs = context.lowering, context.envs
    lines = [f"export {e.name}={shlex.quote(e.value)}" if e.value is not None else f"unset {e.name}" for e in envs]
    start = torchrun(lowering, context.words["port"], "$HEAD", "$SLURM_JOB_ID")
    start = [
        "python" if word == sys.executable else f'"{word}"' if "$" in word else shlex.quote(word) for word in start
    ]
    said = map(shlex.join, argv.flags(lowering))
    command = " \\\n  ".join([" ".join([*start, *trainer(context), '"$RUN/plan.json"']), *said])
    lines += [f'export {name}="{value}"' for name, value in inside("$RUN", "$RUN").items()]
    return "\n".join([*lines, command]) + "\n"


def inside(folder: Path | str, nonce: str) -> dict[str, str]:
    """Variables of one run: the nonce in its events, what NCCL says of itself, and where its last collectives can be asked for."""
    return {
        NONCE: nonce,
        "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/flight_pipe_",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/flight_rank_",
    }


def packages(context: "Context") -> dict[str, str | None]:
    """Versions of what the trainer and the plan need beside the lock."""
    needed = (need.name for need in context.lowering.plan.packages if need.of != STOCK)
    return {name: installed(name) for name in (*PACKAGES[context.words["trainer"]], *needed)}


def facts(context: "Context") -> dict[str, Any]:
    """The job as the receipt has it."""
    r = context.lowering.plan.recipe
    return {
        "trainer": context.words["trainer"],
        "packages": packages(context),
        "nodes": r.cluster.nodes,
        "world": r.world_size,
        "tokens_per_step": r.schedule.global_batch_size * r.model.seq_length,
        "train_steps": r.schedule.train_steps,
        "log_interval": r.schedule.log_interval,
        "stop_every": r.schedule.stop_every,
        "nan_check": bool(context.lowering.by_name["check_for_nan_in_loss_and_grad"].value),
        "diagnostic": context.words["diagnostic"],
        "overlay": {e.name: {"value": e.value, "why": e.why} for e in context.envs},
        "waivers": dict(r.cluster.waivers),
    }


def lineage(context: "Context") -> dict[str, str | None]:
    """What two runs must share before their figures may be compared: host lineage, preset family, launch regime."""
    plan = context.lowering.plan
    cluster = plan.recipe.cluster
    regime = f"{describe.regime(plan)}; {context.words['trainer']}"
    return {"host": cluster.name, "pool": cluster.pool, "family": describe.family(plan), "regime": regime}


def recipe(lowering: Lowering) -> dict[str, Any]:
    """The recipe as the receipt has it: every value that stands, and no sentence. A kind that the lane put out is in `stands.given_up`."""
    plan = lowering.plan
    tree = to_tree(plan.recipe)
    tree.pop("assumptions", None)
    tree["preset"].pop("about", None)
    model, standing = tree["model"], {block.kind for block in plan.blocks}
    model["letters"] |= {s.letter: s.standing for s in plan.substitutions}
    model["letters"] = {letter: kind for letter, kind in model["letters"].items() if kind in standing}
    return tree


def data(context: "Context") -> dict[str, Any]:
    """Which data it is, by the hashes of its files. Raises Refused for data that cannot be read, where that finding was waived."""
    recipe = context.lowering.plan.recipe.data
    found = identity.hashes(identity.tree(recipe, context.checkout))
    # In the form that a receipt leaves as it is: names without a `/`, and of each its hash.
    return {
        "name": recipe.name,
        "files": {k.replace("/", "."): {"sha256": v} for k, v in (found or {}).items() if k != identity.SPECIAL},
    }


def forecast(lowering: Lowering) -> dict[str, Any]:
    """The budget's figures for the worst rank, and operations per token by our own count and by Megatron's."""
    b, c = budget(lowering.plan), cost(lowering.plan)
    if lowering.plan.recipe.cluster.processor == "cpu":  # the rest is of a GPU that is not there
        return {"parameters": b.parameters, "active": b.active}
    worst = b.worst.worst
    return {
        "parameters": b.parameters,
        "active": b.active,
        "peak_allocated_gib": round(b.worst.peak_allocated / GIB, 3),
        "peak_reserved_gib": round(worst.reserved / GIB, 3),
        "device_gib": round(worst.total / GIB, 3),
        "free_gib": round(b.free / GIB, 3),
        "fits": b.fits,
        "verdict": text.verdict(b),
        # It has the gradient of every weight; those beside adapters have none, and a utilisation by it would be too high.
        "model_flops_per_token": None if describe.on(lowering.plan, "lora") else c.model,
        "megatron_flops_per_token": c.megatron,
        "peak_tflops": lowering.plan.recipe.device.bf16_tflops,
    }


def findings(context: "Context") -> Iterator[Finding]:
    """Whether this plan can be trained at all: every part built, data that can be read, a checkpoint it may go on from, and room for it."""
    for seam in context.lowering.plan.not_built:
        yield Finding("built", "fail", f"{seam.owner} is not built ({seam.missing})", "another lane, or switch it off")
    for problem in unfit_data(context.lowering.plan, context.checkout):
        begins = f"relative paths begin where a run starts, in `{context.checkout}`"
        hint = problem.hint if Path.cwd() == context.checkout else "; ".join(filter(None, (problem.hint, begins)))
        yield Finding("data", "fail", problem.message, hint)
    for problem in resume.early(context.lowering, context.checkout, context.words["trainer"] == "bridge"):
        yield Finding("resume", "fail", problem.message, problem.hint)
    if context.cluster.processor == "cpu":
        return
    b = budget(context.lowering.plan)
    verdict = text.verdict(b)
    if b.fits:
        yield Finding("memory", "ok" if b.roomy else "note", verdict)
    elif context.words["over_memory"] == "allow":
        yield Finding("memory", "note", f"{verdict}; over_memory=allow")
    else:
        hint = "`python -m nam_megatron.budget` says what takes it; `over_memory=allow` runs it all the same"
        yield Finding("memory", "fail", verdict, hint)
