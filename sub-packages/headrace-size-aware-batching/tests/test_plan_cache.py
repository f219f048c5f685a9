"""`plan_cache`: the same batches as without it, from one file for all processes, whatever happens to that file."""

import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import plan_cache_worker
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from processes import SERVER
from strategies_of_sizes import Case, cases, examples

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.planning import plan_cache
from headrace.size_aware_batching.planning.shuffles import random_words

NOBODY = 65534  # a user without any rights of root
WAYS: list[dict[str, Any]] = [
    {},
    {"strategy": "packed"},
    {"strategy": "bucketed", "cost": "sum"},
    {"strategy": "bucketed", "cost": "padded"},
    {"strategy": "bucketed", "cost": "padded", "window": 50},
    {"strategy": "sequential"},
    {"shuffle": False},
    {"oversize": "skip"},
    {"oversize": "own_batch"},
    {"oversize": "split"},
    {"max_length": 30},
    {"max_items": 3},
    {"work": True},
    {"curriculum": 5},
]


def sizes_of(count: int, kind: type[np.generic] = np.uint16) -> NDArray[Any]:
    return (random_words(5, count) % np.uint64(900) + np.uint64(20)).astype(kind)


def batches(sizes: Any, directory: Path | None, epochs: int = 2, **options: Any) -> list[list[list[int]]]:
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "plan_cache has no effect")
        sampler = DistributedSizeAwareBatchSampler(sizes, 4096, num_replicas=1, rank=0, plan_cache=directory, **options)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            found.append(list(sampler))
    return found


@pytest.mark.parametrize(
    ("sizes", "options", "told"),
    [
        (np.full(50, 7.5), {}, " with sizes of float64 of shape [50], up to 7.5, as it"),
        (
            np.full((50, 2), 7),
            {"max_total_size": (64, 64)},
            " with sizes of int64 of shape [50, 2], up to 7, as it",
        ),
        (
            np.full(50, 2**20),
            {"max_total_size": 2**22},
            " with sizes of int64 of shape [50], up to 1,048,576, as it",
        ),
        (np.full(50, 7), {"strategy": "sequential"}, " with strategy='sequential', which sorts nothing"),
    ],
)
def test_a_cache_without_effect_says_so_once(
    tmp_path: Path, sizes: NDArray[Any], options: dict[str, Any], told: str
) -> None:
    given: dict[str, Any] = {"max_total_size": 64, "num_replicas": 1, "rank": 0, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = DistributedSizeAwareBatchSampler(sizes, plan_cache=tmp_path / "plans", **given)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert sum(map(len, sampler)) == 50
    (message,) = (str(warning.message) for warning in caught)
    assert message.startswith(f"plan_cache has no effect{told}")
    assert not (tmp_path / "plans").exists()


def plan_file(directory: Path) -> Path:
    (found,) = directory.glob("*.sorted")
    return found


@pytest.mark.slow
@examples(40)
@given(cases(), st.sampled_from(WAYS), st.sampled_from([np.uint16, np.int64, np.float64]))
def test_batches_are_the_same_with_and_without_a_cache(
    tmp_path_factory: pytest.TempPathFactory, case: Case, way: dict[str, Any], kind: type[np.generic]
) -> None:
    drawn, budget = case
    if kind is np.uint16 and drawn.max(initial=0) >= 2**16:
        kind = np.uint32
    sizes = drawn.clip(max=2**31).astype(kind)
    sizes.flags.writeable = False
    budget = max(1, budget // 2) if "oversize" in way else budget
    assume("oversize" not in way or not len(sizes) or sizes.min() <= budget)  # else nothing is left, which is refused
    options = {**way, "num_replicas": 2, "rank": "all"} | ({"work": np.arange(len(sizes))} if "work" in way else {})
    directory = tmp_path_factory.mktemp("plans")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "plan_cache has no effect")
        plain, first, second = (
            DistributedSizeAwareBatchSampler(sizes, budget, plan_cache=cache, **options)
            for cache in (None, directory, str(directory))
        )
        assert plain.fingerprint == first.fingerprint == second.fingerprint
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*left out as larger|.*too few samples|plan_cache has no effect")
        for epoch in range(2):
            for sampler in (plain, first, second):
                sampler.set_epoch(epoch)
            assert list(plain) == list(first) == list(second)
            assert plain.plan(epoch).indices.dtype == second.plan(epoch).indices.dtype
    assert plain.state_dict() == first.state_dict() == second.state_dict()


def test_the_second_process_sorts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "sizes.npy", sizes_of(3000))
    mapped = np.load(tmp_path / "sizes.npy", mmap_mode="r")
    expected = batches(mapped, None)
    batches(mapped, tmp_path / "plans")

    def refuse(*_: Any) -> Any:
        raise AssertionError("it was to be known")

    for place in ("plan_cache", "strategies"):
        monkeypatch.setattr(f"headrace.size_aware_batching.planning.{place}.sort_samples", refuse)
    again = np.load(tmp_path / "sizes.npy", mmap_mode="r")
    assert batches(again, tmp_path / "plans") == expected
    sampler = DistributedSizeAwareBatchSampler(again, 4096, plan_cache=tmp_path / "plans")
    assert sampler.sizes.dtype == np.uint16
    assert not sampler.sizes.flags.owndata


@pytest.mark.parametrize("top", [200, 900, 70_000])
def test_equal_sizes_of_any_type_use_one_file_and_have_one_fingerprint(tmp_path: Path, top: int) -> None:
    sizes = sizes_of(300_000, np.int64) % 200 + (top - 200)  # more than the digest takes at once
    kinds: list[Any] = [np.uint32, np.int64, ">i4", np.float64, *([np.uint16] if top < 2**16 else [])]
    fingerprints = set()
    for kind in kinds:
        options: dict[str, Any] = {"num_replicas": 1, "rank": 0, "plan_cache": tmp_path}
        sampler = DistributedSizeAwareBatchSampler(sizes.astype(kind), 2**20, **options)
        sampler.plan()
        fingerprints.add(sampler.fingerprint)
    plan_file(tmp_path)
    assert len(fingerprints) == 1


def test_another_budget_uses_the_same_file(tmp_path: Path) -> None:
    sizes = sizes_of(2000)
    for budget in (2000, 4000):
        DistributedSizeAwareBatchSampler(sizes, budget, plan_cache=tmp_path).plan()
    for strategy in ("packed", "bucketed"):
        DistributedSizeAwareBatchSampler(sizes, 2000, strategy=strategy, cost="sum", plan_cache=tmp_path).plan()
    plan_file(tmp_path)


def test_other_sizes_never_use_the_file(tmp_path: Path) -> None:
    path, plans, sizes = tmp_path / "sizes.npy", tmp_path / "plans", sizes_of(3000)
    np.save(path, sizes)
    batches(np.load(path, mmap_mode="r"), plans)
    before = path.stat()
    other = sizes[::-1].copy()
    with path.open("r+b") as file:  # the same file, of the same length, at the same time
        file.seek(-other.nbytes, os.SEEK_END)
        file.write(other.tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert batches(np.load(path, mmap_mode="r"), plans) == batches(other, None)
    assert batches(np.load(path, mmap_mode="r")[100:2000], plans) == batches(other[100:2000], None)
    changed = sizes.copy()
    changed[1234] += 1
    assert batches(changed, plans) == batches(changed, None)
    assert len(list(plans.glob("*.sorted"))) == 4


@pytest.mark.slow
def test_damage_is_found_wherever_it_lies(tmp_path: Path) -> None:
    sizes = sizes_of(400)
    expected = batches(sizes, None, epochs=1)
    batches(sizes, tmp_path)
    path = plan_file(tmp_path)
    good = path.read_bytes()
    body = len(good) - 4 * len(sizes)  # behind the header of 72 bytes and the table of sizes
    for place in (*range(72), *range(72, body, 97), *range(body, len(good), 13)):
        for bit in (1, 128) if place < 72 else (1 << place % 8,):
            path.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
            with pytest.warns(UserWarning, match=r"plan.*sort"):
                assert batches(sizes, tmp_path, epochs=1) == expected
            if place >= body:
                assert not path.exists()  # found while it was used
            else:
                assert path.read_bytes() == good


def test_samples_that_changed_places_are_found(tmp_path: Path) -> None:
    sizes = np.full(300, 7, np.uint8)  # where nothing but their order tells them apart
    expected = batches(sizes, None)
    batches(sizes, tmp_path)
    path = plan_file(tmp_path)
    good = path.read_bytes()
    order = np.frombuffer(good[-1200:], "<i4")
    for changed in (order[::-1], np.roll(order, 1), order * 0):
        path.write_bytes(good[:-1200] + changed.astype("<i4").tobytes())
        with pytest.warns(UserWarning, match="damaged after its header"):
            assert batches(sizes, tmp_path) == expected
        path.write_bytes(good)


@pytest.mark.parametrize("left", [0, 1, 71, 72, 500, -1])
def test_a_file_of_another_length_is_found(tmp_path: Path, left: int) -> None:
    sizes = sizes_of(400)
    expected = batches(sizes, tmp_path)
    path = plan_file(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:left])
    with pytest.warns(UserWarning, match="cannot be used"):
        assert batches(sizes, tmp_path) == expected
    assert path.read_bytes() == good
    path.write_bytes(good + b"\0")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert batches(sizes, tmp_path) == expected
    path.write_bytes(b"a file of somebody else " * 100)
    with pytest.warns(UserWarning, match="cannot be used"):
        assert batches(sizes, tmp_path) == expected
    assert path.read_bytes() == good


def test_the_file_of_other_sizes_is_not_taken(tmp_path: Path) -> None:
    sizes, others = sizes_of(400), sizes_of(400)[::-1].copy()
    batches(sizes, tmp_path)
    path = plan_file(tmp_path)
    batches(others, tmp_path / "others")
    path.write_bytes(plan_file(tmp_path / "others").read_bytes())
    with pytest.warns(UserWarning, match="other sizes"):
        assert batches(sizes, tmp_path) == batches(sizes, None)


def test_a_file_of_another_version_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of(400)
    expected = batches(sizes, tmp_path)
    old = plan_file(tmp_path)
    monkeypatch.setattr(plan_cache, "PLAN_CACHE_VERSION", 2)
    assert batches(sizes, tmp_path) == expected
    (new,) = set(tmp_path.glob("*.sorted")) - {old}  # each version has its own name
    new.write_bytes(old.read_bytes())
    with pytest.warns(UserWarning, match="another version"):
        assert batches(sizes, tmp_path) == expected


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_cannot_be_written_is_a_warning(tmp_path: Path, kind: str) -> None:
    sizes = sizes_of(400)
    expected = batches(sizes, tmp_path / "plans")
    name = plan_file(tmp_path / "plans").name
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("a file")
    else:
        (place / name).mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"plan_cache=.* must be a directory that can be written to"):
        assert batches(sizes, place) == expected


@pytest.fixture
def plain_place() -> Iterator[Path]:
    """A directory of a user who is not root, as whom the test runs: root may write everywhere."""
    place = Path(tempfile.mkdtemp())
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    os.chown(place, user, -1)
    before = os.geteuid()
    os.seteuid(user)
    try:
        yield place
    finally:
        os.seteuid(before)
        shutil.rmtree(place)


def test_a_directory_that_may_only_be_read_is_used_where_it_has_the_plan(plain_place: Path) -> None:
    sizes, plans = sizes_of(400), plain_place / "plans"
    expected = batches(sizes, plans)
    plans.chmod(0o500)
    try:
        assert batches(sizes, plans) == expected
        with pytest.warns(UserWarning, match="must be a directory that can be written to"):
            batches(sizes[::-1], plans)
    finally:
        plans.chmod(0o700)


def test_a_full_disk_is_a_warning_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of(400)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert batches(sizes, tmp_path) == batches(sizes, None)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_only_a_path_is_a_cache() -> None:
    with pytest.raises(TypeError, match="plan_cache must be the path of a directory, or None, got 5 of type int"):
        DistributedSizeAwareBatchSampler([1, 2], 5, plan_cache=5)  # type: ignore[arg-type]  # refused


def test_a_run_that_changes_and_copies_keep_their_batches(tmp_path: Path) -> None:
    sizes = sizes_of(2000)
    runs = []
    for cache in (None, tmp_path):
        sampler = DistributedSizeAwareBatchSampler(sizes, 4096, num_replicas=1, rank=0, plan_cache=cache)
        taken = iter(sampler)
        found = [next(taken) for _ in range(5)]
        sampler.exclude(range(100, 200))
        found += list(taken)
        copied = pickle.loads(pickle.dumps(sampler))
        copied.set_epoch(1)
        found += list(copied)
        other = DistributedSizeAwareBatchSampler(sizes, 3000, num_replicas=1, rank=0, plan_cache=cache)
        state = DistributedSizeAwareBatchSampler(sizes, 4096, num_replicas=1, rank=0).state_dict(position=700)
        other.load_state_dict(state, accept={"max_total_size"})
        runs.append((found, list(other)))
    assert runs[0] == runs[1]
    plan_file(tmp_path)  # no other for what was excluded


def processes(folder: Path, count: int) -> list[ForkServerProcess]:
    started = [SERVER.Process(target=plan_cache_worker.main, args=(folder, number)) for number in range(count)]
    for process in started:
        process.start()
    return started


def results(started: list[ForkServerProcess], folder: Path) -> list[dict[str, Any]]:
    for process in started:
        process.join(200)
    assert [process.exitcode for process in started] == [0] * len(started)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(started))]


@pytest.mark.slow
def test_processes_at_once_share_one_file(tmp_path: Path) -> None:
    sizes = sizes_of(300_000)
    np.save(tmp_path / "sizes.npy", sizes)
    expected = next(iter(DistributedSizeAwareBatchSampler(sizes, 4096)))
    assert results(processes(tmp_path, 3), tmp_path) == [{"first": expected, "warnings": []}] * 3
    assert plan_file(tmp_path / "plans").stat().st_size > 4 * len(sizes)
    assert not list((tmp_path / "plans").glob("*.part"))


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_that_is_believed(tmp_path: Path) -> None:
    sizes = sizes_of(10_000_000)
    np.save(tmp_path / "sizes.npy", sizes)
    expected = next(iter(DistributedSizeAwareBatchSampler(sizes, 4096)))
    plans = tmp_path / "plans"
    for _ in range(10):  # the file may be complete before the signal comes
        (process,) = processes(tmp_path, 1)
        while not list(plans.glob("*.sorted.*.part")) and process.is_alive():
            pass
        process.kill()
        process.join(60)
        assert process.exitcode in (-9, 0)
        if list(plans.glob("*.sorted.*.part")):
            break
        shutil.rmtree(plans)
    assert list(plans.glob("*.sorted.*.part"))
    assert not list(plans.glob("*.sorted"))
    assert results(processes(tmp_path, 2), tmp_path) == [{"first": expected, "warnings": []}] * 2
    assert not list(plans.glob("*.sorted.*.part"))


@pytest.mark.slow
def test_a_fork_of_the_sampler_reads_on(tmp_path: Path) -> None:
    sizes = sizes_of(3000)
    sampler = DistributedSizeAwareBatchSampler(sizes, 4096, plan_cache=tmp_path)
    expected = [sampler.batch(number) for number in range(10)]
    context = multiprocessing.get_context("fork")
    with context.Pool(1, initializer=_take, initargs=(sampler,)) as pool:
        assert pool.map(_batch, range(10)) == expected


def _take(sampler: DistributedSizeAwareBatchSampler) -> None:
    globals()["_sampler"] = sampler


def _batch(number: int) -> Any:
    return globals()["_sampler"].batch(number)
