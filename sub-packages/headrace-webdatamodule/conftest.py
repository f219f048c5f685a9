"""Options, seeds, time limits and examples of this package's test run. The same file in each of the four packages."""

import contextlib
import gc
import os
import random
import resource
import secrets
import signal
import sys
import time
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from pytest_timeout import Settings

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ImportError:  # a machine with a GPU may have only what -m gpu needs
    Sybil = None  # type: ignore[assignment, misc]  # looked at below

# No deadline: a busy machine makes single examples slow, which is no fault of the code. The same few examples each
# time, so that a change is judged by what it changes. The nightly run draws new ones, and several times as many.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("few", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("nightly", deadline=None)
settings.load_profile("headrace")

# One thread each: test processes run side by side, and on a busy machine threads that wait for one another take several
# times as long. The variable is for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Every Python process that a test starts prints its stacks when it is aborted: see abort_children.
os.environ["PYTHONFAULTHANDLER"] = "1"

if Sybil is not None:
    pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["README.md"]).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run the long and huge variants")
    parser.addoption("--fast", action="store_true", help="skip what is slow or starts a process, and try few examples")
    parser.addoption("--seed", type=int, help="seed of every test (default 0; with --nightly another one in each run)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    if Sybil is None:  # nothing collects a page
        config.args = [argument for argument in config.args if not argument.endswith("README.md")]
    if options.seed is None:
        options.seed = secrets.randbelow(2**32) if options.nightly else 0
    if options.nightly and not options.hypothesis_profile:
        settings.load_profile("nightly")
        options.hypothesis_seed = options.hypothesis_seed or options.seed

    elif options.fast:
        settings.load_profile("few")
    if options.fast:
        skip_processes()


def skip_processes() -> None:
    """Let a test end as skipped when it is about to start a process."""

    def skip(*_: object) -> None:
        pytest.skip("starts a process; run without --fast")  # else --fast would wait for interpreters to start

    def audit(event: str, _: object) -> None:
        if event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen") and running_test:
            skip()

    sys.addaudithook(audit)
    BaseProcess.start = skip  # type: ignore[assignment, method-assign]  # a spawned one raises no audit event


running_test: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    running_test.append(item.nodeid)
    try:
        return (yield)
    finally:
        running_test.clear()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m gpu, import only the modules that have such tests: others may need what is not installed there."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (again with --seed {config.option.seed})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if "gpu" in item.keywords:  # drivers and libraries there warn of what nobody here can foresee
            item.add_marker(pytest.mark.filterwarnings("default"))
        long = "nightly" in item.keywords and not config.option.nightly
        if long:
            item.add_marker(pytest.mark.skip(reason="long; run with --nightly"))
        # What starts a process may hang or fail where it is kept from it, and examples of a page build on one another.
        # Left out and not skipped: thousands of skips take seconds.
        slow = long or "slow" in item.keywords or item.path.suffix == ".md"
        (left_out if config.option.fast and slow else kept).append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Keep bytes out of test names: they are hard to type, and those that hold a time differ between runs."""
    if not isinstance(val, bytes) or (val.isascii() and len(val) <= 20):
        return None
    return f"{argname} of {len(val)} bytes"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed = item.config.option.seed
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 -- for what draws from the global state
    torch.manual_seed(seed)
    leave_out_imports()


modules = [0]


def leave_out_imports() -> None:
    """Leave what was imported out of collections of garbage, which took a quarter of the time of some files."""
    if len(sys.modules) > modules[0]:
        modules[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> Generator[None, object, object]:
    """Let a test that takes too long show the stacks of its child processes before pytest-timeout fails it."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(fail):

        def show_and_fail(number: int, frame: object) -> None:
            item.add_report_section("call", "stacks of the child processes", abort_children())
            fail(number, frame)  # type: ignore[arg-type]  # what the signal brought

        signal.signal(signal.SIGALRM, show_and_fail)
    return result


def abort_children(seconds: float = 10) -> str:
    """Abort all processes below this one and return what they wrote to stderr: their stacks and what came before."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise in here
    children = descendants()
    outputs = {}
    for pid in children:
        try:
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            file = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK)  # a pipe or a file that the test collects
        except OSError:
            continue
        outputs[os.fstat(file).st_ino] = file
    for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):  # all at one moment, before one sees another end
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    texts, until = dict.fromkeys(outputs, ""), time.monotonic() + seconds
    while True:
        ended = not any(map(running, children)) or time.monotonic() > until
        for inode, file in outputs.items():
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(file, 2**16):
                    texts[inode] += piece.decode(errors="replace")
        if ended:
            return "\n".join([f"{len(children)} child processes", *texts.values()])
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process has not ended, whoever is its parent now."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def descendants() -> list[int]:
    """Return the processes below this one that have not ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found = [os.getpid()]
    for above in found:  # grows on the way
        found += [pid for pid, parent in parents.items() if parent == above]
    return found[1:]
