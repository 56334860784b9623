"""Where gradients, weights and moments of a parameter are, and what other ranks hold of them: MindSpore's answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from mindspore import Parameter, Tensor, nn

from monitor.failures import Failures
from monitor.mindspore.frameworks.adam import Adams, Moments
from monitor.mindspore.frameworks.optimizers import optimizers_in
from monitor.mindspore.frameworks.state import State
from monitor.mindspore.optimizer_steps import OptimizerSteps
from monitor.recording.backend import StepListener
from monitor.series import LOCAL, Placement

SCALED: Final = "the optimizer divides by its loss_scale: grad_unreduced, grad_reduced and actv_grad are multiplied by it"


class Holding(Protocol):
    """What knows of a watched parameter."""

    @property
    def tensor(self) -> Parameter: ...


class Stepped:
    """One optimizer, and what it was handed in the step in progress.

    Attributes:
        optimizer: The cell that users call.
        state: Where it keeps what it knows of a parameter.
        adams: What it makes of its moments, if it is an Adam.
        has_stepped: Whether its moments are those of a step.
        gradients: What it was handed, from its call to the end of its step.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        """Take an optimizer before training begins: this may wait."""
        self.optimizer = optimizer
        self.state = State(optimizer)
        self.adams = Adams(self.state)
        self.has_stepped = self.state.has_stepped()
        self.gradients: Sequence[Tensor | None] = ()

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these."""
        self.state.look()
        self.gradients = gradients

    def end_step(self) -> None:
        """Forget the gradients of the step."""
        self.gradients = ()
        self.has_stepped = True

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """The gradient that the optimizer was handed in the step in progress; None where it was handed none."""
        place = self.state.place(parameter)
        return None if place is None or place >= len(self.gradients) else self.gradients[place]


class Framework:
    """MindSpore's cells and optimizers.

    Every answer concerns this rank alone: no collective is issued, and nothing waits for a device.

    Attributes:
        name: As messages and the manifest have it.
        chunks: The model as given to ``set_monitor``.
        optimizers: What the user calls with the gradients.
        unusable_state: What was found of their state that is no moment of one parameter, in sentences.
        stepped: The optimizers, each with what is known of it, by its id.
    """

    name = "mindspore"

    def __init__(self, chunks: Sequence[nn.Cell], optimizer: Any, *, main_grad: bool) -> None:
        """Take a model and its optimizers, as the user passed them, before training begins: this may wait.

        Args:
            main_grad: Whether the user says that gradients are kept in ``main_grad``. Optimizers of MindSpore are handed them
                wherever they are kept, so it makes no difference.

        Raises:
            TypeError: An optimizer is none.
        """
        del main_grad
        self.chunks = chunks
        self.optimizers = optimizers_in(optimizer)
        self.unusable_state: Sequence[str] = ()
        self.stepped = {id(one): Stepped(one) for one in self.optimizers}

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that show in the model, by role: none."""
        return {}

    def notes(self) -> Mapping[str, str]:
        """What a reader of the numbers must know, for the manifest; by kind where it concerns one."""
        found = [one.state for one in self.stepped.values()]
        scales = {getattr(one.optimizer, "loss_scale", 1.0) for one in found} - {1.0}
        notes = {kind: said for one in found for kind, said in one.notes().items()}
        return notes | ({"loss_scale": f"{', '.join(map(str, sorted(scales)))}: {SCALED}"} if scales else {})

    def placement(self, kind: str, parameter: Holding) -> Placement:
        """How what this rank records of a parameter relates to what others record; groups of the user's aside."""
        del kind, parameter
        return LOCAL

    def completed(self, kind: str, parameter: Holding, placed: Placement) -> Placement:
        """``placed``, with the replicas that the model shows beside: none."""
        del kind, parameter
        return placed

    def aggregates(self, root: nn.Cell) -> bool:
        """Whether local gradients are replaced by aggregated ones: no, whoever aggregates makes new ones."""
        del root
        return False

    def held(self, optimizer: Any) -> Collection[int]:
        """The ids of the parameters that an optimizer steps: the same object as long as they are the same."""
        return self.stepped[id(optimizer)].state.places

    @property
    def handed(self) -> Sequence[Tensor | None]:
        """What the optimizer was handed that is about to step, in the order of its parameters."""
        return [one for stepped in self.stepped.values() for one in stepped.gradients]

    def reduced(self, parameter: Holding) -> Tensor | None:
        """The gradient that the optimizer was handed in the step in progress; None where it was handed none."""
        found = self._of(parameter)
        return None if found is None else found.gradient(parameter.tensor)

    def weight(self, parameter: Holding) -> Tensor | None:
        """The weight that the optimizer steps."""
        return parameter.tensor

    def moment(self, kind: str, parameter: Holding, optimizer: Any = None) -> Tensor | None:
        """What this rank holds of a moment. Before the first step of a fresh optimizer it is full of zeros that are none."""
        found = self._of(parameter) if optimizer is None else self.stepped[id(optimizer)]
        return found.state.moment(kind, parameter.tensor) if found is not None and found.has_stepped else None

    def keeps(self, kind: str, parameter: Holding) -> bool:
        """Whether the optimizer has such a moment of a parameter, be it of no step yet."""
        found = self._of(parameter)
        return found is not None and found.state.moment(kind, parameter.tensor) is not None

    def maximizes(self, parameter: Holding) -> bool:
        """Whether the optimizer steps up along the gradient."""
        found = self._of(parameter)
        place = None if found is None else found.state.place(parameter.tensor)
        return found is not None and place is not None and bool(found.state.group(place).get("maximize"))

    def is_adam(self, optimizer: Any) -> bool:
        """Whether ``adam_of`` knows the optimizer's rule."""
        return self.stepped[id(optimizer)].adams.rule is not None

    def adam_of(self, parameter: Holding) -> Moments | None:
        """After a step: what the step of the parameter was computed from; None where that cannot be told."""
        found = self._of(parameter)
        return None if found is None else found.adams.of(parameter.tensor)

    def steps(self, listener: StepListener, failures: Failures) -> OptimizerSteps:
        """Tell ``listener`` of every step from now on."""
        return OptimizerSteps([(one.optimizer, one) for one in self.stepped.values()], listener, failures)

    def _of(self, parameter: Holding) -> Stepped | None:
        """The first optimizer that steps a parameter."""
        return next((one for one in self.stepped.values() if one.state.place(parameter.tensor) is not None), None)
