"""The page of errors quotes messages as the sources have them: the one test of their words."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "errors.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the pages lie in the repository")
VALUES = re.compile(r"\.\.\.|'[^']*'|\d[\d,]*|\[|\]|=")  # what differs from case to case


def quoted() -> list[str]:
    """The messages in the first cells of the page's tables; names of classes and functions are none."""
    cells = re.findall(r"^\| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [code for code in codes if not re.fullmatch(r"[\w.]+(\(\))?", code)]


@pytest.fixture(scope="module")
def texts() -> str:
    """All texts in the sources, also the parts of those with values in them."""
    sources = (path.read_text(encoding="utf-8") for path in ROOT.glob("sub-packages/*/src/headrace/**/*.py"))
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(found)


@pytest.mark.parametrize("message", quoted())
def test_the_sources_say_what_the_page_quotes(message: str, texts: str) -> None:
    """Each stretch of words between values; a constant and what follows it may make one stretch."""
    stretches = [part.strip(" :'\"") for part in VALUES.split(message.removeprefix("TypeError: "))]
    for words in stretches:
        assert any(words[:cut] in texts and words[cut:] in texts for cut in range(len(words) + 1)), words


def test_the_page_quotes_messages() -> None:
    assert len(quoted()) > 20
