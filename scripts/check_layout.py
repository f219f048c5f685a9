"""Check the shape of the repository: ``python scripts/check_layout.py [root]``."""

import sys
import tomllib
from pathlib import Path
from typing import Any

TOP = {
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "CITATION.cff", "LICENSE", "README.md",
    "ci", "docs", "pyproject.toml", "scripts", "sub-packages",
}  # fmt: skip
# The first one has the originals of what they share: they do not import one another.
PARTS = ("headrace-size-aware-batching", "headrace-webdatamodule", "headrace-weighted-sampler")
OWN_CACHES = {
    ".git", ".venv", ".quickstart", ".hypothesis",
    ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache",
}  # fmt: skip


def project(package: Path) -> dict[str, Any]:
    """Return the [project] table of a package."""
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


def package_faults(root: Path, name: str) -> list[str]:
    """Return what is wrong with one package, a line each."""
    package, found = root / "sub-packages" / name, []
    licence = package / "LICENSE"
    if licence.is_symlink() or licence.read_bytes() != (root / "LICENSE").read_bytes():
        found.append("LICENSE has to be a real copy of the root's (a link breaks the sdist)")
    found += [f"{file} is missing" for file in ("README.md", "CHANGELOG.md") if not (package / file).is_file()]
    if project(package)["requires-python"] != ">=3.11":
        found.append("requires-python has to be >=3.11")
    own = name.removeprefix("headrace-").replace("-", "_") if name in PARTS else "runs"
    module = package / "src" / "headrace" / own
    found += [f"{f} is missing" for f in ("py.typed", "__init__.py") if not (module / f).is_file()]
    return [f"{name}: {fault}" for fault in found]


def test_faults(root: Path) -> list[str]:
    """Return which packages' files for tests differ: each is tested alone, all of them in one way."""
    found = []
    for file, names in (("conftest.py", PARTS), ("tests/golden.py", PARTS[:2])):
        wanted = (root / "sub-packages" / "headrace" / file).read_bytes()
        others = [root / "sub-packages" / name / file for name in names]
        found += [f"{path.relative_to(root)} differs from headrace's" for path in others if path.read_bytes() != wanted]
    return found


def shared_copies(root: Path) -> list[tuple[Path, Path]]:
    """Return each file of a package that is a copy of one of another package, behind its original."""
    first, *others = (
        root / "sub-packages" / name / "src/headrace" / name.removeprefix("headrace-").replace("-", "_")
        for name in PARTS
    )
    return [
        (first / copy.relative_to(package), copy)
        for package in others
        for copy in [*sorted(package.glob("_shared/*.py")), package / "testing.py"]
    ]


def copy_faults(root: Path) -> list[str]:
    """Return which copies differ from their originals."""
    return [
        f"{copy.relative_to(root)} differs from {original.relative_to(root)}: run scripts/sync_shared"
        for original, copy in shared_copies(root)
        if not original.is_file() or original.read_bytes() != copy.read_bytes()
    ]


def version_faults(root: Path) -> list[str]:
    """Return where versions and the meta-package's pins disagree."""
    meta = project(root / "sub-packages" / "headrace")
    pins = dict(pin.split("==", 1) for pin in meta["dependencies"])
    real = {name: project(root / "sub-packages" / name)["version"] for name in PARTS}
    return [] if pins == real else [f"headrace pins {pins}, but the packages are {real}"]


def faults(root: Path) -> list[str]:
    """Return everything that is wrong with the tree, a line each."""
    found = [f"{p.relative_to(root)}: a namespace has no __init__.py" for p in root.glob("**/headrace/__init__.py")]
    here = {path.name for path in root.iterdir()} - OWN_CACHES
    found += [f"{name} is missing at the top" for name in sorted(TOP - here)]
    have = {path.name for path in (root / "sub-packages").iterdir()}
    if have != {*PARTS, "headrace"}:
        found.append(f"sub-packages holds {sorted(have)}")
    for name in sorted(have):
        found += package_faults(root, name)
    return found + test_faults(root) + copy_faults(root) + version_faults(root)


def main(root: Path) -> int:
    """Print the faults of the tree at ``root`` and return the exit status."""
    found = faults(root)
    print("\n".join(found) or "the layout is as it should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()))
