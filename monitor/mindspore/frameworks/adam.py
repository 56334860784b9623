"""What the Adams of MindSpore make of their moments. They differ from each other, and from the paper.

With the moments of the step that was just made, ``m`` and ``v``, and what their bias is corrected by, ``a = 1 - beta1 ** step``
and ``b = 1 - beta2 ** step``, a weight goes down by the learning rate times

    AdamW of mindspore.experimental:                      (m / a) / (sqrt(v / b) + eps)     as in the paper
    Adam, LazyAdam, AdamOffload; Adam of experimental:    sqrt(b) / a * m / (sqrt(v) + eps)
    AdamWeightDecay:                                      m / (sqrt(v) + eps)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import _no_grad
from mindspore.experimental import optim

from monitor.mindspore.frameworks.state import State

Correction: TypeAlias = float | Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """What the step of a parameter was computed from. The update is, before the learning rate and weight decay,

        (mean / mean_correction) / (sqrt(square / square_correction) + eps)

    or, where ``eps_on_root``, with ``eps / sqrt(square_correction)`` in the place of ``eps``.

    Attributes:
        mean: The first moment.
        square: The second moment, or the greatest that it has been.
        mean_correction: What ``mean`` is divided by: a tensor of one element, float32, as the optimizer computes it.
        square_correction: The same of ``square``.
        eps_on_root: Whether ``eps`` is added to the root of ``square`` before that is corrected.
    """

    mean: Parameter
    square: Parameter
    mean_correction: Correction
    square_correction: Correction
    eps: float
    eps_on_root: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """What one Adam does.

    Attributes:
        corrections: Of both moments, after a step, from the optimizer and the hyperparameters of a group.
        eps_on_root: See ``Moments``.
    """

    corrections: Callable[[nn.Cell, Mapping[str, Any]], tuple[Correction, Correction]]
    eps_on_root: bool


class Adams:
    """Tells of one optimizer's steps, if it is an Adam.

    Attributes:
        rule: None if it is none of those that are known here.
    """

    def __init__(self, state: State) -> None:
        """Take an optimizer before training begins: this may wait."""
        self._state = state
        self._optimizer = state.optimizer
        # With Nesterov's look ahead a step is made of more than moments.
        ahead = getattr(self._optimizer, "use_nesterov", False)
        self.rule: Rule | None = None if ahead else next((r for of, r in RULES if isinstance(self._optimizer, of)), None)
        eps = getattr(self._optimizer, "eps", None)
        # Of experimental ones it is in the groups.
        self._eps = float(eps.asnumpy().item()) if self.rule is not None and isinstance(eps, Tensor) else None

    def of(self, parameter: Parameter) -> Moments | None:
        """After a step: what it was computed from. Nothing here waits."""
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
        return Moments(mean, square, of_mean, of_square, eps, self.rule.eps_on_root)


def _none(_optimizer: nn.Cell, _group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    return 1.0, 1.0


def _by_powers(optimizer: nn.Cell, _group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    return mint.sub(1.0, optimizer.beta1_power), mint.sub(1.0, optimizer.beta2_power)


def _by_steps(optimizer: nn.Cell, group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    power = ops.Pow()
    first, second = group["betas"]
    return mint.sub(1.0, power(first, optimizer.state_step)), mint.sub(1.0, power(second, optimizer.state_step))


def _classes(*names: str) -> tuple[type, ...]:
    """Of those classes of ``mindspore.nn`` the ones that this version has."""
    return tuple(getattr(nn, name) for name in names if hasattr(nn, name))


RULES: Final = (
    (_classes("Adam", "LazyAdam", "AdamOffload"), Rule(_by_powers, eps_on_root=True)),
    (_classes("AdamWeightDecay"), Rule(_none, eps_on_root=True)),
    ((optim.Adam,), Rule(_by_steps, eps_on_root=True)),
    ((optim.AdamW,), Rule(_by_steps, eps_on_root=False)),
)
