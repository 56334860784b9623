from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("processes", "launching")]

from launched import Directly  # noqa: E402
from launching import Launcher, Nursery  # noqa: E402


@pytest.fixture
def directly(tmp_path: Path, nursery: Nursery) -> Iterator[Directly]:
    launcher = Launcher(tmp_path, nursery)
    yield Directly(launcher)
    left, _ = launcher.clean_up()  # some programs write files where they run
    assert left == []
