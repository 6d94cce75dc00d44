"""What tests of kernels share, on a GPU and in Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "blocks"))
sys.path.insert(0, str(Path(__file__).parent))

import passes

chosen: list[str] = []  # of these tests, by their ids without the folder
passed: set[str] = set()


def pytest_collection_finish(session):
    chosen[:] = [i.nodeid.removeprefix("tests/gpu/") for i in session.items if i.nodeid.startswith("tests/gpu/")]


def pytest_runtest_logreport(report):
    """Written test by test: a host that is taken away, or a limit of time, leaves what passed until then."""
    if report.when == "call" and report.passed and torch.cuda.is_available():
        passed.add(report.nodeid.removeprefix("tests/gpu/"))
        if done := passed.intersection(chosen):
            path = Path(os.environ.get("NAM_GPU_PASSES", passes.RECORD))
            run = passes.run_of(done, torch.cuda.get_device_name(), torch.cuda.device_count())
            passes.write(passes.newest([run, *passes.read(path)]), path)


def pytest_terminal_summary(terminalreporter, config):
    if "gpu" in (config.option.markexpr or "") and not torch.cuda.is_available():
        terminalreporter.section("when these tests last passed on a GPU")
        terminalreporter.write_line("\n".join(line for line, _ in passes.files(passes.read(), chosen)))


@pytest.fixture
def ready(monkeypatch):
    """Memory comes filled with NaN, and the interpreter is mended where it runs the kernels."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.mend(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
