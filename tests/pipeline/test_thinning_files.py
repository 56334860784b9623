"""If the journal has steps removed, every sink removes them. After a failure the same steps are tried again."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path

from pipeline_parts import FileJournal, RecordSink, pipeline_of, record, steps_in

from monitor.failures import Failures


class BoundedJournal(FileJournal):
    """Has the step before the newest five removed once they are written, as if a step were a byte."""

    is_bounded = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self._pending: tuple[int, ...] = ()
        self.counts = 0

    def recount(self) -> None:
        self.counts += 1

    def excess(self, grown: int) -> Collection[int]:
        if not self._pending and grown > 5:
            self._pending = (self.entries["written"].pop(0),)
        self.asked.append((grown, self._pending))
        return self._pending

    def removed(self) -> None:
        self._pending = ()


class RemovingSink(RecordSink):
    """A record sink that rewrites its file without the removed steps. ``fails`` counts down."""

    fails = 0

    @property
    def grown(self) -> int:
        return len(steps_in(self.path))

    def remove(self, steps: Collection[int]) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = [step for step in steps_in(self.path) if step not in steps]
        self.path.write_text("".join(f"{step}\n" for step in left))


def test_the_files_stay_within_the_bound_after_every_step(tmp_path: Path) -> None:
    sink, journal = RemovingSink(tmp_path / "steps.txt"), BoundedJournal(tmp_path / "manifest.json")
    pipeline = pipeline_of({"record": sink}, journal)
    for step in range(20):
        assert record(pipeline, step)
    assert pipeline.close()
    assert steps_in(sink.path) == journal.entries["written"] == list(range(15, 20))


def test_a_sink_that_removes_nothing_is_served_all_the_same(tmp_path: Path) -> None:
    sink, other = RemovingSink(tmp_path / "steps.txt"), RecordSink(tmp_path / "other.txt")
    pipeline = pipeline_of({"other": other, "record": sink}, BoundedJournal(tmp_path / "manifest.json"))
    for step in range(8):
        record(pipeline, step)
    assert pipeline.close()
    assert (steps_in(other.path), steps_in(sink.path)) == (list(range(8)), list(range(3, 8)))


def test_steps_that_could_not_be_removed_are_tried_again_and_no_others_are_chosen_before(tmp_path: Path) -> None:
    failures = Failures()
    sink, journal = RemovingSink(tmp_path / "steps.txt"), BoundedJournal(tmp_path / "manifest.json")
    sink.fails = 3
    pipeline = pipeline_of({"record": sink}, journal, failures=failures)
    for step in range(12):
        record(pipeline, step)
    assert pipeline.close()
    assert steps_in(sink.path) == list(range(7, 12))
    assert failures.counts == {"sink 'record': OSError ENOSPC": 3}
    assert [steps for _, steps in journal.asked if steps][:4] == [(0,)] * 4


def test_other_sinks_are_counted_anew(tmp_path: Path) -> None:
    journal = BoundedJournal(tmp_path / "manifest.json")
    pipeline = pipeline_of({"record": RemovingSink(tmp_path / "steps.txt")}, journal)
    record(pipeline, 0)
    pipeline.rearrange(lambda: ({"record": RemovingSink(tmp_path / "others.txt")}, {}))
    assert pipeline.close()
    assert journal.counts == 1
