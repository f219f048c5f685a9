"""The lines that the README shows for each training loop are those of its example, which ci/integrations runs."""

import ast
import re
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
SECTIONS = re.findall(
    r"### [^\n]*\n\n\[(\w+)\.py\]\((.*?)\).*?```python\n(.*?)```", (HOME / "README.md").read_text(), re.DOTALL
)


def test_every_example_has_its_lines() -> None:
    names = {path.stem for path in (HOME / "examples" / "loops").glob("*.py")} - {"task"}
    assert sorted(name for name, _, _ in SECTIONS) == sorted(names)


@pytest.mark.parametrize(("name", "link", "lines"), SECTIONS, ids=[name for name, _, _ in SECTIONS])
def test_the_lines_are_those_of_the_example(name: str, link: str, lines: str) -> None:
    script = [line.strip() for line in (HOME / link).read_text().splitlines()]
    assert len(lines.splitlines()) <= 5
    assert [line for line in lines.splitlines() if line.strip() not in script] == []
    ast.parse(lines.rstrip() + (" ..." if lines.rstrip().endswith(":") else ""))
