"""Resume: a process is killed at 90 % of a shuffled epoch, another one goes on from the library's own state.

Every sample's text is its number, so what was delivered twice or never is counted. The state is saved behind the batch
that the training loop received last; workers have read ahead by then. On other ranks: two ranks are killed after as
many batches each, and one rank goes on from the state of the first.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from formats import ArrayRecord, Energon, Format, Headrace, Litdata, LmdbDataset, Mosaic, Webdataset, energon_dataset
from formats import Lmdb as LmdbFormat
from measure import installed, quiet, wheel_of, without_vision

BATCH = 32


def numbers(samples: list[Any]) -> list[int]:
    """A batch: the numbers that the texts are."""
    return [int(bytes(sample["txt"] if isinstance(sample, dict) else sample)) for sample in samples]


class Run:
    """A loader with a state.

    Subclasses give ``batches``, lists of numbers, and where the library has a state ``state`` and ``load``, which is
    called before ``batches``.
    """

    name = package = ""
    kind: type[Format] | None = Headrace  # None: nothing but the number of samples is written
    stateful = True
    ranks = False  # whether other ranks are measured

    def __init__(self, folder: Path, workers: int, world: int, rank: int) -> None:
        self.folder, self.workers, self.world, self.rank = folder, workers, world, rank
        self.loader: Any = self.make()

    def make(self) -> Any:
        """Return the loader."""
        raise NotImplementedError

    def batches(self) -> Iterator[list[int]]:
        """Deliver the epoch, or what is left of it."""
        return iter(self.loader)

    def state(self) -> Any:
        """What is saved."""
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        """Go there."""
        self.loader.load_state_dict(state)


class HeadraceLoader(Run):
    """Random access to shards; batches of a budget of sizes."""

    name, package, ranks = "headrace ResumableLoader", "headrace-webdatamodule", True

    def make(self) -> Any:
        from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        from headrace.webdatamodule import IndexedShards, ResumableLoader

        shards = IndexedShards(self.folder, decode=None)
        batches = DistributedSizeAwareBatchSampler(
            shards.sizes("txt"), BATCH * 6, num_replicas=self.world, rank=self.rank
        )
        return ResumableLoader(shards, batches, collate_fn=numbers, num_workers=self.workers)


class Stateful(Run):
    """torchdata's loader over a map-style dataset, shuffled by torch's sampler."""

    name, package, kind, ranks = "torchdata StatefulDataLoader", "torchdata", LmdbFormat, True

    def make(self) -> Any:
        module = import_module("torchdata.stateful_dataloader")
        data = LmdbDataset(str(self.folder))
        sampler: Any = import_module("torchdata.stateful_dataloader.sampler")
        sampler = sampler.StatefulDistributedSampler(data, self.world, self.rank, seed=0)
        return module.StatefulDataLoader(data, BATCH, sampler=sampler, num_workers=self.workers, collate_fn=numbers)


class Lit(Run):
    """litdata's own loader."""

    name, package, kind, ranks = "litdata StreamingDataLoader", "litdata", Litdata, True

    def make(self) -> Any:
        os.environ |= {"WORLD_SIZE": str(self.world), "GLOBAL_RANK": str(self.rank), "NNODES": "1"}
        module = import_module("litdata")
        data = module.StreamingDataset(str(self.folder), shuffle=True, drop_last=False)
        return module.StreamingDataLoader(data, batch_size=BATCH, num_workers=self.workers, collate_fn=numbers)


class Mds(Run):
    """mosaic's own loader; it counts the samples of a batch by its first field."""

    name, package, kind = "mosaic StreamingDataLoader", "mosaicml-streaming", Mosaic

    def make(self) -> Any:
        module = import_module("streaming")
        module.base.util.clean_stale_shared_memory()
        data = module.StreamingDataset(local=str(self.folder), batch_size=BATCH, shuffle=True)
        return module.StreamingDataLoader(data, batch_size=BATCH, num_workers=self.workers, collate_fn=in_a_field)

    def batches(self) -> Iterator[list[int]]:
        return (batch["number"] for batch in self.loader)


def in_a_field(samples: list[Any]) -> dict[str, list[int]]:
    return {"number": numbers(samples)}


class EnergonLoader(Run):
    """Energon's savable loader, one pass over the data."""

    name, package, kind = "Energon savable loader", "megatron-energon", Energon

    def make(self) -> Any:
        options = {"shuffle_buffer_size": 100, "max_samples_per_sequence": 100, "repeat": False, "batch_size": BATCH}
        return import_module("megatron.energon").get_savable_loader(
            energon_dataset(self.folder, self.workers, **options)
        )

    def batches(self) -> Iterator[list[int]]:
        return (numbers(batch["txt"]) for batch in self.loader)

    def state(self) -> Any:
        return self.loader.save_state_rank()

    def load(self, state: Any) -> None:
        self.loader.restore_state_rank(state)


class Grain(Run):
    """grain's iterator over its own format."""

    name, package, kind, ranks = "grain DatasetIterator", "grain", ArrayRecord, True

    def make(self) -> Any:
        grain = import_module("grain")
        data = grain.MapDataset.source(ArrayRecord().open(self.folder)).shuffle(seed=0)[self.rank :: self.world]
        data = data.batch(BATCH, batch_fn=numbers)
        options = grain.multiprocessing.MultiprocessingOptions(self.workers)
        return iter(data.to_iter_dataset().mp_prefetch(options))

    def state(self) -> Any:
        return self.loader.get_state()

    def load(self, state: Any) -> None:
        self.loader.set_state(state)


class Cuts(Run):
    """lhotse's sampler beside a DataLoader, saved as its users save it."""

    name, package, kind, ranks = "lhotse DynamicBucketingSampler", "lhotse", None, True
    indexed = False

    def make(self) -> Any:
        self.sampler = self.make_sampler(self.world, self.rank)
        return torch.utils.data.DataLoader(
            CutNumbers(), batch_size=None, sampler=self.sampler, num_workers=self.workers
        )

    def make_sampler(self, world: int, rank: int) -> Any:
        """Return the sampler over a manifest, streamed or by its index."""
        lhotse, dummies = import_module("lhotse"), import_module("lhotse.testing.dummies")
        manifest = self.folder / "cuts.jsonl"
        if not manifest.exists():
            count = int((self.folder / "count").read_text())
            lhotse.CutSet.from_cuts(dummies.dummy_cut(i, duration=1.0 + i % 9) for i in range(count)).to_file(manifest)
        cuts = (
            lhotse.CutSet.from_file(manifest, indexed=True, shuffle=True)
            if self.indexed
            else lhotse.CutSet.from_jsonl_lazy(manifest)
        )
        return import_module("lhotse.dataset.sampling").DynamicBucketingSampler(
            cuts, max_duration=5.0 * BATCH, shuffle=True, num_buckets=9, seed=0, world_size=world, rank=rank
        )

    def state(self) -> Any:
        return self.sampler.state_dict()

    def load(self, state: Any) -> None:
        self.sampler.load_state_dict(state)


class CutNumbers(torch.utils.data.Dataset[list[int]]):
    """A batch of cuts as their numbers; a cut that lhotse repeats, so that ranks are even, has a suffix."""

    def __getitem__(self, cuts: Any) -> list[int]:
        return [int(cut.id.partition("_dup")[0].rpartition("-")[2]) for cut in cuts]


class Cuts2(Cuts):
    """lhotse 2's sampler in torchdata's loader, map style: the sampler stays in the training process."""

    name, package, indexed = "lhotse 2 sampler, map style", "lhotse", True

    def make(self) -> Any:
        module = import_module("torchdata.stateful_dataloader")
        sampler = self.make_sampler(self.world, self.rank)
        return module.StatefulDataLoader(CutNumbers(), batch_size=None, sampler=sampler, num_workers=self.workers)

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Cuts2Slices(Cuts2):
    """lhotse 2 in the workers, each with its slice of the indexed manifest."""

    name = "lhotse 2 sampler, in workers"

    def make(self) -> Any:
        module, dataset = import_module("torchdata.stateful_dataloader"), import_module("lhotse.dataset")
        wrapped = dataset.iterable_dataset.IterableDatasetWrapper(CutNumbers(), self.make_sampler(1, 0))
        initialise = dataset.dataloading.make_worker_init_fn(rank=self.rank, world_size=self.world, seed=0)
        return module.StatefulDataLoader(wrapped, batch_size=None, num_workers=self.workers, worker_init_fn=initialise)


class Wds(Run):
    """webdataset has no state: the epoch begins anew, in another order."""

    name, package, kind, stateful = "webdataset", "webdataset", Webdataset, False

    def make(self) -> Any:
        wds = import_module("webdataset")
        tars = sorted(map(str, self.folder.glob("*.tar")))
        data = wds.WebDataset(tars, shardshuffle=len(tars)).shuffle(1000)
        return torch.utils.data.DataLoader(data, BATCH, num_workers=self.workers, collate_fn=numbers)


RUNS: list[type[Run]] = [HeadraceLoader, Stateful, Lit, Mds, EnergonLoader, Grain, Cuts, Cuts2, Cuts2Slices, Wds]


def write(run: type[Run], folder: Path, count: int) -> None:
    """Write the samples of a run."""
    folder.mkdir(parents=True)
    (folder / "count").write_text(str(count))
    data = folder / "data"
    data.mkdir()
    if run.kind:
        run.kind().write([b"%06d" % number for number in range(count)], data)
    else:
        (data / "count").write_text(str(count))


def process(
    run: type[Run], folder: Path, phase: str, workers: int, world: int = 1, rank: int = 0, batches: int = 0
) -> tuple[list[list[int]], float, str]:
    """Run a phase in a process; return what it delivered, the seconds to its first batch, and why it failed.

    ``killed`` ends after a number of batches, or at 90 % of the rank's samples.
    """
    numbers = map(str, (workers, world, rank, batches))
    command = [sys.executable, __file__, run.name, str(folder), phase, *numbers]
    out, err = folder / "stdout", folder / "stderr"  # a pipe would stay open in workers that outlive the process
    with out.open("w") as stdout, err.open("w") as stderr:
        one = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            one.wait(timeout=300)
        except subprocess.TimeoutExpired:
            return [], 0.0, "no answer for five minutes"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
    lines = out.read_text().splitlines()
    killed = phase == "killed" and one.returncode == -signal.SIGKILL
    if not killed and one.returncode:
        return [], 0.0, (err.read_text().strip().splitlines() or ["killed"])[-1][:200]
    delivered = [json.loads(line) for line in lines if line.startswith("[")]
    seconds = next(float(line.split()[1]) for line in lines if line.startswith("first "))
    return delivered, seconds, ""


def counted(run: type[Run], folder: Path, count: int, before: list[list[int]], workers: int) -> dict[str, Any]:
    """Go on with the epoch, and count what came twice or never."""
    after, seconds, error = process(run, folder, "resumed", workers)
    if error:
        return {"refused": error}
    seen = Counter(number for batch in before + after for number in batch)
    return {
        "lost": count - len(seen),
        "repeated": sum(seen.values()) - len(seen),
        "delivered_before": sum(map(len, before)),
        "first_batch": seconds,
    }


def on_other_ranks(run: type[Run], folder: Path, count: int) -> dict[str, Any]:
    """Kill two ranks after as many batches, and go on with one rank from the state of rank 0."""
    second, _, error = process(run, folder, "killed", 2, world=2, rank=1)
    if not error:
        first, _, error = process(run, folder, "killed", 2, world=2, rank=0, batches=len(second))
    return {"refused": error} if error else counted(run, folder, count, first + second, 2)


def measure(folder: Path, count: int, runs: int) -> list[dict[str, Any]]:
    """Return a row for each library."""
    rows = []
    for run in RUNS:
        if not installed(run.package):
            continue
        print(f"  resume: {run.name}", flush=True)
        place = folder / run.__name__
        write(run, place, count)
        before, _, error = process(run, place, "killed", 2)
        if error:
            rows.append({"name": run.name, "package": run.package, "error": error})
            continue
        same = [counted(run, place, count, before, 2) for _ in range(runs)]
        fresh = [process(run, place, "fresh", 2)[1] for _ in range(runs)]
        row = {"name": run.name, "package": run.package, "stateful": run.stateful, **same[0]}
        if "first_batch" in row:
            row["first_batch"] = median(each["first_batch"] for each in same) / median(fresh)
        if run.stateful:
            row["other_workers"] = counted(run, place, count, before, 1)
            row["other_workers"].pop("first_batch", None)
        if run.ranks:
            row["other_ranks"] = on_other_ranks(run, place, count)
            row["other_ranks"].pop("first_batch", None)
        rows.append(row)
    return rows


def main() -> None:
    quiet()
    without_vision()
    name, where, phase, *texts = sys.argv[1:]
    workers, world, rank, last = map(int, texts)
    folder = Path(where)
    [kind] = [run for run in RUNS if run.name == name]
    if issubclass(kind, Cuts2):
        sys.path.insert(0, str(wheel_of("lhotse")))  # whose Python needs no installation
    saved, count = folder / "state", int((folder / "count").read_text())
    begin = time.perf_counter()
    run = kind(folder / "data", workers, world, rank)
    if phase == "resumed" and kind.stateful:
        run.load(pickle.loads(saved.read_bytes()))
    batches, delivered = run.batches(), 0
    for number, batch in enumerate(batches):
        if not number:
            print(f"first {time.perf_counter() - begin}", flush=True)
        if phase == "fresh":
            break
        print(json.dumps(batch), flush=True)
        delivered += len(batch)
        if phase == "killed" and (number + 1 == last if last else delivered >= 0.9 * count / world):
            if kind.stateful:
                saved.write_bytes(pickle.dumps(run.state()))
            os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.flush()
    os._exit(0)  # threads and processes of the libraries are not waited for


if __name__ == "__main__":
    main()
