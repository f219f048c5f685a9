"""What is imported when: who only reads or writes shards waits for neither torch nor lightning."""

import importlib
import subprocess
import sys

import pytest


def test_who_reads_and_writes_shards_waits_for_neither_torch_nor_lightning() -> None:
    script = """
import sys
from headrace.webdatamodule import IndexedShards, index_shards, write_tars
tops = {name.partition(".")[0] for name in sys.modules}
print(sorted(tops & {"torch", "lightning", "grain"}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_split_needs_neither_lightning_nor_webdataset_nor_torch() -> None:
    script = """
import sys
for name in ("lightning", "pytorch_lightning", "torch", "webdataset"):
    sys.modules[name] = None  # as if it were not installed
from headrace.webdatamodule import Split
assert Split.train.value == "train"
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_public_name_is_there() -> None:
    script = """
import headrace.webdatamodule as package
for name in package.__all__:
    getattr(package, name)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_loader_needs_neither_lightning_nor_webdataset() -> None:
    script = """
import sys
from headrace.webdatamodule import BatchSamplerFactory, DistributedBatchSampler, RankMismatchError, ResumableLoader
from headrace.webdatamodule import integrations
tops = {name.partition(".")[0] for name in sys.modules}
assert not tops & {"lightning", "pytorch_lightning", "webdataset", "grain"}
for name in ("lightning", "pytorch_lightning", "webdataset"):
    sys.modules[name] = None  # as if it were not installed
loader = ResumableLoader(list(range(10)), DistributedBatchSampler(10, 4), collate_fn=list, num_workers=1)
assert sorted(sum(loader, [])) == list(range(10))
loader.load_state_dict(loader.state_dict())
loader.close()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_adapter_of_grain_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "headrace.webdatamodule.integrations.grain", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("headrace.webdatamodule.integrations.grain")
    assert str(caught.value) == (
        'headrace.webdatamodule.integrations.grain needs the package grain: pip install "headrace-webdatamodule[grain]"'
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "url", "told"),
    [
        ("s3fs", "s3://bucket/train", 'pip install "headrace-webdatamodule[s3]"'),
        ("s3fs", "simplecache::s3://bucket/train", 'pip install "headrace-webdatamodule[s3]"'),
        ("fsspec", "s3://bucket/train", 'pip install "headrace-webdatamodule[s3]"'),
        ("aiohttp", "https://host/train", 'pip install "headrace-webdatamodule[remote]"'),
        ("fsspec", "https://host/train", 'pip install "headrace-webdatamodule[remote]"'),
        ("gcsfs", "gs://bucket/train", "gcsfs"),
    ],
)
def test_shards_at_urls_say_what_to_install(missing: str, url: str, told: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None  # as if it were not installed
from headrace.webdatamodule import IndexedShards, ShardError
try:
    IndexedShards({url!r})
except ShardError as error:
    assert {told!r} in str(error) and {missing!r} in str(error), error
else:
    raise AssertionError("it is open")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
