"""L0: what goes into each module and comes out of it, forwards and backwards."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from monitor.dump.calls import ADVICE, Call, Recorded
from monitor.dump.names import CallName
from monitor.dump.parameter_gradients import ParameterGradients
from monitor.dump.session import OpenModule
from monitor.recording.protocols import HookSet


class Tokens:
    """Which forwards of a model are recorded: those of a range of tokens, or all.

    Args:
        wanted: The first and the last, counted from 1.
    """

    def __init__(self, wanted: tuple[int, int] | None) -> None:
        self.wanted = wanted
        self._count = 0
        self.open = wanted is None

    def begins(self, *_: Any) -> None:
        """The model is called."""
        if self.wanted is not None:
            self._count += 1
            self.open = self.wanted[0] <= self._count <= self.wanted[1]

    def ended(self, *_: Any) -> None:
        self.open = self.wanted is None


class OpenCalls(threading.local):
    """Calls of a module that have not ended: each thread has its own."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


class ModuleWatcher:
    """The hooks of one module.

    Args:
        base: ``Module.conv1.Conv2d``.
    """

    def __init__(self, base: str, recorded: Recorded, tokens: Tokens, gradients: ParameterGradients) -> None:
        self._base = base
        self._recorded, self._session, self._backend = recorded, recorded.session, recorded.backend
        self._tokens = tokens
        self._gradients = gradients
        self._open = OpenCalls()
        self._has_raised = recorded.failures.guarded("closing a call", self._raised, ADVICE, of=base)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._tokens.open or not self._session.here or self._backend.traced():
            return
        self._recorded.settle(but=1)
        name = CallName(self._base, self._session.number(f"{self._base}.forward"), of_module=True)
        call = self._recorded.opened(name)
        self._open.calls.append(call)
        try:
            with self._session.at_work():
                call.begin(args, kwargs)
        finally:
            self._session.module_begins(OpenModule(name, id(module), partial(self._has_raised, call)))
        if self._backend.graph.recording():
            self._gradients.watch(module)

    def after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Also called, where the framework can, when forward raised."""
        if not self._open.calls or not self._session.here or self._backend.traced():
            return
        call = self._open.calls.pop()
        self._session.module_ended(call.name)
        with self._session.at_work():
            call.end(result, self._backend.parameters_of(module))

    def _raised(self, call: Call) -> None:
        """It had raised, some time ago: its parameters may be others by now, and are not read."""
        self._open.calls.remove(call)
        if self._session.here:
            with self._session.at_work():
                call.end(None)


class ModuleDump:
    """All modules below the models that were passed.

    Args:
        prefix: ``Module`` or ``Cell``.
        gradients: Of the step's modules, by their names: segments of a step share them.
    """

    def __init__(self, recorded: Recorded, tokens: Tokens, prefix: str, gradients: dict[str, ParameterGradients]) -> None:
        self._recorded = recorded
        self._tokens = tokens
        self._prefix = prefix
        self._gradients = gradients
        self._hooks = HookSet()

    def watch(self, models: Sequence[Any], *, numbered: bool) -> None:
        """Hook every module but the models themselves.

        Args:
            numbered: Whether names have the model's place among the models.
        """
        found = False
        for index, model in enumerate(models):
            prefix = f"{self._prefix}.{index}" if numbered else self._prefix
            for name, module in self._recorded.backend.modules_of(model, self._recorded.failures):
                self._watch_module(f"{prefix}.{name}.{type(module).__name__}", module)
                found = True
        if not found:
            said = "no module has been found below the model, which is itself not dumped: pass what contains it"
            self._recorded.failures.warn("no modules", f"{said}.")

    def remove(self) -> None:
        self._hooks.remove()

    def _watch_module(self, base: str, module: Any) -> None:
        gradients = self._gradients.setdefault(base, ParameterGradients(base, self._recorded))
        watcher = ModuleWatcher(base, self._recorded, self._tokens, gradients)
        guarded, backend = self._recorded.failures.guarded, self._recorded.backend
        before = guarded("reading the inputs", watcher.before, ADVICE, of=base)
        after = guarded("reading the outputs", watcher.after, ADVICE, of=base)
        self._hooks.add(backend.before_forward(module, before))
        self._hooks.add(backend.after_forward(module, after, always=True))
