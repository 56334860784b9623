"""MindSpore's ``FrameworkAdapter``: the gradients, weights and moments of parameters, and their placements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from mindspore import Parameter, Tensor, nn

from monitor.failures import Failures
from monitor.mindspore.compiled.replay import program_of
from monitor.mindspore.frameworks.adams import Adams, MindSporeMoments
from monitor.mindspore.frameworks.kept_tensors import KeptTensors
from monitor.mindspore.frameworks.optimizer_state import OptimizerState, is_filled_in, optimizers_in
from monitor.mindspore.optimizer_steps import MindSporeOptimizerSteps
from monitor.mindspore.process_group import data_parallel_ranks
from monitor.recording.backend import StepListener
from monitor.series import LOCAL, Placement

UNMEASURED: Final = (
    "Parameters that no optimizer steps, such as frozen ones, have no rows of param_origin and param_updated from compiled "
    "steps: later steps may have changed them before the monitor records a step."
)

SCALED: Final = "the optimizer divides by its loss_scale: grad_unreduced, grad_reduced and actv_grad are multiplied by it"


class ParameterHolder(Protocol):
    """An object with a parameter."""

    @property
    def tensor(self) -> Parameter: ...


class SteppedOptimizer:
    """One optimizer, and the gradients of the step in progress.

    Attributes:
        optimizer: The cell that users call.
        state: Finds the optimizer's state of a parameter.
        adams: Its update rule, if it is an Adam.
        has_stepped: Whether its moments are the result of a step, which may have been made before a checkpoint.
        gradients: The gradients that the optimizer was given, from its call to the end of its step.
        measured: What compiled code has measured of its weights and moments, by the id of the parameter, while collectors are
            called for a step in compiled code; None otherwise.
        is_outside: Whether compiled code makes the step in progress, and its weights and moments are read outside of that.
        failures: Of the monitor, while it listens to steps.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        """Inspect an optimizer before training begins: this may wait."""
        self.optimizer = optimizer
        self.state = OptimizerState(optimizer)
        self.adams = Adams(self.state)
        self.has_stepped = self.state.has_stepped()
        self.gradients: Sequence[Any] = ()
        self.measured: Mapping[int, Any] | None = None
        self.is_outside = False
        self._is_replaced = self._has_looked = False
        self.failures: Failures | None = None
        self._kept = KeptTensors(self.state)

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code makes the step in progress."""
        return self.is_outside or self.measured is not None

    def seen(self, x: Parameter | None) -> Any:
        """A weight or moment as it was at this point of the step."""
        return x if self.measured is None or x is None else self.measured.get(id(x))

    def tensors(self) -> Sequence[Parameter]:
        """The weights that the optimizer steps, and their moments."""
        return self.state.tensors()

    def place(self, parameter: Parameter) -> int | None:
        """The index of a parameter in the optimizer; None if it is not stepped."""
        return self.state.place(parameter)

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these gradients. Before its first step this waits: moments may have been loaded."""
        self.state.refresh()
        self.has_stepped = self.has_stepped or (not self.is_compiled and self.state.has_stepped())
        self._has_looked = False
        self.gradients = gradients

    @property
    def is_replaced(self) -> bool:
        """Whether the program has replaced tensors that the optimizer continues with. Looks once a step, if asked: it waits."""
        if not (self._has_looked or self.is_compiled):
            self._has_looked = True
            self._is_replaced = self._kept.are_replaced(self.failures)
        return self._is_replaced

    @property
    def shows_state(self) -> bool:
        """Whether the optimizer steps with the state that it shows."""
        return not (self.is_compiled or self.is_replaced)

    def call_ended(self) -> None:
        """The optimizer was called: from now on, its moments are those of a step."""
        self.has_stepped = True
        if not self.is_compiled:
            self._kept.stepped()

    def end_step(self) -> None:
        """Drop the gradients of the step."""
        self.gradients = ()
        self.measured = None
        self.is_outside = False

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """The gradient that the optimizer was given in the step in progress; None if it was given none."""
        place = self.state.place(parameter)
        return None if place is None or place >= len(self.gradients) else self.gradients[place]


class MindSporeFramework:
    """MindSpore's cells and optimizers.

    Every answer concerns this rank alone: it issues no collective and waits for no device.

    Attributes:
        name: The name in messages and in the manifest.
        chunks: The model as given to ``set_monitor``.
        optimizers: The cells that the user calls with gradients.
        unusable_state: Sentences about optimizer state that is no moment of one parameter.
        stepped: The optimizers and their state, by id.
    """

    name = "mindspore"

    def __init__(self, chunks: Sequence[nn.Cell], optimizer: Any, *, main_grad: bool) -> None:
        """Inspect a model and its optimizers, as the user passed them, before training begins: this may wait.

        Args:
            main_grad: Whether the user states that gradients are kept in ``main_grad``. It has no effect: optimizers of
                MindSpore are given their gradients, wherever these are kept.

        Raises:
            TypeError: An object passed as an optimizer is none.
        """
        del main_grad
        self.chunks = chunks
        self.optimizers = optimizers_in(optimizer)
        self.unusable_state: Sequence[str] = ()
        self._failures: Failures | None = None
        self.stepped = {id(one): SteppedOptimizer(one) for one in self.optimizers}

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that are known without the user, by role: ``dp`` in MindSpore's data-parallel mode."""
        ranks = data_parallel_ranks()
        return {"dp": ranks} if ranks else {}

    def notes(self) -> Mapping[str, str]:
        """Notes for readers of the manifest; by kind if a note concerns one kind."""
        found = [one.state for one in self.stepped.values()]
        program = program_of(self.chunks[0])
        scales = {getattr(one.optimizer, "loss_scale", 1.0) for one in found} - {1.0}
        notes = {kind: said for one in found for kind, said in one.notes().items()}
        notes |= {} if program is None else program.notes
        return notes | ({"loss_scale": f"{', '.join(map(str, sorted(scales)))}: {SCALED}"} if scales else {})

    def placement(self, kind: str, parameter: ParameterHolder) -> Placement:
        """The relation of this rank's record of a parameter to other ranks', apart from the user's groups."""
        del kind, parameter
        return LOCAL

    def completed(self, kind: str, parameter: ParameterHolder, placed: Placement, *, around: bool) -> Placement:
        """``placed`` with the replicas that the model shows: none."""
        del kind, parameter, around
        return placed

    def held(self, optimizer: Any) -> Collection[int]:
        """The ids of the parameters that an optimizer steps. The object is the same until the parameters change."""
        return self.stepped[id(optimizer)].state.places

    @property
    def handed(self) -> Sequence[Tensor | None]:
        """The gradients that the calling optimizer was given, in the order of its parameters."""
        return [one for stepped in self.stepped.values() for one in stepped.gradients]

    def reduced(self, parameter: ParameterHolder) -> Tensor | None:
        """The gradient that the optimizer was given in the step in progress; None if it was given none."""
        found = self._of(parameter)
        gradient = None if found is None else found.gradient(parameter.tensor)
        return None if is_filled_in(gradient, parameter.tensor) else gradient

    def weight(self, parameter: ParameterHolder) -> Tensor | None:
        """The weight that the optimizer steps; None if compiled code has stepped, and changes it outside of the optimizer."""
        found = self._of(parameter)
        if found is not None:
            return found.seen(parameter.tensor)
        if any(one.measured is not None for one in self.stepped.values()):
            self._warn_unmeasured()
            return None
        return parameter.tensor

    def _warn_unmeasured(self) -> None:
        if self._failures is not None:
            self._failures.nothing_of("parameters outside of optimizers", UNMEASURED)

    def moments(self, kinds: Sequence[str], parameter: ParameterHolder, optimizer: Any) -> Sequence[Tensor | None]:
        """``moment`` for each kind."""
        return [self.moment(kind, parameter, optimizer) for kind in kinds]

    def moment(self, kind: str, parameter: ParameterHolder, optimizer: Any = None) -> Tensor | None:
        """This rank's part of a moment; None before a fresh optimizer's first step: its zeros are no moment."""
        found = self._of(parameter) if optimizer is None else self.stepped[id(optimizer)]
        if found is None or not found.has_stepped or found.is_replaced:
            return None
        return found.seen(found.state.moment(kind, parameter.tensor))

    def state_of(self, parameter: ParameterHolder) -> tuple[OptimizerState, int] | None:
        """The state of the optimizer that steps a parameter, and the parameter's index in it; None if none steps it, or if
        compiled code has stepped: its hyperparameters may have changed since. Also None if they were replaced.
        """
        found = self._of(parameter)
        place = None if found is None else found.state.place(parameter.tensor)
        return (found.state, place) if found is not None and place is not None and found.shows_state else None

    def keeps(self, kind: str, parameter: ParameterHolder) -> bool:
        """Whether the optimizer has such a moment of a parameter, even before its first step. No moment is known to be its own
        if tensors were replaced.
        """
        found = self._of(parameter)
        return found is not None and not found.is_replaced and found.state.moment(kind, parameter.tensor) is not None

    def maximizes(self, parameter: ParameterHolder) -> bool:
        """Whether the optimizer steps up along the gradient."""
        found = self._of(parameter)
        place = None if found is None else found.state.place(parameter.tensor)
        return found is not None and place is not None and bool(found.state.group(place).get("maximize"))

    def is_compiled(self, optimizer: Any) -> bool:
        """Whether compiled code makes the step in progress. The optimizer has then stepped when its gradients are read."""
        return self.stepped[id(optimizer)].is_compiled

    def is_adam(self, optimizer: Any) -> bool:
        """Whether ``adam_of`` knows the optimizer's update rule."""
        return self.stepped[id(optimizer)].adams.rule is not None

    def adam_of(self, parameter: ParameterHolder) -> MindSporeMoments | None:
        """The terms of the parameter's latest step; None if they are unknown."""
        found = self._of(parameter)
        return found.adams.of(parameter.tensor) if found is not None and found.shows_state else None

    def learning_rates(self, optimizer: Any) -> Sequence[Any]:
        """The learning rate of each parameter group for the step that begins, as the optimizer computes it."""
        stepped = self.stepped[id(optimizer)]
        return stepped.state.learning_rates() if stepped.shows_state else ()

    def scales_itself(self, optimizer: Any) -> bool:
        """Whether the optimizer divides the gradients that it is given by a loss scale."""
        return getattr(self.stepped[id(optimizer)].state.optimizer, "loss_scale", 1.0) != 1.0

    def steps(self, listener: StepListener, failures: Failures) -> MindSporeOptimizerSteps:
        """Report every step to ``listener`` from now on."""
        self._failures = failures
        for one in self.stepped.values():
            one.failures = failures
        program = program_of(self.chunks[0])
        return MindSporeOptimizerSteps([(one.optimizer, one) for one in self.stepped.values()], listener, failures, program)

    def _of(self, parameter: ParameterHolder) -> SteppedOptimizer | None:
        """The first optimizer that steps a parameter."""
        return next((one for one in self.stepped.values() if one.state.place(parameter.tensor) is not None), None)


# --- The framework of a model and its optimizer.


def framework_of(chunks: Sequence[nn.Cell], optimizer: Any, *, main_grad: bool) -> MindSporeFramework:
    """MindSpore's adapter of a model and its optimizers.

    Raises:
        TypeError: An object passed as an optimizer is none.
    """
    return MindSporeFramework(chunks, optimizer, main_grad=main_grad)
