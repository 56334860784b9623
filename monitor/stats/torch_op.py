"""``monitor::reduce_into``: a kernel's call as one operator, the same in eager and in compiled code.

To a compiler it is a black box that changes the page, so it is neither reordered with others of its kind nor dropped. A row
is a static number plus the micro-step, which compiled code passes as a tensor: a Python int would be compiled once for each
value. Behind the operator stands the kernel of the page's device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from monitor.stats.torch_device_kernel import DeviceKernel
from monitor.stats.torch_host_kernel import HostKernel

SCHEMA: Final = "reduce_into(Tensor x, Tensor(a!) page, int row, Tensor? micro_step, float eps) -> ()"

_host_kernel = lru_cache(HostKernel)
_device_kernel = lru_cache(DeviceKernel)


def _reduce_into(x: Tensor, page: Tensor, row: int, micro_step: Tensor | None, eps: float) -> None:
    if page.device.type == "cpu":
        offset = 0 if micro_step is None else int(micro_step.item())
        _host_kernel(eps).reduce_into(x, page.numpy(), row + offset)
    else:
        _device_kernel(eps).reduce_into(x, page, row, micro_step)


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
dimensions on that device, or None for 0."""
