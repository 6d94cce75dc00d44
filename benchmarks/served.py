"""Greedy tokens of native exports by vLLM on a GPU, in vLLM's environment (no nam_megatron):

    VENV_OF_VLLM/bin/python benchmarks/served.py FILE FOLDER [FOLDER ...]

Beside them what the folder's class in transformers would say after the same tokens: where its best is another, how far below its best the
token of vLLM is. In bf16 both round, so they may part where two tokens are nearly alike; in fp32 they should not. Each folder and type is a
process of its own, with $SHARE of the GPU's memory (0.4); FILE is rewritten after each. `benchmarks/continued.py` makes such folders.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

PROMPTS, NEW = (5, 16, 33, 64), 32  # lengths; tokens for each
TYPES = ("bfloat16", "float32")


def one(folder: str, dtype: str) -> dict:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # a package more, for what greedy tokens do not need
    import torch
    import transformers
    import vllm

    llm = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=256,
                   gpu_memory_utilization=float(os.environ.get("SHARE", "0.4")))  # fmt: skip
    size = llm.llm_engine.model_config.hf_config.vocab_size
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(size, (length,), generator=generator).tolist() for length in PROMPTS]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    made = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    said = [list(of.outputs[0].token_ids) for of in made]
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).cuda().eval()
    same, gaps = 0, [0.0]
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, said, strict=True):
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
            theirs = torch.tensor(tokens, device="cuda")
            same += int((logits.argmax(-1) == theirs).sum())
            gaps.append((logits.max(-1).values - logits.gather(-1, theirs[:, None])[:, 0]).max().item())
    return {"class": type(model).__name__, "tokens": len(PROMPTS) * NEW, "same": same, "largest_gap": max(gaps)}


def main() -> int:
    if sys.argv[1] == "--one":
        print("\n" + json.dumps(one(*sys.argv[2:])))
        return 0
    import torch
    import transformers
    import vllm

    file, *folders = map(Path, sys.argv[1:])
    found: dict = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    found["folders"] = {}
    for folder in folders:
        for dtype in TYPES:
            ran = subprocess.run(
                [sys.executable, __file__, "--one", folder, dtype], capture_output=True, text=True, check=False
            )
            lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
            row = json.loads(lines[-1]) if ran.returncode == 0 else {"error": "\n".join(lines[-3:])}
            if ran.returncode:
                file.with_suffix(f".{folder.parent.name}.{dtype}.log").write_text(
                    ran.stdout + ran.stderr, encoding="utf-8"
                )
            found["folders"].setdefault(folder.parent.name, {})[dtype] = row
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(folder, dtype, row, flush=True)
    return int(any("error" in row for of in found["folders"].values() for row in of.values()))


if __name__ == "__main__":
    sys.exit(main())
