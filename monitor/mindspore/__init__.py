"""The monitor for MindSpore."""

from monitor.capture.errors import RunEnded
from monitor.mindspore.callback import MonitorCallback
from monitor.mindspore.dump.callback import MsprobeInitStep, MsprobeStep
from monitor.mindspore.dump.debugger import PrecisionDebugger
from monitor.mindspore.dump.seeding import seed_all
from monitor.mindspore.trainer_mon import TrainerMon

__all__ = ["MonitorCallback", "MsprobeInitStep", "MsprobeStep", "PrecisionDebugger", "RunEnded", "TrainerMon", "seed_all"]
