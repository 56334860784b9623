"""Records weight gradients for PyTorch, before and after the data-parallel ranks reduce them. Detects clipping, and what loops
forget.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parameter import is_lazy

from monitor.coordinator.ownership import Ownership, adds_terms_of_others, beyond, reaches
from monitor.failures import SHORT_STEPS, Failures
from monitor.pytorch.clipping import BeforeClipping
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.frameworks.pipelining import StageBackwards
from monitor.pytorch.hooks import (
    NO_BACKWARD,
    ChangeDetector,
    GradientVersion,
    first_after_accumulation,
    loop_hooks,
    runs_backward,
    untraced,
)
from monitor.pytorch.modules import before_forward
from monitor.pytorch.process_group import has_others, is_settled, stage_ranks
from monitor.pytorch.reductions.memory import Groups, ReductionGroup
from monitor.pytorch.reductions.seen import ObservedReductions
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording.attached_model import WITHOUT_GROUP, Attached, NamedParameter, undeclared
from monitor.recording.backend import HookSet, Removable
from monitor.recording.parameters import AGGREGATED_EARLY, KEPT_BY, NOT_ACCUMULATED, SUMMED_EARLY, GradientRows, Reading
from monitor.recording.phases import STILL_SCALED, OptimizerTurn
from monitor.series import EVALUATION, IN_NO_GROUP, Ranks
from monitor.terminal import counted

# --- Whether a gradient is reduced when the optimizer's step begins: known from the framework, or observed, or assumed not to
# be. Ranks that share parameters average their gradients inside backward (DistributedDataParallel and other frameworks),
# between backward and the step (by hand), or inside the step (optimizers that shard their work). In the last case ``grad`` is
# still local when the step begins. A change since backward proves nothing: clipping and unscaling change gradients, too.


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
                self.undeclared = self.undeclared or undeclared(parameter.name, others)
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


# --- The gradients of a step.

CHANGED: Final = (
    "changed in place between backward and the optimizer's step, by clipping, scaling or reducing outside backward: a "
    "row holds the gradient that the optimizer received"
)
SUMMED_ADVICE: Final = (
    "In step {} the gradient of {} may already have been a sum over data-parallel ranks when it was accumulated. A hook of "
    "Tensor.register_hook that reduces has this effect. Such gradients have no grad_unreduced. To get these rows, reduce in "
    "register_post_accumulate_grad_hook or after backward."
)


class TorchGradients:
    """Takes gradients of torch (``GradientSource``).

    A gradient accumulates in place over the micro-batches. Its local sum is read when the last micro-batch has been added,
    before any reducer can change it (its hooks run after the parameter's own). Statistics of single micro-batches could not be
    combined to those of the sum.
    """

    def __init__(self, rows: GradientRows) -> None:
        attached = rows.attached
        self._rows, self._unreduced, self._stepped = rows, rows.unreduced, rows.stepped
        self._each_micro_step = rows.each_micro_step
        self._due, self._clock = attached.recorder.due("wg_distribution"), attached.clock
        self._failures, self._framework, self._note = attached.failures, attached.framework, attached.note
        self._left: dict[NamedParameter, GradientVersion] = {}
        self._read: set[NamedParameter] = set()
        self._warned_summed = False
        self._summed: set[NamedParameter] = set()
        self.reading: Reading = "unknown"
        self._changes = ChangeDetector(self._failures)
        self._kept, self._mode = KeptGradients(self._failures), TrainingMode(attached)
        reader = attached.recorder.reader
        assert isinstance(reader, TorchTensorReader)
        self._arrivals = reader.arrivals
        ownership, reduced = attached.watch.ownership, rows.reduced.parameters
        self.reductions = GradientReductions(self._framework, ownership, self._failures, reduced)
        self.hooked: Sequence[NamedParameter] = self._unreduced.parameters
        self._caught, accumulating = HookSet(), self._framework.accumulating
        self._not_accumulated = NOT_ACCUMULATED + (KEPT_BY.format(how=accumulating) if accumulating else "")
        caught = self._framework.catch_unreduced(self.hooked, self, self._failures)
        if caught is not None:
            self._caught.add(caught)
            self.hooked = [one for one in self.hooked if not self._framework.catches(one)]
        begins = self._failures.guarded("beginning a forward of a wrapper", self._wrapper_begins)
        for wrapper in self._framework.wrappers:
            self._caught.add(before_forward(wrapper, begins, compiled=True))
        self._caught.add(StageBackwards(self, self._framework, self._failures))
        clips = self._failures.guarded("reading gradients before they are clipped", self._before_clipping)
        self._caught.add(BeforeClipping(clips))

    @property
    def wanted(self) -> bool:
        """Whether gradients are read in the step in progress."""
        return self._due.now

    def begin_step(self) -> None:
        self._left.clear()
        self._read.clear()
        self._summed.clear()
        self._changes.begin_step()
        self._framework.begin_step()

    def _wrapper_begins(self, wrapper: nn.Module, _args: Any, _kwargs: Any) -> None:
        """In evaluation mode, too: a wrapper reduces whatever its mode is."""
        if self._due.now and torch.is_grad_enabled() and not runs_backward():
            self.reductions.wrapper_begins(wrapper)

    def before_reading(self, turn: OptimizerTurn) -> None:
        """The step pre-hook. Reduction is done; the training loop may have clipped."""
        if not self._each_micro_step:
            self._failures.guarded("finishing an accumulation", self._finish_short_accumulation)(turn)
        self.reductions.begin_reading()

    def after_reading(self, turn: OptimizerTurn, not_reduced: str) -> None:
        """Note how the gradients just read differ from those that backward left."""
        self._kept.stepped(turn, self._clock.step)
        if self._changes.latest is not None:
            self._mode.stepped()
        self.reductions.end_reading(turn.held is None)
        if in_no_group := self.reductions.undeclared:
            self._failures.advise(IN_NO_GROUP, in_no_group)
            self._note(IN_NO_GROUP, in_no_group)
        may_be_clipped = len(self._rows.reduced) > 0 and not self._framework.reads_before_clipping
        changed = may_be_clipped and self._changes.changed(self._framework.reduced, turn.held)
        self.reading = self._state(turn, changed=changed)
        if changed or turn.scaling == STILL_SCALED or not_reduced:
            said = [turn.scaling, CHANGED if changed else "", not_reduced]
            self._note("grad_reduced", "; ".join(filter(None, said)))

    def _state(self, turn: OptimizerTurn, *, changed: bool) -> Reading:
        if turn.scaling == STILL_SCALED or self._framework.reads_before_clipping:
            return "scaled"
        if changed:
            return "changed"
        return "intact" if self._changes.intact(self._framework.reduced, turn.held) else "unknown"

    def remove(self) -> None:
        self._caught.remove()
        self._kept.remove()

    def can_be_hooked(self, parameter: NamedParameter) -> bool:
        """A lazy parameter must have a shape, too."""
        return bool(parameter.tensor.requires_grad) and not is_lazy(parameter.tensor)

    def register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        hook = untraced(self._taken_or(read, parameter))
        if hasattr(parameter.tensor, "main_grad"):  # an existing hook fills main_grad
            handle: Removable = parameter.tensor.register_post_accumulate_grad_hook(hook)
            return handle
        return first_after_accumulation(parameter.tensor, hook)

    def _taken_or(self, read: Callable[[Any], None], parameter: NamedParameter) -> Callable[[Any], None]:
        """``read``, called only where more than reading is to be done, if there is code in C."""
        watched = self._unreduced.known(parameter)
        made = None if watched is None else self._arrivals(watched, self._due, self.reductions, self._changes, parameter)
        if made is None:
            return read
        take = made.take

        def take_or_read(argument: Any) -> None:
            if not take(argument):
                read(argument)

        return take_or_read

    def found(self, parameter: NamedParameter, argument: Tensor) -> None:
        """Backward has accumulated into a parameter."""
        gradient = self._framework.local_gradient(argument) if self._due.now else None
        if gradient is not None:  # of one micro-step there is nothing to count or to follow
            if torch._C._current_graph_task_id() != self._changes.task and self._changes.taken_away(self._may_be_gone):
                self._rows.note_local(self._not_accumulated)
            complete = self._clock.micro_steps == 1
            self._arrives(parameter, gradient, complete=complete)
            more = self._each_micro_step or self.reductions.follows or self._stepped or self._summed or self._left
            self.reductions.only_read = self._changes.task if complete and not more else NO_BACKWARD

    def arrived(self, parameter: NamedParameter, gradient: Tensor, *, complete: bool) -> None:
        """A framework has reported a gradient."""
        if self._framework.reports_twice and complete is self._each_micro_step:
            return
        self._arrives(parameter, gradient, complete=complete)

    def assigned(self, parameter: NamedParameter, gradient: Tensor, micro_step: int) -> None:
        """A pipeline's schedule has added the gradient of a micro-batch, outside of a backward."""
        self._arrives(parameter, gradient, complete=False, micro_step=micro_step)

    def _arrives(self, parameter: NamedParameter, gradient: Tensor, *, complete: bool, micro_step: int | None = None) -> None:
        changes = self._changes
        if torch._C._current_graph_task_id() != changes.task:
            changes.backward_begins(parameter)
            self._kept.arrived(parameter, gradient)
        changes.latest = parameter
        if self.reductions.follows:
            if self.reductions.arrived(parameter, gradient):
                self._is_summed(parameter)
            elif changes.adds(parameter, gradient) and self._framework.reduced_before(parameter):
                self._rows.note_local(AGGREGATED_EARLY)
        if parameter in self._stepped or parameter in self._summed:
            return
        if complete and not self._each_micro_step:
            self._unreduced.record(parameter, gradient)
            self._left.pop(parameter, None)
        else:
            self._accumulated(parameter, gradient, micro_step)

    def _is_summed(self, parameter: NamedParameter) -> None:
        """The gradient is no longer local to this rank. Later backwards of the step add to it, so it stays non-local."""
        self._summed.add(parameter)
        self._left.pop(parameter, None)
        if not self._warned_summed and self._rows.both and parameter not in self._stepped:
            self._warned_summed = True
            self._rows.note_local(f"{SUMMED_EARLY}: first in step {self._clock.step} for {parameter.name}")
            self._failures.warn("gradients that are summed early", SUMMED_ADVICE.format(self._clock.step, parameter.name))

    def _accumulated(self, parameter: NamedParameter, gradient: Tensor, micro_step: int | None) -> None:
        """Take the sum so far. If the micro-step is None, it is that of the backward in progress."""
        micro_step = self._rows.micro_step(parameter) if micro_step is None else micro_step
        if self._clock.micro_steps > 1:
            self._follow(parameter, gradient)
        if self._each_micro_step:
            self._unreduced.record(parameter, gradient, micro_step)
        elif micro_step >= self._clock.micro_steps - 1 or parameter in self._read:
            # The last micro-batch may come first: backwards in reverse order, or one backward of a sum of losses that adds
            # several times.
            self._unreduced.record(parameter, gradient)
            self._read.add(parameter)
            self._left.pop(parameter, None)

    def _follow(self, parameter: NamedParameter, gradient: Tensor) -> None:
        before = self._left.get(parameter)
        if before is not None and not before.refers_to(gradient) and not self._may_be_gone(parameter):
            self._rows.note_local(self._not_accumulated)
        self._left[parameter] = GradientVersion(gradient)

    def _may_be_gone(self, parameter: NamedParameter) -> bool:
        """Whether the gradient of an earlier backward may not be there, although it counts in what backward adds up."""
        return parameter in self._stepped or self._framework.replaces_gradients(parameter)

    def _before_clipping(self) -> None:
        """Record the sums that no further micro-batch may reach. If one does, they are recorded again."""
        if self._each_micro_step or not self._due.now or has_others():
            return
        for parameter, left in list(self._left.items()):
            gradient = self._framework.reduced(parameter)
            if gradient is not None and left.is_intact(gradient):
                self._unreduced.record(parameter, gradient)
                self._read.add(parameter)
                del self._left[parameter]

    def _finish_short_accumulation(self, turn: OptimizerTurn) -> None:
        """Record gradients that the last micro-batches did not reach (fewer micro-batches, or an expert that was not called).
        Their sums are complete if they are unchanged since backward.
        """
        held, lost = turn.held, 0
        for parameter, left in [(one, self._left.pop(one)) for one in list(self._left) if held is None or one in held]:
            gradient = self._framework.reduced(parameter)
            if gradient is not None and left.is_intact(gradient) and not turn.scaling and not has_others():
                self._unreduced.record(parameter, gradient)
            else:
                lost += 1
        if lost and self._rows.both:
            said = f"In step {self._clock.step}, the last of the micro-batches of grad_acc_steps ({self._clock.micro_steps})"
            then = "aggregated, unscaled or clipped before this was known: their grad_unreduced is missing."
            why = "The last step of an epoch may have fewer micro-batches."
            self._failures.nothing_of(SHORT_STEPS, f"{said} did not reach {counted(lost, 'gradient')}, {then} {why}")


# --- What a loop forgets: to clear its gradients, and to put the model back into training mode after an evaluation.

SUSPICIOUS: Final = 3
"""Steps in a row after which the gradient itself is looked at. Our choice."""

_KEPT: Final = (
    "The gradient of {name} is not cleared between steps: in step {step} a backward has added to what earlier steps left "
    "there, and rows of gradients contain the sum. If it should be cleared, call optimizer.zero_grad() before the first "
    "backward of each step."
)
_EVALUATED: Final = (
    "The model was in evaluation mode when step {step} trained it: Dropout and BatchNorm act as in evaluation, and its "
    "activations have no rows. {then}"
)


class KeptGradients:
    """Follows the gradient of one parameter from the step of its optimizer to the next.

    Versions show that nothing but backwards has written to it. A loop that clears ``p.grad.data`` leaves no trace in them, so
    in the end a hook looks once at what the next backward finds. Nothing is said where something else writes between backwards,
    and in steps that are not collected.

    Attributes:
        parameter: The parameter that is followed; None until one is chosen.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self.parameter: NamedParameter | None = None
        self._left: GradientVersion | None = None
        self._arrived = False
        self._steps = 0
        self._looking: tuple[Node, Removable] | None = None
        self._is_done = False

    def arrived(self, parameter: NamedParameter, gradient: Tensor) -> None:
        """A backward has added to the gradient of this parameter, which is followed if no other is."""
        if self._is_done or parameter is not (self.parameter or parameter):
            return
        self.parameter, self._arrived = parameter, True
        if self._left is None or not self._left.is_next(gradient):
            self._steps = -1
        self._left = GradientVersion(gradient)

    def stepped(self, turn: OptimizerTurn, step: int) -> None:
        """An optimizer is about to step."""
        parameter = self.parameter
        if self._is_done or parameter is None or (turn.held is not None and parameter not in turn.held):
            return
        self._steps = self._steps + 1 if self._arrived else 0
        self._arrived = False
        gradient = parameter.tensor.grad  # clipping and reductions have changed it since backward
        self._left = None if gradient is None else GradientVersion(gradient)
        if self._steps >= SUSPICIOUS and parameter.tensor.requires_grad:
            self._is_done = True
            self._look(parameter, step + 1)

    def _look(self, parameter: NamedParameter, step: int) -> None:
        living = weakref.ref(self)  # Python's garbage collector does not see references inside this hook

        def find(_: Any) -> None:
            if (of := living()) is not None:
                of.found(step)

        node = get_gradient_edge(parameter.tensor).node
        hook = self._failures.guarded("looking at a gradient that is kept", find)
        self._looking = node, node.register_prehook(hook)  # only the graph of a backward keeps the node

    def found(self, step: int) -> None:
        """The next backward is about to add to the gradient."""
        self.remove()
        gradient = None if self.parameter is None else self.parameter.tensor.grad
        if self.parameter is not None and gradient is not None and gradient.count_nonzero().item():
            self._failures.warn("gradients that are kept", _KEPT.format(name=self.parameter.name, step=step))

    def remove(self) -> None:
        """Remove the hook."""
        if self._looking is not None:
            self._looking[1].remove()
            self._looking = None


class TrainingMode:
    """Looks whether the model is in training mode when it trains. Libraries load models in evaluation mode."""

    def __init__(self, attached: Attached) -> None:
        self._roots, self._clock = attached.watch.chunks, attached.clock
        self._failures, self._note = attached.failures, attached.note
        self._has_trained = self._is_done = False

    def stepped(self) -> None:
        """An optimizer is about to step with gradients of this step."""
        if self._is_done:
            return
        if max(self._clock.forward) >= 0 or any(root.training for root in self._roots):
            self._has_trained = True
            return
        self._is_done = True
        if any(module.training for root in self._roots for module in root.modules()):  # a part of it trains, as a new head
            return
        step = self._clock.step
        self._note(EVALUATION, f"the model trains in evaluation mode, first in step {step}")
        if self._has_trained:
            then = "It was in training mode before: call model.train() after each evaluation."
            self._failures.warn("evaluation mode", _EVALUATED.format(step=step, then=then))
        else:
            then = "Call model.train() before training, unless this is intended."
            self._failures.advise("evaluation mode", _EVALUATED.format(step=step, then=then))
