"""Measure peak memory and step time of many plans on this host's GPUs, one training process group after another.

    python benchmarks/measure.py --out measured.json [--data FOLDER] [--profile] [--limit SECONDS] [NAME ...]

Each case is a preset with overrides (CASES), translated, trained for a few steps by benchmarks/peak_memory.py.
The file is rewritten after each case, so a killed sitting keeps what it has; a case that fails is written down with its error.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import kernels

from nam_megatron.compile import argv
from nam_megatron.compile.lower import Lowering, translate
from nam_megatron.data import manifest
from nam_megatron.errors import Refused
from nam_megatron.recipe import load

HERE = Path(__file__).parent
CUT = ("model.depth=13", "schedule.global_batch_size=16", "schedule.train_steps=6", "schedule.decay_steps=12")
ONE = ("cluster=h200_1", *CUT)
MBS8, GBS64 = "schedule.micro_batch_size=8", "schedule.global_batch_size=64"
FOUR = ("cluster=h200_4", "schedule.train_steps=5", "schedule.decay_steps=12")
# Routing settles after the first steps.
FOUR64 = ("cluster=h200_4", GBS64, "schedule.train_steps=8", "schedule.decay_steps=16")
# All 52 layers on one GPU, whose experts multiply one way or the other.
FULL_ONE = ("cluster=h200_1", "schedule.global_batch_size=16", "schedule.train_steps=8", "schedule.decay_steps=16")
# As many microbatches on each of two GPUs.
FULL_TWO = ("cluster=h200_2", "schedule.global_batch_size=32", *FULL_ONE[2:])
FULL_FOUR = ("cluster=h200_4", GBS64, *FULL_ONE[2:])
FULL_EIGHT = ("cluster=h200_8", "schedule.global_batch_size=128", *FULL_ONE[2:])
# how even routing is, each step's loss says
SETTLED = ("schedule.train_steps=60", "schedule.decay_steps=60", "optim.warmup_steps=4")
# As many tokens, in another layout of them.
LAYOUTS = {
    "data": (),
    "gathered": ("parallel.expert=2", "execution.moe.dispatcher=gathered"),
    "tensor": ("parallel.tensor=2", "parallel.sequence=true"),
    "context": ("parallel.context=2",),
}

MBS2, EXPERTS = "schedule.micro_batch_size=2", "execution.moe.expert_gemm="
HEADS64, FP8 = "model.blocks.mamba2.heads=64", "feature.fp8.recipe="
MLA = ("lane=native_dp", "model.substitute=[]", "feature.mtp.depths=0")
SPARSE13 = "model.substitute=[{letter: A, ranks: [1, 2, 3], kind: dsa}]"  # as far as 13 layers have its ranks
DSA = ("lane=native_dp", SPARSE13, "feature.mtp.depths=0")
MOE = "execution.moe."
COMPILED, OURS = "precision.cross_entropy=compiled", "precision.cross_entropy=fused"
WGRAD, PERMUTE = "precision.fused_grad_accumulation=true", f"{MOE}permute_fusion=true"
ROUTER, ALLGATHER = f"{MOE}router_fusion=true", f"{MOE}dispatcher=allgather"
FUSED = (WGRAD, OURS, PERMUTE, ROUTER)
MODULES = "feature.cuda_graphs.modules="
GRAPHS = ("feature.cuda_graphs.impl=transformer_engine", f"{MODULES}[attn,mamba,moe_router,moe_preprocess]")
# From the fourth step on all of a step but the update is one graph; the median time is of that.
WHOLE = ("feature.cuda_graphs.impl=full_iteration", "feature.cuda_graphs.warmup_steps=3")
# Keys of the fused overlay since 2026-11-24; the author stack has no Mamba-2, the native one no M2RNN.
ROUTERS, NORMS = f"{MOE}fused_router_gradient=", "execution.mamba2.strided_norm="
PADDED = "execution.m2rnn.padded_projection="
FLASH = "precision.attention_kernels=flash_attention_4"
# Dense projections in FP8, beside experts, latents and M2RNN in bf16.
SOME8, PARTS = f"{FP8}tensorwise", "feature.fp8.bf16_parts="
NATIVE8 = (SOME8, f"{PARTS}[experts]", "execution.mamba2.padded_projection=true")
WITHOUT, RATES = (f"{PARTS}[experts,latents,m2rnn{more}]" for more in ("", ",mamba3_rates"))
AUTHOR8 = (SOME8, WITHOUT)
KEPT = "execution.mamba3.keep_states=true"
PREPARED = "execution.mamba3.keep_prepared=true"
INPUTS = "feature.fp8.keep_inputs=true"
EAGER = ("feature.cuda_graphs.impl=none",)
FULL = ("feature.recompute.granularity=full", "feature.recompute.method=uniform", "feature.recompute.layers=1")
DETERMINISTIC = "precision.deterministic=true"
# The author stack as far as 13 layers have its ranks.
AUTHOR13 = (*ONE, SPARSE13)
# Half the depth on a GPU of 80 GB.
H100 = (*FULL_ONE, "device=h100", "model.depth=26")
AUTHOR26 = (MBS2, "model.substitute=[{letter: A, ranks: [1, 2, 3, 5, 6], kind: dsa}]")
LONG = (
    "model.seq_length=32768",
    "schedule.micro_batch_size=1",
    "schedule.global_batch_size=1",
    "schedule.train_steps=5",
    "schedule.decay_steps=12",
)
SELECTIVE = ("feature.recompute.granularity=selective", "feature.recompute.modules=[moe_act,layernorm]")
# Hydra composes one config at a time.
COMPOSING = threading.Lock()

# name -> (preset, overrides)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "smoke": ("nam56r_smoke", ("schedule.train_steps=6", "schedule.decay_steps=12")),
    "gqa13": ("nam56r_native_dp", ONE),
    "gqa13_fused_ce": ("nam56r_native_dp", (*ONE, COMPILED)),
    "gqa13_mbs2": ("nam56r_native_dp", (*ONE, "schedule.micro_batch_size=2")),
    "gqa13_full_recompute": ("nam56r_native_dp", (*ONE, *FULL)),
    "gqa13_selective_recompute": ("nam56r_native_dp", (*ONE, *SELECTIVE)),
    "gqa13_graphs": ("nam56r_native_dp", (*ONE, *GRAPHS)),
    "gqa13_fp8": ("nam56r_native_dp_fp8", (*ONE, *EAGER, "schedule.micro_batch_size=4")),
    "gqa13_muon": ("nam56r_native_dp", (*ONE, "optim=muon")),
    "gqa26_mbs2": ("nam56r_native_dp", (*ONE, "model.depth=26", "schedule.micro_batch_size=2")),
    "dense13": ("nam56r_native_dp", (*ONE, "model.letters.E=mlp", "schedule.micro_batch_size=2")),
    "mla13": ("nam56r", (*ONE, *MLA)),
    "mla13_mtp1": ("nam56r", (*ONE, *MLA, "feature.mtp.depths=1")),
    "dsa13_mbs1": ("nam56r", (*ONE, *DSA, "schedule.micro_batch_size=1", "schedule.global_batch_size=4")),
    "dsa13": ("nam56r", (*ONE, *DSA)),
    "dsa13_graphs": ("nam56r", (*ONE, *DSA, *GRAPHS)),
    "gqa52_dp4": ("nam56r_native_dp", FOUR),
    "gqa52_tp2": ("nam56r_nemo_native", FOUR),
    "gqa52_ep4": ("nam56r_native_dp", (*FOUR, "parallel.expert=4")),
    "gqa52_pp2": ("nam56r_native_dp", (*FOUR, "parallel.pipeline=2")),
    "gqa52_full_recompute": ("nam56r_native_dp", (*FOUR, *FULL)),
    "mla52_mbs2": ("nam56r", (*FOUR, *MLA, "schedule.micro_batch_size=2")),
    "gqa52_fsdp": ("nam56r_native_dp", (*FOUR, "feature.megatron_fsdp.enabled=true", "precision.grad_reduce=bf16")),
    "gqa52_graphs": ("nam56r_native_dp", (*FOUR, *GRAPHS)),
    "fused52": ("nam56r_native_dp_fused", FOUR64),
    "fused52_mbs8": ("nam56r_native_dp_fused", (*FOUR64, MBS8)),
    "fused52_graphs": ("nam56r_native_dp_fused", (*FOUR64, GRAPHS[0], f"{MODULES}[attn,mamba]")),
    "author52": ("nam56r_fused", FOUR64),
    "native52_one": ("nam56r_native_dp_fused", (*FULL_ONE, f"{EXPERTS}transformer_engine")),
    "native52_one_torch": ("nam56r_native_dp_fused", (*FULL_ONE, f"{EXPERTS}torch")),
    "author52_one": ("nam56r_fused", (*FULL_ONE, MBS2, f"{EXPERTS}transformer_engine")),
    "author52_one_torch": ("nam56r_fused", (*FULL_ONE, MBS2, f"{EXPERTS}torch")),
    "native52_one_whole": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, f"{ROUTERS}false", f"{NORMS}false")),
    "author52_one_whole": ("nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{ROUTERS}false", f"{PADDED}false")),
    "native52_one_new": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, f"{ROUTERS}true", f"{NORMS}true")),
    "author52_one_new": ("nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{ROUTERS}true", f"{PADDED}true")),
    "native52_one_flash": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, FLASH)),
    "author52_one_flash": ("nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{EXPERTS}quack", FLASH)),
    "native52_one_fp8": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, FLASH, *NATIVE8)),
    "native52_one_fp8_blockwise": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, FLASH, *NATIVE8, f"{FP8}blockwise")),
    "author52_one_fp8": ("nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{EXPERTS}quack", FLASH, *AUTHOR8)),
    "author52_one_kept": ("nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{EXPERTS}quack", FLASH, *AUTHOR8, KEPT)),
    "author52_one_prepared": ("nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{EXPERTS}quack", FLASH, SOME8, RATES, KEPT, PREPARED)),
    "author52_one_all": (
        "nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{EXPERTS}quack", FLASH, SOME8, RATES, INPUTS, KEPT, PREPARED)
    ),
    "author52_one_delayed": (
        "nam56r_fused", (*FULL_ONE, MBS2, *WHOLE, f"{EXPERTS}quack", FLASH, f"{FP8}delayed", RATES, KEPT, PREPARED)
    ),
    "native52_one_extras": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, f"{EXPERTS}quack", FLASH)),
    "native52_one_all": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, f"{EXPERTS}quack", FLASH, *NATIVE8)),
    **{
        f"{stack}52_{number}_all": (preset, (*full, *micro, *WHOLE, f"{EXPERTS}quack", FLASH, *eights))
        for number, full in (("two", FULL_TWO), ("four", FULL_FOUR), ("eight", FULL_EIGHT))
        for stack, preset, micro, eights in (
            ("native", "nam56r_native_dp_fused", (), NATIVE8),
            ("author", "nam56r_fused", (MBS2,), (SOME8, RATES, INPUTS, KEPT, PREPARED)),
        )
    },
    **{
        f"{stack}52_two_{name}": (preset, (*FULL_TWO, *micro, *WHOLE, *LAYOUTS[name]))
        for stack, preset, micro in (("native", "nam56r_native_dp_fused", ()), ("author", "nam56r_fused", (MBS2,)))
        for name in LAYOUTS
    },
    **{
        f"native52_two_{name}_{how}": ("nam56r_native_dp_fused", (*FULL_TWO[:2], *steps, *WHOLE, *LAYOUTS[name]))
        for name in ("data", "gathered")
        for how, steps in (("settled", SETTLED), ("balanced", FULL_TWO[2:]))
    },
    "native52_two_exchanged": ("nam56r_native_dp_fused", (*FULL_TWO, "parallel.expert=2", "execution.moe.dispatcher=alltoall")),
    "author52_two_exchanged": ("nam56r_fused", (*FULL_TWO, MBS2, "parallel.expert=2", "execution.moe.dispatcher=alltoall")),
    "native52_two_eager": ("nam56r_native_dp_fused", (*FULL_TWO, f"{EXPERTS}quack", FLASH, *NATIVE8)),
    "native52_four_data": ("nam56r_native_dp_fused", (*FULL_FOUR, *WHOLE)),
    "author52_four_data": ("nam56r_fused", (*FULL_FOUR, MBS2, *WHOLE)),
    "native52_four_gathered": ("nam56r_native_dp_fused", (*FULL_FOUR, *WHOLE, "parallel.expert=4", "execution.moe.dispatcher=gathered")),
    "native52_eight_gathered": ("nam56r_native_dp_fused", (*FULL_EIGHT, *WHOLE, "parallel.expert=8", "execution.moe.dispatcher=gathered")),
    "native52_eight_exchanged": ("nam56r_native_dp_fused", (*FULL_EIGHT, "parallel.expert=8", "execution.moe.dispatcher=alltoall")),
    # The articles' layout, the same without its FSDP, and that as one graph.
    **{
        f"{stack}52_{number}_{name}": (preset, (*full, *micro, f"+overlay=[{overlays}]", *more))
        for number, full in (("four", FULL_FOUR), ("eight", FULL_EIGHT))
        for stack, preset, micro in (("native", "nam56r_native_dp_fused", ()), ("author", "nam56r_fused", (MBS2,)))
        for name, overlays, more in (
            ("fsdp", "tp_sp_ep,fsdp_ep", ("precision.grad_reduce=bf16",)),
            ("tensor", "tp_sp_ep", ()),
            ("captured", "tp_sp_ep", ("execution.moe.dispatcher=gathered", *WHOLE)),
        )
    },
    "native52_one_delayed": ("nam56r_native_dp_fused", (*FULL_ONE, *WHOLE, f"{EXPERTS}quack", FLASH, *NATIVE8, f"{FP8}delayed")),
    # FP8 and bf16 of one model, whose widths FP8 takes: eager as FP8 is, and as fast as bf16 is.
    "native52_64": ("nam56r_native_dp_fused", (*FULL_ONE, HEADS64, f"{EXPERTS}transformer_engine")),
    "native52_64_torch": ("nam56r_native_dp_fused", (*FULL_ONE, HEADS64, f"{EXPERTS}torch")),
    "native52_64_tensorwise": ("nam56r_native_dp_fused", (*FULL_ONE, HEADS64, f"{FP8}tensorwise", f"{EXPERTS}transformer_engine")),
    "native52_64_blockwise": ("nam56r_native_dp_fused", (*FULL_ONE, HEADS64, f"{FP8}blockwise", f"{EXPERTS}transformer_engine")),
    "fused13": ("nam56r_native_dp_fused", ONE),
    "native26_h100": ("nam56r_native_dp_fused", H100),
    "native26_h100_whole": ("nam56r_native_dp_fused", (*H100, *WHOLE)),
    "author26_h100": ("nam56r_fused", (*H100, *AUTHOR26)),
    "author26_h100_whole": ("nam56r_fused", (*H100, *AUTHOR26, *WHOLE)),
    "fused13_whole": ("nam56r_native_dp_fused", (*ONE, *WHOLE)),
    # Megatron's default stack beside ours at its fastest.
    "stock13_64": ("nam56r_native_dp", (*ONE, GBS64)),
    "fused13_whole_64": ("nam56r_native_dp_fused", (*ONE, GBS64, MBS8, *WHOLE, "schedule.train_steps=8")),
    "fused13_deterministic": ("nam56r_native_dp_fused", (*ONE, DETERMINISTIC)),
    "author13": ("nam56r_fused", AUTHOR13),
    "author13_whole": ("nam56r_fused", (*AUTHOR13, *WHOLE)),
    "author13_deterministic": ("nam56r_fused", (*AUTHOR13, DETERMINISTIC)),
    "author52_32k": ("nam56r_fused", ("cluster=h200_1", *LONG, *FULL)),
    "author52_32k_pieces": ("nam56r_fused", ("cluster=h200_1", *LONG, "+overlay=long")),
    "author52_64k_pieces": ("nam56r_fused", ("cluster=h200_1", *LONG, "model.seq_length=65536", "+overlay=long")),
    "author52_32k_context": ("nam56r_fused", ("cluster=h200_2", "parallel.context=2", *LONG)),
}  # fmt: skip


def measure(name: str, folder: Path, limit: int, data: str | None, profile: bool) -> dict:
    """One case: its figures, or why there are none."""
    preset, overrides = CASES[name]
    words = ("--balanced",) * name.endswith("_balanced")
    words += ("--profile", str(folder / f"{name}.trace.json")) if profile else ()
    return trial(name, preset, (*overrides, *built(data, folder / f"{name}.data")), folder, limit, words)


def told(words: Sequence[str]) -> list[str]:
    """Words for the record: of a file, its name."""
    parts = (
        (key, equals, Path(value).name if "/" in value else value)
        for key, equals, value in (w.partition("=") for w in words)
    )
    return ["".join(part) if part[1] else Path(part[0]).name for part in parts]


def dataset(text: str) -> str:
    """A built dataset's folder, for argparse."""
    try:
        manifest.read(Path(text))
    except Refused as refused:
        raise argparse.ArgumentTypeError(refused.problems[0].message) from None
    return text


def built(data: str | None, folder: Path) -> tuple[str, ...]:
    """The overrides that train on a built dataset, through links in `folder`: Megatron keeps an index beside what it reads, and
    processes of their own would write it over each other."""
    if data is None:
        return ()
    folder.mkdir()
    for name in (*manifest.read(Path(data)).files, manifest.NAME):
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to((Path(data) / name).resolve())
    return "data=built", f"data.path={folder}"


def lowered(preset: str, overrides: Sequence[str]) -> Lowering:
    with COMPOSING:
        return translate(load(preset, overrides))


def trial(
    name: str,
    preset: str,
    overrides: Sequence[str],
    folder: Path,
    limit: float,
    words: Sequence[str] = (),
    gpus: Sequence[int] = (),
) -> dict:
    """Train a preset with overrides under benchmarks/peak_memory.py, which gets `words`: its figures, or an `error`.

    The log is `folder`/`name`.log. limit: seconds. gpus: which of the visible devices to use, where other trials run beside this one.
    """
    entry = {"name": name, "preset": preset, "overrides": told(overrides), "words": told(words)}
    try:
        lowering = lowered(preset, overrides)
    except Refused as refused:
        return {**entry, "wall_seconds": 0.0, "error": refused.render().splitlines()[0]}
    plan, out, log = folder / f"{name}.plan.json", folder / f"{name}.json", folder / f"{name}.log"
    plan.write_text(argv.plan_json(lowering))
    out.unlink(missing_ok=True)
    env = dict(os.environ) | {"TRITON_CACHE_AUTOTUNING": "1"}  # the next process need not try again
    for e in lowering.env:
        env.pop(e.name, None)
        if e.value is not None:
            env[e.name] = e.value
    if gpus:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(
            map(str, gpus) if visible is None else [visible.split(",")[i] for i in gpus]
        )
    entry["gpus"] = lowering.plan.recipe.world_size
    command = [sys.executable, str(HERE / "peak_memory.py"), "--out", str(out), *words, "--nam-plan", str(plan)]
    begin = time.monotonic()
    code = ranks([*command, *argv.words(lowering)], env, entry["gpus"], log, limit)
    entry["wall_seconds"] = round(time.monotonic() - begin, 1)
    if code != 0 or not out.exists():
        said = [x for x in log.read_text(errors="replace").splitlines() if "Error" in x or x.startswith("error:")]
        return {**entry, "error": f"exit {code}: {said[0][:300] if said else shlex.join(command[-3:])}"}
    return entry | json.loads(out.read_text())


def ranks(command: Sequence[str], env: Mapping[str, str], world: int, log: Path, limit: float) -> int | str:
    """Run `command` as each rank of one host: 0, or the first other exit code, or that the limit was reached; nothing is left running.

    torchrun would do the same, but takes seconds to start and half a minute to end ranks that do not answer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    deadline = time.monotonic() + limit
    with log.open("w") as stream:
        running = [
            subprocess.Popen(
                command,
                env={**env, **{k: str(v) for k, v in (job | {"RANK": r, "LOCAL_RANK": r}).items()}},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            for r in range(world)
        ]
        try:
            while None in (codes := [p.poll() for p in running]):
                if failed := next(filter(None, codes), None):
                    time.sleep(3)  # for what the others have to say
                    return failed
                if time.monotonic() > deadline:
                    return f"over {limit:.0f} s"
                time.sleep(0.1)
        finally:
            for process in running:
                process.kill()
                process.wait()
    return next((p.returncode for p in running if p.returncode), 0)


def main() -> int:
    """1 if a case failed or was not begun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=dataset, help="a built dataset; mock data by default")
    parser.add_argument("--profile", action="store_true", help="the kernels of the last step, too")
    parser.add_argument("--limit", type=int, default=540, help="seconds for all cases together")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all by default")
    options = parser.parse_args()
    if unknown := [n for n in options.names if n not in CASES]:
        parser.error(f"no case {', '.join(unknown)}")
    end, entries = time.monotonic() + options.limit, []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or CASES:
            left = int(end - time.monotonic())
            if left < 30:
                print(f"{name}: no time left", flush=True)
                entries.append({"name": name, "error": "no time left"})
                continue
            entry = measure(name, Path(folder), left, options.data, options.profile)
            entries.append(entry)
            options.out.write_text(json.dumps(entries, indent=1) + "\n")
            log = (Path(folder) / f"{name}.log").read_text(errors="replace")
            options.out.with_name(f"{name}.log").write_text(log[-200_000:])
            if "error" in entry:
                print(f"{name}: {entry['error']} ({entry['wall_seconds']} s)", flush=True)
                continue
            steady = entry["peak_bytes"]["steady"]
            print(
                f"{name}: {entry['median_step_seconds'] * 1e3:.0f} ms a step, steady peak {steady['allocated'] / 1e9:.2f} GB allocated, "
                f"{steady['reserved'] / 1e9:.2f} GB reserved ({entry['wall_seconds']} s)",
                flush=True,
            )
            if "kinds" in (entry["kernels"] or ()):
                print(kernels.text(entry["kernels"]), end="", flush=True)
    return int(any("error" in entry for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
