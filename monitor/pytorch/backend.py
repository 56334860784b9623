"""PyTorch's implementation of the adapter interface in ``monitor.recording.backend``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from monitor.dynamic.step_boundary import ASKED_PER_SECOND
from monitor.failures import Failures
from monitor.pytorch import calls, hooks
from monitor.pytorch.activations import ModuleCollector
from monitor.pytorch.calls import Calls, recomputing
from monitor.pytorch.collectives.recording import communication
from monitor.pytorch.compiled.hooks import TracedHook
from monitor.pytorch.compiled.operators import TRACEABLE, ObservedHook
from monitor.pytorch.compiled.tracing import CallObserver, device_of
from monitor.pytorch.features import reading
from monitor.pytorch.frameworks.framework import framework_of
from monitor.pytorch.frameworks.pipelining import rehearsing
from monitor.pytorch.gradients import TorchGradients
from monitor.pytorch.hooks import takes_hooks
from monitor.pytorch.process_group import group_ranks, has_others, initialized, is_settled, place, versions
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.pytorch.tensors import TENSOR_PATHS, activation_placement, computing, layout_of, placement_of
from monitor.pytorch.updates import new_updates
from monitor.recording import protocols
from monitor.recording.backend import Graph
from monitor.recording.features.reading import FeatureReading
from monitor.recording.model_names import NamedParts
from monitor.recording.protocols import Removable
from monitor.recording.step_clock import Clock
from monitor.recording.tensor_paths import TensorPaths

__all__ = [
    "activation_placement",
    "after_forward",
    "asked_per_second",
    "before_forward",
    "chunks_of",
    "communication",
    "computing",
    "framework_of",
    "graph",
    "group_ranks",
    "has_others",
    "initialized",
    "is_settled",
    "layout_of",
    "leaves",
    "never_called",
    "new_calls",
    "new_gradients",
    "new_modules",
    "new_reader",
    "new_updates",
    "optimizer_expected",
    "parts",
    "place",
    "placement_of",
    "reading_of_features",
    "repeating",
    "root_trains",
    "takes_hooks",
    "trains",
    "versions",
]

graph: Graph = calls
leaves: TensorPaths = TENSOR_PATHS
reading_of_features: FeatureReading = reading
new_calls, new_gradients, new_reader = Calls, TorchGradients, TorchTensorReader
repeating = recomputing

never_called: tuple[type, ...] = (nn.ModuleList, nn.ModuleDict)
asked_per_second: float = ASKED_PER_SECOND
optimizer_expected: str = "a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`"


def chunks_of(model: Any) -> Sequence[nn.Module]:
    """The chunks of a virtual pipeline, or the one module as a list of itself. Raises ``TypeError`` and ``ValueError``."""
    return protocols.chunks_of(model, nn.Module, "torch.nn.Module")


def parts(chunk: nn.Module) -> NamedParts:
    return NamedParts(chunk.named_modules(), chunk.named_parameters())


def new_modules(recorder: Any, clock: Clock, failures: Failures) -> ModuleCollector:
    from monitor.pytorch import backend  # noqa: PLW0406, the collector calls this module

    return ModuleCollector(recorder, clock, failures, backend)


def before_forward(module: nn.Module, call: Callable[..., None], *, compiled: bool = False) -> Removable:
    traced = TracedHook(ObservedHook(CallObserver(call, module), device_of(module))) if compiled and TRACEABLE else None
    return hooks.before_forward(module, call, traced)


def after_forward(module: nn.Module, call: Callable[..., None], *, always: bool = False, compiled: bool = False) -> Removable:
    traced = (
        TracedHook(ObservedHook(CallObserver(call, module), device_of(module)), ends=True) if compiled and TRACEABLE else None
    )
    return hooks.after_forward(module, call, traced, always=always)


def trains(module: nn.Module) -> bool:
    """Whether a call of the module that begins now is a training call."""
    return module.training and not _transforming()


def root_trains(root: nn.Module) -> bool:
    """Whether a forward of the whole model that begins now is a training forward. The rehearsal of a pipeline stage is not."""
    return root.training and torch.is_grad_enabled() and not _transforming() and not rehearsing()


def _transforming() -> bool:
    """Whether this runs inside a transform of ``torch.func``, whose tensors are placeholders and hold no numbers."""
    return torch._C._functorch.peek_interpreter_stack() is not None
