"""What objects say of themselves: their text, their table in a notebook, and a keyword gone wrong."""

import inspect
import pickle
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

import headrace.weighted_sampler as package
from headrace.weighted_sampler import InterleavedDataset, MixtureReport, NamedConcatDataset, WeightedDistributedSampler

EVIL = "<script>alert(1)</script>&\"'"


def datasets(**parts: int) -> NamedConcatDataset[int]:
    return NamedConcatDataset({name: range(count) for name, count in parts.items()})


def sampler(**options: Any) -> WeightedDistributedSampler:
    given = {"num_replicas": 4, "rank": 0, **options}
    return WeightedDistributedSampler(datasets(large=100_000, small=10), {"large": 1, "small": 1}, **given)


def streams() -> InterleavedDataset[int]:
    return InterleavedDataset({"a": [1, 2], "b": [3]}, {"a": 1, "b": 1})


MAKE: dict[str, Callable[[], Any]] = {
    "InterleavedDataset": streams,
    "InterleavedIterator": lambda: iter(streams()),
    "MixtureReport": lambda: sampler().report(),
    "NamedConcatDataset": lambda: datasets(large=100_000, small=10),
    "SourceReport": lambda: sampler().report().sources[0],
    "WeightedDistributedSampler": sampler,
}


def test_every_public_class_has_an_example_here() -> None:
    public = {name for name in package.__all__ if inspect.isclass(getattr(package, name))}
    assert not public - MAKE.keys(), "add to MAKE how to make one, and give it a repr of one to three lines"


@pytest.mark.parametrize("name", MAKE)
def test_a_repr_says_what_an_object_is_in_one_to_three_lines(name: str) -> None:
    text = repr(MAKE[name]())
    assert text.startswith(f"{name}(")
    assert len(text.splitlines()) <= 3
    assert len(text) <= 400


@pytest.mark.parametrize("name", [name for name in MAKE if name != "SourceReport"])
def test_a_repr_of_a_half_made_object_names_its_class(name: str) -> None:
    assert repr(object.__new__(type(MAKE[name]()))) == f"<{name}, not complete>"


@pytest.mark.parametrize("name", [name for name in MAKE if name != "InterleavedIterator"])
def test_a_repr_is_the_same_after_pickling(name: str) -> None:
    made = MAKE[name]()
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)


def test_a_repr_says_the_main_figures() -> None:
    assert repr(datasets(large=100_000, small=10)) == "NamedConcatDataset(100,010 samples: large 100,000, small 10)"
    many = datasets(**{f"part{number}": 2 for number in range(100)})
    assert repr(many).endswith("part7 2, 92 more)")
    assert repr(sampler()).startswith(
        "WeightedDistributedSampler(100,010 samples of 2 sources, 100,010 an epoch, rank 0"
    )
    stream = iter(streams())
    next(stream)
    assert repr(stream) == "InterleavedIterator(2 sources, rank 0 of 1, worker 0 of 1, epoch 0 at 1)"


def by_tokens() -> MixtureReport:
    sizes = [1 + number % 7 for number in range(110)]
    weights: dict[str, Any] = {"large": 1, "small": (1, {EVIL: 2, "b": 1})}
    three = NamedConcatDataset({"large": range(60), EVIL: range(30), "b": range(20)})
    return WeightedDistributedSampler(three, weights, per="token", sizes=sizes, num_replicas=4, rank=0).report()


def test_the_version_is_that_of_the_distribution() -> None:
    assert package.__version__ == version("headrace-weighted-sampler")
