"""What each level records: single values (debug), modules (L0) and calls of APIs (L1)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from monitor.config.jsonc import JsonError, parse, shown
from monitor.config.loading import ConfigError, content_of
from monitor.dump.calls import ADVICE, CallRecorder, RecordedCall
from monitor.dump.session import Backward, CallName, OpenModule
from monitor.dump.values import GradientSlot
from monitor.failures import IN_HOOK
from monitor.recording.backend import HookSet

# --- The level ``debug``: single values of a program, saved by name.


def save(recorder: CallRecorder, value: Any, name: str, *, backward: bool) -> None:
    """Save a value now, and its gradients when they arrive."""
    session, trees, graph = recorder.session, recorder.trees, recorder.backend.graph
    number = session.number(name)
    entry = f"{name}.{number}.debug"
    session.enter(entry, trees.of(value, entry, session.leaf), None, session.stack())
    if not (backward and graph.recording()):
        return
    gradients = Backward(f"{name}_grad.{number}.debug", None, None)

    def watch(x: Any, slot: GradientSlot) -> bool:
        if not graph.requires_grad(x):
            return False
        take = recorder.failures.guarded("reading gradients", session.expect(gradients, slot), ADVICE, of=gradients.name)
        session.until_end.add(graph.on_gradient(x, take))
        return True

    gradients.content = trees.slots(value, gradients.name, watch)


# --- Gradients of the parameters of a module.


class ParameterGradients:
    """The parameter gradients of one module, with an entry for each backward."""

    def __init__(self, base: str, recorder: CallRecorder) -> None:
        self._base = f"{base}.parameters_grad"
        self._name = CallName(base, 0, of_module=True)
        self._recorder = recorder
        self._hooked: dict[str, None] | None = None
        self._pass: int | None = None
        self._takes: dict[str, Callable[[Any], None]] = {}

    def watch(self, module: Any) -> None:
        """Place hooks on the parameters, once a step. Called when the module is called."""
        session = self._recorder.session
        if self._hooked is not None or not session.wants(self._name, "backward", "output"):
            return
        self._hooked = {}
        for name, parameter in self._recorder.backend.parameters_of(module):
            take = self._recorder.failures.guarded("reading a gradient", partial(self._take, name), ADVICE, of=self._base)
            handle = self._recorder.backend.on_parameter(parameter, take)
            if handle is not None:
                self._hooked[name] = None
                session.until_end.add(handle)

    def _take(self, name: str, gradient: Any) -> None:
        if not self._recorder.session.is_active:
            return
        if self._pass != (now := self._recorder.backend.backward_pass()):
            self._pass = now
            self._begin()
        self._takes[name](gradient)

    def _begin(self) -> None:
        session = self._recorder.session
        entry = f"{self._base}.{session.number(self._base)}"
        backward = Backward(entry, None, None)
        slots = {name: GradientSlot(f"{entry}.{name}") for name in self._hooked or ()}
        backward.content = {name: [slot] for name, slot in slots.items()}
        self._takes = {name: session.expect(backward, slot) for name, slot in slots.items()}


class Tokens:
    """Tells whether a forward of the model is recorded: forwards in a range of tokens, or all.

    Args:
        wanted: The first and the last token, counted from 1. None: all.
    """

    def __init__(self, wanted: tuple[int, int] | None) -> None:
        self.wanted = wanted
        self._count = 0
        self.open = wanted is None

    def begins(self, *_: Any) -> None:
        """Count a forward that begins."""
        if self.wanted is not None:
            self._count += 1
            self.open = self.wanted[0] <= self._count <= self.wanted[1]

    def ended(self, *_: Any) -> None:
        self.open = self.wanted is None


class OpenModuleCalls(threading.local):
    """Calls of a module that have not ended, for each thread."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []


class ModuleHooks:
    """The hooks of one module.

    Args:
        base: ``Module.conv1.Conv2d``.
    """

    def __init__(self, base: str, recorder: CallRecorder, tokens: Tokens, gradients: ParameterGradients) -> None:
        self._base = base
        self._recorder, self._session, self._backend = recorder, recorder.session, recorder.backend
        self._tokens = tokens
        self._gradients = gradients
        self._open = OpenModuleCalls()
        self._has_raised = recorder.failures.guarded("closing a call", self._raised, ADVICE, of=base)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._tokens.open or not self._session.is_active or self._backend.traced():
            return
        self._recorder.settle(not_entered=1)
        name = CallName(self._base, self._session.number(f"{self._base}.forward"), of_module=True)
        call = self._recorder.new_call(name)
        self._open.calls.append(call)
        try:
            with self._session.reading_in_progress():
                call.begin(args, kwargs)
        finally:
            self._session.module_begins(OpenModule(name, id(module), partial(self._has_raised, call)))
        if self._backend.graph.recording():
            self._gradients.watch(module)

    def after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Also called when forward raised, if the framework supports that."""
        if not self._open.calls or not self._session.is_active or self._backend.traced():
            return
        call = self._open.calls.pop()
        self._session.module_ended(call.name)
        with self._session.reading_in_progress():
            call.end(result, self._backend.parameters_of(module))

    def _raised(self, call: RecordedCall) -> None:
        """The call raised some time ago. Its parameters may have changed since and are not read."""
        self._open.calls.remove(call)
        if self._session.is_active:
            with self._session.reading_in_progress():
                call.end(None)


class ModuleDump:
    """Records all modules below the models that were passed.

    Args:
        prefix: ``Module`` or ``Cell``.
        gradients: The parameter gradients of the step's modules, by name. Segments of a step share them.
    """

    def __init__(self, recorder: CallRecorder, tokens: Tokens, prefix: str, gradients: dict[str, ParameterGradients]) -> None:
        self._recorder = recorder
        self._tokens = tokens
        self._prefix = prefix
        self._gradients = gradients
        self._hooks = HookSet()

    def watch(self, models: Sequence[Any], *, numbered: bool) -> None:
        """Hook every module except the models themselves.

        Args:
            numbered: Whether names contain the model's index.
        """
        found = False
        for index, model in enumerate(models):
            prefix = f"{self._prefix}.{index}" if numbered else self._prefix
            for name, module in self._recorder.backend.modules_of(model, self._recorder.failures):
                self._watch_module(f"{prefix}.{name}.{type(module).__name__}", module)
                found = True
        if not found:
            said = "no module was found below the model, and the model itself is not dumped: pass a module that contains it"
            self._recorder.failures.warn("no modules", f"{said}.")

    def remove(self) -> None:
        self._hooks.remove()

    def _watch_module(self, base: str, module: Any) -> None:
        gradients = self._gradients.setdefault(base, ParameterGradients(base, self._recorder))
        watcher = ModuleHooks(base, self._recorder, self._tokens, gradients)
        guarded, backend = self._recorder.failures.guarded, self._recorder.backend
        before = guarded("reading the inputs", watcher.before, ADVICE, of=base)
        after = guarded("reading the outputs", watcher.after, ADVICE, of=base)
        self._hooks.add(backend.before_forward(module, before))
        self._hooks.add(backend.after_forward(module, after, always=True))


class EntrySource(Protocol):
    """Records entries between ``start`` and ``stop``."""

    def watch(self, models: Sequence[Any], *, numbered: bool) -> None:
        """Begin to record.

        Args:
            models: The models that were passed to ``start``; none if none was.
            numbered: Whether names contain the model's index.
        """

    def remove(self) -> None:
        """Take every hook away."""


SOURCES: Final[Mapping[str, Callable[[CallRecorder, Tokens, str, dict[str, ParameterGradients]], EntrySource]]] = {
    "modules": ModuleDump,
}
"""The sources that levels name in ``LEVELS`` of ``monitor/dump/config.py``. Their arguments are those of ``ModuleDump``."""


# --- L1: the inputs and outputs of APIs, and the list of APIs that are recorded.

WRITING: Final = ("Distributed", "MintDistributed")
"""Prefixes of functions that write into their arguments, and return nothing once they have waited."""

ApiList = Mapping[str, Sequence[str]]
"""Names of APIs, by the prefix that says where they are found."""


def api_list(path: str | os.PathLike[str], prefixes: Sequence[str]) -> ApiList:
    """Read a list of APIs: an object with a list of names for each prefix. It may have comments.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    name = os.path.expanduser(os.fsdecode(path))
    try:
        listed = parse(content_of(name).decode()).value
    except (JsonError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(listed, dict) or not all(isinstance(names, list) for names in listed.values()):
        raise ConfigError(f"{name}: expected an object with a list of names for each of {', '.join(prefixes)}")
    if unknown := sorted(set(listed) - set(prefixes)):
        raise ConfigError(f"{name}: {shown(unknown[0])} is not known: expected {', '.join(prefixes)}")
    if odd := [one for names in listed.values() for one in names if not isinstance(one, str)]:
        raise ConfigError(f"{name}: {shown(odd[0])} is not allowed: expected the name of an API")
    return listed


def packaged_list(module_file: str) -> Path:
    """The list beside a module's file."""
    return Path(module_file).with_name("apis.json")


class ApiThreadState(threading.local):
    """The state of a thread in calls of APIs.

    Attributes:
        busy: Calls of APIs get no entry at the moment.
        written: The tensors into which the current collective may write.
    """

    def __init__(self) -> None:
        self.busy = False
        self.written: tuple[Any, ...] | None = None


class ApiDump:
    """Creates entries of calls of APIs. A call inside another API call gets none: it belongs to that call's implementation."""

    def __init__(self, recorder: CallRecorder, tokens: Tokens) -> None:
        self._recorder, self._session = recorder, recorder.session
        self._tokens = tokens
        guarded = recorder.failures.guarded
        self._begin = guarded("reading the arguments", self._begins, ADVICE)
        self._end = guarded("reading the results", self._ended, ADVICE)
        self._calling = ApiThreadState()

    def begins(self, prefix: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call is about to happen."""
        if self._calling.busy or IN_HOOK.depth or self._session.reading or not self._tokens.open or not self._session.is_active:
            return None
        self._calling.busy = True  # until the call has ended: reading a tensor may call APIs too
        call = None
        try:
            call = self._begin(f"{prefix}.{name}", args, kwargs)
        finally:
            self._calling.busy = call is not None
        return call

    def ended(self, call: Any, result: Any) -> None:
        try:
            self._end(call, result)
        finally:
            self._calling.busy, self._calling.written = False, None

    def raised(self, call: Any) -> None:
        del call
        self._calling.busy, self._calling.written = False, None

    def warn(self, cause: str, message: str) -> None:
        self._recorder.failures.warn(cause, message)

    def _begins(self, base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedCall:
        self._recorder.settle()
        name = CallName(base, self._session.number(base), of_module=False)
        call = self._recorder.new_call(name)
        self._calling.written = _written(args, kwargs, self._recorder.backend.tensor) if base.startswith(WRITING) else None
        call.begin(args, kwargs)
        return call

    def _ended(self, call: RecordedCall, result: Any) -> None:
        if self._session.is_active:
            call.end(self._calling.written if result is None and self._calling.written else result)


def _written(args: Sequence[Any], kwargs: Mapping[str, Any], tensor: type) -> tuple[Any, ...]:
    """The arguments into which a collective may have written."""
    return tuple(one for one in (*args, *kwargs.values()) if isinstance(one, (tensor, list)))
