"""What Triton makes of kernels for an H200, on a host without one."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type


def compiles(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each kernel that would be launched from here on, compiled as the launcher would, by its name. Nothing runs."""
    compiled: dict[str, Any] = {}

    def run(self, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        free = [p.name for p in self.params if not p.is_constexpr and not p.do_not_specialize]
        constants = {p.name: values[p.name] for p in self.params if p.is_constexpr}
        constants |= {name: value for name, value in values.items() if value is None}
        # As the launcher has it, an argument of 1 is a constant, and a multiple of 16 is known to be one.
        constants |= {name: 1 for name in free if type(values[name]) is int and values[name] == 1}
        types = {name: "constexpr" if name in constants else mangle_type(values[name]) for name in self.arg_names}
        even = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(self.arg_names)
            if isinstance(value := values[name], torch.Tensor)
            or (name in free and name not in constants and type(value) is int and value % 16 == 0)
        }
        source = (GluonASTSource if self.is_gluon() else ASTSource)(self, types, constants, even)
        compiled[self.fn.__name__] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    return compiled


def stack(kernel: Any, folder: Path) -> int:
    """Bytes of a thread's registers that went to memory. kernel: one of `compiles`. folder: for the binary."""
    binary = folder / "cubin"
    binary.write_bytes(kernel.asm["cubin"])
    usage = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    said = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
    return int(said.partition(" STACK:")[2].split()[0])
