"""MindSpore as its tests use it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")  # before it is imported: it says much on standard error
sys.path.insert(0, str(Path(__file__).parent))

from reading_back import Output


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    """A base directory that this test's monitors write to."""
    base = tmp_path / "out"
    base.mkdir()
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(base))
    return Output(base)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of a module's job write."""
    return tmp_path_factory.mktemp("base")
