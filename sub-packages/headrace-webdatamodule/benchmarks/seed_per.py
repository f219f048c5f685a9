"""What random numbers by sample cost: `seed_per="sample"` against `seed_per="step"`, and `sample_rng()`.

    python benchmarks/seed_per.py
    python benchmarks/seed_per.py --batches 500

Two loaders read the same batches without workers and take turns. Printed are the processor's microseconds a sample, of
batches the first quartile, and the median of the differences of pairs. Data that are known to draw nothing, such as
lists and shards without a transform, are not seeded.
"""

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from map_style import Squares

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    ResumableLoader,
    index_shards,
    sample_rng,
    write_tars,
)

SAMPLES, BATCH, SIDE = 20_000, 64, 96


class Drawing(Squares):
    """Asks for the generator of each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index] + sample_rng().random()


def unchanged(sample: Any) -> Any:
    return sample


def crop(sample: Any) -> Any:
    """A small image, decoded, cropped, flipped and scaled, as little as a transform does."""
    image = torch.from_numpy(np.load(io.BytesIO(sample["npy"])))
    top, left = torch.randint(0, SIDE // 4, (2,)).tolist()
    image = image[top : top + SIDE * 3 // 4, left : left + SIDE * 3 // 4]
    if torch.rand(()) < 0.5:
        image = image.flip(1)
    return (image.float() / 255 - 0.5) / 0.25


def write(folder: Path) -> dict[str, Path]:
    """Shards of short texts, and of small images."""
    noise = np.random.default_rng(0)
    image = io.BytesIO()
    np.save(image, noise.integers(0, 256, (SIDE, SIDE, 3), np.uint8))
    members = {"texts": {"seq": noise.bytes(360), "json": b'{"label": 1}'}, "images": {"npy": image.getvalue()}}
    for name, sample in members.items():
        count = SAMPLES if name == "texts" else SAMPLES // 20
        write_tars([(f"s{i:06d}", sample) for i in range(count)], folder / name, n_shards=4)
        index_shards(folder / name)
    return {name: folder / name for name in members}


def pairs(dataset: Any, before: str, count: int) -> list[tuple[float, float]]:
    """Seconds of the same batch by step and by sample, in turns."""
    loaders = []
    for seed_per in (before, "sample"):
        order = DistributedBatchSampler(len(dataset), BATCH)
        loader = ResumableLoader(dataset, order, collate_fn=len, seed_per=seed_per, fingerprint="x")  # type: ignore[arg-type]  # one of two
        loaders.append(iter(loader))
    found = []
    for number in range(min(count, len(dataset) // BATCH)):
        times = [processor_time(loader) for loader in (loaders if number % 2 else loaders[::-1])]
        found.append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    return found[1:]  # the first one plans the epoch


def processor_time(batches: Iterator[Any]) -> float:
    begin = time.thread_time()
    next(batches)
    return time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.zeros(SAMPLES, 256)
    with tempfile.TemporaryDirectory() as root:
        folders = write(Path(root))
        datasets: dict[str, Callable[[], Any]] = {
            "a list of tensors": lambda: list(data),
            "shards, bytes": lambda: IndexedShards(folders["texts"], decode=None),
            "shards, decoded": lambda: IndexedShards(folders["texts"]),
            "shards, empty transform": lambda: IndexedShards(folders["texts"], transform=unchanged),
            "shards, images cropped": lambda: IndexedShards(folders["images"], decode=None, transform=crop),
            "a dataset, sample by sample": lambda: Squares(data),
        }
        print(f"{'batches of ' + str(BATCH):30} {'step':>8} {'sample':>8} us a sample  difference")
        for name, make in datasets.items():
            found = pairs(make(), "step", options.batches)
            step, sample = (1e6 / BATCH * quantiles(times, n=4)[0] for times in zip(*found, strict=True))
            more = 1e6 / BATCH * median(after - before for before, after in found)
            print(f"{name:30} {step:8.2f} {sample:8.2f} {more:+17.2f} ({more / step:+.1%})", flush=True)
        found = pairs(Drawing(data), "sample", options.batches)
        drawing = 1e6 / BATCH * quantiles([times[0] for times in found], n=4)[0]
        print(f"{'that draws by sample_rng()':30} {'':8} {drawing:8.2f}")


if __name__ == "__main__":
    main()
