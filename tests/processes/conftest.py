from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Starts this test's scripts. Whatever happens, no process, no mount and no file outside its directory is left."""
    mounts = Path("/proc/self/mounts").read_text()
    launcher = Launcher(tmp_path)
    yield launcher
    assert launcher.clean_up() == ([], [])
    assert Path("/proc/self/mounts").read_text() == mounts


@pytest.fixture(scope="session")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of the small run, not monitored."""
    launcher = Launcher(tmp_path_factory.mktemp("plain"))
    ended = launcher.run("ending.py", "return", 60)
    assert launcher.clean_up() == ([], [])
    assert ended.status == 0, ended.err
    return ended.losses
