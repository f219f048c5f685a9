"""Print constraints that pin the oldest of each main dependency: ``python ci/oldest_pins.py``."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = ("lightning", "numpy", "torch", "webdataset")


def bounds() -> dict[str, str]:
    """Return the lower bound of each dependency; packages that disagree need the higher one."""
    found: dict[str, str] = {}
    for path in sorted(ROOT.glob("sub-packages/*/pyproject.toml")):
        for line in tomllib.loads(path.read_text())["project"]["dependencies"]:
            name, bound = re.match(r"([\w-]+)(?:>=([\d.]+))?", line).groups()  # type: ignore[union-attr]  # a name
            if name in OLDEST:
                found[name] = max(found.get(name, "0"), bound, key=lambda version: [*map(int, version.split("."))])
    return found


def main() -> None:
    """Print the tools' pins and those of the dependencies."""
    pins = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    kept = [pin for pin in pins if pin.partition("==")[0] not in OLDEST]
    print("\n".join([*kept, *(f"{name}=={bound}" for name, bound in bounds().items())]))


if __name__ == "__main__":
    main()
