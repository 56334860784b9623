"""Describes each module at its first call: its Python call stack, and the shapes and dtypes of its inputs and outputs."""

from __future__ import annotations

import csv
import io
import json
import linecache
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

from monitor.coordinator.output import write_whole
from monitor.recording.attached_model import Attached, NamedModule
from monitor.recording.backend import HookSet
from monitor.recording.phases import Collector
from monitor.recording.tensor_paths import TensorPath, described

MAX_FRAMES: Final = 64

MACHINERY: Final = ("torch.nn.modules.module", "monitor.", "mindspore.nn.cell", "mindspore.ops.composite", "mindspore.graph.")
"""Prefixes of Python modules whose frames only call the user's code."""


@final
class StackCollector(Collector):
    """Takes the call stack of every selected module once, outermost frames last, and writes all at the end of the step.

    Attributes:
        stacks: By ``{vpp_stage}:{name}``.
    """

    def __init__(self, attached: Attached, modules: Iterable[NamedModule], directory: Callable[[], Path]) -> None:
        self._backend = attached.backend
        self.stacks: dict[str, str] = {}
        self._failures = attached.failures
        self._directory = directory
        self._written = False
        self._hooks = HookSet()
        for one in modules:
            if one.wanted is not None and self._backend.modules.takes_hooks(one.module):
                hook = self._failures.guarded("taking the stack", partial(self._take, _key(one)), of=_key(one))
                self._hooks.add(self._backend.modules.before_forward(one.module, hook))

    def end_step(self, *, collected: bool) -> None:
        del collected
        if not self._written:
            self._written = True
            self.remove()
            self._failures.guarded("writing stack_info.csv", lambda: self.write(self._directory()))()

    def remove(self) -> None:
        self._hooks.remove()

    def write(self, directory: Path) -> None:
        """Write ``stack_info.csv`` atomically.

        Raises:
            OSError: The file cannot be written.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["module_name", "stack_info"])
        rows.writerows(self.stacks.items())
        write_whole(directory / "stack_info.csv", text.getvalue().encode())

    def _take(self, key: str, module: Any, _args: Any, _kwargs: Any) -> None:
        if key not in self.stacks and self._backend.modules.trains(module) and not self._backend.modules.repeating():
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


# --- The structure of the model in the first step: inputs and outputs of each module, in the form that targets use.

Description = dict[str, str]


@final
class StructureCollector(Collector):
    """Describes every module at its first call in training mode.

    A gradient has the shape and dtype of its tensor. So gradients are described in forward, for the tensors that require them.
    """

    def __init__(self, attached: Attached, modules: Iterable[NamedModule]) -> None:
        self._backend, self._leaves = attached.backend, attached.backend.tensors.paths
        self._hooks = HookSet()
        self._structure: dict[str, dict[str, Description]] = {}
        for one in modules:
            if self._backend.modules.takes_hooks(one.module):
                describe = partial(self._describe, _key(one))
                hook = attached.failures.guarded("describing the structure", describe, of=_key(one))
                self._hooks.add(self._backend.modules.after_forward(one.module, hook))

    def remove(self) -> None:
        self._hooks.remove()

    def write(self, path: Path) -> None:
        """Write the structure to ``path`` atomically.

        Raises:
            OSError: The file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self._structure, indent=4, ensure_ascii=False).encode())

    def _describe(self, key: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if key in self._structure or not self._backend.modules.trains(module) or self._backend.modules.repeating():
            return
        inputs, outputs = self._leaves.inputs(args, kwargs), self._leaves.outputs(result)
        taken, given = described(args, kwargs), self._leaves.described_result(result)
        self._structure[key] = {
            "input": _leaves(taken, inputs),
            "output": _leaves(given, outputs),
            "input_grad": _leaves(taken, inputs, self._backend.autograd.requires_grad),
            "output_grad": _leaves(given, outputs, self._backend.autograd.requires_grad),
        }


def _leaves(config: str, leaves: list[TensorPath], wanted: Callable[[Any], bool] = lambda _: True) -> Description:
    lone = config == "tensor"
    described = {}
    for leaf in leaves:
        if wanted(leaf.tensor):
            key = "tensor" if lone else leaf.suffix.removeprefix("_") or "0"
            described[key] = f"size={tuple(leaf.tensor.shape)}, dtype={leaf.tensor.dtype}"
    return {"config": config, **described}


def _key(module: NamedModule) -> str:
    return f"{module.chunk}:{module.name}"
