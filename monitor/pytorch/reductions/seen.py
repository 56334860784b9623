"""Observes the reductions of gradients that a training loop issues by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident

from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.hooks import NO_HOOKS, LoopHooks, runs_backward
from monitor.pytorch.reductions.memory import BufferWrites, Groups, ReducedMemory, SumListener, storage_of
from monitor.stats.torch.tensors import local_shard


class ObservedReductions:
    """The observed reductions of one step.

    Calls of torch functions are observed from the first sum over ranks of a buffer that is no gradient, until the optimizer
    steps or a forward begins. So a loop that reduces gradients in place only pays for its collectives.
    """

    def __init__(self, gradients: Callable[[], Sequence[Tensor]], failures: Failures) -> None:
        """Listen from now on.

        Args:
            gradients: Finds the current gradients.
        """
        self._gradients = gradients
        self._memory = ReducedMemory()
        self._sums = SumListener(self._memory, self._issued, failures)
        self._writes = BufferWrites(self._memory, self._sums.enter_sums, partial(failures.report, "following reduced buffers"))
        self._storages: set[int] | None = None
        self._window = True
        self._thread = get_ident()
        self._since_arrival: list[tuple[Groups, set[int]]] = []
        self._arrived: weakref.ref[Tensor] | None = None
        self._arrived_hooks = NO_HOOKS
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
        self._arrived, self._arrived_hooks = None, NO_HOOKS
        self._storages = None
        self._window = True

    def set_window(self, is_open: bool) -> None:
        """Set whether reductions of gradients may come now: no forward is running. An evaluation's forward reports its end
        only, maybe on another thread than training.
        """
        if is_open and get_ident() != self._thread:
            return
        self._window = is_open
        self._writes.leave()
        if not is_open:
            self._thread = get_ident()

    def changed(self, gradient: Tensor, hooks: LoopHooks) -> Groups:
        """A backward has added to a gradient, which counts as local from now on.

        Args:
            hooks: The training loop's hooks on the parameter.

        Returns:
            Groups that the added or the earlier gradient may have been summed over.
        """
        if not self._sums.wanted:
            self._sums.wanted = True
        self._sums.enter_sums()
        summed = self._before_accumulation(gradient, hooks) if self._since_arrival else ()
        if self._memory:
            summed += self._memory.groups_within(gradient)
            self._memory.forget(gradient)
        self._since_arrival.clear()
        self._arrived, self._arrived_hooks = weakref.ref(gradient), hooks
        return summed

    def end_window(self) -> None:
        """The optimizer's step begins: later collectives are its own."""
        self._writes.leave()
        self._sums.enter_sums()
        self._sums.wanted = self._sums.wanted_in_backward = False

    def reopen(self) -> None:
        """The optimizer's step has ended, and another optimizer will step."""
        self._sums.wanted = self._sums.wanted_in_backward = True
        self._window = True

    def groups_of(self, gradient: Tensor) -> Groups | None:
        """The groups that a gradient was summed over; None if it is local."""
        return self._memory.groups_of(gradient)

    def remove(self) -> None:
        self._writes.leave()
        self._sums.remove()

    def _issued(self, groups: Groups, outputs: Sequence[Tensor]) -> None:
        """A sum over ranks has begun. Unless all its outputs are gradients, gradients may be copied from them."""
        if runs_backward():  # a mode entered in a backward does not outlive it
            self._issued_in_backward(groups, outputs)
            return
        if self._writes.entered or not self._window or get_ident() != self._thread:
            return
        storages = self._gradient_storages()
        if any((storage := storage_of(x)) is not None and storage._cdata not in storages for x in outputs):
            self._writes.enter()

    def _issued_in_backward(self, groups: Groups, outputs: Sequence[Tensor]) -> None:
        """The sum may be of the next gradient, unless it is of the latest one."""
        last = None if self._arrived is None else self._arrived()
        of_last = None if last is None else storage_of(last)
        if of_last is None or any((one := storage_of(x)) is None or one._cdata != of_last._cdata for x in outputs):
            self._since_arrival.append((groups, {x.numel() for x in outputs}))

    def _before_accumulation(self, gradient: Tensor, hooks: LoopHooks) -> Groups:
        """Groups of sums before accumulation, which copies and so hides them from the memory map.

        Hooks on the parameter run just before. Without such hooks, a function applied to the parameter may have made a sum of
        the gradient's size. Hooks after the previous gradient's accumulation may have made it, too; then it is ignored.
        """
        if hooks.before:
            return tuple(group for groups, _ in self._since_arrival for group in groups)
        local = None if self._arrived_hooks.after else local_shard(gradient)
        size = None if local is None else local.numel()
        return tuple(group for groups, sizes in self._since_arrival if size in sizes for group in groups)

    def _gradient_storages(self) -> set[int]:
        if self._storages is None:
            found = (storage_of(x) for x in self._gradients())
            self._storages = {storage._cdata for storage in found if storage is not None}
        return self._storages
