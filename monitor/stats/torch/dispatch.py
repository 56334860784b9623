"""``monitor::reduce_into``: the operator that calls a device's kernel, the same in eager and in compiled code.

To a compiler the operator is a black box that mutates the page, so it is neither reordered with others of its kind nor dropped.
A row is a static number plus the micro-step. Compiled code passes the micro-step as a tensor, because a Python int would be
compiled anew for each value. The device of the page selects the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from monitor.failures import LOGGER
from monitor.stats.partials import COLUMNS
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.torch.host_kernel import TorchHostKernel
from monitor.stats.torch.memory import TorchDevicePage
from monitor.stats.torch.tensors import asks_for_capture, capturing
from monitor.stats.triton.launch import TRITON_ADVICE, Driver, FusedEngine, FusedKernel, FusedList

# --- The kernel of each device: the fused one if Triton is installed, has a backend for the device, and a first launch
# succeeds; else the portable one.


class DeviceKernels:
    """The kernels of a process for each of its devices, made when they are first needed."""

    def __init__(self) -> None:
        self._engines: dict[str, FusedEngine | None] = {}
        self._kernels: dict[tuple[float, bool, bool, str], TorchDeviceKernel | FusedKernel] = {}
        self._lists: dict[tuple[float, bool, bool, str], FusedList | None] = {}

    def kernel(
        self, eps: float, device: torch.device, *, higher: bool = False, check_sums: bool = False
    ) -> TorchDeviceKernel | FusedKernel:
        """The kernel for a single tensor of ``device``.

        Args:
            higher, check_sums: Whether it measures the higher moments, and the check sums (``partials``).
        """
        found = self._kernels.get((eps, higher, check_sums, device.type))
        return self._new_kernel(eps, higher, check_sums, device) if found is None else found

    def list(self, eps: float, device: torch.device, *, higher: bool = False, check_sums: bool = False) -> FusedList | None:
        """The kernel for many tensors of ``device`` at once; None if there is none."""
        key = (eps, higher, check_sums, device.type)
        if key not in self._lists:
            kernel = self.kernel(eps, device, higher=higher, check_sums=check_sums)
            engine = self._engines.get(device.type)
            if engine is None or not isinstance(kernel, FusedKernel):
                return None
            self._lists[key] = FusedList(kernel, engine)
        return self._lists[key]

    def _new_kernel(self, eps: float, higher: bool, check_sums: bool, device: torch.device) -> TorchDeviceKernel | FusedKernel:
        portable = TorchDeviceKernel(eps, higher=higher, check_sums=check_sums)
        if device.type not in self._engines and capturing(device):
            return portable  # for now: nothing is tried during the capture of a graph
        engine = self._engine(device)
        kernel = portable if engine is None else FusedKernel(eps, engine, portable, higher=higher, check_sums=check_sums)
        self._kernels[eps, higher, check_sums, device.type] = kernel
        return kernel

    def _engine(self, device: torch.device) -> FusedEngine | None:
        if device.type not in self._engines:
            self._engines[device.type] = engine_for(device)
        return self._engines[device.type]


def engine_for(device: torch.device) -> FusedEngine | None:
    """The fused kernels for devices of this type; None if they do not run, with a warning if they should."""
    try:
        driver = _driver_of(device)
        if driver is None:
            return None
        from monitor.stats.triton import source

        engine = FusedEngine(source, driver)
        if _runs(engine, device):  # else a warning was logged
            return engine
    except Exception as error:
        LOGGER.warning(
            "The fused kernels do not run on %s: %r. Slower torch operators replace them and give the same rows. %s",
            device.type, error, TRITON_ADVICE,
        )  # fmt: skip
    return None


def _driver_of(device: torch.device) -> Driver | None:
    """Triton's driver; None if Triton is not installed or has no backend for such devices, which is not an error."""
    try:
        import triton
    except ImportError:
        return None
    if not any(backend.driver.is_active() for backend in triton.backends.backends.values()):
        return None
    active = triton.runtime.driver.active
    if active.get_active_torch_device().type != device.type:
        return None
    if _is_interpreted(triton):
        raise RuntimeError("TRITON_INTERPRET is set, so kernels would run on the host")
    warp = active.get_current_target().warp_size
    current = getattr(torch._C, "_accelerator_getDeviceIndex", active.get_current_device)  # one call of C
    return Driver(current, active.get_current_stream, asks_for_capture(device.type), _on, warp)


def _is_interpreted(triton: Any) -> bool:
    knobs = getattr(triton, "knobs", None)  # from Triton 3.4 on
    return os.environ.get("TRITON_INTERPRET") == "1" if knobs is None else bool(knobs.runtime.interpret)


def _on(index: int) -> AbstractContextManager[Any]:
    return torch.accelerator.device_index(index)


def _runs(engine: FusedEngine, device: torch.device) -> bool:
    """Whether a launch succeeds. Errors on the device are not seen, because that would need a wait."""
    page = torch.empty(1, len(COLUMNS), dtype=torch.float64, device=device)
    return FusedKernel(0.0, engine).reduces(torch.zeros(1, device=device), page, 0)


SCHEMA: Final = (
    "reduce_into(Tensor x, Tensor(a!) page, int row, Tensor? micro_step, float eps, bool higher=False, bool check_sums=False) "
    "-> ()"
)

_host_kernel = lru_cache(TorchHostKernel)
DEVICE_KERNELS: Final = DeviceKernels()
"""The kernels of the operator on devices, with their compiled variants. One set per process, as there is one operator."""


def _reduce_into(
    x: Tensor, page: Tensor, row: int, micro_step: Tensor | None, eps: float, higher: bool = False, check_sums: bool = False
) -> None:
    if page.device.type == "cpu":
        offset = 0 if micro_step is None else int(micro_step.item())
        if offset >= 0:
            _host_kernel(eps, higher=higher, check_sums=check_sums).reduce_into(x, page.numpy(), row + offset)
    else:
        kernel = DEVICE_KERNELS.kernel(eps, page.device, higher=higher, check_sums=check_sums)
        kernel.reduce_into(x, page, row, micro_step)


def _reduce_nothing(
    x: Tensor, page: Tensor, row: int, micro_step: Tensor | None, eps: float, higher: bool = False, check_sums: bool = False
) -> None:
    """The operator for tensors without data: it returns nothing, so there is no result to describe."""


def _define() -> torch.library.Library:
    library = torch.library.Library("monitor", "DEF")
    library.define(SCHEMA)
    library.impl("reduce_into", _reduce_into, "CompositeExplicitAutograd")
    library.impl("reduce_into", _reduce_nothing, "Meta")
    # No derivative: autograd ignores the operator.
    library.impl("reduce_into", torch.library.fallthrough_kernel, "Autograd")
    return library


LIBRARY: Final = _define()
"""A reference that keeps the operator defined."""

reduce_into: Final = torch.ops.monitor.reduce_into.default
"""``reduce_into(x, page, row, micro_step, eps, higher, check_sums)`` writes the partials of ``x`` into
``page[row + micro_step]``.

``page`` is float64, shape ``(rows, len(COLUMNS))``, on the device of ``x``. ``micro_step`` is an integer in a tensor without
dimensions on that device, or None for 0. If it is negative nothing is written: this step is not collected. ``higher`` and
``check_sums`` say whether to measure the higher moments and the check sums."""


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """One of many tensors on a device, and the row to write it to."""

    tensor: Tensor
    page: TorchDevicePage
    row: int


def reduce_listed(
    items: Sequence[ListedTensor], eps: float, *, higher: bool = False, check_sums: bool = False
) -> list[tuple[int, Exception]]:
    """Write the rows of tensors on any devices, with one launch per kind of tensor (``triton.launch.Kind``).

    Returns:
        Indices of the items that could not be read, with the error of each.
    """
    failed: list[tuple[int, Exception]] = []
    for device in dict.fromkeys(item.tensor.device for item in items):
        here = [place for place, item in enumerate(items) if item.tensor.device == device]
        with ExitStack() as pages:
            for page in {id(items[place].page): items[place].page for place in here}.values():
                pages.enter_context(page.written())
            failed += _reduce_listed(items, here, device, eps, higher, check_sums)
    return failed


def _reduce_listed(
    items: Sequence[ListedTensor], here: list[int], device: torch.device, eps: float, higher: bool, check_sums: bool
) -> list[tuple[int, Exception]]:
    together = DEVICE_KERNELS.list(eps, device, higher=higher, check_sums=check_sums)
    left, failed = here, []
    if together is not None:
        tensors, pages, rows = zip(*((items[i].tensor, items[i].page.tensor, items[i].row) for i in here), strict=True)
        left = [here[place] for place in together.reduce_into(tensors, pages, rows)]
    for place in left:
        try:
            reduce_into(items[place].tensor, items[place].page.tensor, items[place].row, None, eps, higher, check_sums)
        except Exception as error:
            failed.append((place, error))
    return failed
