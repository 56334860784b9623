"""Finds out what a loop forgets: to clear its gradients, and to put the model back into training mode after an evaluation."""

from __future__ import annotations

import weakref
from typing import Any, Final

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from monitor.failures import Failures
from monitor.pytorch.hooks import GradientVersion
from monitor.recording.attached_model import Attached, NamedParameter
from monitor.recording.backend import Removable
from monitor.recording.phases import OptimizerTurn
from monitor.series import EVALUATION

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
        if self._steps >= SUSPICIOUS:
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
            then = "Call model.train() before training, unless that is meant."
            self._failures.advise("evaluation mode", _EVALUATED.format(step=step, then=then))
