"""Options of the test suite, and what all of it shares."""

import gc
import os
import signal
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import settings
from tiers import SLOW_ALONE, few

# Said before anybody imports torch or NumPy, and to every process below: each of several workers, and each rank, would start a thread
# for every core, and those of tiny matrices spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Images of containers keep no compiled modules. Hundreds of processes import torch and Megatron below, and each would compile them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts what it puts into the background with Ctrl-C ignored, and every process below inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported stays. Python would look for garbage among all of it again and again, and each fork that does copies every page.
gc.disable()


# More than a minute each, the longest first. Begun among the last, one would keep a worker while the others wait.
LONGEST = (
    "tests/nemo/test_bridge.py::test_inside",
    "tests/test_mutants.py::test_mistakes",
    "tests/test_docs_lines.py::test_the_first_hour",
    "tests/cpu/test_rehearsal.py::test_ten",
    "tests/exported/test_exported.py::test_inside",
)


def pytest_addoption(parser):
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/golden/ anew instead of comparing with it"
    )


def pytest_configure(config):
    """How long an example takes says how busy the machine is; what CI tries is what everybody tries, fewer among the quick tests."""
    quick = config.option.markexpr == "not slow"
    settings.register_profile("house", deadline=None, derandomize=True, max_examples=30 if quick else 100)
    settings.load_profile("house")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """GPU tests run only where they are asked for (`-m gpu`), so that nothing is skipped silently elsewhere. And each worker of xdist's
    worksteal, which has its share of the items in their order, begins with its share of the longest."""
    config.stash[SLOW_ALONE], whole = few(items), len(items)
    yield  # pytest leaves out what -m and -k do not say
    if "gpu" not in (config.option.markexpr or ""):
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)
    workers, left = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)), len(items)
    longest = [item for name in LONGEST for item in items if item.nodeid.startswith(name)]
    rest = iter([item for item in items if item not in longest])
    items.clear()
    for worker in range(workers):
        share, first = left // (workers - worker), longest[worker::workers]
        items += [*first, *islice(rest, max(0, share - len(first)))]
        left -= share
    items += rest
    if hasattr(config, "workeroutput"):
        config.workeroutput["deselected"] = whole - len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """What the workers of xdist leave out is counted in the last line, as it is without them."""
    left = [SimpleNamespace()] * getattr(node, "workeroutput", {}).get("deselected", 0)
    node.config.pluginmanager.get_plugin("terminalreporter").stats["deselected"] = left


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def rewrite_golden(request) -> bool:
    return request.config.getoption("--rewrite-golden")


@pytest.fixture(scope="session")
def oracle():
    """One for all files: it imports Megatron."""
    from nam_megatron.runtime.oracle import Oracle

    with Oracle() as warm:
        yield warm


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every worker collects for itself, and must find the same cases in the same order: a set has another in each process."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(isinstance(value, (set, frozenset)) for value in (*mark.args[1:2], mark.kwargs.get("argvalues"))):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: its cases are a set; sort them")
