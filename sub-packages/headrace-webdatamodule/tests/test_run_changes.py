"""Changes of a run in detail: what is accepted and refused, at which step it holds, and what is told of samples."""

import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from indexed_runs import Save, data, fit, make_shards
from lightning.pytorch.callbacks import Callback
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, RandomSampler, SequentialSampler, TensorDataset

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    MapDataModule,
    ResumableLoader,
    index_shards,
    write_shards,
    write_tars,
)
from headrace.webdatamodule.loading import worker
from headrace.webdatamodule.loading.permutation import Shuffle

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
N = 40


def loader(samples: Any = None, *, workers: int = 0, **options: Any) -> ResumableLoader:
    samples = list(range(N)) if samples is None else samples
    batches = DistributedBatchSampler(len(samples), **{"batch_size": 4, "seed": 1} | options)
    return ResumableLoader(samples, batches, collate_fn=list, num_workers=workers)


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch]


def test_a_change_is_refused_with_the_name_by_which_it_is_accepted() -> None:
    saved = loader()
    next(iter(saved))
    other = loader(batch_size=5, drop_last=True)
    told = r"it differs in batch_size \(4, here 5\), drop_last \(False, here True\): go on with accept=\['batch_size', "
    for accept in ((), {"batch_size"}):
        with pytest.raises(ValueError, match=told):
            other.load_state_dict(saved.state_dict(), accept=accept)
    other.load_state_dict(saved.state_dict(), accept={"batch_size", "drop_last"})
    assert [len(batch) for batch in other] == [5] * 7
    with pytest.raises(ValueError, match=r"accept must name some of \['batch_size', .*, 'data'\], got 'lr'"):
        other.load_state_dict(saved.state_dict(), accept="lr")
    more = loader(list(range(N + 8)))
    with pytest.raises(
        ValueError, match=r"of other train data .*, go on with accept=\{'data'\} where samples were app"
    ):
        more.load_state_dict(saved.state_dict())


def test_what_an_epoch_drops_at_its_end_does_not_come_again() -> None:
    def made(count: int = N, **options: Any) -> ResumableLoader:
        return loader(
            list(range(count)), **{"drop_last": True, "num_replicas": 3, "rank": 0, "batch_size": 3} | options
        )

    ended, skipped = made(), made()
    assert len(list(ended)) == 4  # of 36 samples on all ranks
    assert len(skipped.skip(9)) == 36
    for one in (ended, skipped):
        state = one.state_dict()
        assert state["batch_sampler"]["position"] == N
        alone: dict[str, Any] = {"num_replicas": 1, "rank": 0}
        fewer, all_of_them, grown = made(**alone), made(drop_last=False), made(N + 7, **alone)
        fewer.load_state_dict(state)
        all_of_them.load_state_dict(state, accept={"drop_last"})
        grown.load_state_dict(state, accept={"data"})
        assert list(fewer) == list(all_of_them) == []
        assert set(flat(grown)) < set(range(N, N + 7))


@pytest.mark.parametrize("changed", ["data", "shuffle"])
def test_the_rest_of_an_epoch_is_shuffled_by_seed_epoch_and_position(changed: str) -> None:
    saved = loader(shuffle=changed == "data")
    saved.set_epoch(2)
    came = flat(islice(saved, 3))
    other = loader(list(range(N + 9))) if changed == "data" else loader()
    other.load_state_dict(saved.state_dict(), accept={changed})
    left = flat(saved)[12:] if changed == "shuffle" else None
    if left is None:
        whole = loader()
        whole.set_epoch(2)
        left = flat(whole)[12:] + list(range(N, N + 9))
    assert flat(other) == [left[place] for place in Shuffle(len(left), 1, 2, 12).take(0, len(left))]
    assert flat(other.step(number)[0] for number in range(3)) == came


class Plain(Dataset[int]):
    """Says nothing of itself."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Marked(Plain):
    """Says what it is, but nothing of its first samples."""

    @property
    def fingerprint(self) -> str:
        return f"marked {self.count}"


class Known(Marked):
    """Knows its first samples."""

    def prefix_fingerprint(self, n_samples: int) -> str:
        return f"marked {n_samples}"


def tensors(count: int) -> Any:
    return TensorDataset(torch.arange(count), torch.arange(count) * 2)


GROWING = {
    "list": lambda count: list(range(count)),
    "array": np.arange,
    "tensors": tensors,
    "concatenated": lambda count: ConcatDataset([tensors(10), tensors(count - 10)]),
    "more concatenated": lambda count: ConcatDataset([tensors(N), *([tensors(count - N)] if count > N else [])]),
    "plain": Plain,
    "known": Known,
}


@pytest.mark.parametrize("kind", GROWING)
def test_a_dataset_that_grew_is_taken_in(kind: str) -> None:
    make: Any = GROWING[kind]

    def made(count: int) -> ResumableLoader:
        return ResumableLoader(make(count), DistributedBatchSampler(count, 4), collate_fn=len)

    saved, grown = made(N), made(N + 7)
    for _ in islice(saved, 3):
        pass
    before = flat(saved.step(number)[0] for number in range(3))
    grown.load_state_dict(saved.state_dict(), accept={"data"})
    after: list[int] = []
    for _ in grown:
        after += [int(index) for index in grown.indices]
    assert sorted(before + after) == list(range(N + 7))
    assert flat(grown.step(number)[0] for number in range(3)) == before
    assert grown.state_dict()["batch_sampler"]["run"][-1]["n"] == N + 7


def test_a_dataset_that_was_empty_may_grow() -> None:
    empty = loader([])
    assert list(empty) == []
    grown = loader(list(range(9)), shuffle=False)
    other = loader([], shuffle=False)
    assert other.state_dict()["batch_sampler"]["run"][0]["n"] == 0
    grown.load_state_dict(other.state_dict(), accept={"data"})
    assert flat(grown) == list(range(9))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (list(range(N)), list(range(1, N + 8)), "whose first 40 samples are those of the checkpoint"),
        (list(range(N)), list(range(N - 8)), "whose first 40 samples are those"),
        (Marked(N), Marked(N + 1), r"a dataset with a fingerprint needs prefix_fingerprint\(n_samples\), too"),
    ],
)
def test_a_dataset_that_did_not_grow_by_its_end_is_refused(before: Any, after: Any, told: str) -> None:
    saved, other = loader(before), loader(after)
    next(iter(saved))
    with pytest.raises(ValueError, match=told):
        other.load_state_dict(saved.state_dict(), accept={"data"})
    assert len(list(other)) == len(other)


def shards(folder: Path, first: int, last: int) -> list[str]:
    samples = [(f"s{number:02d}", {"json": b"%d" % number}) for number in range(first, last)]
    return list(map(str, write_tars(samples, folder, n_shards=2)))


def test_shards_that_were_appended_are_taken_in(tmp_path: Path) -> None:
    first, second = shards(tmp_path / "a", 0, N), shards(tmp_path / "b", N, N + 10)
    for folder in ("a", "b"):
        index_shards(tmp_path / folder)
    saved = loader(IndexedShards(first))
    for _ in islice(saved, 4):
        pass
    before = flat(saved.step(number)[0] for number in range(4))
    for more in (IndexedShards(first + second), IndexedShards({"": first + second})):
        grown = loader(more)
        grown.load_state_dict(saved.state_dict(), accept={"data"})
        assert sorted(before + [sample["json"] for batch in grown for sample in batch]) == list(range(N + 10))
    with pytest.raises(ValueError, match="append whole shards"):
        loader(IndexedShards(second + first)).load_state_dict(saved.state_dict(), accept={"data"})
    sources = IndexedShards({"one": first, "two": second})
    assert sources.prefix_fingerprint(N) == IndexedShards(first).fingerprint
    assert sources.prefix_fingerprint(N + 1) is None
    assert sources.find("s41") == 41
    with pytest.raises(ValueError, match="2 samples of the sources one, two have the key 's01'"):
        IndexedShards({"one": first, "two": first}).find("s01")


def test_batch_samplers_that_keep_no_record_say_what_is_needed() -> None:
    plain = ResumableLoader(list(range(N)), BatchSampler(SequentialSampler(range(N)), 4, drop_last=False))
    next(iter(plain))
    cure = "use DistributedBatchSampler or DistributedSizeAwareBatchSampler"
    calls: list[Any] = [
        lambda: plain.exclude([1]),
        lambda: plain.skip(1),
        lambda: plain.reshard(2, 0),
        lambda: plain.step(0),
        lambda: plain.samples_of_step(0),
        lambda: plain.replay(0),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=rf"batch_sampler must have \w+\(\) for that, got BatchSampler: {cure}"):
            call()
    with pytest.raises(TypeError, match=rf"needs a batch_sampler with load_state_dict\(state, accept\), .*: {cure}"):
        plain.load_state_dict(plain.state_dict(), accept={"batch_size"})
    assert len(plain.excluded_indices) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_read_ahead_is_dropped_and_the_loop_goes_on(workers: int) -> None:
    one = loader(workers=workers)
    whole = [list(batch) for batch in loader()]
    came, pids = [], set()
    for batch in one:
        came.append(batch)
        pids |= {process.pid for process in getattr(one._iterator, "_workers", ())}
        if one.steps == 3:
            one.exclude([*whole[3], whole[5][0]])  # of the next batch, and of one that may be read already
            assert one.excluded_indices.tolist() == sorted([*whole[3], whole[5][0]])
            assert (len(one), one.remaining) == (9, 6)
    assert len(pids) == workers  # they stay
    assert came[:4] == [*whole[:3], whole[4]]
    assert sorted(flat(came)) == sorted(set(range(N)) - {*whole[3], whole[5][0]})
    assert [one.step(number)[0] for number in range(9)] == came
    assert sorted(flat(one)) == sorted(flat(came))  # in the next epoch, too
    one.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_that_were_only_read_ahead_have_no_number(workers: int) -> None:
    one = loader(workers=workers)
    log = list(islice(one, 3))
    one.set_epoch(1)
    log += list(islice(one, 2))
    assert one.state_dict()["batch_sampler"]["step"] == len(log)
    assert [one.step(number)[0] for number in range(len(log))] == log
    one.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_stay_excluded_where_the_epoch_begins_anew(workers: int) -> None:
    one = loader(workers=workers)
    state = one.state_dict()
    for _ in islice(one, 2):
        pass
    one.exclude([1, 2])  # after the break
    assert one.state_dict()["batch_sampler"]["run"][-1]["exclude"] == [1, 2]
    assert sorted(flat(one)) == [0, *range(3, N)]
    one.load_state_dict(state)  # which has none
    running = iter(one)
    next(running)
    one.exclude([3])
    next(iter(one))  # a look, from before the change
    running.close()  # type: ignore[attr-defined]  # a generator
    assert sorted(flat(one)) == [0, 1, 2, *range(4, N)]
    one.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_changes_of_the_batch_sampler_itself_act_in_the_loop(workers: int) -> None:
    one, other = loader(workers=workers), loader()
    whole = [list(batch) for batch in loader()]
    came, expected, states = list[list[int]](), list[list[int]](), list[Any]()
    for each, changed, batches in ((one, one.batch_sampler, came), (other, other, expected)):
        for batch in each:
            batches.append(batch)
            if each.steps == 2:
                changed.exclude([whole[3][0], whole[6][0]])
            if each.steps == 3:
                assert changed.skip(2).size == 8
                states.append(each.state_dict())
    assert came == expected
    assert states[0] == states[1]
    assert one.state_dict() == other.state_dict()
    one.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_who_reads_the_batch_sampler_itself_moves_no_loop(workers: int) -> None:
    one, other = loader(workers=workers), loader()
    came = []
    for batch in one:
        came.append(batch)
        if one.steps in (2, 5):
            assert len(list(islice(one.batch_sampler, one.steps))) == one.steps
        if one.steps == 7:
            one.batch_sampler.set_epoch(3)
    assert came == list(other)
    assert one.state_dict() == other.state_dict()
    one.close()


def test_steps_are_skipped_before_and_in_a_loop() -> None:
    one, whole = loader(), [list(batch) for batch in loader()]
    assert one.skip(2).tolist() == flat(whole[:2])
    assert (len(one), one.remaining) == (8, 8)
    resumed = loader()
    resumed.load_state_dict(one.state_dict())
    for each in (one, resumed):
        came = []
        for batch in each:
            came.append(batch)
            if each.steps == 1:
                assert each.skip(3).tolist() == flat(whole[3:6])
        assert came == [whole[2], *whole[6:]]
        assert [each.step(number)[0] for number in range(len(came))] == came


def test_a_running_iteration_of_a_batch_sampler_takes_two_changes_at_one_step() -> None:
    batches, delivered, left_out = DistributedBatchSampler(N, 4), list[int](), list[int]()
    for number, batch in enumerate(batches):
        delivered += batch
        if number == 2:
            left_out = sorted(set(range(N)) - set(delivered))[:5]
            batches.exclude(left_out)
            left_out += batches.skip(2).tolist()
    assert sorted(delivered + left_out) == list(range(N))


def test_an_unchanged_loop_goes_on_where_a_change_is_refused() -> None:
    one = loader(workers=1)
    whole, came = [list(batch) for batch in loader()], []
    for batch in one:
        came.append(batch)
        if one.steps == 2:
            for wrong in ([N], [-1]):
                with pytest.raises(ValueError, match="indices must be"):
                    one.exclude(wrong)
            for single in ("s1", 1):
                with pytest.raises(
                    TypeError, match=rf"indices must be a list of keys .* write exclude\(\[{single!r}\]\)"
                ):
                    one.exclude(single)  # type: ignore[arg-type]  # no list
            with pytest.raises(TypeError, match=r"as list has no find\(key\), got the key 's1'"):
                one.exclude(["s1"])
    assert came == whole
    one.close()


def test_ranks_are_dealt_what_is_left_in_a_running_loop() -> None:
    one = loader(num_replicas=2, rank=0)
    came = []
    for batch in one:
        came.append(batch)
        if one.steps == 2:
            one.reshard(1, 0)
            assert one.ranks == (1, 0)
    assert len(flat(came)) == 8 + 24
    made = ResumableLoader(
        list(range(N)),
        lambda num_replicas, rank: DistributedBatchSampler(N, 4, num_replicas=num_replicas, rank=rank, seed=1),
        collate_fn=list,
        num_replicas=2,
        rank=0,
    )
    again = []
    for batch in made:
        again.append(batch)
        if made.steps == 2:
            made.reshard(1, 0)
    assert again == came


def test_a_key_of_several_samples_excludes_none_of_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_shards(
            [(f"{name}{number}", {"json": b"1"}) for number in range(3)] + [("img", {"json": b"2"})],
            tmp_path / name,
            n_shards=1,
        )
    both = tmp_path / "both"
    both.mkdir()
    for name in ("a", "b"):
        shutil.copy(next((tmp_path / name).glob("*.tar")), both / f"{name}.tar")
    index_shards(both)
    shards = IndexedShards(both)
    for dataset in (shards, IndexedShards({"one": both})):
        one = ResumableLoader(dataset, DistributedBatchSampler(len(dataset), 2), collate_fn=list)
        with pytest.raises(ValueError, match=r"2 samples have the key 'img', .* give their indices"):
            one.exclude(["a1", "img"])
        assert not len(one.excluded_indices)
        one.exclude(["a1", *(index for index in range(len(dataset)) if dataset.key(index) == "img")])
        assert len(one.excluded_indices) == 3


def test_the_samples_of_a_step_are_found_and_read_again(tmp_path: Path) -> None:
    write_shards([(f"s{number:02d}", {"json": b"%d" % number}) for number in range(N)], tmp_path, n_shards=3)
    dataset = IndexedShards(tmp_path)
    ranks = [
        ResumableLoader(dataset, DistributedBatchSampler(N, 4, num_replicas=2, rank=rank), collate_fn=list)
        for rank in range(2)
    ]
    came = list(zip(*ranks, strict=True))
    rows = ranks[1].samples_of_step(3)
    assert [row["key"] for row in rows] == [sample["__key__"] for batch in came[3] for sample in batch]
    assert [row["rank"] for row in rows] == [0] * 4 + [1] * 4
    for row in rows:
        assert dataset[row["index"]]["__key__"] == row["key"]
        with Path(row["shard"]).open("rb") as file:
            file.seek(row["offset"])
            assert int(file.read(len(str(row["index"])))) == row["index"]
    assert ranks[1].replay(3) == came[3][1]
    assert ranks[1].replay(3, rank=0) == came[3][0]
    for one in ranks:
        one.exclude([rows[0]["key"]])
        assert one.excluded_indices.tolist() == [rows[0]["index"]]
    with pytest.raises(ValueError, match="indices must be samples of the train data: no sample has the key 's99'"):
        ranks[0].exclude(["s99"])
    with pytest.raises(ValueError, match="rank of step 3 must be an int from 0 to 1, got 2"):
        ranks[0].replay(3, rank=2)


def test_an_order_that_cannot_be_read_again_stays_as_it_is() -> None:
    one = ResumableLoader(
        list(range(N)), DistributedBatchSampler(N, 4, sampler=RandomSampler(range(N))), collate_fn=list
    )
    came = []
    for batch in one:
        came.append(batch)
        if one.steps == 3:
            one.exclude([5])
    assert sorted({*flat(came), 5}) == list(range(N))
    with pytest.raises(ValueError, match="RandomSampler does not tell the order of epoch 1: give it set_epoch"):
        one.step(12)


class Slow(Plain):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.15)
        return index


@pytest.mark.slow
def test_workers_that_read_slowly_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_POLL", 0.2)
    one = loader(Slow(N), workers=1)
    batches = iter(one)
    next(batches)
    one.skip(8)
    assert len(list(batches)) == 1
    one.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("shards")
    return make_shards(folder / "train", "t", 20), make_shards(folder / "val", "v", 7)


@pytest.mark.slow
def test_a_fit_resumes_with_what_it_accepts(folders: tuple[Path, Path], tmp_path: Path) -> None:
    saving = Save(tmp_path)
    whole = fit(data(folders, num_workers=1), saving)
    for path, hook, done in saving.saved[2::9]:
        with pytest.raises(
            ValueError, match=r"checkpoint has batch_size=3, got batch_size=2; .*accept=\['batch_size'\]"
        ):
            fit(data(folders, batch_size=2), path=path)
        resumed = fit(data(folders, batch_size=2, accept={"batch_size"}), path=path)
        assert len(resumed.seen) == resumed.trainer.global_step - done or "end" not in hook
        for epoch in range(3):
            keys = [key for at, batch in [*whole.seen[:done], *resumed.seen] if at == epoch for key in batch]
            assert sorted(keys) == [f"t{number:02d}" for number in range(20)], (hook, epoch)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_fit_that_is_resumed_at_any_hook_knows_its_steps(
    folders: tuple[Path, Path], tmp_path: Path, stride: int
) -> None:
    saving = Save(tmp_path)
    whole = fit(data(folders), saving)
    for path, hook, done in saving.saved[::stride]:
        one: Any = fit(data(folders), path=path).trainer
        if not one.lightning_module.seen:
            continue
        loader = one.train_dataloader
        assert loader.run_steps == len(whole.seen), hook
        told = [tuple(f"t{index:02d}" for index in loader.step(number)[0]) for number in range(loader.run_steps)]
        assert told == [batch for _, batch in whole.seen], (hook, done)


class Rest(Callback):
    """Leaves out all that comes after a batch."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.exclude)

    def exclude(self, trainer: lightning.Trainer, *_: Any) -> None:
        one: Any = trainer.train_dataloader
        if one.run_steps == 3 and not len(one.excluded_indices):
            one.exclude(index for step in range(one.remaining) for index in one.step(3 + step)[0])


@pytest.mark.parametrize(("hook", "steps"), [("on_train_batch_start", [2, 4]), ("on_train_batch_end", [1, 3])])
def test_a_fit_whose_epoch_ends_with_a_change_validates(
    folders: tuple[Path, Path], hook: str, steps: list[int]
) -> None:
    """It takes the step of half a group, too, unless that batch is over."""
    model = fit(data(folders), Rest(hook), accumulate_grad_batches=2, max_epochs=2)
    assert [len([0 for at, _ in model.seen if at == epoch]) for epoch in range(2)] == [3, 3]
    assert model.validated == list(enumerate(steps))


class Excludes(Callback):
    """Leaves out samples of the batches that come next."""

    def __init__(self, hook: str, at: int) -> None:
        self.at, self.excluded = at, list[int]()
        setattr(self, hook, self.exclude)

    def exclude(self, trainer: lightning.Trainer, *_: Any) -> None:
        if len(trainer.lightning_module.seen) == self.at:  # type: ignore[arg-type]  # a list
            one: Any = trainer.train_dataloader
            self.excluded = one.step(self.at + 1)[0]
            one.exclude(self.excluded)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_callback_leaves_samples_out_of_a_running_fit(
    folders: tuple[Path, Path], tmp_path: Path, hook: str, workers: int
) -> None:
    saving, excluding = Save(tmp_path), Excludes(hook, 3)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    model = fit(data(folders, num_workers=workers), excluding, saving, **options)
    out = {f"t{index:02d}" for index in excluding.excluded}
    assert len(out) == 3
    assert [epoch for epoch, _ in model.validated] == [0, 1]  # also after the shorter epoch
    for epoch in range(2):
        keys = [key for at, batch in model.seen if at == epoch for key in batch]
        assert sorted({*keys} | out) == [f"t{number:02d}" for number in range(20)]
        assert len(keys) == 17
    for path, _, done in saving.saved:
        if done in (4, 5):  # also in the middle of a group, which comes again without them
            resumed = fit(data(folders, num_workers=workers), path=path, **options)
            assert not out & {key for _, batch in resumed.seen for key in batch}


def test_a_trainer_that_tells_the_batch_sampler_its_own_epochs_changes_nothing(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Lightning sets the epoch of `loader.batch_sampler.sampler`."""

    class Order:
        fingerprint = "own"

        def __init__(self, dataset: Any, **_: Any) -> None:
            self.n, self.epoch = len(dataset), 0

        def __iter__(self) -> Any:
            return iter(np.random.default_rng(self.epoch).permutation(self.n).tolist())

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    def module() -> MapDataModule:
        samples = [{"__key__": f"{number:02d}"} for number in range(20)]
        return MapDataModule(
            {"train": samples, "val": samples},
            batch_size=3,
            sampler={"train": Order, "val": Order},
            collate_fn=lambda batch: [one["__key__"] for one in batch],
        )

    saving = Save(tmp_path)
    whole = fit(module(), saving)
    assert len(whole.val) == 60 + 6  # with the two batches of the sanity check
    assert whole.val[6:26] == whole.val[26:46] == whole.val[46:]
    path, _, done = [one for one in saving.saved if one[1] == "batch end"][9]
    first = fit(module(), path=path, max_steps=done + 2)  # ends in the middle of an epoch
    assert first.seen == whole.seen[done : done + 2]
    one: Any = fit(module(), path=path).trainer
    assert one.lightning_module.seen == whole.seen[done:]
    assert isinstance(one.train_dataloader.batch_sampler, DistributedBatchSampler)
