"""The two sources of the quickstart: text that is on every machine, or proteins from FASTA files."""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

Sources = dict[str, list[bytes]]


def standard_library() -> Sources:
    """Return every function and class of Python's standard library, and every docstring, as UTF-8 bytes."""
    sources: Sources = {"code": [], "docstrings": []}
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if "packages" not in path.relative_to(root).parts[0]]
    for path in tqdm(files, desc="reading the standard library", unit="file", disable=None):
        text = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in old modules are not the reader's concern
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue  # the library's own tests hold files that are broken on purpose
        sources["code"].extend(definitions(tree, text.splitlines(keepends=True)))
        sources["docstrings"].extend(docstrings(tree))
    return sources


def definitions(tree: ast.Module, lines: list[bytes]) -> Iterator[bytes]:
    """Yield the source of each function and class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield b"".join(lines[node.lineno - 1 : node.end_lineno])


def docstrings(tree: ast.Module) -> Iterator[bytes]:
    """Yield each docstring that is not empty."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text:
                yield text.encode("utf-8", "replace")


def fasta(paths: list[Path]) -> Sources:
    """Return the sequences of each FASTA file as one source, named after the file.

    Raises:
        ValueError: If a file holds no sequence, is no FASTA file, or two files share a name.
    """
    sources: Sources = {}
    for path in paths:
        if path.stem in sources:
            raise ValueError(f"--fasta: two files are called {path.stem!r}; give them different names")
        sources[path.stem] = list(fasta_records(path))
    return sources


def fasta_records(path: Path) -> Iterator[bytes]:
    """Yield the sequences of one FASTA file."""
    head, *records = ("\n" + path.read_text()).split("\n>")
    if head.strip() or not records:
        raise ValueError(f"--fasta: {path} does not begin with '>': it is no FASTA file")
    for record in records:
        sequence = "".join(record.split("\n")[1:]).replace(" ", "").strip().encode()
        if not sequence:
            raise ValueError(f"--fasta: {path}: record {record.splitlines()[0]!r} has no sequence")
        yield sequence
