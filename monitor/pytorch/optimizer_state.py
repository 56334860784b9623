"""Moments of the optimizer, read before its step: the first step of a fresh optimizer has none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from monitor.failures import Failures
from monitor.pytorch.parameters import NamedParameter, Owns, ParameterSeries
from monitor.pytorch.recorder import Recorder

STATE_NAMES: Final = {
    "exp_avg": ("exp_avg", "momentum_buffer"),
    "exp_avg_sq": ("exp_avg_sq",),
    "max_exp_avg_sq": ("max_exp_avg_sq",),
}
"""What torch optimizers call the state behind each kind."""


class MomentCollector:
    """``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``."""

    def __init__(self, parameters: Sequence[NamedParameter], recorder: Recorder, owns: Owns, failures: Failures) -> None:
        self._series = {kind: ParameterSeries(kind, parameters, recorder, owns, failures) for kind in STATE_NAMES}

    def before_step(self, optimizer: Optimizer) -> None:
        for kind, series in self._series.items():
            series.record_all(partial(_moment, optimizer, kind))


def _moment(optimizer: Optimizer, kind: str, parameter: NamedParameter) -> Tensor | None:
    # `state` is a defaultdict: asking for a parameter that has none yet would make one, and change training.
    state = optimizer.state.get(parameter.tensor)
    if state is None:
        return None
    found = (state.get(name) for name in STATE_NAMES[kind])
    return next((x for x in found if isinstance(x, Tensor)), None)
