"""Training metrics for MindSpore: callbacks for ``mindspore.train.Model``, and ``TrainingMetrics`` for a loop."""

from monitor.mindspore.training.callbacks import (
    MFLossMonitor,
    TopkBiasBalanceCallback,
    TrainingMetricsCallback,
    TrainingStateMonitor,
)
from monitor.mindspore.training.metrics import TrainingMetrics
from monitor.recording.run import RunEnded

__all__ = [
    "MFLossMonitor",
    "RunEnded",
    "TopkBiasBalanceCallback",
    "TrainingMetrics",
    "TrainingMetricsCallback",
    "TrainingStateMonitor",
]
