"""Stages that read: open a local shard, decode a sample's members, put them into a tuple."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.webdatamodule.shards.decoding.allowed import AllowedClass
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.errors import ShardError


class OpenLocal:
    """Opens shards as plain files, in place of webdataset's opener.

    That one parses paths as URLs: it runs a shell for `pipe:`, obeys GOPEN_REWRITE and WDS_CACHE, and
    cuts file names at "#" and "?".

    Args:
        handler: webdataset's handler: gets an exception, and says whether to go on.
    """

    def __init__(self, handler: Callable[[Exception], bool]) -> None:
        self.handler = handler

    def __call__(self, source: Iterable[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
        """One dictionary with an open stream per shard."""
        for item in source:
            path = item["url"]
            try:
                check_whole(path)
                stream = open(path, "rb")  # noqa: PTH123, SIM115 - closed below, when its reader is done
            except Exception as error:
                if self.handler(error):
                    continue
                return
            with stream:
                yield {"url": path, "stream": stream, "local_path": path}


def check_whole(path: str) -> None:
    """Refuse a tar file that was cut off: readers would take the cut for its end.

    Args:
        path: A local file. A tar file ends with two blocks of zeros; compressed files are let pass.

    Raises:
        ShardError: The end is missing.
    """
    with open(path, "rb") as stream:  # noqa: PTH123 - the path is text already
        head = stream.read(512)
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - 1024))
        tail = stream.read()
    if head[257:262] == b"ustar" and tail != bytes(1024):
        raise ShardError("the shard is cut off: its end is missing. Write or copy it again", shard=path)
    if not head:
        raise ShardError("the shard is an empty file. Write or copy it again", shard=path)


class Extract:
    """Turns samples, as webdataset groups them, into tuples of decoded members.

    Args:
        keys: Member keys, in the order of the tuple.
        allowed_classes: What pickles may use beyond the default.
    """

    def __init__(self, keys: Sequence[str], allowed_classes: Collection[AllowedClass]) -> None:
        self.keys = tuple(keys)
        self.allowed_classes = tuple(allowed_classes)

    def __call__(self, source: Iterable[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
        """One tuple per sample."""
        return (tuple(self._member(sample, key) for key in self.keys) for sample in source)

    def _member(self, sample: dict[str, Any], key: str) -> Any:
        held = sample.get(key, sample.get(key.lower()))  # webdataset folds the case of member keys
        if held is None:
            names = sorted(name for name in sample if not name.startswith("__"))
            raise ShardError(
                f"the sample has no member {key!r}, only {names}: correct suffix_keys_wds, or the shard",
                shard=sample["__url__"],
                sample=sample["__key__"],
            )
        try:
            return decode_member(key, held, allowed_classes=self.allowed_classes)
        except ShardError as error:
            error.shard, error.sample, error.member = sample["__url__"], sample["__key__"], key
            raise
