"""What is imported when: who only reads or writes shards waits for neither torch nor lightning."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("work", "forbidden"),
    [
        ("import headrace.webdatamodule", {"torch", "lightning", "pytorch_lightning", "webdataset"}),
        ("from headrace.webdatamodule import IndexedShards, index_shards, write_tars", {"torch", "lightning"}),
        ("import headrace.webdatamodule.loader", {"lightning", "webdataset"}),
        ("from headrace.webdatamodule import ResumableLoader, LoaderReport, BatchSamplerFactory", {"lightning"}),
        ("from headrace.webdatamodule import RankMismatchError, SizesInMemoryWarning", {"lightning"}),
    ],
)
def test_what_is_not_needed_is_not_imported(work: str, forbidden: set[str]) -> None:
    script = f"""
import sys
{work}
tops = {{name.partition(".")[0] for name in sys.modules}}
print(sorted(tops & {forbidden!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    script = """
import headrace.webdatamodule as package
for name in package.__all__:
    getattr(package, name)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
