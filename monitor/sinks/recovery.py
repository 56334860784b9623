"""What a process that was killed left in the making, made visible as far as it is whole.

In each record the parts of all kinds agree on the steps that were finished, and tell whether the last one was (see
``monitor.sinks.parts``). That much of them takes the names that the process would have given them; a step that was not finished
is cut off. If any part of a record is damaged, by a crash of the machine for one, all parts of that record are set aside, since
what some kinds have and others have not is no step.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from monitor.sinks.parts import UNFINISHED, Part
from monitor.sinks.shard_names import Named, Steps, drafts_in, parts_in, shards_in
from monitor.sinks.shards import Shards
from monitor.sinks.written import Written, line_ends


@dataclass(slots=True)
class Recovered:
    """What a directory holds now.

    Attributes:
        found: Of ranges of steps in which files have changed lately, or parts were left, the steps that visible files hold.
        cut: Steps that were cut off, and that no visible file holds.
        aside: Files that were set aside, under their new names.
    """

    found: dict[Steps, set[int]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    aside: list[Path] = field(default_factory=list)


class Left:
    """The part of a process that was killed.

    Attributes:
        finished: The steps that it marks as finished; None if they are damaged.
        whole: The same with the step that it does not mark so; None if there is none, or if it is not whole.
        unfinished: The last step of which ``whole`` would have a line.
    """

    def __init__(self, named: Named) -> None:
        self.named = named
        text = named.path.read_bytes()
        self._begun = _unfinished_from(text)
        self._first = bytes([text[self._begun] & ~UNFINISHED]) if self._begun < len(text) else b""
        restored = text[: self._begun] + self._first + text[self._begun + 1 :]
        self.finished = self._parsed(text[: self._begun]) if self._begun else Written.nothing(b"")
        self.whole = self._parsed(restored) if self._first else None
        self.unfinished = self._last_line_of(restored) if self._first else None

    def part(self, rows: Written) -> Part:
        """The file, of which ``rows`` are to be kept."""
        part = Part.left_behind(self.named.path, self._begun, len(rows.text()), self._first)
        part.finish()
        part.keep()
        return part

    def _parsed(self, text: bytes) -> Written | None:
        """None also where the steps are not those of the record, in order."""
        rows = Written.parse(text)
        if rows is None or (rows.steps[1:] < rows.steps[:-1]).any():
            return None
        first, last = rows.first(), rows.last()
        return rows if first is None or last is None or self.named.steps.holds(Steps(first, last)) else None

    def _last_line_of(self, restored: bytes) -> int | None:
        end = max(line_ends(restored).tolist(), default=0)
        lines = Written.parse(restored[:end]) if end > self._begun else None
        return None if lines is None else lines.last()


def recover(directory: Path, newest: int, saved_ns: int, begun_ns: int) -> Recovered:
    """Make visible what a process that was killed left in ``directory``, and say what is there.

    Args:
        newest: The last step that is known to have been written; -1: none is.
        saved_ns: When that was known, in the time of the file system. Files that have changed since are looked into.
        begun_ns: When that process began to write here. Files that have not changed since are from before.

    Raises:
        OSError: something could not be read or written. What was left is still there, hidden or visible.
    """
    for draft in drafts_in(directory):  # what it was to replace is there
        draft.unlink()
    recovered, records = Recovered(), defaultdict(list)
    for named in parts_in(directory):
        records[named.steps].append(Left(named))
    for record, left in sorted(records.items()):
        _recover_record(directory, record, left, begun_ns, recovered)
    visible = list(shards_in(directory))
    ranges = {*records, *(one.steps for one in visible if one.steps.last >= newest and _changed(one.path) >= saved_ns)}
    held = _held(visible, ranges)
    recovered.found = {steps: {step for step in held if steps.first <= step <= steps.last} for steps in ranges}
    recovered.cut -= held
    return recovered


def _recover_record(directory: Path, record: Steps, left: list[Left], begun_ns: int, recovered: Recovered) -> None:
    kept = _agreed(left)
    if kept is None:
        recovered.aside += [_set_aside(one.named.path) for one in left]
        return
    newest = max((last for rows in kept.values() if (last := rows.last()) is not None), default=-1)
    recovered.cut.update(one.unfinished for one in left if one.unfinished is not None and one.unfinished > newest)
    _make_visible(directory, record, kept, begun_ns)


def _agreed(left: list[Left]) -> dict[Left, Written] | None:
    """The steps that every kind has that should. A step that one part marks as finished was written to all of them.

    None if a part is damaged.
    """
    finished = {one: one.finished for one in left if one.finished is not None}
    newest = max((last for rows in finished.values() if (last := rows.last()) is not None), default=-1)
    agreed = {one: one.whole if one.unfinished == newest else rows for one, rows in finished.items()}
    whole = {one: rows for one, rows in agreed.items() if rows is not None}
    return whole if len(whole) == len(left) else None


def _make_visible(directory: Path, record: Steps, kept: Mapping[Left, Written], begun_ns: int) -> None:
    shards = Shards(directory, record.last - record.first + 1)
    news = [step for one, rows in kept.items() if (step := _news(rows, shards.carried_on(one.named, rows.header))) is not None]
    for one, rows in kept.items():
        if not news or not len(rows.steps):
            one.named.path.unlink()  # a visible file has all of it
    if news:
        parts = {one.named: (one.part(rows), rows) for one, rows in kept.items() if len(rows.steps)}
        shards.take_up(min(news), parts, lambda path: _changed(path) <= begun_ns)


def _news(rows: Written, visible: Written) -> int | None:
    """The first step of which these rows have something else than the visible ones."""
    steps = sorted(set(rows.steps.tolist()))
    return next((step for step in steps if rows.rows_of(step) != visible.rows_of(step)), None)


def _unfinished_from(text: bytes) -> int:
    """Where the step begins that is not marked as finished; the end of the text if there is none."""
    begins = np.append(0, line_ends(text))
    begins = begins[begins < len(text)]
    marked = begins[(np.frombuffer(text, np.uint8)[begins] & UNFINISHED) > 0]
    return int(marked[0]) if len(marked) else len(text)


def _held(visible: Iterable[Named], ranges: Collection[Steps]) -> set[int]:
    """The steps, in these ranges and near them, of which there are rows."""
    near = Steps(min((one.first for one in ranges), default=0), max((one.last for one in ranges), default=-1))
    files = (Written.read(one.path) for one in visible if one.steps.meets(near))
    return {step for rows in files if rows is not None for step in np.unique(rows.steps).tolist()}


def _changed(path: Path) -> int:
    """When, in nanoseconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _set_aside(path: Path) -> Path:
    """Visible, and called nothing that a reader of shards would take up."""
    name = path.name.removeprefix(".").removesuffix(".part")
    names = (f"{name}.damaged{f'.{copy}' if copy > 1 else ''}" for copy in count(1))
    target = next(target for name in names if not os.path.lexists(target := path.with_name(name)))
    os.rename(path, target)
    return target
