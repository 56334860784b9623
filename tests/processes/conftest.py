from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import Launcher, Nursery


@pytest.fixture
def launcher(tmp_path: Path, nursery: Nursery) -> Iterator[Launcher]:
    """Starts this test's scripts. Whatever happens, no process, no mount and no file outside its directory is left."""
    mounts = Path("/proc/self/mounts").read_text()
    launcher = Launcher(tmp_path, nursery)
    yield launcher
    assert launcher.clean_up() == ([], [])
    assert Path("/proc/self/mounts").read_text() == mounts


@pytest.fixture(scope="session")
def plain_losses(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> list[str]:
    """The losses of the small run, not monitored."""
    launcher = Launcher(tmp_path_factory.mktemp("plain"), nursery)
    ended = launcher.run("ending.py", "return", 60)
    assert launcher.clean_up() == ([], [])
    assert ended.status == 0, ended.err
    return ended.losses
