"""Activations and their gradients: what is not the same for MindSpore."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from mindspore import nn

from monitor.mindspore.calls import trains, warn_of_evaluation
from monitor.recording import activations


class ModuleCollector(activations.ModuleCollector):
    """All watched cells of one attachment, and the root hooks that tell micro-steps apart."""

    def counts(self, chunk: int, module: Any) -> bool:
        """Within a forward that trains also what is not recorded: it will be repeated in the backward."""
        if self._open_roots[chunk]:
            if _calls(self._roots[chunk], 1):
                return self.tracking[chunk]
            self._failed(chunk)
        return self.tracking[chunk] and trains(module)

    def _root_begins(self, chunk: int, root: Any, args: Any, kwargs: Any) -> None:
        if self._open_roots[chunk] and not _calls(root, 2):  # the one whose hooks are being called is the first
            self._failed(chunk)
        super()._root_begins(chunk, root, args, kwargs)
        if self.recorder.active and self.tracking[chunk]:
            warn_of_evaluation(root, self.failures)

    def _failed(self, chunk: int) -> None:
        """The last forward has raised, of which no hook is told."""
        tracked = self._in_tracked_root(chunk)
        self._open_roots[chunk].clear()
        self.tracking[chunk] = True
        if tracked:
            self._restart_micro_step(chunk)


def _calls(root: nn.Cell, most: int) -> bool:
    """Whether so many calls of the root are under way."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None and found < most:
        found += frame.f_code is nn.Cell.__call__.__code__ and frame.f_locals.get("self") is root
        frame = frame.f_back
    return found == most
