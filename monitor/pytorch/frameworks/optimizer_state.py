"""Finds the moments of a parameter in the state of torch's optimizers, and which rank holds them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from monitor.pytorch.frameworks.dtensor import layout_of, part_like
from monitor.series import DIRECTION_KIND, HEALTH_KIND, MOMENT_KINDS, Placement, Shard, ranks_of

# --- Stacked and sliced state of nanochat's optimizers, and state that torch deals out to ranks.
#
# nanochat's ``MuonAdamW`` steps groups of matrices of one shape together, and keeps their momenta in one stack under
# the first matrix. ``DistMuonAdamW`` distributes the matrices of a group over the ranks, in runs. It splits large
# parameters of its other groups into equal slices of rows. It reduces gradients inside its step. Both are recognised by
# class name: nanochat is no package to import.

SPLITTING: Final = "DistMuonAdamW"
"""The class that distributes its work over all ranks of the job."""

REDUNDANT: Final = "ZeroRedundancyOptimizer"
"""torch's class of which each rank steps some parameters, by an optimizer of its own (``.optim``)."""

FROM_MOMENTS: Final = (*MOMENT_KINDS, HEALTH_KIND, DIRECTION_KIND, "adam_update", "adam_ratio")
"""Kinds that need the state of an optimizer."""

WHOLE_BELOW: Final = 1024
"""``DistMuonAdamW`` slices parameters with at least this many elements."""


@dataclass(frozen=True, slots=True)
class StackPosition:
    """The position of a parameter in a stack.

    Attributes:
        parameters: Parameters of its group. The stack is kept under the first one.
        place: Index of the parameter in the group.
        size: Number of parameters in the group.
        index: Index of the parameter in this rank's stack; below 0 or at least ``among`` if another rank has it.
        among: Number of entries in this rank's stack.
    """

    parameters: Sequence[Tensor]
    place: int
    size: int
    index: int
    among: int

    def holds(self, parameter: Tensor) -> bool:
        """Whether the group is unchanged."""
        return len(self.parameters) == self.size and self.parameters[self.place] is parameter


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of a parameter that one rank steps.

    Attributes:
        shape: Shape of the slice.
        first: Its first row.
    """

    shape: tuple[int, ...]
    first: int


def stack_positions(optimizer: Optimizer) -> Iterator[tuple[int, StackPosition]]:
    """By id of a parameter: its position if the momenta of its group are stacked."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        if any(one.shape != parameters[0].shape for one in parameters):
            continue
        among, first = len(parameters), 0
        if _splits(optimizer):
            among = -(-len(parameters) // dist.get_world_size())
            first = dist.get_rank() * among
        for place, one in enumerate(parameters):
            yield id(one), StackPosition(parameters, place, len(parameters), place - first, among)


def slice_of(optimizer: Optimizer, parameter: Tensor) -> Slice | None:
    """The slice of a parameter that this rank steps; None if the parameter is not sliced."""
    if not _splits(optimizer) or parameter.dim() == 0 or parameter.numel() < WHOLE_BELOW:
        return None
    rows = parameter.shape[0] // dist.get_world_size()
    return Slice((rows, *parameter.shape[1:]), rows * dist.get_rank())


def placement_from_moments(kind: str, optimizers: Sequence[Optimizer], parameter: Tensor) -> Placement | None:
    """The placement of what comes from a parameter's moments; None for other kinds, and if no optimizer distributes these."""
    if kind not in FROM_MOMENTS:
        return None
    if (redundant := _redundant(optimizers, parameter)) is not None:
        return Placement(differing=ranks_of(dist.get_process_group_ranks(redundant.process_group)))
    if kind not in MOMENT_KINDS:
        return None
    group = next((group for one in optimizers if _splits(one) for group in one.param_groups if _lists(group, parameter)), None)
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


def _redundant(optimizers: Iterable[Any], parameter: Tensor) -> Any:
    """The ``ZeroRedundancyOptimizer`` that steps a parameter, if it has several ranks."""
    several = (one for one in optimizers if is_redundant(one) and one.world_size > 1)
    return next((one for one in several if parameter in one._param_to_rank), None)


def is_redundant(optimizer: Optimizer) -> bool:
    """Whether each rank steps some of the optimizer's parameters, by an optimizer of its own."""
    return _is_a(optimizer, REDUNDANT)


def _is_a(optimizer: Optimizer, name: str) -> bool:
    kind: Any = type(optimizer)
    return _is_of(kind, name)


@lru_cache(maxsize=64)  # asked for each parameter and optimizer, and a loop may have an optimizer for each parameter
def _is_of(kind: type, name: str) -> bool:
    return any(base.__name__ == name for base in kind.__mro__)


def _splits(optimizer: Optimizer) -> bool:
    return _is_a(optimizer, SPLITTING) and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _lists(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(one is parameter for one in group["params"])


# --- Moments in optimizer state. A moment has the shape of the stepped tensor and a floating-point dtype. State of another
# shape (factored, stacked, flattened over several parameters) or of integers (quantized) is no moment of one parameter, and has
# no row. Only its name tells whether a tensor is a first or a second moment, so state under unknown names has no row.

NAMES: Final = {
    "exp_avg": ("exp_avg", "momentum_buffer", "momentum", "first_moment", "moment1"),
    "exp_avg_sq": ("exp_avg_sq", "square_avg", "second_moment", "moment2"),
    "max_exp_avg_sq": ("max_exp_avg_sq",),
}
"""Names of the state of each kind. ``square_avg`` is RMSprop's."""

KNOWN: Final = frozenset(name for names in NAMES.values() for name in names)
MEANING: Final = {"exp_avg": "a first moment", "exp_avg_sq": "a second moment"}

MOST_SENTENCES: Final = 16
"""Most sentences about state that is no moment: people read the manifest."""


@dataclass(frozen=True, slots=True)
class SteppedTensor:
    """The tensor that a torch optimizer steps for a parameter, possibly the parameter itself.

    Attributes:
        key: The tensor in the optimizer.
        group: Its hyperparameters, if the optimizer's groups do not list it between steps.
        known: By kind, the moment that was found last. While it is the same tensor, it is not examined again.
    """

    optimizer: Optimizer
    key: Tensor
    group: Mapping[str, Any] | None = None
    known: dict[str, weakref.ref[Tensor]] = field(default_factory=dict, compare=False)


class MomentFinder:
    """Finds moments, and collects sentences about other state.

    Attributes:
        unusable: Sentences about optimizer state that is no moment of one parameter.
    """

    def __init__(self) -> None:
        self.unusable: list[str] = []
        self._positions: dict[int, dict[int, StackPosition]] = {}

    def of(self, kinds: Sequence[str], stepped: SteppedTensor) -> list[Tensor | None]:
        """Each moment of a stepped tensor; None if the optimizer has none, or has not stepped yet."""
        # `state` is a defaultdict: indexing it would create an entry and change training.
        state = stepped.optimizer.state.get(stepped.key) or {}
        found: list[Tensor | None] = []
        for kind in kinds:
            known, x = stepped.known.get(kind), state.get(NAMES[kind][0])
            if x is None and kind not in MEANING:  # it has no other name
                found.append(None)
            else:
                found.append(x if x is not None and known is not None and known() is x else self._find(kind, state, stepped))
        return found

    def _find(self, kind: str, state: Mapping[str, Any], stepped: SteppedTensor) -> Tensor | None:
        for name in NAMES[kind]:
            found = state.get(name)
            if isinstance(found, Tensor):
                break
        else:
            return self._without_name(kind, state, stepped)
        known = stepped.known.get(kind)
        if known is not None and known() is found:
            return found
        if found.shape == stepped.key.shape and (found.is_floating_point() or found.is_complex()):
            if not _has_stepped(state):
                return None
            if layout_of(found) != layout_of(stepped.key):
                return self._part_of_other_layout(kind, name, found, stepped)
            stepped.known[kind] = weakref.ref(found)
            return found
        stacked = self._part(kind, name, found, stepped)
        if stacked is None:
            self._reject(kind, name, found, stepped)
        return stacked

    def _without_name(self, kind: str, state: Mapping[str, Any], stepped: SteppedTensor) -> Tensor | None:
        stacked = self._stacked(kind, stepped)
        if stacked is None:
            others = {name: x for name, x in state.items() if name not in KNOWN or not isinstance(x, Tensor)}
            unknown = [name for name, x in others.items() if _holds_elements(x)]
            if unknown:
                keeps = f"{type(stepped.optimizer).__name__} keeps {', '.join(map(repr, unknown))}"
                self._say(f"{keeps}, which is not known to be {MEANING[kind]}: {kind} has no rows of it")
        return stacked

    def _stacked(self, kind: str, stepped: SteppedTensor) -> Tensor | None:
        """The entry of a stack: nanochat's optimizers keep the momenta of a group under its first parameter."""
        place = self._position(stepped) if kind == "exp_avg" else None
        if place is None:
            return None
        stack = (stepped.optimizer.state.get(place.parameters[0]) or {}).get("momentum_buffer")
        if not isinstance(stack, Tensor) or stack.shape != (place.among, *stepped.key.shape):
            return None
        return stack[place.index] if 0 <= place.index < place.among else None

    def _part(self, kind: str, name: str, found: Tensor, stepped: SteppedTensor) -> Tensor | None:
        """The parameter's part of state with another shape."""
        if name == "momentum_buffer" and (stacked := self._stacked(kind, stepped)) is not None:
            return stacked
        part = slice_of(stepped.optimizer, stepped.key)
        return found if part is not None and tuple(found.shape) == part.shape else None

    def _part_of_other_layout(self, kind: str, name: str, found: Tensor, stepped: SteppedTensor) -> Tensor | None:
        """This rank's part of a moment that is distributed like the gradient: SGD begins its momentum as a copy of it."""
        part = part_like(found, stepped.key)
        if part is None:
            spread = f"{type(stepped.optimizer).__name__} distributes state[{name!r}] over the ranks otherwise"
            self._say(f"{spread} than its parameter: {kind} has no row of it")
        return part

    def _position(self, stepped: SteppedTensor) -> StackPosition | None:
        optimizer = stepped.optimizer
        positions = self._positions.get(id(optimizer))
        found = None if positions is None else positions.get(id(stepped.key))
        if positions is None or (found is not None and not found.holds(stepped.key)):
            positions = self._positions[id(optimizer)] = dict(stack_positions(optimizer))
            found = positions.get(id(stepped.key))
        return found

    def _reject(self, kind: str, name: str, found: Tensor, stepped: SteppedTensor) -> None:
        optimizer = type(stepped.optimizer).__name__
        self._say(
            f"state[{name!r}] of {optimizer} is {_described(found)}, but the parameter is {_described(stepped.key)}: it is no "
            f"moment of one parameter, and {kind} has no row of it"
        )

    def _say(self, sentence: str) -> None:
        if sentence not in self.unusable and len(self.unusable) < MOST_SENTENCES:
            self.unusable.append(sentence)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether the optimizer has stepped with this state: some optimizers create it before the first step, full of zeros. Does
    not wait for a count on an accelerator.
    """
    step = state.get("step")
    return step is None or (isinstance(step, Tensor) and not step.is_cpu) or float(step) != 0


def _holds_elements(x: Any) -> bool:
    """Whether optimizer state is a tensor with dimensions, or contains one, as the dictionaries of heavyball and AggMo do."""
    if isinstance(x, Mapping | list | tuple):
        return any(map(_holds_elements, x.values() if isinstance(x, Mapping) else x))
    return isinstance(x, Tensor) and x.dim() > 0


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
