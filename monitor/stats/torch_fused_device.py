"""Which kernel reduces the tensors of a device: the fused one where Triton compiles for it, or else the portable one.

What works decides: whether Triton is there, whether it has a backend for this device, and whether a first launch succeeds.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from monitor.failures import LOGGER
from monitor.stats.partials import COLUMNS
from monitor.stats.torch_capture import capturing
from monitor.stats.torch_device_kernel import DeviceKernel
from monitor.stats.torch_fused_kernel import WHAT_TO_DO, Engine, FusedKernel
from monitor.stats.torch_fused_launch import Driver
from monitor.stats.torch_fused_list import FusedList


class DeviceKernels:
    """The kernels of a process for the tensors of its devices, made when they are first asked for."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine | None] = {}
        self._kernels: dict[tuple[float, str], DeviceKernel | FusedKernel] = {}
        self._lists: dict[tuple[float, str], FusedList | None] = {}

    def kernel(self, eps: float, device: torch.device) -> DeviceKernel | FusedKernel:
        """What reduces one tensor of ``device``."""
        found = self._kernels.get((eps, device.type))
        return self._new_kernel(eps, device) if found is None else found

    def list(self, eps: float, device: torch.device) -> FusedList | None:
        """What reduces many of them at once; None where nothing does."""
        key = (eps, device.type)
        if key not in self._lists:
            kernel, engine = self.kernel(eps, device), self._engines.get(device.type)
            if engine is None or not isinstance(kernel, FusedKernel):
                return None
            self._lists[key] = FusedList(kernel, engine)
        return self._lists[key]

    def _new_kernel(self, eps: float, device: torch.device) -> DeviceKernel | FusedKernel:
        if device.type not in self._engines and capturing(device):
            return DeviceKernel(eps)  # for now: while work is recorded nothing is tried
        engine = self._engine(device)
        kernel = DeviceKernel(eps) if engine is None else FusedKernel(eps, engine)
        self._kernels[eps, device.type] = kernel
        return kernel

    def _engine(self, device: torch.device) -> Engine | None:
        if device.type not in self._engines:
            self._engines[device.type] = engine_for(device)
        return self._engines[device.type]


def engine_for(device: torch.device) -> Engine | None:
    """The fused kernels for devices of this type; None where they do not work, which is said if they should."""
    try:
        driver = _driver_of(device)
        if driver is None:
            return None
        from monitor.stats import torch_fused_source

        engine = Engine(torch_fused_source, driver)
        if _runs(engine, device):  # if not, it was said why
            return engine
    except Exception as error:
        LOGGER.warning(
            "The fused kernels do not run on %s: %r. Slower operations of torch take their place, with the same rows. %s",
            device.type, error, WHAT_TO_DO,
        )  # fmt: skip
    return None


def _driver_of(device: torch.device) -> Driver | None:
    """Triton's driver; None where Triton is not there or has no backend for such devices, which is no fault."""
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
        raise RuntimeError("TRITON_INTERPRET is set, with which kernels run on the host")
    warp = active.get_current_target().warp_size
    return Driver(active.get_current_device, active.get_current_stream, lambda: capturing(device), _on, warp)


def _is_interpreted(triton: Any) -> bool:
    knobs = getattr(triton, "knobs", None)  # from Triton 3.4 on
    return os.environ.get("TRITON_INTERPRET") == "1" if knobs is None else bool(knobs.runtime.interpret)


def _on(index: int) -> AbstractContextManager[Any]:
    return torch.accelerator.device_index(index)


def _runs(engine: Engine, device: torch.device) -> bool:
    """Launch once. What goes wrong on the device would take a wait to see."""
    page = torch.empty(1, len(COLUMNS), dtype=torch.float64, device=device)
    return FusedKernel(0.0, engine).reduces(torch.zeros(1, device=device), page, 0)
