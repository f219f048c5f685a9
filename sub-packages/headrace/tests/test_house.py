"""The house stands straight, and its checks notice when it does not. Needs the whole repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(ROOT.glob("sub-packages/headrace*/src"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "scripts" / "check_layout.py").exists(), reason="runs inside a clone of the repository only"
    ),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the repository without what is built."""
    target = tmp_path / "repository"
    left_out = shutil.ignore_patterns(".git", ".venv*", ".quickstart", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, target, ignore=left_out)
    return target


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, text=True, capture_output=True, check=False)


def layout(root: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(root / "scripts" / "check_layout.py"), str(root), cwd=root)


def test_the_layout_is_as_it_should_be() -> None:
    result = layout(ROOT)
    assert result.returncode == 0, result.stdout


def test_a_namespace_init_is_found(copy: Path) -> None:
    (copy / "sub-packages/headrace-weighted-sampler/src/headrace/__init__.py").touch()
    result = layout(copy)
    assert result.returncode == 1
    assert "headrace/__init__.py" in result.stdout


def test_a_shared_file_that_differs_in_one_package_is_found(copy: Path) -> None:
    module = copy / "sub-packages/headrace-weighted-sampler/src/headrace/weighted_sampler/_shared/ranks.py"
    module.write_text(module.read_text() + "# only here\n")
    result = layout(copy)
    assert result.returncode == 1
    assert "weighted_sampler/_shared/ranks.py differs from" in result.stdout


def test_a_linked_licence_and_a_stale_pin_are_found(copy: Path) -> None:
    licence = copy / "sub-packages/headrace-webdatamodule/LICENSE"
    licence.unlink()
    licence.symlink_to(copy / "LICENSE")
    project = copy / "sub-packages/headrace-webdatamodule/pyproject.toml"
    project.write_text(project.read_text().replace('version = "', 'version = "9.'))
    result = layout(copy)
    assert result.returncode == 1
    assert "real copy" in result.stdout
    assert "headrace pins" in result.stdout


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(root / source.relative_to(ROOT)) for source in SOURCES)
    command = Path(sys.executable).parent / "lint-imports"
    return run(str(command), "--no-cache", cwd=root, PYTHONPATH=path)


PLANTED = [
    ("headrace-weighted-sampler/src/headrace/weighted_sampler", "import headrace.size_aware_batching"),
    ("headrace-size-aware-batching/src/headrace/size_aware_batching", "from headrace import webdatamodule"),
    ("headrace-webdatamodule/src/headrace/webdatamodule", "from headrace.weighted_sampler import report"),
    ("headrace-webdatamodule/src/headrace/webdatamodule", "import headrace.runs.cli"),
    ("headrace/src/headrace/runs", "import lightning"),
    ("headrace-webdatamodule/src/headrace/webdatamodule/shards", "import lightning"),
    ("headrace-webdatamodule/src/headrace/webdatamodule/shards", "import headrace.webdatamodule.loader"),
    ("headrace-size-aware-batching/src/headrace/size_aware_batching", "import lightning.pytorch"),
]


def test_every_planted_import_is_found(copy: Path) -> None:
    for number, (where, what) in enumerate(PLANTED):
        (copy / "sub-packages" / where / f"planted{number}.py").write_text(what + "\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    for number, planted in enumerate(PLANTED):
        assert f"planted{number} -> " in result.stdout, (planted, result.stdout)


@pytest.mark.slow
def test_an_import_cycle_is_found_and_the_tree_has_none(copy: Path) -> None:
    clean = lint_imports(copy)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    module = copy / "sub-packages/headrace-weighted-sampler/src/headrace/weighted_sampler/_arguments.py"
    module.write_text(module.read_text() + "\nimport headrace.weighted_sampler.sampler\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "No cycles are allowed in headrace.weighted_sampler" in result.stdout


def test_one_command_gives_all_packages_one_version(copy: Path) -> None:
    result = run(sys.executable, "scripts/bump_version.py", "1.2.3", cwd=copy)
    assert result.returncode == 0, result.stderr
    for project in copy.glob("sub-packages/*/pyproject.toml"):
        assert '\nversion = "1.2.3"\n' in project.read_text()
    assert layout(copy).returncode == 0
    assert run(sys.executable, "scripts/bump_version.py", "one", cwd=copy).returncode == 2


def test_an_empty_wheel_and_a_namespace_in_a_wheel_are_found(tmp_path: Path) -> None:
    for name, members in {
        "headrace_weighted_sampler-0.1.0-py3-none-any.whl": ["headrace/__init__.py"],
        "headrace_webdatamodule-0.1.0-py3-none-any.whl": [],
        "headrace-0.1.0-py3-none-any.whl": ["headrace/webdatamodule/loader.py"],
    }.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for member in members:
                wheel.writestr(member, "")
    result = run(sys.executable, str(ROOT / "ci/check_wheels.py"), str(tmp_path), cwd=tmp_path)
    assert result.returncode == 1
    for fault in (
        "headrace/__init__.py would hide",
        "headrace/webdatamodule/__init__.py is missing",
        "headrace/runs/__init__.py is missing",
        "headrace/webdatamodule/loader.py does not belong here",
        "no LICENSE",
        "expected 4 wheels",
    ):
        assert fault in result.stdout
