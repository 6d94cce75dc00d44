"""Proofs of recipes that nobody wrote: python tests/prove/drawn.py NUMBER [--seed N] [FILE]

Each is a preset with a layout and changes drawn at random. It has to be proven or refused by name; what differs, does not run or ends in
anything else is printed with the command that runs it again. FILE gets them as JSON.
"""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

from nam_megatron.errors import FINDINGS, OK, Refused, finish
from nam_megatron.prove import compare, cut
from nam_megatron.prove.__main__ import said
from nam_megatron.prove.compare import Row
from nam_megatron.prove.every import record
from nam_megatron.prove.proof import PROVEN, prove
from nam_megatron.recipe import conf_dir, load
from nam_megatron.words.argtypes import count, whole

STEPS = 2
SHARED = "execution.moe.dispatcher=alltoall"  # of experts
OWN = "lane.name=drawn"
FSDP = ("feature.megatron_fsdp.enabled=true", "precision.fused_grad_accumulation=false")
LAYOUTS = (
    ("parallel.tensor=2", "parallel.sequence=true"), ("parallel.tensor=4", "parallel.sequence=true"), ("parallel.tensor=2",),
    ("parallel.pipeline=2",), ("parallel.pipeline=2", "parallel.virtual_pipeline=2"), ("parallel.context=2",), ("parallel.context=4",),
    ("parallel.expert=2", SHARED), ("parallel.expert=2", "parallel.expert_tensor=2", SHARED), ("parallel.expert=4", SHARED),
    FSDP, (*FSDP, "parallel.expert=2", SHARED),
)  # fmt: skip
CHANGES = (
    ("feature.recompute.granularity=full", "feature.recompute.method=uniform", "feature.recompute.layers=1"),
    ("feature.recompute.granularity=full", "feature.recompute.method=block", "feature.recompute.layers=2"),
    ("feature.recompute.granularity=selective", "feature.recompute.modules=[moe_act,layernorm,mla_up_proj]"),
    ("feature.recompute.granularity=selective", "feature.recompute.modules=[core_attn,mlp]"),
    ("feature.mtp.depths=1",), ("feature.mtp.depths=2",), ("feature.mtp.depths=2", "feature.mtp.pattern=AEM"),
    ("feature.mhc.streams=2", "feature.mhc.kernels=naive"),
    ("feature.ngram_hash.enabled=true", "feature.ngram_hash.buckets=1024"), ("precision.deterministic=true",),
    ("precision.cross_entropy=native",), ("feature.distributed_optimizer.enabled=false",),
    ("feature.distributed_optimizer.reshardable=true",), ("schedule.micro_batch_size=2",),
    ("model.tied_embeddings=true",), ("model.normalization=LayerNorm",), ("model.activation=swiglu",), ("model.activation=gelu",),
    ("model.linear_bias=true",), ("model.zero_centered_norms=true",), ("model.pattern=AMAM", "model.depth=4"),
    ("model.pattern=AEME", "model.depth=8"), ("model.pattern=AEMEAEMEAEMR", "model.depth=12"), ("model.pattern=AEMER", "model.depth=10"),
    ("model.letters.A=attention",), ("lane.blocks.M=mamba2", OWN), ("lane.blocks.M=gdn", OWN), ("lane.blocks.R=mamba3", OWN),
    ("model.blocks.attention.qk_norm=true",), ("model.blocks.attention.output_gate=true",), ("model.blocks.attention.qkv_bias=true",),
    ("model.blocks.attention.window=8",), ("model.blocks.attention.rotary_percent=0.5",),
    ("execution.mla.kernels=megatron",), ("model.blocks.mla.latent_norm=false",), ("model.blocks.mla.q_lora_rank=null",),
    ("model.blocks.dsa.full_every=1",), ("model.blocks.dsa.full_every=2",), ("model.blocks.dsa.indexer_loss_coeff=null",),
    ("execution.dsa.kernels=megatron", "model.blocks.dsa.full_every=1"), ("execution.dsa.query_pieces=2",),
    ("execution.moe.dispatcher=allgather",), ("execution.moe.dispatcher=local",), ("model.blocks.moe.balancing=seq_aux_loss",),
    ("execution.moe.dispatcher=local", "execution.moe.expert_gemm=torch"),
    ("model.blocks.moe.balancing=none",), ("model.blocks.moe.score_function=softmax", "model.blocks.moe.expert_bias=false"),
    ("model.blocks.moe.expert_bias=false",), ("model.blocks.moe.z_loss_coeff=0.01",), ("model.blocks.moe.top_k=1",),
    ("model.blocks.moe.shared_expert_hidden_size=null",), ("model.blocks.moe.shared_expert_gate=true",),
    ("model.blocks.moe.grouped_gemm=false",), ("model.blocks.moe.latent_size=32",), ("model.blocks.moe.routed_scaling=2.5",),
    ("execution.moe.shared_overlap=true",), ("execution.moe.fused_weighted_squared_relu=true",),
    ("execution.mamba2.strided=true",), ("execution.mamba3.recompute=in_proj",), ("execution.mamba3.head_pieces=2",),
    ("model.blocks.mamba3.mimo_rank=1",), ("model.blocks.mamba3.rope_fraction=1.0",), ("model.blocks.m2rnn.gradient_clip=1.0",),
)  # fmt: skip
PRESETS = sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))


def draw(chance: random.Random) -> tuple[str, tuple[str, ...]]:
    """A preset and its overrides: on one rank, or in one or two kinds of parallelism, with up to four changes that are accepted there."""
    ours = [name for name in PRESETS if name.startswith("nam")]
    preset = chance.choice(ours if chance.random() < 0.7 else PRESETS)
    layout = [word for words in chance.sample(LAYOUTS, chance.choice((0, 1, 1, 2))) for word in words]
    degrees = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
    for key, _, value in (word.removeprefix("parallel.").partition("=") for word in layout):
        if key in degrees:
            degrees[key] = max(degrees[key], int(value))
    needed = max(degrees["tensor"] * degrees["pipeline"] * degrees["context"], degrees["expert"])
    least = needed * (2 if set(FSDP) <= set(layout) and degrees["expert"] == 1 else 1)
    gpus = next((n for n in (1, 2, 4, 8) if n >= least), 8)
    words = _last(
        f"cluster=h200_{gpus}", f"parallel.sequence={str(degrees['tensor'] > 1).lower()}", "parallel.expert_tensor=1",
        *layout, *(f"parallel.{key}={n}" for key, n in degrees.items()),
    )  # fmt: skip
    many = chance.choice((0, 1, 2, 3, 4)) if _accepted(preset, words) else 0
    for change in chance.sample(CHANGES, len(CHANGES)):
        if many and _accepted(preset, changed := _last(*words, *change)):
            words, many = changed, many - 1
    return preset, words


def _accepted(preset: str, words: tuple[str, ...]) -> bool:
    try:
        plan = cut.pair(load(preset, words), "cpu", STEPS).layout.plan
        return not any(compare.refusals(plan, "cpu"))
    except Refused:
        return False


def _last(*words: str) -> tuple[str, ...]:
    """Of each key the last word."""
    return tuple({word.partition("=")[0]: word for word in words}.values())


def outcome(preset: str, words: tuple[str, ...]) -> tuple[str, str]:
    """A verdict, and why."""
    try:
        proof = prove(load(preset, words), "cpu", STEPS)
    except Refused as refused:
        return "refused", "; ".join(f"{p.key}: {p.message}" for p in refused.problems)
    except Exception as error:
        return "traceback", repr(error)
    why = [f"{part.title}: {said(part)}" for part in proof.parts if part.broken or part.first]
    return proof.word, "; ".join(why) or "; ".join(
        rounding(row) for part in proof.parts for row in part.rows if row.note
    )


def rounding(row: Row) -> str:
    return f"{row.what} of {row.name}, step {row.step}: {row.off:.1e}, {row.note}"


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=count, help="of recipes")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--seed", type=whole, default=0)
    words = parser.parse_intermixed_args()
    chance, found = random.Random(words.seed), []
    for _ in range(words.number):
        preset, overrides = draw(chance)
        begun = time.monotonic()
        verdict, why = outcome(preset, overrides)
        row = {
            "conf": " ".join((preset, *overrides)),
            "verdict": verdict,
            "seconds": round(time.monotonic() - begun, 1),
        }
        found.append(row | ({"why": why} if why else {}))
        sys.stdout.write(f"{verdict}\tconf={row['conf']}\t{why}\n")
        sys.stdout.flush()
        if words.file:
            record(words.file, found)
    counts = Counter(row["verdict"] for row in found)
    sys.stdout.write(", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + "\n")
    return OK if counts.keys() <= {PROVEN, "refused"} else FINDINGS


if __name__ == "__main__":
    finish(command)
