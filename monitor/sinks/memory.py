"""The ``api`` format: keeps the last steps in memory for the training program."""

from __future__ import annotations

from monitor.sinks.protocol import SinkContext
from monitor.stats.table import StepRows


class MemorySink:
    """Keeps the last ``keep`` steps.

    One thread writes and another reads, without a lock: the tuple of steps is replaced and never changed.
    """

    def __init__(self, context: SinkContext, keep: int = 2) -> None:
        self.series = context.series
        self._keep = keep
        self._steps: tuple[StepRows, ...] = ()

    def write(self, rows: StepRows) -> None:
        """Add one step and drop the oldest one beyond ``keep``."""
        self._steps = (*self._steps, rows)[-self._keep :]

    def latest(self) -> StepRows | None:
        """The last step written; None before the first."""
        steps = self._steps
        return steps[-1] if steps else None

    def steps(self) -> tuple[StepRows, ...]:
        """The kept steps, oldest first."""
        return self._steps

    def flush(self) -> None:
        """Nothing to do: steps are visible at once."""

    def close(self) -> None:
        """Nothing to do: the steps stay readable."""
