"""What joins the project to its hosting site: workflows, templates, citation, hooks. Needs the whole repository."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WRITTEN = [
    *WORKFLOWS,
    *sorted((ROOT / ".github").glob("*.yml")),
    *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]
OWN = re.compile(r"(?:\./|python )((?:ci|scripts)/[\w./-]+)")
pytestmark = pytest.mark.skipif(
    not (ROOT / "scripts" / "check_layout.py").exists(), reason="runs inside a clone of the repository only"
)


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict), path
    return found


def jobs() -> dict[str, dict[str, Any]]:
    return {f"{path.name}: {name}": job for path in WORKFLOWS for name, job in read(path)["jobs"].items()}


def steps() -> list[dict[str, Any]]:
    return [step for job in jobs().values() for step in job["steps"]]


def test_the_files_of_the_hosting_site_are_there() -> None:
    names = {path.relative_to(ROOT / ".github").as_posix() for path in (ROOT / ".github").rglob("*") if path.is_file()}
    assert names >= {
        "CONTRIBUTING.md",
        "SECURITY.md",
        "dependabot.yml",
        "pull_request_template.md",
        "ISSUE_TEMPLATE/bug.yml",
        "ISSUE_TEMPLATE/config.yml",
        "ISSUE_TEMPLATE/feature.yml",
        "workflows/ci.yml",
        "workflows/release.yml",
    }


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_every_file_is_valid_yaml_without_a_key_twice(path: Path) -> None:
    class Strict(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        pass

    def unique(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), (path, keys)
        return dict(zip(keys, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))

    Strict.add_constructor("tag:yaml.org,2002:map", unique)
    assert yaml.load(path.read_text(encoding="utf-8"), Strict)


def test_every_job_has_a_system_a_time_limit_and_jobs_that_exist_before_it() -> None:
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path  # a job that needs more says so itself
        for name, job in workflow["jobs"].items():
            assert job["runs-on"], (path, name)
            assert 0 < job["timeout-minutes"] <= 180, (path, name)
            needed = job.get("needs", [])
            assert {needed} if isinstance(needed, str) else set(needed) <= set(workflow["jobs"]), (path, name)


def test_every_action_has_a_version() -> None:
    used = {step["uses"] for step in steps() if "uses" in step}
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", name) for name in used), used


def test_every_script_that_a_workflow_or_a_hook_runs_is_there() -> None:
    hooks = [hook["entry"] for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    commands = [*(str(step.get("run", "")) for step in steps()), *(f"./{hook}" for hook in hooks)]
    named = {name for command in commands for name in OWN.findall(command)}
    assert named >= {"ci/wheels", "ci/release.py", "ci/static", "scripts/test", "scripts/docs"}
    for name in named:
        assert (ROOT / name).is_file(), name
        assert name.endswith(".py") or (ROOT / name).stat().st_mode & 0o111, name


def test_only_tested_wheels_are_published_and_only_the_job_that_does_it_may() -> None:
    release = read(ROOT / ".github" / "workflows" / "release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as true
    wheels, publish = release["jobs"]["wheels"], release["jobs"]["publish"]
    assert "./ci/wheels dist" in [step.get("run") for step in wheels["steps"]]
    assert "permissions" not in wheels
    assert publish["needs"] == "wheels"
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("run" in step for step in publish["steps"])  # nothing runs beside the token
    assert not any("secrets." in path.read_text(encoding="utf-8") for path in WORKFLOWS)


def test_dependency_updates_reach_every_package_and_the_pins() -> None:
    updates = read(ROOT / ".github" / "dependabot.yml")["updates"]
    reached = {folder for update in updates if update["package-ecosystem"] == "pip" for folder in update["directories"]}
    assert reached == {"/ci", *(f"/sub-packages/{path.name}" for path in (ROOT / "sub-packages").iterdir())}


def test_the_citation_names_what_the_packages_name() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["license"] == "Apache-2.0"
    assert citation["repository-code"] == "https://github.com/headrace/headrace"
    assert citation["authors"] == [{"name": "The headrace developers"}]


def release(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "ci" / "release.py"), *arguments]
    return subprocess.run(command, cwd=root, text=True, capture_output=True, check=False)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """As much of the repository as a release looks at, with version 1.2.3 everywhere and a dated changelog."""
    for path in [ROOT / "ci" / "release.py", ROOT / "scripts" / "bump_version.py", *ROOT.glob("sub-packages/*/*.toml")]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    for package in (tmp_path / "sub-packages").iterdir():
        text = (
            f"# Changelog\n\n## 1.2.3 (2027-01-31)\n\n### Added\n\n- New in {package.name}.\n\n## 1.2.2 (2027-01-01)\n"
        )
        (package / "CHANGELOG.md").write_text(f"{text}\n- Old.\n")
    bump = [sys.executable, str(tmp_path / "scripts" / "bump_version.py"), "1.2.3"]
    subprocess.run(bump, check=True, capture_output=True)
    return tmp_path


def test_the_notes_of_a_release_are_the_changelogs_newest_sections(house: Path) -> None:
    result = release(house, "v1.2.3")
    assert result.returncode == 0, result.stderr
    assert "## headrace-webdatamodule\n\n### Added\n\n- New in headrace-webdatamodule.\n" in result.stdout
    assert result.stdout.count("- New in ") == 4
    assert "Old" not in result.stdout


def test_a_release_of_another_tag_or_an_undated_changelog_is_refused(house: Path) -> None:
    changelog = house / "sub-packages" / "headrace" / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("(2027-01-31)", "(unreleased)"))
    project = house / "sub-packages" / "headrace-webdatamodule" / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "1.2.3"', 'version = "1.2.4"'))
    result = release(house, "v1.2.3")
    assert result.returncode == 1
    assert "headrace-webdatamodule has version 1.2.4, but the tag is v1.2.3" in result.stderr
    assert (
        "headrace/CHANGELOG.md begins with `## 1.2.3 (unreleased)`, it needs `## 1.2.3 (YYYY-MM-DD)`" in result.stderr
    )
    assert (
        "headrace pins headrace-webdatamodule==1.2.3" not in result.stderr
    )  # the tag's version: only one of the two is wrong


def test_a_dry_run_takes_the_version_of_the_tree_and_an_unreleased_changelog(house: Path) -> None:
    changelog = house / "sub-packages" / "headrace" / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("(2027-01-31)", "(unreleased)"))
    assert release(house, "--dry-run").returncode == 0
    assert release(ROOT, "--dry-run").returncode == 0


def test_a_release_without_one_of_its_files_is_refused(house: Path) -> None:
    dist = house / "dist"
    dist.mkdir()
    packages = [path.name.replace("-", "_") for path in (house / "sub-packages").iterdir()]
    for package in packages:
        (dist / f"{package}-1.2.3-py3-none-any.whl").touch()
        (dist / f"{package}-1.2.3.tar.gz").touch()
    assert release(house, "v1.2.3", str(dist)).returncode == 0
    (dist / "headrace-1.2.3.tar.gz").unlink()
    (dist / "headrace-1.2.2.tar.gz").touch()
    result = release(house, "v1.2.3", str(dist))
    assert result.returncode == 1
    assert "headrace-1.2.3.tar.gz is missing" in result.stderr
    assert "headrace-1.2.2.tar.gz does not belong to this release" in result.stderr
