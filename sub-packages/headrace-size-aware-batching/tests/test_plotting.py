"""Pictures of plans; matplotlib is optional."""

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.size_aware_batching import BatchPlan, DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.plotting import draw, spread


def plan(sizes: Any, budget: Any, **options: Any) -> BatchPlan:
    return DistributedSizeAwareBatchSampler(sizes, budget, **options).plan()


def width(picture: Path) -> int:
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int(struct.unpack(">I", content[16:20])[0])


@pytest.mark.slow
def test_each_plan_gets_a_column(tmp_path: Path) -> None:
    one = plan(range(1, 400), 500)
    draw({"": one}, tmp_path / "one.png")
    draw({"stratified": one, "packed": plan(range(1, 400), 500, strategy="packed")}, tmp_path / "two.png")
    assert width(tmp_path / "two.png") > 1.6 * width(tmp_path / "one.png")


@pytest.mark.parametrize("ending", ["pdf", "svg"])
def test_the_ending_says_which_kind(tmp_path: Path, ending: str) -> None:
    draw({"": plan([1, 2, 3], 4)}, str(tmp_path / f"plan.{ending}"))
    assert {"pdf": b"%PDF", "svg": b"<svg"}[ending] in (tmp_path / f"plan.{ending}").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [
        plan([], 5),
        plan([3], 5),
        plan([0] * 100, 5, max_items=2),
        plan([9, 1, 9, 1], 5, oversize="own_batch"),
        plan([[2, 1]] * 30, [4, 10]),
        plan([2] * 30, 4, cost=lambda n, largest: n * largest, strategy="bucketed"),
    ],
)
def test_odd_plans_are_drawn_too(tmp_path: Path, odd: BatchPlan) -> None:
    draw({"odd": odd}, tmp_path / "odd.png", num_replicas=4)
    assert width(tmp_path / "odd.png") > 100


def test_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plans: got none"):
        draw({}, tmp_path / "none.png")


def test_spread_is_one_where_all_ranks_work_alike_and_tells_them_apart_else() -> None:
    alike = spread(plan([5] * 64, 10, strategy="sequential"), 8)
    assert [part.tolist() for part in alike] == [[1.0] * 4] * 2
    high, low = spread(plan([1, 3], 3, strategy="sequential", shuffle=False), 2)
    assert low[0] < 1 < high[0]
    np.testing.assert_allclose(high + low, 2)


@pytest.mark.slow
def test_everything_but_drawing_does_without_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "sizes.txt").write_text("1\n2\n3\n")
    code = """
import sys
sys.modules["matplotlib"] = None
from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.cli import main

print(DistributedSizeAwareBatchSampler(range(1, 100), 200).report())
main(["sizes.txt", "--budget", "5"])
try:
    from headrace.size_aware_batching.plotting import draw
except ImportError as error:
    print(error)
main(["sizes.txt", "--budget", "5", "--draw", "plan.png"])
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    for printed in (result.stdout, result.stderr):
        assert "pip install headrace-size-aware-batching[plot]" in printed
    assert result.stdout.count("samples") == 2
    assert not (tmp_path / "plan.png").exists()
