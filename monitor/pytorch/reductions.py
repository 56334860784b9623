"""Whether a gradient is reduced when the optimizer's step begins: known of a framework that reduces, else seen, else not so.

Ranks that share parameters average their gradients: inside backward (DistributedDataParallel and other frameworks), between
backward and the step (by hand), or inside the step (optimizers that shard their work), where ``grad`` is still local when the
step begins. That a gradient has changed since backward tells nothing: clipping and unscaling change it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from monitor.coordinator.ownership import Ownership, adds_terms_of_others, reaches
from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.frameworks.pipelining import stage_ranks
from monitor.pytorch.hooks import hooks_of_loop
from monitor.pytorch.place import has_others, is_settled
from monitor.pytorch.reduced_memory import Groups, Over
from monitor.recording.parameter_series import NamedParameter
from monitor.series import Ranks


class Reductions:
    """Follows one step after the other. What is known of each parameter is asked for when the step begins.

    Nothing is listened to where there is no other rank, and where the framework is known to reduce every gradient.

    Attributes:
        follows: Whether ``arrived`` is to be told of gradients.
    """

    def __init__(
        self, framework: Framework, ownership: Ownership, failures: Failures, parameters: Sequence[NamedParameter]
    ) -> None:
        """Listen to nothing yet.

        Args:
            parameters: Those whose reduced gradients are recorded.
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
        groups = self._seen.changed(gradient, hooks_of_loop(parameter.tensor))
        return bool(groups) and self._others_share(parameter, groups)

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
        """Whether a gradient is what all ranks that share the parameter make together, as far as is known."""
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
        """Gradients were asked for: those of all parameters, or of one of several optimizers."""
        if of_all and not self._needed:
            self.remove()

    def end_turn(self) -> None:
        """An optimizer has stepped, and others have not: their gradients may be reduced now."""
        if self._seen is not None:
            self._seen.reopen()

    def remove(self) -> None:
        """Listen no longer."""
        if self._seen is not None:
            seen, self._seen = self._seen, None
            seen.remove()

    def _listen(self) -> None:
        if self._seen is None and self._needed and self._others_may_come_in():
            from monitor.pytorch.seen_reductions import SeenReductions  # which not every torch can import

            self._seen = SeenReductions(self._gradients, self._failures)

    def _others_may_come_in(self) -> bool:
        """Whether a gradient lacks, or may come to lack, what other ranks have, and no framework is known to add it."""
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
        layout = self._framework.spread_over(parameter)
        key = (*groups, layout, self._stage)
        found = self._known.get(key)
        if found is None:
            placed = [layout, self._stage or (), *(one.ranks for one in groups)]
            found = self._known[key] = reaches(self._ownership, dist.get_rank(), dist.get_world_size(), placed)
        return found

    def _others_share(self, parameter: NamedParameter, groups: Groups) -> bool:
        """Whether a sum over any of ``groups`` adds terms of other ranks that share the parameter."""
        layout = self._framework.spread_over(parameter)
        return any(self._adds_terms(one, layout) for one in groups)

    def _adds_terms(self, over: Over, layout: Ranks) -> bool:
        key = over, layout, self._stage
        found = self._adding.get(key)
        if found is None:
            parts, rank, world_size = [layout, self._stage or ()], dist.get_rank(), dist.get_world_size()
            found = self._adding[key] = adds_terms_of_others(self._ownership, rank, world_size, parts, over.ranks)
        return found
