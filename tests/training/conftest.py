from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "processes"), str(Path(__file__).parent)]

from launching import Launcher, Nursery  # noqa: E402


@pytest.fixture(scope="module")
def train_ranks(nursery: Nursery) -> Iterator[Callable[..., tuple[list[dict[str, Any]], list[str]]]]:
    """Runs a script as two ranks. They leave in ``base`` what they know of their steps, which is returned with what they said
    on standard error. No process and no file outside of it is left.
    """
    launchers: list[Launcher] = []

    def train(base: Path, script: str, *arguments: object, preload: str = "") -> tuple[list[dict[str, Any]], list[str]]:
        launchers.append(Launcher(base, nursery))
        path = Path(__file__).parent / "scripts" / script
        ended = [one.end() for one in launchers[-1].start_ranks(2, str(path), *arguments, preload=preload, brief=True)]
        assert [one.status for one in ended] == [0, 0], "\n".join(one.err[-3000:] for one in ended)
        return [json.loads((base / f"rank{rank}.json").read_text()) for rank in range(2)], [one.err for one in ended]

    yield train
    for launcher in launchers:
        assert launcher.clean_up() == ([], [])
