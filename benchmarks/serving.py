"""A whole model exported, opened and decoded: python benchmarks/serving.py FOLDER [--json FILE]

NAM56R's author stack with weights drawn at random, 52 layers: how long export and opening take and what memory they need, what 64 sequences
of 4,096 tokens are remembered by, beside the budget's forecast, and what a step takes, beside the time in which an H200 reads what a step
has to read: by plain torch, and by our kernels. benchmarks/serving_h200.json is one H200's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from nam_megatron.budget.serving import serve
from nam_megatron.compile.lower import translate
from nam_megatron.generate import Options, decode
from nam_megatron.hf import describe, distributed, fused
from nam_megatron.hf.model.modeling_nam import NamCache, NamForCausalLM
from nam_megatron.hf.opened import open_model
from nam_megatron.recipe import load

ROWS, PROMPT, NEW = 64, 64, 40
READ = 4  # sequences of the whole length that are read at once
# The command and, on stdout, its peak of the host's memory; rusage of children begins with what this process holds, all the weights.
EXPORT = """
import sys
from nam_megatron.hf.__main__ import main
code = main(sys.argv[1:])
sys.exit(code or print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))))
"""
BYTES_A_SECOND = 4.8e12  # of an H200, by its data sheet


def decoded(model: NamForCausalLM, held: int) -> dict[str, float]:
    """What reading and decoding take. held: bytes of the weights."""
    length, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    whole, reads = torch.randint(0, vocabulary, (READ, length), device="cuda"), []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.monotonic()
        with torch.inference_mode():
            model(whole, past_key_values=NamCache(length), logits_to_keep=1)
        torch.cuda.synchronize()
        reads.append(time.monotonic() - began)
    torch.cuda.empty_cache()
    cache, steps, last = NamCache(length), [], time.monotonic()
    prompts = torch.randint(0, vocabulary, (ROWS, PROMPT)).tolist()
    for _ in decode(model, prompts, Options(NEW), cache):
        torch.cuda.synchronize()
        steps.append(time.monotonic() - last)
        last = time.monotonic()
    free, total = torch.cuda.mem_get_info()  # behind a step: what the allocator keeps counts, as in the forecast
    step = statistics.median(steps[5:])
    return {
        "read_tokens_per_s": round(READ * length / min(reads[1:]), 1),
        "cache_gib": round(cache.nbytes / 2**30, 3),
        "in_use_gib": round((total - free) / 2**30, 3),
        "grown_gib": round((torch.cuda.memory_allocated() - held) / 2**30, 3),
        "first_s": round(steps[0], 2),
        "step_ms": round(1e3 * step, 1),
        "tokens_per_s": round(ROWS / step, 1),
        "floor_ms": round(1e3 * (held + cache.nbytes) / BYTES_A_SECOND, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    lowering = translate(load("nam56r_fused", ["cluster=h200_1"]))
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device="cuda")
        if "norm" in key and key.endswith("weight"):
            return (1 + 0.1 * values).to(dtype).cpu()
        wide = len(shape) > 1 and "bias" not in key
        return (values * (shape[-1] ** -0.5 if wide else 0.1)).to(dtype).cpu()

    parts = [(key, shape, t.dtype) for t in describe.tensors(describe.config(lowering.plan)) for key, shape in t.parts]
    weights = {key: drawn(key, shape, distributed.DTYPES[dtype]) for key, shape, dtype in parts}
    checkpoint, export = words.folder / "checkpoint", words.folder / "export"
    distributed.write(checkpoint, weights, lowering)
    found = {"gpu": torch.cuda.get_device_name(), "torch_version": torch.__version__, "preset": "nam56r_fused"}
    found |= {"parameters": sum(w.numel() for w in weights.values()), "sequences": ROWS}
    del weights
    began = time.monotonic()
    command = [sys.executable, "-c", EXPORT, "export", str(checkpoint), str(export)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found["export_s"] = round(time.monotonic() - began, 1)
    found["export_peak_rss_gib"] = round(int(said.split()[-1]) / 2**20, 2)
    began = time.monotonic()
    model = open_model(export, torch.bfloat16, "cuda")
    found["open_s"] = round(time.monotonic() - began, 1)

    held, length = torch.cuda.memory_allocated(), model.config.max_position_embeddings
    (forecast,) = serve(lowering.plan, ROWS, length)
    found |= {
        "length": length,
        "weights_gib": round(held / 2**30, 3),
        "weights_forecast_gib": round(forecast.weights / 2**30, 3),
        "cache_forecast_gib": round((forecast.cache("contiguous") + forecast.recurrent) / 2**30, 3),
        "in_use_forecast_gib": round(forecast.total("contiguous") / 2**30, 3),
        "torch": decoded(model, held),
    }
    fused.fuse(model)
    found["nam_megatron"] = decoded(model, held)
    text = json.dumps(found, indent=1)
    print(text)
    if words.json:
        words.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
