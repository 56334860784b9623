"""The monitor for PyTorch."""

try:
    import torch

    if torch.__version__ < "2.4":  # torch compares these as versions
        too_old = f"monitor.pytorch needs PyTorch 2.4 or later, and this is {torch.__version__}"
        raise ImportError(f"{too_old}: pip install --upgrade 'trainermon[torch]'", name="torch")
    from monitor.pytorch.dump import PrecisionDebugger
    from monitor.pytorch.dump.backend import seed_all
    from monitor.pytorch.trainer_mon import TrainerMon
    from monitor.recording.run import RunEnded
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is installed, and another module is missing
        raise
    advice = "monitor.pytorch needs PyTorch: pip install 'trainermon[torch]'"
    raise ModuleNotFoundError(advice, name="torch") from error

__all__ = ["PrecisionDebugger", "RunEnded", "TrainerMon", "seed_all"]
