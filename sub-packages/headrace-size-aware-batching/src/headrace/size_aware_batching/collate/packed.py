"""Collate function that concatenates samples of different lengths without padding."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import never_raises, options_of, shape_of
from headrace.size_aware_batching._validation import checked_flag, one_of, whole_number
from headrace.size_aware_batching.collate.arguments import check_limits, check_multiple, check_numbers
from headrace.size_aware_batching.collate.fields import Fields, Name, Path, checked_names, not_empty, place, with_keys
from headrace.size_aware_batching.collate.padding import padding_for, refuse_value, value_for
from headrace.size_aware_batching.planning.pieces import PIECE_START, pieces_of
from headrace.size_aware_batching.planning.units import round_up

_INT32_END = 2**31
_LAYOUTS = ("flat", "huggingface")
_OVERSIZE = ("truncate", "split")
_COUNTED_FROM = ("sample", "sequence")
_ONE_LENGTH = "packed samples need one length for all of their fields"


class PackedBatch(NamedTuple):
    """Batch of `PackedCollate` for samples that are not dicts.

    Attributes:
        values: The concatenated fields, in the structure of a sample.
        cu_seqlens: int32, shape ``[n + 1]``.
        max_seqlen: Length of the longest sample.
        position_ids: int64, shape ``[total]``.
    """

    values: Any
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor

    @never_raises
    def __repr__(self) -> str:
        sequences, total = len(self.cu_seqlens) - 1, int(self.cu_seqlens[-1])
        return (
            f"{type(self).__name__}({sequences:,} sequences of {total:,} in all, the longest {self.max_seqlen:,}, "
            f"values={shape_of(self.values)})"
        )


@dataclass(frozen=True, repr=False)
class PackedCollate:
    """Concatenate samples without padding, for variable-length attention; for ``collate_fn``.

    Samples are as for `PaddedCollate`; all fields of a sample have one length. With ``layout="flat"`` fields have the
    shape ``[total, ...]``. Dicts get three more keys; for other samples the batch is a `PackedBatch`:

    - ``cu_seqlens``: the start of each sequence and, last, the total; int32, shape ``[n + 1]``. Use it as
      ``cu_seqlens_q`` of ``flash_attn_varlen_func`` and as the offsets of ``torch.nested.nested_tensor_from_jagged``.
    - ``max_seqlen``: the length of the longest sequence, an int.
    - ``position_ids``: the position of each token in its sequence, int64, shape ``[total]``.

    With ``layout="huggingface"`` samples are dicts, fields and ``position_ids`` have the shape ``[1, total, ...]``,
    and the other keys are ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, as in
    ``transformers.DataCollatorWithFlattening``. A field ``attention_mask`` is dropped: models that receive one do not
    look for sample boundaries. Only some models and attention implementations keep packed samples apart;
    the how-to on packed sequences lists them.

    A piece of a long sample is a sequence of its own. Samples are cut by `SplitDataset`, which stores the start of a
    piece in the field ``"piece_start"``, or here by ``oversize="split"``; both give the same batch. With ``"flat"``,
    positions count from the start of the piece in its sample, and the batch has ``"piece_start"``, int64, shape
    ``[n]``, without sequences of padding. With ``"huggingface"``, positions of each sequence start anew and the key is
    dropped, because models take a new sequence to begin where ``position_ids`` are 0 or do not increase by 1. Otherwise
    a piece that starts at 4096, after a sample of 4096 tokens, would look like the continuation of that sample.

    A pack can be padded to the shapes that kernels and compilers need. Padding after a sample belongs to its sequence:
    tokens do not see it in causal attention; other attention needs ``lengths``. Padding after the last sample forms
    separate sequences, none longer than the longest sample. The loss must not count padding: a field ``"labels"`` is
    padded with -100; give the same ``pad_value`` to targets with another name.

    Args:
        layout: ``"flat"`` or ``"huggingface"``, see above.
        separator: Value that replaces the first element of each sample in a field, by the field's name. Next-token
            prediction needs ``{"labels": -100}``; otherwise the last token of a sample learns to predict the first
            token of the next sample. None (default): ``{"labels": -100}`` with ``layout="huggingface"`` and samples
            that have labels, otherwise no separator. ``{}``: no separator, for masked language models.
        position_start: Position of the first token of a sample: 0, or ``padding_idx + 1`` (2) for Hugging Face's
            RoBERTa and ESM models.
        length_multiple: The length of each sample is padded to a multiple of this.
        total_multiple: The total is padded to a multiple of this, for example 16 for FP8.
        total_length: The total is padded to this, so that all batches have one shape. None: no such padding.
        pad_value: The padding: a number, or a mapping from a field's name to a number. Fields that are not in a
            mapping get their separator, if they have one, or else 0; a number applies to fields without a separator.
            Unless a mapping names them, ``"labels"`` without a separator get -100, and an ``"attention_mask"`` 0.
        return_lengths: Whether to add ``"lengths"``, the lengths of the samples without padding and 0 for
            sequences of padding; int32, shape ``[n]``. Use it as ``seqused_k`` of variable-length attention. Samples
            must be dicts.
        return_seq_idx: Whether to add ``"seq_idx"``, the number of each token's sequence in the batch, int32, with the
            shape of ``position_ids``, as in ``transformers.DataCollatorWithFlattening(return_seq_idx=True)``. The
            kernels of state space and hybrid models (Mamba, Bamba, gated delta) need it: without it, states pass from
            one sample to the next. Samples must be dicts.
        fixed: Names of fields whose dimension 0 is not a length (dict keys, or positions in a tuple). They are
            stacked.
        max_length: Samples are truncated to this number of elements in each field that is not fixed. Pass it to the
            batch sampler as well, so that it counts the truncated lengths. None: no truncation.
        oversize: Policy for a sample longer than ``max_length``: ``"truncate"`` it, or ``"split"`` it into pieces of
            that length and a remainder, with no loss of tokens. The batch sampler then counts whole samples. With the
            same ``max_length`` and ``oversize``, the batch sampler plans the pieces itself, and nothing is left to
            split here. Fields in ``fixed``, numbers and strings are repeated for each piece.
        positions: Whether the positions of a piece count from the start of its ``"sample"`` or of its own
            ``"sequence"``. None: ``"sample"`` with ``layout="flat"``, ``"sequence"`` with ``"huggingface"``, which
            supports only that.
        max_total_size: The budget of the batch sampler: a larger batch raises an error, because it means that the
            sampler's sizes were wrong. The size is the number of elements without padding. None: not checked.

    Raises:
        TypeError: If an argument or a field has the wrong type.
        ValueError: If a batch is empty; samples differ in keys, dtypes or further dimensions; the fields of a
            sample differ in length; a name is not a field; a dtype cannot represent a separator or a pad value; a
            batch is longer than ``max_total_size`` or ``total_length``, or has 2**31 tokens or more; or, with
            ``layout="huggingface"``, an ``attention_mask`` has zeros.

    >>> batch = PackedCollate()([{"ids": [5, 6, 7]}, {"ids": [8]}])
    >>> batch["ids"], batch["cu_seqlens"], batch["max_seqlen"], batch["position_ids"]
    (tensor([5, 6, 7, 8]), tensor([0, 3, 4], dtype=torch.int32), 3, tensor([0, 1, 2, 0]))
    >>> collate = PackedCollate(layout="huggingface", total_multiple=6)
    >>> batch = collate([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}])
    >>> batch["labels"], batch["cu_seq_lens_q"]
    (tensor([[-100,    6,    7, -100, -100, -100]]), tensor([0, 3, 4, 6], dtype=torch.int32))
    >>> batch = PackedCollate(max_length=2, oversize="split")([{"ids": [5, 6, 7]}, {"ids": [8]}])
    >>> batch["cu_seqlens"], batch["position_ids"], batch["piece_start"]
    (tensor([0, 2, 3, 4], dtype=torch.int32), tensor([0, 1, 2, 0]), tensor([0, 2, 0]))
    """

    _: KW_ONLY
    layout: Literal["flat", "huggingface"] = "flat"
    separator: Mapping[Name, float] | None = None
    position_start: int = 0
    length_multiple: int = 1
    total_multiple: int = 1
    total_length: int | None = None
    pad_value: float | Mapping[Name, float] = 0
    return_lengths: bool = False
    return_seq_idx: bool = False
    fixed: Sequence[Name] = ()
    max_length: int | None = None
    max_total_size: int | None = None
    oversize: Literal["truncate", "split"] = "truncate"
    positions: Literal["sample", "sequence"] | None = None

    @never_raises
    def __repr__(self) -> str:
        return options_of(self)

    def __post_init__(self) -> None:
        one_of("layout", self.layout, _LAYOUTS)
        if self.separator is not None:
            if not isinstance(self.separator, Mapping):
                raise TypeError(f"separator must be a mapping from field to number, or None, got {self.separator!r}")
            check_numbers("separator", self.separator)
        checked_int("position_start", self.position_start, 0, _INT32_END - 1)
        check_multiple("length_multiple", self.length_multiple)
        check_multiple("total_multiple", self.total_multiple)
        whole_number("total_length", self.total_length)
        if self.total_length is not None and self.total_length % self.total_multiple:
            raise ValueError(
                f"total_length must be a multiple of total_multiple={self.total_multiple}, got {self.total_length}: "
                "leave total_multiple out"
            )
        check_numbers("pad_value", self.pad_value)
        checked_flag("return_lengths", self.return_lengths)
        checked_flag("return_seq_idx", self.return_seq_idx)
        check_limits(self.max_length, self.max_total_size)
        one_of("oversize", self.oversize, _OVERSIZE)
        if self.oversize == "split" and self.max_length is None:
            raise ValueError("oversize='split' needs max_length, the length of a piece, got None: give both")
        if self.positions is not None:
            one_of("positions", self.positions, _COUNTED_FROM)
            if self.positions == "sample" and self.layout == "huggingface":
                raise ValueError(
                    "positions must be 'sequence' with layout='huggingface', got 'sample': models would take a piece "
                    "for the rest of the sequence before it; leave positions out, or use layout='flat'"
                )
        object.__setattr__(self, "fixed", checked_names(self.fixed))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of some samples."""
        samples = not_empty(samples)
        huggingface = self.layout == "huggingface"
        needs_dicts = {
            "layout='huggingface'": huggingface,
            "return_lengths=True": self.return_lengths,
            "return_seq_idx=True": self.return_seq_idx,
        }
        for option, is_set in needs_dicts.items():
            if is_set and not isinstance(samples[0], Mapping):
                raise TypeError(f"samples must be dicts for {option}, got {type(samples[0]).__name__}")
        separator = self.separator
        if separator is None:
            separator = {"labels": -100} if huggingface and "labels" in samples[0] else {}
        samples, starts, fields = self._pieces(samples)

        def join(tensors: list[torch.Tensor], path: Path) -> torch.Tensor:
            if fields.is_fixed(tensors, path):
                return torch.stack(tensors)
            if huggingface and path == ("attention_mask",):
                _refuse_padding(tensors, path)
            return self._packed(tensors, path, separator)

        batch = fields.gather(samples, join)
        fields.refuse_unknown(self.fixed, "fixed", of_any=True)
        fields.refuse_unknown(self.separator or {}, "separator")
        if isinstance(self.pad_value, Mapping):
            fields.refuse_unknown(self.pad_value, "pad_value")
        lengths = fields.one_length(_ONE_LENGTH)
        fields.refuse_over(self.max_total_size, sum(lengths))
        padded, tail = self._sequences(lengths)
        offsets, longest = cumulative_lengths([*padded, *tail]), max([*padded, *tail])
        positions = _positions([*padded, *tail], self.position_start)
        of_sample = self.positions == "sample" or (self.positions is None and not huggingface)
        if of_sample and any(starts):
            counts = torch.tensor([*padded, *tail])
            positions += torch.tensor([*starts, *(0 for _ in tail)]).repeat_interleave(counts)
        if not isinstance(batch, dict):
            return PackedBatch(batch, offsets, longest, positions)
        extra: dict[str, Any]
        if huggingface:
            batch.pop(PIECE_START, None)
        elif PIECE_START in batch or self.oversize == "split":
            batch[PIECE_START] = torch.tensor(starts)
        if huggingface:
            batch.pop("attention_mask", None)
            extra = {"position_ids": positions[None], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
            extra |= {"max_length_q": longest, "max_length_k": longest}
        else:
            extra = {"cu_seqlens": offsets, "max_seqlen": longest, "position_ids": positions}
        if self.return_lengths:
            extra["lengths"] = torch.tensor([*lengths, *(0 for _ in tail)], dtype=torch.int32)
        if self.return_seq_idx:
            seq_idx = torch.arange(len(padded) + len(tail), dtype=torch.int32).repeat_interleave(offsets.diff())
            extra["seq_idx"] = seq_idx[None] if huggingface else seq_idx
        return with_keys(batch, extra)

    def _pieces(self, samples: Sequence[Any]) -> tuple[Sequence[Any], list[int], Fields]:
        """Return the sequences to gather, a sample once for each of its pieces, and where each begins in its sample."""
        starts = [int(sample[PIECE_START]) if _has_start(sample) else 0 for sample in samples]
        if self.oversize != "split" or self.max_length is None:
            return samples, starts, Fields(self.fixed, self.max_length)
        whole = Fields(self.fixed, None)
        whole.gather(samples, whole.is_fixed)
        pieces = pieces_of(np.array(whole.one_length(_ONE_LENGTH)), self.max_length)
        owners, begins = pieces.samples.tolist(), pieces.starts.tolist()
        spans = [(begin, begin + length) for begin, length in zip(begins, pieces.lengths.tolist(), strict=True)]
        starts = [starts[owner] + begin for owner, begin in zip(owners, begins, strict=True)]
        return [samples[owner] for owner in owners], starts, Fields(self.fixed, None, spans)

    def _sequences(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the padded lengths of the samples, and the lengths of the padding sequences after them."""
        padded = [round_up(length, self.length_multiple) for length in lengths]
        total = sum(padded)
        target = round_up(total, self.total_multiple) if self.total_length is None else self.total_length
        if total > target:
            raise ValueError(
                f"total_length must be at least the {total} tokens of the batch, got {target}: raise it to the budget "
                "of the batches, or lower the budget"
            )
        longest = max(padded) or target
        return padded, [min(longest, target - begin) for begin in range(total, target, longest or 1)]

    def _packed(self, tensors: list[torch.Tensor], path: Path, separator: Mapping[Name, float]) -> torch.Tensor:
        """Concatenate one field of the samples, with its padding and separators."""
        lengths = [tensor.shape[0] for tensor in tensors]
        padded, tail = self._sequences(lengths)
        dtype, first = tensors[0].dtype, value_for(path, separator, None)
        if padded != lengths or tail:
            value = padding_for(path, self.pad_value, first)
            refuse_value("pad_value", value, dtype, path)
            padding = tensors[0].new_full((sum(tail) + self.length_multiple, *tensors[0].shape[1:]), value)
            pieces = [(x, padding[: size - length]) for x, size, length in zip(tensors, padded, lengths, strict=True)]
            packed = torch.cat([piece for pair in pieces for piece in pair] + [padding[: sum(tail)]])
        else:
            packed = torch.cat(tensors)
        if first is not None:
            refuse_value("separator", first, dtype, path)
            begins = [begin for begin, size in zip(accumulate(padded, initial=0), lengths, strict=False) if size]
            packed[begins] = first
        return packed[None] if self.layout == "huggingface" else packed


def _has_start(sample: Any) -> bool:
    return isinstance(sample, Mapping) and PIECE_START in sample


def cumulative_lengths(lengths: Sequence[int]) -> torch.Tensor:
    """Return the start of each sequence and, last, the total, int32, shape ``[n + 1]``.

    Raises:
        ValueError: If the number of tokens exceeds int32, the type of variable-length attention.

    >>> cumulative_lengths([3, 0, 2]).tolist()
    [0, 3, 3, 5]
    """
    if (total := sum(lengths)) >= _INT32_END:
        raise ValueError(f"a packed batch must have fewer than 2**31 tokens, got {total}: make smaller batches")
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _positions(lengths: Sequence[int], start: int) -> torch.Tensor:
    """Return the position of each token in its own sequence: 0, 1, 2, 0, 1 for lengths 3 and 2 and start 0."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    return torch.arange(start, start + int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def _refuse_padding(masks: Sequence[torch.Tensor], path: Path) -> None:
    """Raise a ValueError if an attention mask marks padding in a sample."""
    for sample, mask in enumerate(masks):
        if not bool(mask.all()):
            raise ValueError(f"{place(path, sample)} has zeros: a packed batch needs samples without padding")
