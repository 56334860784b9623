"""Modules that a model got after it was attached: a layer that was replaced, or one that its first forward makes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from monitor.recording.attached_model import Attached, ModelNames, NamedModule, NamedParts
from monitor.recording.phases import Collector, listed

SHARE: Final = 0.001
"""Of the training thread's time, at most, for looking again."""

LATE: Final = (
    "The model got modules after set_monitor was called: {names}. Their {what} have no rows. To record them, call "
    "set_monitor when the model is complete, or again."
)

Asked = Callable[[ModelNames], Iterable[NamedModule]]
"""The modules of a model that the configuration asks for."""


@final
class LateModules(Collector):
    """Says which modules have no rows because they have no hooks.

    A module that another one now wraps is still recorded under its name. So the wrapper is not late.

    Args:
        hooked: What was asked for when the model was attached.
        asked: Finds what is asked for in the model as it is.
        what: What has no rows, in words.
    """

    def __init__(self, attached: Attached, hooked: Iterable[NamedModule], asked: Asked, what: str) -> None:
        self._attached, self._asked, self._what = attached, asked, what
        self._known = {_place(one): one.module for one in hooked}
        self._look_again = attached.failures.guarded("looking for new modules", self._look)
        self._next = 0.0
        self._said: Sequence[str] = ()

    @classmethod
    def of_activations(cls, attached: Attached, names: ModelNames) -> LateModules:
        return cls(attached, names.with_activations(), ModelNames.with_activations, "activations")

    def before_seal(self) -> None:
        if time.monotonic() >= self._next:
            self._look_again()

    def _look(self) -> None:
        began, self._next = time.monotonic(), math.inf  # what raises is not tried again
        if (names := self._names()) and names != self._said:
            said = LATE.format(names=listed(names), what=self._what)
            self._attached.failures.warn(f"modules without {self._what}", said)
            self._attached.note(f"modules_without_{self._what}", said)
            self._said = names
        self._next = began + (time.monotonic() - began) / SHARE

    def _names(self) -> list[str]:
        attached, modules = self._attached, self._attached.backend.modules
        parts = [NamedParts(list(one.modules), one.parameters) for one in map(modules.parts, attached.watch.chunks)]
        known = {id(module) for module in self._known.values()}
        present = {id(module) for part in parts for _, module in part.modules}

        def has_rows(one: NamedModule) -> bool:
            return id(one.module) in known or id(self._known.get(_place(one))) in present

        asked = self._asked(ModelNames(parts, attached.config))
        late = [one.name for one in asked if not isinstance(one.module, modules.never_called) and not has_rows(one)]
        return list(dict.fromkeys(late))


def _place(module: NamedModule) -> tuple[int, str]:
    return module.chunk, module.name
