"""Add up pytest's reports: ``python ci/count_tests.py folder seconds`` prints one line over all of a folder."""

import sys
from pathlib import Path
from xml.etree import ElementTree


def main(folder: str, seconds: str) -> None:
    """Print how many tests passed, failed and were skipped."""
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for report in Path(folder).glob("*.xml"):
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):  # noqa: S314 -- written by pytest just now
            for name in total:
                total[name] += int(suite.attrib[name])
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    print(f"{seconds}s: {passed} passed, {failed} failed, {total['skipped']} skipped")


if __name__ == "__main__":
    main(*sys.argv[1:])
