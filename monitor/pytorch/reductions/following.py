"""Follows the reductions of gradients: known from the framework, or observed, or assumed not to be.

Ranks that share parameters average their gradients inside backward (DistributedDataParallel and other frameworks), between
backward and the step (by hand), or inside the step (optimizers that shard their work). In the last case ``grad`` is still
local when the step begins. A change since backward proves nothing: clipping and unscaling change gradients, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from monitor.coordinator.ownership import Ownership, adds_terms_of_others, beyond, reaches
from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.hooks import NO_BACKWARD, loop_hooks
from monitor.pytorch.process_group import has_others, is_settled, stage_ranks
from monitor.pytorch.reductions.memory import Groups, ReductionGroup
from monitor.pytorch.reductions.seen import ObservedReductions
from monitor.recording.attached_model import WITHOUT_GROUP, NamedParameter
from monitor.recording.parameters import MAX_LISTED
from monitor.series import Ranks
from monitor.terminal import first_of

UNDECLARED: Final = (
    "The gradient of {name} is summed over ranks {ranks} as well, which are in no group that was passed to set_monitor. If "
    "they hold the same weights, as with context parallelism, each dp_group writes rows of them, and norms over all tensors "
    "would count them several times. Pass the group of all ranks over which gradients are summed as dp_group."
)


class GradientReductions:
    """Follows reductions step by step, and answers for each parameter when the optimizer's step begins.

    It does not listen if there is no other rank, or if the framework reduces every gradient.

    Attributes:
        follows: Whether ``arrived`` must be called for gradients.
        undeclared: What is said of ranks that share gradients, and that are in no group that was passed; mostly empty.
        only_read: The backward in progress, if further gradients of it are only to be read: the code in C does that. A method
            after which that may not be so sets ``NO_BACKWARD``.
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
        self.is_whole, self.out_of_sight = True, ""
        self._stage: Ranks | None = None
        self._known: dict[tuple[Any, ...], bool] = {}
        self._adding: dict[tuple[Any, ...], bool] = {}
        self.follows, self.undeclared = False, ""
        self.only_read = NO_BACKWARD

    def begin_step(self) -> None:
        """A step that is collected begins."""
        self.only_read = NO_BACKWARD
        self._listen()
        if self._seen is not None:
            self._seen.begin_step()
        self.follows = self._seen is not None or self._framework.follows_backward

    def forward_begins(self) -> None:
        """A forward of a module in training mode begins. Without gradients it is no training, and may run beside it."""
        self.only_read = NO_BACKWARD
        if not torch.is_grad_enabled():
            return
        self._framework.forward_begins()
        self._listen()
        if self._seen is not None:
            self._seen.set_window(False)
            if self._stage is None and (stage := stage_ranks()) is not None:
                self._stage = stage
                self._warn_without_group()
        self.follows = self._seen is not None or self._framework.follows_backward

    def wrapper_begins(self, wrapper: nn.Module) -> None:
        """A forward of one of the framework's ``wrappers`` begins."""
        self.only_read = NO_BACKWARD
        self._framework.wrapper_begins(wrapper)
        self.follows = True

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
        self.only_read = NO_BACKWARD
        if self._seen is not None:
            self._seen.end_window()

    def begin_reading(self) -> None:
        """The optimizer's step begins."""
        self.only_read = NO_BACKWARD
        self._needed, self.is_whole = False, not has_others()
        if self._seen is not None:
            self._seen.end_window()

    def is_reduced(self, parameter: NamedParameter, gradient: Tensor | None) -> bool:
        """Whether a gradient is known to be reduced over all ranks that share the parameter."""
        if self.is_whole:
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
        self.only_read = NO_BACKWARD
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

    def _warn_without_group(self) -> None:
        """A forward has shown the ranks of the pipeline: warn if others may hold replicas, and nothing says so."""
        if dist.get_rank() == 0 and self._ownership.dp_group is None and self._may_lack_terms():
            self._failures.warn("ranks without a group", WITHOUT_GROUP)

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
            parts, summed, rank = [layout, self._stage or ()], [one.ranks for one in groups], dist.get_rank()
            found = self._known[key] = reaches(self._ownership, rank, dist.get_world_size(), [*parts, *summed])
            if others := beyond(self._ownership, rank, parts, summed):
                ranks = first_of([str(one) for one in others], MAX_LISTED)
                self.undeclared = self.undeclared or UNDECLARED.format(ranks=ranks, name=parameter.name)
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
