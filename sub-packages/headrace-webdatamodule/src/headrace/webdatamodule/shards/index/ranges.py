"""What the numbers of an index have to be among one another, so that nobody who uses them looks outside of something.

A checksum says that an index is as it was written, not that who wrote it meant well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.format.grouping import RESERVED
from headrace.webdatamodule.shards.format.headers import BLOCK
from headrace.webdatamodule.shards.index.checksums import FRAME_GAPS
from headrace.webdatamodule.shards.index.keys import is_utf8

Integers = npt.NDArray[Any]
Layouts = Sequence[Sequence[str]]
_LARGEST = (1 << 63) - 1
_TYPES = {"checksums": ("<u4",), "frames": ("<u8",), "blocks": ("<u4", "<u8"), "sizes": ("<u4", "<u8")}


def check_counts(description: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Look at the numbers of an index's description.

    Args:
        description: Of the index.

    Returns:
        Samples, bytes of the shard, end of its last member, checksum of three pieces.

    Raises:
        KeyError: One of them is missing.
        TypeError: Something has another form.
        ValueError: One of them cannot be.
    """
    samples, nbytes, end, spots = (description[key] for key in ("samples", "shard_bytes", "end", "spots"))
    counts = [(samples, _LARGEST), (nbytes, _LARGEST), (end, nbytes), (spots, (1 << 64) - 1)]
    skipped = description["skipped"]
    counts += [(count, _LARGEST) for count in skipped.values()]
    _need(all(type(count) is int and 0 <= count <= most for count, most in counts), "counts that are none")
    names = description["skipped_names"]
    _need(isinstance(names, list) and all(map(is_utf8, names)), "names of skipped members that are none")
    return samples, nbytes, end, spots


def check_layouts(layouts: object, n_samples: int, n_members: int) -> None:
    """Look at the tuples of member keys.

    Args:
        layouts: Of the index's description.
        n_samples: Number of samples, each with one of the layouts.
        n_members: Number of members in all samples.

    Raises:
        ValueError: They are something else, or cannot be those of so many samples and members.
    """
    if not isinstance(layouts, list) or not all(isinstance(one, list) and one for one in layouts):
        raise ValueError("layouts that are none")
    _need(sum(map(len, layouts)) <= n_members and n_samples <= n_members, "more samples than members")
    _need(bool(layouts) or n_samples == n_members == 0, "samples without a layout")
    for layout in layouts:
        folded = {suffix.lower() for suffix in layout if is_utf8(suffix)}
        _need(len(folded) == len(layout), "a member key that is none, or occurs twice")
        _need(folded.isdisjoint(RESERVED), "a member key that readers use for themselves")


def check_arrays(arrays: Mapping[str, Integers], nbytes: int, end: int) -> None:
    """Look at the arrays that say where members lie: one behind the other, and inside the shard.

    Args:
        arrays: Of the index.
        nbytes: Bytes of the shard.
        end: Where its last member's blocks end.

    Raises:
        KeyError: One is missing.
        ValueError: They have other types or lengths, or lead outside of the shard or into one another.
    """
    for name, kinds in _TYPES.items():
        _need(arrays[name].dtype.str in kinds, f"{name} of type {arrays[name].dtype.str}")
    blocks, sizes = arrays["blocks"], arrays["sizes"]
    _need(blocks.size == sizes.size == arrays["checksums"].size, "arrays of different lengths")
    _need(arrays["frames"].size == blocks.size // FRAME_GAPS + 1, "another number of frames than of members")
    if not blocks.size:
        return
    _need(int(sizes.max()) <= nbytes and int(blocks.max()) <= nbytes // BLOCK, "members outside of the shard")
    begins = blocks.astype(np.int64)
    ends = begins + (sizes.astype(np.int64) + (BLOCK - 1)) // BLOCK
    _need(begins[0] > 0 and (begins[1:] > ends[:-1]).all(), "members that lie in one another")
    _need(int(ends[-1]) * BLOCK <= end, "members behind the last one's end")


def check_samples(
    n_samples: int, n_members: int, layouts: Layouts, layout_of: Integers | None, starts: Integers | None
) -> None:
    """Look at the arrays that say which members are of which sample.

    Args:
        n_samples: Number of samples.
        n_members: Number of members in all samples.
        layouts: The different tuples of member keys, none empty.
        layout_of: The number of each sample's layout, shape [n_samples]; None when there is one layout.
        starts: Where each sample's members begin, shape [n_samples]; None when all have equally many.

    Raises:
        ValueError: They have other lengths, or do not fit one another.
    """
    widths = np.array([len(layout) for layout in layouts], np.int64)
    _need(layout_of is not None or len(layouts) <= 1, "several layouts, but none for each sample")
    _need(starts is not None or len(set(widths.tolist())) <= 1, "samples of different lengths, but no begins")
    if layout_of is not None:
        _need(layout_of.size == n_samples, "another number of layouts than of samples")
        _need(not n_samples or int(layout_of.max()) < len(layouts), "a layout that there is not")
    if starts is None:
        _need(n_samples * int(widths[0] if widths.size else 0) == n_members, "no multiple of the samples")
        return
    of_each = np.zeros(n_samples, np.int64) if layout_of is None else layout_of.astype(np.int64)
    ends = np.cumsum(widths[of_each]) if n_samples else np.empty(0, np.int64)
    _need(starts.size == n_samples and np.array_equal(starts[1:], ends[:-1]), "begins of samples that do not fit")
    _need(not n_samples or (int(starts[0]), int(ends[-1])) == (0, n_members), "begins of samples that do not fit")


def _need(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)
