"""Training metrics for MindSpore: callbacks for ``mindspore.train.Model``, and ``TrainingMetrics`` for a loop."""

from monitor.mindspore.training.callbacks import (
    MFLossMonitor,
    TopkBiasBalanceCallback,
    TrainingMetrics,
    TrainingMetricsCallback,
    TrainingStateMonitor,
)
from monitor.recording.run import RunEnded

__all__ = [
    "MFLossMonitor",
    "RunEnded",
    "TopkBiasBalanceCallback",
    "TrainingMetrics",
    "TrainingMetricsCallback",
    "TrainingStateMonitor",
]
