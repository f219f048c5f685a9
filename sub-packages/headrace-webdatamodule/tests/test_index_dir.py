"""Tars that others host without indexes, which are kept on this machine."""

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_server import COUNT, QUICK, Site, served, written_once

from headrace.webdatamodule import (
    DamagedShardError,
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    Manifest,
    ManifestError,
    Remote,
    ResumableLoader,
    ShardError,
    StaleIndexError,
    add_column,
)

folder = pytest.fixture(scope="module")(written_once)


@pytest.fixture
def site(folder: Path, tmp_path: Path) -> Iterator[Site]:
    """The tars alone, each behind a signature of its own."""
    (tmp_path / "site").mkdir()
    for path in folder.glob("*.tar"):
        shutil.copy(path, tmp_path / "site")
    with served(tmp_path / "site") as made:
        made.faults.secret = "signature-of-{name}-"
        yield made


def tars_of(site: Site, job: int = 0, **options: Any) -> Remote:
    paths = sorted(site.folder.glob("*.tar"))
    urls = [f"{site.url}/{path.name}?signature-of-{path.name}-{job}" for path in paths]
    return Remote(urls, index_dir=site.folder.parent / "indexes", retry=QUICK, **options)


def asked(site: Site) -> list[str]:
    """The names of the tars that were asked for since the last call; nothing else is."""
    names = [name for name, _ in site.faults.asked]
    site.faults.asked.clear()
    assert [name for name in names if not name.endswith(".tar")] == []
    return names


@pytest.mark.parametrize("options", [{}, {"cache_unit": "shard"}, {"cache_unit": "sample"}])
def test_tars_are_read_by_indexes_that_are_kept_here(site: Site, folder: Path, options: dict[str, Any]) -> None:
    indexes, near, listed = site.folder.parent / "indexes", IndexedShards(folder), Manifest.load(folder)
    manifest = tars_of(site).index_shards()
    assert (manifest.shards, manifest.members) == (listed.shards, listed.members)
    names = sorted(path.name for path in indexes.iterdir())
    assert names == ["manifest.hrs", "manifest.json", *(f"{shard.name}.hri" for shard in manifest.shards)]
    assert [path for path in indexes.iterdir() if b"signature" in path.read_bytes()] == []

    cached = {"cache_dir": site.folder.parent / "cache"} if options else {}
    assert len(asked(site)) > 0
    far = IndexedShards(tars_of(site, 1, **cached, **options))
    assert (len(far), far.find("s033"), far.fingerprint) == (COUNT, 33, near.fingerprint)
    assert far.sizes("bin").tolist() == near.sizes("bin").tolist()
    assert asked(site) == []
    assert list(far) == list(near)
    assert far.__getitems__([59, 3, 30, 3]) == near.__getitems__([59, 3, 30, 3])
    assert pickle.loads(pickle.dumps(far))[7] == near[7]
    assert far.shard_of(0) == f"{site.url}/wdshards-000000.tar"
    assert len(asked(site)) > 0
    far.close()
    again = IndexedShards(tars_of(site, 2, **cached, **options))
    assert list(again) == list(near)
    assert (asked(site) == []) == bool(options)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loaders_and_columns_are_as_elsewhere(site: Site, folder: Path) -> None:
    tars_of(site).index_shards()
    tokens = np.arange(COUNT) % 7 + 1
    add_column(site.folder.parent / "indexes", "tokens", tokens)
    far = IndexedShards(tars_of(site))
    assert (far.columns, far.column("tokens").tolist()) == (("tokens",), tokens.tolist())
    loader = ResumableLoader(far, DistributedBatchSampler(COUNT, 6), collate_fn=list, num_workers=2)
    assert sorted(sample["json"][0] for batch in loader for sample in batch) == list(range(COUNT))
    module = IndexedWebDataModule({"train": tars_of(site)}, batch_size=4)
    module.setup("fit")
    assert sum(len(batch["__key__"]) for batch in module.train_dataloader()) == COUNT


def test_a_server_without_ranges_will_do(site: Site, folder: Path) -> None:
    site.faults.kind, site.faults.times = "no ranges", 10**6
    tars_of(site).index_shards()
    far = IndexedShards(tars_of(site, cache_dir=site.folder.parent / "cache"))
    assert list(far) == list(IndexedShards(folder))


def test_only_new_and_changed_tars_are_read_again(site: Site, folder: Path) -> None:
    manifest = tars_of(site).index_shards()
    asked(site)
    assert tars_of(site).index_shards() == manifest
    assert len(asked(site)) == 4 * 4  # the size and three pieces of each
    first, second, third, _ = sorted(site.folder.glob("*.tar"))
    shutil.copy(first, second)
    (site.folder.parent / "indexes" / f"{third.name}.hri").write_bytes(b"damaged")
    far = IndexedShards(tars_of(site), keys=["json"])
    with pytest.raises(StaleIndexError) as caught:
        far[COUNT // 4]
    assert caught.value.shard == f"{site.url}/{second.name}"
    with site.faults.lock:
        asked(site)
    assert tars_of(site).index_shards().shards[1].index == manifest.shards[0].index
    again = asked(site)
    assert [again.count(path.name) > 4 for path in sorted(site.folder.glob("*.tar"))] == [False, True, False, False]
    assert [sample["json"] for sample in IndexedShards(tars_of(site))][15:30] == [[i] for i in range(15)]
    assert tars_of(site).index_shards(force=True) == Manifest.load(site.folder.parent / "indexes")
    assert min(map(asked(site).count, (path.name for path in site.folder.glob("*.tar")))) >= 2


def test_a_stopped_run_goes_on_where_it_was(site: Site) -> None:
    indexes, (_, _, third, _) = site.folder.parent / "indexes", sorted(site.folder.glob("*.tar"))
    site.faults.kind, site.faults.name, site.faults.times = "404", third.name, 10**6
    with pytest.raises(ShardError, match="cannot be read") as caught:
        tars_of(site).index_shards()
    assert caught.value.shard == f"{site.url}/{third.name}"
    assert len(list(indexes.glob("*.hri"))) == 2
    with pytest.raises(ManifestError, match=r"there is no manifest.json in '.*indexes'.*\.index_shards\(\)"):
        IndexedShards(tars_of(site))
    site.faults.times = 0
    asked(site)
    tars_of(site).index_shards()
    assert asked(site).count(third.name) < 9
    assert len(IndexedShards(tars_of(site))) == COUNT
    assert {path.suffix for path in indexes.iterdir()} == {".hri", ".hrs", ".json"}  # no tar is left


def test_a_damaged_tar_is_named_by_its_url(site: Site) -> None:
    second = sorted(site.folder.glob("*.tar"))[1]
    os.truncate(second, 5000)
    with pytest.raises(DamagedShardError, match="cut") as caught:
        tars_of(site).index_shards()
    assert caught.value.shard == f"{site.url}/{second.name}"
    assert "signature" not in str(caught.value)


def test_indexes_of_other_tars_are_refused(site: Site) -> None:
    remote = tars_of(site)
    remote.index_shards()
    assert isinstance(remote.url, tuple)
    fewer = Remote(remote.url[:3], index_dir=remote.index_dir)
    with pytest.raises(ManifestError, match=r"4 tar files.*url names 3, and not 'wdshards-000003\.tar'.*index_shards"):
        IndexedShards(fewer)
    IndexedShards(Remote(remote.url[::-1], index_dir=remote.index_dir))


@pytest.mark.parametrize(
    ("url", "index_dir", "told"),
    [
        ("https://h/train", "here", r"url must be tar files.* got 'https://h/train'"),
        (["https://h/a/1.tar", "https://h/b/1.tar"], "here", r"url must be tar files of different names.*'1\.tar'"),
        ("https://h/1.tar", "s3://bucket/indexes", "index_dir must be a local one"),
    ],
)
def test_arguments_are_refused(url: Any, index_dir: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Remote(url, index_dir=index_dir)


def test_indexing_needs_a_place(site: Site) -> None:
    with pytest.raises(ValueError, match="index_shards needs index_dir, got none"):
        Remote(f"{site.url}/wdshards-000000.tar").index_shards()


@pytest.mark.parametrize("secret", ["", "signature-of-{name}-"])
def test_tars_without_indexes_are_told_the_cure(site: Site, secret: str) -> None:
    site.faults.secret = secret  # a file that is missing, or a signature that is not for it
    with pytest.raises(ShardError, match=r"no index 'http.*\.hri'.*index_dir=.*\.index_shards\(\)"):
        IndexedShards(Remote(tars_of(site).url, retry=QUICK))
    if not secret:
        with pytest.raises(ManifestError, match=r"no manifest.json in 'http.*index_dir=.*\.index_shards\(\)"):
            IndexedShards(Remote(site.url, retry=QUICK))
