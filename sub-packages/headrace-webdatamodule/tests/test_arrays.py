import io
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from headrace.webdatamodule.shards import DecodeError, decode_member
from headrace.webdatamodule.shards.decoding.decode import Arrays, load_npy

SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
KINDS = st.sampled_from(["<f8", "<f4", "<i8", "<i2", "|u1", "|b1"])
ARRAYS = st.tuples(KINDS, SHAPES).flatmap(lambda one: arrays(*one))


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=4))
def test_safetensors_round_trip(tensors: Arrays) -> None:
    made = decode_member("x.safetensors", save(tensors))
    assert made.keys() == tensors.keys()
    for name, array in tensors.items():
        assert made[name].dtype == array.dtype
        assert made[name].flags.writeable
        np.testing.assert_array_equal(made[name], array)


def test_numbers_that_numpy_lacks_are_named() -> None:
    data = save_torch({"a": torch.zeros(3, dtype=torch.bfloat16)})
    with pytest.raises(DecodeError, match=r"BF16.*safetensors\.torch\.load"):
        decode_member("safetensors", data)


@given(arrays("<f4", SHAPES), st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_every_version_of_npy(array: npt.NDArray[np.float32], version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    np.testing.assert_array_equal(load_npy(file.getvalue()), array)


def test_npy_with_names_in_unicode() -> None:
    array = np.zeros(3, np.dtype([("\u5024", "<f8"), ("\u00e9\u0085", "<i2")]))
    file = io.BytesIO()
    np.lib.format.write_array(file, array, (3, 0))
    assert load_npy(file.getvalue()).dtype == array.dtype


@pytest.mark.parametrize(
    ("key", "blocked", "extra"),
    [("safetensors", "safetensors", "safetensors"), ("png", "PIL", "images"), ("jpg.gz", "PIL", "images")],
)
def test_libraries_stay_optional(key: str, blocked: str, extra: str) -> None:
    script = f"""
import gzip, sys
sys.modules[{blocked!r}] = None
from headrace.webdatamodule.shards import DecodeError, decode_member
assert decode_member("json", b"[1]") == [1]
try:
    decode_member({key!r}, gzip.compress(b"x"))
except DecodeError as error:
    assert "headrace-webdatamodule[{extra}]" in str(error), error
    assert error.member == {key!r}
else:
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_libraries_are_not_loaded_before_they_are_used() -> None:
    script = """
import sys
from headrace.webdatamodule.shards import decode_member
sys.exit(3 if {name.partition(".")[0] for name in sys.modules} & {"PIL", "safetensors", "fsspec", "torch"} else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_safetensors_does_not_load_torch() -> None:
    script = """
import sys, numpy
from safetensors.numpy import save
from headrace.webdatamodule.shards import decode_member
decode_member("safetensors", save({"a": numpy.arange(3)}))
sys.exit(3 if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
