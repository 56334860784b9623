"""What becomes of gradients between the end of backward and the optimizer's step: clipping, above all.

The place where they are read is the step, so a loop that clips has done it by then. A reducer that writes to gradients inside
backward is no such change, and most of them do: what counts is the version of a gradient when backward, the reducer's part of
it included, has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.backward_end import when_backward_ends
from monitor.recording.parameter_series import Among, NamedParameter

MOST_SENTINELS: Final = 4
"""Gradients that are looked at: who clips, clips all of them."""


class LeftGradient:
    """A gradient as it was left, to tell later whether anybody has replaced or changed it since.

    Of a view, what it is a view of counts: FSDP makes new views of one gradient after every micro-batch. Changes behind the
    version (``p.grad.data``) are not seen.
    """

    __slots__ = ("_gradient", "_version")

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = weakref.ref(_whole(gradient))
        self._version = gradient._version

    def stands_in(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self._gradient() is _whole(gradient)

    def is_intact(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self.stands_in(gradient) and gradient._version == self._version


class AfterBackward:
    """Follows the first and the last gradients of each backward of a step."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._task = -1
        self._latest: NamedParameter | None = None
        self._sentinels: dict[NamedParameter, LeftGradient | None] = {}

    def begin_step(self) -> None:
        self._latest = None
        self._sentinels.clear()

    def arrived(self, parameter: NamedParameter) -> None:
        """Backward has come to a parameter."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._sentinels = dict.fromkeys(self._sentinels)  # should this backward not come to its end
            self._add(parameter)
            when_backward_ends(self._failures.guarded("following the gradients", self._ended, "Clipping may go unnoticed."))
        self._latest = parameter

    def changed(self, reduced: Callable[[NamedParameter], Tensor | None], held: Among = None) -> bool:
        """Whether a gradient that is about to be read was written to since backward has ended.

        Args:
            reduced: Finds what is about to be read. Where that is not what backward has left, nothing is known.
            held: The parameters that are about to be read.
        """
        for parameter, left in self._sentinels.items():
            gradient = None if left is None or (held is not None and parameter not in held) else reduced(parameter)
            if left is not None and left.stands_in(gradient) and not left.is_intact(gradient):
                return True
        return False

    def _add(self, parameter: NamedParameter) -> None:
        if len(self._sentinels) < MOST_SENTINELS:
            self._sentinels.setdefault(parameter)

    def _ended(self) -> None:
        """Later backwards of a step add to the gradients of earlier ones, so all are looked at anew."""
        self._task = -1
        if self._latest is not None:
            self._add(self._latest)
        for parameter in self._sentinels:
            gradient = parameter.tensor.grad
            self._sentinels[parameter] = None if gradient is None else LeftGradient(gradient)


def _whole(gradient: Tensor) -> Tensor:
    base: Tensor | None = gradient._base
    return gradient if base is None else base
