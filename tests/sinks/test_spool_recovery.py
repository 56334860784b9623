"""What a killed process leaves is recovered, wherever it was killed: here, in place of each call to the disk."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
from evidence import examples, sampled
from killed_disk import killed_after
from sink_rows import Measured, Rank
from spool_forms import FORMS, Form, read

from monitor.sinks.spool import SpooledSink

PER_RECORD = 3
STEPS = 6
RESUMED = 1
EVERY = examples(2, 1)
"""The calls to the disk of which one is the last."""


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


def write(sink: SpooledSink, rank: Rank, step: int, run: float) -> None:
    """Values tell one run's from another's."""
    kinds = {"actv": [Measured("a", [run], 0), Measured("b", [run], 1)], "grad_reduced": [Measured("w", [run])]}
    sink.write(rank.step(step, kinds))


def held(directory: Path) -> dict[int, list[float]]:
    """The values of each step, which must be in one file."""
    found: dict[int, list[float]] = {}
    for path in directory.glob("metrics_*"):
        table = read(path)
        steps = set(table["step"].to_pylist())
        assert not steps & found.keys()
        for row in table.to_pylist():
            found.setdefault(row["step"], []).append(row["max"])
    return found


def runs(form: Form, out: Path, calls: float, monkeypatch: pytest.MonkeyPatch, flushes: bool) -> tuple[Rank, int, bool]:
    """One of all steps, and another from ``RESUMED`` on that is killed after so many calls; the last step that it finished."""
    rank = Rank(out, PER_RECORD)
    earlier = form.sink(rank.context)
    for step in range(STEPS):
        write(earlier, rank, step, 1.0)
    finished = RESUMED - 1
    with killed_after(calls, monkeypatch) as disk:
        sink = form.sink(rank.context)
        for step in range(RESUMED, STEPS):
            write(sink, rank, step, 2.0)
            finished = step
            if flushes:
                sink.flush()
        sink.close()
    return rank, finished, disk.left >= 0


def assert_recovered(out: Path, finished: int) -> None:
    found = held(out)
    for step in range(STEPS):
        old, new, gone = [1.0] * 3, [2.0] * 3, None
        may_be = [old] if step < RESUMED else [new] if step <= finished else [old, gone]
        assert found.get(step) in ([*may_be, new] if step == finished + 1 else may_be), step
    assert [name for name in os.listdir(out) if not name.startswith("metrics_")] == []


@pytest.mark.parametrize("flushes", [False, True])
def test_wherever_a_resumed_process_is_killed_every_step_that_it_finished_is_there_and_none_is_mixed(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushes: bool
) -> None:
    for calls in count(step=EVERY):
        out = tmp_path / f"{calls}"
        rank, finished, ended = runs(form, out, calls, monkeypatch, flushes)
        form.module.recover(out, -1, 0, 0)
        assert_recovered(out, finished)
        again = form.sink(rank.context)
        for step in range(finished + 1, STEPS):
            write(again, rank, step, 2.0)
        again.close()
        assert held(out) == {step: [2.0 if step >= RESUMED else 1.0] * 3 for step in range(STEPS)}
        if ended:
            break
    assert calls > 15


@pytest.mark.parametrize("calls", sampled(range(1, 16, 2), 0, 3, 6))
def test_wherever_the_recovery_is_killed_another_one_completes_it(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    for recovering in count(step=EVERY):
        out = tmp_path / f"{recovering}"
        _, finished, _ = runs(form, out, calls, monkeypatch, flushes=False)
        with killed_after(recovering, monkeypatch) as disk:
            form.module.recover(out, -1, 0, 0)
        form.module.recover(out, -1, 0, 0)
        assert_recovered(out, finished)
        if disk.left >= 0:
            break


def test_a_step_with_a_damaged_byte_is_cut_off_with_those_after_it(form: Form, tmp_path: Path) -> None:
    """A crash of the machine may leave a file of the right length with bytes that were never written."""
    rank = Rank(tmp_path / "killed", PER_RECORD + 1)
    sink, ends = form.sink(rank.context), []
    for step in range(PER_RECORD):
        write(sink, rank, step, 1.0)
        (part,) = (tmp_path / "killed").glob(".*.part")
        ends.append(part.stat().st_size)
    whole = part.read_bytes()
    for place in range(ends[0], ends[1], 97):
        out = tmp_path / f"{place}"
        out.mkdir()
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (out / part.name).write_bytes(damaged)
        form.module.recover(out, -1, 0, 0)
        assert held(out) == {0: [1.0] * 3}, place
    sink.close()
