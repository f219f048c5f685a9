"""Small sets of indexed shards that tests damage."""

from pathlib import Path

from headrace.webdatamodule import index_shards, write_tars

UNLIKE = [("b", {"txt": b"1"}), ("a", {"txt": b"2", "cls": b"3"}), ("ccc", {"txt": b"45"})]
ALIKE = [(f"s{n:03d}", {"txt": b"%d" % n, "cls": b""}) for n in range(70)]
Pairs = list[tuple[str, dict[str, bytes]]]


def made(folder: Path, samples: Pairs) -> Path:
    [path] = write_tars(samples, folder, n_shards=1)
    index_shards(folder)
    return path
