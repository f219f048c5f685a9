"""A pytest plugin that runs the Python examples of Markdown files: ``pytest -p readme_examples README.md``.

The packages collect their own READMEs; this is for the documents that belong to none of them.
"""

from pathlib import Path

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    path=str(Path(__file__).parent.parent),
    patterns=["*.md", "docs/*.md"],
).pytest()
