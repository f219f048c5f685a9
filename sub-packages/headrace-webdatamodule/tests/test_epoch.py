import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.epoch import Epoch, Tally


def epoch(n_batches: int, **options: Any) -> Epoch:
    given = {"begin_again": True, "endless": False, "tally": Tally(), **options}
    return Epoch("train", n_batches, "n_samples=1, global_batch_size=1", **given)


def run(this: Epoch, n_there: int, world: int = 1) -> tuple[list[int], list[str]]:
    laps = []

    def one_pass(lap: int) -> Iterator[int]:
        laps.append(lap)
        return iter(this.tally(iter(range(n_there))))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(this.batches(one_pass, world))
    assert laps == list(range(len(laps)))
    return batches, [str(warning.message) for warning in caught]


@given(st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(1, 3))
def test_an_epoch_has_the_promised_length(promised: int, there: int, again: bool, world: int) -> None:
    batches, messages = run(epoch(promised, begin_again=again), there, world)
    whole = again or world > 1
    assert len(batches) == (promised if whole else min(promised, there))
    assert batches == [i % there for i in range(len(batches))]
    words = {1: ["ran dry"], 0: [], -1: ["remain"]}[(promised > there) - (promised < there)]
    assert [word in message for message, word in zip(messages, words, strict=True)] == [True] * len(words)


def test_the_messages_hold_the_numbers_and_the_cure() -> None:
    _, [dry] = run(epoch(5), 2)
    assert "train: the shards ran dry after 2 samples in 2 batches, before the 5 batches" in dry
    assert "begun again, so samples repeat" in dry
    assert "Set n_samples[Split.train]" in dry
    _, [early] = run(epoch(5, begin_again=False), 2)
    assert "the epoch ends early" in early
    _, [remain] = run(epoch(2), 5)
    assert "samples remain after the 2 batches of an epoch (n_samples=1, global_batch_size=1)" in remain


def test_each_thing_is_said_once() -> None:
    dry, short = epoch(5), epoch(2)
    assert [len(run(dry, 2)[1]) for _ in range(3)] == [1, 0, 0]
    assert [len(run(short, 5)[1]) for _ in range(3)] == [1, 0, 0]


def test_endless_samples_always_remain() -> None:
    assert run(epoch(2, endless=True), 5) == ([0, 1], [])


def test_an_epoch_left_early_says_nothing() -> None:
    batches = epoch(2).batches(lambda lap: iter(range(5)), 1)
    assert next(batches) == 0


@pytest.mark.parametrize("world", [1, 2])
def test_no_batch_at_all_is_an_error_and_no_endless_loop(world: int) -> None:
    with pytest.raises(ValueError, match="no batch came out of the shards"):
        run(epoch(2, begin_again=False), 0, world)


def test_shards_that_go_away_between_laps_are_an_error() -> None:
    passes = iter([iter([1]), iter([])])
    batches = epoch(3).batches(lambda lap: next(passes), 1)
    assert next(batches) == 1
    with pytest.warns(UserWarning, match="ran dry"), pytest.raises(ValueError, match="when begun again"):
        next(batches)
