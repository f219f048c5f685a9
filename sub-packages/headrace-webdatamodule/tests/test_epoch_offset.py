"""A trainer's epochs and a loader's."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from headrace.webdatamodule._lightning import EpochOffset
from headrace.webdatamodule.loading.epoch_loader import EpochLoader
from headrace.webdatamodule.loading.position import Iteration


class Loader(EpochLoader[Iteration]):
    """Ten batches an epoch."""

    epoch, steps, resumed = 0, 0, False

    def __init__(self, epoch: int = 0, steps: int = 0, *, resumed: bool = False) -> None:
        self.epoch, self.steps, self.resumed = epoch, steps, resumed

    def __len__(self) -> int:
        return 10

    def _count(self) -> Iterator[Any]:
        raise AssertionError("nothing is delivered")

    def _independent(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is delivered")

    def _rewind(self) -> None:
        self.steps, self.resumed = 0, False

    def _choose_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.steps, self.resumed = epoch, 0, False

    def _end_iteration(self) -> None:
        pass

    def _restore(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("the data module restores it")


@pytest.mark.parametrize(
    ("steps", "limit", "trainers", "expected", "has_rest"),
    [
        (4, 1.0, 3, (3, 4), False),  # in the middle of the saved epoch
        (0, 1.0, 3, (3, 0), False),
        (10, 1.0, 3, (3, 10), False),  # its end, not yet counted
        (10, 1.0, 4, (4, 0), False),  # its end
        (4, 1.0, 4, (3, 4), True),  # ended early: its rest
        (4, 4, 4, (4, 0), False),  # ended at the limit
        (5, 0.5, 4, (4, 0), False),
        (4, 0.5, 4, (3, 4), True),
    ],
)
def test_the_saved_epoch_goes_on_as_long_as_some_of_it_is_left(
    steps: int, limit: float, trainers: int, expected: tuple[int, int], has_rest: bool
) -> None:
    loader, epochs = Loader(3, steps, resumed=True), EpochOffset()
    epochs.load_state_dict({"epoch": 3})
    epochs.begin(loader, 0, overfits=False)  # before the trainer has restored its number
    assert epochs.state_dict(loader) == {"epoch": 3}
    assert epochs.has_rest(loader, trainers, limit) is has_rest
    trainers -= has_rest  # as it counts then
    for _ in range(2):
        assert not epochs.has_rest(loader, trainers, limit)
        epochs.begin(loader, trainers, overfits=False)
    assert (loader.epoch, loader.steps) == expected
    loader.resumed = False  # a batch was delivered
    assert epochs.state_dict(loader) == {"epoch": trainers}
    epochs.begin(loader, trainers + 1, overfits=False)
    assert (loader.epoch, loader.steps) == (expected[0] + 1, 0)


def test_overfitting_stays_in_the_first_epoch() -> None:
    loader, epochs = Loader(), EpochOffset()
    for epoch in range(3):
        epochs.begin(loader, epoch, overfits=True)
        assert (loader.epoch, loader.steps) == (0, 0)
        loader.steps = 4
