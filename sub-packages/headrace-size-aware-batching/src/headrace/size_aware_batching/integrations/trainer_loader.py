"""A `ResumableLoader` in Hugging Face's ``Trainer``, on any number of processes."""

import json
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import inner, never_raises
from headrace.size_aware_batching.integrations.trainer_events import TrainerEvents

_LOADER_KEY = "headrace_loader"  # in a trainer's state


class TrainerLoader(TrainerEvents):
    """Loader and callback for a Hugging Face ``Trainer`` that resumes on any number of processes.

    A ``Trainer`` computes its position in an epoch from the number of steps and the length of its loader, which depends
    on the number of processes. This loader has no length, like a stream, so the ``Trainer`` only counts optimizer
    steps, up to ``max_steps``. The callback stores the position of a `ResumableLoader` in the trainer's checkpoints and
    loads it from there. It also ends the trainer's epochs, which may have different lengths, and sets ``state.epoch``
    to the passes over the data. ``global_step`` continues after a resume.

    Pass it to the ``Trainer`` as a callback, and override ``get_train_dataloader`` to return it as it is. Set
    ``ignore_data_skip=True`` in ``TrainingArguments``, because the loader resumes by itself, and ``max_steps`` to the
    result of `max_steps` or to your own number.

    Args:
        loader: A `ResumableLoader` of headrace-webdatamodule over this process's batches.
        accept: Differences from the checkpoint's run to accept, such as ``{"data"}`` for appended samples; see
            ``ResumableLoader.load_state_dict``.

    Raises:
        TypeError: If ``loader`` is not a `ResumableLoader`.
        ValueError: When training begins, if a ``Trainer`` would lose or repeat samples; each message says what to do.

    Example:
        >>> # loader = TrainerLoader(ResumableLoader(data, batches, collate_fn=collate))
        >>> # steps = loader.max_steps(num_train_epochs=3, resume_from_checkpoint=path)
        >>> # arguments = TrainingArguments(folder, max_steps=steps, ignore_data_skip=True)
        >>> # trainer = Trainer(model, arguments, train_dataset=data, callbacks=[loader])
        >>> # trainer.get_train_dataloader = lambda: loader
        >>> # trainer.train(resume_from_checkpoint=path)
    """

    def __init__(self, loader: Any, accept: Collection[str] = ()) -> None:
        needed = ("state_dict", "load_state_dict", "set_epoch", "epoch", "remaining", "ranks", "__iter__", "__len__")
        if missing := [name for name in needed if not hasattr(loader, name)]:
            raise TypeError(f"loader must be a ResumableLoader, got {type(loader).__name__} without {missing}")
        self._loader, self._accept = loader, accept
        self._length = 0  # of the whole epoch on the present processes
        self._planned: tuple[int, int] | None = None  # epochs, and what `max_steps` returned for them
        self._begun = self._done = False

    @never_raises
    def __repr__(self) -> str:
        return f"{type(self).__name__}({inner(self._loader)})"

    def __iter__(self) -> Iterator[Any]:
        """Deliver the epoch, from the position that was loaded, else from its beginning."""
        return iter(() if self._done else self._loader)

    def max_steps(self, num_train_epochs: int, resume_from_checkpoint: str | Path | None = None) -> int:
        """Return the optimizer steps of a run of whole epochs: the steps done and the steps left.

        The result stays the same after a resume on the same number of processes; on another number, epochs have another
        number of steps.

        If the run changes (``exclude``, ``skip`` or ``reweight`` of the loader), its epochs become shorter or longer.
        Training with this ``max_steps`` still ends with the last epoch, and ``state.max_steps`` is corrected. The
        learning-rate schedule keeps the original number.

        Args:
            num_train_epochs: Epochs of the whole run.
            resume_from_checkpoint: The checkpoint folder that is passed to ``train``; None for a new run.

        Raises:
            ValueError: If the checkpoint was not saved with a `TrainerLoader`, or with other batches.
        """
        epochs = checked_int("num_train_epochs", num_train_epochs)
        done, loader = 0, copy(self._loader)
        if resume_from_checkpoint is None:
            loader.set_epoch(0)
            left = len(loader) if epochs else 0
        else:
            saved = json.loads(Path(resume_from_checkpoint, "trainer_state.json").read_text())
            done = saved["global_step"]
            loader.load_state_dict(_loader_state(saved["stateful_callbacks"]), self._accept)
            left = loader.remaining if loader.epoch < epochs else 0
        for epoch in range(loader.epoch + 1, epochs):
            loader.set_epoch(epoch)
            left += len(loader)
        self._planned = epochs, int(done + left)
        return int(done + left)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002 -- a hook
        """Load the position of the checkpoint, if there is one."""
        if others.get("train_dataloader") is not self:
            raise ValueError(
                "the trainer's loader must be this TrainerLoader, got another one: override get_train_dataloader to "
                "return it, without prepare"
            )
        if args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps must be 1, got {args.gradient_accumulation_steps}: a Trainer would never "
                "step with the last, shorter group of a loader without a length. To accumulate, use a "
                "SizeAwareTrainerMixin, which also resumes on any number of processes"
            )
        if any(count != 1 for count in _plain(getattr(self._loader, "accumulation", None))):
            raise ValueError(
                "the optimizer steps of tokens_per_step must have 1 batch each, got more: a Trainer would step after "
                "every batch. Use a SizeAwareTrainerMixin with tokens_per_step, which also resumes on any number of "
                "processes"
            )
        if not args.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip must be True, got False: the loader resumes by itself, and a Trainer would skip the "
                "same batches once more"
            )
        if args.world_size > 1 and self._loader.ranks[0] == 1:
            raise ValueError(
                "every process would train on all batches: leave out num_replicas and rank of the batch sampler"
            )
        self._begun, self._done = False, state.global_step >= state.max_steps
        if not state.global_step:
            self._loader.set_epoch(0)
            self._length = len(self._loader)
            return
        whole = copy(self._loader)
        self._loader.load_state_dict(_loader_state(state.stateful_callbacks), self._accept)
        if not self._loader.remaining:
            self._loader.set_epoch(self._loader.epoch + 1)
        whole.set_epoch(self._loader.epoch)
        self._length = len(whole)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Set the next epoch, except when training begins."""
        if self._begun:
            self._loader.set_epoch(self._loader.epoch + 1)
            self._length = len(self._loader)
        self._begun = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the position. End the trainer's epoch with the loader's epoch, and training with the last one."""
        left = self._loader.remaining
        state.epoch = self._loader.epoch + max(0.0, 1 - left / self._length)  # the share of the data
        state.stateful_callbacks[_LOADER_KEY] = self._loader.state_dict()
        control.should_epoch_stop |= not left
        if self._planned is None or self._planned[1] != args.max_steps:
            return  # the user's own number of steps
        if is_last := self._loader.epoch + 1 >= self._planned[0]:
            state.max_steps = state.global_step + left
        else:
            state.max_steps = max(state.max_steps, state.global_step + left + 1)
        control.should_training_stop |= is_last and not left


def _plain(accumulation: Any) -> list[int]:
    return [] if accumulation is None else list(map(int, accumulation))


def _loader_state(stored: Mapping[str, Any]) -> Any:
    if _LOADER_KEY not in stored:
        raise ValueError(
            "the checkpoint must be one of a TrainerLoader, got one without the loader's position: resume it as it "
            "was saved, or start a new run from its weights"
        )
    return stored[_LOADER_KEY]
