"""Patches of torch's own functions, which its compiler meets."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from monitor.pytorch.untraced import untraced
from monitor.recording import patches


class TorchCallPatch(patches.CallPatch):
    """Where a compiler could not look into the function, it does not look into what stands in its place."""

    def _opaque(self, patched: Any, original: Any) -> Any:
        return patched if isinstance(original, FunctionType) else untraced(patched)
