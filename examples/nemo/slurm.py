"""A NAM recipe as a NeMo-Run experiment on Slurm. Needs neither a cluster nor Megatron until it is run.

    python examples/nemo/slurm.py conf=nam56r_native_dp cluster=h200_2x8           # prints the batch script
    python examples/nemo/slurm.py --run conf=nam56r_native_dp cluster=h200_2x8     # submits it

Hosts, GPUs and environment come from the recipe; the rest is yours to set below, as is a tunnel to another machine. Needs the extra
`nemo-run`.
"""

import sys

from nam_megatron.compile.lower import translate
from nam_megatron.environment import given
from nam_megatron.errors import OK, Problem, Refused, finish, raise_if_twice
from nam_megatron.recipe import load

# The container has what `python -m nam_megatron.nemo doctor` asks for; FOLDER is seen by all hosts.
ACCOUNT, PARTITION, TIME, CONTAINER, FOLDER = "your_account", "batch", "04:00:00", "your/container:tag", "/your/jobs"


def start(words: list[str], *, dryrun: bool) -> None:
    """Submit `python -m nam_megatron.nemo pretrain` with these words, conf=NAME among them; or print what would be submitted."""
    try:
        import nemo_run as run
    except ModuleNotFoundError as err:
        raise Refused(Problem(f"no package `{err.name}`", hint="`uv sync --extra nemo-run` installs it")) from None
    raise_if_twice(word.lstrip("+").partition("=")[::2] for word in words)
    preset = next((word.removeprefix("conf=") for word in words if word.startswith("conf=")), None)
    if preset is None:
        raise Refused(Problem("no preset is named", hint="conf=NAME"))
    lowering = translate(load(preset, [word for word in words if not word.startswith("conf=")]))
    cluster = lowering.plan.recipe.cluster
    executor = run.SlurmExecutor(
        account=ACCOUNT,
        partition=PARTITION,
        time=TIME,
        container_image=CONTAINER,
        nodes=cluster.nodes,
        ntasks_per_node=cluster.gpus_per_node,  # of torchrun, which one task a host starts
        gpus_per_node=cluster.gpus_per_node,
        env_vars=given(lowering),
        launcher="torchrun",
        # This checkout: its commit is what runs.
        packager=run.Packager() if dryrun else run.GitArchivePackager(check_uncommitted_changes=True),
        tunnel=run.LocalTunnel(job_dir=FOLDER),
    )
    with run.Experiment(preset) as experiment:
        script = run.Script("nam_megatron.nemo", args=["pretrain", *words], entrypoint="python", m=True)
        experiment.add(script, executor, name=preset)
        experiment.dryrun() if dryrun else experiment.run(detach=True)


def command() -> int:
    words = sys.argv[1:]
    start([word for word in words if word != "--run"], dryrun="--run" not in words)
    return OK


if __name__ == "__main__":
    finish(command)
