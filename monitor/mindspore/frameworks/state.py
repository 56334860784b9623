"""Where MindSpore's optimizers keep what they know of a parameter.

Each kind of state is an attribute, a tuple in the order of ``optimizer.parameters``. The names of the parameters in it tell
nothing: prefixes differ, and a user's parameter may be called ``moment1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindspore import Parameter, Tensor, nn

from monitor.mindspore.frameworks.optimizers import innermost, is_a
from monitor.stats.mindspore_tensors import has_data, on_host

STATE_NAMES: Final = {
    "exp_avg": ("exp_avg", "moment1", "moments1"),
    "exp_avg_sq": ("exp_avg_sq", "moment2", "moments2"),
    "max_exp_avg_sq": ("max_exp_avg_sq", "vhat"),
}
"""What optimizers call the state behind each kind."""

MOMENTUM_NAMES: Final = {
    "Momentum": "moments",
    "ThorAscend": "moments",
    "ThorGpu": "moments",
    "SGD": "accum",
    "RMSProp": "moment",
    "RMSprop": "moment",
}
"""What classes that step along a momentum call it: it counts as ``exp_avg``. Elsewhere these are names of other things."""


class State:
    """The state of one optimizer.

    Attributes:
        optimizer: The innermost, which has it.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        """Take an optimizer before training begins: this may wait."""
        self.optimizer = innermost(optimizer)
        self._momentum = _number(getattr(self.optimizer, "momentum", None))
        self._names = next((name for known, name in MOMENTUM_NAMES.items() if is_a(self.optimizer, known)), None)
        self._known: Any = None
        self._places: dict[int, int] = {}

    def moment(self, kind: str, parameter: Parameter) -> Parameter | None:
        """The moment of a parameter; None where there is none, or it is not used and stays what it was made of."""
        place = self.place(parameter)
        if place is None or not self._steps_here(place) or not self._uses(kind, self.group(place)):
            return None
        names = (self._names,) if kind == "exp_avg" and self._names is not None else STATE_NAMES[kind]
        for name in names:
            kept = getattr(self.optimizer, name, None)
            # Where a moment is not used, or is kept in factors, something small stands in its place.
            if isinstance(kept, tuple) and place < len(kept) and kept[place].shape == parameter.shape:
                found: Parameter = kept[place]
                return found
        return None

    def has_stepped(self) -> bool:
        """Whether a moment is other than what every optimizer begins with, which is 0. Waits."""
        names = {self._names or "", *(name for names in STATE_NAMES.values() for name in names)}
        kept = (getattr(self.optimizer, name, None) for name in names)
        return any(on_host(one).any() for every in kept if isinstance(every, tuple) for one in every if has_data(one))

    @property
    def places(self) -> Mapping[int, int]:
        """Where each parameter is among those of the optimizer, by its id: the same object until the optimizer has others."""
        if self.optimizer.parameters is not self._known:
            self._known = self.optimizer.parameters
            self._places = {id(one): place for place, one in enumerate(self._known)}
        return self._places

    def place(self, parameter: Parameter) -> int | None:
        """Where a parameter is among those of the optimizer; None if it is not stepped."""
        return self.places.get(id(parameter))

    def group(self, place: int) -> Mapping[str, Any]:
        """The hyperparameters of the parameter in a place; empty where the optimizer has the same for all of them."""
        groups = getattr(self.optimizer, "param_groups", ())
        ends = getattr(self.optimizer, "group_start_id", (0,))[1:]
        found: Mapping[str, Any] = next((group for group, end in zip(groups, ends, strict=False) if place < end), {})
        return found

    def _steps_here(self, place: int) -> bool:
        """Ranks may share the work: then each steps some of the parameters."""
        here = getattr(self.optimizer, "optim_filter", None)
        return here is None or bool(here[place])

    def _uses(self, kind: str, group: Mapping[str, Any]) -> bool:
        if kind == "exp_avg_sq":
            return not is_a(self.optimizer, "AdaMax")  # whose second moment is another norm
        if kind == "max_exp_avg_sq":
            # Adam of mindspore.experimental makes it, and does not use it.
            return bool(group.get("amsgrad")) and is_a(self.optimizer, "AdamW") if group else hasattr(self.optimizer, "vhat")
        if self._names is not None:
            return bool(group.get("momentum", self._momentum) != 0)
        return getattr(self.optimizer, "use_first_moment", True) is not False


def _number(hyperparameter: Any) -> float | None:
    if isinstance(hyperparameter, Tensor):
        return float(hyperparameter.asnumpy())
    return None if hyperparameter is None else float(hyperparameter)
