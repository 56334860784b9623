"""By what an optimizer divides its gradients inside its step: the loss scale that it was made with."""

from __future__ import annotations


class GradientScale:
    """See ``monitor.training.backend.GradientScale``: it never changes."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def take(self) -> float:
        return self._scale

    def remove(self) -> None:
        """Nothing was watched."""
