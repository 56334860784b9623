"""The monitor for PyTorch."""

from monitor.capture.errors import RunEnded
from monitor.pytorch.trainer_mon import TrainerMon

__all__ = ["RunEnded", "TrainerMon"]
