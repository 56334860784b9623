"""Ranks as processes, one of which is stopped or killed in the middle of an agreement: the others stay alike, and go on."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from evidence import sampled
from launching import Launcher, Started

BOUND_S = 0.9
"""Of ``scripts/agreeing.py``."""


class Job:
    """Ranks that train, and the file beside them."""

    def __init__(self, launcher: Launcher, directory: Path, store: str, count: int = 2) -> None:
        self._path, self._directory = directory / "config.json", directory
        self.edit(0)
        place = directory / "store" if store == "file" else store
        self.ranks: list[Started] = launcher.start_ranks(count, "agreeing.py", place, self._path, directory, brief=True)
        for rank in self.ranks:
            rank.wait_for("training")

    def edit(self, collect_times: int) -> None:
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps({"collect_times": collect_times}))
        draft.replace(self._path)

    def end(self) -> list[dict[str, Any]]:
        """What the ranks have to tell."""
        self.edit(999)
        return [self.told(rank) for rank in range(len(self.ranks))]

    def told(self, rank: int) -> dict[str, Any]:
        ended = self.ranks[rank].end()
        assert ended.status == 0, ended.err
        found: dict[str, Any] = json.loads((self._directory / f"rank{rank}.json").read_text())
        return found


@pytest.fixture(params=["tcp", "file", "own"])
def store(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def test_edits_at_random_moments_hold_from_the_same_steps_in_all_processes(
    launcher: Launcher, tmp_path: Path, store: str
) -> None:
    job = Job(launcher, tmp_path, store, count=3)
    moments = random.Random(0)
    for edit in range(1, 51):
        time.sleep(moments.choice([0.0, 0.02, 0.06]))
        job.edit(edit)
    first, *others = job.end()
    assert all((one["ran"], one["records"]) == (first["ran"], first["records"]) for one in others)
    assert len(set(first["ran"])) > 5
    assert all(record["since"] == record["from_step"] for record in first["records"])


@pytest.mark.parametrize(
    ("store", "stopped"),
    sampled([("tcp", 0), ("tcp", 1), ("file", 0), ("file", 1), ("own", 0), ("own", 1)], 1, 4),
    indirect=["store"],
)
def test_a_process_that_is_stopped_in_an_agreement_holds_up_for_the_bound_at_most_and_all_stay_alike(
    launcher: Launcher, tmp_path: Path, store: str, stopped: int
) -> None:
    job = Job(launcher, tmp_path, store)
    moments = random.Random(stopped)
    for edit in range(1, 5):
        job.edit(edit)
        time.sleep(moments.uniform(0.0, 0.12))
        job.ranks[stopped].send(signal.SIGSTOP)
        time.sleep(moments.uniform(0.0, 1.0))
        job.ranks[stopped].send(signal.SIGCONT)
        time.sleep(0.2)
    one, other = job.end()
    assert one["ran"] == other["ran"]
    assert one["records"] == other["records"]
    assert [one["undecided_since"], other["undecided_since"]] == [None, None]
    assert (one, other)[1 - stopped]["longest"] <= BOUND_S + 0.5


def test_a_process_that_is_killed_in_an_agreement_leaves_the_other_whole(
    launcher: Launcher, tmp_path: Path, store: str
) -> None:
    job = Job(launcher, tmp_path, store)
    job.edit(1)
    time.sleep(0.03)
    job.ranks[1].send(signal.SIGKILL)
    told = job.told(0)
    assert set(told["ran"]) <= {0, 1}
    assert job.ranks[1].end().status == -signal.SIGKILL
