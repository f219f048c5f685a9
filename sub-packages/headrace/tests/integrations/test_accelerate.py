"""What accelerate's `prepare` does with loaders whose samplers are already distributed: it is exact, or an error."""

import json
import re
from typing import Any

import pytest
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from launching import HERE, launch, launcher
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import PreparedBatchSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("accelerate")
    done = launch([*launcher("accelerate", 2), str(HERE / "two_ranks.py")], folder, {})
    assert done.code == 0, done.output
    result: dict[str, Any] = json.loads(re.findall(r"^{.*}$", done.output, re.MULTILINE)[-1])
    return result


def test_what_would_lose_half_of_the_samples_is_an_error(found: dict[str, Any]) -> None:
    assert "would give each process one of 2 of this rank's batches and lose" in found["batches of a rank"]
    assert 'construct the sampler with rank="all"' in found["batches of a rank"]
    assert "would give each process one of 2 of this rank's batches and lose" in found["samples of a rank"]
    assert "construct the sampler with num_replicas=1 and rank=0" in found["samples of a rank"]
    for error in found["streams of a rank"]:
        assert "would give each process one of 2 of this rank's batches and lose" in error


@pytest.mark.parametrize(
    "how", ["batches of all", "evened", "samples of all", "mixture of all", "without workers", "not prepared"]
)
def test_each_sample_comes_once(how: str, found: dict[str, Any]) -> None:
    assert found[how] == {"1": 601}


def test_batches_of_different_sizes_are_not_cut_by_the_process_that_dispatches_them(found: dict[str, Any]) -> None:
    assert len(found["cut"]) == 10
    for error in found["cut"]:
        assert error.startswith("RuntimeError: dispatch_batches must be False for batches of different sizes, got True")


def test_what_is_dispatched_once_more_is_an_error_unless_the_batches_are_those_of_all(found: dict[str, Any]) -> None:
    for error in found["lost"]:
        assert "would give each process one of 2 of this rank's batches and lose" in error
    assert found["dispatched"] == {"0": 1, "1": 600}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
def test_a_position_is_resumed_once(workers: int) -> None:
    def first_batch(*, stateful: bool = False, skip: int = 0) -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
        batches = PreparedBatchSampler(DistributedSizeAwareBatchSampler([1] * 60, 5, rank="all"))
        made: DataLoader[Any] = DataLoader(list(range(60)), batch_sampler=batches, num_workers=workers)  # type: ignore[arg-type]
        loader = accelerator.prepare(made)
        return next(batches.delivered(skip_first_batches(loader, skip) if skip else loader))

    assert len(first_batch()) == 5
    with pytest.raises(RuntimeError, match=r"must be the result of prepare\(\), got one of skip_first_batches\(\)"):
        first_batch(skip=3)
    with pytest.raises(RuntimeError, match="use_stateful_dataloader must be False for a PreparedBatchSampler"):
        first_batch(stateful=True)


def test_a_resumable_loader_is_left_alone(found: dict[str, Any]) -> None:
    assert found["left alone"] is True


def test_ranks_and_accumulated_batches_of_different_sizes_give_the_gradient_of_all_of_them(
    found: dict[str, Any],
) -> None:
    assert found["gradients"] < 1e-6
