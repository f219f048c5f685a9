"""Reads ranges of samples of indexed shards, so that ranks and workers get equal shares of them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import get_worker_info

from headrace.webdatamodule.passes import CurrentPass, Pass, shard_order
from headrace.webdatamodule.shards.index.shard_index import index_path
from headrace.webdatamodule.shards.reading.dataset import IndexedShards
from headrace.webdatamodule.shards.reading.sources import find_shards
from headrace.webdatamodule.streaming.counting import Batched
from headrace.webdatamodule.streaming.position import worker_items
from headrace.webdatamodule.streaming.shares import pieces, rank_share, worker_share
from headrace.webdatamodule.streaming.turns import turns_taken


def without_index(urls: Sequence[str]) -> int:
    """How many of some shards have no index beside them.

    Args:
        urls: Paths of tar files.
    """
    return sum(not index_path(url).is_file() for url in urls)


class RangeSource:
    """First stage of a pipeline: samples as webdataset groups them, of this reader's share.

    The list of all samples is that of the shards, in the order of the pass. Each rank gets a range of it, all of
    equal size, and each worker a range of its rank's.

    Args:
        urls: Paths of indexed tar files.
        keys: Member keys to read; all when a key is in no shard.
        seed: Seed of the shards' order; None keeps the order as it is.
        current: The pass.
        even: Whether each worker gets as many samples as any other of any rank, as what is mixed must.

    Raises:
        ShardError: An index is damaged.
    """

    def __init__(
        self, urls: Sequence[str], keys: Sequence[str], seed: int | str | None, current: CurrentPass, *, even: bool
    ) -> None:
        self.urls = list(urls)
        self.seed, self.current, self.even = seed, current, even
        self.inside = Batched()
        found = find_shards(self.urls)
        self.counts, self.fingerprint = found.samples, found.fingerprint
        wanted = list(dict.fromkeys(key.lower() for key in keys))
        self.shards = IndexedShards(self.urls, wanted if set(wanted) <= set(found.members) else None, decode=None)

    @property
    def n_samples(self) -> int:
        """Samples of all shards."""
        return sum(self.counts)

    def __call__(self) -> Iterator[dict[str, Any]]:
        """One dictionary per sample."""
        now, worker = self.current.get(), get_worker_info()
        start, stop = self._share(now, *((worker.id, worker.num_workers) if worker else (0, 1)))
        order = list(range(len(self.urls)))
        if self.seed is not None:
            order = shard_order(len(self.urls), self.seed, now.epoch, now.lap)
        begins = [end - count for end, count in zip(accumulate(self.counts), self.counts, strict=True)]
        for at, first, last in pieces([self.counts[shard] for shard in order], start, stop):
            url, begin = self.urls[order[at]], begins[order[at]]
            for sample in self.shards.iterate(begin + first, begin + last):
                sample["__url__"] = url
                yield sample

    def _share(self, now: Pass, worker: int, workers: int) -> tuple[int, int]:
        if self.even:
            return rank_share(self.n_samples, now.world * workers, now.rank * workers + worker)
        start, stop = rank_share(self.n_samples, now.world, now.rank)
        given, turn = turns_taken(worker_items(stop - start, workers, self.inside), now.items)
        # A loader begins with its worker 0, so that one goes on with the share whose turn it is.
        share = (worker + turn) % workers
        begin, end = worker_share(start, stop, share, workers)
        return min(end, begin + given[share] * self.inside.size), end
