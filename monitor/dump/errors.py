"""What goes wrong while a dump is recorded: said once, and kept beside what was dumped."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from monitor.failures import Failures

ERRORS: Final = "dump_error_info.log"


class DumpFailures(Failures):
    """Attributes:
    directory: Of the rank's step.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.directory: Path | None = None

    def _once(self, cause: str, message: str, error: BaseException | None) -> None:
        super()._once(cause, message, error)
        if self.directory is not None:
            with suppress(OSError), open(self.directory / ERRORS, "a", encoding="utf-8") as file:
                file.write(f"{message.strip()}\n")
