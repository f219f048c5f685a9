"""Shards with packs: read, rebuilt, verified, resumed and streamed as shards without, and each damage is named."""

import json
import random
import signal
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from command_line import run
from hypothesis import given
from hypothesis import strategies as st
from shard_server import QUICK, served
from streams import quietly
from torch.utils.data import DataLoader
from written_sets import (
    Samples,
    by_webdataset,
    check_whole,
    contents,
    inodes,
    parts,
    script,
    some,
    tars,
)

from headrace.webdatamodule import (
    DamagedShardError,
    DistributedBatchSampler,
    Fault,
    IndexedShards,
    IndexedWebDataModule,
    Manifest,
    Remote,
    ResumableLoader,
    ShardError,
    ShardIndex,
    Split,
    StaleIndexError,
    WebDataModule,
    index_shards,
    verify_shards,
    write_shards,
)
from headrace.webdatamodule.shards.format.pack import MOST_BYTES, OVERHEAD, is_pack_name, read_samples
from headrace.webdatamodule.shards.format.tar import walk
from headrace.webdatamodule.shards.remote.remote_set import most_index_bytes
from headrace.webdatamodule.shards.writing.plan import sample_bytes
from headrace.webdatamodule.shards.writing.shard_builder import ShardBuilder

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="./\0"), min_size=1, max_size=12)
KEY = st.lists(TEXT, min_size=1, max_size=3).map("/".join).filter(lambda key: not key.startswith("__"))
SUFFIX = (TEXT | st.sampled_from(["txt", "json", "a.b"])).filter(lambda name: name.lower() != "hrpack")
DATA = st.binary(max_size=20) | st.binary(min_size=500, max_size=1200)
MEMBERS = st.dictionaries(SUFFIX.filter(lambda name: not name.startswith("__")), DATA, min_size=1, max_size=3).filter(
    lambda members: len({suffix.lower() for suffix in members}) == len(members)
)
SAMPLES = st.dictionaries(KEY, MEMBERS, min_size=1, max_size=12).map(lambda made: list(made.items()))
SIZES = st.sampled_from([1, 15, 40, 600, 3000, 1 << 16])


def texts(count: int) -> Samples:
    """Short texts, with a large sample in the middle."""
    draw = random.Random(0)
    made = [(f"s{i:04d}", {"txt": draw.randbytes(37 * i % 90), "json": b"[%d]" % i}) for i in range(count)]
    made[count // 2] = (made[count // 2][0], {"txt": draw.randbytes(9000), "json": b"[0]"})
    return made


def folded(samples: Samples) -> list[dict[str, Any]]:
    return [{"__key__": key, **{name.lower(): data for name, data in sample.items()}} for key, sample in samples]


# What is written is read


@pytest.mark.slow
@given(SAMPLES, SIZES, st.data())
def test_every_reader_finds_every_sample(samples: Samples, bytes_per_pack: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder, shards = Path(root, "packed"), data.draw(st.integers(1, len(samples)))
        write_shards(samples, folder, n_shards=shards, bytes_per_pack=bytes_per_pack, workers=1)
        wanted, before = folded(samples), contents(folder)
        for again in (False, True):
            if again:  # from the tar files alone
                for path in [*folder.glob("*.hr*"), folder / "manifest.json"]:
                    path.unlink()
                index_shards(folder)
                assert contents(folder) == before
            dataset = IndexedShards(folder, decode=None)
            assert list(dataset) == [dataset[at] for at in range(len(samples))] == wanted
            order = data.draw(st.lists(st.integers(0, len(samples) - 1)))
            assert dataset.__getitems__(order) == [wanted[at] for at in order]
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(samples))] * 2)))
            assert list(dataset.iterate(start, stop)) == wanted[start:stop]
            assert list(dataset.keys) == [key for key, _ in samples]
            assert [dataset.find(key) for key, _ in samples] == list(range(len(samples)))
            for name in dataset.member_keys:
                lengths = [len(sample.get(name, b"")) for sample in wanted]
                assert dataset.sizes(name, missing=0).tolist() == lengths
        assert verify_shards(folder) == []
        # Foreign readers see plain files, each pack one of them, and never more bytes than without packs.
        write_shards(samples, Path(root, "plain"), n_shards=shards, workers=1)
        for path, plain in zip(tars(folder), tars(Path(root, "plain")), strict=True):
            with tarfile.open(path) as tar:
                listed = tar.getnames()
            assert listed == [member.name for member in walk(path.read_bytes())]
            assert ShardIndex.open(path).packs == sum(map(is_pack_name, listed))
            assert len(by_webdataset(path)) <= len(listed)
            assert path.stat().st_size <= plain.stat().st_size
            if not any(map(is_pack_name, listed)):
                assert path.read_bytes() == plain.read_bytes()


@pytest.mark.slow
@given(SAMPLES, SIZES, st.integers(1, 60_000), st.booleans())
def test_no_shard_is_larger_than_asked(samples: Samples, bytes_per_pack: int, most: int, stream: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        given_samples = iter(samples) if stream else samples
        options: dict[str, Any] = {} if stream else {"workers": 1}
        manifest = write_shards(given_samples, root, bytes_per_shard=most, bytes_per_pack=bytes_per_pack, **options)
        assert all(shard.nbytes <= most or shard.samples == 1 for shard in manifest.shards)
        assert list(IndexedShards(root, decode=None)) == folded(samples)


@given(SAMPLES, SIZES)
def test_samples_take_no_more_than_is_said_before(samples: Samples, bytes_per_pack: int) -> None:
    said, last = OVERHEAD, 0
    for count in range(1, len(samples) + 1):
        builder = ShardBuilder("s.tar", bytes_per_pack)
        for key, sample in samples[:count]:
            builder.add(key, sample)
        assert len(builder) == count
        at_most = builder.nbytes
        builder.finish()
        key, sample = samples[count - 1]
        said += sample_bytes(key, sample, bytes_per_pack)
        assert builder.samples.end <= min(at_most, said, last + sample_bytes(key, sample))
        last = at_most


def test_what_would_not_be_smaller_is_no_pack(tmp_path: Path) -> None:
    apart = [[("a", {"txt": b"1"})], [("a" * 90, {"b": bytes(512)}), ("b" * 90, {"b": bytes(512)})]]
    together = [[("a", {"txt": b"1", "cls": b"2"})], [("a", {"b": bytes(400)}), ("b", {"b": bytes(400)})]]
    for packs, cases in ((0, apart), (1, together)):
        for samples in cases:
            write_shards(samples, tmp_path, n_shards=1, bytes_per_pack=2000, overwrite=True)
            [path] = tars(tmp_path)
            assert [is_pack_name(member.name) for member in walk(path.read_bytes())] == (
                [True] if packs else [False] * len(samples)
            )


@pytest.mark.slow
def test_no_table_is_larger_than_readers_take(tmp_path: Path) -> None:
    wide = {f"{'m' * 64}{n}": b"" for n in range(60_000)}  # in a table, 4.9 MB
    write_shards([("a", {"txt": b"1"}), ("b", wide), ("c", {"txt": b"2"})], tmp_path, n_shards=1, bytes_per_pack=1000)
    names = [member.name for member in walk(tars(tmp_path)[0].read_bytes())]
    assert (len(names), any(map(is_pack_name, names))) == (60_002, False)
    many = [(f"{'k' * 60}{n}", {"txt": b""}) for n in range(30_000)]
    write_shards(many, tmp_path, n_shards=1, bytes_per_pack=1 << 20, overwrite=True)
    samples = read_samples(tars(tmp_path)[0].read_bytes())
    assert (samples.packs, len(samples.keys)) == (3, 30_000)


def test_the_first_pack_of_a_shard_has_room(tmp_path: Path) -> None:
    samples = [(f"s{i}", {"txt": bytes(4550)}) for i in range(2)]  # together they fit, but for header and padding
    manifest = write_shards(samples, tmp_path, bytes_per_shard=10_240, bytes_per_pack=1 << 20)
    assert [shard.nbytes for shard in manifest.shards] == [10_240, 10_240]


@pytest.mark.parametrize("stream", [False, True])
def test_shards_of_packs_are_as_full_as_asked(tmp_path: Path, stream: bool) -> None:
    samples = [(f"s{i:05d}", {"txt": b"x" * 250}) for i in range(8000)]
    given_samples: Any = iter(samples) if stream else samples
    manifest = write_shards(given_samples, tmp_path, bytes_per_shard=1 << 20, bytes_per_pack=1 << 16)
    least = 0.95 if stream else 0.85  # of what is not written yet, tables are counted with the longest numbers
    assert [shard.nbytes > least * (1 << 20) for shard in manifest.shards[:-1]] == [True] * 2


def test_short_texts_take_few_bytes(tmp_path: Path) -> None:
    draw = random.Random(0)
    samples = [(f"text{i:06d}", {"txt": draw.randbytes(draw.randint(100, 400))}) for i in range(10_000)]
    payload = sum(len(sample["txt"]) for _, sample in samples)
    for name, packs, least, most in (("packed", 1 << 16, 1.0, 1.3), ("plain", None, 4.0, 5.0)):
        write_shards(samples, tmp_path / name, n_shards=2, bytes_per_pack=packs, workers=1)
        taken = sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        assert least < taken / payload < most


def test_gnu_tar_lists_and_unpacks(tmp_path: Path) -> None:
    write_shards(texts(100), tmp_path / "set", n_shards=1, bytes_per_pack=2000)
    [path] = tars(tmp_path / "set")
    done = subprocess.run(["tar", "-tvf", path], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert (done.stderr, names[0], "s0050.txt" in names, len(names) < 12) == ("", "s0000.hrpack", True, True)
    subprocess.run(["tar", "-xf", path, "-C", tmp_path], check=True)
    assert (tmp_path / names[0]).read_bytes().startswith(b"\x89HRK\r\n\x1a\n")


def test_a_set_may_have_shards_with_packs_and_without(tmp_path: Path) -> None:
    samples = [*some(5, nbytes=3000), *[(f"t{i}", {"txt": b"short"}) for i in range(5)]]
    write_shards(samples, tmp_path, n_shards=2, bytes_per_pack=1000)
    indexes = [ShardIndex.open(path) for path in tars(tmp_path)]
    assert [index.packs for index in indexes] == [0, 1]
    assert list(IndexedShards(tmp_path, decode=None)) == folded(samples)


def test_plans_without_packs_have_bounds_alone(tmp_path: Path) -> None:
    samples = [(f"s{i:03d}", {"txt": b"x" * i, "json": b"{}"}) for i in range(40)]
    write_shards(samples, tmp_path / "list", n_shards=3)
    assert json.loads((tmp_path / "list" / "shard.plan.json").read_text())["bounds"] == "71f5d28afab9bc02"
    write_shards(iter(samples), tmp_path / "stream", samples_per_shard=7)
    assert json.loads((tmp_path / "stream" / "shard.plan.json").read_text())["bounds"] == "4141009665bf310c"


@pytest.mark.slow
def test_the_index_of_empty_members_is_not_too_large_to_be_fetched(tmp_path: Path) -> None:
    many = [(f"{i}", {f"{n}": b"" for n in range(20)}) for i in range(16_000)]
    write_shards(many, tmp_path, n_shards=1, bytes_per_pack=1 << 16)
    [path] = tars(tmp_path)
    nbytes, of_index = path.stat().st_size, Path(f"{path}.hri").stat().st_size
    assert nbytes < of_index <= most_index_bytes(nbytes)


def test_offsets_are_those_of_the_data(tmp_path: Path) -> None:
    write_shards(texts(30), tmp_path, n_shards=1, bytes_per_pack=3000)
    dataset, [path] = IndexedShards(tmp_path, decode=None), tars(tmp_path)
    whole = path.read_bytes()
    for at, (_, sample) in enumerate(texts(30)):
        assert whole[dataset.offset_of(at) :].startswith(b"".join(sample.values())[: len(sample["txt"])])


# What is refused


@pytest.mark.parametrize("number", [0, -1, MOST_BYTES + 1])
def test_sizes_of_packs_that_are_not_allowed(tmp_path: Path, number: int) -> None:
    with pytest.raises(ValueError, match="bytes_per_pack must be an int"):
        write_shards(some(3), tmp_path, n_shards=1, bytes_per_pack=number)
    with pytest.raises(TypeError, match="bytes_per_pack must be an int"):
        write_shards(some(3), tmp_path, n_shards=1, bytes_per_pack="64K")  # type: ignore[arg-type] # on purpose
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("packs", [None, 1000])
def test_what_cannot_be_stored_is_refused_with_and_without_packs(tmp_path: Path, packs: int | None) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("a", {"hrpack": b""}, "readers use for themselves: rename it"),
        ("x" * 200, {"txt": b"1"}, "too long"),
        ("a.b", {"txt": b""}, "cannot be stored"),
        ("a", {"txt": "text"}, "must be bytes"),
        ("a", {}, "no members"),
    ]
    for key, sample, message in wrong:
        with pytest.raises(ShardError, match=message):
            write_shards([("first", {"txt": b"1"}), (key, sample)], tmp_path, n_shards=1, bytes_per_pack=packs)
    with pytest.raises(ShardError, match="'a' occurs twice"):
        write_shards([("a", {"txt": b""})] * 2, tmp_path, n_shards=1, bytes_per_pack=packs)


# Damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(texts(24), folder, n_shards=1, bytes_per_pack=300)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.slow
def test_each_flipped_byte_names_its_sample_or_its_pack(folder: Path) -> None:
    [path] = tars(folder)
    before = path.read_bytes()
    samples, index = read_samples(before), ShardIndex.open(path)
    owners: dict[int, tuple[str, str]] = {}
    for at, (begin, size) in enumerate(zip(samples.offsets, samples.sizes, strict=True)):
        sample, member = index.locate(at)
        owners |= dict.fromkeys(range(begin, begin + size), (index.key(sample), member))
    packs = [member for member in walk(before) if is_pack_name(member.name)]
    assert len(packs) == samples.packs > 2
    tables = 0
    for pack in packs:
        for byte in range(pack.offset, pack.offset + pack.size):
            path.write_bytes(before[:byte] + bytes([before[byte] ^ 1 << byte % 8]) + before[byte + 1 :])
            [fault] = verify_shards(folder)
            if byte in owners:
                key, member = owners[byte]
                begin = index.offsets[[f"{key}.txt", f"{key}.json"].index(member) + 2 * index.find(key)]
                assert (fault.sample, fault.member, fault.offset) == (key, member, begin)
            else:
                tables += 1
                assert (fault.sample, fault.member, fault.offset) == (None, pack.name, pack.offset - 512)
                assert "the pack" in fault.message
    assert tables > 100
    for pack in packs:  # the padding behind is that of the last sample, the header that of the pack or the first one
        inside = [at for at in samples.offsets if pack.offset <= at < pack.offset + pack.size]
        first, last = (index.key(index.locate(samples.offsets.index(at))[0]) for at in (inside[0], inside[-1]))
        end = pack.offset + pack.size
        for byte in (end, end + -end % 512 - 1) if end % 512 else ():
            path.write_bytes(before[:byte] + b"!" + before[byte + 1 :])
            assert [(fault.sample, fault.offset) for fault in verify_shards(folder)] == [(last, byte)]
        for byte in range(pack.offset - 512, pack.offset, 37):
            path.write_bytes(before[:byte] + bytes([before[byte] ^ 1]) + before[byte + 1 :])
            assert {fault.sample for fault in verify_shards(folder)} <= {None, first}
            assert verify_shards(folder)
    path.write_bytes(before)
    assert verify_shards(folder) == []


def test_damaged_data_are_not_read_and_the_others_are(tmp_path: Path) -> None:
    samples = [(f"s{i:04d}", {"txt": b"x" * 100}) for i in range(200)]
    write_shards(samples, tmp_path, n_shards=1, bytes_per_pack=900)
    [path], at = tars(tmp_path), 60
    damaged = bytearray(path.read_bytes())
    damaged[IndexedShards(tmp_path).offset_of(at)] ^= 1  # not where opening looks
    path.write_bytes(damaged)
    dataset, wanted = IndexedShards(tmp_path, decode=None), folded(samples)
    for read in (lambda: dataset[at], lambda: dataset.__getitems__([at + 1, at]), lambda: list(dataset)):
        with pytest.raises(DamagedShardError, match="not those that were indexed") as caught:
            read()
        assert (caught.value.sample, caught.value.member) == ("s0060", "s0060.txt")
    assert [dataset[i] for i in range(200) if i != at] == [wanted[i] for i in range(200) if i != at]


def test_a_damaged_table_does_no_harm_to_reads_but_is_found_by_all_who_need_it(folder: Path) -> None:
    [path] = tars(folder)
    before = path.read_bytes()
    at = before.index(b" s000")
    path.write_bytes(before[:at] + b"'" + before[at + 1 :])
    assert list(IndexedShards(folder, decode=None)) == folded(texts(24))
    message = "the pack is damaged: the checksum of its table does not fit"
    with pytest.raises(DamagedShardError, match=message):
        index_shards(folder, force=True)


@pytest.mark.slow
def test_each_cut_is_found(folder: Path) -> None:
    [path] = tars(folder)
    before = path.read_bytes()
    for length in range(0, len(before), 41):
        path.write_bytes(before[:length])
        assert {fault.shard for fault in verify_shards(folder)} == {str(path)}
        with pytest.raises(ShardError):
            list(IndexedShards(folder))


def test_an_index_of_another_shard_is_stale(folder: Path) -> None:
    other = folder / "other"
    write_shards([(key, {**sample, "txt": sample["txt"][::-1]}) for key, sample in texts(24)], other, n_shards=1)
    packed = folder / "packed"
    write_shards(texts(24)[::-1], packed, n_shards=1, bytes_per_pack=900)
    [path] = tars(folder)
    for tar in (*tars(other), *tars(packed)):
        path.write_bytes(tar.read_bytes())
        with pytest.raises(StaleIndexError):
            IndexedShards(folder, verify="none")[0]
        assert verify_shards(folder)
        assert index_shards(folder).n_samples == 24  # an index that does not fit is made anew
        assert verify_shards(folder) == []


def test_members_that_the_index_does_not_know_are_found(folder: Path) -> None:
    [path] = tars(folder)
    hri = Path(f"{path}.hri")
    index = hri.read_bytes()
    write_shards(texts(24), folder / "other", n_shards=1, bytes_per_pack=500)
    hri.write_bytes(Path(f"{tars(folder / 'other')[0]}.hri").read_bytes())
    assert verify_shards(folder)
    hri.write_bytes(index)
    assert verify_shards(folder) == []


# Writes that were stopped, and the next ones


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_kill_between_packs_leaves_only_what_is_whole(tmp_path: Path, workers: int) -> None:
    options = {"count": 100, "nbytes": 40_000, "n_shards": 2, "bytes_per_pack": 100_000, "workers": workers}
    done = script(tmp_path, trouble={"95": "kill"}, **options)
    assert done.returncode == (-signal.SIGKILL if workers == 1 else 1)
    assert not (tmp_path / "manifest.json").exists()
    assert [path.name for path in tars(tmp_path)] in ([], ["shard-000000.tar"])
    if workers == 1:
        [part] = [tmp_path / name for name in parts(tmp_path) if ".shard-000001.tar." in name]
        assert part.read_bytes().count(b"\x89HRK\r\n\x1a\n") > 10
    check_whole(tmp_path, **options)
    assert all(ShardIndex.open(path).packs == 25 for path in tars(tmp_path))


@pytest.mark.slow
def test_a_kill_of_a_generator_between_packs(tmp_path: Path) -> None:
    options = {"count": 100, "nbytes": 40_000, "bytes_per_pack": 100_000, "stream": True}
    assert script(tmp_path, trouble={"60": "kill"}, **options).returncode == -signal.SIGKILL
    assert not (tmp_path / "manifest.json").exists()
    done = script(tmp_path, **options)
    assert (done.returncode, done.stdout.strip(), parts(tmp_path)) == (0, "100", []), done.stderr
    assert verify_shards(tmp_path) == []


@pytest.mark.parametrize("stream", [False, True])
def test_another_size_of_packs_is_another_plan(tmp_path: Path, stream: bool) -> None:
    def write(packs: int | None, **options: Any) -> Manifest:
        given_samples: Any = iter(texts(40)) if stream else texts(40)
        return write_shards(given_samples, tmp_path, samples_per_shard=20, bytes_per_pack=packs, **options)

    first = write(900, fingerprint="1")
    kept = inodes(tmp_path)
    assert write(900, fingerprint="1") == first
    assert inodes(tmp_path) == kept
    for packs in (1000, None, 900):
        write(packs, fingerprint="1")
        assert inodes(tmp_path) != kept
        assert [ShardIndex.open(path).packs > 0 for path in tars(tmp_path)] == [packs is not None] * 2
        assert list(IndexedShards(tmp_path, decode=None)) == folded(texts(40))
        kept = inodes(tmp_path)
    with pytest.raises(FileExistsError):
        write(1000)


def test_whole_shards_are_kept_by_the_next_run(tmp_path: Path) -> None:
    write_shards(texts(40), tmp_path, n_shards=4, bytes_per_pack=900)
    (tmp_path / "manifest.json").unlink()
    tars(tmp_path)[2].unlink()
    kept = inodes(tmp_path)
    write_shards(texts(40), tmp_path, n_shards=4, bytes_per_pack=900)
    assert kept.items() <= inodes(tmp_path).items()
    assert verify_shards(tmp_path) == []
    (tmp_path / "manifest.json").unlink()
    tars(tmp_path)[2].unlink()
    with pytest.raises(FileExistsError, match="holds other samples"):
        write_shards([*texts(39), ("other", {"txt": b""})], tmp_path, n_shards=4, bytes_per_pack=900)


@pytest.mark.slow
def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    for workers in (1, 2):
        write_shards(texts(200), tmp_path / str(workers), n_shards=4, bytes_per_pack=900, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


# Everything that reads shards


def loader_of(dataset: IndexedShards, **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(len(dataset), 8, shuffle=True, num_replicas=1, rank=0)
    return ResumableLoader(dataset, batch_sampler=batches, collate_fn=list, **options)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_a_server_gives_what_the_disk_gives(tmp_path: Path, cached: bool) -> None:
    wanted, order = folded(texts(120)), np.random.default_rng(0).permutation(120).tolist()
    fetched = []
    for name, packs in (("packed", 900), ("plain", None)):
        write_shards(texts(120), tmp_path / name, n_shards=4, bytes_per_pack=packs, workers=1)
        with served(tmp_path / name) as site:
            remote = Remote(site.url, cache_dir=tmp_path / f"cache of {name}" if cached else None, retry=QUICK)
            far = IndexedShards(remote, decode=None)
            for batch in (order[:50], order[50:]):
                assert far.__getitems__(batch) == [wanted[at] for at in batch]
            assert list(far) == wanted
            assert far[60] == wanted[60]
            loader = loader_of(far, num_workers=2)
            seen = [sample for batch in loader for sample in batch]
            assert sorted(sample["__key__"] for sample in seen) == [sample["__key__"] for sample in wanted]
            traffic = loader.report().remote
            fetched.append(0 if traffic is None else traffic.fetched)
    assert cached or 0 < fetched[0] < fetched[1]


def test_a_loader_resumes(tmp_path: Path) -> None:
    write_shards(texts(64), tmp_path, n_shards=2, bytes_per_pack=900)

    dataset = IndexedShards(tmp_path, decode=None)
    whole_run, first, second = list(loader_of(dataset)), loader_of(dataset), loader_of(dataset)
    iterator = iter(first)
    begun = [next(iterator) for _ in range(3)]
    second.load_state_dict(first.state_dict())
    assert begun + list(second) == whole_run
    assert sorted(sample["__key__"] for batch in whole_run for sample in batch) == [key for key, _ in texts(64)]


@pytest.mark.slow
def test_workers_of_torch(tmp_path: Path) -> None:
    write_shards(texts(64), tmp_path, n_shards=2, bytes_per_pack=900)
    dataset: Any = IndexedShards(tmp_path, decode=None)
    loader: Any = DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list)
    assert [sample for batch in loader for sample in batch] == folded(texts(64))


def test_an_indexed_data_module(tmp_path: Path) -> None:
    write_shards(texts(40), tmp_path, n_shards=2, bytes_per_pack=900)
    module = IndexedWebDataModule({"train": tmp_path}, batch_size=8, keys=["json"], collate_fn=list)
    module.setup("fit")
    seen = [sample["__key__"] for batch in module.train_dataloader() for sample in batch]
    assert sorted(seen) == [key for key, _ in texts(40)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_stream_reads_packs_by_their_index_and_refuses_them_without(tmp_path: Path) -> None:
    samples = [(f"s{i:03d}", {"json": b"%d" % i, "txt": b"x" * (2000 * (i == 17))}) for i in range(40)]
    write_shards(samples, tmp_path, n_shards=2, bytes_per_pack=900, prefix="wdshards")
    options: dict[str, Any] = {"pipeline_prebatch_wld": {Split.train: wds.batched(4, collation_fn=None)}}
    module = WebDataModule({Split.train: 40}, "json", {Split.train: tmp_path}, 4, **options)
    assert [one for batch in quietly(module.train_dataloader()) for (one,) in batch] == list(range(40))
    for path in tmp_path.glob("*.hri"):
        path.unlink()
    choice: dict[str, Any] = {"select_files": lambda name: name.endswith(".json"), "rename_files": lambda _: "a.json"}
    for reading in ({}, choice, {"handler": wds.ignore_and_continue}):
        module = WebDataModule(
            {Split.train: 40}, "json", {Split.train: tmp_path}, 4, kwargs_wds={Split.train: reading}, **options
        )
        with pytest.raises(ShardError, match="whose samples are read through its index") as caught:
            quietly(module.train_dataloader())
        assert (caught.value.shard, caught.value.member) == (str(tars(tmp_path)[0]), "s000.hrpack")


# The command line


def fasta(count: int) -> str:
    draw = random.Random(0)
    return "".join(f">p{i}\n{''.join(draw.choices('ACDE', k=draw.randint(30, 300)))}\n" for i in range(count))


def test_the_command_line_packs_lists_and_tells(tmp_path: Path) -> None:
    (tmp_path / "p.fasta").write_text(fasta(500))
    out = tmp_path / "out"
    done = run("pack", tmp_path / "p.fasta", out, "--bytes-per-pack", "16K", "--bytes-per-shard", "60K", "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    packed = json.loads(done.stdout)
    assert (packed["samples"], packed["members"], packed["wrote"]) == (500, ["id.txt", "seq.txt"], packed["shards"])
    assert packed["shards"] == 3  # by what samples take in packs
    assert all(path.stat().st_size <= 60 << 10 for path in tars(out))
    done = run("pack", tmp_path / "p.fasta", out, "--bytes-per-pack", "16K", "--bytes-per-shard", "60K")
    assert b"kept 3 shards, wrote 0" in done.stdout

    info = json.loads(run("info", out, "--json").stdout)
    assert all(shard["packs"] >= 1 for shard in info["shards"])
    assert run("info", out).stdout.split(b"\n\n")[-1].split(b"\n")[0].split() == [
        b"shard",
        b"samples",
        b"bytes",
        b"packs",
        b"skipped",
    ]
    lines = run("ls", out).stdout.splitlines()
    assert (len(lines), lines[7].split(b"\t")[:2]) == (500, [b"p7", b"id.txt,seq.txt"])
    shard, offset, nbytes, _, name = run("ls", "--long", out).stdout.splitlines()[15].decode().split("\t")
    assert name == "p7.seq.txt"
    data = (out / shard).read_bytes()[int(offset) :][: int(nbytes)]
    assert run("cat", out, "p7.seq.txt").stdout == data
    assert run("verify", out).returncode == 0
    before = contents(out)
    for path in out.glob("*.hri"):
        path.unlink()
    assert run("index", out).returncode == 0
    assert contents(out) == before


def test_the_command_line_says_nothing_of_packs_where_there_are_none(tmp_path: Path) -> None:
    write_shards(some(4), tmp_path, n_shards=1)
    assert b"packs" not in run("info", tmp_path).stdout


def test_the_warning_of_growth_names_the_cure(tmp_path: Path) -> None:
    (tmp_path / "p.fasta").write_text("".join(f">p{i}\nACDE\n" for i in range(9000)))
    done = run("pack", tmp_path / "p.fasta", tmp_path / "plain")
    assert (done.returncode, b"Pass --bytes-per-pack 64K" in done.stderr) == (0, True)
    done = run("pack", tmp_path / "p.fasta", tmp_path / "packed", "--bytes-per-pack", "64K")
    assert (done.returncode, done.stderr) == (0, b"")
    taken = {name: sum(path.stat().st_size for path in tars(tmp_path / name)) for name in ("plain", "packed")}
    assert taken["plain"] > 30 * taken["packed"]


def test_faults_of_packs_are_texts_of_one_line() -> None:
    assert str(Fault("the pack is damaged: x", "s.tar", None, "a.hrpack", 0)) == (
        "the pack is damaged: x (shard 's.tar', member 'a.hrpack', offset 0)"
    )
