from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("sinks", "stats", "processes", "pytorch", "pytorch/frameworks", "merge")]

from jobs import OF_PARAMETERS  # noqa: E402
from launching import Launcher, Nursery  # noqa: E402

SCRIPTS = Path(__file__).resolve().parent / "scripts"


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Callable[..., Path]]:
    """Runs a script, one way of it, on its ranks. They record to ``out`` in the directory that is returned, and what the
    script itself has to tell is in ``told.json``. Trials record to directories of their numbers. No process and no file
    elsewhere is left.
    """
    launchers: list[Launcher] = []

    def run(script: str, how: str, ranks: int, trials: Sequence[Mapping[str, object]] = (), **config: object) -> Path:
        directory = tmp_path_factory.mktemp("job")
        launchers.append(Launcher(directory, nursery))
        settings = OF_PARAMETERS | {"format": ["csv", "hdf5"]} | config
        own = {"RESULTS": str(directory / "told.json")}
        if trials:
            own["TRIALS"] = json.dumps(
                [{"directory": str(directory / str(number)), **one} for number, one in enumerate(trials)]
            )
        started = launchers[-1].start_ranks(ranks, str(SCRIPTS / script), how, config=settings, **own)
        for ended in [one.end() for one in started]:
            assert ended.status == 0, ended.err[-3000:]
        return directory

    yield run
    left = [launcher.clean_up() for launcher in launchers]
    assert left == [([], [])] * len(launchers)
