"""Give all four distributions one version, pins included: ``python scripts/bump_version.py 0.2.0``."""

import re
import sys
from pathlib import Path


def bumped(text: str, version: str) -> str:
    """Return a pyproject's text with its version and its headrace pins replaced."""
    text = re.sub(r'(?m)^version = "[^"]+"$', f'version = "{version}"', text)
    return re.sub(r'"(headrace-[\w-]+)==[^"]+"', rf'"\1=={version}"', text)


def main(version: str) -> int:
    """Rewrite every package's pyproject and return the exit status."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        print(f"version: got {version!r}, expected something like 1.2.3 or 1.2.3rc1", file=sys.stderr)
        return 2
    for path in sorted((Path(__file__).parent.parent / "sub-packages").glob("*/pyproject.toml")):
        path.write_text(bumped(path.read_text(), version))
        print(f"{path.parent.name} {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
