"""`launch show`: everything that a run would be, as text. Touches nothing."""

from launch.context import Context
from launch.run import job, kubernetes, slurm
from launch.run.overlay import shown
from nam_megatron import report
from nam_megatron.budget import budget
from nam_megatron.budget import text as budget_text
from nam_megatron.budget.cost import cost
from nam_megatron.compile import argv


def text(context: Context) -> str:
    """The whole, or with `format` only what starts it: torchrun's words, a batch script, a PyTorchJob."""
    lowering, form = context.lowering, context.words["format"]
    command = job.shell_text(context)
    if form == "torchrun":
        return command
    if form == "sbatch":
        return slurm.sbatch(lowering, context.overrides, context.words["time"])
    if form == "kubernetes":
        return kubernetes.pytorch_job(context)
    if form == "trainjob":
        return kubernetes.train_job(context)
    b, c = budget(lowering.plan), cost(lowering.plan)
    cluster = context.cluster
    storage = {"durable": context.durable, "scratch": context.scratch, "receipts": context.receipts}
    parts = {
        "Plan": report.plan_text(lowering),
        "Settings by owner": argv.lines(lowering).split("\n\n", 1)[1],
        "Budget": f"{budget_text.verdict(b)}\n{c.model / 1e9:.2f} GFLOP a token by our own count, {c.megatron / 1e9:.2f} by Megatron's\n",
        "Lineage": lineage(context),
        "Storage": rows(storage),
        "Waivers": rows(cluster.waivers) or "none\n",
        "Environment": "".join(f"{shown(e)}  # {e.why}\n" for e in context.envs),
        "Command": command,
    }
    if cluster.nodes > 1:
        parts["sbatch"] = slurm.sbatch(lowering, context.overrides, context.words["time"])
    return "\n".join(f"== {title} ==\n{part}" for title, part in parts.items())


def lineage(context: Context) -> str:
    """One line. Which host of this name it is, only a run can say: the receipt has the box."""
    found = job.lineage(context)
    pool = f" (pool {found['pool']})" if found["pool"] else ""
    return f"lineage: {found['host']}{pool} / {found['family']} / {found['regime']}\n"


def rows(table: dict) -> str:
    return "".join(f"{key}: {value}\n" for key, value in table.items())
