"""Training metrics for MindSpore: callbacks for ``mindspore.train.Model``, and ``TrainingMetrics`` for a loop."""

from monitor.capture.errors import RunEnded
from monitor.mindspore.training.callbacks import MFLossMonitor, TrainingMetricsCallback, TrainingStateMonitor
from monitor.mindspore.training.metrics import TrainingMetrics

__all__ = ["MFLossMonitor", "RunEnded", "TrainingMetrics", "TrainingMetricsCallback", "TrainingStateMonitor"]
