"""How long translating takes, against the least a Hydra command can take and against Megatron's own parser.

    uv run --group test python benchmarks/translate.py

One run, arms interleaved, medians. Writes benchmarks/translate.json; exits with 1 if a goal is missed.

- cold: `python -m nam_megatron.translate conf=nam56r` with stdout in a pipe, start of the interpreter to exit.
- bare: ten lines that let Hydra compose the same config and print it as YAML. Goal: cold at most 1.6 times that.
- megatron: a process that imports megatron.training.arguments and parses the words that cold printed: parse_args only,
  without Megatron's validation, which needs a GPU. Goal: cold at least 8 times faster.
- warm: 1,000 recipes in one process. In the clock, for each: the composed Hydra config is resolved, checked and becomes
  a recipe, a plan, settings and words. Not in the clock: composing, which is Hydra's and reported apart. Goal: 10 ms.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import conf_dir, from_config

PRESET, ROUNDS, PARSES, RECIPES = "nam56r", 15, 5, 1000
COLD = [sys.executable, "-m", "nam_megatron.translate", f"conf={PRESET}"]
BARE = f"""
import hydra
from omegaconf import OmegaConf


@hydra.main(version_base="1.3", config_path={str(conf_dir())!r}, config_name="translate")
def main(cfg):
    print(OmegaConf.to_yaml(cfg, resolve=True))


main()
"""
PARSE = """
from megatron.training.arguments import parse_args

parse_args()
"""


def environment(folder: str) -> dict[str, str]:
    """Every arm finds the package by path, as in a checkout, and compiled modules in a cache of their own, filled in round 0."""
    ours = {
        "PYTHONPATH": str(conf_dir().parent),
        "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",
        "RANK": "0",
        "WORLD_SIZE": "8",
    }
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | ours


def seconds(command: list[str], folder: str) -> float:
    start = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    subprocess.run(command, cwd=folder, env=environment(folder), check=True, **pipes)
    return time.perf_counter() - start


def cold() -> dict[str, list[float]]:
    """Seconds of each arm, by round. Round 0 fills the caches of the disk and of Python, and is dropped."""
    times: dict[str, list[float]] = {"cold": [], "bare": [], "megatron": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, code in (("bare.py", BARE), ("parse.py", PARSE)):
            Path(folder, name).write_text(code)
        done = subprocess.run(COLD, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
        said = done.stdout.split()
        # which stock Megatron refuses; it stands last
        stock = said[: said.index(argv.MARKER)] if argv.MARKER in said else said
        arms = {
            "cold": COLD,
            "bare": [sys.executable, "bare.py", f"preset={PRESET}"],
            "megatron": [sys.executable, "parse.py", *stock],
        }
        for i in range(ROUNDS + 1):
            for arm, command in arms.items():
                if arm != "megatron" or i <= PARSES:
                    times[arm].append(seconds(command, folder))
    return {arm: found[1:] for arm, found in times.items()}


def warm() -> tuple[list[float], list[float]]:
    """Seconds per composition and per recipe."""
    names = sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))
    configs, composing, translating = [], [], []
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for name in names:
            start = time.perf_counter()
            configs.append(compose("recipe", overrides=[f"preset={name}"]))
            composing.append(time.perf_counter() - start)
    seen = set()
    for i in range(RECIPES):
        config = configs[i % len(configs)].copy()
        OmegaConf.update(config, "schedule.seed", i)
        OmegaConf.update(config, "optim.lr", 3e-4 + i * 1e-6)
        start = time.perf_counter()
        words = argv.argv(translate(from_config(config)))
        translating.append(time.perf_counter() - start)
        seen.add(words)
    assert len(seen) == RECIPES, "every recipe is another one"
    return composing, translating


def main() -> int:
    times = cold()
    composing, translating = warm()
    median = {arm: statistics.median(found) for arm, found in times.items()}
    per_recipe = statistics.fmean(translating)
    goals = {
        "cold / bare": (median["cold"] / median["bare"], "<= 1.6", median["cold"] <= 1.6 * median["bare"]),
        "megatron / cold": (median["megatron"] / median["cold"], ">= 8", median["megatron"] >= 8 * median["cold"]),
        "ms per recipe": (per_recipe * 1e3, "< 10", per_recipe < 0.010),
    }
    result = {
        "preset": PRESET,
        "seconds": {
            arm: {
                "median": round(median[arm], 4),
                "min": round(min(found), 4),
                "max": round(max(found), 4),
                "runs": len(found),
            }
            for arm, found in times.items()
        },
        "warm_ms": {
            "recipes": RECIPES,
            "mean": round(per_recipe * 1e3, 3),
            "median": round(statistics.median(translating) * 1e3, 3),
            "max": round(max(translating) * 1e3, 3),
            "compose_median": round(statistics.median(composing) * 1e3, 1),
        },
        "goals": {
            name: {"value": round(value, 3), "goal": goal, "met": met} for name, (value, goal, met) in goals.items()
        },
        "versions": {
            "python": platform.python_version(),
            **{
                p: version(p) for p in ("nam_megatron", "hydra-core", "omegaconf", "pydantic", "torch", "megatron-core")
            },
        },
        "cpus": os.cpu_count(),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    for arm, found in result["seconds"].items():
        print(f"{arm:<16} {found['median']:>8.3f} s   {found['min']:.3f} to {found['max']:.3f}, {found['runs']} runs")
    print(f"{'compose, warm':<16} {result['warm_ms']['compose_median']:>8.1f} ms")
    for name, (value, goal, met) in goals.items():
        print(f"{name:<16} {value:>8.2f}     goal {goal}: {'met' if met else 'MISSED'}")
    return 0 if all(met for *_, met in goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
