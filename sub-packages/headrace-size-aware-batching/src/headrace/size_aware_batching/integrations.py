"""For training loops of others: Hugging Face's ``Trainer``, and torchdata's ``StatefulDataLoader``.

Nothing here imports them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.size_aware_batching._validation import warn

_KEY = "headrace"  # in a trainer's state
_STATE = {"version", "seed", "epoch", "position", "fingerprint"}


def sampler_state(loader_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampler's own state out of the state of a torchdata ``StatefulDataLoader``.

    Such a loader refuses a state that was saved with another number of workers. The sampler does not: load its state
    into the sampler instead, before the loader is iterated, and not into the loader. The states of the workers
    themselves, which only a dataset with ``state_dict`` has, are left out.

    Args:
        loader_state: What ``StatefulDataLoader.state_dict()`` returned, with any number of workers.

    Returns:
        State for ``load_state_dict`` of the ``batch_sampler``, or of the ``sampler``, that the loader was given. One
        that was saved at the end of an epoch makes the next iteration empty: call ``set_epoch`` for the next epoch.

    Raises:
        TypeError: If it is not a mapping.
        ValueError: If it holds no such state, or not that of the last batch (``snapshot_every_n_steps``), or if batches
            came out of order (``in_order=False``). To see this when a checkpoint is saved and not when it is needed,
            save what this function returns.

    Example:
        >>> state = {"version": 1, "seed": 0, "epoch": 2, "position": 40, "fingerprint": "c0ffee"}
        >>> sampler_state({"_index_sampler_state": state, "_num_yielded": 5})["position"]
        40
    """
    if not isinstance(loader_state, Mapping):
        raise TypeError(f"loader_state must be a dict that state_dict() returned, got {type(loader_state).__name__}")
    if behind := loader_state.get("_steps_since_snapshot"):
        raise ValueError(
            f"loader_state must hold the state of the last batch, got one that is {behind} batches behind: construct "
            "the StatefulDataLoader with snapshot_every_n_steps=1 and in_order=True, its defaults"
        )
    snapshot = loader_state.get("_snapshot", {})
    main = snapshot.get("_main_snapshot", loader_state)  # with workers, else without
    # Where batches come as they are ready, the sampler's state may be older than the batches that were delivered.
    delivered, given = snapshot.get("_snapshot_step"), main.get("_sampler_iter_yielded")
    if None not in (delivered, given) and delivered != given:
        raise ValueError(
            f"loader_state must hold a position of the order, got one of in_order=False, where {delivered} batches "
            f"were delivered and not the first {delivered}: a resume would lose and repeat samples. Construct the "
            "StatefulDataLoader with in_order=True, and take a checkpoint that was saved so"
        )
    iterator = main.get("_sampler_iter_state") or {}
    for state in (main.get("_index_sampler_state"), iterator.get("sampler_state")):
        if isinstance(state, Mapping) and set(state) >= _STATE:
            return dict(state)
    raise ValueError(
        "loader_state must be that of a StatefulDataLoader over a sampler of headrace, got one without a sampler's "
        f"state: {sorted(loader_state)}; give the sampler as batch_sampler=, or as sampler= with batch_size="
    )


class TrainerGuard:
    """Callback that keeps a Hugging Face ``Trainer`` exact, or stops it.

    A ``Trainer`` resumes by counting steps, so it loses and repeats samples in silence where anything that decides on
    the batches is not as it was. The guard keeps the sampler's fingerprint, the number of processes and that of
    accumulated batches in the trainer's checkpoints and refuses others. It also chooses the sampler's epoch, in a
    resumed epoch too, and refuses what a ``Trainer`` cannot train on exactly: a loader that distributes a rank's
    batches once more, and epochs of different lengths, of which it would drop the rest. It reads no data and does
    nothing at the steps.

    Override ``get_train_dataloader`` to return ``DataLoader(dataset, batch_sampler=sampler, ...)`` as it is, or to
    return ``self.accelerator.prepare(...)`` of it, with ``rank="all"`` in the sampler.

    Args:
        sampler: The batch sampler of the trainer's loader, or its sampler; it has ``fingerprint`` and ``set_epoch``.

    Raises:
        TypeError: If ``sampler`` lacks one of these.
        ValueError: When training begins, see above; each message says what to do.

    Example:
        >>> from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        >>> guard = TrainerGuard(DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5))
        >>> # Trainer(model, arguments, train_dataset=data, callbacks=[guard])
    """

    def __init__(self, sampler: Any) -> None:
        if missing := [name for name in ("fingerprint", "set_epoch", "__len__") if not hasattr(sampler, name)]:
            raise TypeError(f"sampler must be a sampler of headrace, got {type(sampler).__name__} without {missing}")
        self._sampler = sampler
        self._length = 0

    def on_train_begin(self, args: Any, state: Any, *_: Any, **others: Any) -> None:
        """Compare what is about to be trained on with the checkpoint, if there is one."""
        self._refuse_loader(others.get("train_dataloader"), args.world_size)
        own = {
            "fingerprint": self._sampler.fingerprint,
            "world_size": args.world_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
        }
        saved = state.stateful_callbacks.get(_KEY)
        if state.global_step and saved is None:
            warn("the checkpoint was saved without a TrainerGuard: whether its batches were the same is not known")
        for name, value in (saved or {}).items():
            if value != own[name]:
                raise ValueError(_CHANGED[name].format(saved=value, own=own[name]))
        if state.global_step and args.ignore_data_skip:
            raise ValueError("ignore_data_skip must be False, got True: batches would come again after a resume")
        state.stateful_callbacks[_KEY] = own
        self._length = 0
        for epoch in range(min(state.num_train_epochs, 2)):
            self._begin(epoch)

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Choose the epoch."""
        self._begin(int(state.epoch or 0))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *_, **__: None  # leaves an event of the trainer alone
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def _begin(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)
        length = len(self._sampler)
        if length != (self._length or length):
            raise ValueError(
                f"all epochs must have the same number of batches, got {self._length} in the first and {length} in "
                f"epoch {epoch}: a Trainer counts once and would drop the rest. Use another strategy than 'sequential' "
                "and no sampler, or num_train_epochs=1"
            )
        self._length = length

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


_CHANGED = {
    "fingerprint": "the checkpoint is of other batches: sizes, budget, options or seed of the sampler differ; "
    "construct it as then, or start a new run (its fingerprint was {saved} and is {own})",
    "world_size": "world_size must be {saved}, as in the checkpoint, got {own}: a Trainer counts steps of each process "
    "and would lose or repeat samples; resume with {saved}, or start a new run from its weights",
    "gradient_accumulation_steps": "gradient_accumulation_steps must be {saved}, as in the checkpoint, got {own}: a "
    "Trainer counts steps of the optimizer and would lose or repeat samples; resume with {saved}, or start a new run "
    "from its weights",
}
