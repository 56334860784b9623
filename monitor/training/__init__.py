"""The run's own metrics: loss, norms, throughput, expert load, in TensorBoard and in the log."""

from monitor.training.config import TrainingConfig, load_training_config

__all__ = ["TrainingConfig", "load_training_config"]
