"""The example that plans each step of a training on rollouts, on two ranks over gloo, as a user runs it."""

import re
from pathlib import Path

import pytest
from runs import run_script, torchrun

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "steps"


@pytest.mark.parametrize(
    "world", [2, pytest.param(1, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_the_gradient_of_planned_micro_batches_is_that_of_the_whole_step(world: int, tmp_path: Path) -> None:
    place, environments = torchrun(world)
    done = run_script(EXAMPLE, [], tmp_path, environments)
    assert [rank.returncode for rank in done] == [0] * world, "\n".join(rank.stderr for rank in done)
    del place
    for rank, (_, lines, _) in enumerate(done):
        steps = re.findall(r"step (\d) rank (\d): .* (\d+) micro-batches, .*, gradient (\S+) from", lines)
        assert [(int(step), int(own)) for step, own, _, _ in steps] == [(0, rank), (1, rank), (2, rank)]
        for _, _, micro_batches, apart in steps:
            assert int(micro_batches) > 1
            assert float(apart) < 1e-12
