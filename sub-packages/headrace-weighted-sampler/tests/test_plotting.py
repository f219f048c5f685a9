"""The picture of a report shows what the report says, and matplotlib stays optional."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler, plot_mixture

PICTURED = NamedConcatDataset({"large": range(1000), "small": range(50), "off": range(3)})


@pytest.mark.slow
def test_the_picture_shows_what_the_report_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sampler = WeightedDistributedSampler(PICTURED, {"large": 0.25, "small": 2, "off": 0}, semantics="ratio")
    sampler.set_epoch(1)
    figure = plot_mixture(sampler.report())
    figure.savefig(tmp_path / "mixture.png")
    assert (tmp_path / "mixture.png").read_bytes().startswith(b"\x89PNG")
    axes: list[Any] = figure.axes
    shares, seen = axes
    assert [label.get_text() for label in shares.get_yticklabels()] == ["large", "small", "off"]
    widths = [bar.get_width() for bar in shares.patches]
    assert widths == pytest.approx([250 / 350, 100 / 350, 0] * 2)
    assert [bar.get_width() for bar in seen.patches] == pytest.approx([0.5, 4, 0])
    assert [text.get_text() for text in seen.texts] == [
        " 50% seen, 0 repeats",
        " 100% seen, 150 repeats",
        " 0% seen, 0 repeats",
    ]


@pytest.mark.slow
def test_many_sources_are_cut_and_the_title_says_so() -> None:
    pytest.importorskip("matplotlib")
    report = WeightedDistributedSampler(range(100), {(place, place + 1): 1 + place for place in range(100)}).report()
    figure = plot_mixture(report)
    axes: list[Any] = figure.axes
    assert [label.get_text() for label in axes[0].get_yticklabels()][::39] == ["60-61", "99-100"]
    assert "40 most drawn of 100 sources" in figure.get_suptitle()


def test_the_picture_shows_the_most_drawn_source_behind_many_equal_ones() -> None:
    pytest.importorskip("matplotlib")
    weights = {(place, place + 1): 1 for place in range(50)} | {(50, 60): 9}
    axes: list[Any] = plot_mixture(WeightedDistributedSampler(range(60), weights).report()).axes
    shown = [label.get_text() for label in axes[0].get_yticklabels()]
    assert shown == [f"{place}-{place + 1}" for place in range(39)] + ["50-60"]


def test_something_else_is_refused_by_name() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(
        TypeError, match=r"report must be a MixtureReport from sampler.report\(\), got WeightedDistributedS"
    ):
        plot_mixture(WeightedDistributedSampler(range(9), {(0, 9): 1}))  # type: ignore[arg-type]


@pytest.mark.slow
def test_without_matplotlib_all_but_the_picture_works() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None  # an import of it fails from now on
from headrace.weighted_sampler import WeightedDistributedSampler, plot_mixture
report = WeightedDistributedSampler(range(9), {(0, 9): 1}).report()
print(report)
try:
    plot_mixture(report)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 0: 9 samples" in done.stdout
    assert "pip install 'headrace-weighted-sampler[plot]'" in done.stdout


@pytest.mark.slow
def test_the_picture_of_a_run_names_the_source_that_leaves() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    options: Any = {"epoch_length": 500, "num_replicas": 1, "rank": 0}
    above = []
    for max_passes in (None, {"small": 2}):
        sampler = WeightedDistributedSampler(
            PICTURED, {"large": 3, "small": 1, "off": 0}, **options, max_passes=max_passes
        )
        figure = sampler.plot(epochs=2)
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        top = pixels.shape[0] - round(figure.axes[0].get_window_extent().y1) - 3
        above.append(int((pixels[:top, :-150] < 128).any(-1).sum()))  # the legend lies to the right
    assert above[1] > above[0] + 50, above


@pytest.mark.slow
def test_the_picture_of_a_run_has_room_for_the_names_of_many_sources(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    weights = {(place, place + 1): 1 + place for place in range(100)}
    figure = WeightedDistributedSampler(range(100), weights, num_replicas=1, rank=0).plot()
    figure.savefig(tmp_path / "many.png")  # a warning would be an error
    axes: Any = figure.axes[0]
    names = axes.get_legend().get_window_extent()
    assert names.y0 >= 0
    assert names.y1 <= figure.bbox.height
