"""What PyTorch brings to the precision dump: see ``monitor.dump.backend``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from monitor.dump.backend import ApiListener
from monitor.failures import Failures
from monitor.pytorch import input_gradients
from monitor.pytorch.dump.apis import Interception, traced
from monitor.pytorch.dump.reading import Reader
from monitor.pytorch.hooks import after_forward, before_forward, takes_hooks
from monitor.pytorch.leaves import LEAVES
from monitor.pytorch.place import initialized
from monitor.pytorch.tensors import computing
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

framework: str = "pytorch"
module_prefix: str = "Module"
tensor: type = Tensor
leaves = LEAVES
graph: Graph = input_gradients


def new_reader(*, checksums: bool) -> Reader:
    return Reader(checksums=checksums)


def new_interception(listener: ApiListener, api_list: str | None, *, primitives_of: Sequence[Any]) -> Interception:
    del primitives_of  # which are MindSpore's
    return Interception(listener, api_list)


def models_of(model: Any) -> Sequence[Any]:
    return chunks_of(model, nn.Module, "torch.nn.Module")


def modules_of(model: nn.Module, failures: Failures) -> Iterable[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if module is model:
            continue
        if takes_hooks(module):
            yield name, module
        else:
            said = f"{name!r} is a {type(module).__name__}, compiled, and takes no hooks: it is not dumped."
            failures.warn(f"compiled module {name}", said)


def parameters_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return module.named_parameters(recurse=False)


def on_parameter(parameter: Tensor, take: Callable[[Tensor], None]) -> Removable | None:
    if not parameter.requires_grad:
        return None
    return input_gradients.on_gradient(parameter, take)


def being_called() -> None:
    """Hooks are called after forwards that raise, too."""


def backward_pass() -> int:
    return torch._C._current_graph_task_id()


def rank() -> int | None:
    """The process group's word, before it is made the launcher's."""
    if initialized():
        return torch.distributed.get_rank()
    announced = os.environ.get("RANK", "")
    return int(announced) if announced.isdigit() and "WORLD_SIZE" in os.environ else None


def refuse(level: str) -> None:
    """Every level can be recorded."""
    del level
