"""What a pickle's objects take in memory, counted at each instruction before it is followed.

A byte of a pickle makes an empty set of 216 bytes, three make a deque of 760. Pickles so short that they fit
whatever they hold are not counted, which would slow them down by a fifth.
"""

from __future__ import annotations

import codecs
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.webdatamodule.shards.decoding.limits import Room, text_bytes
from headrace.webdatamodule.shards.errors import DecodeError

# What an instruction makes at the most, with its places on the stack and in a container: measured for CPython 3.11,
# and rounded up.
_OTHER, _CALL, _SET, _MEMO = 80, 1024, 240, 200
_COSTS = dict.fromkeys((pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.BUILD, pickle.OBJ, pickle.INST), _CALL)
_COSTS |= dict.fromkeys((pickle.EMPTY_SET, pickle.FROZENSET), _SET)
_COSTS |= dict.fromkeys((pickle.MEMOIZE, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT), _MEMO)
# An item of a container that a call copies, or that is added to a set.
_ITEM = 128
_SIZED = (list, tuple, dict, set, frozenset)
# The longest pickle that is not counted takes this for each byte, and that for what it copies beyond.
_PER_BYTE, _BEYOND = 640, 16 << 20
_LONG = 1 << 12  # bytes of a text
_WHAT = "the objects of this pickle take"
Handler = Callable[[Any], None]


def is_tight(nbytes: int, room: Room) -> bool:
    """Whether a pickle of so many bytes may hold more than there is room for.

    >>> is_tight(10, Room(1 << 30)), is_tight(1 << 24, Room(1 << 30))
    (False, True)
    """
    return _PER_BYTE * nbytes + _BEYOND > room.left


def call_cost(values: Iterable[Any]) -> int:
    """Bytes that a call makes of its arguments, at the most.

    >>> call_cost([b"ab", [1]])
    130
    """
    return sum(
        _ITEM * len(value) if isinstance(value, _SIZED) else len(value)
        for value in values
        if isinstance(value, (*_SIZED, bytes, bytearray, str))
    )


class Lines(io.BytesIO):
    """Bytes that do not hand out lines without end.

    Args:
        data: The bytes.
        room: For what is made of them.
    """

    def __init__(self, data: bytes | bytearray | memoryview, room: Room) -> None:
        super().__init__(data)
        self._room = room

    def readline(self, _size: int | None = -1, /) -> bytes:
        """The next line.

        Raises:
            DecodeError: It is too long.
        """
        most = max(1 << 16, self._room.left // 8)
        line = super().readline(most + 1)
        if len(line) > most:
            self._room.take(8 * len(line), _WHAT)
            raise DecodeError(f"a line of this pickle has more than {most} bytes")
        return line


def counted(dispatch: Mapping[int, Handler], room: Room) -> dict[int, Handler]:
    """The handlers of instructions, each counting what it makes.

    Args:
        dispatch: The handlers by the instruction.
        room: What there is.
    """

    def counting(code: int, load: Handler) -> Handler:
        cost = _COSTS.get(bytes([code]), _OTHER)

        def handle(unpickler: Any) -> None:
            room.take(cost, _WHAT)
            load(unpickler)

        return handle

    made = {code: counting(code, load) for code, load in dispatch.items()}
    texts = {pickle.SHORT_BINUNICODE: 1, pickle.BINUNICODE: 4, pickle.BINUNICODE8: 8}
    made |= {name[0]: _text(size, room) for name, size in texts.items()}
    others = {pickle.BINSTRING: _string, pickle.STRING: _quoted, pickle.UNICODE: _line, pickle.FRAME: _frame}
    made |= {name[0]: make(room) for name, make in others.items()}
    for name in (pickle.ADDITEMS, pickle.FROZENSET):
        made[name[0]] = _items(made[name[0]], room)
    return made


def _text(size: int, room: Room) -> Handler:
    def handle(unpickler: Any) -> None:
        data = unpickler.read(int.from_bytes(unpickler.read(size), "little"))
        # Up to 4 bytes a character, but numpy's data in protocol 2 are long texts of one.
        room.take(_OTHER + (4 * len(data) if len(data) < _LONG else text_bytes(data)), _WHAT)
        unpickler.append(str(data, "utf-8", "surrogatepass"))

    return handle


def _string(room: Room) -> Handler:
    def handle(unpickler: Any) -> None:
        length = int.from_bytes(unpickler.read(4), "little", signed=True)
        if length < 0:
            raise pickle.UnpicklingError("BINSTRING pickle has negative byte count")
        room.take(_OTHER + 2 * length, _WHAT)
        unpickler.append(unpickler._decode_string(unpickler.read(length)))

    return handle


def _quoted(room: Room) -> Handler:
    def handle(unpickler: Any) -> None:
        line = unpickler.readline()[:-1]
        room.take(_OTHER + 3 * len(line), _WHAT)
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"\"'":
            raise pickle.UnpicklingError("the STRING opcode argument must be quoted")
        unpickler.append(unpickler._decode_string(codecs.escape_decode(line[1:-1])[0]))

    return handle


def _line(room: Room) -> Handler:
    def handle(unpickler: Any) -> None:
        line = unpickler.readline()[:-1]
        room.take(_OTHER + 5 * len(line), _WHAT)
        unpickler.append(str(line, "raw-unicode-escape"))

    return handle


def _frame(room: Room) -> Handler:
    def handle(unpickler: Any) -> None:
        size = int.from_bytes(unpickler.read(8), "little")
        room.take(size, _WHAT)
        unframer = unpickler._unframer
        unframer.load_frame(size)
        if unframer.current_frame is not None:
            unframer.current_frame = Lines(unframer.current_frame.getvalue(), room)

    return handle


def _items(load: Handler, room: Room) -> Handler:
    def handle(unpickler: Any) -> None:
        room.take(_ITEM * len(unpickler.stack), _WHAT)  # all since the mark
        load(unpickler)

    return handle
