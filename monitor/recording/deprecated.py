"""Methods of ``TrainerMon`` that scripts of earlier tools call."""

from __future__ import annotations

import warnings
from typing import Any

from monitor.failures import Failures
from monitor.recording.recording import Recording


class DeprecatedMethods:
    """Methods that will be removed, for every framework."""

    _recordings: list[Recording]
    _failures: Failures
    _wrapped_optimizer: Any = None

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Deprecated: pass the optimizer to ``set_monitor``."""
        said = "set_wrapped_optimizer will be removed: pass the optimizer to set_monitor."
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        self._wrapped_optimizer = optimizer

    def reload_xy(self, xy_distribution: bool = False) -> None:
        """Switch the monitoring of activations on or off. Deprecated: dynamic start and stop switches it on all ranks
        together.
        """
        said = "reload_xy is deprecated and will be removed: use dynamic start and stop."
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        for recording in self._recordings:
            self._failures.guarded("switching activations", recording.attachment.set_activations)(xy_distribution)
