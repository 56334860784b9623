"""The ``tensorboard`` format: an event file that grows step by step, with scalars, histograms and heatmaps."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function  # type: ignore[attr-defined]
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.histogram import metadata
from tensorboard.util.tensor_util import make_tensor_proto

from monitor.series import NO_MICRO_STEP, SIGNED_KINDS, Series, SeriesTable, shown_kind
from monitor.sinks.csv import RowPiece, TextCache, row_blocks
from monitor.sinks.files import AppendFile, opened
from monitor.sinks.heatmaps import Heatmaps
from monitor.sinks.protocol import SinkContext
from monitor.stats.histograms import FIRST_POWER, MAGNITUDES, UNIT_BINS, UNIT_UPPER, UPPER
from monitor.stats.ops import TEXT_OPS, derive, has_histogram
from monitor.stats.partials import Floats, KindRows, Partials
from monitor.stats.table import StepRows

# --- The scalars of a step in the encoding of TensorBoard's protocol buffers, a column at a time.
#
# One Python object per value would take 2 µs each, and hold Python's lock. The encoding is simple: the length of the
# value, the tag with its length, and four bytes of the number. So each part is a column of texts, and Arrow joins them.

BLOCK_ROWS: Final = 16384

# Field numbers and wire types of tensorboard/compat/proto: summary.proto and event.proto.
_VALUE, _TAG, _SIMPLE_VALUE, _SUMMARY = b"\x0a", b"\x0a", b"\x15", b"\x2a"
_NUMBER_BYTES: Final = len(_SIMPLE_VALUE) + 4

_NOTHING: Final = pa.scalar(b"", type=pa.binary())


def summary_field(values: list[memoryview]) -> bytes:
    """The field ``summary`` of an event with these values."""
    return b"".join([_SUMMARY, _varint(sum(map(len, values))), *values])


class Scalars:
    """Encodes the scalars of one rank. Caches the beginning of each series' tag."""

    def __init__(self, series: SeriesTable, rank: int) -> None:
        self._rank = rank
        self._names = TextCache(series, _beginning)

    def of(self, rows: StepRows) -> Iterator[memoryview]:
        """Fields ``value`` of a summary, many in each yielded piece. A piece may be empty."""
        for block in row_blocks([rows], BLOCK_ROWS):
            tags = self._tags(block)
            partials = Partials.joined(piece.rows.partials for piece in block)
            for op in block[0].ops:
                if op not in TEXT_OPS:
                    yield scalar_values(tags, op, *derive(op, partials))

    def _tags(self, block: list[RowPiece]) -> pa.BinaryArray:
        """``Series.tag`` of each row."""
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
    """Fields ``value`` of a summary, one for each measured value within the range of float32.

    Args:
        tags: The tag of each row without the final ``_{op}``; shape ``(rows,)``.
        values: float64, shape ``(rows,)``.
        valid: Which values were measured, shape ``(rows,)``.
    """
    numbers, there = _single(values, valid)
    if not there.all():
        tags, numbers = tags.filter(pa.array(there)), numbers[there]
    ending = f"_{op}".encode()
    lengths = call_function("binary_length", [tags]).to_numpy() + len(ending)
    constant = pa.scalar(ending + _SIMPLE_VALUE, type=pa.binary())
    return _text(_join([_beginnings(lengths), tags, constant, _four_bytes(numbers)]))


def _single(values: Floats, valid: NDArray[np.bool_]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The values in float32, and which are written. A finite number that would become infinite is not written."""
    with np.errstate(over="ignore"):
        numbers = values.astype("<f4")
    return numbers, valid & (np.isfinite(numbers) | ~np.isfinite(values))


def _beginnings(lengths: NDArray[np.int64]) -> pa.BinaryArray:
    """The bytes before a tag, for each of these tag lengths."""
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
    """All texts, one after the other."""
    one = pa.ListArray.from_arrays(pa.array([0, len(texts)], type=pa.int32()), texts)
    return memoryview(call_function("binary_join", [one, _NOTHING])[0].as_buffer())


def _varint(number: int) -> bytes:
    """The number as protocol buffers encode it: seven bits a byte, the lowest first; the eighth bit says that more follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


# --- Records of an event file: length and content, each with a checksum, so that a torn record is recognised.

with warnings.catch_warnings():
    # Without its C extension the library warns at import that it is slow. Users of the monitor cannot change that.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    import google_crc32c

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


def record(content: bytes) -> bytes:
    """``content`` as a record, to be appended to a file."""
    length = _LENGTH.pack(len(content))
    return b"".join([length, _masked(length), content, _masked(content)])


def _masked(content: bytes) -> bytes:
    """The checksum in TensorFlow's masked form, which stays meaningful if the content itself holds checksums."""
    checksum = google_crc32c.value(content)
    rotated = checksum >> 15 | checksum << 17 & 0xFFFFFFFF
    return _CHECKSUM.pack(rotated + 0xA282EAD8 & 0xFFFFFFFF)


# --- The histograms of a step in TensorBoard's form: a list of buckets, each a left edge, a right edge and a count.
#
# The counts are those of the bins. This code finds a readable axis for them, and finite edges.

SIGNED: Final = "histogram"
"""The end of the tags of histograms of signed numbers."""

_OF_MAGNITUDES: Final = metadata.create_summary_metadata(
    display_name=None,
    description=(
        "Elements by the base-2 logarithm of their magnitude: −10 means magnitudes around 2⁻¹⁰. "
        "Zeros, which have no logarithm, NaN and Inf are left out."
    ),
)
_OF_SIGNED: Final = metadata.create_summary_metadata(
    display_name=None,
    description=(
        f"Elements by their value: {UNIT_BINS} equal bins between −1 and 1, and one bin beyond on each side, "
        "which ends at the least or the greatest element. NaN and Inf are left out."
    ),
)

_POWERS: Final[Floats] = np.log2(UPPER[1:-1])
_LOWEST: Final = float(FIRST_POWER - 1)
"""The lower edge of the bin of the smallest magnitudes: float32 has nothing below it."""


class Histograms:
    """Encodes the histograms of one rank."""

    def __init__(self, series: SeriesTable, rank: int) -> None:
        self._series = series
        self._rank = rank

    def of(self, rows: StepRows) -> Iterator[memoryview]:
        """Fields ``value`` of a summary: histograms of magnitudes if configured, of signed numbers for ``SIGNED_KINDS``."""
        for kind in rows.kinds:
            if kind in SIGNED_KINDS:
                yield from self._encoded(rows.read(kind), SIGNED, _OF_SIGNED)
            elif MAGNITUDES in rows.ops_of(kind):
                yield from self._encoded(rows.read(kind), MAGNITUDES, _OF_MAGNITUDES)

    def _encoded(self, rows: KindRows, ending: str, described: SummaryMetadata) -> Iterator[memoryview]:
        buckets_of = signed if ending == SIGNED else magnitudes
        for row in np.flatnonzero(has_histogram(rows.partials)).tolist():
            buckets = buckets_of(rows.partials, row)
            if len(buckets):
                tag = self._series[rows.series[row]].tag(self._rank, int(rows.micro_step[row]))
                yield histogram_value(f"{tag}_{ending}", buckets, described)


def histogram_value(tag: str, buckets: Floats, described: SummaryMetadata) -> memoryview:
    """A field ``value`` of a summary that is a histogram.

    Args:
        buckets: Left edge, right edge and count of each bucket, ascending, float64, shape ``(buckets, 3)``.
    """
    summary = Summary()
    summary.value.add(tag=tag, metadata=described, tensor=make_tensor_proto(buckets, dtype=np.float64))
    return memoryview(summary.SerializeToString())


def magnitudes(partials: Partials, row: int) -> Floats:
    """Buckets over log2|x|, from the first to the last that has elements; none if all elements are zero.

    The bin for magnitudes beyond float32 ends at the tensor's greatest magnitude.
    """
    counts = _histogram(partials, row)[1:]
    filled = np.flatnonzero(counts)
    if not len(filled):
        return np.empty((0, 3))
    greatest = max(abs(partials["min"][row]), abs(partials["max"][row]), UPPER[-2])
    edges = np.array([_LOWEST, *_POWERS, np.log2(greatest)])
    return _buckets(edges, counts, slice(int(filled[0]), int(filled[-1]) + 1))


def signed(partials: Partials, row: int) -> Floats:
    """Buckets over x: always those between -1 and 1, so that the axis stays the same; those beyond only if they have elements.

    None at all if a bin beyond has elements but minimum or maximum contradict it.
    """
    counts = _histogram(partials, row)[: len(UNIT_UPPER)]
    below, above = counts[0] > 0, counts[-1] > 0
    least, greatest = partials["min"][row], partials["max"][row]
    if (below and not -np.inf < least <= UNIT_UPPER[0]) or (above and not UNIT_UPPER[-2] <= greatest < np.inf):
        return np.empty((0, 3))
    edges = np.array([least, *UNIT_UPPER[:-1], greatest])
    return _buckets(edges, counts, slice(0 if below else 1, len(counts) - (0 if above else 1)))


def _histogram(partials: Partials, row: int) -> NDArray[np.int64]:
    assert partials.histogram is not None, "of rows that were counted"
    counts: NDArray[np.int64] = partials.histogram[row]
    return counts


def _buckets(edges: Floats, counts: NDArray[np.int64], some: slice) -> Floats:
    return np.column_stack([edges[:-1], edges[1:], counts])[some]


FORMAT_VERSION: Final = "brain.Event:2"

MOST_BYTES: Final = 8 << 20
"""Greatest size of an event. A step of very many rows is written as several events."""


class TensorBoardSink:
    """Writes ``events.out.tfevents.…`` into the rank's directory.

    Each step gets a scalar for each value and a histogram for each row that has one; some steps get heatmaps of how histograms
    changed. A step is in the file whole or not at all, and can be read at once. If a step is written again, TensorBoard shows
    the new one, and no longer the old steps after it.

    Raises:
        OSError: from every method, if the disk, the directory or the limit on open files does not allow the operation. The
            file then holds whole steps, and the next step can be written as soon as the cause is gone.
    """

    def __init__(self, context: SinkContext) -> None:
        self._scalars = Scalars(context.series, context.rank)
        self._histograms = Histograms(context.series, context.rank)
        self._heatmaps = Heatmaps(context.series, context.rank)
        self._file = EventFile(lambda: new_path(context.directory))

    def write(self, rows: StepRows) -> None:
        """Add one step. Values that were not measured, or that float32 cannot hold, get no scalar."""
        values = chain(self._scalars.of(rows), self._histograms.of(rows), self._heatmaps.of(rows))
        self._file.write(rows.step, values, time.time())
        self._heatmaps.keep()

    def flush(self) -> None:
        """Nothing to do: written steps are visible at once."""

    def close(self) -> None:
        """Write the outdated heatmaps anew and close the file."""
        try:
            self._file.add(self._heatmaps.outdated(), time.time())
            self._heatmaps.keep()
        finally:
            self._file.close()


class EventFile:
    """A file of events that holds whole steps. It is made with the first step.

    Args:
        new_path: Returns the path of a file that does not exist yet.

    Raises:
        OSError: from every method, as from those of ``TensorBoardSink``.
    """

    def __init__(self, new_path: Callable[[], Path]) -> None:
        self._new_path = new_path
        self._file: AppendFile | None = None
        self._last: int | None = None

    def write(self, step: int, values: Iterator[memoryview], wall_time: float) -> None:
        """Add one step.

        Args:
            values: Fields ``value`` of a summary, as ``scalar_values`` returns them.
            wall_time: Seconds since 1970.
        """
        file = self._open_file()
        self._append(file, chain(self._heads(step, wall_time), _events(step, values, wall_time)))
        self._last = step

    def add(self, values: Iterator[memoryview], wall_time: float) -> None:
        """Add to the step written last. Does nothing if no file is open, or if the file was removed."""
        if self._file is not None and self._last is not None and not self._file.gone():
            self._append(self._file, _events(self._last, values, wall_time))

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.release()

    def _append(self, file: AppendFile, events: Iterator[bytes]) -> None:
        try:
            for event in events:
                file.write(record(event))
        except BaseException:
            self._forget(file)
            raise
        file.keep()

    def _heads(self, step: int, wall_time: float) -> Iterator[bytes]:
        if self._last is None:
            yield Event(wall_time=wall_time, file_version=FORMAT_VERSION).SerializeToString()
        if self._last is None or step <= self._last:
            begun = SessionLog(status=SessionLog.START)
            yield Event(wall_time=wall_time, step=step, session_log=begun).SerializeToString()

    def _open_file(self) -> AppendFile:
        if self._file is not None and self._file.gone():
            directory = Path(self._file.path).parent
            self._drop(self._file)
            raise FileNotFoundError(errno.ENOENT, "the file was removed while the monitor wrote to it", str(directory))
        if self._file is None:
            path = self._new_path()
            self._file, self._last = AppendFile(path, opened(path, os.O_CREAT | os.O_EXCL)), None
        return self._file

    def _forget(self, file: AppendFile) -> None:
        if self._last is None:
            self._drop(file)
        else:
            file.forget()

    def _drop(self, file: AppendFile) -> None:
        file.discard()
        self._file = None


def new_path(directory: Path) -> Path:
    """The path of a new event file. TensorBoard reads files in the order of their names, so the name begins with the time."""
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    paths = (directory / f"{stem}.{number}" for number in count())
    return next(path for path in paths if not os.path.lexists(path))


def _events(step: int, values: Iterator[memoryview], wall_time: float) -> Iterator[bytes]:
    head = Event(wall_time=wall_time, step=step).SerializeToString()
    for some in _gathered(values):
        yield head + summary_field(some)


def _gathered(values: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """The values in lists of at most ``MOST_BYTES`` each, or of a single value."""
    gathered: list[memoryview] = []
    for some in values:
        if gathered and sum(map(len, gathered)) + len(some) > MOST_BYTES:
            yield gathered
            gathered = []
        gathered.append(some)
    if gathered:
        yield gathered
