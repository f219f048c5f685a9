"""What objects say of themselves: their text, their table in a notebook, their signatures, and a keyword gone wrong."""

import importlib
import inspect
import pickle
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from doors import sampler_with

import headrace.size_aware_batching as package
from headrace.size_aware_batching import (
    BatchMemoryModel,
    BlockwiseSizeAwareBatchSampler,
    BucketBatchSampler,
    BucketedBatching,
    DistributedSizeAwareBatchSampler,
    MeasuredShapes,
    OOMEvent,
    OOMGuard,
    OOMReport,
    PackedCollate,
    PaddedCollate,
    Peaks,
    Piece,
    PolynomialRegression,
    SimulatedMemory,
    SizeAwareBatchSampler,
    SplitDataset,
    create_buckets,
    plan_step,
)

SIZES = np.random.default_rng(0).integers(1, 400, 500)
MODULES = ("callbacks", "integrations.accelerate", "integrations.trainer_loader")
SHAPE = [torch.arange(3), torch.arange(5)]


def sampler(**options: Any) -> Any:
    return sampler_with(SIZES, 2000, **{"num_replicas": 4, "rank": 0, **options})


def peaks() -> Peaks:
    batches = [[length] * n for n in (1, 2, 4, 8, 16) for length in (64, 128, 256, 512, 1024, 2048, 3072, 4096)]
    return Peaks.of(
        batches, [5 * 10**8 + 3 * 10**4 * sum(batch) + 2 * len(batch) * max(batch) ** 2 for batch in batches]
    )


@cache
def fitted() -> BatchMemoryModel:
    model = BatchMemoryModel()
    model.fit(peaks())
    return model


def guard() -> OOMGuard:
    model = torch.nn.Linear(4, 1)
    return OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Loader:
    """What a `TrainerLoader` asks of a loader."""

    epoch = remaining = 0
    ranks = (1, 0)

    def __iter__(self) -> Any:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError("the length may cost a plan")

    state_dict = load_state_dict = set_epoch = __iter__


def lightning_or_skip(name: str) -> Any:
    pytest.importorskip("lightning")
    return getattr(importlib.import_module("headrace.size_aware_batching.callbacks"), name)


def of_integration(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"headrace.size_aware_batching.integrations.{module}"), name)


MAKE: dict[str, Callable[[], Any]] = {
    "BatchMemoryModel": fitted,
    "BatchPlan": lambda: sampler().plan(),
    "BatchesOfStep": lambda: lightning_or_skip("BatchesOfStep")(3),
    "BlockwiseSizeAwareBatchSampler": lambda: BlockwiseSizeAwareBatchSampler([[1, 2], [3]], 4, num_replicas=2, rank=1),
    "BucketBatchSampler": lambda: BucketBatchSampler(
        torch.arange(7), torch.tensor([0, 3, 7]), torch.utils.data.BatchSampler, {"batch_size": 2, "drop_last": False}
    ),
    "BucketedBatching": lambda: BucketedBatching(len, 12, shuffle=False),
    "Buckets": lambda: create_buckets(torch.tensor([1, 1, 2, 3, 3, 3, 12]), max_width=5, min_bucket_count=6),
    "DistributedSizeAwareBatchSampler": sampler,
    "OptimizerStepBatchSampler": lambda: sampler(tokens_per_step=9000),
    "MeasuredShapes": lambda: MeasuredShapes(((8, 10), (4, 20)), (90, 95), 100.0, "reserved", 4, 0),
    "OOMEvent": lambda: OOMEvent(3, "forward", 8, "[8, 512]", 4096.0, "out of memory"),
    "OOMGuard": guard,
    "OOMReport": lambda: OOMReport(200, 3, 4, 2, 4096.0),
    "OOMRescue": lambda: lightning_or_skip("OOMRescue")(shrink=0.9),
    "PackedBatch": lambda: PackedCollate()(SHAPE),
    "PackedCollate": lambda: PackedCollate(layout="huggingface", pad_value={"labels": -100}),
    "PaddedBatch": lambda: PaddedCollate(return_lengths=True)(SHAPE),
    "PaddedCollate": lambda: PaddedCollate(return_mask=True),
    "Peaks": peaks,
    "Piece": lambda: Piece(7, 4096, 5000, 5000),
    "PlanReport": lambda: sampler().report(),
    "PolynomialRegression": lambda: PolynomialRegression(2),
    "PreparedBatchSampler": lambda: of_integration("accelerate", "PreparedBatchSampler")(sampler(rank="all")),
    "SimulatedMemory": lambda: SimulatedMemory(10_000),
    "SizeAwareBatchSampler": lambda: SizeAwareBatchSampler(range(5), [2, 2, 3, 1, 2], 4),
    "SplitDataset": lambda: SplitDataset([[1, 2]] * 1000, fields=["ids"]),
    "StepPlan": lambda: plan_step(SIZES, 20_000, num_replicas=4),
    "StepReport": lambda: plan_step(SIZES, 20_000, num_replicas=4).report(),
    "TokensPerStep": lambda: lightning_or_skip("TokensPerStep")(sampler()),
    "TrainerLoader": lambda: of_integration("trainer_loader", "TrainerLoader")(Loader()),
    "WorstBatchesFirst": lambda: lightning_or_skip("WorstBatchesFirst")(2),
}


def public_classes() -> dict[str, Any]:
    """Return all classes that users meet, by name: of the package, and of the modules for other libraries."""
    found = {name: getattr(package, name) for name in package.__all__}
    for name in MODULES:
        try:
            module = importlib.import_module(f"headrace.size_aware_batching.{name}")
        except ImportError:  # of an extra
            continue
        found |= {
            key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
    return {name: value for name, value in found.items() if inspect.isclass(value) and not name.startswith("_")}


def test_every_public_class_has_an_example_here() -> None:
    missing = public_classes().keys() - MAKE.keys()
    assert not missing, "add to MAKE how to make one, and give it a repr of one to three lines"


@pytest.mark.parametrize("name", MAKE)
def test_a_repr_says_what_an_object_is_in_one_to_three_lines(name: str) -> None:
    made = MAKE[name]()
    text = repr(made)
    assert type(made).__name__ in text or name == "BatchesOfStep"  # which is an int
    assert " object at 0x" not in text
    assert len(text.splitlines()) <= 3
    assert len(text) <= 400


PLAIN = ("OOMEvent", "OOMReport", "Piece", "BatchesOfStep")  # dataclasses, tuples and numbers


@pytest.mark.parametrize("name", [name for name in MAKE if name not in PLAIN])
def test_a_repr_of_a_half_made_object_names_its_class(name: str) -> None:
    made = MAKE[name]()
    half = type(made).__new__(type(made), *made) if isinstance(made, tuple) else object.__new__(type(made))
    assert type(made).__name__ in repr(half)


@pytest.mark.parametrize(
    "name", ["BatchMemoryModel", "BatchPlan", "BucketedBatching", "DistributedSizeAwareBatchSampler", "SplitDataset"]
)
def test_a_repr_is_the_same_after_pickling(name: str) -> None:
    made = MAKE[name]()
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)


def test_a_repr_says_the_main_figures() -> None:
    assert repr(MAKE["Buckets"]()) == "Buckets(3 from 1 to 12, 7 samples)"
    assert repr(MAKE["PackedCollate"]()) == "PackedCollate(layout='huggingface', pad_value={'labels': -100})"
    assert repr(MAKE["PackedBatch"]()) == "PackedBatch(2 sequences of 8 in all, the longest 5, values=int64 [8])"
    assert repr(MAKE["SplitDataset"]()) == "SplitDataset(list of 1,000, fields=('ids',))"
    assert repr(BatchMemoryModel(["S"])) == "BatchMemoryModel(reserved bytes, coverage 95%, S, not fitted yet)"
    assert "+ 30000 n*L + 2 n*L^2), margin 0.00%" in repr(fitted())
    assert repr(MAKE["TrainerLoader"]()) == "TrainerLoader(Loader)"
    with SimulatedMemory() as memory:
        kept = torch.zeros(1000)
    assert repr(memory) == f"SimulatedMemory(no limit, {kept.nbytes + 96:,} in use, peak 4,096)"


def cost(count: int, largest: Any) -> float:
    return float(count * np.max(largest) ** 1.5)


def test_plans_of_all_kinds_show_themselves() -> None:
    both = np.stack([SIZES, SIZES + 3], 1)
    options: dict[str, Any] = {"num_replicas": 2, "rank": 0}
    of_function = DistributedSizeAwareBatchSampler(SIZES, 90_000, cost=cost, strategy="bucketed", **options)
    plans = [
        of_function.plan(),
        DistributedSizeAwareBatchSampler(both, (2000, 3000.5), **options).plan(),
        sampler(oversize="split", max_length=100).plan(),
        sampler(tokens_per_step=9000).plan(),
        sampler(curriculum=20).plan(),
    ]
    shown = [repr(plan) for plan in plans]
    assert ", cost cost, 2 ranks)" in shown[0]
    assert ", budget 2,000 and 3,000.5, " in shown[1]
    assert ", 4 ranks, 12 optimizer steps)" in shown[3]


def test_the_version_is_that_of_the_distribution() -> None:
    assert package.__version__ == version("headrace-size-aware-batching")


CALLABLES = [name for name in package.__all__ if callable(getattr(package, name))]


@pytest.mark.parametrize("name", CALLABLES)
def test_signatures_fit_on_a_screen(name: str) -> None:
    text = str(inspect.signature(getattr(package, name)))
    assert len(text) < 1000
    assert "numpy.ndarray[" not in text
    assert "ForwardRef" not in text


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [("strategy", "Strategy"), ("oversize", "Oversize"), ("tail", "Tail"), ("cost", "Literal['sum', 'padded']")],
)
def test_a_signature_says_what_may_be_chosen(argument: str, allowed: str) -> None:
    shown = str(inspect.signature(DistributedSizeAwareBatchSampler).parameters[argument]).replace('"', "'")
    assert allowed in shown
