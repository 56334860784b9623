"""Old steps are removed from files that are whole at every moment, and the sink knows how many bytes its files have."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from evidence import examples
from killed_disk import killed_after
from sink_rows import Measured, Rank
from spool_forms import read as read_spooled

from monitor.sinks import make_sink, recovery_of
from monitor.sinks.csv import read_csv
from monitor.sinks.files import ALL_STEPS
from monitor.sinks.protocol import ThinnableSink

FORMATS = ("csv", "hdf5", "parquet")
STEPS = 12
GONE = (1, 3, 5, 6, 7)
EVERY = examples(1, 1)

formats = pytest.mark.parametrize("name", FORMATS)
records = pytest.mark.parametrize("per_record", [1, 4])


def kinds(step: int) -> dict[str, list[Measured]]:
    return {
        "actv": [Measured("a", [step + 1.0], 0), Measured("b", [step + 1.0], 1)],
        "grad_reduced": [Measured("w", [step + 1.0])],
    }


def rows_in(path: Path) -> list[dict[str, Any]]:
    return (read_csv(path) if path.suffix == ".csv" else read_spooled(path)).to_pylist()


def values_of(directory: Path) -> dict[int, list[float]]:
    """By step the greatest values of all rows in visible files."""
    found: dict[int, list[float]] = {}
    for path in sorted(directory.glob("[!.]*_*-*")):
        for row in rows_in(path):
            found.setdefault(row["step"], []).append(row["max"])
    return found


def recorded(directory: Path, name: str, per_record: int) -> tuple[Rank, Any]:
    rank = Rank(directory, per_record)
    sink = make_sink(name, rank.context)
    for step in range(STEPS):
        sink.write(rank.step(step, kinds(step)))
    return rank, sink


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


@formats
@records
def test_the_other_steps_keep_all_their_rows(tmp_path: Path, name: str, per_record: int) -> None:
    _, sink = recorded(tmp_path, name, per_record)
    before = values_of(tmp_path)
    sink.remove(GONE)
    assert values_of(tmp_path) == {step: values for step, values in before.items() if step not in GONE}
    assert all(len(values) == 3 for values in before.values())
    assert len(before) == STEPS


@formats
@records
def test_the_sink_counts_every_byte_of_its_files(tmp_path: Path, name: str, per_record: int) -> None:
    rank = Rank(tmp_path, per_record)
    sink = make_sink(name, rank.context)
    assert isinstance(sink, ThinnableSink)
    for step in range(STEPS):
        sink.write(rank.step(step, kinds(step)))
        assert sink.grown == size_of(tmp_path)
    sink.write(rank.step(STEPS, kinds(STEPS)))
    sink.flush()
    sink.write(rank.step(STEPS + 1, kinds(STEPS + 1)))  # carries over what was flushed
    sink.remove(GONE)
    sink.remove(GONE)
    sink.flush()
    assert sink.grown == size_of(tmp_path)
    sink.write(rank.step(STEPS, kinds(3)))  # is done again
    sink.close()
    assert sink.grown == size_of(tmp_path)


@formats
@records
def test_wherever_the_process_is_killed_every_file_is_whole_and_a_second_attempt_removes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, per_record: int
) -> None:
    for calls in count(step=EVERY):
        out = tmp_path / f"{calls}"
        rank, sink = recorded(out, name, per_record)
        sink.flush()
        before = values_of(out)
        with killed_after(calls, monkeypatch) as disk:
            sink.remove(GONE)
        found = values_of(out)
        for step, values in before.items():
            assert found.get(step) == values if step not in GONE else set(found.get(step, [])) <= set(values)
        recovery = recovery_of(name)
        assert recovery is not None
        recovery.recover(out, STEPS - 1, 2**62, 2**62)
        assert [entry for entry in os.listdir(out) if entry.startswith(".")] == []
        again = make_sink(name, rank.context)
        assert isinstance(again, ThinnableSink)
        again.remove(GONE)
        assert recovery.held(out, ALL_STEPS) == set(range(STEPS)) - set(GONE)
        if disk.left >= 0:
            assert calls
            return


@formats
def test_files_of_other_programs_stay(tmp_path: Path, name: str) -> None:
    _, sink = recorded(tmp_path, name, 1)
    foreign = {
        tmp_path / name: b"not ours" for name in ("actv_1-1.5.csv", "mine_1-1.csv", "metrics_1-1.2.h5", "metrics_1-1.2.parquet")
    }
    for path, content in foreign.items():
        path.write_bytes(content)
    sink.remove(GONE)
    assert {path: path.read_bytes() for path in foreign} == foreign
