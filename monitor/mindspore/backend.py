"""MindSpore's implementation of the adapter interface ``monitor.recording.backend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn

from monitor.coordinator.store import ASKED_PER_SECOND
from monitor.failures import LOGGER, Failures
from monitor.mindspore import calls, features_reading
from monitor.mindspore.activations import ModuleCollector
from monitor.mindspore.calls import Calls, in_backward, observable, refuse_graph_mode, trains
from monitor.mindspore.collectives import communication
from monitor.mindspore.frameworks import framework_of
from monitor.mindspore.gradients import MindSporeGradients
from monitor.mindspore.hooks import after_forward, before_forward, takes_hooks
from monitor.mindspore.process_group import group_ranks, has_others, initialized, is_settled, place, versions
from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.mindspore.tensors import TENSOR_PATHS, activation_placement, computing, layout_of, placement_of
from monitor.mindspore.updates import new_updates
from monitor.recording import protocols
from monitor.recording.backend import Graph
from monitor.recording.features.reading import FeatureReading
from monitor.recording.model_names import NamedParts
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
reading_of_features: FeatureReading = features_reading
new_calls, new_gradients, new_reader = Calls, MindSporeGradients, MindSporeTensorReader
repeating = in_backward

never_called: tuple[type, ...] = (nn.CellList, nn.CellDict)
asked_per_second: float = ASKED_PER_SECOND
optimizer_expected: str = "an optimizer of mindspore.nn or mindspore.experimental.optim"


def chunks_of(model: Any) -> Sequence[nn.Cell]:
    """The chunks of a virtual pipeline; a single cell becomes a list.

    Raises:
        TypeError: One of them is no cell.
        ValueError: In graph mode everything is compiled, so nothing can be recorded.
    """
    chunks = protocols.chunks_of(model, nn.Cell, "mindspore.nn.Cell")
    refuse_graph_mode()
    for chunk in chunks:
        if said := observable(chunk).warning():
            LOGGER.warning("%s", said)
    return chunks


def parts(chunk: nn.Cell) -> NamedParts:
    """The cells that take hooks, and all parameters. Compiled cells take none."""
    return NamedParts(observable(chunk).cells, chunk.parameters_and_names())


def new_modules(recorder: Any, clock: Clock, failures: Failures) -> ModuleCollector:
    from monitor.mindspore import backend  # noqa: PLW0406, this module is what the collector asks

    return ModuleCollector(recorder, clock, failures, backend)


def root_trains(root: nn.Cell) -> bool:
    """Whether a forward of the whole model that begins now trains, regardless of its training flag."""
    return trains(root)
