"""A NAM recipe as a NeMo-Run job on Slurm. Prints the batch script it would submit; needs neither a cluster nor Megatron.

    python examples/nemo/slurm.py conf=nam56r_native_dp cluster=h200_2x8 > nam56r.sbatch

Hosts, GPUs and environment come from the recipe; the rest is yours to set below. Needs the extra `nemo-run`.
"""

import shlex
import sys

from nam_megatron.errors import OK, Problem, Refused, finish, raise_if_twice
from nam_megatron.lower import translate
from nam_megatron.recipe import load

ACCOUNT, PARTITION, TIME, CONTAINER, FOLDER = "your_account", "batch", "04:00:00", "your/container:tag", "/your/jobs"


def script(words: list[str]) -> str:
    """The batch script of `python -m nam_megatron.nemo pretrain` with these words, conf=NAME among them."""
    try:
        import nemo_run as run
        from nemo_run.core.execution.slurm import SlurmBatchRequest
    except ModuleNotFoundError as err:
        raise Refused(Problem(f"no package `{err.name}`", None, "`uv sync --extra nemo-run` installs it")) from None
    raise_if_twice(word.lstrip("+").partition("=")[::2] for word in words)
    preset = next((word.removeprefix("conf=") for word in words if word.startswith("conf=")), None)
    if preset is None:
        raise Refused(Problem("no preset is named", None, "conf=NAME"))
    lowering = translate(load(preset, [word for word in words if not word.startswith("conf=")]))
    cluster = lowering.plan.recipe.cluster
    executor = run.SlurmExecutor(
        account=ACCOUNT,
        partition=PARTITION,
        time=TIME,
        container_image=CONTAINER,
        nodes=cluster.nodes,
        ntasks_per_node=1,
        gpus_per_node=cluster.gpus_per_node,
        env_vars={env.name: env.value for env in lowering.env if env.value is not None},
        tunnel=run.LocalTunnel(job_dir=FOLDER),
    )
    executor.job_name, executor.experiment_id = preset, preset
    executor.job_dir = f"{FOLDER}/{preset}"
    rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1):29500"
    torchrun = f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} {rendezvous}"
    command = f"{torchrun} -m nam_megatron.nemo pretrain {shlex.join(words)}"
    request = SlurmBatchRequest(
        launch_cmd=["sbatch", "--parsable"],
        jobs=[preset],
        command_groups=[["bash", "-c", shlex.quote(command)]],
        executor=executor,
        max_retries=0,
        extra_env={},
    )
    return request.materialize()


def command() -> int:
    sys.stdout.write(script(sys.argv[1:]))
    return OK


if __name__ == "__main__":
    finish(command)
