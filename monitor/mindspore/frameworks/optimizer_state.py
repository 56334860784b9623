"""Finds the optimizers that a user passes, and the weights and moments that they keep of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import _no_grad
from mindspore.experimental import optim

from monitor.mindspore.features.reading import is_floating_point
from monitor.mindspore.modules import is_frozen
from monitor.recording import arguments
from monitor.recording.arguments import MAX_WRAPPERS
from monitor.stats.mindspore.tensors import has_data, on_host, on_the_host
from monitor.terminal import first_of

# --- Finds the optimizers that a user passes, and the moments that they keep of each parameter.

EXPECTED: Final = "an optimizer of mindspore.nn, mindspore.mint.optim or mindspore.experimental.optim"


def optimizers_in(given: Any) -> tuple[nn.Cell, ...]:
    """The optimizers that users call, found in sequences, dictionaries and containers, in order and without duplicates.

    Raises:
        TypeError: An object is no optimizer, or there is none at all.
    """

    def checked(one: Any, called: str) -> nn.Cell:
        innermost(one, called)
        cell: nn.Cell = one
        return cell

    return arguments.optimizers_in(given, checked, lambda one: one)


def innermost(optimizer: Any, called: str = "optimizer") -> nn.Cell:
    """The optimizer inside any number of wrappers, which keep the wrapped one in ``opt`` or ``optimizer``.

    Args:
        called: Its name in messages.

    Raises:
        TypeError: The object is no optimizer.
    """
    inner = optimizer
    for _ in range(MAX_WRAPPERS):
        wrapped = next((w for name in ("opt", "optimizer") if is_optimizer(w := getattr(inner, name, None))), None)
        if wrapped is None:
            break
        inner = wrapped
    if is_optimizer(inner):
        return inner
    given = type(optimizer).__name__
    raise TypeError(f"{called} is a {given}: expected {EXPECTED}.")


def is_optimizer(cell: Any) -> bool:
    """Whether it is an optimizer: a cell with a tuple ``parameters``, whatever its module. A model has none."""
    return isinstance(cell, nn.Cell) and isinstance(getattr(cell, "parameters", None), tuple)


def is_a(optimizer: nn.Cell, *names: str) -> bool:
    """Whether the optimizer's class, or one of its base classes, has one of these names."""
    return any(base.__name__ in names for base in type(optimizer).__mro__)


# --- State of optimizers of unknown classes: parameters that were cloned from those of the model.
#
# ``parameters.clone(prefix="moment1")`` clones ``a.weight`` as ``moment1.a.weight``. Optimizers keep the tuple of clones under
# any attribute. So state is found by the names of its members. The prefix and the attribute tell which moment it is. State is
# ignored if they are ambiguous.

ROLES: Final[Mapping[str, frozenset[str]]] = {
    "exp_avg": frozenset(
        {
            "adam_m", "exp_avg", "exp_avgs", "first_moment", "first_moments", "lamb_m", "moment1", "moments1", "momentum",
            "momentum_buffer", "momentum_buffers", "momentums", "velocity",
        }
    ),
    "exp_avg_sq": frozenset(
        {
            "adam_v", "exp_avg_sq", "exp_avg_sqs", "lamb_v", "moment2", "moments2", "second_moment", "second_moments",
        }
    ),
    "max_exp_avg_sq": frozenset({"max_exp_avg_sq", "max_exp_avg_sqs", "v_hat", "vhat"}),
}  # fmt: skip
"""Unambiguous attributes and prefixes, by kind."""

PAIR: Final = ("m", "v")
"""Names that are unambiguous if both exist: the first and the second moment."""

OF_MOMENTUM: Final = frozenset({"accum", "moment", "moments"})
"""Names of the momentum if the optimizer has one, and of squares otherwise."""

MOST_NAMES: Final = 3
"""Names that a sentence lists, at most."""


@dataclass(frozen=True, eq=False)
class Clones:
    """One tuple or list of cloned parameters.

    Attributes:
        attribute: The attribute of the optimizer that holds it.
        prefix: The prefix of its members' names.
        members: The clones by the name of their original parameter.
    """

    attribute: str
    prefix: str
    members: Mapping[str, Parameter]

    def of(self, parameter: Parameter) -> Parameter | None:
        """The clone of a parameter, if it can be a moment of it."""
        found = self.members.get(parameter.name)
        return found if found is not None and fits(found, parameter) else None


def fits(state: Parameter, parameter: Parameter) -> bool:
    """Whether the state has the shape of its parameter, and the same sort of numbers."""
    return bool(state.shape == parameter.shape) and is_floating_point(state) == is_floating_point(parameter)


def clones_in(optimizer: nn.Cell) -> list[Clones]:
    """All clones that an optimizer keeps, in order of creation."""
    names = {one.name for one in optimizer.parameters}
    found = (_clones(attribute, kept, names) for attribute, kept in vars(optimizer).items() if _are_parameters(kept))
    return [one for one in found if one is not None]


def roles_of(clones: Sequence[Clones], *, has_momentum: bool) -> dict[str, Clones]:
    """Map each moment to its clones. Clones that fit two moments, and moments with two candidates, are left out."""
    names = {name for one in clones for name in _names(one)}
    found: dict[str, list[Clones]] = {}
    for one in clones:
        roles = {role for name in _names(one) for role in _roles(name, names, has_momentum=has_momentum)}
        if len(roles) == 1:
            found.setdefault(roles.pop(), []).append(one)
    return {role: some[0] for role, some in found.items() if len(some) == 1}


def listing(clones: Sequence[Clones]) -> str:
    """The clones as a text for messages; empty if there are none."""
    return first_of([f"{one.attribute!r} (prefix {one.prefix!r})" for one in clones], MOST_NAMES)


def _are_parameters(kept: Any) -> bool:
    return isinstance(kept, (tuple, list)) and bool(kept) and all(isinstance(one, Parameter) for one in kept)


def _clones(attribute: str, kept: Sequence[Parameter], names: set[str]) -> Clones | None:
    """The clones in ``kept``; None unless all are cloned from parameters of these names, with one prefix."""
    split = [_split(one.name, names) for one in kept]
    prefixes = {prefix for prefix, _ in split}
    if len(prefixes) != 1 or "" in prefixes:
        return None
    return Clones(attribute, prefixes.pop(), {name: one for (_, name), one in zip(split, kept, strict=True)})


def _split(name: str, names: set[str]) -> tuple[str, str]:
    """The prefix of a clone and the name of its original parameter; an empty prefix if it is no clone."""
    for place in (at for at, character in enumerate(name) if character == "."):
        if name[place + 1 :] in names:
            return name[:place], name[place + 1 :]
    return "", name


def _names(clones: Clones) -> Iterator[str]:
    yield from (name.strip("_").lower() for name in (clones.attribute, clones.prefix))


def _roles(name: str, names: set[str], *, has_momentum: bool) -> Iterator[str]:
    yield from (role for role, known in ROLES.items() if name in known)
    if name in PAIR and names.issuperset(PAIR):
        yield ("exp_avg", "exp_avg_sq")[PAIR.index(name)]
    if name in OF_MOMENTUM and has_momentum:
        yield "exp_avg"


# --- The state that MindSpore's optimizers keep of a parameter.
#
# Each kind of state is a tuple attribute, in the order of ``optimizer.parameters``. In MindSpore's own classes the attribute
# tells its kind. The names of its members do not: prefixes differ, and a user's parameter may be called ``moment1``. In other
# classes, state is first searched by these names (``Clones``).

STATE_NAMES: Final = {
    "exp_avg": ("exp_avg", "moment1", "moments1"),
    "exp_avg_sq": ("exp_avg_sq", "moment2", "moments2"),
    "max_exp_avg_sq": ("max_exp_avg_sq", "vhat"),
}
"""The attributes that hold each kind of state."""

NAMES_OF_CLASSES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "Momentum": {"exp_avg": ("moments",)},
    "ThorAscend": {"exp_avg": ("moments",)},
    "ThorGpu": {"exp_avg": ("moments",)},
    "SGD": {"exp_avg": ("accum", "momentum_buf")},
    "RMSProp": {"exp_avg": ("moment",), "exp_avg_sq": ("ms",)},
    "RMSprop": {"exp_avg": ("moment",), "exp_avg_sq": ("mean_square",)},
    "Adadelta": {"exp_avg_sq": ("accum",)},
}
"""The attributes of the momentum, which counts as ``exp_avg``, and of the mean square, in classes that name them so. Other
classes use these names otherwise.
"""

INITIALLY_ONE: Final = "ms"
"""The state of a class above that does not begin as zeros. The class updates its ``moment`` in every step, too."""

ADAM_WS: Final = ("AdamW", "FusedAdamW")
"""Classes of ``mindspore.experimental`` and ``mindspore.mint`` that decay weights apart from the gradient."""


def classes_of(module: Any, *names: str) -> tuple[type, ...]:
    """The classes with these names that a module has in this version of MindSpore."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


MINT: Final = getattr(mint, "optim", None)

WITHOUT_AMSGRAD: Final = (*classes_of(optim, "Adam"), *classes_of(MINT, "Adam"))
"""Adams that accept ``amsgrad`` and step as without it."""

UNUSED: Final = "missing: {name} creates this moment for amsgrad, and does not update it"
UNKNOWN: Final = "missing: it is unclear which moment the optimizer keeps in {kept}"
UNLIKE: Final = (
    "missing where the optimizer's state does not have the parameter's shape, or holds no floating-point numbers: {kept}"
)


class OptimizerState:
    """The state of one optimizer.

    Attributes:
        optimizer: The innermost optimizer, which holds the state.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        """Inspect an optimizer before training begins: this may wait."""
        self.optimizer = innermost(optimizer)
        self._momentum = _number(getattr(self.optimizer, "momentum", None))
        found = (names for known, names in NAMES_OF_CLASSES.items() if is_a(self.optimizer, known))
        self._names: Mapping[str, tuple[str, ...]] = next(found, {})
        self._is_mindspore_class = _is_mindspore_class(self.optimizer)
        self._clones: Sequence[Clones] = ()
        self._roles: Mapping[str, Clones] = {}
        self._known: Any = None
        self.refresh()
        self._places: dict[int, int] = {}

    def moment(self, kind: str, parameter: Parameter) -> Parameter | None:
        """The moment of a parameter; None if there is none, or if it is unused and keeps its initial value."""
        place = self.place(parameter)
        if place is None or not self._steps_here(place) or not self._uses(kind, self.group(place)):
            return None
        if kind in self._roles:
            return self._roles[kind].of(parameter)
        for kept, at in self._kept(kind, place):
            # An unused or factored moment has a small placeholder here.
            if isinstance(kept, tuple) and self._is_place_in(kept, at) and fits(kept[at], parameter):
                found: Parameter = kept[at]
                return found
        return None

    def _kept(self, kind: str, place: int) -> Iterator[tuple[Any, int]]:
        """What may hold the moment of the parameter at an index, and the index in it."""
        names = self._names.get(kind, STATE_NAMES[kind])
        cloned = {one.attribute for one in self._clones}  # these are known to be other state
        yield from ((getattr(self.optimizer, name, None), place) for name in names if name not in cloned)
        if self._is_mindspore_class and (in_group := self.group(place).get(kind)) is not None:
            yield in_group, place - max(start for start in self.optimizer.group_start_id if start <= place)

    def tensors(self) -> Sequence[Parameter]:
        """The weights that the optimizer steps, and their moments."""
        weights = tuple(self.optimizer.parameters)
        found = (self.moment(kind, one) for kind in STATE_NAMES for one in weights)
        return (*weights, *(one for one in found if one is not None))

    def refresh(self) -> None:
        """Find the current state again. MindSpore's own classes create theirs once, in the constructor."""
        if not self._is_mindspore_class:
            self._clones = clones_in(self.optimizer)
            self._roles = roles_of(self._clones, has_momentum=self._momentum is not None)

    def notes(self) -> Mapping[str, str]:
        """By kind: why moments are missing, or missing for some parameters."""
        groups = getattr(self.optimizer, "param_groups", ()) if isinstance(self.optimizer, WITHOUT_AMSGRAD) else ()
        if any(one.get("amsgrad") for one in groups):
            return {"max_exp_avg_sq": UNUSED.format(name=type(self.optimizer).__name__)}
        clones, parameters = self._clones, self.optimizer.parameters
        unlike = [one for one in self._roles.values() if any(one.of(p) is None for p in parameters if p.name in one.members)]
        if unlike:
            return {"exp_avg": UNLIKE.format(kept=listing(unlike))}
        has_any = any(self.moment(kind, p) is not None for kind in STATE_NAMES for p in parameters)
        return self._kept_in_parts() if has_any or not clones else {"exp_avg": UNKNOWN.format(kept=listing(clones))}

    def _kept_in_parts(self) -> Mapping[str, str]:
        """By kind: the state of MindSpore's own classes that has another shape, as AdaFactor's of a matrix."""
        places = list(enumerate(self.optimizer.parameters)) if self._is_mindspore_class else []
        return {
            kind: UNLIKE.format(kept=repr(name))
            for kind, names in STATE_NAMES.items()
            for name in names
            if isinstance(kept := getattr(self.optimizer, name, None), tuple)
            and any(self._uses(kind, self.group(at)) and not fits(kept[at], one) for at, one in places[: len(kept)])
        }

    def has_stepped(self) -> bool:
        """Whether a moment differs from 0, the initial value in every optimizer but ``INITIALLY_ONE``. Waits."""
        every_name = (*self._names.values(), *STATE_NAMES.values())
        names = {name for names in every_name for name in names} - {INITIALLY_ONE}
        kept = (getattr(self.optimizer, name, None) for name in names)
        known = [every for every in kept if isinstance(every, tuple)]
        known += [tuple(one.members.values()) for one in self._roles.values()]
        return any(on_host(one).any() for every in known for one in every if has_data(one))

    @property
    def places(self) -> Mapping[int, int]:
        """The index of each parameter in the optimizer, by its id. The object is the same until the parameters change."""
        if self.optimizer.parameters is not self._known:
            self._known = self.optimizer.parameters
            self._places = {id(one): place for place, one in enumerate(self._known)}
        return self._places

    def place(self, parameter: Parameter) -> int | None:
        """The index of a parameter in the optimizer; None if it is not stepped."""
        return self.places.get(id(parameter))

    def group(self, place: int) -> Mapping[str, Any]:
        """The hyperparameters of the parameter at an index; empty if the optimizer has no groups."""
        groups = getattr(self.optimizer, "param_groups", ())
        ends = getattr(self.optimizer, "group_start_id", (0,))[1:]
        found: Mapping[str, Any] = next((group for group, end in zip(groups, ends, strict=False) if place < end), {})
        return found

    def learning_rates(self) -> Sequence[Any]:
        """The learning rate of each group for the next step: a schedule's at the number of steps so far."""
        if groups := getattr(self.optimizer, "param_groups", None):
            return [rate_of(group) for group in groups]
        kept: Any = getattr(self.optimizer, "learning_rate", None)
        each = kept if getattr(self.optimizer, "is_group_lr", False) else (kept,)
        groups_of = {id(one): one for one in each}.values()  # grouped parameters have one entry each, the same in a group
        return [next_rate(self.optimizer, one) for one in groups_of]

    def _is_place_in(self, kept: Sequence[Parameter], place: int) -> bool:
        """Whether a tuple has one member for each parameter. In other classes it may cover only some of them."""
        return place < len(kept) and (self._is_mindspore_class or len(kept) == len(self.optimizer.parameters))

    def _steps_here(self, place: int) -> bool:
        """Whether this rank steps the parameter: ranks may share the work."""
        here = getattr(self.optimizer, "optim_filter", None)
        return here is None or bool(here[place])

    def _uses(self, kind: str, group: Mapping[str, Any]) -> bool:
        if kind == "exp_avg_sq":
            return not is_a(self.optimizer, "AdaMax")  # its second moment is another norm
        if kind == "max_exp_avg_sq":
            if kind in self._roles:
                return True
            # The Adams of mindspore.experimental and mindspore.mint create it and do not update it.
            return bool(group.get("amsgrad")) and is_a(self.optimizer, *ADAM_WS) if group else hasattr(self.optimizer, "vhat")
        if "exp_avg" in self._names:
            return bool(group.get("momentum", self._momentum) != 0)
        return getattr(self.optimizer, "use_first_moment", True) is not False


def rate_of(group: Mapping[str, Any]) -> Any:
    """The learning rate that a group of parameters is stepped with. ``mint.optim.SGD`` ignores later changes of ``lr``."""
    return group.get("lr_float", group.get("lr"))


def next_rate(optimizer: Any, kept: Any) -> Any:
    """The learning rate for the next step.

    Args:
        kept: What the optimizer keeps: a rate, or a schedule, which computes it from the number of steps so far. ``AdaFactor``
            with ``relative_step`` keeps 0, and computes a rate that it does not keep.
    """
    with _no_grad():
        if getattr(optimizer, "relative_step", False):
            step = optimizer.step.reshape(()) + 1.0
            return ops.minimum(step * 1e-6 if optimizer.warmup_init else 1e-2, 1.0 / ops.sqrt(step))
        return kept(optimizer.global_step).reshape(()) if isinstance(kept, nn.Cell) else kept


def _is_mindspore_class(optimizer: nn.Cell) -> bool:
    """Whether the class is, or inherits from, a MindSpore optimizer with its own update rule."""
    return any(
        base.__module__.startswith("mindspore.") and base.__name__ not in ("Optimizer", "Cell") and issubclass(base, nn.Cell)
        for base in type(optimizer).__mro__
    )


def _number(hyperparameter: Any) -> float | None:
    if isinstance(hyperparameter, Tensor):
        return float(hyperparameter.asnumpy())
    return None if hyperparameter is None else float(hyperparameter)


def is_filled_in(gradient: Any, parameter: Parameter) -> bool:
    """Whether MindSpore made zeros in place of the gradient of a frozen parameter. On a device this check would wait."""
    return is_frozen(parameter) and isinstance(gradient, Tensor) and on_the_host() and not on_host(gradient).any()
