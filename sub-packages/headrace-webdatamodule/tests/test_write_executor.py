"""Shards that are written by several processes, threads or clusters."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from written_sets import (
    SCRIPT,
    begun,
    check_whole,
    command,
    contents,
    group,
    parts,
    some,
    tars,
)

from headrace.webdatamodule import ShardError, verify_shards, write_shards

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor, None])
def test_bytes_are_the_same_wherever_they_are_written(tmp_path: Path, kind: Any) -> None:
    write_shards(some(50), tmp_path / "a", n_shards=5, workers=1)
    if kind is None:
        write_shards(some(50), tmp_path / "b", n_shards=5, workers=3)
    else:
        options = {"mp_context": get_context("spawn")} if kind is ProcessPoolExecutor else {}
        with kind(2, **options) as executor:
            write_shards(some(50), tmp_path / "b", n_shards=5, executor=executor)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.filterwarnings("default")  # what a cluster warns of is its own
def test_a_dask_cluster_of_processes_over_tcp(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    write_shards(some(50), tmp_path / "a", n_shards=5, workers=1)
    options = {"processes": True, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(protocol="tcp", **options) as cluster, distributed.Client(cluster) as client:
        assert cluster.scheduler_address.startswith("tcp://")
        write_shards(some(50), tmp_path / "b", n_shards=5, executor=client.get_executor())
        bad: Any = [*some(50), ("last", {"txt": "no bytes"})]
        with pytest.raises(ShardError, match=r"must be bytes, got str.*sample 'last'"):
            write_shards(bad, tmp_path / "c", n_shards=5, executor=client.get_executor())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert parts(tmp_path / "c") == []
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.filterwarnings("default")  # what a cluster warns of is its own
def test_a_ray_cluster_through_an_executor_of_one_method(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")

    class RayExecutor(Executor):
        def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
            made: Future[Any] = ray.remote(lambda: function(*args, **options)).remote().future()
            return made

    write_shards(some(50), tmp_path / "a", n_shards=5, workers=1)
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        write_shards(some(50), tmp_path / "b", n_shards=5, executor=RayExecutor())
        bad: Any = [*some(50), ("last", {"txt": "no bytes"})]
        with pytest.raises(ShardError, match=r"must be bytes, got str"):
            write_shards(bad, tmp_path / "c", n_shards=5, executor=RayExecutor())
    finally:
        ray.shutdown()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not (tmp_path / "c" / "manifest.json").exists()
    write_shards([*some(50), ("last", {"txt": b"bytes"})], tmp_path / "c", n_shards=5)  # what was left is no obstacle
    assert verify_shards(tmp_path / "c") == []


@pytest.mark.parametrize("local", [True, False])
def test_samples_that_cannot_be_sent_are_refused(tmp_path: Path, local: bool) -> None:
    samples: Any = (lambda: some(9)) if local else Unreadable(some(9))
    with pytest.raises(TypeError, match=r"cannot be sent to other processes \(.*pass a function.*workers=1"):
        write_shards(samples, tmp_path, n_shards=3, workers=2)
    assert tars(tmp_path) == []
    assert write_shards(samples, tmp_path, n_shards=3).n_samples == 9


class Unreadable(list[Any]):
    """Samples that can be pickled, and not made again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize("midway", [False, True])
def test_an_executor_that_is_shut_down(tmp_path: Path, midway: bool) -> None:
    executor = ThreadPoolExecutor(1)

    class Samples(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            executor.shutdown(wait=False, cancel_futures=True)
            return super().__getitem__(number)

    if not midway:
        executor.shutdown()
    with pytest.raises(RuntimeError, match=r"after shutdown|executor was shut down.*before all shards were written"):
        write_shards(lambda: Samples(some(9)), tmp_path, n_shards=3, executor=executor)
    assert parts(tmp_path) == []
    assert not (tmp_path / "manifest.json").exists()
    assert write_shards(some(9), tmp_path, n_shards=3).n_samples == 9


TROUBLES = {
    "raise": r"failed to read sample 60: RuntimeError: no such luck .*shard-000002.tar', sample 'number 60'",
    "unpicklable error": "failed to read sample 60: OddError: odd",
    "eio": r"OSError: \[Errno 5\] Input/output error",
}


@pytest.mark.parametrize(
    ("trouble", "message", "workers"),
    [
        pytest.param(*case, workers, marks=() if workers == 2 or case[0] == "raise" else pytest.mark.nightly)
        for case in TROUBLES.items()
        for workers in (1, 2)
    ],
)
def test_an_error_in_a_sample_stops_all(tmp_path: Path, trouble: str, message: str, workers: int) -> None:
    options = {"trouble": {60: trouble}, "delay": 0.002, "workers": workers}
    with group(tmp_path, **options) as process:
        _, said = process.communicate()
        assert process.returncode == 1
    assert re.search(message, said), said
    assert parts(tmp_path) == []
    check_whole(tmp_path)


def test_a_process_that_ends_is_loud(tmp_path: Path) -> None:
    with group(tmp_path, trouble={"60": "exit"}, delay=0.002, workers=2) as process:
        _, said = process.communicate()
        assert process.returncode == 1
    assert "BrokenProcessPool: a process that wrote shards ended: it was killed" in said
    assert parts(tmp_path) == []
    check_whole(tmp_path)


def test_a_main_module_that_is_not_guarded_is_named(tmp_path: Path) -> None:
    text = SCRIPT.read_text().replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "unguarded.py").write_text(text)
    words = [sys.executable, str(tmp_path / "unguarded.py"), str(tmp_path / "out"), '{"workers": 2}']
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "put what starts the work under `if __name__ == '__main__':`" in done.stderr
    assert len(tars(tmp_path / "out")) <= 1  # what the first process wrote before it started others
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stops_all(tmp_path: Path, workers: int) -> None:
    with group(tmp_path, delay=0.02, workers=workers) as process:
        begun(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in said
    assert said.count("Traceback") == 1
    assert parts(tmp_path) == []
    check_whole(tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bar_counts_samples_on_a_terminal(tmp_path: Path, workers: int) -> None:
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))
    words = command(tmp_path, workers=workers)
    process = subprocess.Popen(words, stderr=other, stdout=subprocess.DEVNULL)
    os.close(other)
    said, deadline = b"", time.monotonic() + 120
    try:
        with contextlib.suppress(OSError):  # the other end was closed
            while select.select([main], [], [], max(0, deadline - time.monotonic()))[0]:
                said += os.read(main, 4096)
        assert process.wait() == 0
    finally:
        process.kill()
        os.close(main)
    assert b"100/100" in said
    assert b"sample/s" in said
