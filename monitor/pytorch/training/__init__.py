"""Training metrics for PyTorch: ``TrainingMetrics`` for a loop; ``huggingface`` and ``lightning`` for trainers."""

from monitor.capture.errors import RunEnded
from monitor.pytorch.training.metrics import TrainingMetrics

__all__ = ["RunEnded", "TrainingMetrics"]
