"""Training metrics for PyTorch: ``TrainingMetrics`` for a loop; ``huggingface`` and ``lightning`` for trainers."""

from monitor.pytorch.training.metrics import TrainingMetrics
from monitor.recording.run import RunEnded

__all__ = ["RunEnded", "TrainingMetrics"]
