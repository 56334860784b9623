"""The model's structure as seen in the first step: what each module takes and gives, in the spelling that targets use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from monitor.capture.backend import Backend
from monitor.capture.hooks import HookSet
from monitor.capture.leaves import Leaf, described
from monitor.coordinator.output import write_whole
from monitor.failures import Failures

Description = dict[str, str]


class StructureCollector:
    """Describes every module at its first call in training mode.

    A gradient has the shape and dtype of its tensor by definition, so the gradients are described in forward: those that will
    be there, which are those of tensors that require one.
    """

    def __init__(self, failures: Failures, backend: Backend) -> None:
        self._backend, self._leaves = backend, backend.leaves
        self._failures = failures
        self._hooks = HookSet()
        self._structure: dict[str, dict[str, Description]] = {}

    def watch(self, key: str, module: Any) -> None:
        """Describe ``module`` under ``key`` (``{vpp_stage}:{name}``)."""
        if self._backend.takes_hooks(module):
            hook = self._failures.guarded("describing the structure", partial(self._describe, key), of=key)
            self._hooks.add(self._backend.after_forward(module, hook))

    def remove(self) -> None:
        self._hooks.remove()

    def write(self, path: Path) -> None:
        """Write what was seen. The file appears whole.

        Raises:
            OSError: It cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self._structure, indent=4, ensure_ascii=False).encode())

    def _describe(self, key: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if key in self._structure or not self._backend.trains(module) or self._backend.repeating():
            return
        inputs, outputs = self._leaves.inputs(args, kwargs), self._leaves.outputs(result)
        taken, given = described(args, kwargs), self._leaves.described_result(result)
        self._structure[key] = {
            "input": _leaves(taken, inputs),
            "output": _leaves(given, outputs),
            "input_grad": _leaves(taken, inputs, self._backend.graph.requires_grad),
            "output_grad": _leaves(given, outputs, self._backend.graph.requires_grad),
        }


def _leaves(config: str, leaves: list[Leaf], wanted: Callable[[Any], bool] = lambda _: True) -> Description:
    lone = config == "tensor"
    described = {}
    for leaf in leaves:
        if wanted(leaf.tensor):
            key = "tensor" if lone else leaf.suffix.removeprefix("_") or "0"
            described[key] = f"size={tuple(leaf.tensor.shape)}, dtype={leaf.tensor.dtype}"
    return {"config": config, **described}
