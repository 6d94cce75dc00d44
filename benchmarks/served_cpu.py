"""Greedy tokens of native exports by SGLang on a CPU, in SGLang's environment (no nam_megatron, no GPU):

    VENV_OF_SGLANG/bin/python benchmarks/served_cpu.py FILE FOLDER [FOLDER ...]

Its `sgl_kernel` of the registry is a GPU's and cannot be loaded here: a stand-in takes its place, of which each kernel that is called
raises, so that SGLang's own layers in torch compute. Beside the tokens what the folder's class in transformers would say after the same
ones, in fp32. FILE is rewritten after each folder; one that ends neither in $LIMIT seconds (400) nor well has an error.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS, NEW = (5, 12, 12, 20), 24  # lengths; tokens for each
STAND_IN = """
import importlib.machinery, importlib.util, pathlib, sys, types
__version__ = "0.4.10"
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def missing(*args, **named):
        raise NotImplementedError(f"sgl_kernel's {name} on a CPU")
    return missing
class Parts:
    def find_spec(self, name, path, target=None):
        if name == "sgl_kernel.scalar_type":  # plain Python, of which a table is made
            real = next(p for p in map(pathlib.Path, sys.path) if (p / "sgl_kernel" / "scalar_type.py").is_file())
            return importlib.util.spec_from_file_location(name, real / "sgl_kernel" / "scalar_type.py")
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Parts())
"""


def one(folder: str) -> dict:
    import sglang
    import torch
    import transformers

    words = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
    engine = sglang.Engine(
        model_path=folder, device="cpu", dtype="float32", skip_tokenizer_init=True, disable_cuda_graph=True, log_level="error",
        disable_radix_cache=True, mem_fraction_static=0.05, max_total_tokens=2048, max_running_requests=4, **words,
    )  # fmt: skip
    size = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(size, (length,), generator=generator).tolist() for length in PROMPTS]
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    said = [of["output_ids"] for of in engine.generate(input_ids=prompts, sampling_params=sampling)]
    engine.shutdown()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    same, gaps = 0, [0.0]
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, said, strict=True):
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            theirs = torch.tensor(tokens)
            same += int((logits.argmax(-1) == theirs).sum())
            gaps.append((logits.max(-1).values - logits.gather(-1, theirs[:, None])[:, 0]).max().item())
    return {"class": type(model).__name__, "tokens": sum(map(len, said)), "same": same, "largest_gap": max(gaps)}


def main() -> int:
    if sys.argv[1] == "--one":
        print("\n" + json.dumps(one(sys.argv[2])))
        return 0
    from importlib.metadata import version

    file, *folders = map(Path, sys.argv[1:])
    found: dict = {name: version(name) for name in ("sglang", "torch", "transformers")} | {"folders": {}}
    with tempfile.TemporaryDirectory() as beside:
        for name, text in {"sgl_kernel": STAND_IN, "vllm": "", "vllm/_custom_ops": "rotary_embedding = None\n"}.items():
            (Path(beside) / name).mkdir()
            (Path(beside) / name / "__init__.py").write_text(text, encoding="utf-8")
        more = {"PYTHONPATH": beside, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        for folder in folders:
            line = ["timeout", os.environ.get("LIMIT", "400"), sys.executable, __file__, "--one", folder]
            ran = subprocess.run(line, env=os.environ | more, capture_output=True, text=True, check=False)
            lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
            wrong = next((x for x in reversed(lines) if "Error" in x), f"ended with {ran.returncode}")
            row = json.loads(lines[-1]) if ran.returncode == 0 else {"error": wrong}
            found["folders"][folder.parent.name] = row
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(folder, row, flush=True)
    return int(any("error" in row for row in found["folders"].values()))


if __name__ == "__main__":
    sys.exit(main())
