"""Two processes, gloo, Lightning's DDP: equally many batches, whatever the shards hold."""

import json
from pathlib import Path
from typing import Any

import pytest
from two_ranks import ended, started

from headrace.webdatamodule import write_tars

pytestmark = pytest.mark.slow


def train(folder: Path, n: int, n_shards: int, workers: int = 0) -> list[dict[str, Any]]:
    write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(n)], folder, n_shards=n_shards)
    ended(started("rank_worker.py", lambda rank: (str(folder), str(rank), str(n), str(workers))), 0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_even_shards_give_every_sample_once(tmp_path: Path, workers: int) -> None:
    ranks = train(tmp_path, 24, 4, workers)
    assert [rank["world"] for rank in ranks] == [2, 2]
    assert [rank["said"] for rank in ranks] == [[], []]
    for split in ("train", "val"):
        assert [len(rank[split]) for rank in ranks] == [12, 12]
        for epoch in (slice(0, 6), slice(6, 12)):
            assert sorted(sample for rank in ranks for sample in flat(rank[split][epoch])) == list(range(24))
    first, second = ([sorted(flat(rank["train"][part])) for rank in ranks] for part in (slice(6), slice(6, 12)))
    assert first != second  # shards change hands between epochs


def test_uneven_shards_give_equally_many_batches_and_are_told(tmp_path: Path) -> None:
    ranks = train(tmp_path, 18, 3)  # 12 samples for one rank, 6 for the other
    for split in ("train", "val"):
        assert [len(rank[split]) for rank in ranks] == [10, 10]
        assert [len(flat(rank[split][:5])) for rank in ranks] == [10, 10]
    remain, dry = (sorted(rank["said"]) for rank in ranks)
    for said, word in ((remain, "samples remain after the 5 batches"), (dry, "ran dry after 6 samples in 3 batches")):
        assert [message.partition(":")[0] for message in said] == ["train", "val"]
        assert all(word in message for message in said)
    assert all("begun again, so samples repeat" in message for message in dry)
