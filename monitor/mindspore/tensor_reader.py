"""Reads a tensor of MindSpore into its row.

On a CPU, pages are in host memory. Tensors that hooks see are measured by an operator that MindSpore runs in its own order
(``Tape``), and their rows are written before the step is sealed. Without that operator, and for several tensors at once, the
reader waits for the operations that compute them, and reads the memory that they share with numpy. On a device nothing waits: a
page there stores the kernel's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore._c_expression import typing
from mindspore.common import _no_grad

from monitor.mindspore.tape import ReadSlot, Tape, TapedTensor, new_tape
from monitor.recording.arguments import NOT_A_NUMBER, real_number
from monitor.recording.recorder import Device, LiveRows, RecordedSeries
from monitor.recording.tensor_paths import TensorPaths
from monitor.series import LOCAL, Placement, SeriesTable
from monitor.stats.host.array_kernel import Raw, count_magnitudes
from monitor.stats.mindspore.kernels import MindSporeDeviceKernel, MindSporeHostKernel, combined
from monitor.stats.mindspore.tensors import MindSporeDevicePage, beneath, has_data, on_host, on_the_host
from monitor.stats.partials import COLUMNS, WRITES, Floats
from monitor.stats.table import HostPage, Page, PageMemory, RowSlot

# --- Properties of MindSpore tensors that are known without reading them.


@contextmanager
def computing() -> Iterator[None]:
    """A context whose operations no graph records."""
    with _no_grad():
        yield


def layout_of(x: Any) -> None:
    """None: tensors of the dynamic graph have no layout over ranks."""
    del x


def placement_of(x: Any) -> Placement | None:
    """None: tensors of the dynamic graph have no layout over ranks."""
    del x
    return None


def activation_placement(x: Any) -> Placement:
    """Local: every rank writes its own activations."""
    del x
    return LOCAL


def has_gradient(parameter: Any) -> bool:
    """False: optimizers are given gradients, and parameters have none."""
    del parameter
    return False


@cache
def scalar() -> Tensor:
    """A tensor of one element on the host."""
    return Tensor(0.0, ms.float64)


def number_of(x: Any) -> float | Tensor:
    """See ``monitor.recording.backend.Tensors``. On a CPU it waits for ``x`` to be computed, as the next use of ``x`` would."""
    if not isinstance(x, Tensor):
        return real_number(x)
    if not has_data(x) or x.size != 1 or x.is_complex():
        raise TypeError(NOT_A_NUMBER.format(f"a tensor of shape {tuple(x.shape)}, {dtype_name(x.dtype)}"))
    if on_the_host():
        return float(on_host(x).reshape(-1)[0])
    return x.copy() if isinstance(x, Parameter) else x  # other tensors are not changed in place


@cache
def dtype_name(dtype: Any) -> str:
    """The name in rows, such as ``mindspore.float32``."""
    return f"mindspore.{str(dtype).lower()}"


# --- The tensors in a cell's arguments and results.

TENSOR_PATHS: Final = TensorPaths(Tensor, (nn.Cell, typing.Type))

paths: TensorPaths = TENSOR_PATHS

HOST: Final = "host"
DEVICE: Final = "device"

LARGE: Final = 1 << 20
"""The bytes from which reading a tensor takes longer than a call of the operator."""

NOT_KNOWN_YET: Final = 0
"""The layout of a tensor that is not measured yet."""


class MindSporeTensorReader:
    """Reads tensors of MindSpore into rows.

    A tensor is never treated as an alias of another, since in-place changes between two readings cannot be detected.
    """

    unreadable: Sequence[str] = ()

    def __init__(
        self, series: SeriesTable, eps: float, *, magnitudes: bool = False, higher: bool = False, check_sums: bool = False
    ) -> None:
        self.rows = LiveRows(series, _new_memory)
        self._magnitudes = magnitudes
        # Asking a tensor for its device would wait until MindSpore has created it.
        self.device: str = HOST if on_the_host() else DEVICE
        self._tape = new_tape() if self.device == HOST else None
        self._slots: dict[tuple[int, bool], ReadSlot] = {}
        self._copied: set[int] = set()
        if self._tape is not None:
            self.rows.settle = self._settle
        self.take_kernels(eps, higher=higher, check_sums=check_sums)

    def take_kernels(self, eps: float, *, higher: bool, check_sums: bool) -> None:
        self.eps, self.higher, self.check_sums = eps, higher, check_sums
        make: Any = MindSporeHostKernel if self.device == HOST else MindSporeDeviceKernel
        self._kernel = make(eps, higher=higher, check_sums=check_sums)
        self._checking_kernel = self._kernel if check_sums else make(eps, higher=higher, check_sums=True)
        self._set_up_tape()

    @property
    def magnitudes(self) -> bool:
        return self._magnitudes

    @magnitudes.setter
    def magnitudes(self, wanted: bool) -> None:
        if wanted != self._magnitudes:
            self._magnitudes = wanted
            self._set_up_tape()

    def _set_up_tape(self) -> None:
        if self._tape is not None:
            self._tape.set_up(self.eps, higher=self.higher, check_sums=self.check_sums, magnitudes=self._magnitudes)

    def activate(self, active: bool) -> None:
        """Nothing to do: MindSpore's hooks run in Python, and check ``Recorder.active``."""

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        """Nothing to do: a hook passes its micro-step."""

    def forget_step(self) -> None:
        """Nothing to do: no state of a step is kept."""

    def close(self) -> None:
        """Free the tape. MindSpore may keep this reader for ever: its compiled code knows hooks of parameters."""
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.close()

    def record(self, watched: RecordedSeries, x: Any, micro_step: int = 0, *, aliases: bool = True) -> None:
        del aliases
        if isinstance(x, TapedTensor):
            self._enter(watched, x, micro_step)
            return
        if not has_data(x):
            return
        if not self._record_later(watched, x, micro_step):
            self._record_now(watched, x, micro_step)

    def _record_later(self, watched: RecordedSeries, x: Any, micro_step: int = 0) -> bool:
        """Have the operator measure a tensor. False if it cannot, or would copy many elements: those are read at once."""
        tape = self._tape
        if tape is None:
            return False
        with self.rows.lock:
            slot, offset = self.rows.slot(watched, self.device, micro_step)
            row = slot.row + offset
            if row in self._copied:
                return False
            self.rows.table.note(row, NOT_KNOWN_YET)
        tape.read(x, self._tape_slot(tape, row, checked=watched.checked))
        return True

    def _tape_slot(self, tape: Tape, row: int, *, checked: bool) -> ReadSlot:
        slot = self._slots.get((row, checked))
        if slot is None:
            slot = self._slots[row, checked] = ReadSlot(tape.slot(row, checked=checked), row)
        return slot

    def _settle(self) -> None:
        """Write the rows of the tensors that the operator has measured. Waits, so the caller does not hold the lock."""
        tape = self._tape
        if tape is None:  # the reader was closed
            return
        try:
            tape.wait()
        finally:
            self._enter_all(tape)

    def _enter_all(self, tape: Tape) -> None:
        """Write the rows of all measurements so far."""
        with self.rows.lock:
            found = tape.drain()
            self._copied |= found.copied
            layouts = [self.rows.table.layout_of(shape, f"mindspore.{dtype}") for shape, dtype in found.layouts]
            self.rows.table.columns.layout[found.ids] = np.array(layouts, dtype=np.int64)[found.layout]
            for page in self.rows.table.pages:
                there = (found.ids >= page.first_row) & (found.ids < page.first_row + page.rows)
                if there.any():
                    assert isinstance(page.memory, HostPage)
                    local = found.ids[there] - page.first_row
                    page.memory.numbers[local] = found.rows[there]
                    if found.histograms is not None:
                        self.rows.host_histograms(page, self.device)[local] = found.histograms[there]

    def _record_now(self, watched: RecordedSeries, x: Any, micro_step: int = 0, elements: Raw | None = None) -> None:
        """``record``, which waits for a tensor on the host.

        Args:
            elements: The elements of a tensor on the host, if they were waited for.
        """
        if elements is None and self.device == HOST:
            elements = on_host(x)  # waits, which must happen without the lock
        with self.rows.lock:
            slot, offset = self.rows.slot(watched, self.device, micro_step)
            if self.magnitudes and elements is not None and (counts := count_magnitudes(elements)) is not None:
                _write_histogram(self.rows.histograms(slot.page, self.device), slot.local_row + offset, counts)
            kernel = self._checking_kernel if watched.checked else self._kernel
            if _reduce(kernel, x, slot.page, slot.local_row + offset, elements):
                self.rows.table.note(slot.row + offset, self._layout(x))

    def _enter(self, watched: RecordedSeries, x: TapedTensor, micro_step: int) -> None:
        """Write the row of a tensor that compiled code has measured."""
        with self.rows.lock:
            slot, offset = self.rows.slot(watched, self.device, micro_step)
            memory = slot.page.memory
            assert isinstance(memory, HostPage)
            memory.numbers[slot.local_row + offset] = x.row
            if x.histogram is not None:
                self.rows.host_histograms(slot.page, self.device)[slot.local_row + offset] = x.histogram
            self.rows.table.note(slot.row + offset, self.rows.table.layout_of(x.shape, dtype_name(x.dtype)))

    def record_all(
        self, items: Sequence[tuple[RecordedSeries, Any]], failed: Callable[[RecordedSeries, Exception], None]
    ) -> None:
        """Most of these tensors are computed: waiting for the first costs less than the operator. But MindSpore's thread reads
        every other large one, while this thread reads the others.
        """
        waited: list[tuple[RecordedSeries, Any, Raw | None]] = []
        for watched, x in items:
            try:
                if isinstance(x, TapedTensor) or has_data(x):
                    waited.append((watched, x, self._shared(x)))
            except Exception as error:
                failed(watched, error)
        theirs = cycle((True, False))
        for watched, x, elements in waited:
            try:
                if isinstance(x, TapedTensor):
                    self._enter(watched, x, 0)
                elif elements is None or elements.nbytes < LARGE or not (next(theirs) and self._record_later(watched, x)):
                    self._record_now(watched, x, elements=elements)
            except Exception as error:
                failed(watched, error)

    def _shared(self, x: Any) -> Raw | None:
        """The elements of a tensor, for which this waits; None if the operator cannot be used, or if they would be a copy."""
        return on_host(x) if self._tape is not None and not isinstance(x, TapedTensor) and x.is_contiguous() else None

    def record_numbers(
        self, watched: RecordedSeries, numbers: Mapping[int, Any], x: Any, micro_step: int = 0, *, histogram: Any = None
    ) -> None:
        if not has_data(x):
            return
        numbers = {column: _on_host_number(one) for column, one in numbers.items()} if self.device == HOST else numbers
        with self.rows.lock, beneath():
            slot, offset = self.rows.slot(watched, self.device, micro_step)
            if histogram is not None:
                _write_histogram(self.rows.histograms(slot.page, self.device), slot.local_row + offset, histogram)
            _write_numbers(slot.page.memory, slot.local_row + offset, numbers)
            self.rows.table.note(slot.row + offset, self._layout(x))

    def record_block(self, watched: Sequence[RecordedSeries], numbers: Mapping[int, Any], x: Any, micro_step: int = 0) -> None:
        if not has_data(x):
            return
        if self.device == HOST:
            numbers = {column: on_host(one) if isinstance(one, Tensor) else one for column, one in numbers.items()}
        with self.rows.lock, beneath():
            block = self.rows.block(watched, self.device, micro_step)
            _write_block(block.page.memory, block.local, numbers)
            self.rows.table.note_block(block.rows, self._layout(x))

    def read_into(self, x: Any, slot: RowSlot) -> bool:
        if not _reduce(self._kernel, x, slot.page, slot.local_row):
            return False
        self.rows.table.note(slot.row, self._layout(x))
        return True

    def _layout(self, x: Any) -> int:
        return self.rows.table.layout_of(tuple(x.shape), dtype_name(x.dtype))


def _reduce(
    kernel: MindSporeHostKernel | MindSporeDeviceKernel, x: Any, page: Page, local_row: int, elements: Raw | None = None
) -> bool:
    """Returns False, and writes nothing, if ``x`` has no data.

    Args:
        elements: The elements of a tensor on the host, if they were read.
    """
    memory = page.memory
    if isinstance(memory, HostPage):
        assert isinstance(kernel, MindSporeHostKernel)
        if elements is not None:
            return kernel.reduce_array(elements, memory.numbers, local_row)
        return kernel.reduce_into(x, memory.numbers, local_row)
    assert isinstance(memory, MindSporeDevicePage)
    assert isinstance(kernel, MindSporeDeviceKernel)
    # ``beneath`` would convert float64 to float32.
    with computing() if x.dtype == ms.float64 else beneath():
        rows = kernel.reduce(x)
    if rows is not None:
        memory.write(local_row, rows, partial(combined, words=kernel.words(x)))
    return rows is not None


def _new_memory(rows: int, device: Device, columns: int, cleared: int | slice) -> PageMemory:
    return HostPage(rows, columns, cleared) if device == HOST else MindSporeDevicePage(rows, columns)


def _on_host_number(number: Any) -> float:
    return float(on_host(number).reshape(-1)[0]) if isinstance(number, Tensor) else number


def _write_numbers(page: PageMemory, row: int, numbers: Mapping[int, Any]) -> None:
    """Write a row, with 0 in columns that ``numbers`` lacks. Does not wait for tensors on a device."""
    fixed = {column: one for column, one in numbers.items() if not isinstance(one, Tensor)}
    read = partial(_row, {WRITES: 1.0, **fixed}, [column for column in numbers if column not in fixed])
    if isinstance(page, HostPage):
        page.numbers[row] = read(np.empty(0))
        return
    assert isinstance(page, MindSporeDevicePage)
    there = [one.reshape(1).to(ms.float32) for column, one in numbers.items() if column not in fixed]
    page.write(row, mint.cat(there) if there else Tensor([0.0], ms.float32), read)


def _write_block(page: PageMemory, rows: range, numbers: Mapping[int, Any]) -> None:
    """``_write_numbers`` for several rows, with one element of each tensor for each row, or one for all of them."""
    fixed = {column: one for column, one in numbers.items() if not isinstance(one, Tensor)}
    several = {column: one.reshape(-1) for column, one in numbers.items() if column not in fixed}
    read = partial(_block, len(rows), {WRITES: 1.0, **fixed}, {column: one.shape[0] for column, one in several.items()})
    if isinstance(page, HostPage):
        page.numbers[rows.start : rows.stop : rows.step] = read(np.empty(0))
        return
    assert isinstance(page, MindSporeDevicePage)
    there = [one.to(ms.float32) for one in several.values()]
    page.write(rows, mint.cat(there) if there else Tensor([0.0], ms.float32), read)


def _block(rows: int, fixed: Mapping[int, Any], sizes: Mapping[int, int], numbers: Raw) -> Floats:
    block = np.zeros((rows, len(COLUMNS)))
    for column, number in fixed.items():
        block[:, column] = number
    start = 0
    for column, size in sizes.items():
        block[:, column] = numbers[start : start + size]
        start += size
    return block


def _row(fixed: Mapping[int, float], columns: Sequence[int], numbers: Raw) -> Floats:
    row = np.zeros(len(COLUMNS))
    for column, number in fixed.items():
        row[column] = number
    row[list(columns)] = numbers[: len(columns)]
    return row


def _write_histogram(page: PageMemory, row: int, counts: Raw | Tensor) -> None:
    """Write the bins of a row, with 0 in bins beyond ``counts``."""
    if isinstance(page, HostPage):
        page.numbers[row] = 0.0
        page.numbers[row, : len(counts)] = counts
        return
    assert isinstance(page, MindSporeDevicePage)
    width = page.shape[1]
    page.write(row, counts, lambda bins: np.pad(bins.astype(np.float64), (0, width - len(bins))))
