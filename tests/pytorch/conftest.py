from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from watching import Output


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    """A base directory that this test's monitors write to."""
    base = tmp_path / "out"
    base.mkdir()
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(base))
    return Output(base)
