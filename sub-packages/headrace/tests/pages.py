"""The code of the documents' pages, and how a reader runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
SCRIPTS = Path(sys.executable).parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def block(page: str, mark: str) -> str:
    """The first block behind the comment that begins with the mark."""
    _, behind = re.split(rf"<!-- {re.escape(mark)}(?: -->|;)", (DOCS / page).read_text())
    return str(re.findall(r"```\w+\n(.*?)```", behind, re.DOTALL)[0])


def run(page: str, mark: str, folder: Path, expected: int = 0) -> str:
    """Run a block in bash and return what it printed; its last command has to end well."""
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-uc", block(page, mark)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    return done.stdout
