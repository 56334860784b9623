"""A merge that follows a real job and is killed again and again, while others read what it has written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread

import polars
import pytest
from evidence import sampled
from hanging import until
from jobs import OF_PARAMETERS
from launching import Launcher, Nursery
from recorded_job import files, merged

from monitor import open_run

SCRIPT = Path(__file__).resolve().parent / "scripts" / "steady.py"
COMMAND = (sys.executable, "-c", "from monitor.merge.cli import app; app()")
SOON = 120.0
"""Seconds in which everything here is over by far."""
KINDS = ("grad_reduced", "param_origin")


@pytest.fixture
def launcher(tmp_path: Path, nursery: Nursery) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, nursery)
    yield launcher
    assert launcher.clean_up() == ([], [])


class Reader(Thread):
    """Reads the set again and again.

    Attributes:
        wrong: What was not as it should be.
        reads: How often each way has found rows.
    """

    def __init__(self, output: Path) -> None:
        super().__init__(daemon=True)
        self.stop, self.wrong, self.reads = Event(), "", {"open_run": 0, "glob": 0}
        self._output = output
        self._known: dict[tuple[str, str], list[int]] = {}

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                for kind in KINDS if (self._output / "report.json").exists() else ():
                    self._read(kind)
                time.sleep(1.0)
        except BaseException as error:  # told by the test
            self.wrong = repr(error)

    def _read(self, kind: str) -> None:
        run = open_run(self._output)
        if kind in run.kinds:
            rows = polars.DataFrame(run.rows(kind, columns=["step", "rank", "name", "micro_step"]))
            self._check("open_run", kind, rows)
        try:
            scanned = polars.scan_parquet(self._output / "per_rank" / f"{kind}_*.parquet")
            self._check("glob", kind, scanned.select("step", "rank", "name", "micro_step").collect())
        except (FileNotFoundError, polars.exceptions.ComputeError):
            pass  # a file was replaced since it was listed or its footer was read: ask again

    def _check(self, how: str, kind: str, rows: polars.DataFrame) -> None:
        assert rows.is_unique().all(), "a row is there twice"
        counts = rows.group_by("step").len().sort("step")
        assert counts["len"].n_unique() == 1, "a step has not all its rows"
        steps, known = counts["step"].to_list(), self._known.get((how, kind), [])
        assert steps == list(range(len(steps))), "there is a hole"
        assert len(steps) >= len(known), "steps have gone"
        self._known[how, kind] = steps
        self.reads[how] += 1


@pytest.mark.parametrize("seed", sampled(range(5)))
def test_killed_three_times_beside_a_running_job_the_set_is_always_whole_and_at_the_end_that_of_one_merge(
    launcher: Launcher, tmp_path: Path, seed: int
) -> None:
    output, stop, chance = tmp_path / "followed", tmp_path / "stop", random.Random(seed)
    settings = OF_PARAMETERS | {"format": ["parquet"], "step_count_per_record": 3}
    ranks = launcher.start_ranks(2, str(SCRIPT), stop, config=settings)
    assert until(lambda: len(list(launcher.base.glob("*/manifest.json"))) == 2, SOON)
    reader = Reader(output)
    reader.start()
    for _ in range(3):
        before = written(output)
        process = following(launcher.base, output, tmp_path / "said")
        assert until(partial(has_news, process, output, before), SOON)
        time.sleep(chance.uniform(0, 0.5))
        assert process.poll() is None, (tmp_path / "said").read_text()
        process.send_signal(signal.SIGKILL)
        process.wait(SOON)
    last = following(launcher.base, output, tmp_path / "said")
    time.sleep(1.0)
    stop.touch()
    for one in ranks:
        assert one.end().status == 0
    assert last.wait(3 * SOON) == 0, (tmp_path / "said").read_text()
    reader.stop.set()
    reader.join(SOON)
    assert reader.wrong == ""
    assert min(reader.reads.values()) > 3
    assert {path.name for path in tmp_path.iterdir() if "followed" in path.name} == {"followed"}
    assert merged(launcher.base).clean
    assert files(output) == files(launcher.base / "merged")
    assert {path.split("_")[0] for path in files(output)} >= {"per", "global/grad", "report.json"}


def following(base: Path, output: Path, said: Path) -> subprocess.Popen[bytes]:
    with open(said, "wb") as file:
        command = [*COMMAND, str(base), "--follow", "-o", str(output), "--interval", "0.1"]
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def has_news(process: subprocess.Popen[bytes], output: Path, before: list[str]) -> bool:
    """Whether it has written, or ended."""
    return written(output) != before or process.poll() is not None


def written(output: Path) -> list[str]:
    return sorted(os.listdir(output / "per_rank")) if (output / "per_rank").exists() else []


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT]))
def test_interrupted_it_says_how_to_continue_and_leaves_a_set_that_can_be_finished(
    launcher: Launcher, tmp_path: Path, number: signal.Signals
) -> None:
    output, stop = tmp_path / "followed", tmp_path / "stop"
    ranks = launcher.start_ranks(
        1, str(SCRIPT), stop, config=OF_PARAMETERS | {"format": ["parquet"], "step_count_per_record": 3}
    )
    assert until(lambda: list(launcher.base.glob("*/manifest.json")), SOON)
    process = following(launcher.base, output, tmp_path / "said")
    assert until(lambda: written(output) or process.poll() is not None, SOON)
    process.send_signal(number)
    assert process.wait(SOON) == 130
    said = (tmp_path / "said").read_text()
    assert "--follow\n" in said
    assert "--follow --finish\n" in said
    assert open_run(output).missing
    stop.touch()
    assert ranks[0].end().status == 0
    command = [*COMMAND, str(launcher.base), "--follow", "--finish", "-o", str(output)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    merged(launcher.base)
    assert files(output) == files(launcher.base / "merged")
