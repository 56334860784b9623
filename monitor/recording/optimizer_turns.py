"""Determines when a step of several optimizers ends, and which parameters each of them steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from monitor.recording.parameter_series import NamedParameter, ParameterSubset
from monitor.stats.rows import Status

NAMED: Final = 3
"""Parameters that a warning names."""

UNSCALED: Final = "divided by loss_scale"
STILL_SCALED: Final = "multiplied by loss_scale: the optimizer divides by it inside its step"


@dataclass(frozen=True, slots=True)
class OptimizerTurn:
    """The turn of one optimizer in the step in progress.

    Attributes:
        optimizer: The optimizer; None if the framework has none on this rank.
        held: The recorded parameters that it steps; None if it steps all of them.
        scaling: How the loss scale may have changed its gradients, for a note: ``UNSCALED``, ``STILL_SCALED`` or empty.
    """

    optimizer: Any
    held: ParameterSubset = None
    scaling: str = ""


class OptimizerTurns:
    """The optimizers that have had their turn in the step in progress. In its turn, an optimizer steps or is skipped.

    A step ends when every optimizer has had its turn. In other loops (a critic that steps five times, an optimizer in an
    ``if``), the step ends just before an optimizer takes its second turn.
    """

    def __init__(self) -> None:
        self._stepped: set[int] = set()
        self._skipped: set[int] = set()

    def taken(self, optimizer: Any) -> bool:
        return id(optimizer) in self._stepped or id(optimizer) in self._skipped

    def take(self, optimizer: Any, *, skipped: bool = False) -> None:
        (self._skipped if skipped else self._stepped).add(id(optimizer))

    def complete(self, optimizers: Sequence[Any]) -> bool:
        """Whether each of ``optimizers`` has had its turn."""
        return len(self._stepped) + len(self._skipped) >= len(optimizers)

    @property
    def begun(self) -> bool:
        """Whether any optimizer has had its turn."""
        return bool(self._stepped or self._skipped)

    @property
    def mixed(self) -> bool:
        """Whether one optimizer has stepped and another was skipped."""
        return bool(self._stepped and self._skipped)

    @property
    def status(self) -> Status:
        """The status of the step if it ends now: complete if at least one optimizer has stepped."""
        return "complete" if self._stepped else "skipped"

    def clear(self) -> None:
        self._stepped.clear()
        self._skipped.clear()


class OptimizerIndex(Protocol):
    """Knows which parameters an optimizer steps: the ``Framework``."""

    def held(self, optimizer: Any) -> Collection[int] | None:
        """The ids of the tensors that an optimizer steps; None if it steps all parameters."""


class OptimizerParameters:
    """The recorded parameters of each optimizer, read in every step, since parameter groups may change.

    A parameter of several optimizers belongs to the first of them. A frozen parameter without an optimizer belongs to the
    first of all optimizers.
    """

    def __init__(self, parameters: Sequence[NamedParameter], framework: OptimizerIndex) -> None:
        self._parameters = parameters
        self._framework = framework
        self._ids: dict[int, Collection[int] | None] = {}
        self._held: dict[int, ParameterSubset] = {}
        self._free: list[NamedParameter] = []

    def by(self, optimizer: Any, optimizers: Sequence[Any]) -> ParameterSubset:
        """The parameters that ``optimizer`` steps, one of ``optimizers``; None for all recorded ones."""
        ids = self._framework.held(optimizer)
        if id(optimizer) not in self._ids or self._ids[id(optimizer)] is not ids:
            self._divide(optimizers)
        return self._held[id(optimizer)]

    def first(self, optimizer: Any, optimizers: Sequence[Any]) -> str:
        """The name of the first parameter that ``optimizer`` steps."""
        among = self.by(optimizer, optimizers)
        return next((one.name for one in self._parameters if among is None or one in among), "")

    def unstepped(self, optimizers: Sequence[Any]) -> Sequence[NamedParameter]:
        """The trained parameters that no optimizer steps."""
        self._divide(optimizers)
        return self._free

    def _divide(self, optimizers: Sequence[Any]) -> None:
        self._ids = {id(one): self._framework.held(one) for one in optimizers}
        self._held, self._free = dict.fromkeys(self._ids), []
        if not optimizers or any(ids is None for ids in self._ids.values()):
            return
        owner = {one: of for of, ids in reversed(self._ids.items()) for one in ids or ()}
        held: dict[int, dict[NamedParameter, None]] = {of: {} for of in self._ids}
        for parameter in self._parameters:
            of = owner.get(id(parameter.tensor))
            if of is None and parameter.tensor.requires_grad:
                self._free.append(parameter)
            else:
                held[id(optimizers[0]) if of is None else of][parameter] = None
        self._held = {of: None if len(among) == len(self._parameters) else among for of, among in held.items()}


def unstepped_warning(parameters: Sequence[NamedParameter], watched: int) -> str:
    """The warning that no known optimizer steps ``parameters``, out of ``watched`` recorded ones."""
    named = ", ".join(one.name for one in parameters[:NAMED])
    rest = f" and {len(parameters) - NAMED} more" if len(parameters) > NAMED else ""
    return (
        f"{len(parameters)} of {watched} parameters belong to no optimizer that was passed to set_monitor ({named}{rest}). "
        "They have no rows of reduced gradients, weights, moments and updates. Pass every optimizer of the model: "
        "set_monitor(model, grad_acc_steps, [first, second])."
    )
