"""Check the shape of the repository: ``python scripts/check_layout.py [root]``."""

import sys
import tomllib
from pathlib import Path
from typing import Any

TOP = {
    ".ci", ".github", ".gitignore", "LICENSE", "README.md",
    "ci", "docs", "pyproject.toml", "scripts", "sub-packages",
}  # fmt: skip
MOST_MODULES = {"size_aware_batching": 33, "webdatamodule": 58, "weighted_sampler": 9}  # __init__ not counted
LINES = range(60, 501)  # of a module
ANY_LENGTH = {"__init__.py", "errors.py", "size_aware_batching/utils.py", "webdatamodule/utils.py"}  # exports
PARTS = ("headrace-size-aware-batching", "headrace-webdatamodule", "headrace-weighted-sampler")
COPIES = (
    ("size-aware-batching", "size_aware_batching/_columns.py"),
    ("webdatamodule", "webdatamodule/loading/columns.py"),
)
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
    if name in PARTS:
        module = package / "src" / "headrace" / name.removeprefix("headrace-").replace("-", "_")
        found += [f"{f} is missing" for f in ("py.typed", "__init__.py") if not (module / f).is_file()]
        found += module_faults(module)
    return [f"{name}: {fault}" for fault in found]


def module_faults(folder: Path) -> list[str]:
    """Return which modules below a package's folder are too short or too long, and whether they are too many."""
    modules = [path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py"]
    found = []
    for path in modules:
        name, lines = path.relative_to(folder.parent).as_posix(), len(path.read_text().splitlines())
        if lines not in LINES and not {path.name, name} & ANY_LENGTH:
            found.append(f"{name} has {lines} lines, allowed are {LINES[0]} to {LINES[-1]}")
    if len(modules) > MOST_MODULES[folder.name]:
        found.append(f"{folder.name} has {len(modules)} modules, allowed are {MOST_MODULES[folder.name]}")
    return found


def conftest_faults(root: Path) -> list[str]:
    """Return which packages' conftest.py differs: each is tested alone, all of them in one way."""
    wanted = (root / "sub-packages" / "headrace" / "conftest.py").read_bytes()
    others = [root / "sub-packages" / name / "conftest.py" for name in PARTS]
    return [f"{path.relative_to(root)} differs from headrace's" for path in others if path.read_bytes() != wanted]


def copy_faults(root: Path) -> list[str]:
    """Return which files differ that packages share, since they do not import one another."""
    first, *others = (root / "sub-packages" / f"headrace-{name}" / "src/headrace" / path for name, path in COPIES)
    return [
        f"{path.relative_to(root)} differs from {first}" for path in others if path.read_bytes() != first.read_bytes()
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
    return found + conftest_faults(root) + copy_faults(root) + version_faults(root)


def main(root: Path) -> int:
    """Print the faults of the tree at ``root`` and return the exit status."""
    found = faults(root)
    print("\n".join(found) or "the layout is as it should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()))
