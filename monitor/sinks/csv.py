"""The ``csv`` format: one file per kind and record, readable by any tool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Final

import pyarrow as pa
from pyarrow.csv import ConvertOptions, ParseOptions  # type: ignore[attr-defined]
from pyarrow.csv import read_csv as read_arrow  # type: ignore[attr-defined]

from monitor.series import shown_kind
from monitor.sinks.lines import Lines, header
from monitor.sinks.protocol import SinkContext
from monitor.sinks.shards import Shards
from monitor.stats.features import FEATURES
from monitor.stats.histograms import LOSSES
from monitor.stats.ops import INTEGER_OPS, NUMERIC_OPS, TEXT_OPS
from monitor.stats.rows import StepRows

COLUMN_TYPES: Final = {
    "vpp_stage": pa.int64(),
    "name": pa.string(),
    "step": pa.int64(),
    "micro_step": pa.int64(),
    **dict.fromkeys(NUMERIC_OPS, pa.float64()),
    **dict.fromkeys(INTEGER_OPS, pa.int64()),
    **dict.fromkeys((*LOSSES, *FEATURES), pa.float64()),
    **dict.fromkeys(TEXT_OPS, pa.string()),
}
"""What the cells of a column are; empty ones are null, in a column of text they are empty text."""

_DIALECT: Final = ParseOptions(newlines_in_values=True)
_CELLS: Final = ConvertOptions(column_types=COLUMN_TYPES, null_values=[""], strings_can_be_null=False)


class CsvSink:
    """Writes ``{kind}_{first}-{last}.csv`` into the rank's directory.

    A step is in the files of all kinds or of none. A file has its name when its record is complete, or after ``flush``.

    Raises:
        OSError: from every method, if the disk, the directory or the number of open files does not allow what was asked. The
            files then hold whole steps, and the next step can be written as soon as the cause has passed.
    """

    def __init__(self, context: SinkContext) -> None:
        self._lines = Lines(context.series, context.ndigits)
        self._shards = Shards(context.directory, context.step_count_per_record)
        self._foreseen: list[tuple[StepRows, list[tuple[str, memoryview]]]] = []

    def foresee(self, steps: Sequence[StepRows]) -> None:
        """Spell the rows of several steps at once. Each is written, or not, by ``write``."""
        self._foreseen = []
        texts: dict[int, list[tuple[str, memoryview]]] = {id(rows): [] for rows in steps}
        for rows, kind, text in self._lines.of(steps):
            texts[id(rows)].append((kind, text))
        self._foreseen = [(rows, texts[id(rows)]) for rows in steps]

    def write(self, rows: StepRows) -> None:
        """Add one step to the files of its kinds. Rows of a step that was written before take the place of the old ones, and
        of those after it in its record.
        """
        headers = {shown_kind(kind): header(rows, kind) for kind in rows.kinds}
        with self._shards.step(rows.step, headers) as write:
            for kind, text in self._texts(rows):
                write(shown_kind(kind), text)

    def flush(self) -> None:
        """Make the open records visible as they are. Their next steps join them."""
        self._shards.flush()

    def close(self) -> None:
        """Flush and let go of every file."""
        self._shards.close()

    def _texts(self, rows: StepRows) -> Iterable[tuple[str, memoryview]]:
        while self._foreseen:  # those before it came to nothing
            foreseen, texts = self._foreseen.pop(0)
            if foreseen is rows:
                return texts
        return ((kind, text) for _, kind, text in self._lines.of([rows]))


def read_csv(path: str | PathLike[str]) -> pa.Table:
    """The rows of one file, in columns of the types that they were written from (``COLUMN_TYPES``).

    Raises:
        OSError: if there is no such file.
        pyarrow.ArrowInvalid: if it is not one of these files.
    """
    return read_arrow(path, parse_options=_DIALECT, convert_options=_CELLS)
