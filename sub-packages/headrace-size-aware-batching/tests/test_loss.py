"""The gradient of the whole batch from unequal parts. On one rank and on real ones."""

from pathlib import Path

import loss_worker
import pytest
import torch
from loss_worker import STEPS, accumulate, batches, gradient, network
from processes import run_ranks
from torch.nn.functional import cross_entropy

from headrace.size_aware_batching import global_num_tokens, token_weighted_loss


def gradient_of_the_whole_batch(step: tuple[list[int], list[int]]) -> torch.Tensor:
    model, parts = network(), [*batches(step, 0), *batches(step, 1)]
    tokens, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    losses = cross_entropy(model(tokens), labels, reduction="sum")
    (losses / max(1, sum(map(sum, step)))).backward()  # type: ignore[no-untyped-call]  # torch's
    return gradient(model)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.slow
def test_two_ranks_with_unequal_targets_have_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(loss_worker.main, 2, tmp_path)):
        assert found.pop("both") == [25, pytest.approx(2 / 25)]
        assert found.pop("shared") == [12 + rank, pytest.approx(1 / (12 + rank))]
        assert len(found) == 2 * len(STEPS)
        for name, (values, loss) in found.items():
            step = STEPS[name.rpartition(", ")[0]]
            expected = gradient_of_the_whole_batch(step)
            assert expected.norm() > 0 or not any(map(sum, step))
            assert_equal(torch.tensor(values, dtype=torch.float64), expected)
            assert (loss > 0) == any(map(sum, step))


@pytest.mark.parametrize("name", STEPS)
def test_one_rank_that_accumulates_has_it(name: str) -> None:
    step, model = STEPS[name], network()
    accumulate(model, [*batches(step, 0), *batches(step, 1)], "sum")
    assert_equal(gradient(model), gradient_of_the_whole_batch(step))


def test_the_mean_of_means_does_not() -> None:
    step, model = STEPS["accumulated"], network()
    parts = [*batches(step, 0), *batches(step, 1)]
    for tokens, labels in parts:
        torch.autograd.backward(cross_entropy(model(tokens), labels) / len(parts))
    expected = gradient_of_the_whole_batch(step)
    assert (gradient(model) - expected).norm() > 0.1 * expected.norm()


def test_labels_and_counts() -> None:
    labels = [torch.tensor([[1, -100], [-100, 2]]), torch.tensor([-100])]
    assert global_num_tokens(labels).item() == 2
    assert global_num_tokens(labels[0]).item() == 2  # one batch
    assert global_num_tokens(labels, ignore_index=1).item() == 4
    assert global_num_tokens([7, labels[0], 0]).item() == 9
    assert global_num_tokens([]).item() == 0
    assert global_num_tokens([3], device="cpu").dtype == torch.int64


def test_a_loss_without_targets_is_0() -> None:
    weight = torch.ones(2, requires_grad=True)
    for count in (0, torch.tensor(0), torch.tensor([0])):
        loss = token_weighted_loss(weight * 5, count)
        loss.backward()  # type: ignore[no-untyped-call]  # so that ranks without a target take part in the exchange
        assert loss.item() == 0
        assert weight.grad is not None
        assert weight.grad.tolist() == [0, 0]


def test_counts_that_cannot_be_are_refused() -> None:
    for count in (-1, torch.tensor(-3)):
        with pytest.raises(ValueError, match=r"num_tokens must be a number >= 0, got -\d: give the result of global"):
            token_weighted_loss(torch.tensor(6.0), count)
    exhausted = iter([torch.tensor([1])])
    assert global_num_tokens(exhausted).item() == 1
    with pytest.raises(ValueError, match=r"labels must hold a batch, got an iterator at its end: it can be read once"):
        global_num_tokens(exhausted)
    assert global_num_tokens([]).item() == 0  # a rank that has no batch in this step
    with pytest.raises(ValueError, match=r"labels must hold counts >= 0, got -5 at 1"):
        global_num_tokens([3, -5])


class Mesh:
    """Of two ranks, and no more than the samplers need."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 0


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"labels must hold .* got a tensor of torch.float32 at 1"):
        global_num_tokens([torch.tensor([1]), torch.tensor([1.0])])
    with pytest.raises(TypeError, match=r"labels must hold .* got bool at 0"):
        global_num_tokens([True])
    with pytest.raises(TypeError, match=r"mesh must have get_group\(\), got Mesh"):
        global_num_tokens([3], mesh=Mesh())
    with pytest.raises(TypeError, match=r"loss must be .* got float"):
        token_weighted_loss(0.5, 3)  # type: ignore[arg-type]  # the wrong type is the test
    with pytest.raises(TypeError, match=r"loss must be .* got a tensor of torch.int64"):
        token_weighted_loss(torch.tensor(1), 3)
    with pytest.raises(ValueError, match=r"num_tokens must be one number, got a tensor of shape \[2\]"):
        token_weighted_loss(torch.tensor(1.0), torch.tensor([3, 4]))
    assert token_weighted_loss(torch.tensor(6.0), 4, mesh=Mesh()).item() == 3.0
