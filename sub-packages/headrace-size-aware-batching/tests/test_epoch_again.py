"""An epoch that comes a second time because nobody chose the next one: a warning under torch's ``DataLoader``."""

import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from doors import sampler_with
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchdata.nodes import SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.size_aware_batching import SizeAwareBatchSampler

SIZES = [number % 7 + 1 for number in range(60)]
WARNING = r"epoch 0 of the .*BatchSampler came a second time, in the same order: call its set_epoch"


def make(**options: Any) -> Any:
    return sampler_with(SIZES, 20, **options)


def of_epochs(shuffle: bool = True) -> DistributedSampler[Any]:
    return DistributedSampler(range(60), num_replicas=1, rank=0, shuffle=shuffle)  # type: ignore[arg-type]  # only its length is read


def loader(batches: Any, workers: int = 0) -> Any:
    return DataLoader(range(60), batch_sampler=batches, num_workers=workers)  # type: ignore[arg-type]  # a range has what a dataset needs


# Python 3.12 and newer warn where torch forks its workers; what is caught below is raised again.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, {"strategy": "packed"}, {"sampler": of_epochs()}, {"tokens_per_step": 60, "accumulate": 5}]
)
def test_an_epoch_that_comes_twice_warns_once(options: dict[str, Any], workers: int) -> None:
    batches = loader(make(**options), workers)
    first = [batch.tolist() for batch in batches]
    with pytest.warns(UserWarning, match=WARNING) as caught:
        again = [batch.tolist() for batch in batches]
    assert again == first
    assert [one.filename for one in caught if one.category is UserWarning] == [__file__]
    assert list(batches)  # no warning for the third time


def with_epochs(batches: Any) -> None:
    for epoch in range(3):
        batches.batch_sampler.set_epoch(epoch)
        list(batches)


def with_the_same_epoch(batches: Any) -> None:
    for _ in range(3):
        batches.batch_sampler.set_epoch(0)
        list(batches)


def with_breaks(batches: Any) -> None:
    list(batches)
    for _ in range(3):
        list(islice(batches, 2))


def without_a_loader(batches: Any) -> None:
    for _ in range(3):
        list(batches.batch_sampler)


def after_a_resume(batches: Any) -> None:
    list(islice(batches, 2))
    batches.batch_sampler.load_state_dict(batches.batch_sampler.state_dict())
    list(batches)
    list(batches)


@pytest.mark.parametrize("use", [with_epochs, with_the_same_epoch, with_breaks, without_a_loader, after_a_resume])
def test_whoever_chooses_epochs_or_only_looks_is_not_warned(use: Callable[[Any], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(loader(make()))


@pytest.mark.parametrize(
    "make_batches",
    [
        lambda: make(shuffle=False),
        lambda: make(sampler=RandomSampler(range(60))),  # read anew in each epoch
        lambda: make(sampler=of_epochs(shuffle=False)),
        lambda: make(sampler=range(60)),
        lambda: SizeAwareBatchSampler(RandomSampler(range(60)), SIZES, 20),
    ],
)
def test_where_no_epoch_repeats_unwillingly_there_is_no_warning(make_batches: Callable[[], Any]) -> None:
    batches = loader(make_batches())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            list(batches)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[list[int]]()

    def training_step(self, batch: Any, _: int) -> Any:
        self.seen.append(batch.tolist())
        return self.layer(batch.float()[:, None]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(folder: Path, batches: Any, epochs: int) -> list[list[int]]:
    saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=12)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[saves], **options)
    model, path = Model(), folder / "last.ckpt"
    trainer.fit(model, batches, ckpt_path=path if path.exists() else None, weights_only=True)
    return model.seen


# Lightning says what it sees of a small task; Python 3.12 and newer warn where torch forks its workers.
@pytest.mark.filterwarnings("ignore:.*(does not have many workers|multi-threaded, use of fork|set_vital|exists and is)")
@pytest.mark.parametrize(
    ("kind", "said", "left"),
    [
        (DataLoader, r"an iteration of epoch 0 .* continues after set_epoch\(1\).* give it a data module", 12),
        (StatefulDataLoader, r"epoch 0 .* was over where its state was saved.* give it a data module", 0),
    ],
)
def test_a_fit_that_resumes_at_an_epochs_end_with_workers_says_what_it_loses(
    tmp_path: Path, kind: Any, said: str, left: int
) -> None:
    def batches() -> Any:
        return kind(range(60), batch_sampler=make(), num_workers=1)

    assert len(make()) == 12
    first = fit(tmp_path, batches(), 1)
    with pytest.warns(UserWarning, match=said):
        again = fit(tmp_path, batches(), 2)
    assert again == first[:left]


def test_a_wrapper_that_begins_anew_begins_at_the_beginning() -> None:
    saved = []
    for taken in (12, 5):
        wrapper = SamplerWrapper(make())
        wrapper.reset()
        list(islice(wrapper, taken))
        saved.append(wrapper.state_dict())
    for state, rest in zip(saved, (0, 7), strict=True):
        wrapper = SamplerWrapper(make())
        wrapper.reset(state)
        wrapper.reset()
        assert list(wrapper) == list(make())
        wrapper.reset(state)
        assert len(list(wrapper)) == rest


def test_a_sampler_that_was_resumed_before_it_is_wrapped_goes_on() -> None:
    batches, resumed = make(), make()
    list(islice(batches, 5))
    resumed.load_state_dict(batches.state_dict())
    wrapper = SamplerWrapper(resumed, initial_epoch=resumed.epoch)
    wrapper.reset()
    assert len(list(wrapper)) == 7
