"""The ``api`` format: the last steps, kept for the program that trains."""

from __future__ import annotations

from monitor.sinks.protocol import SinkContext
from monitor.stats.rows import StepRows


class MemorySink:
    """Keeps the last ``keep`` steps.

    One thread writes while another reads, without a lock: the steps are a tuple that is replaced and never changed.
    """

    def __init__(self, context: SinkContext, keep: int = 2) -> None:
        self.series = context.series
        self._keep = keep
        self._steps: tuple[StepRows, ...] = ()

    def write(self, rows: StepRows) -> None:
        """Take in one step and let go of the oldest one beyond ``keep``."""
        self._steps = (*self._steps, rows)[-self._keep :]

    def latest(self) -> StepRows | None:
        """The last step taken in, None before the first."""
        steps = self._steps
        return steps[-1] if steps else None

    def steps(self) -> tuple[StepRows, ...]:
        """The steps that are kept, oldest first."""
        return self._steps

    def flush(self) -> None:
        """Nothing to do: what was taken in is visible."""

    def close(self) -> None:
        """Nothing to do: what was taken in stays readable."""
