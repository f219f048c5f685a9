"""Workers fetch announced batches through obstore, and without it where it fails. Nothing else uses it."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from shard_server import COUNT, FAULTS, QUICK, Site, numbers, served_shared, written_once

from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, Remote, ResumableLoader

s3fs = import_module("s3fs")  # it ships no type information
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
OBSTORE, FSSPEC = "object_store", "Python"  # how the clients call themselves
NO_RETRY = {"retry_config": {"max_retries": 0}}


folder = pytest.fixture(scope="module")(written_once)
site = pytest.fixture(served_shared)


def loader(dataset: Any, *, workers: int = 1, **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(len(dataset), 4, num_replicas=1, rank=0)
    return ResumableLoader(dataset, batches, num_workers=workers, collate_fn=numbers, **options)


def delivered(made: ResumableLoader) -> list[list[int]]:
    try:
        return list(made)
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "context"),
    [(1, None), (2, None), (1, "forkserver"), pytest.param(1, "spawn", marks=pytest.mark.nightly)],
)
def test_announced_batches_come_through_obstore(site: Site, workers: int, context: str | None) -> None:
    expected = delivered(loader(IndexedShards(site.folder), workers=0))
    made = loader(site.dataset(obstore={}), workers=workers, multiprocessing_context=context)
    assert list(made) == expected
    report = made.report()
    made.close()
    assert site.faults.agents[OBSTORE] > 0.8 * len(site.faults.ranges())
    assert report.remote is not None
    assert report.remote.requests == len(site.faults.ranges())
    used = sum(len(s["bin"]) + len(s["json"]) for s in IndexedShards(site.folder, decode=None))
    assert report.remote.used == used
    assert used <= report.remote.fetched <= used * 1.02 + COUNT * 1100  # a header and padding within each sample


def test_the_main_process_never_uses_it(site: Site) -> None:
    """Its requests would hang in workers that are forked later."""
    far = site.dataset(obstore={})
    assert delivered(loader(far, workers=0)) == delivered(loader(IndexedShards(site.folder), workers=0))
    assert far.keys[3] == "s003"
    assert far.sizes("bin").sum() > 0
    far.announce([[1, 2], [3, 4]])
    assert [numbers(far.__getitems__(batch)) for batch in ([1, 2], [3, 4])] == [[1, 2], [3, 4]]
    assert set(site.faults.agents) == {FSSPEC}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, NO_RETRY])
@pytest.mark.parametrize("fault", [*FAULTS, "damaged", "no ranges"])
def test_false_answers_change_nothing(site: Site, fault: str, options: dict[str, Any]) -> None:
    expected = delivered(loader(IndexedShards(site.folder), workers=0))
    far = site.dataset(obstore=options)
    site.faults.kind, site.faults.times, site.faults.agent = fault, 3, OBSTORE
    assert delivered(loader(far)) == expected
    assert site.faults.times == 0


READ = """
import sys
from headrace.webdatamodule import IndexedShards, Remote, ResumableLoader

def numbers(samples):
    return [sample["json"][0] for sample in samples]

def read(url, **options):
    batches = [[2 * number, 2 * number + 1] for number in range(10)]
    loader = ResumableLoader(IndexedShards(Remote(url, **options)), batches, num_workers=1, collate_fn=numbers)
    assert list(loader) == batches
    loader.close()
"""


def ran(script: str, url: str) -> str:
    """What a process of its own says, where pytest does not catch warnings of its workers."""
    done = subprocess.run([sys.executable, "-c", READ + script, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_worker_gives_up_on_obstore_with_a_warning(site: Site) -> None:
    site.faults.kind, site.faults.times, site.faults.agent = "403", 10**6, OBSTORE
    told = ran('read(sys.argv[1], obstore={"retry_config": {"max_retries": 0}})', site.url)
    assert "obstore failed, so this worker fetches its batches through fsspec, more slowly (Permission" in told
    assert "correct the options in obstore=" in told
    assert "spawn" not in told
    assert site.faults.agents[FSSPEC] >= 10


@pytest.mark.slow
def test_workers_forked_after_obstore_was_used_go_on_without_it(site: Site) -> None:
    script = """
import obstore
store = obstore.store.HTTPStore.from_url(sys.argv[1], client_options={"allow_http": True})
assert len(obstore.get_range(store, "manifest.json", start=0, end=9)) == 9
read(sys.argv[1], timeout=1, obstore={})
"""
    assert 'give multiprocessing_context="spawn"' in ran(script, site.url)


@pytest.mark.slow
def test_an_abandoned_epoch_leaves_nothing_behind(site: Site) -> None:
    expected = loader(IndexedShards(site.folder), workers=0)
    made = loader(site.dataset(obstore={}, lookahead=5000), workers=2)
    for epoch in range(3):
        made.set_epoch(epoch)
        for _ in zip(range(2 + epoch), made, strict=False):
            pass
    made.set_epoch(3)
    expected.set_epoch(3)
    assert list(made) == list(expected)
    made.close()


@pytest.mark.slow
def test_s3_reads_what_is_read_from_the_disk(folder: Path) -> None:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        options = {"key": "test", "secret": "test", "endpoint_url": endpoint}
        system = s3fs.S3FileSystem(**options, client_kwargs={"region_name": "eu-west-1"})
        system.mkdir("mine")
        for path in folder.iterdir():
            system.put_file(str(path), f"mine/some/train/{path.name}")
        own = {"access_key_id": "test", "secret_access_key": "test", "region": "eu-west-1", "endpoint": endpoint}
        store = {**own, "client_options": {"allow_http": True}}
        far = IndexedShards(Remote("s3://mine/some/train", options, retry=QUICK, obstore=store))
        made = loader(far, workers=2)
        assert list(made) == delivered(loader(IndexedShards(folder), workers=0))
        report = made.report()
        made.close()
        assert report.remote is not None
        assert report.remote.requests >= COUNT // 4
    finally:
        server.stop()


def test_wrong_options_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"options of obstore's store for s3://, got \['bogus'\] .*correct them"):
        Remote("s3://bucket/train", obstore={"bogus": 1})
    with pytest.raises(ValueError, match="options of obstore's store for hf://"):
        Remote("hf://datasets/train", obstore={})
    with pytest.raises(ValueError, match="with a query, which it does not send"):
        Remote("https://host/train?signature=1", obstore={})
    with pytest.raises(ValueError, match="must be None with lookahead=0"):
        Remote("s3://bucket/train", lookahead=0, obstore={})
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ImportError, match=r"pip install 'headrace-webdatamodule\[obstore\]'"):
        Remote("s3://bucket/train", obstore={})


def test_secrets_are_not_shown() -> None:
    made = Remote("s3://bucket/train", obstore={"access_key_id": "mine", "secret_access_key": "hidden"})
    assert "hidden" not in repr(made)
    with pytest.raises(ValueError, match="bogus") as caught:
        Remote("s3://bucket/train", obstore={"secret_access_key": "hidden", "bogus": 1})
    assert "hidden" not in str(caught.value)
