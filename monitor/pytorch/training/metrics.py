"""``TrainingMetrics`` for PyTorch."""

from __future__ import annotations

from typing import ClassVar

from monitor.pytorch.training import backend
from monitor.training import metrics
from monitor.training.backend import Backend


class TrainingMetrics(metrics.TrainingMetrics):
    __doc__ = metrics.TrainingMetrics.__doc__

    _backend: ClassVar[Backend] = backend
