"""The monitor for MindSpore."""

from monitor.capture.errors import RunEnded
from monitor.mindspore.callback import MonitorCallback
from monitor.mindspore.trainer_mon import TrainerMon

__all__ = ["MonitorCallback", "RunEnded", "TrainerMon"]
