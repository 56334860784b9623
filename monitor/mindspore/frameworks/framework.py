"""Where gradients, weights and moments of a parameter are, and what other ranks hold of them: MindSpore's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from mindspore import Parameter, Tensor, nn

from monitor.capture.backend import StepListener
from monitor.failures import Failures
from monitor.mindspore.frameworks.adam import Adams, Moments
from monitor.mindspore.frameworks.state import State
from monitor.mindspore.optimizer_steps import OptimizerSteps
from monitor.placement import LOCAL, Placement

SCALED: Final = "the optimizer divides by its loss_scale: grad_unreduced, grad_reduced and actv_grad are multiplied by it"


class Holding(Protocol):
    """What knows of a watched parameter."""

    @property
    def tensor(self) -> Parameter: ...


class Framework:
    """MindSpore's cells and optimizers.

    Every answer concerns this rank alone: no collective is issued, and nothing waits for a device.

    Attributes:
        name: As messages and the manifest have it.
        chunks: The model as given to ``set_monitor``.
        optimizer: What the user calls with the gradients.
    """

    name = "mindspore"

    def __init__(self, chunks: Sequence[nn.Cell], optimizer: nn.Cell, *, main_grad: bool) -> None:
        """Take a model and its optimizer, as the user passed them, before training begins: this may wait.

        Args:
            main_grad: Whether the user says that gradients are kept in ``main_grad``. Optimizers of MindSpore are handed them
                wherever they are kept, so it makes no difference.

        Raises:
            TypeError: The optimizer is none.
        """
        del main_grad
        self.chunks = chunks
        self.optimizer = optimizer
        self._state = State(optimizer)
        self._adams = Adams(self._state)
        self._gradients: Sequence[Tensor | None] = ()
        self._stepped = self._state.has_stepped()

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that show in the model, by role: none."""
        return {}

    def notes(self) -> Mapping[str, str]:
        """What a reader of the numbers must know, for the manifest; by kind where it concerns one."""
        scale = getattr(self._state.optimizer, "loss_scale", 1.0)
        return {} if scale == 1.0 else {"loss_scale": f"{scale}: {SCALED}"}

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

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these."""
        self._gradients = gradients

    def end_step(self) -> None:
        """Let go of the gradients of the step."""
        self._gradients = ()
        self._stepped = True

    def reduced(self, parameter: Holding) -> Tensor | None:
        """The gradient that the optimizer was handed in the step in progress; None where it was handed none."""
        place = self._state.place(parameter.tensor)
        return None if place is None or place >= len(self._gradients) else self._gradients[place]

    def weight(self, parameter: Holding) -> Tensor | None:
        """The weight that the optimizer steps."""
        return parameter.tensor

    def moment(self, kind: str, parameter: Holding, optimizer: Any = None) -> Tensor | None:
        """What this rank holds of a moment. Before the first step of a fresh optimizer it is full of zeros that are none."""
        del optimizer
        return self._state.moment(kind, parameter.tensor) if self._stepped else None

    def keeps(self, kind: str, parameter: Holding) -> bool:
        """Whether the optimizer has such a moment of a parameter, be it of no step yet."""
        return self._state.moment(kind, parameter.tensor) is not None

    def maximizes(self, parameter: Holding) -> bool:
        """Whether the optimizer steps up along the gradient."""
        place = self._state.place(parameter.tensor)
        return place is not None and bool(self._state.group(place).get("maximize"))

    @property
    def is_adam(self) -> bool:
        """Whether ``adam_of`` knows the optimizer's rule."""
        return self._adams.rule is not None

    def adam_of(self, parameter: Holding) -> Moments | None:
        """After a step: what the step of the parameter was computed from; None where that cannot be told."""
        return self._adams.of(parameter.tensor)

    def steps(self, listener: StepListener, failures: Failures) -> OptimizerSteps:
        """Tell ``listener`` of every step from now on."""
        return OptimizerSteps(self.optimizer, self, listener, failures)
