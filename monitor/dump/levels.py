"""What each level records: single values (debug), modules (L0) and calls of APIs (L1)."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar

import yaml

from monitor.config.jsonc import JsonError, parse, shown
from monitor.config.loading import ConfigError, content_of
from monitor.dump.backend import DumpBackend
from monitor.dump.session import Backward, CallName, OpenModule, Session
from monitor.dump.values import GradientSlot, Trees, results
from monitor.failures import IN_HOOK, Failures
from monitor.recording.backend import HookSet, Removable, Target
from monitor.recording.gradient_edges import SeveralThreadsError, follow_inputs, follow_result, joint_name, on_several_threads
from monitor.recording.tensor_paths import HiddenError, hidden_result

# --- Records one call of a module or an API: reads its inputs and outputs, and collects their gradients.

ADVICE = "Its entry is missing from the dump."

Parameters = Iterable[tuple[str, Any]]


class CallRecorder:
    """Creates the records of calls of a session.

    Args:
        failures: Reports tensors that cannot be read.
    """

    def __init__(self, session: Session, backend: DumpBackend, failures: Failures) -> None:
        self.session = session
        self.backend = backend
        self.failures = failures
        self.trees = Trees(backend.tensor)

    def settle(self, not_entered: int = 0) -> None:
        """Close modules whose forward has raised, if the framework does not report that.

        Args:
            not_entered: How many of the modules being called have not been entered yet.
        """
        if self.session.open_modules and (calling := self.backend.being_called()) is not None:
            self.session.keep_open(calling[: len(calling) - not_entered])

    def new_call(self, name: CallName) -> RecordedCall:
        """A new record of the call ``name``. ``begin`` has to follow."""
        return RecordedCall(name, self)


class RecordedCall:
    """A call between its beginning and its end."""

    def __init__(self, name: CallName, recorder: CallRecorder) -> None:
        self.name = name
        self._recorder, self._session, self._graph = recorder, recorder.session, recorder.backend.graph
        self._trees = recorder.trees
        self._content: dict[str, Any] | None = None
        self._backward: Backward | None = None
        self._inputs: dict[Target, list[GradientSlot]] = {}
        self._start = 0

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read the inputs, before the call may change them."""
        if not self._session.selection.begins(self.name.of("forward")):
            return
        self._stack = self._session.stack()
        if self._session.wants(self.name, "forward"):
            wanted = self._session.wants(self.name, "forward", "input")
            self._content = self._inputs_read(args, kwargs) if wanted else {}
        if self._graph.recording() and self._session.wants(self.name, "backward"):
            self._note_inputs([*args, *kwargs.values()])

    def end(self, result: Any, parameters: Parameters = ()) -> None:
        """The call has returned: read its outputs, and complete the entry of its forward."""
        name, outputs = self.name.of("forward"), results(result)
        if self._content is not None:
            if self._session.wants(self.name, "forward", "output"):
                self._content["output"] = self._trees.all_of(outputs, f"{name}.output", self._session.leaf)
            if own := self._parameters(f"{name}.parameters", parameters):
                self._content["parameters"] = own
            self._session.enter(name, self._content, self._session.parent("forward"), self._stack)
        if self._backward is not None:
            self._watch(self._backward, outputs)
        self._session.selection.ended(name)

    def _inputs_read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        name, leaf = f"{self.name.of('forward')}.input", self._session.leaf
        named = {key: self._trees.of(value, f"{name}.{key}", leaf) for key, value in kwargs.items()}
        return {"input_args": self._trees.all_of(args, name, leaf), "input_kwargs": named}

    def _parameters(self, name: str, parameters: Parameters) -> dict[str, Any]:
        if not self._session.wants(self.name, "forward", "input"):
            return {}
        return {key: self._session.leaf(parameter, f"{name}.{key}") for key, parameter in parameters}

    def _note_inputs(self, values: Sequence[Any]) -> None:
        """Note where the gradients of the inputs will go. They are numbered as the values are, keyword arguments last."""
        name = self.name.of("backward")
        self._backward = Backward(name, self._session.parent("backward"), self._stack)
        if self._session.wants(self.name, "backward", "output"):
            slots = [self._trees.slots(value, f"{name}.output.{i}", self._note) for i, value in enumerate(values)]
            self._backward.content["output"] = self._without_end(slots, values)
            self._join(self._backward, f"{name}.output.")
        self._start = self._graph.sequence_nr()

    def _without_end(self, slots: list[Any], values: Sequence[Any]) -> list[Any]:
        """Drop trailing values that are no tensors, such as strides: they have no gradients."""
        end = len(slots)
        while end and slots[end - 1] is None and not isinstance(values[end - 1], self._recorder.backend.tensor):
            end -= 1
        return slots[:end]

    def _note(self, x: Any, slot: GradientSlot) -> bool:
        if not self._graph.requires_grad(x):
            return False
        self._inputs.setdefault(self._graph.gradient_target(x), []).append(slot)
        return True

    def _join(self, backward: Backward, prefix: str) -> None:
        """A tensor passed in several places has one gradient. It gets a joint slot; the slots of the places stay empty."""
        several = [(target, slots) for target, slots in self._inputs.items() if len(slots) > 1]
        if several:
            taken = [slot.name for slots in self._inputs.values() for slot in slots]
            joint = [GradientSlot(joint_name([slot.name for slot in slots], prefix, taken)) for _, slots in several]
            backward.content["output_shared"] = {slot.name.removeprefix(prefix): slot for slot in joint}
            self._inputs |= {target: [slot] for (target, _), slot in zip(several, joint, strict=True)}

    def _watch(self, backward: Backward, outputs: Sequence[Any]) -> None:
        """Observe the gradients of the outputs and of the inputs."""
        given: list[tuple[Any, GradientSlot]] = []

        def note(x: Any, slot: GradientSlot) -> bool:
            if self._graph.requires_grad(x):
                given.append((x, slot))
            return bool(given) and given[-1][1] is slot

        name = f"{backward.name}.input"
        slots = [self._trees.slots(value, f"{name}.{i}", note) for i, value in enumerate(outputs)]
        if not given:
            return
        if self._session.wants(self.name, "backward", "input"):
            backward.content = {"input": slots, **backward.content}
            for x, slot in given:
                self._keep(follow_result(self._graph, x, self._start, self._taking(backward, slot)))
        if self._inputs:
            given_back = self._all_given([x for x, _ in given], outputs)
            targets = {target: slots[0] for target, slots in self._inputs.items()}
            try:
                self._keep(follow_inputs(self._graph, targets, self._start, given_back, partial(self._taking, backward)))
            except SeveralThreadsError:
                self._recorder.failures.warn("operations of several threads", on_several_threads(name))

    def _all_given(self, given: list[Any], outputs: Sequence[Any]) -> list[Any]:
        """All outputs that have a gradient; empty if some may be hidden, since sums over a part would be wrong."""
        if all(isinstance(x, self._recorder.backend.tensor) for x in outputs):
            return given
        try:
            held = self._recorder.backend.leaves.held(tuple(outputs))
        except HiddenError as error:
            self._recorder.failures.warn("hidden results", hidden_result(self.name.of("backward"), error))
            return []
        known = {id(x) for x in given}
        return given + [x for x in held if id(x) not in known and self._graph.requires_grad(x)]

    def _keep(self, handles: Iterable[Removable]) -> None:
        """Keep hooks until the dump ends, since they are on objects that may outlive the graph."""
        for handle in handles:
            self._session.until_end.add(handle)

    def _taking(self, backward: Backward, slot: GradientSlot) -> Callable[[Any], None]:
        take = self._session.expect(backward, slot)
        guarded: Callable[[Any], None] = self._recorder.failures.guarded("reading gradients", take, ADVICE, of=backward.name)
        return guarded


# --- Methods that may be called on an object or on its class.

P = ParamSpec("P")
R = TypeVar("R")


class HasLatest(Protocol):
    """A class that knows its latest object."""

    def latest(self, asked_for: str) -> Any:
        """The latest object. Raises ``RuntimeError``, with the name of the calling method, if there is none."""


class ClassOrInstanceMethod(Generic[P, R]):
    """A method that, called on the class, applies to its latest object.

    >>> PrecisionDebugger("config.json")                # doctest: +SKIP
    >>> PrecisionDebugger.start(model)                  # doctest: +SKIP
    """

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, one: Any, kind: HasLatest) -> Callable[P, R]:
        if one is not None:
            return MethodType(self._method, one)

        @functools.wraps(self._method)
        def on_latest(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._method(kind.latest(self._method.__name__), *args, **kwargs)

        return on_latest


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

    def watch(self, models: Sequence[Any], *, numbered: bool, only: Set[int] | None = None) -> None:
        """Hook every module except the models themselves.

        Args:
            numbered: Whether names contain the model's index.
            only: The ids of the modules to hook; None for all.
        """
        found = False
        for index, model in enumerate(models):
            prefix = f"{self._prefix}.{index}" if numbered else self._prefix
            for name, module in self._recorder.backend.modules_of(model, self._recorder.failures):
                if only is not None and id(module) not in only:
                    continue
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


def api_list(
    path: str | os.PathLike[str], prefixes: Sequence[str], sections: Mapping[str, str] = MappingProxyType({})
) -> ApiList:
    """Read a list of APIs: an object with a list of names for each prefix. Files ``.yaml`` and ``.yml`` are YAML, others JSON,
    which may have comments.

    Args:
        sections: Other names of the prefixes.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    name = os.path.expanduser(os.fsdecode(path))
    found = _parsed_list(name)
    if not isinstance(found, dict) or not all(isinstance(names, list) for names in found.values()):
        raise ConfigError(f"{name}: expected an object with a list of names for each of {', '.join(prefixes)}")
    listed: dict[str, list[str]] = {}
    for key, names in found.items():
        prefix = sections.get(key, key)
        if prefix not in prefixes:
            raise ConfigError(f"{name}: {shown(key)} is not known: expected {', '.join([*prefixes, *sections])}")
        listed.setdefault(prefix, []).extend(names)
    if odd := [one for names in listed.values() for one in names if not isinstance(one, str)]:
        raise ConfigError(f"{name}: {shown(odd[0])} is not allowed: expected the name of an API")
    return listed


def _parsed_list(name: str) -> Any:
    try:
        text = content_of(name).decode()
        return yaml.safe_load(text) if name.endswith((".yaml", ".yml")) else parse(text).value
    except (JsonError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {error}") from None


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
