"""Steps of so many tokens with accelerate and Hugging Face's Trainer: two processes train the weights of one."""

import json
import re
from typing import Any

import numpy as np
import pytest
from launching import HERE, launch, launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = []
    for world in (1, 2):
        command = [*launcher("accelerate", world), str(HERE / "tokens_two_ranks.py")]
        done = launch(command, tmp_path_factory.mktemp("tokens"), {})
        assert done.code == 0, done.output
        results.append(json.loads(re.findall(r"^{.*}$", done.output, re.MULTILINE)[-1]))
    return results


@pytest.mark.parametrize("how", ["registered", "prepared", "trainer"])
def test_two_processes_train_the_weights_of_one(how: str, found: list[dict[str, Any]]) -> None:
    alone, both = found
    np.testing.assert_allclose(both[how][0], alone[how][0], rtol=0, atol=1e-12)
    assert both[how][1] == alone[how][1] == alone["whole steps" if how == "trainer" else "steps"]
