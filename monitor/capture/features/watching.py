"""What the hooks of a module have in common for all features: when a call counts, and its row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from monitor.capture.calls import Calls, Place
from monitor.capture.features.choosing import SUFFIXES
from monitor.capture.features.reading import Reading
from monitor.capture.hooks import HookSet
from monitor.capture.modules import ModuleCollector
from monitor.capture.names import NamedModule
from monitor.capture.parameter_series import NamedParameter
from monitor.capture.recorder import Watched
from monitor.series import Series


class Asked(Protocol):
    """Whom watchers ask.

    Attributes:
        modules: Who knows which calls belong to training.
        reading: What a framework brings to features.
    """

    modules: ModuleCollector
    reading: Reading

    def series(self, kind: str, parameter: NamedParameter, seen: Any) -> Series | None:
        """The series of a feature of a weight; None where another rank writes it."""

    def does_not_fit(self, kind: str, name: str, reason: str) -> None:
        """Say, with all others of the step, that there is no row of a module."""


class FeatureWatcher(ABC):
    """What all features have in common: calls that count are counted, once each.

    Attributes:
        called: Whether a call that counts was seen in the step in progress.
    """

    kind: str

    def __init__(self, module: NamedModule, asked: Asked) -> None:
        self.name = module.name
        self.called = False
        self._module, self._chunk = module.module, module.chunk
        self._asked, self._modules, self._reading = asked, asked.modules, asked.reading
        self._backend = asked.modules.backend
        self._recorder, self._clock = asked.modules.recorder, asked.modules.clock
        self._calls: Calls | None = None
        self._watched: dict[int, Watched] = {}

    @abstractmethod
    def attach(self, hooks: HookSet) -> None:
        """Register what reads the module."""

    def forget_step(self) -> None:
        self._calls = None
        self.called = False

    def restart(self, chunk: int, micro_step: int) -> None:
        if chunk == self._chunk and self._calls is not None:
            self._calls.restart(micro_step)

    def _before_forward(self, hooks: HookSet, what: str, call: Callable[..., None]) -> None:
        hooks.add(self._backend.before_forward(self._module, self._hook(what, call)))

    def _after_forward(self, hooks: HookSet, what: str, call: Callable[..., None]) -> None:
        hooks.add(self._backend.after_forward(self._module, self._hook(what, call), always=True))

    def _hook(self, what: str, call: Callable[..., None]) -> Callable[..., None]:
        def hidden(*args: Any) -> None:
            with self._reading.unseen():
                call(*args)

        return self._modules.failures.guarded(what, hidden, "The feature of this module is missing.", of=self.name)

    def _is_watched(self, module: Any) -> bool:
        # A replica that shares our hooks runs on a thread of its own: its calls are not this module's.
        return self._recorder.active and module is self._module

    def _begin(self, module: Any) -> Place | None:
        """The call that begins now; None if it is not of training, or repeats one that was recorded in forward."""
        if self._backend.repeating() or not self._modules.counts(self._chunk, module):
            return None
        if self._calls is None:
            self._calls, self.called = self._backend.new_calls(), True
            self._modules.remember(self)
        return self._calls.begin(self._clock.micro_step(self._chunk))

    def _record(self, call: int, numbers: Mapping[int, Any], x: Any, micro_step: int) -> None:
        watched = self._watched.get(call)
        if watched is None:
            name = f"{self.name}.{SUFFIXES[self.kind]}" + (f"#{call}" if call else "")
            micro_steps = tuple(range(self._clock.micro_steps))
            watched = self._watched[call] = Watched(Series(self.kind, self._chunk, name), micro_steps)
        self._recorder.record_numbers(watched, numbers, x, micro_step)

    def _misfit(self, reason: str) -> None:
        self._asked.does_not_fit(self.kind, self.name, reason)
