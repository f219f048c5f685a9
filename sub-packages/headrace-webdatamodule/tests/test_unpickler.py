import collections
import contextlib
import copyreg
import io
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.webdatamodule import DecodeError, UnsafePickleError, restricted_loads
from headrace.webdatamodule.shards.decoding.allowed import check_keys, is_ints
from headrace.webdatamodule.shards.decoding.numpy_pickle import finish_array, finish_dtype

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def same(a: Any, b: Any) -> bool:
    """Equal in type, values and layout; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided:
            return torch.equal(a.to_dense(), b.to_dense()) and a.layout == b.layout
        meta = all(getattr(a, name) == getattr(b, name) for name in ("dtype", "shape", "requires_grad"))
        values = torch.equal(a, b) or same(a.detach().tolist(), b.detach().tolist())  # numbers one by one take long
        return meta and a.stride() == b.stride() and values
    if isinstance(a, np.ndarray | np.generic):
        kinds = a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and a.shape == b.shape
        if kinds and a.dtype == b.dtype and not a.dtype.hasobject and a.tobytes() == b.tobytes():
            return True
        return kinds and repr(a.tolist()) == repr(b.tolist())
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
keys = st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
arrays: st.SearchStrategy[Any] = hnp.arrays(
    hnp.scalar_dtypes() | hnp.array_dtypes(max_size=3), hnp.array_shapes(max_dims=3, min_side=0, max_side=3)
).map(lambda array: array.T if array.size % 2 else array)
tensors = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: torch.arange(int(np.prod(shape))).to(dtype).reshape(shape).permute(tuple(range(len(shape))[::-1]))
    )
)
nested = st.recursive(
    scalars | arrays | tensors | st.binary().map(bytearray) | st.sets(keys) | st.frozensets(keys),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(keys, x, max_size=3)
        | st.tuples(x, x)
        | st.lists(x, max_size=3).map(collections.deque)
        | st.dictionaries(keys, x, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(nested, st.sampled_from(PROTOCOLS))
def test_data_loads_as_pickle_loads_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert same(restricted_loads(data), pickle.loads(data))
    assert same(restricted_loads(pickletools.optimize(data)), pickle.loads(data))


BASE = torch.arange(6.0).reshape(2, 3)
STRUCT = np.dtype([("a", "i4"), ("b", ">f8", (2,)), ("c", [("d", "M8[5us]")])], align=True)
WITH_OBJECTS = np.dtype([("a", "i4"), ("o", object, (2,))])
EXAMPLES: list[Any] = [
    BASE.t(),
    BASE[:, 1],
    BASE.expand(4, 2, 3),
    torch.tensor(3),
    torch.empty(0, 3),
    torch.tensor([1 + 2j]).conj(),
    BASE.clone().requires_grad_(),
    torch.nn.Parameter(BASE),
    torch.Size([1, 2]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.tensor([0, 1.0, 2.0]).to_sparse(),
    torch.nn.Linear(2, 1).state_dict(),
    [BASE, BASE],
    np.array([None, [1], "a"], object),
    np.array([[1], [2, 3], None, {}], object).reshape(2, 2).T,
    np.array(["2020", "NaT"], "M8[D]"),
    np.array([b"x", b"yy"]),
    np.zeros(2, STRUCT),
    np.ones(2, WITH_OBJECTS),
    np.zeros(1, [("a", "i4")])[0],
    np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    np.bool_(True),
    np.longdouble(2),
    np.str_("abc"),
    np.timedelta64(5, "ms"),
    STRUCT,
    WITH_OBJECTS,
    np.dtype(">M8[5us]"),
    np.float32,
    np.array(["", ""]),
    np.zeros(2, "S0"),
    np.empty((2, 3), "V0"),
    np.zeros(1000, []),
    np.zeros(3, [("a", "i4", (0,))]),
    collections.defaultdict(list, {1: [2]}),
    collections.Counter("aab"),
    collections.deque([1], 3),
    range(1, 9, 2),
    slice(1, None),
    Ellipsis,
    2**200,
    int,
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_examples_load_as_pickle_loads_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert same(restricted_loads(data), pickle.loads(data))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_new_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 2]).to(dtype)  # pickle.loads itself fails on these
    made = restricted_loads(pickle.dumps(tensor))
    assert made.dtype == dtype
    assert torch.equal(made.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:Sparse CSR")  # torch says so once, on the first one made
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_compressed_sparse_tensors(layout: str) -> None:
    tensor = getattr(BASE, f"to_sparse_{layout}")()
    made = restricted_loads(pickle.dumps(tensor))
    assert same(made, tensor)


def test_identity_and_cycles_survive() -> None:
    shared: list[Any] = [np.zeros(2)]
    shared.append(shared)
    made = restricted_loads(pickle.dumps([shared, shared[0], shared]))
    assert made[0] is made[2]
    assert made[0][1] is made[0]
    assert made[0][0] is made[1]


def test_what_loads_can_be_written_to() -> None:
    array, tensor = restricted_loads(pickle.dumps((np.zeros(2), torch.zeros(2))))
    array[0] = tensor[0] = 1
    assert array.tolist() == tensor.tolist() == [1, 0]


@dataclass
class Point:
    x: int
    y: object = None


class Slotted:
    __slots__ = ("x",)
    x: int


class Named(dict[str, int]):
    pass


class Keyed(tuple[int, ...]):
    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (tuple(self),), {}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("as_text", [False, True])
def test_allowed_classes_load(protocol: int, as_text: bool) -> None:
    for value in (
        Point(1, [2]),
        Named(a=1),
        Fraction(1, 3),
        Path("a/b"),
        collections.OrderedDict(a=Point(1)),
    ):
        wanted: list[type] = [Point, Named, Fraction, type(Path())]
        names = [f"{cls.__module__}.{cls.__qualname__}" for cls in wanted]
        data = pickle.dumps(value, protocol)
        assert restricted_loads(data, allowed_classes=names if as_text else wanted) == value
        with pytest.raises(UnsafePickleError, match="allowed_classes="):
            restricted_loads(data)


def test_allowed_classes_with_slots_and_keyword_arguments() -> None:
    slotted = Slotted()
    slotted.x = 5
    assert restricted_loads(pickle.dumps(slotted), [Slotted]).x == 5
    assert restricted_loads(pickle.dumps(Keyed((1, 2)), 4), [Keyed]) == (1, 2)


def test_the_error_names_the_class_and_the_cure() -> None:
    with pytest.raises(UnsafePickleError) as caught:
        restricted_loads(pickle.dumps(Fraction(1, 2)))
    assert "fractions.Fraction" in str(caught.value)
    assert "allowed_classes=['fractions.Fraction']" in str(caught.value)


@pytest.mark.parametrize("wrong", ["fractions.Fraction", [5], ["Fraction"], ["a b.c"]])
def test_wrong_allowed_classes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="allowed_classes"):
        restricted_loads(pickle.dumps(1), wrong)


def test_data_must_be_bytes() -> None:
    with pytest.raises(TypeError, match="bytes"):
        restricted_loads("text")  # type: ignore[arg-type]  # the point of the test


# Attacks. The names below build pickles by hand, one instruction each.


def glob(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def bare(value: Any) -> bytes:
    """A value's instructions without the frame, so that they nest."""
    data = pickletools.optimize(pickle.dumps(value, 3))
    return data[2:-1]


def args(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def call(func: bytes, *values: bytes) -> bytes:
    return func + args(*values) + b"R"


def proto4(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


DTYPE = glob("numpy", "dtype")
ARRAY = call(glob("numpy.core.multiarray", "_reconstruct"), glob("numpy", "ndarray"), bare((0,)), bare(b"b"))
TENSOR = glob("torch._utils", "_rebuild_tensor_v2")
LOAD_STORAGE = glob("torch.storage", "_load_from_bytes")
HOOKS = call(glob("collections", "OrderedDict"))


def dtype(name: str, state: Any) -> bytes:
    return call(DTYPE, text(name), b"\x89", b"\x88") + bare(state) + b"b"


def array(shape: Any, kind: bytes, data: Any) -> bytes:
    return ARRAY + args(bare(1), bare(shape), kind, b"\x89", bare(data)) + b"b"


def storage(numel: int = 4, data: bytes = b"\x00" * 16, location: str = "cpu") -> bytes:
    """torch's bytes of a float storage that claims ``numel`` elements."""
    file = io.BytesIO()
    for item in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(item, file, 2)
    pid = args(bare("storage"), glob("torch", "FloatStorage"), bare("0"), bare(location), bare(numel), b"N")
    file.write(b"\x80\x02" + pid + b"Q.")
    pickle.dump(["0"], file, 2)
    return file.getvalue() + struct.pack("<q", numel) + data


def tensor(size: Any, stride: Any, offset: int = 0, data: bytes | None = None, hooks: bytes = HOOKS) -> bytes:
    held = call(glob("torch.storage", "_load_from_bytes"), bare(storage() if data is None else data))
    return call(TENSOR, held, bare(offset), bare(size), bare(stride), b"\x89", hooks)


SUBARRAY = (
    call(DTYPE, text("V8"), b"\x89", b"\x88")
    + args(
        bare(3),
        text("|"),
        args(dtype("i4", (3, "<", None, None, None, -1, -1, 0)), bare((2,))),
        b"NN",
        bare(8),
        bare(4),
        bare(0),
    )
    + b"b"
)


def structured(names: bytes, fields: bytes) -> bytes:
    """A dtype whose state has these names, after None for no subarray, and these fields."""
    head = call(DTYPE, text("V8"), b"\x89", b"\x88") + b"(" + bare(3) + text("|")
    return head + names + fields + bare(8) + bare(1) + bare(0) + b"tb"


def heads(depth: int) -> bytes:
    """A storage with 30 copies of a storage in its head, and so on: 30 to the depth in all."""
    load, inner = glob("torch.storage", "_load_from_bytes"), bare(storage())
    for _ in range(depth):
        copies = inner + b"q\x050" + (load + b"h\x05\x85R0") * 30
        inner = bare(b"\x80\x04" + copies + b"N." + storage())
    return load + inner + b"\x85R"


def nest(step: bytes, depth: int) -> bytes:
    """Instructions that wrap what is on the stack ``depth`` times."""
    return step * depth


INT8 = (3, "|", None, None, None, -1, -1, 0)
VOID0 = dtype("V0", (3, "|", None, None, None, 0, 1, 0))
FORGED = (3, "|", None, None, None, -1, -1, 0)
DEEP = b")" + b"\x85" * 300_000  # hashing 200,000 levels overflows a C stack of 8 MiB
WIDE = b")" + b"2\x86" * 60
DEFAULT = glob("collections", "defaultdict") + b")R"
OBJECTS = dtype("O8", (3, "|", None, None, None, -1, -1, 63))
NESTED = b"(K\x01K\x01\x85h\x06\x89](h\x05etb"  # state: one object, memo 5, of the dtype in memo 6
SYSTEM = glob("os", "system")

ATTACKS: dict[str, bytes] = {
    "reduce": proto4(call(SYSTEM, text("exit 1"))),
    "posix": proto4(call(glob("posix", "system"), text("exit 1"))),
    "eval": proto4(call(glob("builtins", "eval"), text("1/0"))),
    "python2 eval": b"c__builtin__\neval\n(S'1/0'\ntR.",
    "inst": b"(S'exit 1'\nios\nsystem\n.",
    "obj": b"(" + SYSTEM + text("exit 1") + b"o.",
    "newobj": proto4(SYSTEM, args(text("exit 1")), b"\x81"),
    "newobj_ex": proto4(SYSTEM, args(text("exit 1")), b"}", b"\x92"),
    "stack global": proto4(text("os"), text("system"), b"\x93", args(text("exit 1")), b"R"),
    "getattr": proto4(call(glob("builtins", "getattr"), bare("x"), text("__class__"))),
    "dotted": proto4(text("collections"), text("OrderedDict.__init__.__globals__"), b"\x93"),
    "dotted torch": proto4(text("torch"), text("float32.__class__"), b"\x93"),
    "dotted numpy": proto4(text("numpy"), text("ndarray.__new__"), b"\x93"),
    "torch.load": proto4(call(glob("torch", "load"), text("/nowhere"))),
    "torch hub": proto4(call(glob("torch.hub", "load"), text("a"), text("b"))),
    "operator": proto4(call(glob("operator", "attrgetter"), text("__class__"))),
    "functools": proto4(call(glob("functools", "partial"), SYSTEM)),
    "importlib": proto4(call(glob("importlib", "import_module"), text("os"))),
    "type": proto4(call(glob("builtins", "type"), text("x"))),
    "codecs": proto4(call(glob("_codecs", "encode"), text("x"), text("rot13"))),
    "codecs of bytes": proto4(call(glob("_codecs", "encode"), bare(b"x"), text("latin1"))),
    "reconstructor": proto4(
        call(glob("copyreg", "_reconstructor"), glob("builtins", "list"), glob("builtins", "list"), b"]")
    ),
    "call a value": proto4(call(glob("builtins", "list"), bare([1]))),
    "call an int": proto4(call(bare(1))),
    "call without a tuple": proto4(glob("builtins", "set"), bare({"a": 1}), b"R"),
    "newobj ndarray": proto4(glob("numpy", "ndarray"), bare(((2,),)), b"\x81"),
    "reduce ndarray": proto4(call(glob("numpy", "ndarray"), bare((2,)), text("O"))),
    "obj ndarray": b"(" + glob("numpy", "ndarray") + bare((2,)) + b"o.",
    "ndarray as result": proto4(glob("numpy", "ndarray")),
    "numpy scalar class": proto4(call(glob("numpy", "float32"), bare(1))),
    "persid": b"Psome\n.",
    "binpersid": proto4(text("some"), b"Q"),
    "ext1": proto4(b"\x82\x01"),
    "ext4": proto4(b"\x84\xff\xff\xff\x7f"),
    "next buffer": proto4(b"\x97"),
    "readonly buffer": proto4(bare(b"x"), b"\x98"),
    "build a function": proto4(glob("_codecs", "encode"), bare({"make": 1}), b"b"),
    "build a class": proto4(glob("collections", "OrderedDict"), args(b"N", bare({"x": 1})), b"b"),
    "build a list": proto4(bare([1]), bare({"x": 1}), b"b"),
    "build an OrderedDict": proto4(HOOKS, bare({"items": 1}), b"b"),
    "build a tensor": proto4(tensor((4,), (1,)), bare((1, 2, 3, 4)), b"b"),
    "build an array again": proto4(array((1,), dtype("i1", INT8), b"a"), bare((1, (9,), 0, 0, b"")), b"b"),
    "build a dtype again": proto4(dtype("i1", INT8), bare(FORGED), b"b"),
    "append to a bytearray": proto4(call(glob("builtins", "bytearray"), bare(b"x")), bare(1), b"a"),
    "append to a class": proto4(glob("builtins", "list"), b"(", bare(1), b"e"),
    "set item of an array": proto4(array((1,), dtype("i1", INT8), b"a"), bare(0), bare(1), b"s"),
    "add to a dict": proto4(b"}", b"(", bare(1), b"\x90"),
    "default factory": proto4(call(glob("collections", "defaultdict"), glob("_codecs", "encode"))),
    "bytearray bomb": proto4(call(glob("builtins", "bytearray"), bare(10**12))),
    "bytearray8 bomb": proto4(b"\x96", struct.pack("<Q", 10**12)),
    "bytes bomb": proto4(b"\x8e", struct.pack("<Q", 10**12)),
    "bytes of a number": proto4(call(glob("builtins", "bytes"), bare(10**12))),
    "range into set": proto4(call(glob("builtins", "set"), call(glob("builtins", "range"), bare(10**12)))),
    "range into deque": proto4(call(glob("collections", "deque"), call(glob("builtins", "range"), bare(10**12)))),
    "deep defaultdicts": proto4(b"N", nest(b"q\x050" + DEFAULT + b"Nh\x05s", 100_000)),
    "deep object arrays": proto4(OBJECTS, b"q\x060N", nest(b"q\x050" + ARRAY + NESTED, 100_000)),
    "deep key": proto4(b"}", DEEP, b"N", b"s"),
    "deep set element": proto4(b"\x8f", b"(", DEEP, b"\x90"),
    "deep frozenset element": proto4(b"(", DEEP, b"\x91"),
    "deep dict": b"(" + DEEP + b"Nd.",
    "wide key": proto4(b"}", WIDE, b"N", b"s"),
    "wide state": proto4(call(DTYPE, text("i1"), b"\x89", b"\x88"), WIDE, b"b"),
    "wide persistent id": proto4(WIDE, b"Q"),
    "slice of a deep tuple": proto4(call(glob("builtins", "slice"), DEEP)),
    "object dtype that hides": proto4(array((1,), dtype("O8", FORGED), b"\x41" * 8)),
    "object dtype from bytes": proto4(array((1,), dtype("O8", (3, "|", None, None, None, -1, -1, 63)), b"A" * 8)),
    "object dtype frombuffer": proto4(
        call(
            glob("numpy.core.numeric", "_frombuffer"),
            bare(b"A" * 8),
            dtype("O8", FORGED),
            bare((1,)),
            text("C"),
        )
    ),
    "object scalar": proto4(call(glob("numpy.core.multiarray", "scalar"), dtype("O8", FORGED), bare(b"A" * 8))),
    "short scalar": proto4(call(glob("numpy.core.multiarray", "scalar"), dtype("f8", INT8), bare(b"A"))),
    "scalar without data": proto4(call(glob("numpy.core.multiarray", "scalar"), dtype("f8", INT8))),
    "dtype without a state": proto4(call(DTYPE, text("i1"), b"\x89", b"\x88")),
    "array of an unfinished dtype": proto4(array((1,), call(DTYPE, text("i1"), b"\x89", b"\x88"), b"a")),
    "array without a state": proto4(ARRAY),
    "array without a state in a list": proto4(b"]", ARRAY, b"a"),
    "dtype by comma string": proto4(call(DTYPE, text("i4,O"), b"\x89", b"\x88")),
    "dtype by list": proto4(call(DTYPE, bare([("a", "O")]), b"\x89", b"\x88")),
    "subarray dtype": proto4(array((1,), SUBARRAY, b"a" * 8)),
    "wrong item size": proto4(dtype("U2", (3, "<", None, None, None, 800, 4, 8))),
    "negative shape": proto4(array((-1,), dtype("i1", INT8), b"a")),
    "negative shape twice": proto4(array((-1, -1), dtype("i1", INT8), b"a")),
    "huge shape": proto4(array((2**62, 4), dtype("i1", INT8), b"")),
    "shape that overflows": proto4(array((2**32, 2**32), dtype("i1", INT8), b"")),
    "shape too long": proto4(array((2,), dtype("i1", INT8), b"a")),
    "too many dimensions": proto4(array((1,) * 100, dtype("i1", INT8), b"a")),
    "shape of floats": proto4(array((1.0,), dtype("i1", INT8), b"a")),
    "tensor too long": proto4(tensor((5,), (1,))),
    "tensor stride": proto4(tensor((2,), (4,))),
    "tensor offset": proto4(tensor((1,), (1,), 4)),
    "tensor negative offset": proto4(tensor((1,), (1,), -1)),
    "tensor negative stride": proto4(tensor((2,), (-1,))),
    "tensor negative size": proto4(tensor((-2,), (1,))),
    "tensor that overflows": proto4(tensor((2**62, 2**62), (2**62, 2**62))),
    "storage that is short": proto4(tensor((4,), (1,), data=storage(4, b"\0" * 8))),
    "storage that is long": proto4(tensor((4,), (1,), data=storage(4, b"\0" * 32))),
    "storage of huge size": proto4(tensor((4,), (1,), data=storage(10**12))),
    "storage that is a pickle": proto4(tensor((4,), (1,), data=pickle.dumps(os.getcwd))),
    "storage with code": proto4(
        call(glob("torch.storage", "_load_from_bytes"), bare(b"\x80\x02" + call(SYSTEM, text("exit 1")) + b"."))
    ),
    "tensor hooks": proto4(tensor((4,), (1,), hooks=bare({1: "hook"}))),
    "sparse indices outside": proto4(
        call(
            glob("torch._utils", "_rebuild_sparse_tensor"),
            text("sparse_coo"),
            args(bare(torch.tensor([[10**9]])), bare(torch.tensor([1.0])), bare((2,))),
        )
    ),
    "deep dtype names": proto4(structured(b"N" + DEEP + b"\x85", b"}")),
    "wide dtype names": proto4(structured(b"N" + WIDE + b"\x85", b"}")),
    "wide dtype field": proto4(structured(b"N" + text("a") + b"\x85", b"}" + text("a") + WIDE + b"s")),
    "wide tensor layout": proto4(call(glob("torch.serialization", "_get_layout"), WIDE)),
    "deep tensor layout": proto4(call(glob("torch.serialization", "_get_layout"), DEEP)),
    "storages in heads of storages": proto4(heads(12)),
    "items without bytes": proto4(array((10**17,), VOID0, b"")),
    "items without bytes frombuffer": proto4(
        call(glob("numpy._core.numeric", "_frombuffer"), bare(b""), VOID0, bare((10**9, 10**8)), text("C"))
    ),
    "empty": b"",
    "only stop": b".",
    "memo that is not there": proto4(b"h\x05"),
    "pop too far": proto4(b"000"),
    "protocol 99": b"\x80\x63N.",
    "long text number": b"I" + b"9" * 100_000 + b"\n.",
}


# Of the attacks, those that overflow a stack are long.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "deep" in name else ()) for name in ATTACKS]
)
def test_attacks_raise_our_error(name: str) -> None:
    with pytest.raises(DecodeError):
        restricted_loads(ATTACKS[name])


def test_the_hand_made_pieces_work_when_honest() -> None:
    """Otherwise the attacks above would fail for the wrong reason."""
    assert restricted_loads(proto4(array((1,), dtype("i1", INT8), b"a"))).tolist() == [97]
    assert restricted_loads(proto4(tensor((2, 2), (2, 1)))).shape == (2, 2)
    assert restricted_loads(proto4(call(glob("numpy.core.multiarray", "scalar"), dtype("i1", INT8), bare(b"a")))) == 97
    assert restricted_loads(proto4(SUBARRAY)) == np.dtype(("<i4", (2,)))
    assert restricted_loads(proto4(b"}", b")" + b"\x85" * 50, b"N", b"s")) != {}
    assert type(restricted_loads(proto4(HOOKS))) is collections.OrderedDict
    assert torch.equal(restricted_loads(pickle.dumps(torch.eye(2).to_sparse())).to_dense(), torch.eye(2))


def test_tensors_come_to_the_cpu_wherever_they_were() -> None:
    made = restricted_loads(proto4(tensor((4,), (1,), data=storage(location="cuda:7"))))
    assert made.device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_cuda_tensor_comes_to_the_cpu() -> None:
    made = restricted_loads(pickle.dumps(BASE.cuda()))
    assert made.device == torch.device("cpu")
    assert torch.equal(made, BASE)


@pytest.mark.parametrize(
    "step",
    [
        b"q\x050]h\x05a",
        b"\x85",
        *(
            pytest.param(step, marks=pytest.mark.nightly)
            for step in (
                b"q\x050}Nh\x05s",
                b"q\x050" + HOOKS + b"Nh\x05s",
                b"q\x050" + call(glob("collections", "Counter")) + b"Nh\x05s",
                b"q\x050" + call(glob("collections", "deque")) + b"h\x05a",
            )
        ),
    ],
)
@pytest.mark.slow
def test_deep_containers_load_and_are_freed(step: bytes) -> None:
    assert restricted_loads(proto4(b"N", nest(step, 100_000))) is not None


def test_fragile_containers_at_the_limit_are_freed() -> None:
    assert restricted_loads(proto4(b"N", nest(b"q\x050" + DEFAULT + b"Nh\x05s", 10_000))) != {}
    assert restricted_loads(proto4(OBJECTS, b"q\x060N", nest(b"q\x050" + ARRAY + NESTED, 1_000))).shape == (1,)


def test_a_memo_bomb_costs_nothing() -> None:
    assert restricted_loads(proto4(b"N", b"r\xff\xff\xff\x7f")) is None
    assert restricted_loads(proto4(b"\x95", struct.pack("<Q", 10**15), b"N")) is None


def test_a_number_of_the_extension_registry_goes_through_the_gate() -> None:
    copyreg.add_extension("os", "system", 0x7ABC)
    try:
        cached: dict[int, Any] = copyreg._extension_cache  # type: ignore[attr-defined]  # what pickle.loads leaves
        cached[0x7ABC] = os.system
        with pytest.raises(UnsafePickleError, match=r"os\.system"):
            restricted_loads(proto4(b"\x83" + struct.pack("<H", 0x7ABC), args(text("exit 1")), b"R"))
    finally:
        copyreg.remove_extension("os", "system", 0x7ABC)


POINT = glob(Point.__module__, "Point")


@pytest.mark.parametrize(
    "data",
    [
        proto4(POINT, args(b"N", bare({"__init__": 1})), b"b"),
        proto4(POINT, bare({"x": 1}), b"b"),
        proto4(POINT, b")\x81", args(b"N", bare({"__class__": 1})), b"b"),
        proto4(POINT, b")\x81", bare({"__dict__": {}}), b"b"),
        proto4(POINT, b")\x81", bare({1: 2}), b"b"),
        proto4(POINT, b")\x81", bare(7), b"b"),
        proto4(POINT, b")\x81", bare([1]), b"a"),
        proto4(glob(Point.__module__, "Point.__init__"), b")R"),
        proto4(call(POINT)),
    ],
)
def test_an_allowed_class_opens_nothing_else(data: bytes) -> None:
    before = dict(vars(Point))
    with pytest.raises(DecodeError):
        restricted_loads(data, [Point])
    assert dict(vars(Point)) == before


@pytest.mark.parametrize("name", [("numpy", "ndarray"), ("torch.storage", "_load_from_bytes"), ("_codecs", "encode")])
def test_functions_do_not_reach_allowed_classes(name: tuple[str, str]) -> None:
    for data in (proto4(call(POINT, glob(*name))), b"(" + POINT + glob(*name) + b"o."):
        with pytest.raises(UnsafePickleError, match="itself as a value"):
            restricted_loads(data, [Point])


@given(st.data(), st.sampled_from(PROTOCOLS))
def test_flipped_bytes_load_or_raise_our_error(draw: st.DataObject, protocol: int) -> None:
    value = [BASE, np.arange(3), {"a": (1, 2.5)}, np.zeros(1, STRUCT), {1, 2}, np.float32(1)]
    data = bytearray(pickle.dumps(value, protocol))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        restricted_loads(bytes(data))


SHARED = b"](" + bare(bytes(1 << 20)) + b"q\x05"
PAIRS = b"](" + b"](" + b"N" * (1 << 20) + b"eq\x05"
COPIES: dict[str, bytes] = {
    "bytearray": SHARED + call(glob("builtins", "bytearray"), b"h\x05") * 12,
    "bytearray by name": SHARED + (glob("builtins", "bytearray") + b")}" + text("data") + b"h\x05s\x92") * 12,
    "array": SHARED + (ARRAY + args(bare(1), bare((1 << 20,)), dtype("i1", INT8), b"\x89", b"h\x05") + b"b") * 12,
    "scalar": SHARED
    + call(
        glob("numpy.core.multiarray", "scalar"), dtype("S1048576", (3, "|", None, None, None, 1 << 20, 1, 0)), b"h\x05"
    )
    * 12,
    "deque": PAIRS + call(glob("collections", "deque"), b"h\x05") * 12,
    "set": PAIRS + call(glob("builtins", "set"), b"h\x05") * 12,
    "storage": b"](" + bare(storage(1 << 18, bytes(1 << 20))) + b"q\x05" + call(LOAD_STORAGE, b"h\x05") * 12,
    "sparse": b"]("
    + call(
        glob("torch._utils", "_rebuild_sparse_tensor"),
        text("sparse_coo"),
        args(tensor((1, 10**12), (0, 0)), tensor((10**12,), (0,)), bare((2,)), b"\x88"),
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_one_object_is_not_copied_again_and_again(name: str) -> None:
    data = proto4(COPIES[name], b"e")
    with pytest.raises(DecodeError, match=r"takes? \d+ bytes or more .*more than max_bytes"):
        restricted_loads(data, max_bytes=9 * len(data) + (1 << 20))


LARGE: list[Any] = [
    collections.deque([None] * 300_000),
    set(range(100_000)),
    frozenset(range(100_000)),
    collections.OrderedDict.fromkeys(range(50_000)),
    collections.Counter(range(50_000)),
    np.array([None] * 300_000, object),
    bytearray(1 << 21),
    b"\xff" * (1 << 21),
    np.zeros(1 << 18),
    torch.zeros(1 << 19),
    torch.ones(1 << 17).to_sparse(),
    [np.float64(i) for i in range(5_000)],
    [np.int8(i % 9) for i in range(5_000)],
    [np.zeros(1, np.int8) for _ in range(5_000)],
]


LARGE_PICKLED = [
    pytest.param(
        *(value, protocol),
        id=f"{type(value).__name__}-{protocol}",
        marks=() if protocol == (0, 5)[number % 2] else pytest.mark.nightly,
    )
    for number, value in enumerate(LARGE)
    for protocol in (0, 5)
]


@pytest.mark.slow
@pytest.mark.parametrize(("value", "protocol"), LARGE_PICKLED)
def test_large_honest_data_loads(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert same(restricted_loads(data), pickle.loads(data))


NOT_DATA: list[Any] = [
    np.ndarray,
    np.dtype,
    torch.Size,
    torch.device,
    torch.FloatStorage,
    np.zeros(1).__reduce__()[0],  # _reconstruct
    torch._utils._rebuild_tensor_v2,
]
PLACES: list[Callable[[Any], Any]] = [
    lambda name: name,
    lambda name: [name],
    lambda name: [1, name],
    lambda name: (name,),
    lambda name: (1, name),
    lambda name: (1, 2, name),
    lambda name: (1, 2, 3, name),
    lambda name: ((name,),),
    lambda name: {"x": name},
    lambda name: {"x": 1, "y": name},
    lambda name: {name: 1},
    lambda name: {(name, 1): 1},
    lambda name: {name},
    lambda name: frozenset({name}),
    lambda name: collections.deque([name]),
    lambda name: collections.OrderedDict(x=name),
    lambda name: np.array([name, None]),
    lambda name: Point(1, name),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("place", range(len(PLACES)))
def test_classes_and_functions_do_not_load_as_stand_ins(place: int, protocol: int) -> None:
    for name in NOT_DATA:
        with pytest.raises(UnsafePickleError, match=r"has .*itself as a value.*store its name as text"):
            restricted_loads(pickle.dumps(PLACES[place](name), protocol), [Point])


def test_an_array_that_holds_itself_is_refused() -> None:
    array: Any = np.empty(1, object)
    for held in (array, [array], (array, 1), {"a": array}):
        array[0] = held
        with pytest.raises(UnsafePickleError, match="cannot hold itself"):
            restricted_loads(pickle.dumps(array))


def test_an_array_is_the_same_wherever_it_was_remembered() -> None:
    state = args(bare(1), bare((1,)), dtype("i1", INT8), b"\x89", bare(b"a")) + b"b"
    made = restricted_loads(proto4(b"](", ARRAY, b"q\x05q\x06q\x07", b"Nq\x060", state, b"h\x05h\x07h\x06e"))
    assert made[0] is made[1] is made[2]
    assert made[0].tolist() == [97]
    assert made[3] is None


def test_parts_of_a_pickle_are_checked() -> None:
    assert (is_ints((2, 0)), is_ints((2, -1)), is_ints([2])) == (True, False, False)
    check_keys(["a", (1, ("b", 2))])
    assert finish_dtype("i4", (3, ">", None, None, None, -1, -1, 0)) == np.dtype(">i4")
    assert finish_array((1, (2,), np.dtype("u1"), False, b"ab")).tolist() == [97, 98]
