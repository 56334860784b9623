"""The end of a process that still records: steps in progress are handed on first, then everything is closed side by side."""

from __future__ import annotations

import weakref
from multiprocessing.util import Finalize
from typing import Final, Protocol

from monitor.pipeline.process import PROCESS
from monitor.run import Run


class Recording(Protocol):
    """What a framework's room keeps of one model and its run."""

    @property
    def run(self) -> Run | None:
        """None before the first record, and in a process forked since: there it is another's."""

    def detach(self) -> None:
        """Take every hook away; the step in progress goes to the pipeline. Must not raise."""

    def close(self) -> None:
        """Detach and write what is left. Any number of times. Must not raise."""


class OpenRecordings:
    """The recordings of this process that have begun and were not closed.

    Held weakly: a model may be let go of without closing its recording.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Recording] = weakref.WeakSet()
        self._at_end: Finalize | None = None

    def add(self, recording: Recording) -> None:
        """Close ``recording`` when the process ends, if nobody has by then."""
        self._open.add(recording)
        # Ahead of the pipelines, which are still to get the steps in progress.
        PROCESS.at_end(self.close_all)
        # A process that multiprocessing forked ends without those, and has forgotten what its parent registered here.
        if self._at_end is None or not self._at_end.still_active():
            self._at_end = Finalize(None, self.close_all, exitpriority=0)

    def discard(self, recording: Recording) -> None:
        """It was closed."""
        self._open.discard(recording)

    def runs(self) -> list[Run]:
        """The runs that this process is recording."""
        return [run for recording in list(self._open) if (run := recording.run) is not None]

    def close_all(self) -> None:
        """Close every recording of this process; those that hang take their time side by side."""
        mine = [recording for recording in list(self._open) if recording.run is not None]
        for recording in mine:
            recording.detach()
        if mine:
            PROCESS.close_all()
        for recording in mine:
            recording.close()


OPEN: Final = OpenRecordings()
"""Of this process, whose end comes once."""
