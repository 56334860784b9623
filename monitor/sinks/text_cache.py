"""Caches texts that repeat from row to row, and cuts the rows of steps into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.stats.rows import KindRows, StepRows

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Growing(Protocol[T_co]):
    """An append-only sequence."""

    def __len__(self) -> int:
        """The number of items so far."""

    def __getitem__(self, index: int, /) -> T_co:
        """The item at ``index``."""


class TextCache(Generic[T]):
    """The text of each item of a growing sequence, made when it is first needed."""

    def __init__(self, of: Growing[T], text_of: Callable[[T], str]) -> None:
        self.of = of
        self._text_of = text_of
        self._texts: list[str] = []
        self._column = pa.array([], type=pa.string())
        self._characters = b"", np.zeros(1, dtype=np.int64)

    def characters(self) -> tuple[bytes, NDArray[np.int64]]:
        """All texts end to end in UTF-8, and their offsets; int64, shape ``(texts + 1,)``."""
        texts = self._known()
        text, offsets = self._characters
        if len(texts) >= len(offsets):
            new = [one.encode() for one in texts[len(offsets) - 1 :]]
            lengths = np.fromiter(map(len, new), dtype=np.int64, count=len(new))
            self._characters = b"".join((text, *new)), np.append(offsets, offsets[-1] + np.cumsum(lengths))
        return self._characters

    def take(self, index: NDArray[np.int64]) -> pa.StringArray:
        """The texts of the items numbered ``index``."""
        texts = self._known()
        if len(texts) > len(self._column):
            new = pa.array(texts[len(self._column) :], type=pa.string())
            self._column = pa.concat_arrays([self._column, new])
        return self._column.take(pa.array(index))

    def _known(self) -> list[str]:
        texts = self._texts
        texts += [encodable(self._text_of(self.of[i])) for i in range(len(texts), len(self.of))]
        return texts

    def once(self, index: NDArray[np.int64]) -> pa.DictionaryArray:
        """The texts of the items numbered ``index``, as a dictionary array whose dictionary holds only texts that occur."""
        occurs = np.zeros(len(self.of), dtype=np.bool_)
        occurs[index] = True
        place = np.cumsum(occurs) - 1
        texts = self.take(np.flatnonzero(occurs))
        return pa.DictionaryArray.from_arrays(pa.array(place[index].astype(np.int32)), texts)


def encodable(text: str) -> str:
    """``text`` with escapes in place of lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- Blocks: the rows of several steps and kinds, cut or joined to a given size.


class RowPiece(NamedTuple):
    """Some of a step's rows of one kind."""

    step: StepRows
    kind: str
    rows: KindRows

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops to write for these rows."""
        return self.step.ops_of(self.kind)

    @property
    def has_histograms(self) -> bool:
        """Whether magnitudes were counted in the step."""
        return self.rows.partials.histogram is not None

    def goes_with(self, other: RowPiece) -> bool:
        """Whether both can be in one block: same layouts and ops, and both with histograms or both without.

        Beside rows with histograms, rows without would seem to have empty ones.
        """
        alike = self.step.layouts is other.step.layouts and self.ops == other.ops
        return alike and self.has_histograms == other.has_histograms


def row_blocks(steps: Iterable[StepRows], most: int) -> Iterator[list[RowPiece]]:
    """The rows of steps in blocks of at most ``most`` rows. Small kinds with the same ops share a block, also across steps."""
    block: list[RowPiece] = []
    room = most
    for whole in (RowPiece(step, kind, step.read(kind)) for step in steps for kind in step.kinds):
        if block and not whole.goes_with(block[0]):
            yield block
            block, room = [], most
        start, count = 0, len(whole.rows)
        while start < count:
            taken = min(count - start, room)
            fits = taken == count
            block.append(whole if fits else whole._replace(rows=_part(whole.rows, slice(start, start + taken))))
            start, room = start + taken, room - taken
            if not room:
                yield block
                block, room = [], most
    if block:
        yield block


def _part(rows: KindRows, part: slice) -> KindRows:
    return KindRows(rows.series[part], rows.micro_step[part], rows.call_id[part], rows.layout[part], rows.partials.take(part))
