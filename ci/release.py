"""Check that a release is ready and print its notes: ``python ci/release.py v0.2.0 [dist]``.

``--dry-run`` in place of the tag takes the version of the tree, and lets the changelogs say "unreleased".
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRY_RUN = "--dry-run"


def projects() -> dict[Path, dict[str, str]]:
    """Return the [project] table of each package, by its folder; the meta-package's comes first."""
    folders = sorted((ROOT / "sub-packages").iterdir())
    return {folder: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in folders}


def newest(changelog: Path) -> tuple[str, str]:
    """Return the heading of a changelog's first section, and its text."""
    _, heading, text = re.split(r"^(## .*)$", changelog.read_text(), maxsplit=1, flags=re.MULTILINE)
    return heading, re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0].strip()


def tree_faults(tag: str, dry_run: bool) -> list[str]:
    """Return where the tree is not what the tag says, a line each."""
    version, found = tag.removeprefix("v"), []
    date = r"(\d{4}-\d\d-\d\d|unreleased)" if dry_run else r"\d{4}-\d\d-\d\d"
    for folder, table in projects().items():
        if table["version"] != version:
            found.append(f"{folder.name} has version {table['version']}, but the tag is {tag}: scripts/bump_version.py")
        found += [
            f"{folder.name} pins {pin}, but the tag is {tag}: scripts/bump_version.py"
            for pin in table["dependencies"]
            if pin.startswith("headrace-") and pin.partition("==")[2] != version
        ]
        heading, _ = newest(folder / "CHANGELOG.md")
        if not re.fullmatch(rf"## {re.escape(version)} \({date}\)", heading):
            needed = f"## {version} (YYYY-MM-DD)"
            found.append(f"{folder.name}/CHANGELOG.md begins with `{heading}`, it needs `{needed}`")
    return found


def dist_faults(version: str, dist: Path) -> list[str]:
    """Return which files a release lacks, and which are not of it: a wheel and an sdist of each package, no more."""
    names = [folder.name.replace("-", "_") for folder in projects()]
    wanted = {f"{name}-{version}{end}" for name in names for end in ("-py3-none-any.whl", ".tar.gz")}
    here = {path.name for path in dist.iterdir()}
    missing = [f"{name} is missing" for name in sorted(wanted - here)]
    return missing + [f"{name} does not belong to this release" for name in sorted(here - wanted)]


def notes() -> str:
    """Return the newest sections of the changelogs, a heading for each package."""
    return "\n\n".join(f"## {folder.name}\n\n{newest(folder / 'CHANGELOG.md')[1]}" for folder in projects())


def main(tag: str, dist: str | None = None) -> int:
    """Print the notes, or the faults to stderr, and return the exit status."""
    dry_run = tag == DRY_RUN
    if dry_run:
        tag = f"v{next(iter(projects().values()))['version']}"
    found = tree_faults(tag, dry_run)
    if dist is not None:
        found += dist_faults(tag.removeprefix("v"), Path(dist))
    print("\n".join(found) or notes(), file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
