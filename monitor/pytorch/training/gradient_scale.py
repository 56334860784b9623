"""By what an optimizer divides its gradients inside its step, as fused ones do under a GradScaler."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from monitor.failures import Failures
from monitor.pytorch.training.numbers import kept
from monitor.training.step import Number


class GradientScale:
    """See ``monitor.training.backend.GradientScale``. The scaler sets it on the optimizer for the time of a step."""

    def __init__(self, optimizer: Optimizer, failures: Failures) -> None:
        self._last: Number | None = None
        known = weakref.WeakMethod(self._look)

        def look(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if (living := known()) is not None:
                living(optimizer)

        hook = torch.compiler.disable(failures.guarded("reading the scale of gradients", look))
        self._handle = optimizer.register_step_pre_hook(hook)

    def take(self) -> Number | None:
        last, self._last = self._last, None
        return last

    def remove(self) -> None:
        self._handle.remove()

    def _look(self, optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        self._last = None if scale is None else kept(scale)
