"""The communication log: every call site of the first step once, with its count."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from monitor.capture.call_sites import CallSite
from monitor.coordinator.output import write_whole

LOG_FILE: Final = "communication_log.csv"
COLUMNS: Final = ("op", "group", "dtype", "shape", "calls", "stack")


class Entry(NamedTuple):
    """What is logged once."""

    op: str
    group: str
    dtype: str
    shape: str
    stack: tuple[str, ...]


class CommunicationLog:
    """Counts calls by operator, group, dtype, shape and call site.

    Args:
        dtype_name: Spells a dtype of the framework.
    """

    def __init__(self, dtype_name: Callable[[Any], str] = str) -> None:
        self._dtype_name = dtype_name
        self.counts: Counter[Entry] = Counter()

    def add(self, op: str, group: str, tensors: Sequence[Any], site: CallSite) -> None:
        """One call."""
        dtypes, shapes = (
            dict.fromkeys(self._dtype_name(one.dtype) for one in tensors),
            [str(list(one.shape)) for one in tensors],
        )
        self.counts[Entry(op, group, " ".join(dtypes), " ".join(shapes), site.stack)] += 1

    def write(self, directory: Path) -> Path:
        """Write it, the sites in the order in which they first called. The file appears whole.

        Raises:
            OSError: It cannot be written.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        for entry, calls in self.counts.items():
            rows.writerow([*entry[:4], calls, "\n".join(entry.stack)])
        path = directory / LOG_FILE
        write_whole(path, text.getvalue().encode())
        return path
