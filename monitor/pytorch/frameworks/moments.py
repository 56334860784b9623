"""Which tensor of an optimizer's state is which moment of which parameter.

A moment has the shape of what is stepped, and numbers of its own: state of another shape (factored, stacked, flattened over
several parameters) or of integers (quantized) is no moment of one parameter, and has no row. What its name does not tell
apart has none either: nothing else says whether a tensor is a first or a second moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from monitor.pytorch.frameworks.nanochat import Place, places_in_stacks, slice_of

NAMES: Final = {
    "exp_avg": ("exp_avg", "momentum_buffer", "momentum", "first_moment", "moment1"),
    "exp_avg_sq": ("exp_avg_sq", "square_avg", "second_moment", "moment2"),
    "max_exp_avg_sq": ("max_exp_avg_sq",),
}
"""What optimizers call the state behind each kind. ``square_avg`` is that of RMSprop."""

KNOWN: Final = frozenset(name for names in NAMES.values() for name in names)
MEANING: Final = {"exp_avg": "a first moment", "exp_avg_sq": "a second moment"}

MOST_SENTENCES: Final = 16
"""Of state that is no moment: the manifest is read by people."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a torch optimizer steps in the place of a parameter, if not the parameter itself.

    Attributes:
        key: The tensor that it knows.
        group: Its hyperparameters, where the optimizer does not list it in a group of its own between steps.
    """

    optimizer: Optimizer
    key: Tensor
    group: Mapping[str, Any] | None = None


class Moments:
    """Finds moments, and remembers what was none.

    Attributes:
        unusable: In sentences, what the state of optimizers holds that is no moment of one parameter.
    """

    def __init__(self) -> None:
        self.unusable: list[str] = []
        self._places: dict[int, dict[int, Place]] = {}

    def of(self, kind: str, stepped: Stepped) -> Tensor | None:
        """The moment that an optimizer keeps of what it steps; None where it has none, or has made no step with it."""
        # `state` is a defaultdict: asking for a parameter that has none yet would make one, and change training.
        state = stepped.optimizer.state.get(stepped.key) or {}
        name = next((name for name in NAMES[kind] if isinstance(state.get(name), Tensor)), None)
        if name is None:
            return self._without_name(kind, state, stepped)
        found: Tensor = state[name]
        if found.shape == stepped.key.shape and (found.is_floating_point() or found.is_complex()):
            return found if _has_stepped(state) else None
        stacked = self._part(kind, name, found, stepped)
        if stacked is None:
            self._reject(kind, name, found, stepped)
        return stacked

    def _without_name(self, kind: str, state: Mapping[str, Any], stepped: Stepped) -> Tensor | None:
        stacked = self._stacked(kind, stepped)
        if stacked is None and kind != "max_exp_avg_sq":
            unknown = [name for name, x in state.items() if isinstance(x, Tensor) and x.dim() and name not in KNOWN]
            if unknown:
                keeps = f"{type(stepped.optimizer).__name__} keeps {', '.join(map(repr, unknown))}"
                self._say(f"{keeps}, which is not known to be {MEANING[kind]}: {kind} has no rows of it")
        return stacked

    def _stacked(self, kind: str, stepped: Stepped) -> Tensor | None:
        """The part of a stack: nanochat's optimizers keep the momenta of a group under its first parameter."""
        place = self._place(stepped) if kind == "exp_avg" else None
        if place is None:
            return None
        stack = (stepped.optimizer.state.get(place.parameters[0]) or {}).get("momentum_buffer")
        if not isinstance(stack, Tensor) or stack.shape != (place.among, *stepped.key.shape):
            return None
        return stack[place.index] if 0 <= place.index < place.among else None

    def _part(self, kind: str, name: str, found: Tensor, stepped: Stepped) -> Tensor | None:
        """What can be taken apart of state that has not the parameter's shape."""
        if name == "momentum_buffer" and (stacked := self._stacked(kind, stepped)) is not None:
            return stacked
        part = slice_of(stepped.optimizer, stepped.key)
        return found if part is not None and tuple(found.shape) == part.shape else None

    def _place(self, stepped: Stepped) -> Place | None:
        optimizer = stepped.optimizer
        places = self._places.get(id(optimizer))
        found = None if places is None else places.get(id(stepped.key))
        if places is None or (found is not None and not found.holds(stepped.key)):
            places = self._places[id(optimizer)] = dict(places_in_stacks(optimizer))
            found = places.get(id(stepped.key))
        return found

    def _reject(self, kind: str, name: str, found: Tensor, stepped: Stepped) -> None:
        optimizer = type(stepped.optimizer).__name__
        self._say(
            f"state[{name!r}] of {optimizer} is {_described(found)} where the parameter is {_described(stepped.key)}: it is no "
            f"moment of one parameter, and {kind} has no row of it"
        )

    def _say(self, sentence: str) -> None:
        if sentence not in self.unusable and len(self.unusable) < MOST_SENTENCES:
            self.unusable.append(sentence)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether state is that of a step: some optimizers make it before the first, full of zeros that are no moments. A count on
    an accelerator is not waited for.
    """
    step = state.get("step")
    return step is None or (isinstance(step, Tensor) and not step.is_cpu) or float(step) != 0


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
