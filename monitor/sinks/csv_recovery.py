"""Recovers the unfinished files of a killed process in the ``csv`` format: makes their whole steps visible.

In each record, the parts of all kinds agree on the finished steps, and show whether the last step was finished (see
``monitor.sinks.files``). Finished steps get the file names that the process would have given them. An unfinished step is cut
off.

A part may be damaged, for example by a crash of the machine. Then all parts of its record are renamed ``….damaged``, because a
step must be there for all kinds or for none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from monitor.sinks.csv_files import CsvRows, CsvShards, line_ends
from monitor.sinks.files import UNFINISHED, NamedShard, PartialFile, StepSpan, drafts_in, parts_in, shards_in
from monitor.sinks.recovery import RecoveredFiles, changed, checked, is_regular, rename_damaged


class LeftoverPart:
    """A part that a killed process left.

    Attributes:
        finished: The steps marked as finished; None if they are damaged.
        whole: ``finished`` and the unmarked step after them; None if there is no such step, or if it is not whole.
        unfinished: The last step that has a line in ``whole``.
    """

    def __init__(self, named: NamedShard) -> None:
        self.named = named
        text = checked(named.path).read_bytes()
        self._begun = _unfinished_from(text)
        self._first = bytes([text[self._begun] & ~UNFINISHED]) if self._begun < len(text) else b""
        restored = text[: self._begun] + self._first + text[self._begun + 1 :]
        self.finished = self._parsed(text[: self._begun]) if self._begun else CsvRows.nothing(b"")
        self.whole = self._parsed(restored) if self._first else None
        self.unfinished = self._last_line_of(restored) if self._first else None

    def part(self, rows: CsvRows) -> PartialFile:
        """The file as a part that keeps ``rows``."""
        part = PartialFile.left_behind(self.named.path, self._begun, len(rows.text()), self._first)
        part.finish()
        part.keep()
        return part

    def _parsed(self, text: bytes) -> CsvRows | None:
        """The rows; None if they are damaged, not in order, or outside the record."""
        rows = CsvRows.parse(text)
        if rows is None or (rows.steps[1:] < rows.steps[:-1]).any():
            return None
        first, last = rows.first(), rows.last()
        return rows if first is None or last is None or self.named.steps.holds(StepSpan(first, last)) else None

    def _last_line_of(self, restored: bytes) -> int | None:
        end = max(line_ends(restored).tolist(), default=0)
        lines = CsvRows.parse(restored[:end]) if end > self._begun else None
        return None if lines is None else lines.last()


def recover(directory: Path, newest: int, saved_ns: int, begun_ns: int) -> RecoveredFiles:
    """See ``monitor.sinks.recovery.CrashRecovery``."""
    for draft in drafts_in(directory):  # the file that it was to replace is still there
        draft.unlink()
    recovered, records = RecoveredFiles(), defaultdict(list)
    for named in parts_in(directory):
        records[named.steps].append(LeftoverPart(named))
    for record, left in sorted(records.items()):
        _recover_record(directory, record, left, begun_ns, recovered)
    late = (one.steps for one in shards_in(directory) if one.steps.last >= newest and changed(one.path) >= saved_ns)
    recovered.ranges = {*records, *late}
    return recovered


def held(directory: Path, steps: StepSpan) -> set[int]:
    """See ``monitor.sinks.recovery.CrashRecovery``."""
    files = (CsvRows.read(one.path) for one in shards_in(directory) if one.steps.meets(steps) and is_regular(one.path))
    return {step for rows in files if rows is not None for step in np.unique(rows.steps).tolist()}


def _recover_record(
    directory: Path, record: StepSpan, left: list[LeftoverPart], begun_ns: int, recovered: RecoveredFiles
) -> None:
    kept = _agreed(left)
    if kept is None:
        recovered.aside += [rename_damaged(one.named.path) for one in left]
        return
    newest = max((last for rows in kept.values() if (last := rows.last()) is not None), default=-1)
    recovered.cut.update(one.unfinished for one in left if one.unfinished is not None and one.unfinished > newest)
    _make_visible(directory, record, kept, begun_ns)


def _agreed(left: list[LeftoverPart]) -> dict[LeftoverPart, CsvRows] | None:
    """The steps to keep of each part; None if a part is damaged.

    A step that one part marks as finished was written to all parts.
    """
    finished = {one: one.finished for one in left if one.finished is not None}
    newest = max((last for rows in finished.values() if (last := rows.last()) is not None), default=-1)
    agreed = {one: one.whole if one.unfinished == newest else rows for one, rows in finished.items()}
    whole = {one: rows for one, rows in agreed.items() if rows is not None}
    return whole if len(whole) == len(left) else None


def _make_visible(directory: Path, record: StepSpan, kept: Mapping[LeftoverPart, CsvRows], begun_ns: int) -> None:
    shards = CsvShards(directory, record.last - record.first + 1)
    news = [step for one, rows in kept.items() if (step := _news(rows, shards.carried_on(one.named, rows.header))) is not None]
    for one, rows in kept.items():
        if not news or not len(rows.steps):
            one.named.path.unlink()  # a visible file has all its steps
    if news:
        parts = {one.named: (one.part(rows), rows) for one, rows in kept.items() if len(rows.steps)}
        shards.take_up(min(news), parts, lambda path: changed(path) <= begun_ns)


def _news(rows: CsvRows, visible: CsvRows) -> int | None:
    """The first step whose rows differ from the visible ones; None if there is none."""
    steps = sorted(set(rows.steps.tolist()))
    return next((step for step in steps if rows.rows_of(step) != visible.rows_of(step)), None)


def _unfinished_from(text: bytes) -> int:
    """The beginning of the step that is not marked as finished; the end of the text if there is none."""
    begins = np.append(0, line_ends(text))
    begins = begins[begins < len(text)]
    marked = begins[(np.frombuffer(text, np.uint8)[begins] & UNFINISHED) > 0]
    return int(marked[0]) if len(marked) else len(text)
