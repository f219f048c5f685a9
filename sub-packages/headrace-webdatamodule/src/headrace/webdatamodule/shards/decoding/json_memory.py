"""What the objects of a JSON text take in memory, counted before they are made.

Only what may begin an object is counted, and nothing is ever subtracted that the parser might not come to see: what
follows after a mistake in the text cannot make the count smaller than what was made before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.webdatamodule.shards.decoding.limits import text_bytes

# Measured for CPython 3.11, and rounded up. A list with room for its first items, a dict with its first key; a place
# in a list, which is all there is of numbers up to 99; what more a key's place in a dict takes; another number.
_LIST, _DICT, _PLACE, _KEY, _NUMBER = 112, 180, 16, 28, 32
# A key is remembered until all is parsed, so that equal ones are one text.
_NEW_KEY = 68
# A text of ASCII, and what more another one takes. Texts of one character are there already.
_TEXT, _WIDE, _LARGE = 49, 48, 440
# While a text with escapes is being put together it takes this for each byte.
_ESCAPED = 7
_PART, _LONG, _KNOWN, _SHORT = 1 << 18, 1 << 16, 1 << 16, 64
_SPACE = b" \t\n\r"
_BETWEEN, _DIGIT, _MINUS, _OTHER = range(4)
_KINDS = np.full(256, _OTHER, np.uint8)
_KINDS[np.frombuffer(b'[]{},:"' + _SPACE, np.uint8)] = _BETWEEN
_KINDS[np.frombuffer(b"0123456789", np.uint8)] = _DIGIT
_KINDS[ord("-")] = _MINUS


def json_bytes(data: bytes) -> int:
    """Bytes that parsing a JSON text takes beside the text itself, at the most.

    Args:
        data: The text in UTF-8.

    >>> json_bytes(b'[1, 2, 3]') < json_bytes(b'[[], [], []]') < json_bytes(b'[{}, {}, {}]')
    True
    >>> json_bytes(b'["[[[[[["]') - json_bytes(b'["aaaaaa"]')
    0
    """
    count = _Count()
    for part, pieces in _parts(data, count):
        count.add(part, pieces)
    texts = text_bytes(data)
    inside = texts if count.long else count.inside
    building = _ESCAPED * count.longest if b"\\" in data else 0
    return texts + inside + building + count.objects + count.objects // 32


@dataclass
class _Count:
    objects: int = 0
    inside: int = 0  # the characters of texts
    longest: int = 0
    long: bool = False  # whether a text reaches over several parts
    known: set[bytes] = field(default_factory=set)

    def add(self, part: bytes, pieces: list[bytes]) -> None:
        structure, texts, behind = b'"'.join(pieces[::2]), pieces[1::2], pieces[2::2]
        is_key = [after[:1] != b"," and after.lstrip(_SPACE)[:1] == b":" for after in behind]
        keys = {text for text, key in zip(texts, is_key, strict=True) if key} - self.known
        values = [text for text, key in zip(texts, is_key, strict=True) if not key]
        if len(self.known) < _KNOWN:
            self.known.update(key for key in keys if len(key) <= _SHORT)
        self.objects += _structure_bytes(structure) + _NEW_KEY * len(keys)
        self.objects += _head_bytes(values) + _head_bytes(list(keys))
        self.inside += _inside_bytes(part)
        if not part.isascii() or b"\\u" in part:
            self.objects += _WIDE * sum(not text.isascii() or b"\\u" in text for text in texts)
        self.longest = max(self.longest, max(map(len, texts), default=0))


def _parts(data: bytes, count: _Count) -> Iterator[tuple[bytes, list[bytes]]]:
    # Parts of the text, and the same cut at their quotes: what stands between texts, a text, and so on. A text of
    # which the end, or what follows, is not in a part goes to the next one.
    begin, kept, length = 0, b"", 0
    while begin < len(data):
        end = min(begin + _PART, len(data))
        piece = data[begin:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and end < len(data):
            piece, end = piece[:-1], end - 1
        # Neither byte may stand in a text as it is.
        part = kept + piece.replace(b"\\\\", b"\0").replace(b'\\"', b"\1")
        pieces = part.split(b'"')
        kept, same = b"", len(pieces) == 2  # no text ends here
        if len(pieces) % 2 == 0:
            kept = b'"' + pieces.pop()
        elif len(pieces) > 1 and not pieces[-1].strip(_SPACE):
            pieces.pop()
            kept = b'"' + pieces.pop() + b'"'
        length = (length if same else 0) + end - begin if kept else 0
        count.longest = max(count.longest, length)
        if len(kept) > _LONG:
            count.long = True
            kept = kept[:_LONG] + b"%d" % begin + (b'"' if kept.endswith(b'"') else b"")
        yield part, pieces
        begin = end
    if kept:
        yield kept, (kept if kept.endswith(b'"') and len(kept) > 1 else kept + b'"').split(b'"')


def _structure_bytes(structure: bytes) -> int:
    kinds = _KINDS[np.frombuffer(b"," + structure, np.uint8)]
    between, digit = kinds == _BETWEEN, kinds == _DIGIT
    begins = between[:-1] & (digit | (kinds == _MINUS))[1:]
    one = between[:-2] & digit[1:-1] & between[2:]
    two = between[:-3] & digit[1:-2] & digit[2:-1] & between[3:]
    numbers = sum(int(np.count_nonzero(found)) * sign for found, sign in ((begins, 1), (one, -1), (two, -1)))
    marks = ((b"[", _LIST), (b"{", _DICT), (b",", _PLACE), (b":", _KEY))
    return _NUMBER * numbers + sum(structure.count(mark) * cost for mark, cost in marks)


def _head_bytes(texts: list[bytes]) -> int:
    # What texts take beside their characters: memory is given in steps of 16 bytes, and of more from 512 on.
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    lengths = lengths[lengths > 1]
    taken = (lengths + _TEXT + 15) // 16 * 16 + 16 * (lengths > _LARGE)
    return int((taken - lengths).sum())


def _inside_bytes(part: bytes) -> int:
    if b"\\u" not in part:
        return text_bytes(part)
    return max(text_bytes(part), (4 if b"\\ud" in part or b"\\uD" in part else 2) * len(part))
