"""Activations and their gradients: what is not the same for MindSpore."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from mindspore import nn

from monitor.capture import modules
from monitor.mindspore.input_gradients import recording
from monitor.mindspore.modes import warn_of_evaluation


class ModuleCollector(modules.ModuleCollector):
    """All watched cells of one attachment, and the root hooks that tell micro-steps apart."""

    def counts(self, chunk: int, module: Any) -> bool:
        """Within a forward that trains also what is not recorded: it will be repeated in the backward."""
        del module
        return self.tracking[chunk] and (recording() or self._in_tracked_root(chunk))

    def _root_begins(self, chunk: int, root: Any, args: Any, kwargs: Any) -> None:
        if self._open_roots[chunk] and not _is_called(root):
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


def _is_called(root: nn.Cell) -> bool:
    """Whether a call of the root is under way, apart from the one whose hooks are being called."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        if frame.f_code is nn.Cell.__call__.__code__ and frame.f_locals.get("self") is root:
            found += 1
        frame = frame.f_back
    return found > 1
