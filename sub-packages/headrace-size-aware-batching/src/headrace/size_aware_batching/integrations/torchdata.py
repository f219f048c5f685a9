"""The sampler's state inside the state of torchdata's ``StatefulDataLoader``."""

from collections.abc import Mapping
from typing import Any

_STATE = {"version", "seed", "epoch", "position", "fingerprint"}


class NoSamplerStateError(ValueError):
    """The state of a ``StatefulDataLoader`` that holds none of a sampler of headrace."""


def sampler_state(loader_state: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the sampler's state from the state of a torchdata ``StatefulDataLoader``.

    The loader refuses a state that was saved with another number of workers; the sampler accepts it. So load the
    returned state into the sampler, not into the loader, before you iterate. Worker states are left out; only datasets
    with ``state_dict`` have them.

    Args:
        loader_state: The result of ``StatefulDataLoader.state_dict()``, with any number of workers.

    Returns:
        State for ``load_state_dict`` of the loader's ``batch_sampler`` or ``sampler``. After a state from the end of an
        epoch the next iteration is empty: call ``set_epoch`` for the next epoch.

    Raises:
        TypeError: If ``loader_state`` is not a mapping.
        NoSamplerStateError: If there is no sampler state.
        ValueError: If it is older than the last batch (``snapshot_every_n_steps``), if
            batches came out of order (``in_order=False``), or if the loop caught an error of the dataset and continued.
            To get this error when you save a checkpoint instead of when you load it, save the result of this function.
            ``in_order=False`` together with a caught error may go undetected.

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
    # Where batches come as they are ready, or one was an error, the sampler gave other batches than were delivered.
    delivered = snapshot.get("_snapshot_step", main.get("_num_yielded"))
    given = main.get("_sampler_iter_yielded")
    if None not in (delivered, given) and delivered != given:
        raise ValueError(
            f"loader_state must hold a position of the order, got one where {delivered} batches were delivered and not "
            f"the first {delivered}, because of in_order=False or because the loop continued after an error of the "
            "dataset: a resume would lose and repeat samples. Construct the StatefulDataLoader with in_order=True, let "
            "errors end the loop, and take a checkpoint that was saved so"
        )
    iterator = main.get("_sampler_iter_state") or {}
    for state in (main.get("_index_sampler_state"), iterator.get("sampler_state")):
        if isinstance(state, Mapping) and set(state) >= _STATE:
            return dict(state)
    raise NoSamplerStateError(
        "loader_state must be that of a StatefulDataLoader over a sampler of headrace, got one without a sampler's "
        f"state: {sorted(loader_state)}; give the sampler as batch_sampler=, or as sampler= with batch_size="
    )
