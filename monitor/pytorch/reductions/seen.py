"""Decides whether a gradient is reduced when the optimizer's step begins, also for loops that reduce by themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch.distributed as dist
from torch import Tensor

from monitor.coordinator.ownership import Ownership, adds_terms_of_others, reaches
from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.hooks import NO_HOOKS, LoopHooks, loop_hooks
from monitor.pytorch.process_group import has_others, is_settled, stage_ranks
from monitor.pytorch.reductions.buffers import BufferWrites
from monitor.pytorch.reductions.memory import Groups, ReducedMemory, ReductionGroup, SumListener, runs_backward, storage_of
from monitor.recording.parameter_series import NamedParameter
from monitor.series import Ranks
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
        only.
        """
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


# --- Whether a gradient is reduced when the optimizer's step begins: known from the framework, or observed, or assumed not to
# be. Ranks that share parameters average their gradients inside backward (DistributedDataParallel and other frameworks),
# between backward and the step (by hand), or inside the step (optimizers that shard their work). In the last case ``grad`` is
# still local when the step begins. A change since backward proves nothing: clipping and unscaling change gradients, too.


class GradientReductions:
    """Follows reductions step by step, and answers for each parameter when the optimizer's step begins.

    It does not listen if there is no other rank, or if the framework reduces every gradient.

    Attributes:
        follows: Whether ``arrived`` must be called for gradients.
    """

    def __init__(
        self, framework: Framework, ownership: Ownership, failures: Failures, parameters: Sequence[NamedParameter]
    ) -> None:
        """Set up without listening.

        Args:
            parameters: The parameters whose reduced gradients are recorded.
        """
        self._framework = framework
        self._ownership = ownership
        self._failures = failures
        self._parameters = parameters
        self._seen: Any = None
        self._needed = True
        self._alone = True
        self._stage: Ranks | None = None
        self._known: dict[tuple[Any, ...], bool] = {}
        self._adding: dict[tuple[Any, ...], bool] = {}
        self.follows = False

    def begin_step(self) -> None:
        """A step that is collected begins."""
        self._listen()
        if self._seen is not None:
            self._seen.begin_step()
        self.follows = self._seen is not None or self._framework.follows_backward

    def forward_begins(self, root: Any) -> None:
        """A forward of training begins."""
        self._framework.forward_begins(root)
        self._listen()
        if self._seen is not None:
            self._seen.set_window(False)
            if self._stage is None:
                self._stage = stage_ranks()
        self.follows = self._seen is not None or self._framework.follows_backward

    def forward_ends(self) -> None:
        if self._seen is not None:
            self._seen.set_window(True)

    def arrived(self, parameter: NamedParameter, gradient: Tensor) -> bool:
        """A backward has added to a gradient.

        Returns:
            Whether the gradient may hold terms of other ranks that share the parameter.
        """
        self._framework.backward_reaches(parameter)
        if self._seen is None:
            return False
        groups = self._seen.changed(gradient, loop_hooks(parameter.tensor))
        return bool(groups) and self._adds_shared_terms(parameter, groups)

    def pause(self) -> None:
        """A step that is not collected begins."""
        if self._seen is not None:
            self._seen.end_window()

    def begin_reading(self) -> None:
        """The optimizer's step begins."""
        self._needed, self._alone = False, not has_others()
        if self._seen is not None:
            self._seen.end_window()

    def is_reduced(self, parameter: NamedParameter, gradient: Tensor | None) -> bool:
        """Whether a gradient is known to be reduced over all ranks that share the parameter."""
        if self._alone:
            return True
        known = self._framework.reduces(parameter)
        if known is not None:
            return known
        if self._complete(parameter, ()):
            return True
        self._needed = True
        groups = None if gradient is None or self._seen is None else self._seen.groups_of(gradient)
        return bool(groups) and self._complete(parameter, groups or ())

    def end_reading(self, of_all: bool) -> None:
        """Gradients were read: of all parameters, or of one of several optimizers."""
        if of_all and not self._needed:
            self.remove()

    def end_turn(self) -> None:
        """One of several optimizers has stepped: gradients of the others may be reduced now."""
        if self._seen is not None:
            self._seen.reopen()

    def remove(self) -> None:
        """Listen no longer."""
        if self._seen is not None:
            seen, self._seen = self._seen, None
            seen.remove()

    def _listen(self) -> None:
        if self._seen is None and self._needed and self._may_lack_terms():
            self._seen = ObservedReductions(self._gradients, self._failures)

    def _may_lack_terms(self) -> bool:
        """Whether a gradient may lack terms of other ranks that no known framework adds."""
        if not has_others():
            return not is_settled()
        left = (one for one in self._parameters if self._framework.reduces(one) is None)
        self._needed = any(not self._complete(one, ()) for one in left)
        return self._needed

    def _gradients(self) -> Sequence[Tensor]:
        found = (self._framework.reduced(one) for one in self._parameters)
        return [gradient for gradient in found if gradient is not None]

    def _complete(self, parameter: NamedParameter, groups: tuple[Any, ...]) -> bool:
        """Whether ``groups`` reach every rank that shares the parameter."""
        layout = self._framework.model_ranks(parameter)
        key = (*groups, layout, self._stage)
        found = self._known.get(key)
        if found is None:
            placed = [layout, self._stage or (), *(one.ranks for one in groups)]
            found = self._known[key] = reaches(self._ownership, dist.get_rank(), dist.get_world_size(), placed)
        return found

    def _adds_shared_terms(self, parameter: NamedParameter, groups: Groups) -> bool:
        """Whether a sum over any of ``groups`` adds terms of other ranks that share the parameter."""
        layout = self._framework.model_ranks(parameter)
        return any(self._adds_terms(one, layout) for one in groups)

    def _adds_terms(self, over: ReductionGroup, layout: Ranks) -> bool:
        key = over, layout, self._stage
        found = self._adding.get(key)
        if found is None:
            parts, rank, world_size = [layout, self._stage or ()], dist.get_rank(), dist.get_world_size()
            found = self._adding[key] = adds_terms_of_others(self._ownership, rank, world_size, parts, over.ranks)
        return found
