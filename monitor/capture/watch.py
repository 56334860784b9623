"""What is watched, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monitor.capture.backend import Framework
from monitor.config import MonitorConfig
from monitor.coordinator.ownership import Ownership


@dataclass(frozen=True, slots=True)
class Watch:
    """What is watched, and how.

    Attributes:
        chunks: The model's chunks, one for each virtual pipeline stage.
        framework: Where gradients, weights and moments are.
        ops: The statistics to write; asked at every seal, since they may be changed.
    """

    chunks: Sequence[Any]
    framework: Framework
    grad_acc_steps: int
    config: MonitorConfig
    ownership: Ownership
    ops: Callable[[], tuple[str, ...]]
