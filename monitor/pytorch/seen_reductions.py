"""Reductions between backward and the optimizer's step, of a loop that makes them itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident

import torch
from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.buffer_writes import BufferWrites
from monitor.pytorch.collectives.sums import SeenSums
from monitor.pytorch.reduced_memory import Groups, ReducedMemory, storage_of

_NO_BACKWARD = -1


class SeenReductions:
    """What is seen of one step.

    Calls of torch's functions are looked at from the first sum over ranks of a buffer that holds no gradient, until the
    optimizer steps or a forward begins. A loop that reduces gradients where they are pays for its collectives alone.
    """

    def __init__(self, gradients: Callable[[], Sequence[Tensor]], failures: Failures) -> None:
        """Listen from now on.

        Args:
            gradients: Finds those that there are.
        """
        self._gradients = gradients
        self._memory = ReducedMemory()
        self._sums = SeenSums(self._memory, self._issued, failures)
        self._writes = BufferWrites(self._memory, self._sums.take_in, partial(failures.report, "following reduced buffers"))
        self._storages: set[int] | None = None
        self._window = True
        self._thread = get_ident()
        self._sums.listen()

    def begin_step(self) -> None:
        self._thread = get_ident()
        self._writes.leave()
        self._sums.wanted = False
        self._sums.clear()
        self._memory.clear()
        self._storages = None
        self._window = True

    def set_window(self, is_open: bool) -> None:
        """Whether reductions of gradients may come now: no forward is running. One of an evaluation only ends."""
        self._window = is_open
        self._writes.leave()
        if not is_open:
            self._thread = get_ident()

    def changed(self, gradient: Tensor) -> None:
        """A backward has added to a gradient, which is a local one from now on."""
        if not self._sums.wanted:
            self._sums.wanted = True
        self._sums.take_in()
        if self._memory:
            self._memory.forget(gradient)

    def end_window(self) -> None:
        """The optimizer's step begins: what comes now is its own."""
        self._writes.leave()
        self._sums.take_in()
        self._sums.wanted = False

    def reopen(self) -> None:
        """The optimizer's step has ended, and another optimizer's is to come."""
        self._sums.wanted = True
        self._window = True

    def groups_of(self, gradient: Tensor) -> Groups | None:
        """What a gradient was summed over; None if it was not."""
        return self._memory.groups_of(gradient)

    def remove(self) -> None:
        self._writes.leave()
        self._sums.remove()

    def _issued(self, outputs: Sequence[Tensor]) -> None:
        """A sum over ranks was begun; unless it is of gradients alone, they may be written from its outputs."""
        if self._writes.entered or not self._window or get_ident() != self._thread:
            return
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            return  # whatever is entered in a backward is gone behind it
        storages = self._of_gradients()
        if any((storage := storage_of(x)) is not None and storage._cdata not in storages for x in outputs):
            self._writes.enter()

    def _of_gradients(self) -> set[int]:
        if self._storages is None:
            found = (storage_of(x) for x in self._gradients())
            self._storages = {storage._cdata for storage in found if storage is not None}
        return self._storages
