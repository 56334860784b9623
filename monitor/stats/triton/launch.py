"""Launches the fused kernel, which reads a tensor once and writes its row. The kernel's source is in ``triton.source``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.failures import LOGGER
from monitor.stats.ops import Epsilon
from monitor.stats.partials import COLUMNS
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.torch.memory import made_here, persistent, pinned
from monitor.stats.torch.tensors import BYPASSED_KEYS, PLAIN, beneath, in_memory_order, readable
from monitor.stats.triton.reading import FORMATS, READ, Blocks, Cut, ElementFormat, cut

# --- Launches that cost little more than the driver's call.
#
# Triton's own launch inspects the type and alignment of every argument and looks up the compiled variant, which takes
# tens of microseconds. Here the variant is known after its first launch, because arguments are integers of fixed types.


@dataclass(frozen=True, slots=True)
class Driver:
    """The functions of a device's driver that a launch needs.

    Attributes:
        device: Returns the current device's index.
        stream: Returns the handle of a device's current stream.
        capturing: Whether the current stream is captured into a graph.
        on: A context that makes a device the current one.
        warp: Threads that a device runs in lockstep.
    """

    device: Callable[[], int]
    stream: Callable[[int], int]
    capturing: Callable[[], bool]
    on: Callable[[int], Any]
    warp: int = 32


class Launch:
    """One variant of a kernel, on one device.

    Args:
        function: The kernel, ``@triton.jit``.
        constants: The kernel's constants, which follow its other arguments.

    Attributes:
        ready: Whether it has run before, so that nothing needs compiling.
    """

    def __init__(self, function: Any, constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._constants = dict(constants)
        self._options = dict(options)
        self._values = tuple(constants.values())
        self._run: Callable[..., object] | None = None
        self._handle: tuple[Any, Any] = (None, None)
        self.ready = False

    def __call__(self, programs: int, stream: int, *arguments: float) -> None:
        """Launch ``programs`` programs in ``stream``, which must be the current stream. Does not wait."""
        if self._run is None:
            self._first(programs, arguments)
        else:
            function, packed = self._handle
            self._run(programs, 1, 1, stream, function, packed, None, None, None, *arguments, *self._values)

    def _first(self, programs: int, arguments: tuple[float, ...]) -> None:
        """Use Triton's own launch, which compiles. Later calls launch the compiled kernel directly, if its form is known."""
        compiled = self._function[(programs, 1, 1)](*arguments, **self._constants, **self._options)
        try:
            self._handle = (compiled.function, compiled.packed_metadata)
            self._run = compiled.run
        except AttributeError:  # the interpreter, or a different Triton: use its own launch each time
            self._run = None
        self.ready = self._run is not None


# --- Memory for the rows of parts until the last program of a tensor combines them.

PART_COLUMNS: Final = len(COLUMNS) - 1
"""Numbers of a part, float64 (``COLUMNS`` in the source)."""

_PARTS: Final = 2048
_TENSORS: Final = 1024

New = Callable[[torch.device, Callable[[], Tensor]], Tensor]


class Workspace:
    """Memory for the rows of parts. It belongs to one stream, whose launches run in order, or to one captured launch.

    Args:
        new: Allocates the memory.

    Attributes:
        rows: Address of the parts' rows.
        counters: Address of one int32 per tensor, which counts its finished programs. The last program resets it to 0.
    """

    def __init__(self, device: torch.device, parts: int = _PARTS, tensors: int = _TENSORS, new: New = persistent) -> None:
        self._device = device
        self._new = new
        self._parts, self._rows = parts, self._new_rows(parts)
        self._tensors, self._counters = tensors, self._new_counters(tensors)
        self.rows, self.counters = self._rows.data_ptr(), self._counters.data_ptr()

    def reserve(self, parts: int, tensors: int) -> None:
        """Make room for so many. Old memory is freed only after the stream's pending work on it."""
        if parts > self._parts:
            room = 1 << (parts - 1).bit_length()
            self._rows = self._new_rows(room)
            self._parts, self.rows = room, self._rows.data_ptr()
        if tensors > self._tensors:
            room = 1 << (tensors - 1).bit_length()
            self._counters = self._new_counters(room)
            self._tensors, self.counters = room, self._counters.data_ptr()

    def _new_rows(self, parts: int) -> Tensor:
        return self._new(self._device, lambda: torch.empty(parts * PART_COLUMNS, dtype=torch.float64, device=self._device))

    def _new_counters(self, tensors: int) -> Tensor:
        return self._new(self._device, lambda: torch.zeros(tensors, dtype=torch.int32, device=self._device))


ROW_BYTES: Final = 8 * len(COLUMNS)
MOST_DIMS: Final = 4
"""Most dimensions of a strided view, with adjacent ones merged, that the kernel supports."""

EVEN: Final = 16
"""Tensors whose size is a multiple of this are read in whole groups to their end."""

TRITON_ADVICE: Final = (
    "Install a C compiler, set TRITON_CACHE_DIR to a writable directory, and use the version of Triton that torch requires."
)
MOST_CUTS: Final = 4096
_FAR: Final = 1 << 31
_DENSE: Final = (0,) * 7


class FusedEngine:
    """The kernels of this process, as compiled so far, and their workspaces.

    Args:
        source: The module ``triton.source``.
    """

    def __init__(self, source: Any, driver: Driver, blocks: Blocks | None = None) -> None:
        self.driver = driver
        self.blocks = blocks or Blocks()
        self._source = source
        self._workspaces: dict[tuple[int, int], Workspace] = {}
        self._launches: dict[tuple[object, ...], Launch | None] = {}
        self._announced = False
        self.cuts: dict[tuple[int, int], Cut] = {}

    def cut(self, elements: int, lane: int) -> Cut:
        """How a tensor of so many elements is cut, cached in ``cuts``: a model has few sizes of tensors."""
        if len(self.cuts) >= MOST_CUTS:
            self.cuts.clear()
        found = self.cuts[elements, lane] = cut(elements, lane, self.blocks)
        return found

    def workspace(self, x: Tensor, stream: int, parts: int, tensors: int = 1) -> Workspace:
        """The workspace of the current stream, with handle ``stream``, on the device of ``x``; with the requested room.

        A captured launch gets a new workspace from the graph's memory, freed after the launch: the graph may run in any stream,
        beside others. Setting its counters to 0 is captured too.
        """
        if self.driver.capturing():
            return Workspace(x.device, parts, tensors, made_here)
        key = x.get_device(), stream
        workspace = self._workspaces.get(key)
        if workspace is None:
            workspace = self._workspaces[key] = Workspace(x.device)
        workspace.reserve(parts, tensors)
        return workspace

    def launch(self, kernel: str, format_: ElementFormat, device: int, **layout: Any) -> Launch | None:
        """The variant for a dtype and a layout; None if it does not run here."""
        key = (kernel, format_, device, *layout.values())
        if key not in self._launches:
            self._launches[key] = self._new_launch(kernel, format_, layout)
        return self._launches[key]

    def _new_launch(self, kernel: str, format_: ElementFormat, layout: dict[str, Any]) -> Launch | None:
        try:
            function = getattr(self._source, kernel)
            given = constants(function, self._source.tl, format_, self.blocks, layout)
            return Launch(function, given, options(format_, self.blocks, self.driver.warp))
        except Exception as error:
            _warn_not_running(kernel, format_, error)
            return None

    def run(self, launch: Launch, device: int, programs: int, stream: int, *arguments: float) -> bool:
        """Launch. False if the first launch of a variant fails; then a warning is logged and it is not tried again."""
        if device != self.driver.device():
            with self.driver.on(device):
                return self.run(launch, self.driver.device(), programs, stream, *arguments)
        if launch.ready:
            launch(programs, stream, *arguments)
            return True
        if self.driver.capturing():  # do not compile during a capture
            return False
        self._announce_compiling()
        try:
            launch(programs, stream, *arguments)
        except Exception as error:
            self._disable(launch, error)
            return False
        return True

    def _disable(self, launch: Launch, error: Exception) -> None:
        for key in [key for key, known in self._launches.items() if known is launch]:
            self._launches[key] = None
            _warn_not_running(key[0], key[1], error)

    def _announce_compiling(self) -> None:
        if not self._announced:
            self._announced = True
            LOGGER.info("Compiling the fused kernels takes 1 to 6 s per kind of tensor. Triton caches them for later runs.")


def _warn_not_running(kernel: object, format_: object, error: Exception) -> None:
    LOGGER.warning(
        "The fused kernel %s for %s does not run here: %r. Slower torch operators replace it and give the same rows. %s",
        kernel, format_, error, TRITON_ADVICE,
    )  # fmt: skip


def constants(
    function: Any, language: Any, format_: ElementFormat, blocks: Blocks, layout: Mapping[str, Any]
) -> dict[str, Any]:
    """The constants of a kernel, by name.

    Args:
        language: ``triton.language``.
        layout: ``ALIGNED``, ``EVEN``, ``HIGHER``, ``CHECK`` and, for a single tensor, ``DIMS``, ``INDEX`` and ``GROUP``, as in
            the source.
    """
    group = layout.get("GROUP", format_.group)
    sizes = {"R": format_.lane(layout["ALIGNED"]) // group, "LANES": blocks.lanes, "GROUP": group, "ROWS": blocks.rows}
    types = {"ELEMENT": getattr(language, format_.element), "WORK": getattr(language, format_.work)}
    given = dict(layout) | sizes | types | {"DECODE": format_.decode, "LEAST": format_.least, "ROW_BYTES": ROW_BYTES}
    if "INDEX" in given:
        given["INDEX"] = getattr(language, given["INDEX"])
    return {name: given[name] for name in function.arg_names if name.isupper()}


def options(format_: ElementFormat, blocks: Blocks, warp: int) -> dict[str, Any]:
    """Compiler options. Code that emulates exact rounding (complex128) must not be fused."""
    return {"num_warps": max(1, blocks.lanes // warp), "enable_fp_fusion": format_.decode != "complex128"}


class FusedKernel:
    """Reduces tensors of a device to table rows, in stream order. The portable kernel reduces tensors that it cannot read.

    Attributes:
        measured: Which of the higher moments and the check sums (``partials``) are measured, as constants of the source.
    """

    def __init__(
        self,
        eps: float,
        engine: FusedEngine,
        portable: TorchDeviceKernel | None = None,
        *,
        higher: bool = False,
        check_sums: bool = False,
    ) -> None:
        self._engine = engine
        self.measured = {"HIGHER": higher, "CHECK": check_sums}
        self._portable = portable or TorchDeviceKernel(eps, higher=higher, check_sums=check_sums)
        self.bounds = {"float32": Epsilon.of(eps, np.float32).bound, "float64": Epsilon.of(eps, np.float64).bound}
        self._known: dict[tuple[torch.dtype, int, bool, bool], tuple[Launch, ElementFormat, int]] = {}

    def reduce_into(self, x: Tensor, page: Tensor, row: int, offset: Tensor | None = None) -> bool:
        """Write the partials of ``x`` into ``page[row + offset]``. False, and nothing written, if ``x`` has no data to read.

        Args:
            page: float64, shape ``(rows, len(COLUMNS))``, contiguous, on the device of ``x``.
            offset: An integer on the same device. If it is negative, nothing is read or written.
        """
        return self.reduces(x, page, row, offset) or self._portable.reduce_into(x, page, row, offset)

    def reduces(self, x: Tensor, page: Tensor, row: int, offset: Tensor | None = None) -> bool:
        """``reduce_into`` without the portable kernel. False, and nothing written, if ``x`` is unsupported or has no data."""
        if is_dense(x):
            return self._dense(x, 1, page, row, offset)
        return self._other(x, page, row, offset)

    def _dense(self, x: Tensor, repeats: int, page: Tensor, row: int, offset: Tensor | None) -> bool:
        address, n = x.data_ptr(), x.numel()
        if is_freed(x, address, n):
            return False
        return self.reduces_elements(x, x.get_device(), address, n, page.data_ptr() + row * ROW_BYTES, repeats, offset)

    def reduces_elements(
        self, x: Tensor, device: int, address: int, n: int, into: int, repeats: int = 1, offset: Tensor | None = None
    ) -> bool:
        """``reduces`` for a dense tensor.

        Args:
            device: The index of the tensor's device.
            address, n: The address of its first element, and their number.
            into: The address of the row.
        """
        key = (x.dtype, device, not address % READ, not n % EVEN)
        known = self._known.get(key) or self._meet(key)
        if known is None:
            return False
        return self._launch(*known, x, device, address, n, repeats, into, offset, _DENSE)

    def _meet(self, key: tuple[torch.dtype, int, bool, bool]) -> tuple[Launch, ElementFormat, int] | None:
        dtype, device, aligned, even = key
        format_ = FORMATS.get(dtype)
        if format_ is None:
            return None
        layout = {"DIMS": 0, "INDEX": "uint32", "ALIGNED": aligned, "EVEN": even, **self.measured}
        launch = self._engine.launch("reduce_one", format_, device, **layout)
        if launch is None:
            return None
        found = launch, format_, format_.lane(aligned)
        if launch.ready:
            self._known[key] = found
        return found

    def _launch(
        self, launch: Launch, format_: ElementFormat, lane: int, x: Tensor, device: int, address: int, n: int, repeats: int,
        into: int, offset: Tensor | None, layout: tuple[int, ...],
    ) -> bool:  # fmt: skip
        engine = self._engine
        shape = engine.cuts.get((n, lane)) or engine.cut(n, lane)
        stream = engine.driver.stream(device)
        rows = counters = below = 0
        if shape.parts > 1:
            workspace = engine.workspace(x, stream, shape.parts)
            rows, counters = workspace.rows, workspace.counters
        if offset is not None:
            offset = offset if offset.dtype is torch.int64 else offset.to(torch.int64)
            below = offset.data_ptr()
        return engine.run(
            launch, device, shape.parts, stream,
            address, n, shape.parts, shape.tiles, into, below, rows, counters, self.bounds[format_.work], repeats, *layout,
        )  # fmt: skip

    def _other(self, x: Tensor, page: Tensor, row: int, offset: Tensor | None) -> bool:
        """Reduce any tensor that is not a dense one of torch's own types. False if it is unsupported or has no data."""
        with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
            source = readable(x)
            if source is None or source.implicit_zeros or source.dense.is_neg() or source.dense.dtype not in FORMATS:
                return False
            dense = source.dense
            view = dense if dense.is_contiguous() else in_memory_order(dense)
            if view.dim() > MOST_DIMS and not view.is_contiguous():
                return False
            if view.is_contiguous():
                return self._dense(view, source.repeats, page, row, offset)
            return self._strided(view, source.repeats, page, row, offset)

    def _strided(self, x: Tensor, repeats: int, page: Tensor, row: int, offset: Tensor | None) -> bool:
        """Reduce a strided view with its dimensions in memory order."""
        format_ = FORMATS[x.dtype]
        n, sizes, strides = x.numel(), x.shape, x.stride()
        whole = strides[-1] == 1 and not sizes[-1] % format_.group  # groups of adjacent elements
        group = format_.group if whole else 1
        aligned = whole and not x.data_ptr() % READ and not any(stride % group for stride in strides[:-1])
        launch = self._engine.launch(
            "reduce_one", format_, x.get_device(), DIMS=x.dim(), INDEX="uint32" if n < _FAR else "uint64",
            ALIGNED=aligned, EVEN=not n % EVEN, GROUP=group, **self.measured,
        )  # fmt: skip
        if launch is None:
            return False
        layout = (*sizes[1:], *(0,) * (MOST_DIMS - x.dim()), *strides, *(0,) * (MOST_DIMS - x.dim()))
        place = x.get_device(), x.data_ptr()
        into = page.data_ptr() + row * ROW_BYTES
        return self._launch(launch, format_, format_.lane(aligned), x, *place, n, repeats, into, offset, layout)


# --- Reduces many tensors in one launch per dtype, whatever pages their rows are on.
#
# A launch reads addresses, sizes and rows from a table in the device's memory. The table is sent only if it differs
# from the last one for the same rows, from pinned memory and without waiting. torch's allocator reuses pinned memory
# only after the copy from it is done. In the stream, the copy follows the launch that read the old table.

MOST_TABLES: Final = 64
"""Most tables kept in memory. A model's lists are the same in each step."""

FIELDS: Final = 6
"""Columns of a table: address, elements, address of the row, parts, tiles of a part, sum of the parts of earlier tensors."""

Kind = tuple[int, torch.dtype, bool, bool]
"""A variant of the kernel: device, dtype, and whether all tensors begin, and end, so that whole groups can be read."""


@dataclass(slots=True)
class TensorGroup:
    """The tensors of one launch.

    Attributes:
        first: The first of the tensors.
        addresses: Addresses of their first elements.
        sizes: Numbers of elements.
        rows: Addresses of their rows.
        places: Their indices in the list, where that is asked.
    """

    first: Tensor
    addresses: list[int]
    sizes: list[int]
    rows: list[int]
    places: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SentTable:
    """A table in the device's memory, and its content."""

    memory: Tensor
    addresses: list[int]
    sizes: list[int]
    programs: int


class FusedList:
    """Reduces lists of tensors of one device."""

    def __init__(self, kernel: FusedKernel, engine: FusedEngine) -> None:
        self._kernel = kernel
        self._engine = engine
        self._tables: OrderedDict[tuple[Kind, int, tuple[int, ...]], SentTable] = OrderedDict()

    def reduce_into(self, tensors: Sequence[Tensor], pages: Sequence[Tensor], rows: Sequence[int]) -> list[int]:
        """Write the partials of each tensor into ``page[row]``; tensors, pages and rows are aligned.

        Returns:
            Indices of the tensors that were not reduced and must be reduced one by one.
        """
        if self._engine.driver.capturing():  # each replay of the graph would read the table again
            return list(range(len(tensors)))
        groups, left = _gathered(tensors, pages, rows)
        for kind, group in groups.items():
            if not self.launches(kind, group):
                left.extend(group.places)
        return left

    def launches(self, kind: Kind, group: TensorGroup) -> bool:
        """Reduce the tensors of a group. False if the kernel does not run, or a dtype is not supported."""
        device, dtype, aligned, even = kind
        if dtype not in FORMATS:
            return False
        format_ = FORMATS[dtype]
        launch = self._engine.launch("reduce_many", format_, device, ALIGNED=aligned, EVEN=even, **self._kernel.measured)
        if launch is None:
            return False
        stream = self._engine.driver.stream(device)
        table = self._table(kind, stream, group, format_)
        workspace = self._engine.workspace(group.first, stream, table.programs, len(group.rows))
        return self._engine.run(
            launch, device, table.programs, stream,
            table.memory.data_ptr(), len(group.rows), workspace.rows, workspace.counters, self._kernel.bounds[format_.work],
        )  # fmt: skip

    def _table(self, kind: Kind, stream: int, group: TensorGroup, format_: ElementFormat) -> SentTable:
        key = (kind, stream, tuple(group.rows))
        table = self._tables.get(key)
        if table is not None and table.addresses == group.addresses and table.sizes == group.sizes:
            self._tables.move_to_end(key)
            return table
        numbers, programs = contents(group, format_.lane(kind[2]), self._engine)
        with beneath():
            memory = _sent(numbers, group.first.device, None if table is None else table.memory)
        self._tables[key] = SentTable(memory, group.addresses, group.sizes, programs)
        if len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)
        return self._tables[key]


def _gathered(
    tensors: Sequence[Tensor], pages: Sequence[Tensor], rows: Sequence[int]
) -> tuple[dict[Kind, TensorGroup], list[int]]:
    """Dense tensors grouped by launch, and the indices of the other tensors."""
    groups: dict[Kind, TensorGroup] = {}
    left: list[int] = []
    bases: dict[int, int] = {}
    for place, (x, page, row) in enumerate(zip(tensors, pages, rows, strict=True)):
        if not is_dense(x) or x.dtype not in FORMATS:
            left.append(place)
            continue
        address, n = x.data_ptr(), x.numel()
        if is_freed(x, address, n):
            left.append(place)
            continue
        kind = (x.get_device(), x.dtype, not address % READ, not n % EVEN)
        group = groups.get(kind)
        if group is None:
            group = groups[kind] = TensorGroup(x, [], [], [])
        base = bases.get(id(page))
        if base is None:
            base = bases[id(page)] = page.data_ptr()
        group.addresses.append(address)
        group.sizes.append(n)
        group.rows.append(base + row * ROW_BYTES)
        group.places.append(place)
    return groups, left


def is_dense(x: Tensor) -> bool:
    """Whether ``x`` is of torch's own types, and its elements lie side by side in memory, as they are."""
    return type(x) in PLAIN and x.layout is torch.strided and x.is_contiguous() and not x.is_neg() and not x.is_meta


def is_freed(x: Tensor, address: int, n: int) -> bool:
    """Whether the ``n`` elements of a dense tensor, from ``address`` on, are in no memory."""
    return n > 0 and address <= x.storage_offset() * x.itemsize


def is_listed(x: Tensor) -> bool:
    """Whether ``x`` can be in a list: a dense tensor of torch's own types, in memory, of a dtype that the kernel reads."""
    return is_dense(x) and x.dtype in FORMATS and not is_freed(x, x.data_ptr(), x.numel())


def contents(group: TensorGroup, lane: int, engine: FusedEngine) -> tuple[NDArray[np.int64], int]:
    """The table, int64, and the number of programs. It has ``FIELDS`` columns, then the index of each program's tensor."""
    cuts = [engine.cuts.get((size, lane)) or engine.cut(size, lane) for size in group.sizes]
    parts = np.array([one.parts for one in cuts])
    before = np.cumsum(parts) - parts
    tiles, whose = [one.tiles for one in cuts], np.repeat(np.arange(len(parts)), parts)
    columns = [group.addresses, group.sizes, group.rows, parts, tiles, before, whose]
    return np.concatenate([np.asarray(column, dtype=np.int64) for column in columns]), int(parts.sum())


def _sent(numbers: NDArray[np.int64], device: torch.device, room: Tensor | None) -> Tensor:
    """``numbers`` in the device's memory, in ``room`` if they fit. Does not wait."""
    if device.type == "cpu":
        return persistent(device, lambda: torch.from_numpy(numbers))
    sent = pinned([len(numbers)], torch.int64)
    sent.numpy()[:] = numbers
    if room is None or len(room) < len(numbers):
        room = persistent(device, lambda: torch.empty(len(numbers), dtype=torch.int64, device=device))
    room[: len(numbers)].copy_(sent, non_blocking=True)
    return room
