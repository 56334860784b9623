"""What the tensor monitor has to record, so that the norms of training metrics can be read from its rows."""

from __future__ import annotations

from math import gcd

from monitor.config import MonitorConfig
from monitor.training.model import TrainingConfig


def norms_of_state(config: TrainingConfig) -> bool:
    """Whether ``monitor_config`` asks for norms."""
    wanted = ("local_norm_format", "device_local_norm_format", "optimizer_state_format", "weight_state_format")
    return any(map(config.wants, wanted))


def recorded(config: TrainingConfig, *, grad_norm_is_told: bool) -> MonitorConfig | None:
    """The tensor monitor's configuration; None where no norm is wanted, and always while ``monitor_on`` is false.

    Args:
        grad_norm_is_told: Whether ``grad-norm`` comes from whoever clips gradients.
    """
    run, state = config.callbacks.MFLossMonitor, config.monitor_config
    local = bool(config.wants("local_norm_format") or config.wants("device_local_norm_format"))
    moments, weights = bool(config.wants("optimizer_state_format")), bool(config.wants("weight_state_format"))
    grad_norm = state.monitor_on and run is not None and not grad_norm_is_told
    if not (local or moments or weights or grad_norm):
        return None
    intervals = [state.step_interval] if local or moments or weights else []
    intervals += [run.per_print_times] if run is not None and grad_norm else []
    every = gcd(*intervals)
    return MonitorConfig(
        format=("hdf5",),
        ops=("norm",),
        wg_distribution=local or grad_norm,
        mv_distribution=moments,
        param_distribution=weights,
        # Steps that are shown are counted from 1, those that are recorded from 0.
        start_step=every - 1,
        step_interval=every,
    )
