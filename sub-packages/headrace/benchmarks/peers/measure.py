"""Times by turns, memory, and what a run was made with."""

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

PEERS = (
    "areal", "axolotl", "bionemo-size-aware-batching", "fairchem-core", "grain", "lhotse", "litdata", "lmdb",
    "megatron-core", "megatron-energon", "miles-rl", "mosaicml-streaming", "openrlhf", "pylance", "skyrl",
    "torch_geometric", "torchdata", "torchtitan", "transformers", "trl", "verl", "webdataset",
)  # fmt: skip
OURS = ("headrace-size-aware-batching", "headrace-weighted-sampler", "headrace-webdatamodule")
Work = Callable[[], Any]


WHEELS = Path(sys.prefix) / "wheels"  # which ./scripts/peers fetches and does not install


def wheel_of(package: str) -> Path | None:
    """Return the wheel of a distribution that is not installed, or None."""
    return next(iter(WHEELS.glob(f"{package.replace('-', '_')}-*.whl")), None)


def versions(package: str) -> list[str]:
    """Return the installed version of a distribution and the one of its wheel, where there are such."""
    found = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.append(metadata.version(package).partition("+")[0])
    if wheel := wheel_of(package):
        found.append(wheel.name.split("-")[1])
    return found


def installed(package: str) -> bool:
    """Whether a distribution is installed, or its wheel is there."""
    return bool(versions(package))


def without_vision() -> None:
    """Let libraries import a torchvision for CUDA beside a torch without it: nothing here uses its operators."""
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))


def quiet() -> None:
    """Keep libraries from asking the network whether there is a newer version, and from taking more than one thread."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "LITDATA_DISABLE_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}


def environment(quick: bool) -> dict[str, Any]:
    """Return versions and circumstances, as every file of figures has them."""
    found = {name: ", ".join(versions(name)) for name in (*OURS, "torch", "numpy", *PEERS)}
    return {
        "command": "./scripts/peers --quick" if quick else "./scripts/peers",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "versions": {name: version for name, version in found.items() if version},
    }


def timed(work: Work) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def alternating(works: Mapping[str, Work], runs: int) -> dict[str, float]:
    """Return the median seconds of each, all of them run in turn; a first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 1):
        for name, work in works.items():
            passed = timed(work)
            if run:
                times[name].append(passed)
    return {name: median(found) for name, found in times.items()}


def per_core(work: Work, nbytes: int, runs: int) -> float:
    """Megabytes that a second of a processor reads: the median of some runs, all threads of this process counted."""
    found = []
    for _ in range(runs):
        begin = time.process_time()
        work()
        found.append(nbytes / 1e6 / (time.process_time() - begin))
    return median(found)


def first_only(items: Iterable[Any]) -> Any:
    """Return the first item."""
    iterator = iter(items)
    return next(iterator)


def proportional_memory() -> int:
    """Bytes of this process, shared pages divided among those that share them (Linux); else the resident size."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])


def anonymous_memory() -> int:
    """Bytes that are no page of a file: what the machine could not drop under pressure (Linux), else 0."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write figures as JSON that a diff can show, with four digits."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"peers_{name}.json").write_text(json.dumps(rounded(content), indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Return a structure with its floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
