"""One recipe by one training loop: python benchmarks/loops.py ours|bridge|nemo_run|nemotron PRESET FOLDER [KEY=VALUE ...]

Each as its own people start it: our command; Bridge's pretrain of what a recipe function gives; an experiment of NeMo-Run's with its
local executor, whose script is our command; Nemotron's runner of its pretraining step, from its source (NAM_NEMOTRON: `src` of a checkout
of github.com/NVIDIA-NeMo/Nemotron). FOLDER gets what they write. benchmarks/nemo.py compares their losses, and so does
tests/nemo/inside/check_train.py where there is no GPU.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

COMMAND = ("-m", "nam_megatron.nemo")


def ours(preset: str, folder: Path, words: Sequence[str]) -> None:
    from nam_megatron.nemo.__main__ import command

    sys.argv = ["nemo", "pretrain", f"conf={preset}", *words]
    command()


def bridge(preset: str, folder: Path, words: Sequence[str]) -> None:
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from nam_megatron import nemo

    pretrain(getattr(nemo, f"{preset}_pretrain_config")(overrides=list(words)), forward_step)


def nemotron(preset: str, folder: Path, words: Sequence[str]) -> None:
    sys.path.insert(0, os.environ["NAM_NEMOTRON"])
    from megatron.bridge.training.pretrain import pretrain
    from nemotron.steps._runners.megatron_bridge import run_megatron_bridge

    config = folder / "nemotron.json"
    recipe = {"_target_": f"nam_megatron.nemo.{preset}_pretrain_config", "overrides": list(words)}
    config.write_text(json.dumps({"recipe": recipe}), encoding="utf-8")
    sys.argv = ["step.py", "--config", str(config)]
    run_megatron_bridge(
        default_recipe="none", default_config=config, entry=pretrain, enable_peft=False, dataset_mode="override"
    )


def nemo_run(preset: str, folder: Path, words: Sequence[str], command: Sequence[str] = COMMAND) -> None:
    """command: words to Python in the place of our command."""
    os.environ["NEMORUN_HOME"] = str(folder)
    import nemo_run as run
    from nemo_run.config import set_nemorun_home

    set_nemorun_home(str(folder))  # it may have been imported before
    executor = run.LocalExecutor(env_vars={"PYTHONPATH": os.pathsep.join(sys.path)})
    *module, path = command
    args = ["pretrain", f"conf={preset}", *words]
    script = run.Script(path, args=args, entrypoint=sys.executable, m="-m" in module)
    with run.Experiment("loops") as experiment:
        experiment.add(script, executor, name="ours")
        experiment.run(tail_logs=False)
    print(*(log.read_text(errors="replace") for log in sorted(folder.rglob("*.log"))), sep="\n", flush=True)


LOOPS = {loop.__name__: loop for loop in (ours, bridge, nemo_run, nemotron)}

if __name__ == "__main__":
    LOOPS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
