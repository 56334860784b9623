"""What a killed process leaves is recovered, wherever it was killed: here, in place of each call that reaches the disk."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
from evidence import examples
from killed_disk import killed_after
from sink_rows import Measured, Rank, visible

from monitor.sinks import recovery_of
from monitor.sinks.csv import CsvSink, read_csv
from monitor.sinks.csv_files import held as held_steps, recover
from monitor.sinks.files import RecoveredFiles, StepSpan, recover_all

PER_RECORD = 3
STEPS = 6
RESUMED = 1
BEGUN = 2
"""When the later run began, in nanoseconds."""

EVERY = examples(2, 1)
"""The calls to the disk of which one is the last."""

LATEST = 2**62
"""A time after which nothing was written."""


def rows(step: int, run: str) -> dict[str, list[Measured]]:
    """Of two kinds always, of a third one from step 1 on; values tell one run's from another's. One name is of two lines."""
    value = [float(step), 0.25 if run == "later" else 0.5]
    kinds = {"actv": [Measured("two\nlines", value, 0), Measured("b", value, 1)], "grad_reduced": [Measured("w", value)]}
    return kinds | ({"exp_avg": [Measured("w", value)]} if step else {})


def write(sink: CsvSink, rank: Rank, step: int, run: str, ops: tuple[str, ...] = ("min", "norm")) -> None:
    """The earlier run has a kind that the later one has not."""
    kinds = rows(step, run) | ({"param_origin": [Measured("w", [1.0])]} if run == "earlier" else {})
    sink.write(rank.step(step, kinds, ops))


def held(directory: Path) -> dict[int, tuple[set[str], set[float]]]:
    """Of each step the kinds that are there, and the least values, which tell of the run. Nothing is there twice."""
    found: dict[int, tuple[set[str], set[float]]] = {}
    seen = set()
    for name in (name for name in visible(directory) if name.endswith(".csv")):
        kind = name.rsplit("_", 1)[0]
        for row in read_csv(directory / name).to_pylist():
            key = (kind, row["step"], row["name"], row.get("micro_step"))
            assert key not in seen, name
            seen.add(key)
            kinds, least = found.setdefault(row["step"], (set(), set()))
            kinds.add(kind)
            least.add(row["min"])
    return found


def of_earlier_run(step: int) -> tuple[set[str], set[float]]:
    return set(rows(step, "earlier")) | {"param_origin"}, {min(step, 0.5), 1.0}


def of_later_run(step: int) -> tuple[set[str], set[float]]:
    return set(rows(step, "later")), {min(step, 0.25)}


def earlier_run(directory: Path, ops: tuple[str, ...]) -> Rank:
    """All steps; files that have not changed since are from before the later run."""
    rank = Rank(directory, PER_RECORD)
    sink = CsvSink(rank.context)
    for step in range(STEPS):
        write(sink, rank, step, "earlier", ops)
    sink.close()
    for path in directory.iterdir():
        os.utime(path, ns=(1, 1))
    return rank


def later_run(rank: Rank, calls: float, monkeypatch: pytest.MonkeyPatch) -> tuple[int, bool]:
    """From ``RESUMED`` on, killed after so many calls; the last step that it finished, and whether it came to its end."""
    finished = RESUMED - 1
    with killed_after(calls, monkeypatch) as disk:
        sink = CsvSink(rank.context)
        for step in range(RESUMED, STEPS):
            write(sink, rank, step, "later")
            finished = step
        sink.close()
    return finished, disk.left >= 0


def assert_recovered(out: Path, finished: int) -> None:
    found = held(out)
    for step in range(STEPS):
        may_be = [of_later_run(step)] if RESUMED <= step <= finished + 1 else []
        if step > finished or step < RESUMED:
            may_be.append(of_earlier_run(step))
        if step > finished:
            may_be.append((set(), set()))  # of a record that is written again, what came after is gone
        assert found.get(step, (set(), set())) in may_be, step
    assert [name for name in os.listdir(out) if name.startswith(".")] == []


@pytest.mark.parametrize("earlier_ops", [("min", "norm"), ("min", "max")], ids=["same-columns", "other-columns"])
def test_wherever_a_resumed_process_is_killed_every_step_that_it_finished_is_there_and_none_is_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier_ops: tuple[str, ...]
) -> None:
    for calls in count(step=EVERY):
        out = tmp_path / f"{calls}"
        rank = earlier_run(out, earlier_ops)
        finished, ended = later_run(rank, calls, monkeypatch)
        recover(out, STEPS - 1, LATEST, BEGUN)
        assert_recovered(out, finished)
        again = CsvSink(rank.context)
        for step in range(finished + 1, STEPS):
            write(again, rank, step, "later")
        again.close()
        assert held(out) == {step: of_later_run(step) if step >= RESUMED else of_earlier_run(step) for step in range(STEPS)}
        if ended:
            break
    assert calls > 50


@pytest.mark.parametrize("calls", [35, 50, 65])
def test_wherever_the_recovery_is_killed_another_one_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    for recovering in count(step=EVERY):
        out = tmp_path / f"{recovering}"
        finished, _ = later_run(earlier_run(out, ("min", "max")), calls, monkeypatch)
        with killed_after(recovering, monkeypatch) as disk:
            recover(out, STEPS - 1, LATEST, BEGUN)
        recover(out, STEPS - 1, LATEST, BEGUN)
        assert_recovered(out, finished)
        if disk.left >= 0:
            break


def test_a_step_that_was_not_finished_is_cut_off_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, PER_RECORD)
    with killed_after(float("inf"), monkeypatch) as disk:
        sink = CsvSink(rank.context)
        write(sink, rank, 0, "later")
        disk.left = 1  # the first kind of step 1, and a half of the second
        write(sink, rank, 1, "later")
    assert recover(tmp_path, -1, 0, 0) == RecoveredFiles({StepSpan(0, 2)}, {1}, [])
    assert set(held(tmp_path)) == held_steps(tmp_path, StepSpan(0, 2)) == {0}


@pytest.mark.parametrize(
    ("earlier", "there", "missing"), [(True, set(range(STEPS)), set()), (False, {0}, {1})], ids=["of-an-earlier-run", "of-none"]
)
def test_a_step_that_was_cut_off_is_missing_unless_a_visible_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool, there: set[int], missing: set[int]
) -> None:
    rank = earlier_run(tmp_path, ("min", "norm")) if earlier else Rank(tmp_path, PER_RECORD)
    with killed_after(float("inf"), monkeypatch) as disk:
        sink = CsvSink(rank.context)
        write(sink, rank, 0, "earlier")  # the rows that the earlier run has of it
        disk.left = 1  # the first kind of step 1, and a half of the second
        write(sink, rank, 1, "earlier")
    found = recover_all(tmp_path, {"csv": recovery_of("csv")}, ["csv"], 0, -1, 0, BEGUN)
    assert (found.held, found.cut) == ({"csv": there}, missing)


def test_parts_of_which_one_is_damaged_are_set_aside_together(tmp_path: Path) -> None:
    rank = Rank(tmp_path, PER_RECORD)
    sink = CsvSink(rank.context)
    for step in range(5):
        write(sink, rank, step, "later")
    part = tmp_path / ".actv_3-5.csv.part"
    part.write_bytes(part.read_bytes()[:60] + b"\0" * 40)
    whole = (tmp_path / ".grad_reduced_3-5.csv.part").read_bytes()
    recovered = recover(tmp_path, 4, LATEST, 0)
    assert {"actv_3-5.csv.damaged", "exp_avg_3-5.csv.damaged", "grad_reduced_3-5.csv.damaged"} == {
        path.name for path in recovered.aside
    }
    assert (tmp_path / "grad_reduced_3-5.csv.damaged").read_bytes() == whole
    assert recovered.ranges == {StepSpan(3, 5)}
    assert set(held(tmp_path)) == {0, 1, 2}


def test_what_is_set_aside_never_replaces_what_was(tmp_path: Path) -> None:
    (tmp_path / "actv_0-2.csv.damaged").write_text("of an earlier crash")
    (tmp_path / ".actv_0-2.csv.part").write_text("not ours")
    (aside,) = recover(tmp_path, -1, 0, 0).aside
    assert (aside.name, aside.read_text()) == ("actv_0-2.csv.damaged.2", "not ours")


def test_a_part_that_was_just_begun_goes(tmp_path: Path) -> None:
    (tmp_path / ".actv_0-2.csv.part").write_bytes(b"")
    assert recover(tmp_path, -1, 0, 0) == RecoveredFiles({StepSpan(0, 2)}, set(), [])
    assert list(tmp_path.iterdir()) == []
