"""A run of loaders on simulated ranks, of which tests derive their own: what it delivers, counted by themselves."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from headrace.webdatamodule import ResumableLoader


class SimulatedRun(ABC):
    """Loaders of all ranks in one process, and the batches of each step."""

    ranks: list[ResumableLoader]

    def __init__(self) -> None:
        self.epoch, self.log = 0, list[list[list[Any]]]()
        self.ranks = self.make()

    @abstractmethod
    def make(self) -> list[ResumableLoader]:
        """The loaders of a process that has just begun."""

    @abstractmethod
    def delivered_by_step(self, new: list[Any]) -> None:
        """Count the keys of a step; those that come again for lack of others are left out."""

    @abstractmethod
    def end(self) -> None:
        """Check an epoch, and begin the next one."""

    def state(self) -> dict[str, Any]:
        states = [json.loads(json.dumps(rank.state_dict())) for rank in self.ranks]
        assert all(state == states[0] for state in states)
        return dict(states[0])

    def step(self, iterators: list[Iterator[Any]]) -> bool:
        before = self.state()["batch_sampler"]["position"]
        batches = [next(iterator, None) for iterator in iterators]
        if None in batches:
            assert not any(batches)
            self.end()
            return False
        self.log.append(batches)  # type: ignore[arg-type]  # no None
        new = [key for batch in self.log[-1] for key in batch]
        self.delivered_by_step(new[: self.state()["batch_sampler"]["position"] - before])
        return True

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
