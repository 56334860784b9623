"""What MindSpore brings to the precision dump: see ``monitor.dump.backend``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, communication, nn

from monitor.dump.backend import ApiListener
from monitor.failures import Failures
from monitor.mindspore import input_gradients
from monitor.mindspore.dump.apis import Interception
from monitor.mindspore.dump.reading import Reader
from monitor.mindspore.hooks import after_forward, before_forward, takes_hooks
from monitor.mindspore.input_gradients import ENGINE
from monitor.mindspore.leaves import LEAVES
from monitor.mindspore.modes import observable
from monitor.mindspore.place import initialized
from monitor.mindspore.tensors import computing
from monitor.recording.backend import Graph
from monitor.recording.protocols import Removable, chunks_of

__all__ = [
    "after_forward",
    "backward_pass",
    "before_forward",
    "being_called",
    "computing",
    "framework",
    "graph",
    "leaves",
    "models_of",
    "module_prefix",
    "modules_of",
    "new_interception",
    "new_reader",
    "on_parameter",
    "parameters_of",
    "rank",
    "refuse",
    "tensor",
    "traced",
]

framework: str = "mindspore"
module_prefix: str = "Cell"
tensor: type = Tensor
leaves = LEAVES
graph: Graph = input_gradients


def new_reader(*, checksums: bool) -> Reader:
    return Reader(checksums=checksums)


def new_interception(listener: ApiListener, api_list: str | None, *, primitives_of: Sequence[Any]) -> Interception:
    return Interception(listener, api_list, primitives_of)


def models_of(model: Any) -> Sequence[Any]:
    return chunks_of(model, nn.Cell, "mindspore.nn.Cell")


def modules_of(model: nn.Cell, failures: Failures) -> Iterable[tuple[str, nn.Cell]]:
    cells = observable(model)
    if cells.hiding:
        names = ", ".join(repr(name) if name else "the model" for name in cells.hiding)
        said = f"Cells inside {names} are compiled (@jit) and are not dumped: take @jit off to dump them."
        failures.warn(f"compiled cells {names}", said)
    return [(name, cell) for name, cell in cells.cells if cell is not model and takes_hooks(cell)]


def parameters_of(module: nn.Cell) -> Iterable[tuple[str, Tensor]]:
    """By the names of their attributes: their own names have those of the cells around them in front, or anything else."""
    own = {name: one for name, one in module._params.items() if one is not None}
    return own.items()


def on_parameter(parameter: Any, take: Callable[[Any], None]) -> Removable | None:
    if not parameter.requires_grad:
        return None
    handle: Removable = parameter.register_hook(take)
    return handle


def being_called() -> Sequence[int]:
    """As the frames of this thread's stack have it."""
    found: list[int] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Cell.__call__.__code__:
            found.append(id(frame.f_locals["self"]))
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def backward_pass() -> int:
    return ENGINE.current_pass()


def rank() -> int | None:
    """Communication's word, before it is initialised the launcher's."""
    if initialized():
        return int(communication.get_rank())
    announced = os.environ.get("RANK_ID", "")
    return int(announced) if announced.isdigit() else None


def refuse(level: str) -> None:
    if ms.get_context("mode") == ms.GRAPH_MODE:
        what = f"level {level} cannot be recorded in GRAPH_MODE, whose dumps need an Ascend device"
        raise ValueError(f"{what}: call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first.")


def traced() -> bool:
    """What compiles cells calls no hooks."""
    return False
