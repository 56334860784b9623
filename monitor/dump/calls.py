"""Records one call of a module or an API: reads its inputs and outputs, and collects their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from monitor.dump.backend import DumpBackend
from monitor.dump.session import Backward, CallName, Session
from monitor.dump.values import GradientSlot, Trees, results
from monitor.failures import Failures
from monitor.recording.backend import Removable, Target
from monitor.recording.gradient_edges import SeveralThreadsError, follow_inputs, follow_result, joint_name, on_several_threads
from monitor.recording.tensor_paths import HiddenError, hidden_result

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
