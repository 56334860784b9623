"""What reading a tensor passes by: keys of torch's dispatcher, and modes of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

_K = torch._C.DispatchKey
_ABOVE_US: Final = [
    "ADInplaceOrView", "AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1", "AutogradMeta", "AutogradXPU",
    "AutogradMPS", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1", "AutocastXPU", "AutocastMPS",
    "Python", "PythonTLSSnapshot",
]  # fmt: skip


def _keys_above_us() -> torch._C.DispatchKeySet:
    keys = torch._C.DispatchKeySet(_K.AutogradCPU)
    for name in _ABOVE_US:
        if hasattr(_K, name):
            keys = keys | torch._C.DispatchKeySet(getattr(_K, name))
    return keys


KEYS_ABOVE_US: Final = _keys_above_us()
"""Autograd, autocast and the user's dispatch modes: reading a tensor records nothing, casts nothing and is seen by nobody."""

_NOTHING: Final = nullcontext()

function_modes: Final[Any] = torch._C._len_torch_function_stack
"""How many there are of the user's."""


def unseen() -> AbstractContextManager[object]:
    """What is called inside is not told to a ``TorchFunctionMode`` of the user's."""
    return torch._C.DisableTorchFunction() if function_modes() else _NOTHING


@contextmanager
def beneath() -> Iterator[None]:
    """What is computed inside is recorded by no graph, cast by no autocast, and told to no mode of the user's."""
    with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US), unseen():
        yield
