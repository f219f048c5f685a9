"""A callback and a loader for Hugging Face's ``Trainer``."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import inner, never_raises
from headrace.size_aware_batching._shared.warnings import warn

_KEY = "headrace"  # in a trainer's state
_SAMPLER = "sampler"  # and in it the sampler's state
_LOADER_KEY = "headrace_loader"


class TrainerGuard:
    """Callback that keeps a Hugging Face ``Trainer`` exact, or stops it.

    A ``Trainer`` resumes by counting steps, so it silently loses and repeats samples if the batches have changed. The
    guard stores the sampler's fingerprint, the number of processes and the number of accumulated batches in the
    trainer's checkpoints, and refuses to resume if one of them differs. With an `OptimizerStepBatchSampler` both
    numbers may differ, because the steps stay the same; without one, use `TrainerLoader`. The guard also sets the
    sampler's epoch, even after a resume. It refuses what a ``Trainer`` cannot train on exactly: a loader that shards a
    rank's batches again; epochs of different lengths, because a ``Trainer`` drops the rest; changes of the run
    (``exclude``, ``skip``, ``reweight``) after training has begun, because a resume would skip other batches; and
    optimizer steps whose number of batches is not ``gradient_accumulation_steps``. It reads no data.

    The checkpoints also hold the sampler's state with its record of the run, so ``headrace-runs show checkpoint-500
    --step 1234`` lists the samples of any step. In this state the sampler is ahead of
    training by the prefetched batches; the Trainer resumes by its own count.

    Override ``get_train_dataloader``. Return ``DataLoader(dataset, batch_sampler=sampler, ...)`` as it is, or, if the
    sampler has ``rank="all"``, ``self.accelerator.prepare(...)`` of it.

    Args:
        sampler: The batch sampler of the trainer's loader, or its sampler. It must have ``fingerprint``, ``set_epoch``
            and ``len()``.

    Raises:
        TypeError: If ``sampler`` lacks one of these.
        ValueError: When training begins, or after a step, in the cases above; each message says what to do.

    Example:
        >>> from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        >>> guard = TrainerGuard(DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5))
        >>> # Trainer(model, arguments, train_dataset=data, callbacks=[guard])
    """

    def __init__(self, sampler: Any) -> None:
        if missing := [name for name in ("fingerprint", "set_epoch", "__len__") if not hasattr(sampler, name)]:
            raise TypeError(f"sampler must be a sampler of headrace, got {type(sampler).__name__} without {missing}")
        self._sampler = sampler
        self._length = self._accumulated = 0
        self._saved: Mapping[str, Any] | None = None  # the sampler's state in the checkpoint, until it is loaded
        self._excluded = set[int]()  # samples that were left out when training began

    @never_raises
    def __repr__(self) -> str:
        return f"{type(self).__name__}({inner(self._sampler)})"

    def on_train_begin(self, args: Any, state: Any, *_: Any, **others: Any) -> None:
        """Check the loader and the epochs, and compare them with the checkpoint, if there is one."""
        self._refuse_loader(others.get("train_dataloader"), args.world_size)
        own = {
            "fingerprint": self._sampler.fingerprint,
            "world_size": args.world_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
        }
        self._accumulated = args.gradient_accumulation_steps
        saved = state.stateful_callbacks.get(_KEY)
        if state.global_step and saved is None:
            warn("the checkpoint was saved without a TrainerGuard: its batches may have been others")
        self._saved = (saved or {}).get(_SAMPLER)
        # A step of so many tokens has the same samples on any processes, so what a Trainer counts stays right.
        keeps_steps = getattr(self._sampler, "tokens_per_step", None) is not None
        for name, value in (saved or {}).items():
            if name != _SAMPLER and value != own[name] and (name == "fingerprint" or not keeps_steps):
                raise ValueError(_CHANGED[name].format(saved=value, own=own[name]))
        if state.global_step and args.ignore_data_skip:
            raise ValueError("ignore_data_skip must be False, got True: a resume would repeat batches")
        state.stateful_callbacks[_KEY] = own
        run = self._state()
        self._excluded = _excluded(run)
        for held in (run, self._saved or {}):
            self._refuse_changes(held)
        self._length = 0
        for epoch in range(min(state.num_train_epochs, 2)):
            self._begin(epoch)

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **others: Any) -> None:  # noqa: ARG002 -- the Trainer's hook
        """Choose the epoch."""
        epoch = int(state.epoch or 0)
        self._restore(epoch)
        self._refuse_changes(self._state())
        self._begin(epoch)

    def on_step_end(self, args: Any, state: Any, *_: Any, **others: Any) -> None:  # noqa: ARG002 -- the Trainer's hook
        """Store the sampler's state, for a checkpoint that is saved after this step."""
        if own := self._state():
            self._refuse_changes(own)
            state.stateful_callbacks[_KEY][_SAMPLER] = own

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *_, **__: None  # leaves an event of the trainer alone
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def _state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._sampler.state_dict() if hasattr(self._sampler, "state_dict") else {}
        return state

    def _refuse_changes(self, state: Mapping[str, Any]) -> None:
        """Refuse a run that has changed since training began, or another one than was prepared by ``exclude``."""
        changed = ["exclude"] * bool(state and _excluded(state) != self._excluded)
        changed += [name for name in ("skip", "reweight") if any(name in change for change in state.get("run", ()))]
        if changed:
            raise ValueError(
                f"{' and '.join(changed)} of the sampler must not be called in a run of a Trainer, which resumes by "
                "counting batches and would lose and repeat samples. Only exclude may be called, before each train(), "
                "the resumed ones too, for the same samples. A TrainerLoader follows all changes of a run"
            )

    def _restore(self, epoch: int) -> None:
        """Load the record of the run from the checkpoint, at the beginning of an epoch: the Trainer skips batches."""
        saved, self._saved = self._saved, None
        if saved is None or not hasattr(self._sampler, "load_state_dict"):
            return
        self._sampler.set_epoch(saved["epoch"])
        with suppress(ValueError):  # of an order that cannot be read again, whose record begins anew
            self._sampler.load_state_dict(saved)
            self._sampler.set_epoch(epoch + 1)  # so that the position is dropped

    def _begin(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)
        if (accumulation := getattr(self._sampler, "accumulation", None)) is not None:
            self._refuse_accumulation(epoch, accumulation.tolist())
        length = len(self._sampler)
        if length != (self._length or length):
            cure = "Use another strategy than 'sequential' and no sampler"
            if getattr(self._sampler, "tokens_per_step", None) is not None:
                cure = f"Give the sampler a constant tokens_per_step, accumulate={self._accumulated} and tail='drop', "
                cure += "which leaves out less than a step of each epoch"
            raise ValueError(
                f"all epochs must have the same number of batches, got {self._length} in the first and {length} in "
                f"epoch {epoch}: a Trainer counts once and would drop the rest. {cure}, or use num_train_epochs=1"
            )
        self._length = length

    def _refuse_accumulation(self, epoch: int, accumulation: list[int]) -> None:
        """Refuse steps of other numbers of batches than a Trainer accumulates; it ends the last one of an epoch."""
        *whole, last = accumulation
        if wrong := [count for count in whole if count != self._accumulated] or [last] * (last > self._accumulated):
            raise ValueError(
                f"gradient_accumulation_steps must be {wrong[0]}, as an optimizer step of epoch {epoch} has by "
                f"tokens_per_step, got {self._accumulated}: a Trainer accumulates the same number in all steps. Give "
                "the sampler accumulate= a number that is enough for all epochs, and the TrainingArguments the same"
            )

    def _refuse_loader(self, loader: Any, world_size: int) -> None:
        found, shards = loader, 1
        for _ in range(5):  # a loader, what accelerate puts around batch samplers, and torch's own
            if found is None or found is self._sampler:
                break
            shards *= getattr(found, "num_processes", 1)
            within = getattr(found, "batch_sampler", None)
            found = getattr(found, "sampler", None) if within is None else within
        if found is not self._sampler:
            raise ValueError(
                f"sampler must be that of the trainer's loader, got another one ({type(self._sampler).__name__}): "
                "override get_train_dataloader to return DataLoader(..., batch_sampler=sampler)"
            )
        of_all = self._sampler.rank == "all" or self._sampler.num_replicas == 1
        if world_size > 1 and of_all != (shards > 1):
            raise ValueError(
                "every process would train on all batches: leave out num_replicas and rank of the sampler, or prepare "
                "the loader"
                if of_all
                else f"{shards - 1} of {shards} batches would be lost: the loader of a sampler that gives one rank's "
                'batches must not be prepared; leave that out, or construct the sampler with rank="all"'
            )


class TrainerLoader:
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
                "step with the last, shorter group of a loader without a length. To accumulate, use an "
                "OptimizerStepBatchSampler with a TrainerGuard, which also resumes on any number of processes"
            )
        if any(count != 1 for count in _plain(getattr(self._loader, "accumulation", None))):
            raise ValueError(
                "the optimizer steps of tokens_per_step must have 1 batch each, got more: a Trainer would step after "
                "every batch. Use a DataLoader and a TrainerGuard, which also resumes on any number of processes"
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

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *_, **__: None  # leaves an event of the trainer alone
        raise AttributeError(f"{type(self).__name__} has no {name}")


def _excluded(state: Mapping[str, Any]) -> set[int]:
    return {index for change in state.get("run", ()) for index in change.get("exclude", ())}


def _plain(accumulation: Any) -> list[int]:
    return [] if accumulation is None else list(map(int, accumulation))


def _loader_state(stored: Mapping[str, Any]) -> Any:
    if _LOADER_KEY not in stored:
        raise ValueError(
            "the checkpoint must be one of a TrainerLoader, got one without the loader's position: resume it as it "
            "was saved, or start a new run from its weights"
        )
    return stored[_LOADER_KEY]


_CHANGED = {
    "fingerprint": "the checkpoint is of other batches: sizes, budget, options or seed of the sampler differ; "
    "construct it as then, or start a new run (its fingerprint was {saved} and is {own})",
    "world_size": "world_size must be {saved}, as in the checkpoint, got {own}: a Trainer counts steps of each process "
    "and would lose or repeat samples; resume with {saved}, or start a new run from its weights. A run with a "
    "TrainerLoader, or an OptimizerStepBatchSampler, resumes on any number of processes",
    "gradient_accumulation_steps": "gradient_accumulation_steps must be {saved}, as in the checkpoint, got {own}: a "
    "Trainer counts steps of the optimizer and would lose or repeat samples; resume with {saved}, or start a new run "
    "from its weights",
}
