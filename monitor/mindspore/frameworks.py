"""Gradients, weights and moments of a MindSpore model, and the update rules of MindSpore's Adam optimizers.

The Adams differ from each other and from the paper. Let ``m`` and ``v`` be the moments after the step. Their bias corrections
are ``a = 1 - beta1 ** step`` and ``b = 1 - beta2 ** step``. Then a weight decreases by the learning rate times

    AdamW of mindspore.experimental; Adam, AdamW, FusedAdamW of mindspore.mint: (m / a) / (sqrt(v / b) + eps), as in the paper
    Adam, LazyAdam, AdamOffload; Adam of mindspore.experimental:                sqrt(b) / a * m / (sqrt(v) + eps)
    AdamWeightDecay:                                                            m / (sqrt(v) + eps)

The Adams of ``mindspore.mint`` are written for Ascend, and were tested here with other in-place operations. Their documentation
takes the maximum of AMSGrad over ``v / b``. The kernel of ``AdamW`` takes it over ``v``. ``Adam`` does not store it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import _no_grad
from mindspore.experimental import optim

from monitor.failures import Failures
from monitor.mindspore.compiled_replay import program_of
from monitor.mindspore.features import is_floating_point
from monitor.mindspore.optimizer_steps import MindSporeOptimizerSteps
from monitor.recording import arguments
from monitor.recording.arguments import MAX_WRAPPERS
from monitor.recording.backend import StepListener
from monitor.series import LOCAL, Placement
from monitor.stats.mindspore.tensors import has_data, on_host

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
    listed = [f"{one.attribute!r} (prefix {one.prefix!r})" for one in clones]
    return ", ".join(listed[:MOST_NAMES]) + (", …" if len(listed) > MOST_NAMES else "")


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

MOMENTUM_NAMES: Final = {
    "Momentum": ("moments",),
    "ThorAscend": ("moments",),
    "ThorGpu": ("moments",),
    "SGD": ("accum", "momentum_buf"),
    "RMSProp": ("moment",),
    "RMSprop": ("moment",),
}
"""The attributes of the momentum in classes that step along one: it counts as ``exp_avg``. Other classes use these names
otherwise.
"""

ADAM_WS: Final = ("AdamW", "FusedAdamW")
"""Classes of ``mindspore.experimental`` and ``mindspore.mint`` that decay weights apart from the gradient."""

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
        self._names = next((names for known, names in MOMENTUM_NAMES.items() if is_a(self.optimizer, known)), ())
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
        names = self._names if kind == "exp_avg" and self._names else STATE_NAMES[kind]
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
        return {} if has_any or not clones else {"exp_avg": UNKNOWN.format(kept=listing(clones))}

    def has_stepped(self) -> bool:
        """Whether a moment differs from 0, the initial value in every optimizer. Waits."""
        names = {*self._names, *(name for names in STATE_NAMES.values() for name in names)}
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
        with _no_grad():
            return [one(self.optimizer.global_step).reshape(()) if isinstance(one, nn.Cell) else one for one in groups_of]

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
        if self._names:
            return bool(group.get("momentum", self._momentum) != 0)
        return getattr(self.optimizer, "use_first_moment", True) is not False


def rate_of(group: Mapping[str, Any]) -> Any:
    """The learning rate that a group of parameters is stepped with. ``mint.optim.SGD`` ignores later changes of ``lr``."""
    return group.get("lr_float", group.get("lr"))


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


def classes_of(module: Any, *names: str) -> tuple[type, ...]:
    """The classes with these names that a module has in this version of MindSpore."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


MINT: Final = getattr(mint, "optim", None)

WITHOUT_AMSGRAD: Final = (*classes_of(optim, "Adam"), *classes_of(MINT, "Adam"))
"""Adams that accept ``amsgrad`` and step as without it."""

RULES: Final = (
    (classes_of(nn, "Adam", "LazyAdam", "AdamOffload"), AdamRule(_by_powers, eps_on_root=True)),
    (classes_of(nn, "AdamWeightDecay"), AdamRule(_none, eps_on_root=True)),
    (classes_of(optim, "Adam"), AdamRule(_by_steps, eps_on_root=True)),
    ((*classes_of(optim, "AdamW"), *classes_of(MINT, "Adam")), AdamRule(_by_steps, eps_on_root=False)),
    (classes_of(MINT, "AdamW", "FusedAdamW"), AdamRule(_by_earlier_steps, eps_on_root=False)),
)

# --- The gradients, weights and moments of parameters, and their placements.

UNMEASURED: Final = (
    "Parameters that no optimizer steps, such as running means, have no rows of param_origin and param_updated from compiled "
    "steps: later steps may have changed them when the monitor takes a step."
)

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
        measured: What compiled code has measured of its weights and moments, by the id of the parameter, while collectors are
            called for a step in compiled code; None otherwise.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        """Inspect an optimizer before training begins: this may wait."""
        self.optimizer = optimizer
        self.state = OptimizerState(optimizer)
        self.adams = Adams(self.state)
        self.has_stepped = self.state.has_stepped()
        self.gradients: Sequence[Any] = ()
        self.measured: Mapping[int, Any] | None = None

    def seen(self, x: Parameter | None) -> Any:
        """A weight or moment as it was at this point of the step."""
        return x if self.measured is None or x is None else self.measured.get(id(x))

    def tensors(self) -> Sequence[Parameter]:
        """The weights that the optimizer steps, and their moments."""
        return self.state.tensors()

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these gradients."""
        self.state.refresh()
        self.gradients = gradients

    def call_ended(self) -> None:
        """The optimizer was called: from now on, its moments are those of a step."""
        self.has_stepped = True

    def end_step(self) -> None:
        """Drop the gradients of the step."""
        self.gradients = ()
        self.measured = None

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
        self._failures: Failures | None = None
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
        """The weight that the optimizer steps; None if compiled code has stepped, and changes it outside of the optimizer."""
        found = self._of(parameter)
        if found is not None:
            return found.seen(parameter.tensor)
        if any(one.measured is not None for one in self.stepped.values()):
            self._warn_unmeasured()
            return None
        return parameter.tensor

    def _warn_unmeasured(self) -> None:
        if self._failures is not None:
            self._failures.warn("parameters outside of optimizers", UNMEASURED)

    def moment(self, kind: str, parameter: ParameterHolder, optimizer: Any = None) -> Tensor | None:
        """This rank's part of a moment; None before a fresh optimizer's first step: its zeros are no moment."""
        found = self._of(parameter) if optimizer is None else self.stepped[id(optimizer)]
        return found.seen(found.state.moment(kind, parameter.tensor)) if found is not None and found.has_stepped else None

    def state_of(self, parameter: ParameterHolder) -> tuple[OptimizerState, int] | None:
        """The state of the optimizer that steps a parameter, and the parameter's index in it; None if none steps it, or if
        compiled code has stepped: its hyperparameters may have changed since.
        """
        found = self._of(parameter)
        place = None if found is None else found.state.place(parameter.tensor)
        return None if found is None or place is None or found.measured is not None else (found.state, place)

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
        return None if found is None or found.measured is not None else found.adams.of(parameter.tensor)

    def learning_rates(self, optimizer: Any) -> Sequence[Any]:
        """The learning rate of each parameter group for the step that begins, as the optimizer computes it."""
        stepped = self.stepped[id(optimizer)]
        return stepped.state.learning_rates() if stepped.measured is None else ()

    def scales_itself(self, optimizer: Any) -> bool:
        """Whether the optimizer divides the gradients that it is given by a loss scale."""
        return getattr(self.stepped[id(optimizer)].state.optimizer, "loss_scale", 1.0) != 1.0

    def steps(self, listener: StepListener, failures: Failures) -> MindSporeOptimizerSteps:
        """Report every step to ``listener`` from now on."""
        self._failures = failures
        program = program_of(self.chunks[0])
        return MindSporeOptimizerSteps([(one.optimizer, one) for one in self.stepped.values()], listener, failures, program)

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
