import io
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from headrace.webdatamodule import (
    IndexedShards,
    ManifestError,
    ShardError,
    StaleIndexError,
    add_column,
    index_shards,
    verify_shards,
    write_tars,
)
from headrace.webdatamodule.shards.index.build import index_shard
from headrace.webdatamodule.shards.reading.local_shards import expand_braces, is_url
from headrace.webdatamodule.shards.reading.options import Verify

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
MEMBERS = st.dictionaries(st.sampled_from(["txt", "a.bin", "0", "Cls"]), st.binary(max_size=2000), min_size=1)
ALIKE = st.fixed_dictionaries({"txt": st.binary(max_size=2000), "a.bin": st.binary(max_size=9)})
SHARDS = st.lists(st.lists(MEMBERS, max_size=6), min_size=1, max_size=4)
SHARDS_ALIKE = st.lists(st.lists(ALIKE, max_size=6), min_size=1, max_size=4)
NAMES = st.sampled_from(["s{:06d}", "{}x", "a/b{}", "{} %d", "ü{:x}-"])
Raw = dict[str, Any]


def write(folder: Path, shards: list[list[dict[str, bytes]]], kind: int, name: str) -> list[Path]:
    paths = [folder / f"{number}.tar" for number in range(len(shards))]
    count = 0
    for path, samples in zip(paths, shards, strict=True):
        with tarfile.open(path, "w", format=kind, encoding="utf-8") as file:
            for members in samples:
                for suffix, data in members.items():
                    header = tarfile.TarInfo(f"{name.format(count)}.{suffix}")
                    header.size, header.mtime = len(data), 1.5 if kind == tarfile.PAX_FORMAT else 1
                    file.addfile(header, io.BytesIO(data))
                count += 1
    return paths


def by_tarfile(paths: list[Path]) -> list[Raw]:
    samples: dict[str, Raw] = {}
    for path in paths:
        with tarfile.open(path, "r:", encoding="utf-8") as file:
            for member in file:
                directory, slash, base = member.name.rpartition("/")
                key, _, suffix = base.partition(".")
                data = file.extractfile(member)
                assert data is not None
                sample = samples.setdefault(directory + slash + key, {"__key__": directory + slash + key})
                sample[suffix.lower()] = data.read()
    return list(samples.values())


def by_webdataset(paths: list[Path]) -> list[Raw]:
    samples: list[Raw] = []
    for path in paths:
        with path.open("rb") as stream:
            members = wds.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
            samples.extend(wds.tariterators.group_by_keys(members))
    extra = ("__url__", "__local_path__")
    return [{name: value for name, value in sample.items() if name not in extra} for sample in samples]


def indexed(folder: Path, count: int = 50, n_shards: int = 3) -> Path:
    samples = [(f"s{i:03d}", {"txt": b"%d" % i * (i % 7), "bin": os.urandom(i)}) for i in range(count)]
    write_tars(samples, folder, n_shards=n_shards)
    index_shards(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return indexed(tmp_path_factory.mktemp("set"))


@pytest.mark.slow
@given(st.one_of(SHARDS, SHARDS_ALIKE), st.sampled_from(FORMATS), NAMES, st.sampled_from(["read", "open", "none"]))
def test_samples_are_those_of_tarfile_and_webdataset(
    shards: list[list[dict[str, bytes]]], kind: int, name: str, check: Verify
) -> None:
    with tempfile.TemporaryDirectory() as root:
        paths = write(Path(root), shards, kind, name)
        index_shards(root)
        expected = by_tarfile(paths)
        assert by_webdataset(paths) == expected
        for source in (root, f"{root}/manifest.json", paths):
            dataset = IndexedShards(source, decode=None, verify=check)
            assert len(dataset) == len(expected)
            assert [dataset[i] for i in range(len(expected))] == expected
            assert list(dataset) == list(dataset.iterate()) == expected
            assert dataset.__getitems__(range(len(expected))) == expected
            assert list(dataset.keys) == [sample["__key__"] for sample in expected]


@given(st.data())
def test_any_batch_in_any_order_is_what_its_indices_say(folder: Path, data: st.DataObject) -> None:
    count = 50
    dataset = IndexedShards(folder, decode=None)
    everything = list(dataset.iterate())
    indices = data.draw(st.lists(st.integers(-count, count - 1), max_size=80))
    kind: Any = data.draw(st.sampled_from([list, tuple, np.array, torch.tensor]))
    given_as = kind(indices) if indices else indices
    assert dataset.__getitems__(given_as) == [everything[index] for index in indices]
    assert [dataset[index] for index in indices] == [everything[index] for index in indices]
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    assert list(dataset.iterate(start, stop)) == everything[start:stop]


def test_samples_of_a_batch_are_not_shared(folder: Path) -> None:
    first, second = IndexedShards(folder, decode=None).__getitems__([3, 3])
    first["txt"] = b"changed"
    assert second["txt"] != b"changed"


@pytest.mark.parametrize("index", [50, -51])
def test_an_index_that_is_not_there_is_refused(folder: Path, index: int) -> None:
    dataset = IndexedShards(folder)
    with pytest.raises(IndexError, match=rf"-50 to 49, got {index}"):
        dataset[index]
    with pytest.raises(IndexError, match=rf"-50 to 49, got {index}"):
        dataset.__getitems__([1, index, 2])
    with pytest.raises(IndexError):
        dataset.key(index)


def test_indices_that_are_no_integers_are_refused(folder: Path) -> None:
    dataset = IndexedShards(folder)
    with pytest.raises(TypeError, match="integers"):
        dataset.__getitems__([1.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"the text 'a': find\('a'\) gives a key's position"):
        dataset["a"]  # type: ignore[index]


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (51, None), (3, 2), (0, 51)])
def test_a_range_that_is_not_there_is_refused_at_once(folder: Path, start: int, stop: int | None) -> None:
    with pytest.raises(ValueError, match="0 <= start <= stop <= 50"):
        IndexedShards(folder).iterate(start, stop)


def test_long_samples_and_many_of_them_come_in_order(tmp_path: Path) -> None:
    samples = [(f"s{i}", {"a": bytes([i % 256]) * (300_000 if i % 800 == 3 else i % 40)}) for i in range(2500)]
    index_shard(write_tars(samples, tmp_path, n_shards=1)[0])
    dataset = IndexedShards(tmp_path / "wdshards-000000.tar", decode=None)
    assert [(raw["__key__"], {"a": raw["a"]}) for raw in dataset.iterate(1, 2499)] == samples[1:2499]


def test_keys_choose_members_and_their_order(folder: Path) -> None:
    everything = list(IndexedShards(folder, decode=None))
    for keys in (["BIN"], ["bin", "txt"]):
        chosen = [key.lower() for key in keys]
        dataset = IndexedShards(folder, keys, decode=None)
        expected = [[("__key__", one["__key__"]), *((key, one[key]) for key in chosen)] for one in everything]
        assert [list(sample.items()) for sample in dataset] == expected
        assert [list(dataset[i].items()) for i in range(50)] == expected
        assert dataset.member_keys == tuple(chosen)


@pytest.mark.parametrize("keys", [["jpg"], [], ["txt", "TXT"], "txt"])
def test_keys_that_do_not_occur_are_refused(folder: Path, keys: Any) -> None:
    with pytest.raises(ValueError, match=r"keys must be .*got"):
        IndexedShards(folder, keys)


def test_a_sample_that_lacks_a_member_is_an_error_after_those_before(tmp_path: Path) -> None:
    write_tars([(f"s{i}", {"a": b"1", **({"b": b"2"} if i != 5 else {})}) for i in range(9)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    dataset = IndexedShards(tmp_path, ["b"], decode=None)
    with pytest.raises(ShardError, match=r"lacks a member.*only 'a'.*sample 's5'"):
        dataset[5]
    seen: list[str] = []
    with pytest.raises(ShardError, match="sample 's5'"):
        seen.extend(sample["__key__"] for sample in dataset)
    assert dataset[6] == {"__key__": "s6", "b": b"2"}


def test_sizes_are_those_of_the_data(folder: Path) -> None:
    dataset = IndexedShards(folder, decode=None)
    for key in ("txt", "BIN"):
        sizes = dataset.sizes(key)
        assert sizes.dtype == np.int64
        assert sizes.tolist() == [len(sample[key.lower()]) for sample in dataset]
    with pytest.raises(ValueError, match="keys must be one or more"):
        dataset.sizes("jpg")


def test_sizes_of_a_member_that_some_lack(tmp_path: Path) -> None:
    write_tars([("s0", {"a": b"1"}), ("s1", {"a": b"", "b": b"22"}), ("s2", {"a": b"1"})], tmp_path, n_shards=2)
    index_shards(tmp_path)
    dataset = IndexedShards(tmp_path)
    with pytest.raises(ShardError, match=r"'b'.*missing=0.*sample 's0'"):
        dataset.sizes("b")
    assert dataset.sizes("b", missing=-1).tolist() == [-1, 2, -1]
    wrong: Any
    for wrong in ("0", 1.5, True):
        with pytest.raises(TypeError, match=f"missing must be an int .*got {wrong!r}"):
            dataset.sizes("b", missing=wrong)


def test_keys_of_samples_are_found(folder: Path) -> None:
    dataset = IndexedShards(folder)
    assert [dataset.find(key) for key in dataset.keys] == list(range(50))
    assert dataset.key(-1) == dataset.keys[-1] == "s049"
    with pytest.raises(KeyError):
        dataset.find("s050")


def test_columns_are_arrays(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    add_column(folder, "tokens", np.arange(50))
    dataset = IndexedShards(folder)
    assert dataset.columns == ("tokens",)
    assert dataset.column("tokens").tolist() == list(range(50))
    with pytest.raises(ManifestError, match="no column 'other'"):
        dataset.column("other")
    with pytest.raises(ManifestError, match="give their directory"):
        IndexedShards([folder / "wdshards-000000.tar"]).column("tokens")
    add_column(folder, "tokens", np.arange(50) + 1)
    with pytest.raises(StaleIndexError, match="open it again"):
        dataset.column("tokens")


def test_a_fingerprint_stands_for_the_content(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    paths = sorted(folder.glob("*.tar"))
    fingerprints = [IndexedShards(source).fingerprint for source in (folder, paths, paths[::-1], paths[:2])]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3
    add_column(folder, "tokens", np.arange(len(IndexedShards(folder))))
    assert IndexedShards(folder).fingerprint == fingerprints[0]


def test_a_dataset_is_small_when_it_is_sent_whatever_its_size(tmp_path: Path) -> None:
    sizes = []
    for count in (10, 2000):
        dataset = IndexedShards(indexed(tmp_path / str(count), count, 3))
        list(dataset)
        sizes.append(len(pickle.dumps(dataset)))
    assert sizes[1] - sizes[0] < 20
    assert sizes[1] < 1500


def test_a_pickled_dataset_reads_the_same(folder: Path) -> None:
    dataset = IndexedShards(folder, ["bin"], decode=None, verify="open")
    assert dataset[7] == pickle.loads(pickle.dumps(dataset))[7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "workers"), [("fork", 2), ("forkserver", 1), pytest.param("spawn", 1, marks=pytest.mark.nightly)]
)
def test_workers_of_torch_read_batches(folder: Path, method: str, workers: int) -> None:
    dataset: Any = IndexedShards(folder, decode=None)
    everything = list(dataset)
    sampler = BatchSampler(RandomSampler(range(50), generator=torch.Generator().manual_seed(0)), 8, drop_last=False)
    batches = list(sampler)
    loader: DataLoader[Raw] = DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, collate_fn=list, multiprocessing_context=method
    )
    expected = [[everything[index] for index in batch] for batch in batches]
    assert list(loader) == expected


def test_threads_may_read_together(folder: Path) -> None:
    dataset = IndexedShards(folder, decode=None, max_open=1)
    everything = list(dataset)
    indices = [[(7 * i + j) % 50 for j in range(0, 50, 3)] for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        for batch, read in zip(indices, pool.map(dataset.__getitems__, indices), strict=True):
            assert read == [everything[index] for index in batch]


def test_maps_are_limited_and_closed(folder: Path) -> None:
    def maps() -> Iterator[str]:
        return (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".tar"))

    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc here to count maps")
    before = len(list(maps()))
    dataset = IndexedShards(folder, decode=None, max_open=2)
    assert len(list(maps())) == before
    everything = list(dataset)
    assert len(list(maps())) == before + 2
    dataset.close()
    assert len(list(maps())) == before
    assert list(dataset) == everything


def test_a_relative_path_holds_when_the_process_goes_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    datasets = IndexedShards("."), IndexedShards(["wdshards-000000.tar"]), IndexedShards(Path("manifest.json"))
    monkeypatch.chdir("/")
    assert [dataset[0]["__key__"] for dataset in datasets] == ["s000"] * 3


def test_what_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give a directory of shards"):
        IndexedShards(tmp_path / "nowhere")
    with pytest.raises(ManifestError, match=r"no \.tar files"):
        IndexedShards(tmp_path)
    (tmp_path / "a.tar").touch()
    with pytest.raises(ManifestError, match="call index_shards"):
        IndexedShards(tmp_path)
    with pytest.raises(ValueError, match="the list of shards is empty"):
        IndexedShards([])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", "never"),
        ("max_open", 0),
        ("keys", [3]),
        ("keys", [["txt"]]),
        ("keys", 3),
        ("keys", b"txt"),
        ("decode", {"txt": "json"}),
    ],
)
def test_options_are_checked(folder: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* must be .*got"):
        IndexedShards(folder, **{name: value})


def test_a_transform_that_is_no_function_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="transform must be a function of a sample or None, got 3"):
        IndexedShards(folder, transform=3)  # type: ignore[arg-type]


def test_members_that_are_no_texts_are_refused(folder: Path) -> None:
    wrong: dict[Any, Any] = {3: float}
    with pytest.raises(ValueError, match=r"decode names \[3\], but the members are \['bin', 'txt'\]"):
        IndexedShards(folder, decode=wrong)
    with pytest.raises(ValueError, match=r"keys must be one or more"):
        IndexedShards(folder).sizes(3)  # type: ignore[arg-type] # what is refused


def test_keys_may_come_one_by_one(folder: Path) -> None:
    keys: Any = iter(["TXT", "bin"])
    assert IndexedShards(folder, keys).member_keys == ("txt", "bin")


def test_the_reader_loads_neither_torch_nor_lightning() -> None:
    script = """
import sys
import headrace.webdatamodule.shards.indexed_shards
sys.exit(3 if {name.partition(".")[0] for name in sys.modules} & {"torch", "lightning", "webdataset"} else 0)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_its_text_tells_what_it_holds(folder: Path) -> None:
    shards = IndexedShards(folder)
    told = repr(shards)
    assert told.startswith("<IndexedShards: 50 samples in ")
    # By the text grain recognises in a checkpoint that data are the same.
    assert f" shards, fingerprint {shards.fingerprint}, members: {', '.join(shards.member_keys)}>" in told


def test_a_tilde_is_the_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    here = f"~/{folder.name}"
    assert len(IndexedShards(here)) == len(IndexedShards([f"{here}/wdshards-000000.tar"])) + len(
        IndexedShards([*map(str, sorted(folder.glob("*.tar"))[1:])])
    )
    assert verify_shards(here) == []
    assert index_shards(here).n_samples == 50
    with pytest.raises(FileNotFoundError, match="~nobody-of-this-name"):
        IndexedShards("~nobody-of-this-name/x")


def test_what_is_given_in_the_place_of_shards_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">a\nM\n")
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([folder, folder], ValueError, r"is a directory: .*\{name: directory\}"),
        ({"a": {"b": folder}}, ValueError, "a place of shards must be .*got the mapping"),
        ({}, ValueError, "source must name a place"),
        (tmp_path / "x.fasta", ValueError, "is not a tar: headrace-shards pack"),
        ([tmp_path / "x.fasta"], ValueError, "is not a tar: headrace-shards pack"),
        (folder / "none-{000000..000001}.tar", FileNotFoundError, "none-000000.tar.*or a pattern"),
        ([folder / "none*.tar"], FileNotFoundError, r"none\*.tar.*or a pattern"),
        (None, ValueError, "source must be .*a directory.* got None"),
        (3, ValueError, "source must be .* got 3"),
        ([3], ValueError, "source must be .* got 3"),
        (["s3://bucket/*.tar"], ValueError, "without '\\*'.*give the directory's URL"),
    ]
    for source, kind, message in wrong:
        with pytest.raises(kind, match=message):
            IndexedShards(source)


def test_patterns_and_braces_are_expanded(folder: Path, tmp_path: Path) -> None:
    every = list(IndexedShards(folder))
    for source in (folder / "*.tar", f"{folder}/wdshards-{{000000..000002}}.tar", [folder / "wdshards-00000?.tar"]):
        assert list(IndexedShards(source)) == every
    first_and_last = IndexedShards(f"{folder}/wdshards-{{000002,000000}}.tar")
    assert (first_and_last.key(0), first_and_last.key(-1)) == ("s033", "s015")
    odd = tmp_path / "a[1]{2,3}"
    write_tars([("s", {"txt": b"1"})], odd, n_shards=1)
    index_shards(odd)
    assert len(IndexedShards(odd)) == len(IndexedShards([odd / "wdshards-000000.tar"])) == 1


def test_urls_and_braces_are_told_apart() -> None:
    places = ("s3://bucket/a", "C:/data", "/data", "pipe:cat a.tar", "runs::1/train")
    assert [place for place in places if is_url(place)] == ["s3://bucket/a"]
    assert expand_braces("a-{000..002}.tar") == ["a-000.tar", "a-001.tar", "a-002.tar"]


def test_a_worker_does_not_read_the_manifest_again(tmp_path: Path) -> None:
    write_tars([(f"s{i}", {"txt": b"%d" % i}) for i in range(20)], tmp_path, n_shards=4)
    index_shards(tmp_path)
    dataset = IndexedShards(tmp_path)
    expected, sent = list(dataset), pickle.dumps(dataset)
    for path in (tmp_path / "manifest.json", *tmp_path.glob("*.hri")):
        path.unlink()
    assert list(pickle.loads(sent)) == expected  # by the index of the set alone


@pytest.mark.parametrize("check", ["read", "open", "none"])
@pytest.mark.slow
def test_a_flipped_byte_of_an_index_is_found_however_little_is_compared(tmp_path: Path, check: Verify) -> None:
    samples = [(f"s{i * i}", {"txt": b"x" * (i % 7), "json": b"%d" % i}) for i in range(30)]
    write_tars([*samples, ("last", {"cls": b"1"})], tmp_path, n_shards=1)
    index_shards(tmp_path)
    [path] = tmp_path.glob("*.hri")
    data = path.read_bytes()
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(ShardError, match=r"index") as caught:
            list(IndexedShards(tmp_path, verify=check))
        assert caught.value.shard == str(path).removesuffix(".hri")
    path.write_bytes(data)
    assert len(list(IndexedShards(tmp_path, verify=check))) == 31
