"""Modules that a model got after it was attached: a layer that was replaced, or one that its first forward makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, final

from monitor.recording.attached_model import Attached, ModelNames, NamedModule, NamedParts
from monitor.recording.phases import Collector, Rarely, listed

LATE: Final = "The model got modules after set_monitor was called: {names}. Their {what} have no rows."
MOVED: Final = (
    "Modules have other names than when set_monitor was called: {names}. Their rows keep the names of that time, which other "
    "modules have now."
)
ADVICE: Final = "To record the model as it is, call set_monitor when it is complete, or again."

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
        self._rarely = Rarely()
        self._said = ""

    @classmethod
    def of_activations(cls, attached: Attached, names: ModelNames) -> LateModules:
        return cls(attached, names.with_activations(), ModelNames.with_activations, "activations")

    def before_seal(self) -> None:
        if self._rarely.due:
            self._look_again()

    def _look(self) -> None:
        with self._rarely.looking():
            said = self._differences()
        if said and said != self._said:
            self._attached.failures.warn(f"modules without {self._what}", said)
            self._attached.note(f"modules_without_{self._what}", said)
            self._said = said

    def _differences(self) -> str:
        attached, modules = self._attached, self._attached.backend.modules
        parts = [NamedParts(list(one.modules), one.parameters) for one in map(modules.parts, attached.watch.chunks)]
        asked = list(self._asked(ModelNames(parts, attached.config)))
        now = {_place(one): one.module for one in asked}
        known = {id(module) for module in self._known.values()}
        late = [
            one.name
            for one in asked
            if not (id(one.module) in known or self._has_rows(one) or modules.never_called(one.module))
        ]
        present = {id(module) for part in parts for _, module in part.modules}
        moved = [
            place[1]
            for place, module in self._known.items()
            if now.get(place, module) is not module and id(module) in present and not self._holds(now[place], module)
        ]
        said = [
            LATE.format(names=listed(list(dict.fromkeys(late))), what=self._what) if late else "",
            MOVED.format(names=listed(list(dict.fromkeys(moved)))) if moved else "",
        ]
        return " ".join(filter(None, [*said, ADVICE])) if any(said) else ""

    def _has_rows(self, one: NamedModule) -> bool:
        """Whether a module wraps the one that was hooked under its name."""
        return _place(one) in self._known and self._holds(one.module, self._known[_place(one)])

    def _holds(self, wrapper: Any, module: Any) -> bool:
        return any(one is module for _, one in self._attached.backend.modules.parts(wrapper).modules)


def _place(module: NamedModule) -> tuple[int, str]:
    return module.chunk, module.name
