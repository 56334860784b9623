"""Identifiers of batches are written as they are, in bounded files, and survive kills."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monitor.coordinator import batches
from monitor.coordinator.batches import BATCHES_FILE, MOST_IN_A_STEP, OLDER_FILE, BatchNotes, read_batches


def notes(directory: Path) -> BatchNotes:
    made = BatchNotes()
    made.directory = directory
    return made


def look(made: BatchNotes, step: int) -> None:
    rows: Any = SimpleNamespace(step=step)
    made.look(rows)


def test_each_call_of_a_step_has_its_list(tmp_path: Path) -> None:
    made = notes(tmp_path)
    for step, given in ((0, "shard-7:1234"), (0, [5, np.int32(6)]), (1, ("a", 2**70))):
        made.note(step, given)
    look(made, 0)
    assert read_batches(tmp_path, {0, 1}) == {0: [["shard-7:1234"], [5, 6]]}
    made.close()
    assert read_batches(tmp_path, {1}) == {1: [["a", hex(2**70)]]}


@pytest.mark.parametrize("given", [1.5, None, True, {"a": 1}, [["nested"]], object(), np.zeros(2)])
def test_what_is_no_identifier_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes a whole number, a text"):
        notes(tmp_path).note(0, given)


def test_a_part_of_a_line_hides_no_other_line(tmp_path: Path) -> None:
    made = notes(tmp_path)
    made.note(0, 7)
    look(made, 0)
    with (tmp_path / BATCHES_FILE).open("ab") as file:
        file.write(b'{"step": 1, "batc')
    assert read_batches(tmp_path, {0, 1}) == {0: [[7]]}
    resumed = notes(tmp_path)
    resumed.note(1, 8)
    resumed.close()
    assert read_batches(tmp_path, {0, 1}) == {0: [[7]], 1: [[8]]}


def test_of_a_step_that_was_done_again_the_last_run_counts(tmp_path: Path) -> None:
    for given in ("first", "again"):
        made = notes(tmp_path)
        made.note(4, given)
        made.close()
    assert read_batches(tmp_path, {4}) == {4: [["again"]]}


def test_the_files_are_bounded_and_keep_the_newest_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_BYTES", 1000)
    made = notes(tmp_path)
    for step in range(200):
        made.note(step, f"shard:{step}")
        look(made, step)
    assert all((tmp_path / name).stat().st_size <= 1000 for name in (BATCHES_FILE, OLDER_FILE))
    kept = sorted(read_batches(tmp_path, range(200)))
    assert len(kept) > 20
    assert kept == list(range(kept[0], 200))


def test_identifiers_beyond_a_bound_are_counted(tmp_path: Path) -> None:
    made = notes(tmp_path)
    made.note(0, list(range(MOST_IN_A_STEP - 1)))
    made.note(0, ["x" * 10_000, "left out", "left out"])
    made.note(0, ["left out"])
    made.close()
    assert read_batches(tmp_path, {0}) == {0: [list(range(MOST_IN_A_STEP - 1)), ["x" * batches.MOST_CHARACTERS]]}
    assert '"more": 3' in (tmp_path / BATCHES_FILE).read_text()


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "batches": [[1.5]]}',
        "[]",
        '{"step": 2}',
        '{"step": 3, "batches": 4}',
        '{"step": 5, "batches": [[6]]}',
    ]
    (tmp_path / BATCHES_FILE).write_bytes(b"\xff\n" + "\n".join([*lines, ""]).encode())
    assert read_batches(tmp_path, range(9)) == {5: [[6]]}
    assert read_batches(tmp_path / "absent", range(9)) == {}
