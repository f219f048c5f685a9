"""A shard whose short pieces do not fit its index: damage in a few samples, or another shard?"""

from __future__ import annotations

from tarfile import TarError, TarInfo

from headrace.webdatamodule.shards.errors import StaleIndexError
from headrace.webdatamodule.shards.format.files import Bytes
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.container import checksum_between
from headrace.webdatamodule.shards.index.shard_index import ShardIndex

_LOOKED_AT = 9
_NAME = 99  # bytes of a longer name may stand in a header before that of the member


def check_belongs(index: ShardIndex, data: Bytes, *, verified: bool) -> None:
    """See whether a shard is the one that was indexed; what is damaged in it is left to who reads that member.

    Args:
        index: Of the shard.
        data: The bytes of the shard.
        verified: Whether the checksum of each member is compared when it is read. Only then may damage pass here.

    Raises:
        StaleIndexError: It is another shard, or one that is damaged more than here and there.
    """
    try:
        index.check_shard(len(data), lambda begin, end: _piece(data, begin, end))
    except StaleIndexError:
        if not (verified and len(data) == index.shard_bytes and _is_the_same(index, data)):
            raise


def _is_the_same(index: ShardIndex, data: Bytes) -> bool:
    """Whether the first, the last and some samples between are where the index says, and most of them unharmed.

    Another set of the same shape has the same names and sizes, but other data in all samples.
    """
    last = index.n_samples - 1
    some = sorted({last * part // (_LOOKED_AT - 1) for part in range(_LOOKED_AT)}) if last >= 0 else []
    ends = {*some[:1], *some[len(some) // 2 :][:1], *some[-1:]}
    if not all(_is_named(index, data, index.span(sample)[0]) for sample in ends):
        return False
    return 2 * sum(_is_whole(index, data, sample) for sample in some) > len(some)


def _is_named(index: ShardIndex, data: Bytes, position: int) -> bool:
    begin = int(index.blocks[position] - 1) * BLOCK
    try:
        header = TarInfo.frombuf(_piece(data, begin, begin + BLOCK), "utf-8", "surrogateescape")
    except TarError:
        return False
    _, name = index.locate(position)
    cut = len(header.name.encode("utf-8", "surrogateescape")) >= _NAME and name.startswith(header.name)
    return (header.name == name or cut) and header.size == int(index.sizes[position])


def _is_whole(index: ShardIndex, data: Bytes, sample: int) -> bool:
    for position in range(*index.span(sample)):
        begin = int(index.blocks[position]) * BLOCK
        end = begin + int(index.sizes[position])
        if checksum_between(data, begin, end) & 0xFFFFFFFF != int(index.checksums[position]):
            return False
    return True


def _piece(data: Bytes, begin: int, end: int) -> bytes:
    return bytes(data[begin:end])
