"""Splitting batches of tensors in two along their samples."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_seqlen", "max_length_q", "max_length_k")


class _Packed(NamedTuple):
    """Where the samples of a packed batch begin and, last, where the last one ends; the dimension of its tokens."""

    offsets: torch.Tensor  # on the device, where a step that needs no split must not wait for them
    dim: int


def split_batch(batch: Any) -> list[Any]:
    """Cut a batch of tensors into two halves along dimension 0; packed batches at the ends of their samples.

    Packed batches are those of `PackedCollate`, with ``cu_seqlens``, and those of transformers: one row of tokens with
    ``cu_seq_lens_q``, or with ``position_ids`` that begin anew at each sample and no padding.

    Dicts, tuples, named tuples and lists are cut field by field; numbers and 0-d tensors go to both halves. For a batch
    of one sample it returns only that batch.

    >>> [half["x"].tolist() for half in split_batch({"x": torch.arange(3), "scale": 2.0})]
    [[0], [1, 2]]
    """
    samples = batch_length(batch)
    if samples < 2:
        return [batch]
    middle = samples // 2
    packed = _packed(batch)
    if packed is not None:
        packed = packed._replace(offsets=packed.offsets.cpu())
    return [_cut(batch, samples, start, stop, packed) for start, stop in ((0, middle), (middle, samples))]


def batch_length(batch: Any) -> int:
    """Return the number of samples in a batch of tensors.

    >>> batch_length((torch.zeros(3, 5), torch.zeros(3)))
    3
    """
    packed = _packed(batch)
    if packed is not None:
        return len(packed.offsets) - 1
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


def _packed(batch: Any) -> _Packed | None:
    """Return how a batch is packed; None for others."""
    fields = batch if isinstance(batch, Mapping) else {"cu_seqlens": getattr(batch, "cu_seqlens", None)}
    if (offsets := fields.get("cu_seqlens")) is not None:
        return _Packed(offsets, 0)
    if (offsets := fields.get("cu_seq_lens_q")) is not None:
        return _Packed(offsets, 1)
    positions, mask = fields.get("position_ids"), fields.get("attention_mask")
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or len(positions) != 1:
        return None
    if mask is not None and not bool(mask.all()):  # a padded row
        return None
    row = positions[0]
    begins = (row[1:] != row[:-1] + 1).nonzero()[:, 0] + 1
    return _Packed(torch.cat([begins.new_zeros(1), begins, begins.new_full((1,), len(row))]), 1)


def _cut(batch: Any, samples: int, start: int, stop: int, packed: _Packed | None, name: str = "") -> Any:
    """Return the samples from ``start`` to ``stop`` of a batch, or of one of its fields."""
    if packed is not None and name in _LONGEST:
        return int(packed.offsets[start : stop + 1].diff().max())
    if isinstance(batch, torch.Tensor):
        return _cut_tensor(batch, samples, start, stop, packed, name)
    if isinstance(batch, Mapping):
        return {key: _cut(value, samples, start, stop, packed, str(key)) for key, value in batch.items()}
    if isinstance(batch, list) and not any(isinstance(value, torch.Tensor | Mapping | list | tuple) for value in batch):
        return batch[start:stop]
    if isinstance(batch, tuple | list):
        names = getattr(batch, "_fields", map(str, range(len(batch))))
        fields = [_cut(v, samples, start, stop, packed, key) for key, v in zip(names, batch, strict=True)]
        return type(batch)(*fields) if hasattr(batch, "_fields") else type(batch)(fields)
    return batch


def _cut_tensor(
    tensor: torch.Tensor, samples: int, start: int, stop: int, packed: _Packed | None, name: str
) -> torch.Tensor:
    if packed is None or not tensor.ndim:
        return tensor[start:stop] if tensor.ndim else tensor
    offsets, dim = packed.offsets.tolist(), packed.dim
    if name in _OFFSETS:
        return tensor[start : stop + 1] - tensor[start]
    if tensor.ndim > dim and tensor.shape[dim] == offsets[-1] and (dim == 0 or len(tensor) == 1):
        piece = tensor.narrow(dim, offsets[start], offsets[stop] - offsets[start])
        return piece - piece.narrow(dim, 0, 1) if name == "seq_idx" else piece
    if len(tensor) == samples:
        return tensor[start:stop]
    raise ValueError(
        f"{name or 'a field'} must have {offsets[-1]} tokens or {samples} samples in dimension {dim}, got shape "
        f"{list(tensor.shape)}: pass split= and length= to OOMGuard for batches of this kind"
    )
