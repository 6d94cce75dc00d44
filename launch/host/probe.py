"""Run as a program by `check`, bounded in time: imports one module beside torch, or counts NVLinks, and prints one line of JSON.

python -P probe.py MODULE | nvlinks
"""

import importlib
import json
import sys
from typing import Any


def main(module: str) -> dict[str, Any]:
    try:
        return {"active": nvlinks(importlib.import_module("pynvml"))} if module == "nvlinks" else load(module)
    except BaseException as err:  # a broken install raises anything, SystemExit included
        return {"error": f"{type(err).__name__}: {err}".replace("\n", " ")[:400]}


def load(module: str) -> dict[str, Any]:
    """What torch says of itself, or `ok` for a module that loads beside it. Touches no GPU."""
    import torch

    if module != "torch":
        importlib.import_module(module)
        return {"ok": True}
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": importlib.import_module("triton").__version__,
    }


def nvlinks(nvml: Any) -> dict[str, int | None]:
    """{GPU: NVLinks that are up; None where none can be asked}. nvml: the module pynvml (nvidia-ml-py)."""
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return {str(i): _up(nvml, handle) for i, handle in enumerate(handles)}
    finally:
        nvml.nvmlShutdown()


def _up(nvml: Any, handle: Any) -> int | None:
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except nvml.NVMLError:  # a link that this GPU does not have
            continue
    return sum(states) if states else None


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
