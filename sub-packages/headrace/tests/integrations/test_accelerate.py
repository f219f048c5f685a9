"""What accelerate's `prepare` does with loaders whose samplers are already distributed: it is exact, or an error."""

import json
import re
from typing import Any

import pytest
from launching import HERE, launch, launcher

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


@pytest.mark.parametrize(
    "how", ["batches of all", "evened", "samples of all", "mixture of all", "without workers", "not prepared"]
)
def test_each_sample_comes_once(how: str, found: dict[str, Any]) -> None:
    assert found[how] == {"1": 601}


def test_a_resumable_loader_is_left_alone(found: dict[str, Any]) -> None:
    assert found["left alone"] is True


def test_ranks_and_accumulated_batches_of_different_sizes_give_the_gradient_of_all_of_them(
    found: dict[str, Any],
) -> None:
    assert found["gradients"] < 1e-6
