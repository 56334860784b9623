"""``monitor::reduce_into``: a kernel's call as one operator, the same in eager and in compiled code.

To a compiler it is a black box that changes the page, so it is neither reordered with others of its kind nor dropped. A row
is a static number plus the micro-step, which compiled code passes as a tensor: a Python int would be compiled once for each
value. Behind the operator stands the kernel of the page's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from monitor.stats.torch_fused_device import DeviceKernels
from monitor.stats.torch_host_kernel import HostKernel
from monitor.stats.torch_memory import DevicePage

SCHEMA: Final = "reduce_into(Tensor x, Tensor(a!) page, int row, Tensor? micro_step, float eps) -> ()"

_host_kernel = lru_cache(HostKernel)
DEVICE_KERNELS: Final = DeviceKernels()
"""The kernels behind the operator on devices, with what was compiled for them: one set, as there is one operator."""


def _reduce_into(x: Tensor, page: Tensor, row: int, micro_step: Tensor | None, eps: float) -> None:
    if page.device.type == "cpu":
        offset = 0 if micro_step is None else int(micro_step.item())
        if offset >= 0:
            _host_kernel(eps).reduce_into(x, page.numpy(), row + offset)
    else:
        DEVICE_KERNELS.kernel(eps, page.device).reduce_into(x, page, row, micro_step)


def _reduce_nothing(x: Tensor, page: Tensor, row: int, micro_step: Tensor | None, eps: float) -> None:
    """What the operator does to tensors without data: nothing is returned, so there is nothing to describe."""


def _define() -> torch.library.Library:
    library = torch.library.Library("monitor", "DEF")
    library.define(SCHEMA)
    library.impl("reduce_into", _reduce_into, "CompositeExplicitAutograd")
    library.impl("reduce_into", _reduce_nothing, "Meta")
    # There is no derivative: an observer passes through autograd unseen.
    library.impl("reduce_into", torch.library.fallthrough_kernel, "Autograd")
    return library


LIBRARY: Final = _define()
"""Kept alive for as long as the operator is to exist."""

reduce_into: Final = torch.ops.monitor.reduce_into.default
"""``reduce_into(x, page, row, micro_step, eps)``: write the partials of ``x`` into ``page[row + micro_step]``.

``page`` is float64, shape ``(rows, len(COLUMNS))``, on the device of ``x``; ``micro_step`` a whole number in a tensor of no
dimensions on that device, or None for 0. Where it is negative nothing is written: this step is not collected."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A tensor of a device, one of many, and the row that is for it."""

    tensor: Tensor
    page: DevicePage
    row: int


def reduce_listed(items: Sequence[Listed], eps: float) -> list[tuple[int, Exception]]:
    """Write the rows of tensors of any devices, with as few launches as there are kinds of them.

    Returns:
        Places of those that could not be read, and why.
    """
    failed: list[tuple[int, Exception]] = []
    for device in dict.fromkeys(item.tensor.device for item in items):
        here = [place for place, item in enumerate(items) if item.tensor.device == device]
        with ExitStack() as pages:
            for page in {id(items[place].page): items[place].page for place in here}.values():
                pages.enter_context(page.written())
            failed += _reduce_listed(items, here, device, eps)
    return failed


def _reduce_listed(items: Sequence[Listed], here: list[int], device: torch.device, eps: float) -> list[tuple[int, Exception]]:
    together, left, failed = DEVICE_KERNELS.list(eps, device), here, []
    if together is not None:
        tensors, pages, rows = zip(*((items[i].tensor, items[i].page.tensor, items[i].row) for i in here), strict=True)
        left = [here[place] for place in together.reduce_into(tensors, pages, rows)]
    for place in left:
        try:
            reduce_into(items[place].tensor, items[place].page.tensor, items[place].row, None, eps)
        except Exception as error:
            failed.append((place, error))
    return failed
