import subprocess
import sys

import pytest


@pytest.mark.parametrize("work", ["", "shards.restricted_loads(pickle.dumps(numpy.arange(3)))"])
def test_shards_load_neither_torch_nor_lightning(work: str) -> None:
    script = """
import pickle, sys, numpy
from headrace.webdatamodule import shards
WORK
tops = {name.partition(".")[0] for name in sys.modules}
sys.exit(3 if tops & {"torch", "lightning", "pytorch_lightning"} else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script.replace("WORK", work)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
