"""The whole training program on a CPU: Megatron's pretrain() in forked ranks over gloo, with CUDA, NCCL and TE pretended.

`fork(world, job)` runs `job()` as each rank of a torchrun would see it. What it cannot show: kernels, streams and their overlap, CUDA
graphs, memory, NCCL. The harness does the same for a bare model.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import harness
import megatron.core.ssm.mamba_mixer as mamba_mixer
import megatron.core.tensor_parallel.random as rng
import megatron.core.utils
import modules
import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.training import training

from nam_megatron.runtime import pretrain, readings, stack


@dataclass(frozen=True)
class Rank:
    """How one rank ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def fork(world: int, job: Callable[[], int | None], limit_s: float = 180.0) -> list[Rank]:
    """`job`'s exit code (None is 0) and output on each rank. A rank that fails ends the others, as under torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_child, args=(job, r, world, port, Path(folder))) for r in range(world)]
        for child in children:
            child.start()
        waiting = list(children)
        while waiting and limit_s > 0:
            multiprocessing.connection.wait([c.sentinel for c in waiting], 1)
            limit_s -= 1
            if any(c.exitcode for c in children):
                for child in waiting:
                    child.join(3)  # time for a message of its own
                break
            waiting = [c for c in waiting if c.is_alive()]
        for child in children:
            child.kill()
            child.join()
        read = [[(Path(folder) / f"{r}.{name}").read_text() for name in ("out", "err")] for r in range(world)]
        return [Rank(child.exitcode, *texts) for child, texts in zip(children, read, strict=True)]


def _child(job: Callable[[], int | None], rank: int, world: int, port: int, folder: Path) -> None:
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYTORCH_ALLOC_CONF="expandable_segments:True")
    code = 1
    try:
        with pretended():
            code = job() or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Megatron's checkpoint writer keeps a manager process, which only the interpreter's regular end would stop.
    for started in multiprocessing.active_children():
        started.kill()
    os._exit(code)


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Transformer Engine keeps its state: the step is counted in each group, and a tensor's state has its moments alone.

    Megatron's distributed optimizer saves and loads that form; it cannot read back the state of torch's AdamW.
    """

    def __init__(self, params, lr, betas, eps, weight_decay, capturable, adam_w_mode):
        assert adam_w_mode and not capturable
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), params = group["betas"], [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if params:
                states = [self.state[p] for p in params]
                torch.optim._functional.adamw(
                    params, [p.grad for p in params], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
                    [torch.tensor(step - 1.0) for _ in params], amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip


class _LooksLikeCuda(torch.overrides.TorchFunctionMode):
    """Optimizers read the name of a tensor's type; some indices are pinned."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        result = func(*args, **kwargs)
        named = func is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if named else result


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """In this process from here on: a Hopper GPU, NCCL and Transformer Engine, as far as Megatron looks."""
    device = SimpleNamespace(major=9, minor=0, total_memory=2**30, name="cpu", multi_processor_count=1)
    for name, value in dict(
        device_count=lambda: 1,
        set_device=lambda *_: None,
        empty_cache=lambda: None,
        get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: device,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        initial_seed=torch.initial_seed,
    ).items():
        setattr(torch.cuda, name, value)
    init = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *a, backend, **kw: init(*a, backend="gloo", **kw)
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    megatron.core.utils._te_version = megatron.core.utils.PkgVersion("2.20.2")
    initialize = training.initialize_megatron
    training.initialize_megatron = lambda **kw: initialize(allow_no_cuda=True, **kw)

    def scan(x, *weights, D, **kw):
        """The harness's scan, in fp32 as the kernel computes; activations keep their type."""
        return modules.mamba2_scan(x.float(), *(w.float() for w in weights), D=D.float(), **kw).to(x.dtype)

    def settings(args, spec, made=pretrain.settings):
        args.apply_rope_fusion = False  # a kernel of TE
        return made(args, spec)

    stack.transformer_engine_backend, pretrain.settings = modules.CpuBackend, settings
    readings.device = lambda: {"name": "cpu"}
    with harness.patched(), _LooksLikeCuda():
        # Tensor ranks draw different weights, and checkpoints hold the state of each stream: the harness does without.
        rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        rng.initialize_rng_tracker(force_reset=True)
        mamba_mixer.mamba_split_conv1d_scan_combined = scan
        yield
