"""Small fills of a captured CUDA graph as kernels in the place of memset nodes (torch side).

cuBLAS sets the counter of its tiles to zero before most products of a step, torch those of its sums, with a memset of four bytes each. In
a graph the kernel behind a memset node begins 3.7 us after it, one behind a kernel 0.4 (medians of a step of 13 layers of the author stack,
with 121 such nodes a microbatch, on one H100: benchmarks/faster_h100.json). torch (2.11) lets a captured graph be changed before it is
instantiated; cuda-bindings is its own dependency.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from nam_megatron.errors import Problem, Refused
from nam_megatron.packages import installed

KEY = "feature.cuda_graphs.impl"
MOST = 1024  # bytes: larger ones are worth a memset
SOURCE = """
extern "C" __global__ void fill(unsigned char *at, unsigned value, unsigned element, unsigned bytes) {
    for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x)
        at[i] = value >> 8 * (i % element);
}
"""


class FilledByKernels(torch.cuda.CUDAGraph):
    """A CUDA graph that is instantiated, at the end of its capture, without small memset nodes."""

    def __init__(self) -> None:
        super().__init__(keep_graph=True)

    def capture_end(self) -> None:
        super().capture_end()
        replace(self.raw_cuda_graph())
        self.instantiate()


def replace(raw: int) -> int:
    """Put a kernel in the place of each memset node of at most MOST bytes in one row; how many there were. raw: a cudaGraph_t."""
    from cuda.bindings import driver  # type: ignore[import-untyped]

    graph, found = driver.CUgraph(raw), 0
    (count,) = _done(driver.cuGraphGetNodes(graph))[1:]
    for node in _done(driver.cuGraphGetNodes(graph, count))[0]:
        if _done(driver.cuGraphNodeGetType(node))[0] != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            continue
        (fill,) = _done(driver.cuGraphMemsetNodeGetParams(node))
        size = fill.elementSize * fill.width
        if fill.height != 1 or size > MOST:
            continue
        before = _around(driver.cuGraphNodeGetDependencies, node)
        after = _around(driver.cuGraphNodeGetDependentNodes, node)
        kernel = driver.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = _function()
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = kernel.blockDimY = kernel.blockDimZ = 1
        kernel.blockDimX = 32
        values = int(fill.dst), fill.value, fill.elementSize, size
        kernel.kernelParams = values, (ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint)
        (new,) = _done(driver.cuGraphAddKernelNode(graph, before, len(before), kernel))
        if after:
            _done(driver.cuGraphAddDependencies(graph, [new] * len(after), after, None, len(after)))
        _done(driver.cuGraphDestroyNode(node))
        found += 1
    return found


def _around(query: Any, node: Any) -> list[Any]:
    """What a node waits for, or what waits for it."""
    nodes, _, count = _done(query(node, _done(query(node))[-1]))
    return list(nodes or ())[:count]


@cache
def _function() -> Any:
    """The kernel, in the current context."""
    from cuda.bindings import driver, nvrtc

    (program,) = _done(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"fill.cu", 0, [], []))
    major, minor = torch.cuda.get_device_capability()
    _done(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    (size,) = _done(nvrtc.nvrtcGetCUBINSize(program))
    binary = b" " * size
    _done(nvrtc.nvrtcGetCUBIN(program, binary))
    (module,) = _done(driver.cuModuleLoadData(binary))
    return _done(driver.cuModuleGetFunction(module, b"fill"))[0]


def _done(answer: tuple) -> tuple:
    """What a call of CUDA gave; its first part says whether it went well."""
    status, *rest = answer
    if int(status) != 0:
        raise Refused(f"the graph of a step could not be changed: {status!r}", key=KEY, hint=f"set `{KEY}=none`")
    return tuple(rest)


def unserved() -> Iterator[Problem]:
    """A host without what changes graphs."""
    if installed("cuda-bindings") is None:
        message = "a graph of the whole step is changed with cuda-bindings, which torch wants to have, and which is not installed"
        yield Problem(message, key=KEY, hint=f"install cuda-bindings, or set `{KEY}=none`")
