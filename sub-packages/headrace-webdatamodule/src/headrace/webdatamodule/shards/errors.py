"""Errors of shards, with the place of the fault; and the texts of damaged shards."""

import pickle


class ShardError(Exception):
    """A fault of a shard or of its contents.

    Args:
        message: What is wrong and what to do about it.
        shard: Path or URL of the tar file.
        sample: Key of the sample.
        member: Name of the member inside the tar file, or its key inside the sample.
        offset: Byte offset of the member's header in the tar file.

    >>> print(ShardError("the header is damaged", shard="a-000000.tar", offset=512))
    the header is damaged (shard 'a-000000.tar', offset 512)
    """

    def __init__(
        self,
        message: str,
        *,
        shard: str | None = None,
        sample: str | None = None,
        member: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)  # and nothing else: what pickles errors calls this again, and sets the attributes
        self.message = message
        self.shard = shard
        self.sample = sample
        self.member = member
        self.offset = offset

    def __str__(self) -> str:
        places = {"shard": self.shard, "sample": self.sample, "member": self.member, "offset": self.offset}
        named = ", ".join(f"{name} {value!r}" for name, value in places.items() if value is not None)
        return f"{self.message} ({named})" if named else self.message


class DecodeError(ShardError):
    """A member's bytes are not what its name says."""


class UnsafePickleError(DecodeError, pickle.UnpicklingError):
    """A pickle needs something that the restricted unpickler does not allow."""


class DamagedShardError(ShardError):
    """A shard is truncated or changed, or is not a tar file."""


class Damage:
    """The texts of a `DamagedShardError`; what is in braces is filled in where it is raised."""

    MISSING = "the shard is missing: restore it, or index the directory again"
    EMPTY = "the shard is empty: it has 0 bytes"
    COMPRESSED = (
        "this is no plain tar file, but one compressed with {program}: "
        "decompress it, such as with `{program} -dc < COMPRESSED > PLAIN`"
    )
    NO_TAR = "this is no tar file, or cut: it has {nbytes} bytes, beginning {begin!r}"
    NO_HEADER = "here is no tar header, but {begin!r}"

    # The shard is cut.
    CUT_WHILE_READ = "the shard was cut while it was read: it had {nbytes} bytes; restore it"
    CUT_HEADER = "the shard is cut: {left} bytes of a header are left of {whole}; copy or download it again"
    CUT_BEHIND_EXTENDED = (
        "the shard is cut: an extended header is not followed by its member; copy or download it again"
    )
    CUT_DATA = (
        "the header promises {size} bytes of data, but {left} follow: the shard is cut; copy or download it again"
    )
    CUT_PADDING = "the shard is cut in the padding after the member's data; copy or download it again"
    CUT_END = "the shard is cut: the two blocks of zeros that end a tar file are missing; copy or download it again"
    CUT_BLOCK = "the shard is cut: its {nbytes} bytes are no multiple of {block}; copy or download it again"
    BEHIND_END = (
        "something follows at byte {offset} after zeros that end a tar file: a page was lost, or two tar files were "
        "joined; pack them again as one"
    )

    # A header is changed.
    HEADER = "the header is damaged: its checksum or a number in it does not fit"
    UNREADABLE_HEADER = "the header cannot be read: {reason}"
    NEGATIVE_SIZE = "the header has a negative size, {size}"
    EXTENDED_SIZE = "the extended header has a size that is negative or too large"
    NO_NAME = "the member has no usable name, but {name!r:.200}"
    PACK = "the pack is damaged: {reason}"

    # The shard is not what its index or its manifest says.
    # An older copy of equal size looks unchanged to `index_shards`.
    _REPLACED = "restore the shard, or, if it was replaced on purpose, index the shard again with force=True (--force)"
    MEMBER = f"the member's bytes are not those that were indexed: {_REPLACED}"
    OTHER_MEMBER = f"the shard has another member here than its index says: {_REPLACED}"
    OTHER_SHARD = "the shard does not match the manifest"
    OTHER_LENGTH = "the shard has {nbytes} bytes, but {indexed} when it was indexed"
    DATA = f"the {{size}} bytes of data are damaged, as their checksum does not fit: {_REPLACED}"
    DATA_BEHIND_END = "the data of {count} members, from here on, lie past the end of the shard"
    GAP = "a header, padding or a skipped member between bytes {begin} and {end} was changed"
    PADDING = "the padding after the data was changed"


class RefusedMemberError(ShardError):
    """A shard contains a link, a device, a sparse file or the like, which cannot be part of a sample."""


class GroupingError(ShardError):
    """The members of a shard do not form samples."""


class DamagedIndexError(ShardError):
    """An index is truncated or changed, or is not an index."""


class IndexVersionError(ShardError):
    """An index has the format of another release."""


class StaleIndexError(ShardError):
    """An index does not match the bytes of its shard."""


class ManifestError(ShardError):
    """A directory's manifest is missing, damaged or contradicts itself."""


class LostColumnsError(ManifestError):
    """Columns that were added to the shards would be lost, because the shards are others now.

    Attributes:
        columns: Their names.
    """

    columns: tuple[str, ...] = ()
