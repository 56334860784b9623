"""``append_output``: runs that were killed go on in their directories, as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from evidence import sampled
from launching import EVERY_STEP, Launcher, Started
from pyarrow.parquet import read_table
from recorded import Recorded, hidden, listed, rank_directories
from typer.testing import CliRunner

from monitor import OpenedRun, open_run
from monitor.coordinator.manifest_format import KILLED
from monitor.merge.cli import app as merge_command
from monitor.merge.merge import Wanted, merge
from monitor.sinks.csv_files import CsvRows
from monitor.sinks.hdf5 import read_hdf5

STEPS = 20
ALL_YEAR = ["Jan01_00-00-00", "Dec31_23-59-59"]
CONFIG: dict[str, Any] = EVERY_STEP | {"mv_distribution": True, "ndigits": 17, "append_output": ALL_YEAR}

Texts = dict[tuple[str, int], bytes]
"""The lines of each kind and step, and the header as that of step -1. Of HDF5 the rows of each step, to the last bit."""


class Job:
    """A run, as one process or as several ranks, which is killed and resumed."""

    def __init__(self, launcher: Launcher, base: Path, config: dict[str, Any], ranks: int = 0) -> None:
        self.launcher, self.base, self.config, self.ranks = launcher, base, config, ranks
        self.checkpoints = base.with_name(f"{base.name}-checkpoints")
        (self.checkpoints / "draft").mkdir(parents=True)

    def start(self, start: int, steps: int = STEPS, *how: str, **config: Any) -> list[Started]:
        for path in self.checkpoints.glob("*-rank*"):  # what lies ahead is another run's
            if int(path.name.split("-")[0]) > start:
                path.unlink()
        arguments = ("resumable.py", self.checkpoints, start, steps, *how)
        options: dict[str, Any] = {"config": self.config | config, "base": self.base, "brief": True}
        return (
            self.launcher.start_ranks(self.ranks, *arguments, **options)
            if self.ranks
            else [self.launcher.start(*arguments, **options)]
        )

    def run(self, start: int, steps: int = STEPS, **config: Any) -> list[str]:
        """To its end; what the ranks said."""
        ends = [one.end() for one in self.start(start, steps, **config)]
        assert [ended.status for ended in ends] == [0] * len(ends), ends[0].err
        return [ended.err for ended in ends]

    def checkpointed(self) -> int:
        """The last step from which all ranks can go on."""
        of_rank = [[int(path.name.split("-")[0]) for path in self.checkpoints.glob(f"*-rank{rank}")] for rank in self._ranks()]
        return min(max(steps, default=0) for steps in of_rank)

    @property
    def formats(self) -> list[str]:
        format_ = self.config.get("format", "csv")
        return [format_] if isinstance(format_, str) else format_

    def texts(self, format_: str = "csv") -> list[Texts]:
        """What the ranks' visible files of a format hold; no step may be in two of them."""
        directories = rank_directories(self.base)
        assert len(directories) == len(self._ranks())
        return [TEXTS[format_](directory) for directory in directories]

    def _ranks(self) -> range:
        return range(self.ranks or 1)


def texts(directory: Path) -> Texts:
    found: Texts = {}
    for path in directory.glob("*.csv"):
        rows = CsvRows.read(path)
        assert rows is not None, path.name
        kind = path.name.rsplit("_", 1)[0]
        steps = {step: rows.rows_of(step) for step in rows.steps.tolist()}
        assert not [step for step in steps if (kind, step) in found]
        found |= {(kind, step): text for step, text in steps.items()}
        assert found.setdefault((kind, -1), rows.header) == rows.header
    return found


def rows(directory: Path, suffix: str) -> Texts:
    """Of a format with all kinds in one file."""
    found: Texts = {}
    for path in directory.glob(f"*{suffix}"):
        by_step: dict[int, list[Any]] = {}
        for row in (read_hdf5(path) if suffix == ".h5" else read_table(path)).to_pylist():
            by_step.setdefault(row["step"], []).append(row)
        assert not [step for step in by_step if ("", step) in found]
        found |= {("", step): repr(rows).encode() for step, rows in by_step.items()}
    return found


TEXTS = {"csv": texts, "hdf5": partial(rows, suffix=".h5"), "parquet": partial(rows, suffix=".parquet")}


def delivered(run: Started) -> int:
    said = re.findall(r"^delivered (\d+)$", run.end().out, re.MULTILINE)
    return int(said[-1]) if said else 0


def interrupt(runs: list[Started], start: int, moments: random.Random) -> int:
    """Kill all ranks at a random moment, mostly while they write; up to which step the recordings of all must be there."""
    told = start + 3 - start % 3
    if told <= STEPS and moments.random() < 0.8:
        runs[0].wait_for(f"delivered {told}")
    time.sleep(moments.uniform(0.0, 0.12))
    for one in runs:
        if one.child.poll() is None:  # a rank whose peer is gone may have ended by itself
            one.send(signal.SIGKILL)
    return min(delivered(one) for one in runs)


def assert_same(job: Job, whole: Job, missing: set[int]) -> None:
    """In each format all steps, none twice, each as in the run that no one interrupted; ``missing`` may be missing, and
    are then missing of every kind. The manifest tells which are.
    """
    steps: list[dict[str, set[int]]] = [{} for _ in rank_directories(job.base)]
    for format_ in job.formats:
        for rank, (found, expected) in enumerate(zip(job.texts(format_), whole.texts(format_), strict=True)):
            absent = {step for _, step in expected.keys() - found.keys()}
            assert absent <= missing, f"rank {rank}"
            assert found == {key: text for key, text in expected.items() if key[1] not in absent}, f"rank {rank}"
            steps[rank][format_] = {step for _, step in found if step >= 0}
    for directory, held in zip(rank_directories(job.base), steps, strict=True):
        assert_told(directory, held, missing)


def assert_told(directory: Path, held: dict[str, set[int]], missing: set[int]) -> None:
    """The manifest says which steps every format has, and which of them only some have."""
    manifest = Recorded(directory).manifest()
    assert manifest.closed
    assert hidden(directory) == []
    written, abandoned = set(listed(manifest.steps.written)), set(listed(manifest.steps.abandoned))
    lost = {sink: set(listed(*causes.values())) for sink, causes in manifest.lost.items()}
    everywhere, somewhere = set.intersection(*held.values()), set.union(*held.values())
    # A step that the run before was killed in may still be there from the one before that, and is marked.
    assert written | abandoned | set().union(*lost.values()) == somewhere
    assert written <= everywhere
    for format_, steps in held.items():
        assert (lost.get(format_, set()) | abandoned) >= somewhere - steps
        assert not lost.get(format_, set()) & steps
    assert abandoned | set(listed(*manifest.dropped.values())) | set().union(*lost.values()) <= missing - written


BOTH = ["csv", "hdf5"]
EXACT = ["hdf5", "parquet"]


@pytest.mark.parametrize(
    ("ranks", "steps_per_record", "jobs", "format_"),
    sampled(
        [
            (0, 1, 1, "csv"),
            (0, 5, 2, "csv"),
            (0, 5, 1, "hdf5"),
            (0, 5, 1, "parquet"),
            (0, 5, 1, BOTH),
            (0, None, 1, BOTH),  # records of one step, and of a hundred
            (2, 4, 2, "csv"),
            (2, 4, 1, "hdf5"),
            (2, 4, 1, BOTH),
            (2, 4, 1, EXACT),
        ],
        5,
        9,
    ),
    ids=str,
)
def test_a_run_that_was_killed_twice_and_resumed_has_recorded_what_an_uninterrupted_run_has(
    launcher: Launcher, ranks: int, steps_per_record: int | None, jobs: int, format_: str | list[str]
) -> None:
    config = CONFIG | {"format": format_} | ({"step_count_per_record": steps_per_record} if steps_per_record else {})
    whole = Job(launcher, launcher.base / "whole", config, ranks)
    whole.run(0)
    moments = random.Random(17 * ranks + (steps_per_record or 0))
    for number in range(jobs):
        job = Job(launcher, launcher.base / f"{number}", config, ranks)
        start, missing = 0, set[int]()
        for _ in range(2):
            there = interrupt(job.start(start, STEPS, "waits"), start, moments)
            reached = max(start, job.checkpointed())
            lost = set(range(max(start, there), reached))
            start = reached if moments.random() < 0.5 else moments.randint(0, reached)
            missing = {step for step in missing | lost if step < start}
        job.run(start)
        assert_same(job, whole, missing)


def test_one_of_four_ranks_is_killed_and_the_files_of_all_are_whole_and_can_be_gone_on_with(launcher: Launcher) -> None:
    config = CONFIG | {"step_count_per_record": 4}
    whole, job = (Job(launcher, launcher.base / name, config, ranks=4) for name in ("whole", "job"))
    whole.run(0, 12)
    runs = job.start(0, 10_000)
    runs[2].wait_for("delivered 6")
    runs[2].send(signal.SIGKILL)
    assert [one.end().status for one in runs] == [1, 1, -signal.SIGKILL, 1]
    for rank, (found, directory) in enumerate(zip(job.texts(), rank_directories(job.base), strict=True)):
        assert {("actv", step) for step in range(4)} <= found.keys()
        assert Recorded(directory).manifest().closed == (rank != 2)
        assert (hidden(directory) == []) == (rank != 2)
    job.run(6, 12)
    # What lies beyond is of the run that was killed, and stays until it is written again. Of step 6 and those behind it not the
    # same text: a new process begins with other buckets, in which sums over four ranks are rounded otherwise.
    for found, expected in zip(job.texts(), whole.texts(), strict=True):
        assert {key for key in found if key[1] < 12} == expected.keys()
        assert all(text == found[key] for key, text in expected.items() if key[1] < 6)
    assert len({Recorded(directory).manifest().job_id for directory in rank_directories(job.base)}) == 1


def test_fault_20_without_a_directory_in_the_range_a_new_one_is_begun_which_is_said_once(launcher: Launcher) -> None:
    job = Job(launcher, launcher.base / "job", CONFIG | {"append_output": ["Feb29_01-02-03", "Feb29_01-02-03"]})
    (said,) = job.run(0, 3)
    assert said.count("append_output: this rank has no directory from Feb29_01-02-03 to Feb29_01-02-03") == 1
    (directory,) = rank_directories(job.base)
    assert listed(Recorded(directory).manifest().steps.written) == [0, 1, 2]
    assert {step for _, step in texts(directory)} == {-1, 0, 1, 2}


def test_fault_20_steps_that_are_recorded_again_are_not_doubled_whatever_else_is_asked_for_now(launcher: Launcher) -> None:
    """Other columns, fewer kinds, other records: of the steps that are written again nothing old is left."""
    job = Job(launcher, launcher.base / "job", CONFIG | {"step_count_per_record": 4})
    job.run(0, 12)
    job.run(5, 9, ops=["norm", "max"], param_distribution=False, step_count_per_record=3)
    (directory,) = rank_directories(job.base)
    recorded = Recorded(directory)
    assert sorted(recorded.kinds["actv"]) == list(range(12))
    assert sorted(recorded.kinds["param_origin"]) == [0, 1, 2, 3, 4, 9, 10, 11]
    assert {len(rows) for rows in recorded.kinds["actv"].values()} == {len(recorded.kinds["actv"][0])}
    assert ["min" in recorded.kinds["actv"][step][0] for step in range(12)] == [step < 5 or step > 8 for step in range(12)]
    manifest = recorded.manifest()
    assert (listed(manifest.steps.written), listed(manifest.steps.abandoned)) == (list(range(9)), [9, 10, 11])
    assert (manifest.first_step, [run.first_step for run in manifest.resumed], manifest.closed) == (5, [0], True)


@pytest.mark.parametrize(("before", "after"), [("csv", "hdf5"), ("hdf5", "parquet"), ("parquet", "csv")])
def test_a_run_that_continues_in_another_format_leaves_the_files_of_the_one_before_in_order(
    launcher: Launcher, before: str, after: str
) -> None:
    """What a killed run left is recovered though it is not written any more, and its steps count as written."""
    job = Job(launcher, launcher.base / "job", CONFIG | {"step_count_per_record": 50, "format": before})
    (first,) = job.start(0, 6, "waits")
    first.wait_for("waits")
    first.send(signal.SIGKILL)
    assert first.end().status == -signal.SIGKILL
    for start, steps in ((6, 9), (9, 12)):
        job.run(start, steps, format=after)
    (directory,) = rank_directories(job.base)
    assert hidden(directory) == []
    held = {format_: {step for _, step in TEXTS[format_](directory) if step >= 0} for format_ in TEXTS}
    assert (held[before], held[after]) == (set(range(6)), set(range(6, 12)))
    assert listed(Recorded(directory).manifest().steps.written) == list(range(12))


def test_of_two_jobs_at_once_the_second_begins_a_directory_of_its_own_and_says_so(launcher: Launcher) -> None:
    job = Job(launcher, launcher.base / "job", CONFIG)
    (first,) = job.start(0, 3, "waits")
    first.wait_for("waits")
    (directory,) = rank_directories(job.base)
    ended = launcher.run("resumable.py", job.checkpoints, 3, 6, config=CONFIG, base=job.base)
    assert f"another process, or this one, is writing {directory.name}" in ended.err
    first.send(signal.SIGKILL)
    assert first.end().status == -signal.SIGKILL
    steps = {path == directory: {step for _, step in texts(path)} for path in rank_directories(job.base)}
    assert steps == {True: {-1, 0, 1, 2}, False: {-1, 3, 4, 5}}


def test_a_killed_process_does_not_keep_its_directory_though_a_child_of_its_lives_on(launcher: Launcher) -> None:
    job = Job(launcher, launcher.base / "job", CONFIG)
    (run,) = job.start(0, STEPS, "forks")
    run.wait_for("delivered 3")
    child = int((job.checkpoints / "child").read_text())
    run.send(signal.SIGKILL)
    assert run.end().status == -signal.SIGKILL
    try:
        job.run(3, 6)
    finally:
        os.kill(child, signal.SIGKILL)
    (directory,) = rank_directories(job.base)
    assert listed(Recorded(directory).manifest().steps.written) == list(range(6))


@pytest.mark.parametrize("format_", sampled(["csv", "hdf5", "parquet"]))
def test_steps_between_a_kill_and_the_step_that_is_resumed_at_are_dropped_and_the_merge_exits_1(
    launcher: Launcher, format_: str
) -> None:
    config = CONFIG | {"format": format_, "step_count_per_record": 5}
    whole, job = Job(launcher, launcher.base / "whole", config), Job(launcher, launcher.base / "killed", config)
    whole.run(0)
    (run,) = job.start(0, 15, "waits")  # otherwise it may have ended by itself before it is killed
    run.wait_for("delivered 6")
    run.send(signal.SIGKILL)
    run.end()
    shutil.copytree(whole.checkpoints, job.checkpoints, dirs_exist_ok=True)
    (said,) = job.run(16)
    (directory,) = rank_directories(job.base)
    manifest = Recorded(directory).manifest()
    written = listed(manifest.steps.written)
    assert listed(manifest.dropped[KILLED]) == [step for step in range(max(written) + 1) if step not in written]
    assert len(listed(manifest.dropped[KILLED])) >= 1
    assert "did not end cleanly" in said
    assert "The killed run had not written step" in said
    outcome = CliRunner().invoke(merge_command, [str(job.base)])
    assert outcome.exit_code == 1
    assert KILLED in outcome.output


def test_a_merge_names_a_run_that_was_killed_and_exits_1(launcher: Launcher) -> None:
    job = Job(launcher, launcher.base / "job", CONFIG | {"format": "csv"})
    (run,) = job.start(0, 15)
    run.wait_for("delivered 6")
    run.send(signal.SIGKILL)
    run.end()
    outcome = CliRunner().invoke(merge_command, [str(job.base)])
    assert outcome.exit_code == 1
    assert "not ended cleanly" in outcome.output


RowKey = tuple[Any, ...]


def rows_of(run: OpenedRun, kind: str, *, per_rank: bool) -> dict[RowKey, dict[str, Any]]:
    """By what identifies a row, which no two rows share."""
    rows = run.rows(kind, per_rank=per_rank).to_pylist()
    found = {(row["step"], row["rank" if per_rank else "ranks"], row["name"], row["micro_step"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def said_to_be_missing(told: dict[str, Any]) -> set[int]:
    """Steps, of any rank and kind."""
    ranges = [one for what in ("dropped", "gaps") for entry in told[what]["listed"] for one in entry["steps"]["ranges"]]
    after = [range(entry["after"] + 1, STEPS) for entry in told["not_closed"]["listed"]]
    return {
        step for steps in (*(range(first, last + 1, interval) for first, last, interval in ranges), *after) for step in steps
    }


@pytest.mark.parametrize("format_", sampled(["parquet", "hdf5", "csv"]))
def test_five_kills_and_requeues_with_auto_are_one_line_of_steps(launcher: Launcher, format_: str) -> None:
    """The numbers are those of a run that nothing interrupted. What a kill lost is missing, and the merge says so."""
    config = CONFIG | {"append_output": "auto", "format": format_, "step_count_per_record": 4}
    whole, job = (Job(launcher, launcher.base / name, config, ranks=2) for name in ("whole", "job"))
    whole.run(0)
    moments = random.Random(format_)
    starts = [0]
    for _ in range(5):
        interrupt(job.start(starts[-1], STEPS, "waits"), starts[-1], moments)
        reached = max(starts[-1], job.checkpointed())
        starts.append(reached if moments.random() < 0.5 else moments.randint(reached // 2, reached))
    job.run(starts[-1])
    told, _ = (merge(Wanted(one.base, one.base / "merged")).told() for one in (job, whole))
    lost = said_to_be_missing(told)
    assert lost <= {step for before, after in itertools.pairwise([*starts, STEPS]) for step in range(before, after)}
    assert {one["step"] for one in told["joints"]["listed"]} <= set(starts)
    assert len(rank_directories(job.base)) <= 2 * starts.count(0)
    for name in ("", "merged"):
        ours, theirs = open_run(job.base / name), open_run(whole.base / name)
        for kind in theirs.kinds:
            for per_rank in (True, False) if name else (True,):
                expected, found = (rows_of(one, kind, per_rank=per_rank) for one in (theirs, ours))
                whole_steps = [{key: row for key, row in rows.items() if key[0] not in lost} for rows in (found, expected)]
                assert whole_steps[0] == whole_steps[1]
                assert not per_rank or all(expected[key] == row for key, row in found.items())


def test_without_append_output_the_same_command_requeued_after_a_kill_is_one_line_of_steps(launcher: Launcher) -> None:
    config = CONFIG | {"append_output": [], "format": "parquet", "step_count_per_record": 1}
    job = Job(launcher, launcher.base / "job", config, ranks=2)
    runs = job.start(0)
    for one in runs:
        one.wait_for("delivered 6")
        one.send(signal.SIGKILL)
    assert [one.end().status for one in runs] == [-signal.SIGKILL] * 2
    job.run(4, 10)
    run = open_run(job.base)
    rows = rows_of(run, "grad_reduced", per_rank=True)
    assert {(step, rank) for step, rank, *_ in rows} == {(step, rank) for step in range(10) for rank in run.ranks}
    told = merge(Wanted(job.base, job.base / "merged")).told()
    (joint,) = told["joints"]["listed"]
    assert (joint["step"], told["not_closed"]["count"]) == (4, 0)
