"""Samples to write, the script that writes them in a process of its own, and what lies in a folder."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset as wds
from shard_writer import write

from headrace.webdatamodule import verify_shards
from headrace.webdatamodule.shards.index.build import build_index

SCRIPT = Path(__file__).with_name("shard_writer.py")

Samples = list[tuple[str, dict[str, bytes]]]


def some(count: int, nbytes: int = 600) -> Samples:
    return [(f"s{i:04d}", {"txt": b"%d" % i, "bin": bytes([i % 256]) * nbytes}) for i in range(count)]


def tars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parts(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in tars(folder)}


def by_webdataset(path: Path) -> Samples:
    with path.open("rb") as stream:
        files = wds.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
        samples = list(wds.tariterators.group_by_keys(files))
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


def command(folder: Path, **options: Any) -> list[str]:
    return [sys.executable, str(SCRIPT), str(folder), json.dumps(options)]


def script(folder: Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(folder, **options), capture_output=True, text=True, check=False)


def check_whole(folder: Path, **options: Any) -> None:
    """What has its final name is whole, and nothing else is there; then a rerun completes it."""
    assert not (folder / "manifest.json").exists() or verify_shards(folder) == []
    for path in tars(folder):
        build_index(path.read_bytes())
    clean = {key: value for key, value in options.items() if key in ("count", "nbytes", "n_shards", "bytes_per_pack")}
    kept = inodes(folder) if folder.exists() else {}
    kept = {name: inode for name, inode in kept.items() if (folder / f"{name}.hri").exists()}
    assert write(str(folder), {**clean, "workers": 1}).n_samples == clean.get("count", 100)
    assert kept.items() <= inodes(folder).items()
    assert verify_shards(folder) == []
    assert parts(folder) == []


@contextlib.contextmanager
def group(folder: Path, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run the script in a process group of its own, of which nobody is left at the end."""
    words = command(folder, **options)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=0)
    try:
        yield process
        process.wait()
        for _ in range(200):
            if not living(process.pid):
                break
            time.sleep(0.05)
        assert living(process.pid) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stderr:
            process.stderr.close()


def living(group_id: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, of_group = rest.split()[:3]
            if int(of_group) == group_id and state != "Z":
                found.append(name)
    return found


def begun(folder: Path) -> None:
    for _ in range(600):
        if folder.exists() and parts(folder):
            return
        time.sleep(0.02)
    raise AssertionError("nothing was written")
