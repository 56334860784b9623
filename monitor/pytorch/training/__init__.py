"""Training metrics for PyTorch: ``TrainingMetrics`` for a loop; ``huggingface`` and ``lightning`` for trainers."""

from typing import ClassVar

from monitor.pytorch.training import backend
from monitor.recording.run import RunEnded
from monitor.training.metrics import MetricsBackend, RunMetrics

__all__ = ["RunEnded", "TrainingMetrics"]


class TrainingMetrics(RunMetrics):
    __doc__ = RunMetrics.__doc__

    _backend: ClassVar[MetricsBackend] = backend
