"""A run on a CPU: `launch run` as it is, with a small trainer in the place of torchrun, and a preflight that has nothing to say.

    python stand_in.py launch ROOT WORDS [OVERRIDE ...]    a launcher whose receipts lie in ROOT; WORDS: of the trainer
        FAULT=... in the launcher, see tests/inject.py
        STAND_IN_CHECKS=SECONDS of preflight; STAND_IN_RANKS=N trainers under a real torchrun; STAND_IN_SAYS=FILE that they print
        STAND_IN_DIFF=FILE with what the checkout differs by, in the place of what it does
        Of several nodes: srun and a torchrun for each, as `launch run` starts them
    python stand_in.py train WORDS                         the trainer: `steps=5 sleep=0.01 ...`, see `train`

What it cannot show: GPUs, NCCL, Megatron. The lines are those of megatron-core 0.19.2's training_log.
"""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

HERE = Path(__file__)


def now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}"


def step_line(step: int, steps: int, ms: float = 845.1, loss: float = 6.931472, norm: str = "1.234") -> str:
    return (
        f" [{now()}] iteration {step:8d}/{steps:8d} | consumed samples: {step * 4:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 301.2 | learning rate: 3.000000E-04 |"
        f" global batch size:     4 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm} |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def reading(when: str, step: int, gap: int, **more: object) -> str:
    gib = 1 << 30
    bytes_ = {"allocated": gib, "peak_allocated": 2 * gib, "reserved": 3 * gib, "peak_reserved": 2 * gib + gap}
    rank = int(os.environ.get("RANK", 0))
    return "nam_megatron.readings " + json.dumps({"rank": rank, "when": when, "step": step, **bytes_, **more})


def of_reading(line: str) -> dict[str, object]:
    """What the event of it holds beside its head."""
    return {name: value for name, value in json.loads(line.partition(" ")[2]).items() if name != "rank"}


def say(text: str) -> None:
    """In one write, as the trainer does: two ranks share the pipe, and print() ends a line in a second one when unbuffered."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def train(words: dict[str, str]) -> int:
    """steps, sleep (seconds a step), stop (last step printed), code, say (a last line), chat (MiB of noise), deaf, child,
    touch (a file, once running; of a rank above 0 with its number), silent (no events), spoil (a file),
    full (events do not fit from this step on).
    """
    sys.path[:0] = [str(HERE.parents[2])]
    from nam_megatron.events import RECORD
    from nam_megatron.runtime.heartbeat import Heart

    if "silent" not in words:
        RECORD.start(Path(os.environ["NCCL_DEBUG_FILE"]).with_name("plan.json"), os.environ, "megatron")

    stopped = []
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    if "child" in words:  # a rank that outlives its torchrun and holds the pipe
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    steps = int(words.get("steps", 5))
    device = {
        "node": int(os.environ.get("GROUP_RANK", 0)), "device": 0, "bus": "00000000:18:00.0", "name": "stand-in", "expandable": True,
    }  # fmt: skip
    built = reading("built", 0, 1 << 30, **device)
    say(built)
    RECORD.say("built", **of_reading(built))
    heart = Heart()
    if "beat" in words:  # with a heart; rank 1 stops in this step
        run = max(Path(words["root"]).glob("*/receipt.json"), key=lambda f: f.stat().st_mtime).parent
        heart.start(run / "plan.json", int(os.environ.get("RANK", 0)))
    for step in range(1, int(words.get("stop", steps)) + 1):
        heart.step(step - 1)
        if words.get("beat") == str(step) and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        ms = 9000 if step == 1 else 100 + step
        say(step_line(step, steps, ms))
        if words.get("full") == str(step):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
        RECORD.say(
            "step", step=step, of=steps, ms=ms, loss=6.9, grad_norm=1.2, tflops=301.2, skipped=0, nan=0, gauges={}
        )
        if "touch" in words:
            Path(words["touch"] + os.environ.get("RANK", "0").removeprefix("0")).touch()
        time.sleep(float(words.get("sleep", 0)))
        if stopped:
            say(f"[{now()}] saving checkpoint at iteration {step:7d} to ckpt in torch_dist format")
            say(f"  [{now()}] successfully saved checkpoint from iteration {step:7d} to ckpt [ t 1/1, p 1/1 ]")
            for event in ("saving", "saved"):
                RECORD.say(event, step=step)
            return end(step, "signal", 0)
    for _ in range(int(words.get("chat", 0))):  # MiB
        print((("x" * 127 + "\n") * 8192), end="", flush=True)
    last = int(words.get("stop", steps))
    for line in Path(os.environ["STAND_IN_SAYS"]).read_text().splitlines() if "STAND_IN_SAYS" in os.environ else ():
        say(line)
    if "spoil" in words:
        Path(words["spoil"]).write_text("other")
    if "say" in words:
        say(words["say"])
    code = int(words.get("code", 0))
    return end(last, "error" if code else "done", code)


def end(step: int, reason: str, code: int) -> int:
    from nam_megatron.events import RECORD

    told = reading("end", step, 1 << 20)
    say(told)
    RECORD.done = step
    RECORD.say("memory", **of_reading(told))
    RECORD.end(reason, code)
    return code


def launch(root: str, trainer: str, overrides: list[str]) -> int:
    from launch.context import Context
    from launch.host import preflight
    from launch.run import job, run
    from nam_megatron.compile.lower import translate
    from nam_megatron.errors import Refused
    from nam_megatron.recipe import load

    facts = {
        "versions": {"torch": "2.11.0"},
        "gpus": [{"name": "stand-in", "bus": "00000000:18:00.0"}],
        "topology": {"nics": {"GPU0": ["mlx5_0 (PIX)"]}, "cpus": {"GPU0": "0-1"}},
    }

    def check(context: Context) -> preflight.Report:
        Path(root).with_name("checking").touch()
        time.sleep(float(context.environ.get("STAND_IN_CHECKS", 0)))
        return preflight.Report([], facts)

    preflight.check = check
    words = {
        "revision": None, "dirty": "store", "over_memory": "refuse", "port": 29500, "hang": 0, "diagnostic": None, "trainer": "megatron",
        "sign": None,
    }  # fmt: skip
    own = {k: v for k, _, v in (o.partition("=") for o in overrides) if k in words}
    words |= {k: int(v) if k in ("port", "hang") else v for k, v in own.items()}
    recipe = [o for o in overrides if o.partition("=")[0] not in words]
    storage = [f"cluster.storage.receipts={root}", f"cluster.storage.scratch={root}/scratch"]
    planned = dict(word.partition("=")[::2] for word in shlex.split(trainer)).get("steps", 5)
    lowering = translate(load("nam56r_smoke", [*storage, f"schedule.train_steps={planned}", *recipe]))
    context = Context(lowering, words, tuple(overrides), os.environ)
    if diff := os.environ.get("STAND_IN_DIFF"):
        context.__dict__["source"] = replace(context.source, diff=Path(diff).read_text())
    command = [str(HERE), "train", *shlex.split(trainer), *([f"root={root}"] if "beat=" in trainer else [])]

    def start(context: Context, plan: Path, head: str, name: str) -> list[str]:
        if context.cluster.nodes > 1:
            return [*job.torchrun(lowering, words["port"], head, name), *command]
        if ranks := os.environ.get("STAND_IN_RANKS"):  # under a real torchrun
            torchrun = ["-m", "nam_megatron.torchrun", f"--nproc-per-node={ranks}", f"--master-port={words['port']}"]
            return [sys.executable, *torchrun, "--master-addr=127.0.0.1", *command]
        return [sys.executable, *command]

    if fault := os.environ.pop("FAULT", None):  # the launcher's own; the trainer stays whole
        import inject

        inject.planted(fault, Path(root))
    try:
        code = run.run(context, start)
        return 99 if {"torch", "megatron"} & sys.modules.keys() else code  # the launcher needs neither
    except Refused as refused:
        sys.stderr.write(refused.render())
        return 2


def main() -> None:
    role, *rest = sys.argv[1:]
    if role == "train":
        sys.exit(train(dict(word.partition("=")[::2] for word in rest)))
    sys.path[:0] = [str(HERE.parents[2])]
    from nam_megatron.errors import finish

    finish(lambda: launch(rest[0], rest[1], rest[2:]))


if __name__ == "__main__":
    main()
