"""How nanochat's optimizers lay out their state: what one tensor holds of several parameters, and one rank of one parameter.

``MuonAdamW`` steps groups of matrices of one shape together, and keeps their momenta in one stack under the first of them.
``DistMuonAdamW`` deals the matrices of a group out to the ranks, a run of them each, and large parameters of its other groups
in equal slices of rows. It reduces gradients inside its step. Both are known by their names: nanochat is no package to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from monitor.series import Placement, Shard, ranks_of

DEALING: Final = "DistMuonAdamW"
"""The class that deals its work out to all ranks of the job."""

WHOLE_BELOW: Final = 1024
"""Elements of a parameter from which on ``DistMuonAdamW`` cuts it into slices."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is in a stack.

    Attributes:
        parameters: Of its group. The stack is kept under the first.
        place: Of the parameter in the group.
        size: How many the group had.
        index: Of the parameter in this rank's stack: below 0 or from ``among`` on where another rank has it.
        among: Entries of this rank's stack.
    """

    parameters: Sequence[Tensor]
    place: int
    size: int
    index: int
    among: int

    def holds(self, parameter: Tensor) -> bool:
        """Whether the group is still as it was when this was made."""
        return len(self.parameters) == self.size and self.parameters[self.place] is parameter


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of a parameter that one rank steps.

    Attributes:
        shape: Of the slice.
        first: Its first row.
    """

    shape: tuple[int, ...]
    first: int


def places_in_stacks(optimizer: Optimizer) -> Iterator[tuple[int, Place]]:
    """Where each parameter would be, by its id, were the momenta of its group stacked."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        if any(one.shape != parameters[0].shape for one in parameters):
            continue
        among, first = len(parameters), 0
        if _deals(optimizer):
            among = -(-len(parameters) // dist.get_world_size())
            first = dist.get_rank() * among
        for place, one in enumerate(parameters):
            yield id(one), Place(parameters, place, len(parameters), place - first, among)


def slice_of(optimizer: Optimizer, parameter: Tensor) -> Slice | None:
    """What this rank steps of a parameter that is cut into slices; None of any other."""
    if not _deals(optimizer) or parameter.dim() == 0 or parameter.numel() < WHOLE_BELOW:
        return None
    rows = parameter.shape[0] // dist.get_world_size()
    return Slice((rows, *parameter.shape[1:]), rows * dist.get_rank())


def placement_of_moments(optimizers: Sequence[Optimizer], parameter: Tensor) -> Placement | None:
    """Where the moments of a parameter are; None where no optimizer deals them out."""
    group = next((group for one in optimizers if _deals(one) for group in one.param_groups if _lists(group, parameter)), None)
    if group is None:
        return None
    ranks = ranks_of(range(dist.get_world_size()))
    if group.get("kind") == "muon":
        return Placement(differing=ranks)
    cut = next((found for one in optimizers if (found := slice_of(one, parameter)) is not None), None)
    if cut is None:
        return Placement(unclaimed=ranks)
    offset = cut.first, *(0 for _ in cut.shape[1:])
    return Placement(shard=Shard(ranks, tuple(parameter.shape), offset))


def _deals(optimizer: Optimizer) -> bool:
    is_one = any(base.__name__ == DEALING for base in type(optimizer).__mro__)
    return is_one and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _lists(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(one is parameter for one in group["params"])


# --- Which tensor of an optimizer's state is which moment of which parameter.
#
# A moment has the shape of what is stepped, and numbers of its own: state of another shape (factored, stacked,
# flattened over several parameters) or of integers (quantized) is no moment of one parameter, and has no row. What its
# name does not tell apart has none either: nothing else says whether a tensor is a first or a second moment.

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
