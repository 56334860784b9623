"""``batches.jsonl``: the identifiers of the batches that a training loop passes to ``TrainerMon.log(batch=...)``.

One line for each step, and in it one list for each call. Identifiers are text or whole numbers, and are written as they are.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from monitor.series import encodable
from monitor.stats.table import StepRows

BATCHES_FILE: Final = "batches.jsonl"
OLDER_FILE: Final = "batches-older.jsonl"
MOST_BYTES: Final = 8 * 2**20
"""Largest size of each of the two files. A full file replaces the older one, so the newest steps stay."""
MOST_IN_A_STEP: Final = 64
"""Identifiers of a step that are kept; more are counted."""
MOST_CHARACTERS: Final = 200
"""Longest identifier; the rest is cut off."""
MOST_WAITING: Final = 100_000
"""Calls that may wait for the writer; then the oldest are lost."""
LONGEST_LINE: Final = 2**18
"""Each of ``MOST_CHARACTERS`` may take 12 bytes as JSON."""

Identifier = str | int
Batches = list[list[Identifier]]
"""The identifiers of each call in a step of a rank, in order."""

NOT_AN_IDENTIFIER: Final = "log(batch=...) takes a whole number, a text, or a list or tuple of them; this is {}"


class BatchCall(NamedTuple):
    """The identifiers of one call in a step, and how many more there were."""

    step: int
    kept: list[Identifier]
    more: int


class BatchNotes:
    """Writes identifiers of batches beside the manifest (``Watcher``). ``note`` is called by the thread that trains.

    Attributes:
        directory: The rank's directory, once it is known.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._waiting: deque[BatchCall] = deque(maxlen=MOST_WAITING)

    def note(self, step: int, given: Any) -> None:
        """Keep the identifiers of one call in a step.

        Raises:
            TypeError: It is no identifier.
        """
        several = given if isinstance(given, list | tuple) else (given,)
        kept = [_identifier(one) for one in several[:MOST_IN_A_STEP]]
        self._waiting.append(BatchCall(step, kept, len(several) - len(kept)))

    def look(self, rows: StepRows) -> None:
        """Write the lines of the steps up to this one."""
        self._write(rows.step)

    def dropped(self, step: int, reason: str) -> None:
        """Its batches are written with those of the next step."""

    def save(self) -> None:
        """Every line is in the file already."""

    def close(self) -> None:
        """Write what waits."""
        self._write(2**63)

    def _write(self, until: int) -> None:
        of_steps: dict[int, list[BatchCall]] = {}
        while self._waiting and self._waiting[0].step <= until:
            call = self._waiting.popleft()
            of_steps.setdefault(call.step, []).append(call)
        if of_steps and self.directory is not None:
            _append(self.directory, "".join(_line(step, calls) for step, calls in of_steps.items()).encode())


def _identifier(given: Any) -> Identifier:
    """A copy that no later change of the loop reaches. A tensor is none: reading it would wait for its device."""
    if isinstance(given, str):
        return encodable(given[:MOST_CHARACTERS])
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise TypeError(NOT_AN_IDENTIFIER.format(type(given).__name__))
    number = int(given)
    return number if abs(number) < 2**63 else hex(number)[:MOST_CHARACTERS]


def _line(step: int, calls: Sequence[BatchCall]) -> str:
    kept: Batches = []
    room, more = MOST_IN_A_STEP, 0
    for call in calls:
        if room:
            kept.append(call.kept[:room])
        more += call.more + max(len(call.kept) - room, 0)
        room = max(room - max(len(call.kept), 1), 0)
    return json.dumps({"step": step, "batches": kept, **({"more": more} if more else {})}) + "\n"


def _append(directory: Path, lines: bytes) -> None:
    path = directory / BATCHES_FILE
    if path.exists() and path.stat().st_size + len(lines) > MOST_BYTES:
        path.replace(directory / OLDER_FILE)
    with path.open("ab+") as file:
        if end := file.tell():
            file.seek(end - 1)
            if file.read(1) != b"\n":  # a killed run left a part of a line
                lines = b"\n" + lines
        file.write(lines)


def read_batches(directory: Path, steps: Collection[int]) -> dict[int, Batches]:
    """The identifiers of these steps on a rank. The last line of a step counts: a resumed run may have done it again."""
    found: dict[int, Batches] = {}
    for name in (OLDER_FILE, BATCHES_FILE):
        for step, calls in _read(directory / name):
            if step in steps:
                found[step] = calls
    return found


def _read(path: Path) -> Iterator[tuple[int, Batches]]:
    """Whole lines. Others are damaged, or not written to their end."""
    try:
        with path.open("rb") as file:
            lines = [line for line in iter(lambda: file.readline(LONGEST_LINE), b"") if line.endswith(b"\n")]
    except OSError:
        return
    for line in lines:
        try:
            said = json.loads(line)
            step, calls = int(said["step"]), [list(map(_identifier, call)) for call in said["batches"]]
        except (ValueError, TypeError, KeyError):
            continue
        yield step, calls
