"""Records activations and their gradients in MindSpore: detects forwards that train, and forwards that raised."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from mindspore import nn

from monitor.mindspore.calls import trains, warn_of_evaluation
from monitor.recording import activations


class ModuleCollector(activations.ModuleCollector):
    """All watched cells of one attachment, and the root hooks that separate micro-steps."""

    def counts(self, chunk: int, module: Any) -> bool:
        """Whether a call counts. In a training forward, calls that are not recorded count too: the backward repeats them."""
        if self._open_roots[chunk]:
            if _calls(self._roots[chunk], 1):
                return self.tracking[chunk]
            self._failed(chunk)
        return self.tracking[chunk] and trains(module)

    def _root_begins(self, chunk: int, root: Any, args: Any, kwargs: Any) -> None:
        if self._open_roots[chunk] and not _calls(root, 2):  # the call whose hooks run now is the first
            self._failed(chunk)
        super()._root_begins(chunk, root, args, kwargs)
        if self.recorder.active and self.tracking[chunk]:
            warn_of_evaluation(root, self.failures)

    def _failed(self, chunk: int) -> None:
        """Close the last forward, which raised: MindSpore calls no hook then."""
        tracked = self._in_tracked_root(chunk)
        self._open_roots[chunk].clear()
        self.tracking[chunk] = True
        if tracked:
            self._restart_micro_step(chunk)


def _calls(root: nn.Cell, most: int) -> bool:
    """Whether ``most`` calls of the root are on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None and found < most:
        found += frame.f_code is nn.Cell.__call__.__code__ and frame.f_locals.get("self") is root
        frame = frame.f_back
    return found == most
