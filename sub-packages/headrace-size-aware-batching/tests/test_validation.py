"""Numbers of any make, and where messages go."""

import logging
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching._validation import log_info, logger_or, real_number, shortlist
from headrace.size_aware_batching.sampler import SizeAwareBatchSampler, size_aware_batching


def test_warnings_point_at_the_line_that_iterates() -> None:
    with pytest.warns(UserWarning, match="position 0") as caught:
        list(size_aware_batching([9], lambda x: x, 5))
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="index 0") as caught:
        list(SizeAwareBatchSampler([0], [9], 5))
    assert caught[0].filename == __file__


def test_warnings_inside_a_loader_point_at_its_user() -> None:
    dataset = TensorDataset(torch.arange(2))
    with pytest.warns(UserWarning, match="index 0") as caught:
        list(DataLoader(dataset, batch_sampler=SizeAwareBatchSampler([0, 1], [9, 1], 5)))
    assert caught[0].filename == __file__


def test_summaries_go_to_logging_and_not_to_print(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "headrace.size_aware_batching"):
        list(SizeAwareBatchSampler(range(4), [1] * 4, 2))
        list(size_aware_batching([1, 2], lambda x: x, 3))
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("headrace.size_aware_batching", "INFO")
    ] * 2
    assert "2 batches of 4 elements" in caplog.text
    assert capsys.readouterr().out == ""


def test_logger_or() -> None:
    assert logger_or(warn, None, "warn_logger") is warn
    assert logger_or(log_info, print, "info_logger") is print
    with pytest.raises(TypeError, match="info_logger must be a function of one string"):
        logger_or(log_info, "loud", "info_logger")  # type: ignore[arg-type]  # the point


def test_shortlist() -> None:
    assert shortlist([], 0) == ""
    assert shortlist(["a", 3], 2) == "a, 3"
    assert shortlist(["a", 3], 5) == "a, 3 and 3 more"


def test_numbers_of_any_make() -> None:
    values = (np.int8(4), torch.tensor([4]), Fraction(1, 2), np.array(0.5))
    made = [real_number(value, "size") for value in values]
    assert made == [4, 4, 0.5, 0.5]
    assert [type(number) for number in made] == [int, int, float, float]
