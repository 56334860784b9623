"""What trainers tell no callback: the loss that goes into a backward, the norm that clipping has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from monitor.capture.patches import CallListener
from monitor.pytorch.patches import CallPatch

CLIPPING: Final = CallPatch(torch.nn.utils, "clip_grad_norm_", ("parameters", "max_norm"))


class GradNorm(CallListener):
    """The norm that ``clip_grad_norm_`` has returned last, where it is looked up when it is called, as trainers do."""

    def __init__(self, patch: CallPatch = CLIPPING) -> None:
        self._patch = patch
        self._last: Any = None
        patch.add(self)

    def call_ended(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del args, kwargs
        self._last = result

    def take(self) -> Any:
        """What it returned since this was last asked; None if it was not called."""
        last, self._last = self._last, None
        return last

    def remove(self) -> None:
        self._patch.remove(self)
