"""The monitor for MindSpore."""

try:
    from monitor.mindspore.callbacks import MonitorCallback, MsprobeInitStep, MsprobeStep
    from monitor.mindspore.dump import PrecisionDebugger
    from monitor.mindspore.dump.backend import seed_all
    from monitor.mindspore.trainer_mon import TrainerMon
    from monitor.recording.run import RunEnded
except ModuleNotFoundError as error:
    if error.name != "mindspore":  # MindSpore is installed, and another module is missing
        raise
    raise ModuleNotFoundError(
        "monitor.mindspore needs MindSpore: pip install 'trainermon[mindspore]'", name="mindspore"
    ) from error

__all__ = ["MonitorCallback", "MsprobeInitStep", "MsprobeStep", "PrecisionDebugger", "RunEnded", "TrainerMon", "seed_all"]
