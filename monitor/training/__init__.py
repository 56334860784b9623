"""The run's own metrics: loss, norms, throughput, expert load, in TensorBoard and in the log."""

from monitor.training.loading import load_training_config
from monitor.training.model import TrainingConfig

__all__ = ["TrainingConfig", "load_training_config"]
