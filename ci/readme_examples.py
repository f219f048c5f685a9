"""A pytest plugin that runs the Python examples of Markdown files: ``pytest -p readme_examples README.md``.

The packages collect their own READMEs; this is for the documents that belong to none of them. Where an example needs a
library that the packages do without, the page says so, and ``ci/integrations`` runs it::

    <!-- skip: start if(missing("transformers"), reason="ci/integrations runs it") -->
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def missing(*names: str) -> bool:
    """Return whether any of the modules is not installed."""
    try:
        return any(find_spec(name) is None for name in names)
    except ModuleNotFoundError:  # the package of a module is not there
        return True


def examples_need(namespace: dict[str, Any]) -> None:
    """Put what the skips of a page call into the namespace of its examples."""
    namespace["missing"] = missing


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    path=str(Path(__file__).parent.parent),
    patterns=["*.md", "docs/**/*.md"],
    setup=examples_need,
).pytest()
