"""Attaches monitors in a program that knows nothing of them, after the first step of each optimizer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from monitor.attaching import preset_fields
from monitor.failures import LOGGER

MOST_NAMED: Final = 3
"""Models that a warning names."""


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

    The first step has no rows, because the model was called before anything was known of it. The second one has none, either,
    because it shows how many micro-batches a step has.

    Args:
        config: A preset, or the path of a configuration.
        room: The package that monitors the framework, imported with the first step.
        kind: The class of the framework's models.

    Attributes:
        stop: Tells of no more steps.
    """

    def __init__(self, config: str, room: str, kind: Callable[[], type]) -> None:
        self._config, self._room, self._kind = config, room, kind
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._attached: list[_Attached] = []
        self.stop: Callable[[], None] = _nothing

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped. Does not raise."""
        if optimizer in self._known:
            return
        try:
            self._known.add(optimizer)
            self._attach(optimizer)
        except Exception as error:
            said = "trainermon run: %s is not monitored, nor are optimizers that step for the first time later: %r"
            LOGGER.warning(said, type(optimizer).__name__, error)
            self.stop()

    def _attach(self, optimizer: Any) -> None:
        made_by = import_module(self._room).TrainerMon
        objects = gc.get_objects()
        if any(type(one) is made_by and one.watches(optimizer) for one in objects):
            LOGGER.info("trainermon run: the program monitors %s itself.", type(optimizer).__name__)
            return
        model = owner_of(optimizer, self._kind(), objects)
        if model is None:
            return
        beside = next((one for one in self._attached if one.model() is model), None)
        if beside is not None and beside.monitor.step > 1:
            said = "trainermon run: %s begins to step %s later than others. Its turns are not followed."
            LOGGER.warning(said, type(optimizer).__name__, type(model).__name__)
            return
        if beside is None:
            monitor = made_by(configuration(self._config), params_have_main_grad=False)
            beside = _Attached(monitor, weakref.ref(model), [])
            self._attached.append(beside)
        beside.optimizers.append(weakref.ref(optimizer))
        watched = [one for known in beside.optimizers if (one := known()) is not None]
        beside.monitor.watch(model, watched, start_iteration=1)
        named = " and ".join(type(one).__name__ for one in watched)
        LOGGER.info("trainermon run: attached to %s, trained by %s.", type(model).__name__, named)


def _nothing() -> None:
    """Until the framework is imported, there is nothing to stop."""


def owner_of(optimizer: Any, kind: type, objects: Iterable[Any]) -> Any:
    """The outermost model of a kind with the parameters of an optimizer; None, with a warning, if it is not clear.

    Asks no object for its class: a proxy would answer for another one.
    """
    held = held_by(optimizer)
    trains = next(base for base in type(optimizer).__mro__ if base.__name__ == "Optimizer")
    found = [one for one in objects if issubclass(type(one), kind)]
    # MindSpore's optimizers are cells, and so is what calls one.
    models = [one for one in found if not any(issubclass(type(part), trains) for part in (one, *parts_of(one)))]
    inner = {id(part) for model in models for part in parts_of(model)}
    owners: list[Owner] = []
    for model in models:
        if id(model) not in inner and model is not optimizer:
            own = parameters_of(model)
            if of := len(own & held):
                owners.append(Owner(model, of, len(own) - of))
    owners.sort(key=lambda one: (-one.of, one.others))
    if owners and owners[0][1:] not in [one[1:] for one in owners[1:]]:
        return owners[0].model
    why = f"it may belong to {_named(owners)}" if owners else "no model of this process has its parameters"
    said = "trainermon run: %s is not monitored, because %s. Attach by monitor.watch(model, optimizer) in its code."
    LOGGER.warning(said, type(optimizer).__name__, why)
    return None


def held_by(optimizer: Any) -> set[int]:
    """The ids of the tensors that an optimizer of PyTorch or MindSpore steps."""
    groups = getattr(optimizer, "param_groups", None)
    return {id(one) for one in (optimizer.parameters if groups is None else (p for group in groups for p in group["params"]))}


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


def configuration(preset_or_path: str) -> str | Mapping[str, Any]:
    """What ``TrainerMon`` takes: an absolute path, or the fields of a preset."""
    return preset_or_path if "/" in preset_or_path else preset_fields(preset_or_path)
