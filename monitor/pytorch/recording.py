"""One recording: a table, an attachment that fills it, and the run that it is written to."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from monitor.config import MonitorConfig
from monitor.failures import LOGGER, Failures
from monitor.pytorch.attachment import Attachment, Watch
from monitor.pytorch.names import ModelNames
from monitor.pytorch.place import versions
from monitor.pytorch.recorder import Recorder
from monitor.run import Place, Run
from monitor.series import SeriesTable
from monitor.stats.rows import KindRows, Layout

_ORDINALS: Final = itertools.count()
"""Ranks that begin as many recordings agree on the name of each."""

_OPEN: Final[weakref.WeakSet[Run]] = weakref.WeakSet()
"""The runs that this process is recording."""


class Recording:
    """What one ``set_monitor`` brought into being.

    Attributes:
        attachment: Set by ``attach``.
    """

    attachment: Attachment

    def __init__(self, config: MonitorConfig, config_path: str, where: Callable[[], Place], failures: Failures) -> None:
        self.series = SeriesTable()
        self._config = config
        self._config_path = config_path
        self._where = where
        self._failures = failures
        self._ordinal = next(_ORDINALS)
        self._recorder = Recorder(self.series, config.eps)
        self._opened: Run | None = None

    def attach(self, watch: Watch, names: ModelNames, start_step: int) -> None:
        """Hook the model and the optimizer, in place of what was hooked before."""
        if hasattr(self, "attachment"):
            self.attachment.detach()
        self.attachment = Attachment(watch, names, self._recorder, self.open, start_step, self._failures)

    def open(self) -> Run:
        """The run, begun now if it was not: before the first record at the latest, when rank and job are known."""
        if self._opened is None:
            here = self._where()
            self._failures.rank = here.rank
            beside = next(iter(_OPEN), None)
            self._opened = Run(
                self._config, self._config_path, here, self._ordinal, beside, self.series, versions(), self._failures
            )
            _OPEN.add(self._opened)
            LOGGER.info("[rank %d] recording to %s", here.rank, self._opened.directory)
        return self._opened

    def current(self) -> tuple[Mapping[str, KindRows], list[Layout]]:
        """Rows of the step in progress; of the step just ended while nothing of the next was measured."""
        table = self._recorder.table
        if self._recorder.has_rows:
            return table.kinds_now(), table.layouts
        latest = self.open().pipeline.latest(self._config.close_seconds)
        return (latest.kinds if latest is not None else {}), table.layouts

    def write_structure(self) -> Path:
        """Write ``module_struct.json`` of this rank."""
        assert self.attachment.structure is not None
        run = self.open()
        path = run.base / "module_struct" / f"rank{self._where().rank}" / "module_struct.json"
        self.attachment.structure.write(path)
        return path

    def close(self) -> None:
        """Detach, write what is left, and say what was lost."""
        self.attachment.detach()
        if self._opened is None:
            return
        _OPEN.discard(self._opened)
        complete = self._opened.close()
        lost = sum(self._opened.pipeline.dropped.values())
        if lost or not complete:
            said = f"{lost} steps were dropped" if lost else "not everything could be written"
            LOGGER.warning("[rank %d] %s; see %s", self._failures.rank, said, self._opened.directory / "manifest.json")
