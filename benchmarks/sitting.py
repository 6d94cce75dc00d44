"""What waits for GPUs, the most worth first, until the time is up.

    python benchmarks/sitting.py --out DIR [--gpus N] [--minutes M] [--data FOLDER] [--revision HASH] [JOB ...]

Jobs that leave GPUs free run beside others, on the same GPU as far as its memory goes where nothing is timed; one that waits for GPUs alone
lets no later one go first. A job that would not end in time by
its estimate is not begun, and one that is not over when the time is up is killed, as on SIGTERM. What has ended well in DIR is not run
again, so the same command goes on where the last one stopped. DIR/JOB.log is what a job said, DIR/sitting.json what became of each. Files
that a job makes lie in DIR, too; those that prove something go to benchmarks/.

Exit codes: 0 all ended well, 1 something failed, was killed or was not begun.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from losses import RUNS
from measure import KEPT, PREPARED, SPARSE13

from launch.host import linux
from launch.record import source
from launch.run.process import send
from nam_megatron.errors import Refused

ROOT = Path(__file__).parent.parent
BUSY = "GPUs are taken"
SHARED = 130.0  # GiB of an H200 that jobs beside each other may take
CORPUS = "built"  # below DIR: where `data` is made if none is given


class Job(NamedTuple):
    """gpus: 0 for one that needs the CPU alone. minutes: an estimate. In `command` {out} is DIR, {data} the built dataset, {scratch} a
    folder outside both.

    gib: what it takes of a GPU that it shares with others; 0 for one that is timed or fills it. part: words that follow where the job has
    not all of the host's GPUs; {port} is its first GPU's.
    """

    gpus: int
    minutes: float
    command: str
    after: str = ""
    gib: float = 0
    part: str = ""

    @property
    def takes(self) -> float:
        """GiB of each of its GPUs."""
        return self.gib or SHARED


PROVE = "-m nam_megatron.prove.every {out}/prove_%s.json --device cuda --presets %s"
RESUMED = PROVE + " --resume"
WHOLE = "feature.cuda_graphs.impl=full_iteration feature.cuda_graphs.warmup_steps=1"
KEEP, PARTS = "feature.fp8.keep_inputs", "feature.fp8.bf16_parts"
AUTHOR13 = f"model.depth=13 '{SPARSE13}'"
NGRAMS = "feature.ngram_hash.enabled=true feature.ngram_hash.buckets=8000000 feature.ngram_hash.document_end=0"
PART = (  # what `launch` would otherwise refuse on a host that has more GPUs than the run
    " 'diagnostic=one of several GPUs of the host' port={port} 'cluster.waivers.gpus=the others are not of this run'"
    " 'cluster.waivers.topology=the others are not of this run' 'cluster.waivers.idle=the others may be at work'"
    " 'cluster.waivers.stale=on the others'"
)
AGAIN = "feature.recompute.granularity=selective feature.recompute.modules="
PARTWISE = "feature.cuda_graphs.impl=transformer_engine feature.cuda_graphs.modules=[attn]"
FLASH, QUACK = "precision.attention_kernels=flash_attention_4", "execution.moe.expert_gemm=quack"
BLOCKWISE = "+overlay=fp8 feature.fp8.recipe=blockwise"
NATIVE, AUTHOR = "nam56r_native_dp_fused", "nam56r_fused"
# A law of what nobody has tried -> a preset, GPUs, and words that it alone refuses.
TRIED = {
    "whole-step-recompute": (NATIVE, 1, f"{AGAIN}[moe_act] {WHOLE}"),
    "whole-step-fp8-blockwise": (NATIVE, 1, f"{BLOCKWISE} {KEEP}=false {WHOLE}"),
    "whole-step-fp8-weights": ("llama_3_1_8b", 2, f"+overlay=fp8 feature.fp8.param_gather=true {WHOLE}"),
    "whole-step-bf16-layers": (NATIVE, 1, f"+overlay=fp8 feature.fp8.first_last_bf16=true {WHOLE}"),
    "whole-step-fsdp": ("llama_3_1_8b", 2, f"feature.megatron_fsdp.enabled=true {WHOLE}"),
    "whole-step-ngrams": (NATIVE, 1, f"{NGRAMS} {WHOLE}"),
    "whole-step-naive-streams": (NATIVE, 1, f"feature.mhc.streams=4 feature.mhc.kernels=naive {WHOLE}"),
    "flash4-context": (NATIVE, 2, f"parallel.context=2 {FLASH}"),
    "flash4-deterministic": (NATIVE, 1, f"precision.deterministic=true {FLASH}"),
    "flash4-graphs": (NATIVE, 1, f"{FLASH} {PARTWISE}"),
    "quack-bf16-gradients": (NATIVE, 1, f"{QUACK} precision.grad_reduce=bf16"),
    "quack-deterministic": (NATIVE, 1, f"{QUACK} precision.deterministic=true"),
    "quack-muon": (NATIVE, 1, f"{QUACK} +overlay=muon"),
    "fp8-inputs-recompute": (AUTHOR, 1, f"+overlay=fp8 {AGAIN}[moe_act]"),
    "fp8-inputs-blockwise": (NATIVE, 1, BLOCKWISE),
    "fp8-inputs-graphs": (NATIVE, 1, f"+overlay=fp8 {PARTS}=[] {PARTWISE}"),
    "fp8-parts-graphs": (NATIVE, 1, f"+overlay=fp8 {KEEP}=false {PARTWISE}"),
    "fp8-delayed-recompute": (AUTHOR, 1, f"+overlay=fp8 feature.fp8.recipe=delayed {KEEP}=false execution.mamba3.recompute=in_proj"),
    "mamba3-rates-blockwise": (AUTHOR, 1, f"{BLOCKWISE} {KEEP}=false"),
    "streams-recompute": (NATIVE, 1, f"feature.mhc.streams=4 {AGAIN}[moe_act]"),
    "streams-fp8": (NATIVE, 1, "feature.mhc.streams=4 +overlay=fp8"),
    "streams-interleaved": (NATIVE, 2, "feature.mhc.streams=4 parallel.pipeline=2 parallel.virtual_pipeline=2"),
    "mtp-tied-embeddings": (NATIVE, 1, "model.tied_embeddings=true feature.mtp.depths=1"),
    "mtp-kinds-untried": (NATIVE, 1, "feature.mtp.depths=1 feature.mtp.pattern=AEM +overlay=fp8"),
    "kind-untried": ("qwen3_5_0_8b", 1, WHOLE),
}  # fmt: skip
GPU_TEST = "-m pytest -q -m gpu -p no:cacheprovider -p no:xdist tests/gpu/%s"
JOBS = {
    "data": Job(
        0, 1.5,
        "-c 'from subprocess import check_call as c; import sys; n = [sys.executable, \"-m\", \"nam_megatron.data\"];"
        ' c([*n, "corpus", "{out}/cpp.jsonl", "--from", "torch"]);'
        ' c([*n, "tokenizer", "{out}/bpe", "{out}/cpp.jsonl", "--entries", "65536"]);'
        ' c([*n, "build", "{data}", "{out}/cpp.jsonl", "--tokenizer", "{out}/bpe"])\'',
    ),
    # The same model: kernels that have changed since they were last on a GPU, then layouts.
    "kernels_dsa": Job(1, 2, GPU_TEST % "test_dsa.py", gib=40),
    "kernels_mhc": Job(1, 2, GPU_TEST % "test_mhc.py", gib=40),
    "kernels_moe": Job(1, 1, GPU_TEST % "test_moe.py", gib=20),
    "kernels_mamba3": Job(1, 2, GPU_TEST % "test_mamba3.py", gib=40),
    "kernels_keys": Job(
        1, 3, GPU_TEST % "test_router.py tests/gpu/test_mamba2_norm.py tests/gpu/test_m2rnn.py tests/gpu/test_aligned.py", gib=40
    ),
    "kernels_flash": Job(1, 3, GPU_TEST % "test_flash_attention.py tests/gpu/test_columns.py", gib=20),
    "kernels_fp8": Job(1, 3, GPU_TEST % "test_bf16_parts.py tests/gpu/test_aligned.py", gib=20),
    "kernels_step": Job(
        1, 2,
        GPU_TEST % "test_word_embedding.py tests/gpu/test_cross_entropy.py tests/gpu/test_last_first.py tests/gpu/test_graph_fills.py",
        gib=40,
    ),
    "kernels_rest": Job(
        1, 4,
        GPU_TEST % "test_mla.py tests/gpu/test_mla_rope_patch.py tests/gpu/test_autotune.py tests/gpu/test_background.py"
        " tests/gpu/test_mamba2.py tests/gpu/test_ngram_embedding.py",
        gib=40,
    ),
    # Each is 37 GiB and keeps some 20 on the disk: two a GPU. Norms of the author stack differ, and one rank runs in fp32, too.
    **{
        f"prove_test_{case}": Job(1, minutes, GPU_TEST % f"test_prove.py -k {case}", gib=60)
        for minutes, cases in (
            (13, ("author_fused", "author_stock_mla", "author_recomputed", "author_deterministic")),
            (8, ("native_fused", "native_graphs", "native_deterministic")),
        )
        for case in cases
    },
    "whole_step": Job(1, 9.5, GPU_TEST % "test_whole_step.py"),
    # Steps as one graph on two ranks: what eager steps train, and every way of ending.
    **{
        f"two_{layout}_{stack}": Job(2, 3, GPU_TEST % f"test_two_gpus.py -k 'replays_on_two and {layout} and {chosen}native'", gib=20)
        for layout in ("data", "gathered", "tensor", "context")
        for stack, chosen in (("native", ""), ("author", "not "))
    },
    "two_exchanged": Job(2, 3, GPU_TEST % "test_two_gpus.py -k 'exchanged or two_tensor'", gib=20),
    "two_ends": Job(2, 3, GPU_TEST % "test_two_gpus.py -k 'nan or signal'", gib=20),
    "two_faults": Job(2, 3, GPU_TEST % "test_two_gpus.py -k 'memory or error'", gib=20),
    # Halves of the GPUs as two hosts, one of them lost. What they said is kept though the time is up.
    **{
        f"{count}_hosts_{stack}": Job(
            gpus, 12, GPU_TEST % f"test_two_gpus.py -k 'two_hosts and {chosen}native' --basetemp={{out}}/{count}_hosts_{stack}", gib=20
        )
        for count, gpus in (("two", 2), ("eight", 8))
        for stack, chosen in (("native", ""), ("author", "not "))
    },
    "prove_author": Job(
        1, 8,
        RESUMED % ("author", "nam56r_fused")
        + f' --with "cluster=h200_1 {WHOLE}" --with "cluster=h200_1 precision.deterministic=true" --with "cluster=h200_1 +overlay=long"',
        gib=40,
    ),
    "prove_native": Job(
        1, 8,
        RESUMED % ("native", "nam56r_native_dp_fused")
        + f' --with "cluster=h200_1 {WHOLE}" --with "cluster=h200_1 precision.deterministic=true" --with "cluster=h200_1 +overlay=muon"',
        gib=20,
    ),
    "prove_graphs": Job(
        1, 5,
        RESUMED % ("graphs", "nam56r_native_dp_fused")
        + ' --with "cluster=h200_1 feature.cuda_graphs.impl=transformer_engine feature.cuda_graphs.modules=[attn,mamba]"',
        gib=20,
    ),
    "prove_fp8": Job(1, 6, PROVE % ("fp8", "nam56r_native_dp_fp8") + ' --with "cluster=h200_1"', gib=20),
    "prove_beyond8": Job(
        1, 6, PROVE % ("beyond8", "nam56r_fused,nam56r_native_dp_fused") + ' --with "cluster=h200_1 +overlay=[extras,fp8]"', gib=40
    ),
    "prove_streams": Job(1, 5, PROVE % ("streams", "nam52_h200_dense_ref_v1") + f' --with "cluster=h200_1 +overlay=fused {WHOLE}"', gib=22),
    # Laws that say "not tried": the law goes where its proof holds. The author stack takes one rank in fp32, too.
    **{
        f"tried_{law}": Job(
            gpus,
            10 if preset == AUTHOR else 5,
            PROVE % (f"tried_{law}", preset) + f' --with "cluster=h200_{gpus} {words} allow.{law}=tried"',
            gib=40,
        )
        for law, (preset, gpus, words) in TRIED.items()
    },
    "prove_shared": Job(2, 5, RESUMED % ("shared", "nam56r_fused") + ' --with "cluster=h200_2 +overlay=cp"'),
    "prove_shared_native": Job(
        2, 4, RESUMED % ("shared_native", "nam56r_native_dp") + ' --with "cluster=h200_2 +overlay=cp"', gib=20
    ),
    **{
        f"prove_two_{name}": Job(
            2, 6, RESUMED % (f"two_{name}", "nam56r_native_dp_fused") + f' --with "cluster=h200_2 {words} {WHOLE}"', gib=20
        )
        for name, words in (
            ("experts", "parallel.expert=2 execution.moe.dispatcher=gathered"),
            ("tensor", "parallel.tensor=2 parallel.sequence=true"),
        )
    },
    "prove_sharded": Job(
        2, 6,
        RESUMED % ("sharded", "nam56r_fused")
        + ' --with "cluster=h200_2 +overlay=fsdp_ep"'
        ' --with "cluster=h200_2 parallel.tensor=2 parallel.sequence=true precision.fused_grad_accumulation=false'
        " feature.megatron_fsdp.enabled=true execution.moe.expert_gemm=transformer_engine"
        ' execution.m2rnn.padded_projection=false"',
    ),
    "prove_sharded_native": Job(
        2, 4, RESUMED % ("sharded_native", "nam56r_native_dp_fused") + ' --with "cluster=h200_2 +overlay=fsdp_ep"'
    ),
    # Long sequences and what determinism costs: memory and milliseconds beside each other.
    "long": Job(
        1, 5,
        "benchmarks/measure.py --out {out}/long.json --data {data} author52_32k author52_64k_pieces",
        "data",
    ),
    "long_shared": Job(2, 4, "benchmarks/measure.py --out {out}/long_shared.json --data {data} author52_32k_context", "data"),
    "deterministic": Job(
        1, 8,
        "benchmarks/measure.py --out {out}/deterministic.json --data {data} fused13 fused13_deterministic author13 author13_deterministic",
        "data",
    ),
    # The scan's kernels one by one, of both ranks, and whole steps at full depth on one GPU.
    "mamba3": Job(1, 4, "benchmarks/mamba3.py --out {out}/mamba3.json --only scan --seconds 200"),
    "mhc": Job(1, 2, "benchmarks/mhc.py --out {out}/mhc.json --sweep"),
    "stock13": Job(1, 2, "benchmarks/measure.py --profile --out {out}/stock13.json --data {data} stock13_64 fused13_whole_64", "data"),
    "full": Job(
        1, 8,
        "benchmarks/measure.py --profile --out {out}/full.json --data {data} author52_one_torch author52_one_whole native52_one_torch"
        " native52_one_whole",
        "data",
    ),
    # What is off until it has been measured, against the same without it.
    "new": Job(
        1, 8,
        "benchmarks/measure.py --profile --out {out}/new.json --data {data} author52_one_whole author52_one_new native52_one_whole"
        " native52_one_new",
        "data",
    ),
    # With the extra `flash`: what is beyond the fused overlay, one thing after the other.
    "beyond_author": Job(
        1, 7,
        "benchmarks/measure.py --profile --out {out}/beyond_author.json --data {data} author52_one_new author52_one_flash author52_one_fp8"
        " author52_one_kept author52_one_all",
        "data",
    ),
    "beyond_native": Job(
        1, 7,
        "benchmarks/measure.py --profile --out {out}/beyond_native.json --data {data} native52_one_new native52_one_extras native52_one_fp8"
        " native52_one_all",
        "data",
    ),
    # The same work on each GPU alone, beside each other, and on two together.
    "one_native": Job(1, 3, "benchmarks/measure.py --out {out}/one_native.json --data {data} native52_one_all", "data"),
    "one_author": Job(1, 3, "benchmarks/measure.py --out {out}/one_author.json --data {data} author52_one_all", "data"),
    "four": Job(4, 4, "benchmarks/measure.py --profile --out {out}/four.json --data {data} native52_four_all author52_four_all", "data"),
    **{
        f"four_{stack}_{name}": Job(
            4, minutes,
            f"benchmarks/measure.py --profile --out {{out}}/four_{stack}_{name}.json --data {{data}} {stack}52_four_{name}",
            "data",
        )
        for stack, name, minutes in (
            ("native", "gathered", 2), ("native", "data", 1.6), ("author", "data", 2), ("native", "fsdp", 2), ("native", "tensor", 2),
            ("author", "fsdp", 4), ("author", "tensor", 2.7), ("native", "captured", 2.5), ("author", "captured", 2.5),
        )
    },
    "four_fsdp": Job(4, 4, GPU_TEST % "test_four_gpus.py", gib=20),
    "prove_four": Job(
        4, 6,
        RESUMED % ("four", "nam56r_native_dp_fused")
        + f' --with "cluster=h200_4 parallel.expert=4 execution.moe.dispatcher=gathered {WHOLE}"'
        ' --with "cluster=h200_4 +overlay=[tp_sp_ep,fsdp_ep]"',
        gib=20,
    ),
    # The same on eight, and experts over all of them by each dispatcher.
    "eight": Job(
        8, 4, "benchmarks/measure.py --profile --out {out}/eight.json --data {data} native52_eight_all author52_eight_all", "data"
    ),
    **{
        f"eight_{stack}_{name}": Job(
            8, 4,
            f"benchmarks/measure.py --profile --out {{out}}/eight_{stack}_{name}.json --data {{data}} {stack}52_eight_{name}",
            "data",
        )
        for stack, name in (("native", "gathered"), ("native", "exchanged"), ("native", "fsdp"), ("author", "fsdp"))
    },
    "two": Job(2, 5, "benchmarks/measure.py --profile --out {out}/two.json --data {data} native52_two_all author52_two_all", "data"),
    # Layouts of two GPUs against each other.
    **{
        f"layout_{stack}_{name}": Job(
            2, 2,
            f"benchmarks/measure.py --profile --out {{out}}/layout_{stack}_{name}.json --data {{data}} {stack}52_two_{name}",
            "data",
        )
        for name in ("data", "gathered", "exchanged", "tensor", "context")
        for stack in ("native", "author")
    },
    # Experts over two GPUs once the router has learned, and where each gets as many tokens.
    **{
        how: Job(
            2, minutes,
            f"benchmarks/measure.py --profile --out {{out}}/{how}.json --data {{data}} native52_two_gathered_{how} native52_two_data_{how}",
            "data",
        )
        for how, minutes in (("settled", 6.5), ("balanced", 3.5))
    },
    "travel": Job(2, 1.5, "benchmarks/travel.py --out {out}/travel.json"),
    "fp8": Job(
        1, 8,
        "benchmarks/measure.py --profile --out {out}/fp8.json --data {data} native52_64_torch native52_64 native52_64_tensorwise"
        " native52_64_blockwise",
        "data",
    ),
    "fp8_projections": Job(1, 3, "benchmarks/fp8.py --out {out}/fp8_projections.json"),
    # 1,000 steps of ours and of Megatron's default stack, of a shared top-k and of each layer's own; plotted from what comes back.
    **{
        f"losses_{name}": Job(
            1, 5,
            f"benchmarks/losses.py train {name} --out {{out}}/losses --data {{data}} --limit 500",
            # They take 31 and 39. The host launches small steps, and several beside each other take longer; a graph is launched at once.
            "data", gib=43 if WHOLE.split()[0] in RUNS[name].overrides else 66,
        )
        for name in RUNS
    },
    # Checkpoints and other people's trainers.
    "trained": Job(
        1, 15, "benchmarks/trained.py {out}/trained --data {data} --json {out}/trained.json schedule.global_batch_size=8", "data", gib=55
    ),
    "export": Job(1, 6, GPU_TEST % "test_hf.py", gib=20),
    "export_kernels": Job(1, 2, GPU_TEST % "test_hf_kernels.py", gib=10),
    "serving": Job(1, 3, "benchmarks/serving.py {scratch}/serving --json {out}/serving.json"),
    "adapters": Job(1, 10, GPU_TEST % "test_nemo_lora.py", gib=20),
    "bridge": Job(1, 6, "benchmarks/nemo.py --out {out}/nemo.json --logs {out}/nemo --data {data} author13", "data"),
    "bridge_resumed": Job(
        1, 5, "benchmarks/nemo.py --out {out}/resumed.json --logs {out}/resumed --data {data} smoke_resumed author13_resumed", "data",
        gib=60,
    ),
    **{
        f"continued_{name}": Job(1, 14, f"benchmarks/continued.py {{scratch}}/{name} --json {{out}}/continued_{name}.json {name}", gib=90)
        for name in ("llama_3_1_8b", "nemotron_3_nano_30b_a3b", "qwen3_30b_a3b")
    },
    "loops": Job(
        1, 6, "benchmarks/nemo.py --out {out}/loops.json --logs {out}/loops --data {data} author13_loops native13_loops", "data", gib=60
    ),
    # Presets at full depth, 100 steps, with receipts.
    **{
        f"receipt_{name}": Job(
            gpus, minutes,
            f"-m launch run conf={preset} cluster=h200_bare cluster.gpus_per_node={gpus} 'cluster.waivers.limits=a borrowed host'"
            " 'cluster.waivers.storage=a borrowed host' cluster.storage.receipts={out}/receipts cluster.storage.scratch={scratch}"
            f" revision={{revision}} data=built data.path={{data}} schedule.train_steps={steps} schedule.decay_steps={steps}"
            f" schedule.micro_batch_size={micro} schedule.global_batch_size={batch}",
            "data", part=PART,
        )
        for name, preset, micro, batch, steps, minutes, gpus in (
            ("author", f"nam56r_fused {WHOLE}", 2, 16, 100, 9, 1),
            ("author_64", f"nam56r_fused {WHOLE} optim.warmup_steps=4", 2, 64, 12, 4.4, 1),
            ("native", f"nam56r_native_dp_fused {WHOLE}", 4, 16, 100, 4.6, 1),
            ("native_64", f"nam56r_native_dp_fused {WHOLE} optim.warmup_steps=4", 4, 64, 12, 2.8, 1),
            ("author_fp8_64", f"nam56r_fused +overlay=[extras,fp8] {KEPT} {PREPARED} {WHOLE} optim.warmup_steps=4", 2, 64, 12, 5, 1),
            ("native_fp8_64", f"nam56r_native_dp_fused +overlay=[extras,fp8] {WHOLE} optim.warmup_steps=4", 4, 64, 12, 3.5, 1),
            ("native_two_fp8", f"nam56r_native_dp_fused +overlay=[extras,fp8] {WHOLE} optim.warmup_steps=4", 4, 128, 12, 3.7, 2),
            ("author_two_fp8", f"nam56r_fused +overlay=[extras,fp8] {KEPT} {PREPARED} {WHOLE} optim.warmup_steps=4", 2, 128, 12, 5, 2),
            ("native_four_fp8", f"nam56r_native_dp_fused +overlay=[extras,fp8] {WHOLE}", 4, 64, 100, 4.6, 4),
            ("author_four_fp8", f"nam56r_fused +overlay=[extras,fp8] {KEPT} {PREPARED} {WHOLE} optim.warmup_steps=4", 2, 256, 12, 5, 4),
            ("native_two", f"nam56r_native_dp_fused {WHOLE} optim.warmup_steps=4", 4, 128, 12, 3.5, 2),
            ("native_eight_fp8", f"nam56r_native_dp_fused +overlay=[extras,fp8] {WHOLE}", 4, 64, 100, 4.6, 8),
            *(
                (f"{stack}_eight{suffix}_{batch}", f"{preset} {more} {WHOLE} optim.warmup_steps=4", micro, batch, 12, 5, 8)
                for stack, preset, micro, kept in (
                    ("native", "nam56r_native_dp_fused", 4, ""), ("author", "nam56r_fused", 2, f" {KEPT} {PREPARED}"),
                )
                for suffix, more in (("", ""), ("_fp8", f"+overlay=[extras,fp8]{kept}"))
                for batch in (64, 256, 512)
            ),
            ("native_fp8", f"nam56r_native_dp_fused +overlay=[extras,fp8] {WHOLE}", 4, 16, 100, 4.6, 1),
            ("sparse", "nam52_h200_sparse_8_11_ref_v1 +overlay=fused", 2, 4, 100, 5, 1),
            ("4full", "nam52r_h200_4full_9sparse_candidate_v1 +overlay=fused", 2, 4, 100, 5, 1),
            ("streams", f"nam52_h200_dense_ref_v1 +overlay=fused {WHOLE}", 1, 4, 100, 3.7, 1),
            ("plain", f"nam52_h200_dense_no_mhc_recovery_v1 +overlay=fused {WHOLE}", 1, 4, 100, 2.7, 1),
            ("muon", f"nam56r_fused +overlay=muon {WHOLE}", 2, 4, 50, 3.5, 1),
            ("ngrams", f"nam56r_fused {AUTHOR13} {NGRAMS} feature.fim.enabled=true", 2, 4, 100, 2, 1),
        )
    },
}  # fmt: skip


def main(words: Sequence[str] | None = None, jobs: dict[str, Job] = JOBS) -> int:
    told = [f"  {name:30}{job.gpus} GPU{'s' * (job.gpus != 1)}, {job.minutes:g} min" for name, job in jobs.items()]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="\n".join(["jobs, the most worth first, and their estimates:", *told]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of logs and records; what ended well in it is not run again"
    )
    parser.add_argument("--gpus", type=int, default=1, help="of this host (default: 1)")
    parser.add_argument("--minutes", type=float, default=60.0, help="until all is over (default: 60)")
    parser.add_argument("--data", type=Path, help="a built dataset, in the place of the one that `data` makes")
    parser.add_argument("--revision", help="of the code, for receipts, where there is no .git (default: git's)")
    parser.add_argument("names", nargs="*", metavar="JOB", help="those alone (default: all)")
    options = parser.parse_args(words)
    if unknown := [name for name in options.names if name not in jobs]:
        parser.error(f"no job {', '.join(unknown)}; there are: {', '.join(jobs)}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(set(filter(None, visible.split(",")))) < options.gpus:
        parser.error(f"--gpus {options.gpus}, and CUDA_VISIBLE_DEVICES names {visible or 'none'}")
    try:
        revision = source.read(ROOT, options.out, options.revision).revision
    except Refused as refused:  # as each receipt would be
        parser.error(f"--revision: {refused}")
    if not revision:
        parser.error("no .git here: --revision says which code this is")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sitting = Sitting(options.out.resolve(), options.gpus, options.minutes, options.data, revision)
    return sitting.run({name: jobs[name] for name in options.names or jobs})


class Sitting:
    def __init__(self, out: Path, gpus: int, minutes: float, data: Path | None, revision: str):
        self.out, self.data, self.revision = out, data or out / CORPUS, revision
        self.record, self.end = out / "sitting.json", time.monotonic() + 60 * minutes
        self.done: dict[str, Any] = json.loads(self.record.read_text()) if self.record.exists() else {}
        self.given, self.gpus = data is not None, gpus
        self.taken, self.running = dict.fromkeys(range(gpus), 0.0), {}
        self.failed = False

    def run(self, jobs: dict[str, Job]) -> int:
        waiting = {name: job for name, job in jobs.items() if not self.ended_well(name)}
        try:
            while waiting or self.running:
                for name, job in list(waiting.items()):
                    if self.begin(name, job):
                        del waiting[name]
                    elif self.why_not(job) == BUSY:
                        break
                self.look()
                if not self.running and all(self.why_not(job) for job in waiting.values()):
                    break
                time.sleep(0.2)
        finally:
            for name in list(self.running):
                self.over(name, "killed")
        for name, job in waiting.items():
            print(f"not begun: {name}: {self.why_not(job)}")
        return int(self.failed or bool(waiting))

    def ended_well(self, name: str) -> bool:
        return (name == "data" and self.given) or self.done.get(name, {}).get("code") == 0

    def why_not(self, job: Job) -> str:
        """Why it cannot begin now; nothing if it can."""
        if job.after and not self.ended_well(job.after):
            return f"`{job.after}` has not ended well"
        if job.gpus > self.gpus:
            return f"it takes {job.gpus} GPU{'s' * (job.gpus != 1)}"
        if time.monotonic() + 60 * job.minutes > self.end:
            return f"it takes {job.minutes:g} minutes"
        return BUSY if job.gpus > len(self.free(job)) else ""

    def free(self, job: Job) -> list[int]:
        """The least taken first."""
        return sorted((gpu for gpu, gib in self.taken.items() if gib + job.takes <= SHARED), key=self.taken.__getitem__)

    def begin(self, name: str, job: Job) -> bool:
        if self.why_not(job):
            return False
        taken = self.free(job)[: job.gpus]
        for gpu in taken:
            self.taken[gpu] += job.takes
        places = {"{out}": str(self.out), "{data}": str(self.data), "{revision}": self.revision}
        # `launch` refuses caches beside the data.
        places["{scratch}"] = str(Path(tempfile.gettempdir()) / f"{self.out.name}.scratch")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(n) for n in self.taken]
        mine = [names[n] for n in taken]
        if mine:  # sittings beside each other have other GPUs, so other ports
            places["{port}"] = str(29510 + int(mine[0] if mine[0].isdigit() else taken[0]))
        env, text = os.environ | {"TRITON_CACHE_AUTOTUNING": "1"}, job.command
        # tests/gpu/passes.py takes in what a job's tests write
        env |= {"NAM_REVISION": self.revision, "NAM_GPU_PASSES": str(self.out / f"passes-{name}.json")}
        if visible is not None or len(taken) < len(self.taken):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            text += job.part
        command = [sys.executable]
        for word in shlex.split(text):
            for place, path in places.items():
                word = word.replace(place, path)
            command.append(word)
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        log = (self.out / f"{name}.log").open("w")
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        self.running[name] = process, taken, job.takes, time.monotonic()
        print(f"begun: {name}" + f" on {taken}" * bool(taken), flush=True)
        return True

    def look(self) -> None:
        for name, (process, *_) in list(self.running.items()):
            if process.poll() is not None:
                self.over(name, process.returncode)
            elif time.monotonic() > self.end:
                self.over(name, "killed")

    def over(self, name: str, code: int | str) -> None:
        """Write down how a job ended, and give its GPUs back."""
        process, taken, gib, begun = self.running.pop(name)
        ranks = linux.descendants(linux.processes(), process.pid)  # torchrun gives each rank a session of its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        send(signal.SIGKILL, ranks)
        process.wait()
        for gpu in taken:
            self.taken[gpu] -= gib
        self.failed |= code != 0
        self.done[name] = {"code": code, "minutes": round((time.monotonic() - begun) / 60, 2)}
        whole = self.record.with_suffix(".part")  # a sitting may be killed at any time
        whole.write_text(json.dumps(self.done, indent=1) + "\n")
        whole.replace(self.record)
        print(
            f"{'ended' if code == 0 else f'failed ({code})'}: {name}, {self.done[name]['minutes']:.1f} min", flush=True
        )


if __name__ == "__main__":
    sys.exit(main())
