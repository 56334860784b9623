"""What a backward finds for the parameters of a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from monitor.dump.calls import ADVICE, Recorded
from monitor.dump.measured import Slot
from monitor.dump.names import CallName
from monitor.dump.session import Backward


class ParameterGradients:
    """Those of one module, an entry for each backward that comes to it."""

    def __init__(self, base: str, recorded: Recorded) -> None:
        self._base = f"{base}.parameters_grad"
        self._name = CallName(base, 0, of_module=True)
        self._recorded = recorded
        self._hooked: dict[str, None] | None = None
        self._pass: int | None = None
        self._takes: dict[str, Callable[[Any], None]] = {}

    def watch(self, module: Any) -> None:
        """To be called when the module is; hooks are placed once a step."""
        session = self._recorded.session
        if self._hooked is not None or not session.wants(self._name, "backward", "output"):
            return
        self._hooked = {}
        for name, parameter in self._recorded.backend.parameters_of(module):
            take = self._recorded.failures.guarded("reading a gradient", partial(self._take, name), ADVICE, of=self._base)
            handle = self._recorded.backend.on_parameter(parameter, take)
            if handle is not None:
                self._hooked[name] = None
                session.until_end.add(handle)

    def _take(self, name: str, gradient: Any) -> None:
        if not self._recorded.session.here:
            return
        if self._pass != (now := self._recorded.backend.backward_pass()):
            self._pass = now
            self._begin()
        self._takes[name](gradient)

    def _begin(self) -> None:
        session = self._recorded.session
        entry = f"{self._base}.{session.number(self._base)}"
        backward = Backward(entry, None, None)
        slots = {name: Slot(f"{entry}.{name}") for name in self._hooked or ()}
        backward.content = {name: [slot] for name, slot in slots.items()}
        self._takes = {name: session.expect(backward, slot) for name, slot in slots.items()}
