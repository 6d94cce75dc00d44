"""The measured tables of docs/log.md: python benchmarks/tables.py

Reads benchmarks/{throughput,full,experts52,whole52,keys52,flash52,fp8,fp8_52,quack_tiles,stock,ladder,blocks,output_layer}_h200.json,
losses/ and receipts/, and writes each table between its marks.
Needs the package: how many layers of a kind the full model has stands in its plan.
"""

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import losses
from blocks import kind_of
from measure import FULL

from launch.record import scale
from launch.record.receipt import read as read_receipt
from nam_megatron.budget import budget, ends, search
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import conf_dir, load
from nam_megatron.words.sizes import GIB

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "log.md"
CHANGED_MS, REPLAYS = 10, slice(4, 7)  # behind the capture, and before the step that is profiled
TRACED = (
    "baseline",
    "fusions",
    "all",
    "all_weighed",
    "all_norms",
    "all_local",
    "all_strided",
    "overlay",
    "fp8_tensorwise",
)
# Runs of one host and sitting: from one to others, or to cases of four_h200.json, on so many GPUs, with so large a global batch.
SCALED: dict[str, tuple[tuple[str, int, int | None], ...]] = {
    "20261127T134719Z-nam56r_native_dp_fused-7cf37a": (("20261127T134217Z-nam56r_native_dp_fused-52a65a", 2, None),),
    "20261127T134719Z-nam56r_fused-cd76dc": (("20261127T135149Z-nam56r_fused-d944d4", 2, None),),
    "20261128T090438Z-nam56r_native_dp_fused-9fe91a": (
        ("native52_one_all", 1, None),
        ("native52_two_all", 2, None),
    ),
    "20261125T062050Z-nam56r_native_dp_fused-535d21": (("20261125T062633Z-nam56r_native_dp_fused-ea1b03", 1, 64),),
}  # fmt: skip


def read(name: str) -> Any:
    return json.loads((HERE / f"{name}_h200.json").read_text())


def throughput() -> Iterator[str]:
    """Each rung beside the baseline of the same GPU and sitting."""
    yield "| rung | ms a step | tokens/s | gain | of the peak | GB |"
    yield "|---|---|---|---|---|---|"
    for sitting in read("throughput"):
        rungs = [r for r in sitting["rungs"] if "error" not in r]
        baseline = {r["gpu"]: r["tokens_per_second"] for r in rungs if r["name"] == "baseline"}
        rates = sorted(baseline.values())
        first = next(r for r in rungs if r["name"] == "baseline")
        for rung in [first, *(r for r in rungs if r["name"] != "baseline")]:
            rate = rung["tokens_per_second"]
            gain = (
                f"{rate / baseline[rung['gpu']] - 1:+.1%}"
                if rung is not first
                else f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
            )
            peak = rung["peak_bytes"]["steady"]["allocated"] / 1e9
            ms = rung["median_step_seconds"] * 1e3
            yield f"| {rung['name']} | {ms:.0f} | {rate:,.0f} | {gain} | {rung['utilisation']:.1%} | {peak:.1f} |"


def kernels() -> Iterator[str]:
    """Milliseconds of one step by what the kernels are for; of a rung measured more than once, the newest sitting's first."""
    rungs = {
        r["name"]: r for s in read("throughput") for r in reversed(s["rungs"]) if "kinds" in (r.get("kernels") or ())
    }
    yield from by_kind({name: rungs[name]["kernels"] for name in TRACED if name in rungs})


def full() -> Iterator[str]:
    """The same at 52 layers on four GPUs, of the first rank (benchmarks/measure.py --profile)."""
    yield from by_kind({entry["name"]: entry["kernels"] for entry in read("full")})


def one() -> Iterator[str]:
    """Both stacks at 52 layers on one GPU, their experts multiplied one way and the other (benchmarks/measure.py --profile)."""
    yield from by_kind({entry["name"]: entry["kernels"] for entry in read("experts52")})


def whole() -> Iterator[str]:
    """The same with all of a step but the update in one CUDA graph, and the author stack without."""
    yield from by_kind({entry["name"]: entry["kernels"] for entry in read("whole52")})


def keys() -> Iterator[str]:
    """What became of a step with the keys that the fused overlay has since: kinds that changed by more than clocks do."""
    entries = {entry["name"]: entry for entry in read("keys52")}
    for stack in ("author52_one", "native52_one"):
        before, after = (entries[f"{stack}_{which}"] for which in ("whole", "new"))
        kinds = before["kernels"]["kinds"] | after["kernels"]["kinds"]
        yield f"| `{after['preset']}` | without, ms | with, ms |"
        yield "|---|---|---|"
        for kind in kinds:
            left, right = (entry["kernels"]["kinds"].get(kind, {"ms": 0.0})["ms"] for entry in (before, after))
            if abs(right - left) > CHANGED_MS:
                yield f"| {kind} | {left:.1f} | {right:.1f} |"
        yield f"| a replayed step, median of three | {replayed(before):,.0f} | {replayed(after):,.0f} |"
        yield ""


def replayed(entry: dict[str, Any]) -> float:
    """Milliseconds of a step that is one CUDA graph."""
    return 1e3 * statistics.median(step["seconds"] for step in entry["steps"][REPLAYS])


WORDS = {"up": "3584 to 896", "down": "896 to 3584"}


def quack() -> Iterator[str]:
    """The experts' products by torch and by QuACK with its own tile, the one that is taken, and the best of six or seven."""
    ms: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for row in read("quack_tiles")["rows"]:
        ms[row["rows"], row["name"]][row["way"]] = row["ms"]
    own, narrow = "quack 128x192p21", "quack 128x224c12"
    yield "| rows, in to out, product | one GEMM at 750 TFLOP/s | torch | QuACK's own tile | taken | best of all tried |"
    yield "|---|---|---|---|---|---|"
    for (rows, name), ways in ms.items():
        expert, _, product = name.partition(" ")
        if expert not in WORDS or product not in ("", "dgrad", "wgrad add"):
            continue
        turned = ms[rows, f"{name} t"] if product == "wgrad add" else {}
        tile = narrow if (expert, product) in (("up", ""), ("down", "dgrad")) else own  # of products with 896 columns
        taken = turned[own] if turned and expert == "up" else ways[tile]
        floor = 2e-9 * rows * 3584 * 896 / 750
        best = min(t for way, t in (*ways.items(), *turned.items()) if way.startswith("quack"))
        cells = (floor, next(t for way, t in ways.items() if way.startswith("torch")), ways[own], taken, best)
        title = {"": "forward", "dgrad": "rows", "wgrad add": "weights, added"}[product]
        yield f"| {rows} rows, {WORDS[expert]}, {title} | {' | '.join(f'{t:.2f}' for t in cells)} |"


def beyond() -> Iterator[str]:
    """Steps of both stacks with the fused overlay, and with what is beyond it, one thing after the other."""
    first, second = ({entry["name"]: entry for entry in read(name)} for name in ("flash52", "fp8_52"))
    entries = {
        "native": first["native52_one_new"],
        "with FlashAttention 4": first["native52_one_flash"],
        "and FP8": second["native52_one_fp8"],
        "author": first["author52_one_new"],
        "with QuACK and FlashAttention 4": first["author52_one_flash"],
        "and FP8 ": second["author52_one_fp8"],
        "and kept states": second["author52_one_kept"],
        "and what came next": second["author52_one_prepared"],
        "and the rest": second["author52_one_all"],
    }
    yield from by_kind({name: entry["kernels"] for name, entry in entries.items()})
    yield f"| **a replayed step, median of three** | {' | '.join(f'{replayed(entry):,.0f}' for entry in entries.values())} |"


def fp8() -> Iterator[str]:
    """What FP8 could take off a step of the whole model at most: of each projection what is fastest."""
    found, entries = read("fp8")[-1], {entry["name"]: entry for entry in read("keys52")}
    gains = {of["name"]: of["gain_ms"] for of in found["sums"]}
    yield "| projection, rows x in to out | a microbatch | bf16, ms | tensorwise | blockwise | less in a step, ms |"
    yield "|---|---|---|---|---|---|"
    for preset, entry in (("nam56r_fused", "author52_one_new"), ("nam56r_native_dp_fused", "native52_one_new")):
        for row in (row for row in found["rows"] if row["name"].startswith(f"{preset} ")):
            ms = " | ".join(f"{row[way]:.2f}" for way in ("bf16", "tensorwise", "blockwise"))
            yield f"| {row['name'].partition(' ')[2]} | {row['a_microbatch']} | {ms} | {row['gain_ms_a_step']:.0f} |"
        step, gain = replayed(entries[entry]), gains[preset]
        yield f"| **`{preset}`**: {step:,.0f} ms a step, at most {step / (step - gain):.2f} times as fast | | | | | {gain:.0f} |"


def by_kind(tables: dict[str, Any]) -> Iterator[str]:
    kinds = dict.fromkeys(kind for table in tables.values() for kind in table["kinds"])
    yield f"| ms of a step | {' | '.join(tables)} |"
    yield "|---" * (1 + len(tables)) + "|"
    for kind in kinds:
        cells = (table["kinds"].get(kind, {"ms": 0.0})["ms"] for table in tables.values())
        yield f"| {kind} | {' | '.join(f'{ms:.1f}' for ms in cells)} |"
    for key, title in (("gaps_ms", "no kernel runs"), ("span_ms", "first to last kernel")):
        yield f"| {title} | {' | '.join(f'{table[key]:.1f}' for table in tables.values())} |"


def stock() -> Iterator[str]:
    found = read("stock")["compared"]
    loss = {name: found["lm loss"][name] for name in ("ours", "stock", "again")}
    yield "| | ours | Megatron's default stack | ours again |"
    yield "|---|---|---|---|"
    for step in (1, 10, 20, 30, 40, 50):
        yield f"| loss, step {step} | {' | '.join(f'{values[step - 1]:.4f}' for values in loss.values())} |"

    def apart(name: str, pick: Any) -> str:
        return f"{pick([abs(a - b) for a, b in zip(loss['ours'], loss[name], strict=True)]):.4f}"

    for title, pick in (("largest", max), ("median", statistics.median)):
        yield f"| {title} difference of a step's loss from ours | | {apart('stock', pick)} | {apart('again', pick)} |"
    yield "| ms a step | " + " | ".join(f"{s * 1e3:.1f}" for s in found["median_step_seconds"].values()) + " |"
    yield "| GB | " + " | ".join(f"{b / 1e9:.2f}" for b in found["steady_allocated"].values()) + " |"


def thousand() -> Iterator[str]:
    """Losses of 1,000 steps, ours and Megatron's."""
    yield from losses.table()


def precisions() -> Iterator[str]:
    """Losses of 1,000 steps in bf16 and in FP8."""
    yield from losses.precisions()


def ladder() -> Iterator[str]:
    yield "| rung | GPUs | losses of steps 1-3, then 4-6 from the checkpoint | gradient norms | both checkpoints, GB | last step, ms | GB |"
    yield "|---|---|---|---|---|---|---|"
    for rung in read("ladder"):
        if "error" in rung:
            yield f"| {rung['name']} | {rung['gpus']} | {rung['error']} | | | | |"
            continue
        halves = [rung[half]["steps"] for half in ("first", "resumed")]
        losses, norms = (
            "; ".join(", ".join(f"{read(s):.{n}f}" for s in half) for half in halves)
            for read, n in ((lambda s: s["losses"]["lm loss"], 3), (lambda s: s["grad_norm"], 1))
        )
        peak = max(rung[half]["peak_bytes"]["steady"]["allocated"] for half in ("first", "resumed")) / 1e9
        saved = "; ".join(rung["checkpoint"]["wrong"]) or f"{rung['checkpoint']['bytes'] / 1e9:.1f}"
        last = halves[-1][-1]["seconds"] * 1e3
        yield f"| {rung['name']} | {rung['gpus']} | {losses} | {norms} | {saved} | {last:.0f} | {peak:.1f} |"


def runs() -> Iterator[str]:
    """The newest last."""
    yield "| receipt | layers, lane | GPUs | batch, steps | loss | tokens/s/GPU | of the peak | GiB reserved, forecast | first step after |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for path in sorted((HERE.parent / "receipts").rglob("receipt.json"), key=lambda path: path.parent.name):
        found = json.loads(path.read_text())
        recipe, came = found["recipe"], found["outcome"]
        if recipe["cluster"].get("processor") == "cpu":  # of speed and memory it says nothing
            continue
        figures, window, peak = came["figures"], came["figures"]["window"], came["memory"]["peak_reserved_gib"]
        finite = figures["loss_finite"] and figures["grad_norm_finite"]
        whole = came["end"] == "completed"
        cells = (
            f"[{path.parent.name}](../{path.relative_to(HERE.parent)})",
            f"{recipe['model']['depth']}, {recipe['lane']['name']}"
            + (", by Megatron-Bridge" if found["job"]["trainer"] == "bridge" else ""),
            recipe["cluster"]["gpus_per_node"] * recipe["cluster"]["nodes"],
            f"{recipe['schedule']['global_batch_size']}, {figures['steps']}"
            + ("" if whole else f" of {figures['planned_steps']}, {came['end']}"),
            f"{figures['loss_first']:.2f} to {figures['loss_last']:.2f}" + ("" if finite else ", not always finite"),
            f"{window['tokens_per_s_per_gpu']:,.0f}",
            f"{came['against_forecast']['model_flops_utilisation']:.1%}",
            f"{peak:.1f}, {found['forecast']['peak_reserved_gib']:.1f}",
            f"{came['bad_put']['until_first_step_s']:.0f} s",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def blocks() -> Iterator[str]:
    """A layer of each kind as it was measured, and what those of the whole model take at that rate."""
    found = read("blocks")["blocks"]
    plan = translate(load("nam56r")).plan
    layers = Counter(kind_of(layer) for layer in plan.layers)
    yield "| | forward, ms | backward, ms | of the 13-layer step | layers of 52 | ms in a 52-layer step |"
    yield "|---|---|---|---|---|---|"
    total = 0.0
    for name, row in (*found["kinds"].items(), *found["parts"].items()):
        count = layers.get(name, 1)
        ms = count * (row["forward_ms"] + row["backward_ms"])
        total += ms
        share = f"{row['forward_ms']:.1f} | {row['backward_ms']:.1f} | {row['share']:.1%}"
        yield f"| {name} | {share} | {layers.get(name, '')} | {ms:.0f} |"
    rest = found["everything else"]
    yield f"| everything else: embedding, losses, optimizer | | | {rest['share']:.1%} | | {rest['ms']:.0f} in 13 layers |"
    yield f"| step | | | {found['step_ms']:.0f} ms | | {total:.0f} and the rest |"


LENGTHS, GPUS = (4096, 16384, 32768, 65536, 131072), (1, 2, 8)
IN_PIECES = "the same, in pieces"
KEPT = ("everything", ()), ("the input of each layer", FULL), (IN_PIECES, ("+overlay=long",))
SHARERS = 2, 4  # of a sequence; eight do not divide the heads of M2RNN


def long() -> Iterator[str]:
    """What the budget forecasts for long sequences, one of them a microbatch: GiB on each GPU at the worst moment."""
    columns = [(n, 1) for n in GPUS] + [(n, n) for n in SHARERS]
    titles = [f"{n} GPU{'s' * (n > 1)}" + f", context {c}" * (c > 1) for n, c in columns]
    yield "| tokens a sequence | kept | " + " | ".join(titles) + " |"
    yield "|---|---" + "|---" * len(columns) + "|"
    for length in LENGTHS:
        for title, more in KEPT:
            cells = []
            for n, context in columns:
                words: tuple[str, ...] = (
                    f"model.seq_length={length}",
                    f"cluster=h200_{n}",
                    f"parallel.context={context}",
                    "schedule.micro_batch_size=1",
                    "schedule.global_batch_size=8",
                )
                if title == IN_PIECES:  # a rank of four has two groups of heads
                    words += (f"execution.mamba3.head_pieces={4 // context}",)
                plan = translate(load("nam56r_fused", (*words, *more))).plan
                need, device = budget(plan).worst.steady.total / GIB, plan.recipe.device
                cells.append(
                    f"{need:.1f}" if need <= device.total_gib - device.headroom_gib else f"{need:.1f}, too much"
                )
            yield f"| {length:,} | {title} | {' | '.join(cells)} |"


def eighty() -> Iterator[str]:
    """What fits on GPUs of 80 GB and of 141: the largest micro batch of each preset of ours that leaves the headroom."""
    hosts = [("1 H100", "h100", 1), ("8 H100", "h100", 8), ("1 H200", "h200", 1), ("8 H200", "h200", 8)]
    yield "| preset | " + " | ".join(title for title, *_ in hosts) + " |"
    yield "|---" * (1 + len(hosts)) + "|"
    for path in sorted((conf_dir() / "preset").glob("nam5*.yaml")):
        if path.stem == "nam56r_smoke":
            continue
        cells = []
        for _, device, gpus in hosts:
            layout = ("parallel.tensor=1", "parallel.sequence=false") if gpus == 1 else ()
            recipe = load(path.stem, (f"cluster=h200_{gpus}", f"device={device}", *layout))
            best = search.largest(recipe, "schedule.micro_batch_size").best
            cells.append(
                "none"
                if best is None or best.budget is None
                else f"{best.value}, {best.budget.worst.worst.total / GIB:.1f}"
            )
        yield f"| `{path.stem}` | {' | '.join(cells)} |"


EACH = (*FULL, "feature.recompute.modules=[]")
LOGITS = (
    ("nam56r_fused", 4, 8), ("nam56r_fused", 4, 2), ("nam56r_native_dp_fused", 8, 8), ("nam56r_native_dp_fused", 8, 2),
    ("nam56r_native_dp_fused", 4, 8), ("nam56r_nemo_native", 4, 8), ("nam56r_native_dp_fp8", 5, 8),
    ("nam52_h200_dense_ref_v1", 2, 1), ("nam52_h200_dense_no_mhc_recovery_v1", 2, 1), ("nam52_h200_sparse_8_11_ref_v1", 2, 1),
    ("nam52r_h200_4full_9sparse_candidate_v1", 2, 1), ("llama_3_8b", 1, 8), ("nemotron_h_8b", 1, 8),
    ("nam56r_native_dp_fused", 8, 8, *EACH), ("nemotron_h_8b", 4, 8, *EACH), ("llama_3_8b", 4, 8, *EACH), ("llama_3_8b", 8, 8, *EACH),
)  # fmt: skip


def without_logits() -> Iterator[str]:
    """What the peak would fall by if the output layer and its loss held nothing at all: GiB allocated, by the budget."""
    yield "| preset | micro batch, GPUs | logits of all depths | peak | at | without | at | less |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, micro, gpus, *more in LOGITS:
        overlay = () if name.endswith("_fused") else ("precision.cross_entropy=fused",)
        if name.startswith("nam52"):
            overlay = ("+overlay=fused",)
        words = (*overlay, f"cluster=h200_{gpus}", f"schedule.micro_batch_size={micro}", *more)
        plan = translate(load(name, words)).plan
        peak = budget(plan).worst.steady
        with mock.patch.object(ends, "loss", lambda z: ()):
            less = budget(plan).worst.steady
        r = plan.recipe
        count = micro * r.model.seq_length * r.model.vocab_size * (1 + plan.mtp_depths) / r.parallel.tensor
        share = 1 - less.allocated / peak.allocated
        cells = f"{peak.allocated / GIB:.1f} | {peak.event} | {less.allocated / GIB:.1f} | {less.event} | {share:.1%}"
        title = f"{name}, full recompute" if more else name
        yield f"| {title} | {micro}, {gpus} | {2 * count / GIB:.1f} | {cells} |"


# Tokens of a microbatch: a run of such, and how often it computes its output layer.
RUNS = {
    16384: ("20261121T182906Z-nam56r_fused-adcf6c", 2),
    32768: ("20261121T174652Z-nam56r_native_dp_fused-5d8cdf", 1),
    8192: ("20261122T181224Z-nam52_h200_dense_no_mhc_recovery_v1-7a0f1f", 1),
}


def output_layer() -> Iterator[str]:
    """What is more than `fused`, of a microbatch of that run."""
    yield "| tokens | way | ms | times the floor | held for backward, GiB | peak, GiB | of a step, more |"
    yield "|---|---|---|---|---|---|---|"
    rows = read("output_layer")[-1]["rows"]
    fused = {row["rows"]: row["ms"] for row in rows if row["name"] == "fused"}
    for tokens in fused:
        name, times = RUNS[tokens]
        found = json.loads((HERE.parent / "receipts" / name / "receipt.json").read_text())
        step = tokens / found["outcome"]["figures"]["window"]["tokens_per_s_per_gpu"] * 1e3
        for row in (row for row in rows if row["rows"] == tokens):
            more = f"{times * (row['ms'] - fused[tokens]) / step:+.1%}" if row["name"] != "fused" else ""
            cells = (
                f"{row['ms']:.1f} | {row['ms'] / row['floor_ms']:.2f} | {row['kept_gib']:.2f} | {row['peak_gib']:.2f}"
            )
            yield f"| {tokens:,} | {row['name']} | {cells} | {more} |"


def scaled() -> Iterator[str]:
    """A step on other numbers of GPUs, or of another batch, as `launch scale` forecasts it from one run, and as it was measured."""
    yield "| from | to | forecast, ms a step | measured | off |"
    yield "|---|---|---|---|---|"
    for path, runs in SCALED.items():
        first = read_receipt(HERE.parent / "receipts" / path)
        for other, gpus, batch in runs:
            found = scale.forecast(first, [gpus], batch)[0].ms
            if other.startswith("2"):
                took = scale.measured(read_receipt(HERE.parent / "receipts" / other))[0]
                to = f"[{gpus}](../receipts/{other}/receipt.json)"
            else:
                took = 1e3 * next(c for c in read("four") if c["name"] == other)["median_step_seconds"]
                to = f"[{gpus}](../benchmarks/four_h200.json)"
            batch = f", global batch {batch}" if batch else ""
            start = f"[{path[17:-7]}, {scale.measured(first)[1]}](../receipts/{path}/receipt.json)"
            yield f"| {start} | {to}{batch} | {found:,.0f} | {took:,.0f} | {found / took - 1:+.1%} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = DOCS.read_text()
    for table in (
        throughput,
        kernels,
        full,
        one,
        whole,
        keys,
        fp8,
        quack,
        beyond,
        stock,
        thousand,
        precisions,
        ladder,
        runs,
        blocks,
        long,
        eighty,
        without_logits,
        output_layer,
        scaled,
    ):
        head, begin, rest = text.partition(f"<!-- begin: {table.__name__} -->\n")
        assert begin, f"docs/log.md has no place for {table.__name__}"
        _, end, tail = rest.partition("<!-- end -->")
        text = head + begin + "\n".join(table()) + "\n" + end + tail
    DOCS.write_text(text)


if __name__ == "__main__":
    main()
