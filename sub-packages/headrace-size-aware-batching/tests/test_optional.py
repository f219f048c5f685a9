"""What is optional stays optional."""

import subprocess
import sys
from pathlib import Path

BLOCKED = "import sys; sys.modules['matplotlib'] = None\n"


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=cwd, text=True, capture_output=True, timeout=120, check=False
    )


def test_planning_does_without_matplotlib(tmp_path: Path) -> None:
    result = python(
        "from headrace.size_aware_batching import DistributedSizeAwareBatchSampler as Sampler\n"
        "print(Sampler(range(1, 100), 200).plan().report())",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "samples" in result.stdout


def test_drawing_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    result = python(
        "from headrace.size_aware_batching import DistributedSizeAwareBatchSampler as Sampler\n"
        "try:\n"
        "    from headrace.size_aware_batching.plotting import draw\n"
        "    draw({'': Sampler(range(1, 100), 200).plan()}, 'plan.png')\n"
        "except ImportError as error:\n"
        "    print(error)",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "pip install headrace-size-aware-batching[plot]" in result.stdout
    assert not (tmp_path / "plan.png").exists()


def test_the_command_without_matplotlib_refuses_to_draw_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "sizes.txt").write_text("1\n2\n3\n")
    call = "from headrace.size_aware_batching.cli import main\nmain(['sizes.txt', '--budget', '5'"
    assert python(call + "])", tmp_path).returncode == 0
    result = python(call + ", '--draw', 'plan.png'])", tmp_path)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "[plot]" in result.stderr
