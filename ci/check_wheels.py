"""Check what the built wheels hold: ``python ci/check_wheels.py dist``."""

import sys
import zipfile
from pathlib import Path

MODULES = {
    "headrace_size_aware_batching": "size_aware_batching",
    "headrace_weighted_sampler": "weighted_sampler",
    "headrace_webdatamodule": "webdatamodule",
    "headrace": "runs",
}


def faults(wheel: Path) -> list[str]:
    """Return what is wrong with one wheel, a line each."""
    module = MODULES[wheel.name.split("-")[0]]
    names = zipfile.ZipFile(wheel).namelist()
    found = []
    if "headrace/__init__.py" in names:
        found.append("headrace/__init__.py would hide the sibling packages")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        found.append("no LICENSE")
    code = [name for name in names if ".dist-info/" not in name]
    found += [
        f"{name} is missing"
        for name in (f"headrace/{module}/__init__.py", f"headrace/{module}/py.typed")
        if name not in names
    ]
    return found + [f"{name} does not belong here" for name in code if not name.startswith(f"headrace/{module}/")]


def main(folder: str) -> int:
    """Check every wheel in ``folder`` and return the exit status."""
    wheels = sorted(Path(folder).glob("*.whl"))
    found = [f"{wheel.name}: {fault}" for wheel in wheels for fault in faults(wheel)]
    if len(wheels) != len(MODULES):
        found.append(f"expected {len(MODULES)} wheels, got {[wheel.name for wheel in wheels]}")
    print("\n".join(found) or f"{len(wheels)} wheels hold what they should")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
