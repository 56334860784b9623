from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "processes"), str(TESTS / "pytorch"), str(TESTS / "pytorch" / "frameworks")]

from jobs import Job, start  # noqa: E402
from launching import Launcher, Nursery  # noqa: E402

SCRIPTS = Path(__file__).resolve().parent / "scripts"
WHOLE_STATISTICS = {"ops": ["min", "max", "mean", "norm", "zeros", "nans", "infs", "std", "shape"], "ndigits": 17}


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Callable[..., Job]]:
    """Runs a script of this directory as the ranks of a job, with ``cc_distribution`` enabled and as the keywords say; see
    ``jobs.start``. No process and no file outside its directory is left.
    """
    launchers: list[Launcher] = []

    def run(
        script: str,
        ranks: int,
        *arguments: object,
        others: dict[str, object] | None = None,
        preload: str = "",
        brief: bool = True,
        **wanted: object,
    ) -> Job:
        directory = tmp_path_factory.mktemp("job")
        launchers.append(Launcher(directory, nursery))
        config = {"cc_distribution": {"enable": True, **wanted}, **WHOLE_STATISTICS, **(others or {})}
        of_parameters = {"wg_distribution": False, "param_distribution": False, "mv_distribution": False}
        path = str(SCRIPTS / script)
        return start(launchers[-1], directory, path, ranks, *arguments, preload=preload, brief=brief, **of_parameters | config)

    yield run
    for launcher in launchers:
        assert launcher.clean_up() == ([], [])
