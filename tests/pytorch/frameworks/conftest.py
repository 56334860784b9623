from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "processes"), str(TESTS / "pytorch"), str(Path(__file__).parent)]

from jobs import Job, start  # noqa: E402
from launching import Launcher, Nursery  # noqa: E402


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Callable[..., Job]]:
    """Runs a script as the ranks of a job; see ``jobs.start``. No process and no file outside its directory is left."""
    launchers: list[Launcher] = []

    def run(script: str, ranks: int, *arguments: object, **config: object) -> Job:
        directory = tmp_path_factory.mktemp("job")
        launchers.append(Launcher(directory, nursery))
        return start(launchers[-1], directory, script, ranks, *arguments, **config)

    yield run
    for launcher in launchers:
        assert launcher.clean_up() == ([], [])
