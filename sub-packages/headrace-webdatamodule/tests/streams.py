"""What the tests of streams share: numbered samples in shards, and loaders over them."""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import webdataset as wds

from headrace.webdatamodule import Split, WebDataModule

number = wds.map(lambda sample: sample[0])


def write(place: Path, counts: Iterable[int], prefix: str = "wdshards") -> Path:
    """Shards of these sizes; sample `i` of all holds its number."""
    place.mkdir(exist_ok=True)
    n = 0
    for shard, count in enumerate(counts):
        with (place / f"{prefix}-{shard:06}.tar").open("wb") as file, wds.TarWriter(file, mtime=0) as writer:
            for i in range(n, n := n + count):
                writer.write({"__key__": f"s{i:05}", "json": b"%d" % i})
    return place


def module(place: Any, n: int, batch: int = 1, ranks: int = 1, split: Split = Split.train, **options: Any) -> Any:
    """A data module of one split; `options` of the split are given without it."""
    per_split = ("pipeline_wds", "pipeline_prebatch_wld", "kwargs_wds", "kwargs_wld", "invoke_wds", "invoke_wld", "mix")
    given = {"pipeline_wds": number, "pipeline_prebatch_wld": wds.batched(batch, collation_fn=None), **options}
    mapped: Any = {name: {split: value} if name in per_split else value for name, value in given.items()}
    return WebDataModule({split: n}, "json", {split: place}, batch * ranks, **mapped)


def loader(place: Any, n: int, batch: int = 1, ranks: int = 1, split: Split = Split.train, **options: Any) -> Any:
    """Its loader."""
    return getattr(module(place, n, batch, ranks, split, **options), f"{split.name}_dataloader")()


def flat(batches: Iterable[list[int]]) -> list[int]:
    """The samples of some batches."""
    return [sample for batch in batches for sample in batch]


def untuple(source: Any) -> Iterator[Any]:
    """A stage of the user's own."""
    return (sample for (sample,) in source)


def quietly(made: Any, epochs: int = 1) -> list[Any]:
    """The batches of some epochs, without warnings of samples that repeat or remain."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "train: ")
        return [batch for _ in range(epochs) for batch in made]
