"""What every library is measured on: functions of Python's standard library, and sizes drawn from a distribution."""

import ast
import sysconfig
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LONGEST = 2048  # bytes of a text, and tokens of a sample: what is longer is cut
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
Sizes = NDArray[np.int64]


def standard_library(most: int) -> list[bytes]:
    """Return the source of the functions and classes of the interpreter's library, without its tests.

    Args:
        most: Number of texts; fewer come from an interpreter that has fewer.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(root).parts) and len(texts) < most:
            texts.extend(definitions(path.read_bytes()))
    return texts[:most]


def definitions(text: bytes) -> list[bytes]:
    """Return the source of each function and class of a file, cut at the longest."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines(keepends=True)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return [b"".join(lines[node.lineno - 1 : node.end_lineno])[:LONGEST] for node in found]


def lognormal_sizes(count: int, seed: int = 0) -> Sizes:
    """Sizes as protein sets have them: median 360, sigma 0.8, from 8 to the longest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(360), 0.8, count)
    return np.clip(drawn, 8, LONGEST).astype(np.int64)


def noise(sizes: Sizes, times: int = 1) -> list[bytes]:
    """Return bytes that do not compress: ``times`` bytes for each unit of size."""
    source = np.random.default_rng(1).bytes(1 << 20)
    room = len(source) - LONGEST * times
    return [source[i * 131 % room :][: int(size) * times] for i, size in enumerate(sizes)]


def sizes_of(texts: list[bytes]) -> Sizes:
    """Return the length of each text."""
    return np.array([len(text) for text in texts], np.int64)
