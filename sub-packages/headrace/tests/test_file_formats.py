"""The page of the file formats names every version constant of the three packages, and its value."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "file-formats.md"
ROW = re.compile(r"^\| [^|]+ \| (v?[0-9.]+) \| `([\w.]+)\.(\w+)` \|$", re.MULTILINE)
CONSTANT = re.compile(r"_?([A-Z]+_)*(VERSION|FORMAT)")
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the pages lie in the repository")


def listed() -> dict[tuple[str, str], str]:
    return {(module, name): version for version, module, name in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def constants() -> set[tuple[str, str]]:
    found = set()
    for path in ROOT.glob("sub-packages/*/src/headrace/**/*.py"):
        parts = path.relative_to(next(one for one in path.parents if one.name == "headrace")).with_suffix("").parts
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found |= {(".".join(parts), name) for name in names if CONSTANT.fullmatch(name)}
    return found


@pytest.mark.slow
def test_every_version_is_listed_and_nothing_else() -> None:
    assert set(listed()) == constants()


def test_the_page_has_the_versions_of_the_constants() -> None:
    found = {(module, name): getattr(import_module(f"headrace.{module}"), name) for module, name in listed()}
    assert {place: str(version) for place, version in found.items()} == listed()
