"""Gradients, weights and moments of a MindSpore model, and the update rules of MindSpore's Adam optimizers.

The Adams differ from each other and from the paper. Let ``m`` and ``v`` be the moments after the step. Their bias corrections
are ``a = 1 - beta1 ** step`` and ``b = 1 - beta2 ** step``. Then a weight decreases by the learning rate times

    AdamW of mindspore.experimental:                      (m / a) / (sqrt(v / b) + eps)     as in the paper
    Adam, LazyAdam, AdamOffload; Adam of experimental:    sqrt(b) / a * m / (sqrt(v) + eps)
    AdamWeightDecay:                                      m / (sqrt(v) + eps)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import _no_grad
from mindspore.experimental import optim

from monitor.failures import Failures
from monitor.mindspore.optimizer_state import OptimizerState, optimizers_in
from monitor.mindspore.optimizer_steps import MindSporeOptimizerSteps
from monitor.recording.backend import StepListener
from monitor.series import LOCAL, Placement

Correction: TypeAlias = float | Tensor


@dataclass(frozen=True, slots=True)
class MindSporeMoments:
    """The terms of a parameter's step. The update is, before the learning rate and weight decay,

        (mean / mean_correction) / (sqrt(square / square_correction) + eps)

    or, if ``eps_on_root``, with ``eps / sqrt(square_correction)`` in place of ``eps``.

    Attributes:
        mean: The first moment.
        square: The second moment, or its maximum so far.
        mean_correction: The divisor of ``mean``: a tensor of one element, float32, as the optimizer computes it.
        square_correction: The divisor of ``square``, likewise.
        eps_on_root: Whether ``eps`` is added to the root of ``square`` before the root is corrected.
    """

    mean: Parameter
    square: Parameter
    mean_correction: Correction
    square_correction: Correction
    eps: float
    eps_on_root: bool


@dataclass(frozen=True, slots=True)
class AdamRule:
    """The update rule of one Adam.

    Attributes:
        corrections: Computes both corrections after a step, from the optimizer and the hyperparameters of a group.
        eps_on_root: See ``MindSporeMoments``.
    """

    corrections: Callable[[nn.Cell, Mapping[str, Any]], tuple[Correction, Correction]]
    eps_on_root: bool


class Adams:
    """Reports the steps of one optimizer, if it is an Adam.

    Attributes:
        rule: None if the optimizer is no known Adam.
    """

    def __init__(self, state: OptimizerState) -> None:
        """Inspect an optimizer before training begins: this may wait."""
        self._state = state
        self._optimizer = state.optimizer
        # Nesterov's look-ahead makes a step of more than the moments.
        ahead = getattr(self._optimizer, "use_nesterov", False)
        self.rule: AdamRule | None = None if ahead else next((r for of, r in RULES if isinstance(self._optimizer, of)), None)
        eps = getattr(self._optimizer, "eps", None)
        # The experimental optimizers keep eps in their groups.
        self._eps = float(eps.asnumpy().item()) if self.rule is not None and isinstance(eps, Tensor) else None

    def of(self, parameter: Parameter) -> MindSporeMoments | None:
        """The terms of the parameter's latest step. Does not wait."""
        place = self._state.place(parameter)
        if place is None or self.rule is None:
            return None
        mean, square, greatest = (self._state.moment(kind, parameter) for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
        square = square if greatest is None else greatest
        if mean is None or square is None:
            return None
        group = self._state.group(place)
        with _no_grad():
            of_mean, of_square = self.rule.corrections(self._optimizer, group)
        eps = float(group["eps"]) if self._eps is None else self._eps
        return MindSporeMoments(mean, square, of_mean, of_square, eps, self.rule.eps_on_root)


def _none(_optimizer: nn.Cell, _group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    return 1.0, 1.0


def _by_powers(optimizer: nn.Cell, _group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    return mint.sub(1.0, optimizer.beta1_power), mint.sub(1.0, optimizer.beta2_power)


def _by_steps(optimizer: nn.Cell, group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    power = ops.Pow()
    first, second = group["betas"]
    return mint.sub(1.0, power(first, optimizer.state_step)), mint.sub(1.0, power(second, optimizer.state_step))


def _classes(*names: str) -> tuple[type, ...]:
    """The classes with these names that this version's ``mindspore.nn`` has."""
    return tuple(getattr(nn, name) for name in names if hasattr(nn, name))


RULES: Final = (
    (_classes("Adam", "LazyAdam", "AdamOffload"), AdamRule(_by_powers, eps_on_root=True)),
    (_classes("AdamWeightDecay"), AdamRule(_none, eps_on_root=True)),
    ((optim.Adam,), AdamRule(_by_steps, eps_on_root=True)),
    ((optim.AdamW,), AdamRule(_by_steps, eps_on_root=False)),
)

# --- The gradients, weights and moments of parameters, and their placements.

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
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        """Inspect an optimizer before training begins: this may wait."""
        self.optimizer = optimizer
        self.state = OptimizerState(optimizer)
        self.adams = Adams(self.state)
        self.has_stepped = self.state.has_stepped()
        self.gradients: Sequence[Tensor | None] = ()

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these gradients."""
        self.state.refresh()
        self.gradients = gradients

    def end_step(self) -> None:
        """Drop the gradients of the step."""
        self.gradients = ()
        self.has_stepped = True

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
        self.stepped = {id(one): SteppedOptimizer(one) for one in self.optimizers}

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that the model shows, by role: none."""
        return {}

    def notes(self) -> Mapping[str, str]:
        """Notes for readers of the manifest; by kind if a note concerns one kind."""
        found = [one.state for one in self.stepped.values()]
        scales = {getattr(one.optimizer, "loss_scale", 1.0) for one in found} - {1.0}
        notes = {kind: said for one in found for kind, said in one.notes().items()}
        return notes | ({"loss_scale": f"{', '.join(map(str, sorted(scales)))}: {SCALED}"} if scales else {})

    def placement(self, kind: str, parameter: ParameterHolder) -> Placement:
        """The relation of this rank's record of a parameter to other ranks', apart from the user's groups."""
        del kind, parameter
        return LOCAL

    def completed(self, kind: str, parameter: ParameterHolder, placed: Placement) -> Placement:
        """``placed`` with the replicas that the model shows: none."""
        del kind, parameter
        return placed

    def aggregates(self, root: nn.Cell) -> bool:
        """Whether aggregation overwrites local gradients: no, in MindSpore it creates new tensors."""
        del root
        return False

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
        return None if found is None else found.gradient(parameter.tensor)

    def weight(self, parameter: ParameterHolder) -> Tensor | None:
        """The weight that the optimizer steps."""
        return parameter.tensor

    def moment(self, kind: str, parameter: ParameterHolder, optimizer: Any = None) -> Tensor | None:
        """This rank's part of a moment; None before a fresh optimizer's first step: its zeros are no moment."""
        found = self._of(parameter) if optimizer is None else self.stepped[id(optimizer)]
        return found.state.moment(kind, parameter.tensor) if found is not None and found.has_stepped else None

    def keeps(self, kind: str, parameter: ParameterHolder) -> bool:
        """Whether the optimizer has such a moment of a parameter, even before its first step."""
        found = self._of(parameter)
        return found is not None and found.state.moment(kind, parameter.tensor) is not None

    def maximizes(self, parameter: ParameterHolder) -> bool:
        """Whether the optimizer steps up along the gradient."""
        found = self._of(parameter)
        place = None if found is None else found.state.place(parameter.tensor)
        return found is not None and place is not None and bool(found.state.group(place).get("maximize"))

    def is_adam(self, optimizer: Any) -> bool:
        """Whether ``adam_of`` knows the optimizer's update rule."""
        return self.stepped[id(optimizer)].adams.rule is not None

    def adam_of(self, parameter: ParameterHolder) -> MindSporeMoments | None:
        """The terms of the parameter's latest step; None if they are unknown."""
        found = self._of(parameter)
        return None if found is None else found.adams.of(parameter.tensor)

    def steps(self, listener: StepListener, failures: Failures) -> MindSporeOptimizerSteps:
        """Report every step to ``listener`` from now on."""
        return MindSporeOptimizerSteps([(one.optimizer, one) for one in self.stepped.values()], listener, failures)

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
