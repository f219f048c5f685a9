"""Splitting batches of tensors in two along their samples."""

from collections.abc import Mapping
from typing import Any

import torch


def split_batch(batch: Any) -> list[Any]:
    """Cut a batch of tensors into two halves along dimension 0; a batch of `PackedCollate` at its ``cu_seqlens``.

    Dicts, tuples, named tuples and lists are cut field by field; numbers and 0-d tensors go to both halves. For a batch
    of one sample it returns only that batch.

    >>> [half["x"].tolist() for half in split_batch({"x": torch.arange(3), "scale": 2.0})]
    [[0], [1, 2]]
    """
    samples = batch_length(batch)
    if samples < 2:
        return [batch]
    middle = samples // 2
    return [_cut(batch, samples, start, stop, _offsets(batch)) for start, stop in ((0, middle), (middle, samples))]


def batch_length(batch: Any) -> int:
    """Return the number of samples in a batch of tensors.

    >>> batch_length((torch.zeros(3, 5), torch.zeros(3)))
    3
    """
    offsets = _offsets(batch)
    if offsets is not None:
        return len(offsets) - 1
    lengths = {name: len(leaf) for name, leaf in _leaves(batch)}
    if not lengths or len(set(lengths.values())) > 1:
        raise ValueError(
            f"a batch must contain tensors of one length in dimension 0, got {lengths or type(batch).__name__}: pass "
            "split= and length= to OOMGuard for batches of this kind"
        )
    return next(iter(lengths.values()))


def batch_elements(batch: Any) -> float:
    """Return the number of elements of all tensors in a batch."""
    return float(sum(leaf.numel() for _, leaf in _leaves(batch) if isinstance(leaf, torch.Tensor)))


def batch_shapes(batch: Any) -> str:
    """Return the shapes of a batch's tensors in words.

    >>> batch_shapes({"x": torch.zeros(3, 5)})
    'x [3, 5]'
    """
    return ", ".join(
        f"{name} {list(leaf.shape)}".strip() for name, leaf in _leaves(batch) if isinstance(leaf, torch.Tensor)
    )


def _leaves(batch: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the tensors that have a dimension 0, and the lists of other things, by their names."""
    if isinstance(batch, torch.Tensor):
        return [(name, batch)] if batch.ndim else []
    if isinstance(batch, Mapping):
        return [leaf for key, value in batch.items() for leaf in _leaves(value, f"{name}.{key}".lstrip("."))]
    if isinstance(batch, list) and not any(isinstance(value, torch.Tensor | Mapping | list | tuple) for value in batch):
        return [(name, batch)] if batch else []
    if isinstance(batch, tuple | list):
        names = getattr(batch, "_fields", range(len(batch)))
        return [leaf for key, v in zip(names, batch, strict=True) for leaf in _leaves(v, f"{name}.{key}".lstrip("."))]
    return []


def _offsets(batch: Any) -> list[int] | None:
    """Return where the samples of a packed batch begin and, last, where the last one ends; None for others."""
    found = batch.get("cu_seqlens") if isinstance(batch, Mapping) else getattr(batch, "cu_seqlens", None)
    return None if found is None else found.tolist()


def _cut(batch: Any, samples: int, start: int, stop: int, offsets: list[int] | None, name: str = "") -> Any:
    """Return the samples from ``start`` to ``stop`` of a batch, or of one of its fields."""
    if offsets is not None and name == "max_seqlen":
        return max(offsets[at + 1] - offsets[at] for at in range(start, stop))
    if isinstance(batch, torch.Tensor):
        if name == "cu_seqlens":
            return batch[start : stop + 1] - batch[start]
        if offsets is not None and batch.ndim and len(batch) == offsets[-1]:
            return batch[offsets[start] : offsets[stop]]
        if offsets is not None and batch.ndim and len(batch) != samples:
            raise ValueError(
                f"{name or 'a field'} must have {offsets[-1]} tokens or {samples} samples in dimension 0, got shape "
                f"{list(batch.shape)}: pass split= and length= to OOMGuard for batches of this kind"
            )
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _cut(value, samples, start, stop, offsets, str(key)) for key, value in batch.items()}
    if isinstance(batch, list) and not any(isinstance(value, torch.Tensor | Mapping | list | tuple) for value in batch):
        return batch[start:stop]
    if isinstance(batch, tuple | list):
        names = getattr(batch, "_fields", map(str, range(len(batch))))
        fields = [_cut(v, samples, start, stop, offsets, key) for key, v in zip(names, batch, strict=True)]
        return type(batch)(*fields) if hasattr(batch, "_fields") else type(batch)(fields)
    return batch
