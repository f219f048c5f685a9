"""Runs the scripts of an example in this process: a new one would spend seconds on imports alone."""

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


class Done(NamedTuple):
    """What `subprocess.run` would return."""

    returncode: int
    stdout: str
    stderr: str


class Scripts:
    """The scripts in the folder of an example.

    Args:
        folder: Where they lie.
        capsys: Takes what they print.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, name: str, *words: str | Path) -> Done:
        """Calls ``main`` of a script with words of a command line; the empty name is the folder's own script."""
        path = self.folder / (name or "__main__.py")
        specification = importlib.util.spec_from_file_location(f"{self.folder.name}_{path.stem}", path)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[specification.name] = module  # where dataclasses look for it
        specification.loader.exec_module(module)
        self.capsys.readouterr()
        try:
            code = module.main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
        return Done(code, *self.capsys.readouterr())
