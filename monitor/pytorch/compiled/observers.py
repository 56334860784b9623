"""What the operators in compiled code come to, whatever is observed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from monitor.failures import Failures
from monitor.recording.activations import ADVICE


class Called:
    """A hook that wants to be called and looks at nothing."""

    def __init__(self, call: Callable[..., None], module: nn.Module) -> None:
        self._call = call
        self._module = module

    def begins(self, _tag: Tensor) -> None:
        self._call(self._module, (), {})

    def ends(self, _tag: Tensor) -> None:
        self._call(self._module, (), {}, None)

    def sees(self, *_: Any) -> None: ...

    def sees_gradient(self, *_: Any) -> None: ...

    def keep(self, *_: Any) -> None: ...


class Guarded:
    """An observer none of whose failures reaches the compiled code."""

    def __init__(self, observer: Any, failures: Failures, name: str) -> None:
        self.begins = failures.guarded("reading the inputs", observer.begins, ADVICE, of=name)
        self.ends = failures.guarded("reading the outputs", observer.ends, ADVICE, of=name)
        self.sees = failures.guarded("reading activations", observer.sees, ADVICE, of=name)
        self.keep = observer.keep
        self.sees_gradient = failures.guarded("reading gradients of activations", observer.sees_gradient, ADVICE, of=name)


def device_of(*modules: nn.Module | None) -> torch.device:
    """Where the first of these that has any tensors has them; the host where that is not known."""
    for module in modules:
        if module is not None:
            # Not by the module's own names: Megatron's wrapper calls something else ``buffers``.
            first = next(chain(nn.Module.parameters(module), nn.Module.buffers(module)), None)
            if first is not None:
                return torch.device("cpu") if first.is_meta else first.device
    return torch.device("cpu")
