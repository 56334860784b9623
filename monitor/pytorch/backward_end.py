"""The end of the backward in progress, before whoever called it goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch.autograd import Variable


def when_backward_ends(then: Callable[[], None]) -> None:
    """Call ``then`` after what a reducer has asked for at the end of the backward in progress.

    The engine makes its final calls in the order in which they were asked for. A reducer asks when its last gradient has
    arrived, which is after the first; so this asks for another one when it is called itself.
    """
    _queue(lambda: _queue(then))


def _queue(call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # where no engine runs the backward: in compiled code
        Variable._execution_engine.queue_callback(call)
