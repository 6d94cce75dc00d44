"""Slurm: the batch script of a run, and the hosts of the job that this process is in."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

from launch.host.storage import grace
from nam_megatron import report
from nam_megatron.budget import parameters
from nam_megatron.compile.lower import Lowering
from nam_megatron.errors import Refused
from nam_megatron.launcher import PROGRAM
from nam_megatron.tracker import TRACKER

JOB, NODES = "SLURM_JOB_ID", "SLURM_JOB_NODELIST"
# Words of `launch` that are not the recipe's: those for one host's screen, and those of a run.
SCREEN = ("format", "image", "time", "rdma")
RUN = ("sanity", "revision", "dirty", "over_memory", "trainer", "port", "hang", "lock", "diagnostic", "sign", "host")


def key_of(word: str) -> str:
    """What a word of the command line is about, whatever sign stands before it."""
    return word.lstrip("+~").partition("=")[0]


def for_launch(overrides: Sequence[str]) -> str:
    """The words of this command line, for another verb on another host."""
    return shlex.join(w for w in overrides if key_of(w) not in SCREEN)


def for_translate(overrides: Sequence[str]) -> str:
    """Those that choose the recipe."""
    return shlex.join(
        w for w in overrides if key_of(w) not in (*SCREEN, *RUN) and not key_of(w).startswith("cluster.waivers")
    )


def sbatch(
    lowering: Lowering,
    overrides: Sequence[str],
    time: str | None = None,
    points: Sequence[Sequence[str]] = (),
    others: Sequence[Lowering] = (),
) -> str:
    """A batch script: preflight on every host, each one line of a pass/fail list, then one launcher for all of them.

    time: `[D-]HH:MM:SS`; None: the partition's own limit. points: the words of each run of a sweep, which becomes an array;
    others: what of it is lowered otherwise.
    """
    r = lowering.plan.recipe
    limit = f"#SBATCH --time={time}\n" if time else ""
    gpus = f"#SBATCH --gpus-per-node={r.cluster.gpus_per_node}\n" if r.cluster.processor == "gpu" else ""
    locked = (
        "# RDMA registers gigabytes. Where it may not, `check` says so of each host: `limits`.\nulimit -l unlimited || true\n"
        if r.cluster.nodes > 1
        else ""
    )
    name = re.sub(r"[^\w.-]+", "-", r.preset.name)
    notice = max(grace(one.plan.recipe, parameters(one.plan)[0]) for one in (lowering, *others))
    recipe, array, chosen, output = for_launch(overrides), "", "", "%x-%j.out"
    if (save := r.schedule.save) is not None and not points:
        first = [word for word in overrides if key_of(word) not in ("schedule.load", "schedule.changes")]
        for word in first:
            if key_of(word) == "schedule" and (twice := re.search(r"[{,]\s*(load|changes)\s*:", word)):
                hint = f"`schedule.{twice[1]}=...` as a word of its own"
                raise Refused(f"a requeued job would say another `{twice[1]}` beside this", key="schedule", hint=hint)
        first += ["schedule.changes=[]"] * bool(r.schedule.changes)  # what a stage has saved is its own
        chosen = f"""
words=({recipe})
# Requeued by Slurm, it goes on with what it has saved.
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -f {shlex.quote(f"{save}/{TRACKER}")} ]; then
  words=({for_launch([*first, f"schedule.load={save}"])})
fi
"""
        recipe = '"${words[@]}"'
    if points:
        recipe, array, output = '"${words[@]}"', f"#SBATCH --array=0-{len(points) - 1}\n", "%x-%A_%a.out"
        cases = "".join(f"  {number}) words=({for_launch(point)}) ;;\n" for number, point in enumerate(points))
        chosen = f'\n# The point of the sweep.\ncase "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n'
    return f"""#!/usr/bin/env bash
# {next(report.header(lowering))}
#SBATCH --job-name={name}
#SBATCH --nodes={r.cluster.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output={output}
{array}{limit}#SBATCH --signal=B:TERM@{notice}
set -euo pipefail
{locked}cd "${{SLURM_SUBMIT_DIR:?}}"
{chosen}
# One line a host; a single FAIL ends the job here, and so do hosts with another plan, other code, packages or drivers.
srun --label {PROGRAM} check format=line {recipe} | tee "hosts-$SLURM_JOB_ID.txt"
if [ "$(grep -o 'software=[0-9a-f]*' "hosts-$SLURM_JOB_ID.txt" | sort -u | wc -l)" -ne 1 ]; then
  echo "error: the hosts differ in the plan, our code, packages, code at Python's start, drivers or VBIOS: hosts-$SLURM_JOB_ID.txt" >&2
  exit 1
fi

# The launcher runs on the first host, starts torchrun on all of them with srun, and seals the receipt.
exec {PROGRAM} run {recipe}
"""


def hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of this Slurm job, the first one first; empty outside of one. Raises Refused where Slurm does not name them."""
    return _hosts(environ[NODES]) if environ.get(JOB) and environ.get(NODES) else ()


@cache
def _hosts(nodes: str) -> tuple[str, ...]:
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
        names = tuple(done.stdout.split()) if done.returncode == 0 else ()
    except (OSError, subprocess.TimeoutExpired):
        names = ()
    if not names:
        raise Refused(f"this is a Slurm job, and `{shlex.join(command[:3])}` does not name its hosts")
    return names
