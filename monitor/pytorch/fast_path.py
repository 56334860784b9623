"""The ordinary way from torch's hooks to rows, in C (``fast_path.c``), and in Python where that was not built.

Ordinary are dense tensors of floats in host memory, and those on a device that a single launch reads (``Reader.launch``). The
code in C needs DLPack's exchange of tensors (torch 2.10), and relies on the GIL. ``MONITOR_NATIVE=0`` switches it
off.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction

from monitor.recording.recorder import Due, RecordedSeries
from monitor.stats.table import StatsTable

if TYPE_CHECKING:
    from monitor.pytorch.gradients import GradientReductions
    from monitor.pytorch.hooks import ChangeDetector
    from monitor.recording.attached_model import NamedParameter

try:
    from monitor.pytorch import _fast_path
    from monitor.stats import _host_kernel
except ImportError:
    _fast_path = None  # type: ignore[assignment]


def _can_be_used() -> bool:
    """Whether this version of torch has all that the code in C needs."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    is_lazy_copy = getattr(torch._C, "_is_cow_tensor", None)
    name = getattr(_fast_path, "KERNEL", "")  # of another build, it may not be there
    if _fast_path is None or not hasattr(_host_kernel, name) or exchange is None or is_lazy_copy is None:
        return False
    functions: Any = torch._C._functions
    accumulation, forwarding = functions.AccumulateGrad, BackwardHookFunction._backward_cls
    sequence_nr, backward = torch._C._autograd._get_sequence_nr, torch._C._current_graph_task_id
    found = exchange, Tensor, torch.nn.Parameter, accumulation, forwarding, is_lazy_copy, sequence_nr, backward, OrderedDict
    return _fast_path.set_up(*found)


IN_C: Final = _can_be_used()
"""Whether the code in C is there and can be used."""

MOST_TENSORS: Final = _fast_path.MOST_LEAVES if IN_C else 0
"""Tensors of a plan that the code in C takes."""

Failed = Callable[[RecordedSeries, Exception], None]


class Arrivals(Protocol):
    """Reads the gradients of one parameter, without Python, as long as they are only to be read."""

    def take(self, parameter: Tensor) -> bool:
        """A backward has added to the gradient of ``parameter``. Returns whether nothing is left to do about it."""


class PythonReader:
    """The reader's entries where there is no code in C. The arguments are those of ``TensorReader``.

    Attributes:
        ready: Whether ordinary tensors are recorded in C.
    """

    ready = False

    def _share(
        self,
        table: StatsTable,
        layouts: dict[bytes, int],
        seen: dict[int, Any],
        most_seen: int,
        device: torch.device,
        lock: Any,
        read: int,
        even: int,
    ) -> None:
        """Give the code in C the state that it works on.

        Args:
            most_seen: When ``seen`` has so many entries, it is emptied.
            read, even: Tensors on a device have a kernel of their own if their address, or their number of elements, is a
                multiple of these.
        """

    def _measure(self, narrow: float, wide: float, higher: bool, check_sums: bool, magnitudes: bool, ready: bool) -> None:
        """Tell the code in C what to measure.

        Args:
            narrow, wide: Elements of less than 64 bits, and those of 64, count as zeros below these bounds.
            magnitudes: Whether histograms are counted.
            ready: Whether it records ordinary tensors from now on.
        """

    def begin_call(self, plan: Any, values: tuple[Any, ...], micro_step: int, forward: bool, graph: bool) -> Any:
        """Record the arguments of a call that fit the plan (``plans``), and find the targets of their gradients.

        Args:
            forward: Whether arguments are recorded.
            graph: Whether targets are to be found.

        Returns:
            None if they do not fit: then nothing is done. Otherwise the targets and the series of each; False if these are not
            ordinary; True without ``graph``.
        """

    def end_call(
        self, plan: Any, result: Any, forward: bool, graph: bool, targets: Any, start: int, gate: Any, step: int,
        micro_step: int, known: dict[Any, Any], several: Callable[[Any, Any, Any], None],
    ) -> int | None:  # fmt: skip
        """Record the result of a call, and have its gradients and those of the inputs recorded.

        Args:
            forward: Whether the result is recorded.
            graph: Whether gradients are.
            start: Autograd's sequence number before the call.
            gate, step, micro_step: For the hooks: see ``GradientGate``.
            known: The nodes of the graph that calls within this one have visited, filled in further.
            several: Called for a target with several edges, with the edges and what records a gradient.

        Returns:
            None if the result does not fit: then nothing is done. Otherwise 1 if the gradients of the result are left, plus 2
            if those of the inputs are.
        """

    def arrivals(
        self,
        watched: RecordedSeries,
        due: Due,
        reductions: GradientReductions,
        changes: ChangeDetector,
        parameter: NamedParameter,
    ) -> Arrivals | None:
        """What takes the gradients of ``parameter`` into the series ``watched``; None where there is no code in C.

        Args:
            reductions: Its ``only_read`` says of which backward. Referenced weakly, like ``changes`` and ``parameter``.
            changes: Its ``latest`` is set.
        """

    def record(self, watched: RecordedSeries, x: Tensor, micro_step: int = 0, *, aliases: bool = True) -> None:
        self.record_in_python(watched, x, micro_step, aliases)

    def record_ordinary(self, watched: RecordedSeries, x: Tensor, micro_step: int, value: int) -> bool | None:
        """Record a tensor of compiled code, if it is ordinary. Returns whether it is; otherwise nothing is done.

        Args:
            value: See ``TorchTensorReader.record_value``.
        """

    def record_all(self, items: Sequence[tuple[RecordedSeries, Tensor]], failed: Failed) -> None:
        self.record_all_in_python(items, failed)

    def record_in_python(self, watched: RecordedSeries, x: Tensor, micro_step: int, aliases: bool) -> None:
        raise NotImplementedError

    def record_all_in_python(self, items: Sequence[tuple[RecordedSeries, Tensor]], failed: Failed) -> None:
        raise NotImplementedError


class PythonReadTensor:
    """A tensor that was read, and its row. ``x.data = ...`` changes the address of its elements, and no version."""

    __slots__ = ("address", "layout", "row", "tensor", "version")

    def __init__(self, tensor: Tensor, version: object, row: int, layout: int, address: int) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = version
        self.row = row
        self.layout = layout
        self.address = address


if TYPE_CHECKING:
    Reader = PythonReader
    ReadTensor = PythonReadTensor
elif IN_C:
    Reader, ReadTensor = _fast_path.Reader, _fast_path.ReadTensor
else:
    Reader, ReadTensor = PythonReader, PythonReadTensor
