"""The scalars of a step as TensorBoard's protocol buffers spell them, a column at a time.

As Python objects, one a value, they would take 2 µs each and the interpreter all the while. Their bytes are few and fixed: of
each value its length, the tag with its length, and four bytes of the number. So each part is a column of texts and Arrow joins
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.series import NO_MICRO_STEP, Series, SeriesTable, shown_kind
from monitor.sinks.cells import Cells
from monitor.sinks.pieces import Piece, blocks
from monitor.stats.ops import TEXT_OPS, derive
from monitor.stats.partials import Floats, Partials
from monitor.stats.rows import StepRows

BLOCK_ROWS: Final = 16384

# Field numbers and wire types of tensorboard/compat/proto: summary.proto and event.proto.
_VALUE, _TAG, _SIMPLE_VALUE, _SUMMARY = b"\x0a", b"\x0a", b"\x15", b"\x2a"
_NUMBER_BYTES: Final = len(_SIMPLE_VALUE) + 4

_NOTHING: Final = pa.scalar(b"", type=pa.binary())


def summary_field(values: list[memoryview]) -> bytes:
    """The field ``summary`` of an event that has these values."""
    return b"".join([_SUMMARY, _varint(sum(map(len, values))), *values])


class Scalars:
    """Spells the values of one rank. Keeps the beginning of each series' tag."""

    def __init__(self, series: SeriesTable, rank: int) -> None:
        self._rank = rank
        self._names = Cells(series, _beginning)

    def of(self, rows: StepRows) -> Iterator[memoryview]:
        """Fields ``value`` of a summary, many in each piece. A piece may be empty."""
        for block in blocks([rows], BLOCK_ROWS):
            tags = self._tags(block)
            partials = Partials.joined(piece.rows.partials for piece in block)
            for op in block[0].ops:
                if op not in TEXT_OPS:
                    yield scalar_values(tags, op, *derive(op, partials))

    def _tags(self, block: list[Piece]) -> pa.BinaryArray:
        """Of each row: ``Series.tag``."""
        series = np.concatenate([piece.rows.series for piece in block])
        micro_step = np.concatenate([piece.rows.micro_step for piece in block]) - NO_MICRO_STEP
        micro_steps = ["", *(f":{i}" for i in range(int(micro_step.max(initial=0))))]
        kind = np.repeat(np.arange(len(block)), [len(piece.rows) for piece in block])
        kinds = [f"/rank{self._rank}/{shown_kind(piece.kind)}" for piece in block]
        columns = [self._names.take(series), _taken(micro_steps, micro_step), _taken(kinds, kind)]
        return _join([column.cast(pa.binary()) for column in columns])


def _beginning(series: Series) -> str:
    return f"{series.vpp_stage}:{series.name}"


def _taken(texts: list[str], index: NDArray[np.int64]) -> pa.StringArray:
    return pa.array(texts, type=pa.string()).take(pa.array(index))


def scalar_values(tags: pa.BinaryArray, op: str, values: Floats, valid: NDArray[np.bool_]) -> memoryview:
    """Fields ``value`` of a summary, one for each value that is there and that single precision can hold.

    Args:
        tags: Of each row, without the ``_{op}`` at the end; shape ``(rows,)``.
        values: float64, shape ``(rows,)``.
        valid: Which of them were measured, shape ``(rows,)``.
    """
    numbers, there = _single(values, valid)
    if not there.all():
        tags, numbers = tags.filter(pa.array(there)), numbers[there]
    ending = f"_{op}".encode()
    lengths = call_function("binary_length", [tags]).to_numpy() + len(ending)
    constant = pa.scalar(ending + _SIMPLE_VALUE, type=pa.binary())
    return _text(_join([_beginnings(lengths), tags, constant, _four_bytes(numbers)]))


def _single(values: Floats, valid: NDArray[np.bool_]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """In single precision, and which are there. A finite number that would become infinite is not."""
    with np.errstate(over="ignore"):
        numbers = values.astype("<f4")
    return numbers, valid & (np.isfinite(numbers) | ~np.isfinite(values))


def _beginnings(lengths: NDArray[np.int64]) -> pa.BinaryArray:
    """What stands in front of a tag of each of these lengths."""
    each, place = np.unique(lengths, return_inverse=True)
    return pa.array([_in_front_of(length) for length in each.tolist()], type=pa.binary()).take(pa.array(place))


def _in_front_of(length: int) -> bytes:
    tag = _TAG + _varint(length)
    return _VALUE + _varint(len(tag) + length + _NUMBER_BYTES) + tag


def _four_bytes(numbers: NDArray[np.float32]) -> pa.BinaryArray:
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(4), len(numbers), [None, pa.py_buffer(numbers)])
    return fixed.cast(pa.binary())


def _join(columns: list[pa.BinaryArray]) -> pa.BinaryArray:
    return call_function("binary_join_element_wise", [*columns, _NOTHING])


def _text(texts: pa.BinaryArray) -> memoryview:
    """One after the other."""
    one = pa.ListArray.from_arrays(pa.array([0, len(texts)], type=pa.int32()), texts)
    return memoryview(call_function("binary_join", [one, _NOTHING])[0].as_buffer())


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    spelled = bytearray()
    while number > 0x7F:
        spelled.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*spelled, number])
