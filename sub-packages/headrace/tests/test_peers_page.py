"""The figures on the page about peers are those of the files that a run wrote. Needs no peer, only the repository."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
SCRIPT = ROOT / "sub-packages" / "headrace" / "benchmarks" / "peers" / "page.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="benchmarks and pages lie in the repository")


def page_module() -> ModuleType:
    found = importlib.util.spec_from_file_location("peers_page", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_figures() -> None:
    page = page_module()
    text = (DOCS / "peers.md").read_text()
    tables = page.tables(DOCS / "figures")
    assert {match[2] for match in page.MARKED.finditer(text)} >= set(tables)
    assert page.filled(text, tables) == text


def test_the_page_opens_with_lost_samples_broken_budgets_and_ranks_that_differ() -> None:
    page = page_module()
    first, second, *_ = page.MARKED.finditer((DOCS / "peers.md").read_text())
    assert (first[2], second[2]) == ("kept", "resume")
    rows = page.tables(DOCS / "figures")["kept"].splitlines()
    assert rows[0] == "|  | samples lost, repeated | batches over the budget | largest batch | ranks' steps differ by |"
    ours = [row for row in rows if row.startswith("| headrace")]
    assert len(ours) == 5
    assert all(re.search(r"\| 0, 0 \| 0 \| (1|0.999) \| 0, 0 \|$", row) for row in ours)


def test_a_table_that_was_changed_by_hand_is_noticed() -> None:
    page = page_module()
    text = (DOCS / "peers.md").read_text()
    changed = text.replace("| --- | --- |", "| --- | :-- |", 1)
    assert changed != text
    assert page.filled(changed, page.tables(DOCS / "figures")) == text


def test_better_peers_are_in_bold_and_ours_never() -> None:
    page = page_module()
    texts = page.marked(["1", "0.5", "1", "2"], [1.0, 0.5, 0.9996, 2.0], lowest=True, ours=[True, False, False, False])
    assert texts == ["1", "**0.5**", "1", "2"]
    assert page.marked(["1", ""], [1.0, None], lowest=True, ours=[True, False]) == ["1", ""]


def test_every_file_says_how_it_was_made() -> None:
    files = sorted((DOCS / "figures").glob("peers_*.json"))
    assert {file.stem for file in files} <= {f"peers_{part}" for part in page_module().PARTS}
    for file in files:
        content = json.loads(file.read_text())
        assert content["command"] == "./scripts/peers"
        assert {"python", "cpus", "versions", "rows"} <= set(content)
        assert file.with_suffix(".png").is_file()
