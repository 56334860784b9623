"""Attaches monitors in a program that knows nothing of them, after the first step of each optimizer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from monitor.attaching import preset_fields
from monitor.failures import LOGGER

MOST_NAMED: Final = 3
"""Models that a warning names."""


class Launched(Protocol):
    """The side of a framework: a module of these functions."""

    TrainerMon: Any

    def held(self, optimizer: Any) -> Collection[int]:
        """The ids of the tensors that an optimizer steps."""

    def models(self, objects: Iterable[Any]) -> list[Any]:
        """The models and parts of models among some objects."""

    def parts(self, model: Any) -> Iterable[Any]:
        """The direct parts of a model."""

    def parameters(self, model: Any) -> Collection[int]:
        """The ids of the parameters of a model."""


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
        side: The module of the framework (``Launched``), imported with the first step.

    Attributes:
        stop: Tells of no more steps.
    """

    def __init__(self, config: str, side: str) -> None:
        self._config, self._side_name = config, side
        self._side: Launched | None = None
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
            LOGGER.warning("trainermon run: %s is not monitored: %s", type(optimizer).__name__, error or repr(error))
            self.stop()

    def _attach(self, optimizer: Any) -> None:
        side = self._side or cast(Launched, import_module(self._side_name))
        self._side = side
        objects = gc.get_objects()
        if any(type(one) is side.TrainerMon and one.watches(optimizer) for one in objects):
            LOGGER.info("trainermon run: the program monitors %s itself.", type(optimizer).__name__)
            return
        model = owner_of(optimizer, side, objects)
        if model is None:
            return
        beside = next((one for one in self._attached if one.model() is model), None)
        if beside is not None and beside.monitor.step > 1:
            said = "trainermon run: %s begins to step %s later than others. Its turns are not followed."
            LOGGER.warning(said, type(optimizer).__name__, type(model).__name__)
            return
        if beside is None:
            monitor = side.TrainerMon(configuration(self._config), params_have_main_grad=False)
            beside = _Attached(monitor, weakref.ref(model), [])
            self._attached.append(beside)
        beside.optimizers.append(weakref.ref(optimizer))
        watched = [one for known in beside.optimizers if (one := known()) is not None]
        beside.monitor.watch(model, watched, start_iteration=1)
        named = " and ".join(type(one).__name__ for one in watched)
        LOGGER.info("trainermon run: attached to %s, trained by %s.", type(model).__name__, named)


def _nothing() -> None:
    """Until the framework is imported, there is nothing to stop."""


def owner_of(optimizer: Any, side: Launched, objects: Iterable[Any]) -> Any:
    """The outermost model with the parameters of an optimizer, among all objects; None, with a warning, if it is not clear."""
    held = side.held(optimizer)
    models = side.models(objects)
    inner = {id(part) for model in models for part in side.parts(model)}
    owners: list[Owner] = []
    for model in models:
        if id(model) not in inner and model is not optimizer:
            own = set(side.parameters(model))
            if of := len(own & set(held)):
                owners.append(Owner(model, of, len(own) - of))
    owners.sort(key=lambda one: (-one.of, one.others))
    if owners and owners[0][1:] not in [one[1:] for one in owners[1:]]:
        return owners[0].model
    found = _named(owners) if owners else "no model of this process has its parameters"
    LOGGER.warning(
        "trainermon run: %s is not monitored, because %s. Attach by monitor.watch(model, optimizer) in its code.",
        type(optimizer).__name__,
        f"it may belong to {found}" if owners else found,
    )
    return None


def _named(owners: Sequence[Owner]) -> str:
    return " or ".join(type(one.model).__name__ for one in owners[:MOST_NAMED])


def configuration(preset_or_path: str) -> str | Mapping[str, Any]:
    """What ``TrainerMon`` takes: a path, or the fields of a preset."""
    return preset_or_path if Path(preset_or_path).is_file() else preset_fields(preset_or_path)
