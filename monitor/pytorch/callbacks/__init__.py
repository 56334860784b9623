"""Callbacks that attach the monitor to what a trainer trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monitor.attaching import HEALTH, configured
from monitor.pytorch.trainer_mon import TrainerMon

__all__ = ["HEALTH", "AttachingCallback"]


class AttachingCallback:
    """What the callbacks of all trainers share.

    Attributes:
        monitor: The monitor of the training in progress or of the last one; None before. A copy of the callback has none.
    """

    monitor: TrainerMon | None = None

    def _configure(self, preset: str | None, fields: Mapping[str, Any]) -> None:
        self._config = configured(preset, fields)

    def _new_monitor(self) -> TrainerMon:
        """A new monitor. That of an earlier training, which may have failed, is closed."""
        self._close()
        self.monitor = TrainerMon(self._config, params_have_main_grad=False)
        return self.monitor

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "monitor": None}
