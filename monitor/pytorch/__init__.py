"""The monitor for PyTorch."""

from monitor.pytorch.errors import RunEnded
from monitor.pytorch.trainer_mon import TrainerMon

__all__ = ["RunEnded", "TrainerMon"]
