"""A row passes few files on its way; ``python tools/trips.py`` names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_step_and_a_merge_visit_few_files() -> None:
    said = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "trips.py")], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    files = {name: int(number) for name, number in re.findall(r"^([\w-]+): (\d+) files$", said, re.M)}
    assert files["monitor-writer-rank0"] <= 15
    assert files["MainThread"] <= 24
    assert files["merge"] <= 26
