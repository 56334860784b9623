"""Attaches monitors in a program that knows nothing of them, after the first step of each optimizer."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from monitor.attaching import has_main_grad, named
from monitor.failures import LOGGER

MOST_GUESSED: Final = 64
"""Micro-batches of a step. More backwards than that belong to something else than a step."""

MOST_NAMED: Final = 3
"""Models that a warning names."""


class Training(NamedTuple):
    """An optimizer, or what steps it, with the parameters that it trains.

    Attributes:
        optimizer: What is passed to ``watch``: an optimizer of the framework, or what steps it and keeps the parameters.
        parameters: The ids of the parameters of the model that it steps.
        inside: Optimizers that step within it, and are not followed by themselves.
        wrapped: The optimizer that it wraps, as Lookahead does; None if it wraps none.
    """

    optimizer: Any
    parameters: set[int]
    inside: Sequence[Any] = ()
    wrapped: Any = None


class Owner(NamedTuple):
    """A model that an optimizer trains.

    Attributes:
        of: How many of the optimizer's parameters it has.
        others: How many further parameters it has.
    """

    model: Any
    of: int
    others: int


class _Attached(NamedTuple):
    monitor: Any
    model: weakref.ref[Any]
    optimizers: list[weakref.ref[Any]]


class SelfAttaching:
    """Attaches a monitor to the model of each optimizer, when the optimizer has stepped for the first time.

    The first step has no rows, because the model was called before anything was known of it. Its backwards are a guess of how
    many micro-batches a step has. The second step shows the number, and has rows if the guess was right.

    Args:
        config: A preset, or the path of a configuration.
        room: The package that monitors the framework, imported with the first step.
        kind: The class of the framework's models.
        training: Finds what trains with an optimizer, among all objects of the process. None: another call will tell of it.

    Attributes:
        backwards: How many there were since an optimizer has stepped, or a step was skipped. Counted by those who call
            ``stepped``.
        in_backward: Whether one is in progress, for those who count.
        stop: Tells of no more steps.
    """

    def __init__(
        self,
        config: str,
        room: str,
        kind: Callable[[], type],
        training: Callable[[Any, Sequence[Any]], Training | None],
    ) -> None:
        self._config, self._room, self._kind, self._training = config, room, kind, training
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # some cannot be hashed
        self._attached: list[_Attached] = []
        self.backwards, self.in_backward, self._guess = 0, False, 1
        self.stop: Callable[[], None] = _nothing

    def scaled(self, _scaler: Any) -> None:
        """A loss scale was updated, after a step or instead of one."""
        self.backwards = 0

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped. Does not raise."""
        if self.backwards:
            self._guess, self.backwards = self.backwards if self.backwards <= MOST_GUESSED else 1, 0
        if id(optimizer) in self._known:
            return
        try:
            self._known[id(optimizer)] = optimizer
            self._attach(optimizer)
        except Exception as error:
            said = "trainermon run: %s is not monitored, nor are optimizers that step for the first time later: %r"
            LOGGER.warning(said, type(optimizer).__name__, error)
            self.stop()

    def _attach(self, optimizer: Any) -> None:
        made_by = import_module(self._room).TrainerMon
        objects = gc.get_objects()
        training = self._training(optimizer, objects)
        if training is None:
            return
        self._known.update({id(one): one for one in training.inside})
        optimizer = training.optimizer
        if any(
            issubclass(type(one), made_by) and one.watches(inner) for one in objects for inner in (optimizer, *training.inside)
        ):
            LOGGER.info("trainermon run: the program monitors %s itself.", type(optimizer).__name__)
            return
        model = owner_of(training, self._kind(), objects)
        if model is None:
            return
        beside = next((one for one in self._attached if one.model() is model), None)
        if beside is not None and beside.monitor.step > 1:
            if any(one() is training.wrapped for one in beside.optimizers if training.wrapped is not None):
                return  # torch calls hooks of a wrapper like timm's Lookahead from its first zero_grad() on
            said = "trainermon run: %s begins to step %s later than others. From here on, this model is not monitored."
            LOGGER.warning(said, type(optimizer).__name__, type(model).__name__)
            beside.monitor.close()
            return
        if beside is None:
            monitor = made_by(named(self._config), params_have_main_grad=has_main_grad(model))
            monitor.guessed = self._guess
            beside = _Attached(monitor, weakref.ref(model), [])
            self._attached.append(beside)
        beside.optimizers.append(weakref.ref(optimizer))
        watched = [one for known in beside.optimizers if (one := known()) is not None]
        beside.monitor.watch(model, watched, start_iteration=1)
        by = " and ".join(type(one).__name__ for one in watched)
        LOGGER.info("trainermon run: attached to %s, trained by %s.", type(model).__name__, by)


def _nothing() -> None:
    """Until the framework is imported, there is nothing to stop."""


def owner_of(training: Training, kind: type, objects: Iterable[Any]) -> Any:
    """The outermost model of a kind with the parameters that are trained; None, with a warning, if it is not clear.

    Asks no object for its class: a proxy would answer for another one.
    """
    optimizer, held = training.optimizer, training.parameters
    trains = tuple(base for base in type(optimizer).__mro__ if base.__name__ == "Optimizer")
    found = [one for one in objects if issubclass(type(one), kind)]
    # MindSpore's optimizers are cells, and so is what calls one.
    models = [one for one in found if not any(issubclass(type(part), trains) for part in (one, *parts_of(one)))]
    inner = {id(part) for model in models for part in parts_of(model)}
    owners: list[Owner] = []
    for model in models:
        if id(model) not in inner:
            own = parameters_of(model)
            if of := len(own & held):
                owners.append(Owner(model, of, len(own) - of))
    owners.sort(key=lambda one: (-one.of, one.others))
    if owners and owners[0][1:] not in [one[1:] for one in owners[1:]]:
        return owners[0].model
    unknown = "no model was found that has its parameters"
    unknown += ", and objects that gc.freeze has set aside cannot be searched" if gc.get_freeze_count() else ""
    why = f"it may belong to {_named(owners)}" if owners else unknown
    said = "trainermon run: %s is not monitored, because %s. Attach by monitor.watch(model, optimizer) in its code."
    LOGGER.warning(said, type(optimizer).__name__, why)
    return None


def trained_by(optimizer: Any, _objects: Sequence[Any] = ()) -> Training:
    """An optimizer of PyTorch or MindSpore that steps the parameters of a model themselves."""
    groups = getattr(optimizer, "param_groups", None)
    held = optimizer.parameters if groups is None else (p for group in groups for p in group["params"])
    return Training(optimizer, {id(one) for one in held})


def parts_of(model: Any) -> Collection[Any]:
    """The direct parts of a module or cell."""
    found: dict[str, Any] = vars(model).get("_modules") or vars(model).get("_cells") or {}
    return found.values()


def parameters_of(model: Any) -> set[int]:
    """The ids of the parameters of a module or cell; none while it is being made."""
    try:
        return {id(one) for one in (model.get_parameters() if hasattr(model, "get_parameters") else model.parameters())}
    except AttributeError:
        return set()


def _named(owners: Sequence[Owner]) -> str:
    return " or ".join(type(one.model).__name__ for one in owners[:MOST_NAMED])


# --- Finds what trains with an optimizer of torch: the optimizer itself, DeepSpeed's engine, or an optimizer of Megatron. What
# reads frameworks is imported with the first step.


def training_of(optimizer: Any, objects: Sequence[Any]) -> Training | None:
    """The training of an optimizer or an engine that has stepped.

    Returns:
        None for the optimizer of an engine or of a container of optimizers, whose step is not over yet.
    """
    from monitor.recording.arguments import held_by

    others = _of_class(sys.modules["torch.optim"].Optimizer, objects)
    containers = [one for one in others if getattr(type(one).step, "hooked", False)]
    if any(optimizer is one for container in containers for one in held_by(container) or ()):
        return None
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    if engine is not None:
        if isinstance(optimizer, engine):
            return Training(optimizer, parameters_of(optimizer), _inside(optimizer))
        if any(optimizer is one for other in _of_class(engine, objects) for one in _inside(other)):
            return None
    megatron = getattr(sys.modules.get("megatron.core.optimizer"), "MegatronOptimizer", None)
    if megatron is not None:
        return _of_megatron(optimizer, _of_class(megatron, objects))
    inner = _unwrapped(optimizer)
    return trained_by(optimizer)._replace(wrapped=None if inner is optimizer else inner)


def _unwrapped(optimizer: Any) -> Any:
    from monitor.pytorch.optimizer_steps import unwrapped

    return unwrapped(optimizer)


def _inside(engine: Any) -> list[Any]:
    found = (_unwrapped(vars(engine).get("optimizer")), vars(engine).get("basic_optimizer"))
    return [one for one in found if one is not None]


def _of_class(kind: type, objects: Iterable[Any]) -> list[Any]:
    return [one for one in objects if issubclass(type(one), kind)]


def _of_megatron(optimizer: Any, wrappers: Iterable[Any]) -> Training:
    """The outermost optimizer of Megatron around another one, if there is one."""
    from monitor.pytorch.frameworks.megatron import MasterWeights, torch_optimizers

    around = [(torch_optimizers(one), one) for one in wrappers]
    around = [(inside, one) for inside, one in around if any(optimizer is stepped for stepped in inside)]
    if not around:
        return trained_by(optimizer)
    inside, outermost = max(around, key=lambda found: len(found[0]))
    return Training(outermost, MasterWeights(outermost).parameters, inside)
