"""Reductions between backward and the optimizer's step, of a loop that makes them itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident

from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.buffer_writes import BufferWrites
from monitor.pytorch.collectives.sums import SeenSums, runs_backward
from monitor.pytorch.hooks import NO_HOOKS, HooksOfLoop
from monitor.pytorch.reduced_memory import Groups, ReducedMemory, storage_of
from monitor.stats.torch.tensors import local_shard


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
        self._since_arrival: list[tuple[Groups, set[int]]] = []
        self._arrived: weakref.ref[Tensor] | None = None
        self._hooks_of_arrived = NO_HOOKS
        self._sums.wanted_in_backward = True
        self._sums.listen()

    def begin_step(self) -> None:
        self._thread = get_ident()
        self._writes.leave()
        self._sums.wanted = False
        self._sums.wanted_in_backward = True
        self._sums.clear()
        self._memory.clear()
        self._since_arrival.clear()
        self._arrived, self._hooks_of_arrived = None, NO_HOOKS
        self._storages = None
        self._window = True

    def set_window(self, is_open: bool) -> None:
        """Whether reductions of gradients may come now: no forward is running. One of an evaluation only ends."""
        self._window = is_open
        self._writes.leave()
        if not is_open:
            self._thread = get_ident()

    def changed(self, gradient: Tensor, hooks: HooksOfLoop) -> Groups:
        """A backward has added to a gradient, which counts as a local one from now on.

        Args:
            hooks: Those of the parameter.

        Returns:
            Groups that what was added, or what it was added to, may have been summed over.
        """
        if not self._sums.wanted:
            self._sums.wanted = True
        self._sums.take_in()
        summed = self._before_accumulation(gradient, hooks) if self._since_arrival else ()
        if self._memory:
            summed += self._memory.groups_within(gradient)
            self._memory.forget(gradient)
        self._since_arrival.clear()
        self._arrived, self._hooks_of_arrived = weakref.ref(gradient), hooks
        return summed

    def end_window(self) -> None:
        """The optimizer's step begins: what comes now is its own."""
        self._writes.leave()
        self._sums.take_in()
        self._sums.wanted = self._sums.wanted_in_backward = False

    def reopen(self) -> None:
        """The optimizer's step has ended, and another optimizer's is to come."""
        self._sums.wanted = self._sums.wanted_in_backward = True
        self._window = True

    def groups_of(self, gradient: Tensor) -> Groups | None:
        """What a gradient was summed over; None if it was not."""
        return self._memory.groups_of(gradient)

    def remove(self) -> None:
        self._writes.leave()
        self._sums.remove()

    def _issued(self, groups: Groups, outputs: Sequence[Tensor]) -> None:
        """A sum over ranks was begun; unless it is of gradients alone, they may be written from its outputs."""
        if runs_backward():  # a mode that is entered in a backward is gone behind it
            self._issued_in_backward(groups, outputs)
            return
        if self._writes.entered or not self._window or get_ident() != self._thread:
            return
        storages = self._of_gradients()
        if any((storage := storage_of(x)) is not None and storage._cdata not in storages for x in outputs):
            self._writes.enter()

    def _issued_in_backward(self, groups: Groups, outputs: Sequence[Tensor]) -> None:
        """It may be of the gradient that arrives next, unless it is of the last one that has."""
        last = None if self._arrived is None else self._arrived()
        of_last = None if last is None else storage_of(last)
        if of_last is None or any((one := storage_of(x)) is None or one._cdata != of_last._cdata for x in outputs):
            self._since_arrival.append((groups, {x.numel() for x in outputs}))

    def _before_accumulation(self, gradient: Tensor, hooks: HooksOfLoop) -> Groups:
        """What a gradient may have been summed over that memory does not show: accumulation makes copies.

        Hooks on the parameter run just before. Without any, a function that the parameter goes through may have made a sum of
        the gradient's size; but so may hooks behind the gradient that came before.
        """
        if hooks.before:
            return tuple(group for groups, _ in self._since_arrival for group in groups)
        local = None if self._hooks_of_arrived.after else local_shard(gradient)
        size = None if local is None else local.numel()
        return tuple(group for groups, sizes in self._since_arrival if size in sizes for group in groups)

    def _of_gradients(self) -> set[int]:
        if self._storages is None:
            found = (storage_of(x) for x in self._gradients())
            self._storages = {storage._cdata for storage in found if storage is not None}
        return self._storages
