"""What is secret in a URL is sent to its server, and shown nowhere."""

import contextlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shard_server import COUNT, Site, served_shared, written_once

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    MapDataModule,
    Remote,
    ResumableLoader,
    RetryPolicy,
    WebDataModule,
)
from headrace.webdatamodule.cli import main as headrace_shards

SECRET = "hunter2"
FAULTS = ["500", "404", "cut", "wrong range", "damaged", "no ranges", "web page", "moved", "held"]
FILES = [".tar", "manifest.json", ".hrs", ".hri", ".npy"]


folder = pytest.fixture(scope="module")(written_once)
shared_site = pytest.fixture(served_shared)


@pytest.fixture
def site(shared_site: Site) -> Site:
    shared_site.faults.secret = SECRET
    return shared_site


def signed(site: Site) -> str:
    return f"{site.url}/?X-Signature={SECRET}%2Fx&X-Expires=60"


def with_password(site: Site) -> str:
    return site.url.replace("://", f"://somebody:{SECRET}@")


def with_token(site: Site) -> str:
    return site.url.replace("://", f"://{SECRET}@") + "/manifest.json"


def signed_one_by_one(site: Site) -> list[str]:
    tars = sorted(path.name for path in site.folder.glob("*.tar"))
    return [f"{site.url}/{name}?sig={SECRET}{number}" for number, name in enumerate(tars)]


@contextlib.contextmanager
def noting(shown: list[str]) -> Iterator[None]:
    """Note what an error and warnings show."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:
            shown += ["".join(traceback.format_exception(error)), str(vars(error))]
    shown += [str(one.message) for one in warned]


@pytest.mark.parametrize(
    ("place", "cached"),
    [(signed, False), (signed, True), (with_password, False), (with_token, False), (signed_one_by_one, True)],
)
def test_no_public_text_has_a_secret(site: Site, tmp_path: Path, place: Callable[[Site], Any], cached: bool) -> None:
    urls, shown = place(site), list[str]()

    def dataset(cache: str, **options: Any) -> IndexedShards:
        remote = Remote(urls, cache_dir=tmp_path / cache if cached else None, retry=RetryPolicy(1), **options)
        shown.append(repr(remote))
        return IndexedShards(remote)

    far = dataset("cache")
    near = IndexedShards(site.folder)
    assert list(far) == list(near)  # so the secret was sent
    assert far.shard_of(0) == f"{site.url}/wdshards-000000.tar"
    loader = ResumableLoader(far, DistributedBatchSampler(COUNT, 5), collate_fn=list)
    next(iter(loader))
    module = IndexedWebDataModule({"train": Remote(urls)}, batch_size=4)
    module.setup("fit")
    shown += [repr(far), repr(loader), str(loader.report()), json.dumps(loader.state_dict()), repr(module)]
    shown += [path.name for path in tmp_path.rglob("*")]

    for number, kind in enumerate(FAULTS):
        for name in FILES:
            site.faults.kind, site.faults.name, site.faults.times = kind, name, 10**6
            site.faults.released.clear()
            with noting(shown):
                wrong = dataset(f"cache{number}{name}", timeout=0.15 if kind == "held" else 5.0)
                wrong.sizes("bin")
                if wrong.columns:
                    wrong.column("tokens")
                wrong.__getitems__(range(0, COUNT, 7))
            site.faults.released.set()
    assert sum("Traceback" in text for text in shown) > len(FAULTS)  # there were errors
    assert [text for text in shown if SECRET in text] == []


@pytest.mark.parametrize("url", ["https://u:hunter2@h/a?sig=hunter2", "sftp://u:hunter2@h/a", "http://h/*?sig=hunter2"])
def test_refused_arguments_show_no_secret(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = list[str]()
    wrong: list[dict[str, Any]] = [
        {"url": [url, "hunter"]},
        {"url": f"{url.partition('?')[0]}*"},
        {"url": [f"http://h/a.tar?key={number}-hunter2" for number in range(2)]},
        {"url": url, "obstore": {"nosuch": 1}},
        {"url": url, "obstore": {}, "lookahead": 0},
    ]
    for arguments in wrong:
        with noting(shown):
            Remote(**arguments)
    with noting(shown):
        IndexedShards([url, Path("a.tar")])
    with noting(shown):
        WebDataModule({"train": 1}, "txt", {"train": url}, 1)
    with noting(shown):
        MapDataModule({"train": url}, batch_size=1)
    with contextlib.suppress(SystemExit):
        headrace_shards(["info", url])
    shown += capsys.readouterr()
    assert len([text for text in shown if "Error" in text or "error" in text]) == len(wrong) + 4  # each was refused
    assert [text for text in shown if SECRET in text] == []
