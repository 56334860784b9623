"""Who calls each module: its Python stack at the first call, outermost frames last."""

from __future__ import annotations

import csv
import io
import linecache
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from monitor.capture.backend import Backend
from monitor.capture.hooks import HookSet
from monitor.coordinator.output import write_whole
from monitor.failures import Failures

MAX_FRAMES: Final = 64

MACHINERY: Final = ("torch.nn.modules.module", "monitor.", "mindspore.nn.cell", "mindspore.ops.composite", "mindspore.graph.")
"""How modules of Python begin whose frames only call what the user wrote."""


class StackCollector:
    """The call stack of every watched module, taken once.

    Attributes:
        stacks: By ``{vpp_stage}:{name}``.
    """

    def __init__(self, failures: Failures, backend: Backend) -> None:
        self._backend = backend
        self.stacks: dict[str, str] = {}
        self._failures = failures
        self._hooks = HookSet()

    def watch(self, key: str, module: Any) -> None:
        if self._backend.takes_hooks(module):
            hook = self._failures.guarded("taking the stack", partial(self._take, key), of=key)
            self._hooks.add(self._backend.before_forward(module, hook))

    def remove(self) -> None:
        self._hooks.remove()

    def write(self, directory: Path) -> None:
        """Write ``stack_info.csv``. The file appears whole.

        Raises:
            OSError: It cannot be written.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["module_name", "stack_info"])
        rows.writerows(self.stacks.items())
        write_whole(directory / "stack_info.csv", text.getvalue().encode())

    def _take(self, key: str, module: Any, _args: Any, _kwargs: Any) -> None:
        if key not in self.stacks and self._backend.trains(module) and not self._backend.repeating():
            self.stacks[key] = call_stack(sys._getframe(1))


def call_stack(frame: FrameType | None) -> str:
    """The frames from ``frame`` outwards, without the monitor's own and those of the framework's module machinery."""
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_FRAMES:
        code = frame.f_code
        if not _is_machinery(frame):
            source = linecache.getline(code.co_filename, frame.f_lineno).strip()
            lines.append(f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}, {source}")
        frame = frame.f_back
    return "\n".join(lines)


def _is_machinery(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(MACHINERY)
