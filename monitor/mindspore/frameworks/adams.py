"""The update rules of MindSpore's Adam optimizers.

The Adams differ from each other and from the paper. Let ``m`` and ``v`` be the moments after the step. Their bias corrections
are ``a = 1 - beta1 ** step`` and ``b = 1 - beta2 ** step``. Then a weight decreases by the learning rate times

    AdamW of mindspore.experimental; Adam, AdamW, FusedAdamW of mindspore.mint: (m / a) / (sqrt(v / b) + eps), as in the paper
    Adam, LazyAdam, AdamOffload; Adam of mindspore.experimental:                sqrt(b) / a * m / (sqrt(v) + eps)
    AdamWeightDecay:                                                            m / (sqrt(v) + eps)

The Adams of ``mindspore.mint`` are written for Ascend, and were tested here with other in-place operations. Their documentation
takes the maximum of AMSGrad over ``v / b``. The kernel of ``AdamW`` takes it over ``v``. ``Adam`` does not store it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import _no_grad
from mindspore.experimental import optim

from monitor.mindspore.frameworks.optimizer_state import MINT, OptimizerState, classes_of

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
        bias: The bias of ``square``, ``1 - beta2 ** step``, whether the optimizer corrects it or not.
    """

    mean: Parameter
    square: Parameter
    mean_correction: Correction
    square_correction: Correction
    eps: float
    eps_on_root: bool
    bias: Correction


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
            bias = of_square if self.rule.corrections is not _none else _bias(self._optimizer)
        eps = float(group["eps"]) if self._eps is None else self._eps
        return MindSporeMoments(mean, square, of_mean, of_square, eps, self.rule.eps_on_root, bias)


def _none(_optimizer: nn.Cell, _group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    return 1.0, 1.0


def _bias(optimizer: nn.Cell) -> Correction:
    return mint.sub(1.0, ops.Pow()(optimizer.beta2, optimizer.global_step)).reshape(())


def _by_powers(optimizer: nn.Cell, _group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    return mint.sub(1.0, optimizer.beta1_power), mint.sub(1.0, optimizer.beta2_power)


def _by_steps(optimizer: nn.Cell, group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    return _powers(group["betas"], optimizer.state_step)


def _by_earlier_steps(optimizer: nn.Cell, group: Mapping[str, Any]) -> tuple[Correction, Correction]:
    """``_by_steps`` if ``state_step`` is the number of earlier steps: the kernel adds 1."""
    return _powers(group["betas"], mint.add(optimizer.state_step, 1.0))


def _powers(betas: Sequence[float], steps: Tensor) -> tuple[Correction, Correction]:
    first, second = (mint.sub(1.0, ops.Pow()(beta, steps)).reshape(()) for beta in betas)
    return first, second


RULES: Final = (
    (classes_of(nn, "Adam", "LazyAdam", "AdamOffload"), AdamRule(_by_powers, eps_on_root=True)),
    (classes_of(nn, "AdamWeightDecay"), AdamRule(_none, eps_on_root=True)),
    (classes_of(optim, "Adam"), AdamRule(_by_steps, eps_on_root=True)),
    ((*classes_of(optim, "AdamW"), *classes_of(MINT, "Adam")), AdamRule(_by_steps, eps_on_root=False)),
    (classes_of(MINT, "AdamW", "FusedAdamW"), AdamRule(_by_earlier_steps, eps_on_root=False)),
)
