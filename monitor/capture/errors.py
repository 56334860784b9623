"""What users of the PyTorch room may have to catch."""

from __future__ import annotations


class RunEnded(SystemExit):
    """The monitor has done what it was asked for, and ends the run on every rank: the structure was printed.

    Raised from ``optimizer.step()`` after all files are complete. As a ``SystemExit`` with status 0 it passes through
    ``except Exception`` and ends the process without a traceback.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
