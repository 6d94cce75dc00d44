"""Out-of-memory errors as torch and the libraries word them, in the logs where they stand."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.host import patches
from launch.record import oom

SEE = (
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
    "See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
# Of public bug reports, in torch's words from 1.13 to 2.11.
ACTIVATION = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 324.00 MiB. GPU 0 has a total capacity of 7.63 GiB of which 91.25 MiB "
    "is free. Including non-PyTorch memory, this process has 7.52 GiB memory in use. Of the allocated memory 7.29 GiB is allocated by "
    f"PyTorch, and 74.34 MiB is reserved by PyTorch but unallocated. {SEE}"
)
FRAGMENTED = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes "
    "is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated. If reserved "
    "but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and "
    "PYTORCH_CUDA_ALLOC_CONF"
)
NEIGHBOUR = (
    "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 431.38 MiB is free. Including "
    "non-PyTorch memory, this process has 57.04 GiB memory in use. Process 3130101 has 21.51 GiB memory in use. Of the allocated memory "
    "57.87 GiB is allocated by PyTorch, with 12.23 GiB allocated in private pools (e.g., CUDA Graphs), and 477.92 MiB is reserved by "
    f"PyTorch but unallocated. {SEE}"
)
OLD = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.12 GiB (GPU 5; 23.70 GiB total capacity; 22.00 GiB already "
    "allocated; 292.56 MiB free; 22.29 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
OUTSIDE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 139.80 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 138.74 GiB memory in use. Of the allocated memory 118.20 GiB is allocated by "
    f"PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated. {SEE}"
)
LIBRARIES = (
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "node-1:231:231 [0] transport/p2p.cc:273 NCCL WARN Cuda failure 2 'out of memory'",
    "node-1:231:231 [0] NCCL WARN Cuda failure 'out of memory'",
)
STEP = " [2026-11-21 05:06:02] iteration {:8d}/       5 | consumed samples:           64 | elapsed time per iteration (ms): 66852.2 |"


def traceback(error, *calls, rank=0):
    """As torch's excepthook prints it. calls: (file, function)."""
    lines = ["Traceback (most recent call last):"]
    for file, name in calls:
        lines += [f'  File "/site/{file}", line 7, in {name}', f"    {name}()"]
    return [f"[rank{rank}]: {line}" for line in [*lines, error]]


TRAIN = ("megatron/training/training.py", "train_step")
FORWARD = (
    TRAIN,
    ("megatron/core/pipeline_parallel/schedules.py", "forward_step"),
    ("megatron/core/ssm/mamba_mixer.py", "forward"),
)
BACKWARD = (
    TRAIN,
    ("megatron/core/pipeline_parallel/schedules.py", "backward_step"),
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("megatron/core/tensor_parallel/random.py", "backward"),
    ("megatron/core/ssm/mamba_mixer.py", "forward"),  # computed again
)
OPTIMIZER = (
    TRAIN,
    ("megatron/core/optimizer/optimizer.py", "step"),
    ("megatron/core/optimizer/distrib_optimizer.py", "step_with_ready_grads"),
    ("torch/optim/adamw.py", "_init_group"),
)
SETUP = (
    ("megatron/training/training.py", "setup_model_and_optimizer"),
    ("megatron/core/optimizer/distrib_optimizer.py", "__init__"),
)
GRAPHS = (
    ("megatron/training/training.py", "train"),
    ("megatron/core/transformer/cuda_graphs.py", "create_cudagraphs"),
    ("transformer_engine/pytorch/graph.py", "make_graphed_callables"),
    ("torch/autograd/graph.py", "_engine_run_backward"),
)


def one(lines):
    (found,) = oom.triage(lines)
    return found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (ACTIVATION, {"tried": 324 / 1024, "total": 7.63, "free": 91.25 / 1024, "process": 7.52, "allocated": 7.29}),
        (FRAGMENTED, {"tried": 1.70, "total": 6.0, "free": 0.0, "process": None, "allocated": 2.93, "unallocated": 2.30}),
        (NEIGHBOUR, {"tried": 448 / 1024, "total": 79.11, "process": 57.04, "others": 21.51, "allocated": 57.87, "pools": 12.23}),
        (OLD, {"tried": 3.12, "total": 23.70, "allocated": 22.00, "free": 292.56 / 1024, "unallocated": 0.29}),
    ],
)  # fmt: skip
def test_every_number_is_read(text, numbers):
    found = oom.read(text)
    assert {name: getattr(found, name) for name in numbers} == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("error", "calls", "kind", "phase"),
    [
        (ACTIVATION, FORWARD, "activation", "forward"),
        (ACTIVATION, BACKWARD, "activation", "backward"),
        (ACTIVATION, OPTIMIZER, "optimizer burst", "optimizer step"),
        (OLD, OPTIMIZER, "optimizer burst", "optimizer step"),
        (ACTIVATION, SETUP, "weights", "setup"),
        (ACTIVATION, GRAPHS, "activation", "graph capture"),
        (FRAGMENTED, BACKWARD, "fragmentation", "backward"),
        (FRAGMENTED, OPTIMIZER, "fragmentation", "optimizer step"),
        (NEIGHBOUR, FORWARD, "neighbour", "forward"),
        (OUTSIDE, BACKWARD, "workspace", "backward"),
        *((text, FORWARD, "workspace", "forward") for text in LIBRARIES),
    ],
)
def test_kind_and_phase(error, calls, kind, phase):
    found = one(traceback(error, *calls))
    assert (found.kind[0], found.phase) == (kind, phase)


def test_the_names_by_which_phases_are_told_are_megatrons(queue):
    root = patches.installed(queue)
    for file, name in {*FORWARD[:2], *BACKWARD[:2], *OPTIMIZER[:3], *SETUP[:1], *GRAPHS[:2]}:
        assert re.search(rf"def {name}\b", (root / file).read_text()), f"{name} in {file}"


def test_how_far_the_run_had_come():
    before = one(traceback(ACTIVATION, *BACKWARD))
    later = one([STEP.format(1), STEP.format(2), *traceback(ACTIVATION, *BACKWARD)])
    assert (before.steps, later.steps, later.line) == (0, 2, 2 + len(traceback(ACTIVATION, *BACKWARD)))
    assert "backward, before step 1 was finished: activation" in next(oom.told(before))
    assert "backward, after step 2: activation" in next(oom.told(later))


def test_ranks_that_print_at_once_are_taken_apart():
    a, b = traceback(ACTIVATION, *BACKWARD, rank=0), traceback(OLD, *OPTIMIZER, rank=1)
    mixed = [line for pair in zip(a, b, strict=False) for line in pair] + a[len(b) :] + b[len(a) :]
    assert sorted((o.rank, o.phase) for o in oom.triage(mixed)) == [(0, "backward"), (1, "optimizer step")]


def test_a_traceback_that_was_over_before_says_nothing():
    assert one([*traceback("ImportError: apex", *SETUP), *traceback(ACTIVATION, *FORWARD)]).phase == "forward"


def test_an_error_that_is_repeated_counts_once_with_its_traceback():
    lines = traceback(ACTIVATION, *FORWARD)
    assert one([lines[-1], *lines, lines[-1]]).phase == "forward"


def test_a_healthy_log_has_none():
    assert (
        oom.triage([STEP.format(1), "PYTORCH_ALLOC_CONF=expandable_segments:True", "memory (MB) | allocated: 1"]) == []
    )


def test_what_is_told_has_the_numbers_and_what_to_do():
    text = "\n".join(oom.told(one(traceback(NEIGHBOUR, *FORWARD, rank=3))))
    assert "rank 3" in text and "tried 0.44" in text and "other processes 21.51" in text and "launch check" in text


PIECES = st.sampled_from(
    [
        *ACTIVATION.split(". "),
        *NEIGHBOUR.split(", "),
        *LIBRARIES,
        OLD,
        "Tried to allocate ",
        "9" * 40 + " GiB",
        "nan GiB",
    ]
)


@given(st.lists(PIECES | st.text(max_size=20), max_size=8).map(" ".join) | st.text())
def test_no_text_ends_in_a_traceback(text):
    for found in oom.triage(text.splitlines()):
        list(oom.told(found))
