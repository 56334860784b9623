"""What ``conftest.py`` does for all tests, seen in a run of pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAILING = """
import subprocess, sys

def test_that_fails():
    script = "import sys, time; print('to one', flush=True); print('to the other', file=sys.stderr, flush=True); {}"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text={}, timeout={})
"""


@pytest.mark.parametrize(
    ("ends", "text", "seconds"), [("sys.exit(3)", True, 60), ("time.sleep(60)", False, 2)], ids=["fails", "takes too long"]
)
def test_what_a_child_wrote_that_failed_a_test_is_shown(ends: str, text: bool, seconds: int, tmp_path: Path) -> None:
    file = tmp_path / "test_failing.py"
    file.write_text(FAILING.format(ends, text, seconds))
    hooks = ["-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *hooks, str(file)]
    shown = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    assert "-- stdout of the child --" in shown
    assert "-- stderr of the child --" in shown
    assert "\nto one\n" in shown
    assert "\nto the other\n" in shown
