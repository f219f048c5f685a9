"""Every example of the documentation this package follows, as users would run it."""

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate


@pytest.fixture
def dataset() -> list[torch.Tensor]:
    return [torch.tensor([2 * i + 1, 2 * i + 2]) for i in range(5)]


def test_size_aware_batching(dataset: list[torch.Tensor]) -> None:
    from headrace.size_aware_batching.sampler import size_aware_batching

    def sizeof(x: torch.Tensor) -> int:
        return x.numel()

    batches = list(size_aware_batching(dataset, sizeof, 4, collate_fn=default_collate))
    assert [batch.tolist() for batch in batches] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10]]]


def test_size_aware_batch_sampler(dataset: list[torch.Tensor]) -> None:
    from headrace.size_aware_batching.sampler import SizeAwareBatchSampler

    def sizeof(index: int) -> int:
        return dataset[index].numel()

    batch_sampler = SizeAwareBatchSampler(
        sampler=torch.utils.data.SequentialSampler(dataset), sizeof=sizeof, max_total_size=4
    )
    assert list(batch_sampler) == [[0, 1], [2, 3], [4]]


def step_and_cleanup(device: torch.device) -> tuple[Any, Any]:
    """The training step of the example, with a small model in place of its dots."""
    model = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work(data: torch.Tensor) -> float:
        optimizer.zero_grad()
        output = model(data.to(device))
        output.square().mean().backward()
        optimizer.step()
        return float(len(data))

    return work, lambda: model.zero_grad(set_to_none=True)


def fit_and_batch(features: list[float], alloc_peaks: list[int]) -> None:
    """The rest of the road: measured memory -> model -> batches inside a budget of bytes."""
    from headrace.size_aware_batching.memory_model import PolynomialRegression
    from headrace.size_aware_batching.sampler import SizeAwareBatchSampler

    memory_model = PolynomialRegression(degree=1)
    memory_model.fit(torch.tensor(features), torch.tensor(alloc_peaks, dtype=torch.float64))
    predicted = memory_model.predict_upper(torch.tensor(features))
    budget = 2 * float(predicted.max())
    batches = list(SizeAwareBatchSampler(range(len(features)), predicted, budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(features)))
    assert all(sum(alloc_peaks[i] for i in batch) <= budget for batch in batches)


_GENERATOR = torch.Generator().manual_seed(0)
DATASET = [torch.randn(rows, 64, generator=_GENERATOR) for rows in (4000, 1000, 2000, 3000, 4000, 5000)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collect_cuda_peak_alloc() -> None:
    from headrace.size_aware_batching.utils import collect_cuda_peak_alloc

    device = torch.device("cuda:0")
    work, cleanup = step_and_cleanup(device)
    features, alloc_peaks = collect_cuda_peak_alloc(dataset=DATASET, work=work, device=device, cleanup=cleanup)
    assert features == [len(data) for data in DATASET]
    assert alloc_peaks[1] < alloc_peaks[2] < alloc_peaks[3] < alloc_peaks[4] < alloc_peaks[5]
    fit_and_batch(features, alloc_peaks)


def test_collect_cuda_peak_alloc_without_cuda() -> None:
    from headrace.size_aware_batching.utils import collect_cuda_peak_alloc

    device = torch.device("cpu")
    work, cleanup = step_and_cleanup(device)
    with pytest.raises(ValueError, match="CUDA"):
        collect_cuda_peak_alloc(dataset=DATASET, work=work, device=device, cleanup=cleanup)
    features = [work(data) for data in DATASET]  # the step itself runs anywhere
    cleanup()
    fit_and_batch(features, [10**9 + 512 * int(rows) for rows in features])


def test_the_package_itself_offers_all_public_names() -> None:
    import headrace.size_aware_batching as package
    from headrace.size_aware_batching import memory_model, sampler, utils

    assert package.__all__ == sorted(package.__all__)
    for module, names in {
        sampler: ["BucketBatchSampler", "SizeAwareBatchSampler", "size_aware_batching"],
        utils: ["Buckets", "collect_cuda_peak_alloc", "create_buckets"],
        memory_model: ["PolynomialRegression"],
    }.items():
        for name in names:
            assert getattr(module, name) is getattr(package, name)
