"""Resume: a process is killed at 90 % of a shuffled epoch, another one goes on from the library's own state.

Every sample's text is its number, so what was delivered twice or never is counted. The state is saved behind the batch
that the training loop received last; workers have read ahead by then.
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
from measure import installed, quiet, without_vision

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
    kind: type[Format] = Headrace
    stateful = True

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
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

    name, package = "headrace ResumableLoader", "headrace-webdatamodule"

    def make(self) -> Any:
        from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        from headrace.webdatamodule import IndexedShards, ResumableLoader

        shards = IndexedShards(self.folder, decode=None)
        batches = DistributedSizeAwareBatchSampler(shards.sizes("txt"), BATCH * 6, num_replicas=1, rank=0)
        return ResumableLoader(shards, batches, collate_fn=numbers, num_workers=self.workers)


class Stateful(Run):
    """torchdata's loader over a map-style dataset, shuffled by torch's sampler."""

    name, package, kind = "torchdata StatefulDataLoader", "torchdata", LmdbFormat

    def make(self) -> Any:
        module = import_module("torchdata.stateful_dataloader")
        generator = torch.Generator().manual_seed(0)
        data = LmdbDataset(str(self.folder))
        return module.StatefulDataLoader(
            data, BATCH, shuffle=True, generator=generator, num_workers=self.workers, collate_fn=numbers
        )


class Lit(Run):
    """litdata's own loader."""

    name, package, kind = "litdata StreamingDataLoader", "litdata", Litdata

    def make(self) -> Any:
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

    name, package, kind = "grain DatasetIterator", "grain", ArrayRecord

    def make(self) -> Any:
        grain = import_module("grain")
        data = grain.MapDataset.source(self.kind().open(self.folder)).shuffle(seed=0).batch(BATCH, batch_fn=numbers)
        options = grain.multiprocessing.MultiprocessingOptions(self.workers)
        return iter(data.to_iter_dataset().mp_prefetch(options))

    def state(self) -> Any:
        return self.loader.get_state()

    def load(self, state: Any) -> None:
        self.loader.set_state(state)


class Cuts(Run):
    """lhotse's sampler in the training process, which is what its state is for."""

    name, package = "lhotse DynamicBucketingSampler", "lhotse"

    def make(self) -> Any:
        lhotse, dummies = import_module("lhotse"), import_module("lhotse.testing.dummies")
        count = int((self.folder / "count").read_text())
        cuts = [dummies.dummy_cut(i, duration=1.0 + i % 9) for i in range(count)]
        cuts = lhotse.CutSet(lhotse.lazy.LazyIteratorChain(cuts))
        sampling = import_module("lhotse.dataset.sampling")
        return sampling.DynamicBucketingSampler(
            cuts, max_duration=5.0 * BATCH, shuffle=True, drop_last=False, num_buckets=9, seed=0, world_size=1, rank=0
        )

    def batches(self) -> Iterator[list[int]]:
        return ([int(cut.id.rpartition("-")[2]) for cut in batch] for batch in self.loader)


class Wds(Run):
    """webdataset has no state: the epoch begins anew, in another order."""

    name, package, kind, stateful = "webdataset", "webdataset", Webdataset, False

    def make(self) -> Any:
        wds = import_module("webdataset")
        tars = sorted(map(str, self.folder.glob("*.tar")))
        data = wds.WebDataset(tars, shardshuffle=len(tars)).shuffle(1000)
        return torch.utils.data.DataLoader(data, BATCH, num_workers=self.workers, collate_fn=numbers)


RUNS: list[type[Run]] = [HeadraceLoader, Stateful, Lit, Mds, EnergonLoader, Grain, Cuts, Wds]


def write(run: type[Run], folder: Path, count: int) -> None:
    """Write the samples of a run."""
    folder.mkdir(parents=True)
    (folder / "count").write_text(str(count))
    if run is not Cuts:
        data = folder / "data"
        data.mkdir()
        run.kind().write([b"%06d" % number for number in range(count)], data)


def process(run: type[Run], folder: Path, phase: str, workers: int) -> tuple[list[int], float, str]:
    """Run a phase in a process; return what it delivered, the seconds to its first batch, and why it failed."""
    command = [sys.executable, __file__, run.name, str(folder), phase, str(workers)]
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
    delivered = [number for line in lines if line.startswith("[") for number in json.loads(line)]
    seconds = next(float(line.split()[1]) for line in lines if line.startswith("first "))
    return delivered, seconds, ""


def counted(run: type[Run], folder: Path, count: int, before: list[int], workers: int) -> dict[str, Any]:
    """Go on with the epoch, and count what came twice or never."""
    after, seconds, error = process(run, folder, "resumed", workers)
    if error:
        return {"refused": error}
    seen = Counter(before + after)
    return {
        "lost": count - len(seen),
        "repeated": sum(seen.values()) - len(seen),
        "delivered_before": len(before),
        "first_batch": seconds,
    }


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
        if run.stateful and run is not Cuts:
            row["other_workers"] = counted(run, place, count, before, 1)
            row["other_workers"].pop("first_batch", None)
        rows.append(row)
    return rows


def main() -> None:
    quiet()
    without_vision()
    name, where, phase, workers = sys.argv[1:]
    folder = Path(where)
    [kind] = [run for run in RUNS if run.name == name]
    saved, count = folder / "state", int((folder / "count").read_text())
    begin = time.perf_counter()
    run = kind(folder / "data" if kind is not Cuts else folder, int(workers))
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
        if phase == "killed" and delivered >= 0.9 * count:
            if kind.stateful:
                saved.write_bytes(pickle.dumps(run.state()))
            os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.flush()
    os._exit(0)  # threads and processes of the libraries are not waited for


if __name__ == "__main__":
    main()
