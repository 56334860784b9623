"""Keys of torch's dispatcher that reading a tensor passes by."""

from __future__ import annotations

from typing import Final

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
