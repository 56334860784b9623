"""The phases of a step: the turns of its optimizers, the parameters that each steps, and the collectors that take part."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, final

from monitor.config import MonitorConfig
from monitor.recording.attached_model import Attached, ModelNames, NamedParameter, NamedParts, ParameterSubset
from monitor.recording.recorder import Due
from monitor.recording.step_clock import Clock
from monitor.stats.table import Status
from monitor.terminal import counted

P = ParamSpec("P")

PARTLY_SKIPPED: Final = (
    "in some steps one optimizer was skipped and another one stepped: such a step counts as complete, and the parameters of "
    "the skipped optimizer have no param_updated in it"
)
REPLACED: Final = (
    "An optimizer that was not passed to set_monitor ({new}) has stepped all parameters of one that was ({old}). Its steps are "
    "counted, but have no rows of reduced gradients, weights, moments and updates. Call set_monitor again with the optimizers "
    "that step now."
)
IN_PLACE: Final = (
    "All {forwards} forwards of a step were made, and only an optimizer that was not passed to set_monitor ({new}) has stepped "
    "parameters of the model. Its steps are counted, but have no rows of reduced gradients, weights, moments and updates. Call "
    "set_monitor again with the optimizers that step now. If a step has more forwards, pass their number as grad_acc_steps."
)
NEVER_STEPPED: Final = (
    "no optimizer that was passed to set_monitor has stepped ({names}), so no step has ended. Pass the "
    "optimizers whose step() the loop calls."
)
NEVER_CALLED: Final = (
    "No training forward of the model that was passed to set_monitor was seen, and none of its optimizers stepped. Another "
    "optimizer ({name}) stepped meanwhile. Pass the model that the loop trains, not the one that it was copied from."
)
NAMED: Final = 3
"""Parameters that a warning names."""


def listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest


def measures_optimizers(config: MonitorConfig) -> bool:
    """Whether a configuration asks for kinds that are measured around an optimizer's step."""
    of_weights = config.wg_distribution or config.param_distribution or config.mv_distribution
    of_updates = config.update_ratio or config.optimizer_health or config.mg_direction or config.ur_distribution
    return of_weights or of_updates


UNSCALED: Final = "divided by loss_scale"
UNSCALED_LATE: Final = "divided by loss_scale in scaler.step()"
SCALED: Final = "grad_unreduced and actv_grad are multiplied by the loss scale, whose rows are in `other`"
SKIPS_ITSELF: Final = "the optimizer skips a step by itself if found_inf, whose rows are in `other`, is not 0"
STILL_SCALED: Final = "multiplied by loss_scale: the optimizer divides by it inside its step"


@dataclass(frozen=True, slots=True)
class OptimizerTurn:
    """The turn of one optimizer in the step in progress.

    Attributes:
        optimizer: The optimizer; None if the framework has none on this rank.
        held: The recorded parameters that it steps; None if it steps all of them.
        scaling: How the loss scale may have changed its gradients, for a note: one of the texts above, or empty.
        ids: The ids of all parameters that it steps; None if it steps all. Most steps have the same object.
    """

    optimizer: Any
    held: ParameterSubset = None
    scaling: str = ""
    ids: Collection[int] | None = None


@dataclass(frozen=True, slots=True)
class Clipping:
    """A clipping of gradients by their total norm.

    Attributes:
        norm: The norm before: a number, or a tensor of one element.
        limit: The greatest norm that is left; None if nothing is clipped.
        of: The ids of the clipped parameters; None for all that the optimizers step.
        is_total: Whether the norm is known to be that of all ranks' gradients. Otherwise it is, if this rank has all of them.
        intact: Returns whether the gradients are still as this clipping left them. None if that is not followed.
    """

    norm: Any
    limit: float | None = None
    of: frozenset[int] | None = None
    is_total: bool = False
    intact: Callable[[], bool] | None = None


class Collector:
    """Interface of a collector, which takes part in the steps of an attachment: the phases of a step, in this order.

    A subclass overrides the phases that it needs; the attachment calls no others. It calls those of an optimizer's turn only in
    steps in which the collector records.
    """

    def begin_step(self, *, before_a_turn: bool) -> None:
        """A step begins, collected or not.

        Args:
            before_a_turn: Whether an optimizer is about to step, so that its gradients exist already.
        """

    def forward_begins(self) -> None:
        """A training forward begins in a collected step."""

    def before_step(self, turn: OptimizerTurn) -> None:
        """An optimizer is about to step."""

    def gradients_ready(self, turn: OptimizerTurn) -> None:
        """The gradients are complete, before the step; called after every backward of a closure."""

    def clipped(self, clipping: Clipping) -> None:
        """Gradients were clipped: before the optimizer's turn or in it."""

    def after_step(self, turn: OptimizerTurn) -> None:
        """The optimizer has stepped."""

    def end_turn(self, turn: OptimizerTurn | None) -> None:
        """Drop the temporary data of a turn: the optimizer has stepped or was skipped.

        Args:
            turn: None if the step has ended or has raised; then it may be called several times.
        """

    def before_seal(self) -> None:
        """The last moment to record rows of a collected step."""

    def end_step(self, *, collected: bool) -> None:
        """A step has ended; or recording ends, and the step in progress is incomplete, which counts as not collected.

        Args:
            collected: Whether the collector has recorded in it.
        """

    def remove(self) -> None:
        """Remove every hook."""


@final
class Collectors:
    """The collectors of an attachment, in the order of their calls in each phase."""

    def __init__(self) -> None:
        self._all: list[tuple[Collector, Due]] = []
        self._calls: dict[str, list[tuple[Due, Callable[..., None]]]] = {
            phase: [] for phase in vars(Collector) if phase[0] != "_"
        }

    def add(self, collector: Collector, due: Due) -> None:
        """Let a collector take part.

        Args:
            due: The steps in which it records.
        """
        self._all.append((collector, due))
        for phase, calls in self._calls.items():
            if getattr(type(collector), phase) is not getattr(Collector, phase):
                calls.append((due, getattr(collector, phase)))

    def each(self, phase: Callable[Concatenate[Collector, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a phase of the collectors that override it, and record in the step in progress."""
        for due, call in self._calls[phase.__name__]:
            if due.in_step:
                call(*args, **kwargs)

    def all(self, phase: Callable[Concatenate[Collector, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a phase of the collectors that override it."""
        for _, call in self._calls[phase.__name__]:
            call(*args, **kwargs)

    def end_step(self, *, collected: bool) -> None:
        """A step has ended, which was ``collected`` or not."""
        for due, call in self._calls["end_step"]:
            call(collected=collected and due.in_step)

    def __iter__(self) -> Iterator[Collector]:
        return (collector for collector, _ in self._all)


class OptimizerTurns:
    """The optimizers that have had their turn in the step in progress. In its turn, an optimizer steps or is skipped.

    A step ends when every optimizer has had its turn. In other loops (a critic that steps five times, an optimizer in an
    ``if``), the step ends just before an optimizer takes its second turn.
    """

    def __init__(self) -> None:
        self._thread = get_ident()
        self._stepped: set[int] = set()
        self._skipped: set[int] = set()

    @property
    def on_this_thread(self) -> bool:
        """Whether this thread has begun the latest turn. In a turn, other threads may evaluate the model."""
        return self._thread == get_ident()

    def begin(self, optimizer: Any) -> bool:
        """A turn begins on this thread. Returns whether the optimizer has had one in the step."""
        self._thread = get_ident()
        return self.taken(optimizer)

    def taken(self, optimizer: Any) -> bool:
        return id(optimizer) in self._stepped or id(optimizer) in self._skipped

    def take(self, optimizer: Any, *, skipped: bool = False) -> None:
        (self._skipped if skipped else self._stepped).add(id(optimizer))

    def complete(self, optimizers: Sequence[Any]) -> bool:
        """Whether each of ``optimizers`` has had its turn."""
        return len(self._stepped) + len(self._skipped) >= len(optimizers)

    @property
    def begun(self) -> bool:
        """Whether any optimizer has had its turn."""
        return bool(self._stepped or self._skipped)

    @property
    def mixed(self) -> bool:
        """Whether one optimizer has stepped and another was skipped."""
        return bool(self._stepped and self._skipped)

    @property
    def status(self) -> Status:
        """The status of the step if it ends now: complete if at least one optimizer has stepped."""
        return "complete" if self._stepped else "skipped"

    def clear(self) -> None:
        self._stepped.clear()
        self._skipped.clear()


class OtherOptimizers:
    """Optimizers that were not passed, and have stepped in the step in progress. One may have taken the place of a passed one.

    Attributes:
        forwards: The training forwards of the step so far.
        latest: The class of the one that has stepped last; empty if there is none.
        ids: Of the parameters that they have stepped before the passed ones.
    """

    def __init__(self) -> None:
        self.forwards, self.latest, self.ids = 0, "", set[int]()
        self.clear()

    def clear(self) -> None:
        """An optimizer that was passed takes part in the step: the others have stepped beside it."""
        self._replaced = ""
        self._stepped: dict[str, set[int]] = {}

    def restart(self) -> None:
        """A step begins."""
        self.forwards = 0
        self.ids.clear()
        self.clear()

    def stepped(self, old: Any, new: Any, ids: Collection[int], *, beside: bool, begun: bool) -> None:
        """An optimizer has stepped the parameters with these ids; all of ``old``, unless that is None.

        Args:
            beside: Whether an optimizer that was passed has had a turn in the step.
            begun: Whether the step has had a forward.
        """
        self.latest = name = type(new).__name__
        if not beside and (begun or old is None):  # one of all parameters may have called the passed one
            self.ids.update(ids)
        if begun and not beside:
            self._stepped.setdefault(name, set()).update(ids)
            self._replaced = self._replaced if old is None else REPLACED.format(new=name, old=type(old).__name__)

    def in_place(self, clock: Clock, now: Callable[[], Iterable[Any]]) -> str:
        """The warning that one has taken the place of a passed one; mostly empty.

        It has stepped all parameters of that one. Or all forwards were made, and it has stepped parameters of the model.

        Args:
            now: Returns the parameters of the model. Called if another optimizer has stepped and all forwards were made.
        """
        all_made = clock.known and not clock.learning and self.forwards >= clock.micro_steps
        if self._replaced or not self._stepped or not all_made:
            return self._replaced
        of_model = set(map(id, now()))
        new = next((name for name, ids in self._stepped.items() if not ids.isdisjoint(of_model)), "")
        self.clear()
        return IN_PLACE.format(new=new, forwards=clock.micro_steps) if new else ""

    def alone(self, passed: Sequence[Any], clock: Clock, called: bool) -> tuple[str, str] | None:
        """The cause and the text of the warning that no optimizer that was passed has ever stepped; None if nothing shows why.

        Args:
            called: Whether the model was called in training.
        """
        if max(clock.forward) >= clock.micro_steps:
            names = ", ".join(dict.fromkeys(type(one).__name__ for one in passed))
            return "no optimizer's step", NEVER_STEPPED.format(names=names)
        return ("no forward", NEVER_CALLED.format(name=self.latest)) if self.latest and not called else None


# --- Which recorded parameters each optimizer steps, and which ones a model got, lost or moved after it was attached.

SHARE: Final = 0.001
"""Largest share of the training thread's time that looking again may take."""


@final
class Rarely:
    """Says when to look again: at once, and then as often as takes a ``SHARE`` of the time. Never, once a look has raised."""

    def __init__(self) -> None:
        self._next = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    @contextmanager
    def looking(self) -> Iterator[None]:
        began, self._next = time.monotonic(), math.inf
        yield
        self._next = began + (time.monotonic() - began) / SHARE


LEFT_OUT: Final = (
    "{twice} stepped twice before {once} stepped once: the step ended between the two. Rows measured between them are recorded "
    "in the step that ended. docs/optimizers.md shows the rows of such steps."
)
AGAIN: Final = "Call set_monitor again with the same model and optimizers."
NEW: Final = (
    "Parameters were added to the model or replaced since set_monitor was called ({names}). They have no rows, and neither "
    f"have modules that were added or replaced. {AGAIN}"
)
GONE: Final = (
    "Parameters have left the model since set_monitor was called, or were replaced ({names}). From step {step} on they have no "
    "rows, unless they return."
)
LOOKED_LATE: Final = " In steps {first} to {last} their rows may be of tensors that the model did not use any more."
MOVED: Final = (
    "Parameters have other names than when set_monitor was called ({names}). Their rows keep the names of that time, which "
    f"other parameters have now. {AGAIN}"
)


class Said(NamedTuple):
    """What is said of a model's parameters.

    Attributes:
        cause: The cause of a warning.
        key: The key of a note of the manifest.
    """

    cause: str
    key: str
    text: str


@final
class LateParameters:
    """Compares the parameters of a model with those that it had when it was attached.

    Attributes:
        present: The recorded parameters that were in the model when it was looked at last.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached, self._parameters = attached, attached.parameters
        self._guarded_look = attached.failures.guarded("looking for new parameters", self.look)
        self._has_rows = measures_optimizers(attached.config)
        self._known = {id(one.tensor) for one in self._parameters}
        self.present, self._rarely = self._parameters, Rarely()
        self._looked: int | None = None
        self._new: Sequence[str] = ()
        self._moved: Sequence[str] = ()
        self._left: set[NamedParameter] = set()
        self._first: list[tuple[Any, str, Any]] = []
        self._gone: list[str] = []
        self._said: dict[str, str] = {}

    def look_again(self) -> None:
        """Look at the model if the last time is long enough ago, or if the first parameter of a chunk was replaced, as by
        ``load_state_dict(..., assign=True)``. In a backward the model may have others for its computation.
        """
        due = self._rarely.due or any(getattr(module, name, one) is not one for module, name, one in self._first)
        if self._has_rows and due and not self._attached.backend.modules.repeating():
            self._guarded_look()

    def look(self) -> None:
        """Look at the model, before rows of parameters are read in a step."""
        attached = self._attached
        with self._rarely.looking():
            found = [attached.backend.modules.parts(one) for one in attached.watch.chunks]
            parts = [NamedParts(list(one.modules), list(one.parameters)) for one in found]
            now = list(ModelNames(parts, attached.config).parameters())
        self._first = [place for one in parts for place in _first_parameter(one)]
        names = {(one.chunk, one.name): id(one.tensor) for one in now}
        # DistributedDataParallel around DTensors hides parameters that are used: they have gradients.
        has_gradient = attached.backend.tensors.has_gradient
        hidden = [one for one in self._parameters if (one.chunk, one.name) not in names and has_gradient(one.tensor)]
        ids = {id(one.tensor) for one in (*now, *hidden)}
        present = [one for one in self._parameters if id(one.tensor) in ids]
        self._new = [one.name for one in now if id(one.tensor) not in self._known]
        self._moved = [one.name for one in present if names.get((one.chunk, one.name), id(one.tensor)) != id(one.tensor)]
        self._leave([one.name for one in self.present if id(one.tensor) not in ids and one not in self._left])
        self._left.update(one for one in self._parameters if id(one.tensor) not in ids)
        if present != list(self.present):
            self.present = self._parameters if len(present) == len(self._parameters) else present

    def _leave(self, gone: Sequence[str]) -> None:
        step, looked = self._attached.clock.step, self._looked
        self._looked = step
        if gone:
            late = looked is not None and looked + 1 < step
            doubt = LOOKED_LATE.format(first=(looked or 0) + 1, last=step - 1) if late else ""
            self._gone.append(GONE.format(names=listed(gone), step=step) + doubt)

    def said(self) -> Iterator[Said]:
        """What has changed since the last call; mostly nothing."""
        new = NEW.format(names=listed(self._new)) if self._new else ""
        gone = " ".join([*self._gone, AGAIN]) if self._gone else ""
        moved = MOVED.format(names=listed(self._moved)) if self._moved else ""
        for cause, key, text in (
            ("new parameters", "new_parameters", new),
            ("parameters that left", "left_parameters", gone),
            ("parameters that moved", "moved_parameters", moved),
        ):
            if text and self._said.get(key) != text:
                self._said[key] = text
                yield Said(cause, key, text)


def _first_parameter(parts: NamedParts) -> Iterator[tuple[Any, str, Any]]:
    """The module that has the first parameter of a chunk, the parameter's name there, and the parameter."""
    for name, parameter in list(parts.parameters)[:1]:
        place, _, attribute = name.rpartition(".")
        module = dict(parts.modules).get(place)
        if getattr(module, attribute, None) is parameter:
            yield module, attribute, parameter


PASS_ALL: Final = "Pass every optimizer of the model: set_monitor(model, grad_acc_steps, [first, second])."
UNTRAINED: Final = f"None of them has a gradient so far, as in a target network. If something trains them: {PASS_ALL}"


class OptimizerParameters:
    """The recorded parameters of each optimizer, read in every step, since parameter groups may change.

    A parameter of several optimizers belongs to the first of them. A frozen parameter without an optimizer belongs to the
    first of all optimizers. A parameter that has left the model belongs to none: its name may be that of another one.

    Attributes:
        late: Finds the parameters that have left the model.
    """

    def __init__(self, attached: Attached) -> None:
        self._parameters, self._framework = attached.parameters, attached.framework
        self._has_gradient, self._failures = attached.backend.tensors.has_gradient, attached.failures
        self.late = LateParameters(attached)
        self._known = {id(one.tensor) for one in self._parameters}
        self._ids: dict[int, Collection[int] | None] = {}
        self._held: dict[int, ParameterSubset] = {}
        self._free: list[NamedParameter] = []
        self._of_several = set[int]()
        self._unstepped_said: bool | None = None
        self._divided = self.late.present

    def by(self, optimizer: Any, optimizers: Sequence[Any]) -> ParameterSubset:
        """The parameters that ``optimizer`` steps, one of ``optimizers``; None for all recorded ones."""
        ids = self._framework.held(optimizer)
        unchanged = id(optimizer) in self._ids and self._ids[id(optimizer)] is ids and self._divided is self.late.present
        if not unchanged:
            self._divide(optimizers)
        return self._held[id(optimizer)]

    def ids_of(self, optimizer: Any) -> Collection[int] | None:
        """The ids that ``by`` has found last."""
        return self._ids[id(optimizer)]

    def rewritten(self, others: Collection[int]) -> frozenset[tuple[int, str]]:
        """The parameters, by chunk and name, that more than one optimizer steps.

        Args:
            others: The ids of those that an optimizer has stepped that was not passed.
        """
        ids = self._of_several.union(others)
        return frozenset((one.chunk, one.name) for one in self._divided if id(one.tensor) in ids) if ids else frozenset()

    def left_out(self, twice: Any, once: Any, optimizers: Sequence[Any]) -> str:
        """The warning that a step ends because ``twice`` takes a second turn, before ``once`` has had its first."""
        return LEFT_OUT.format(twice=self._called(twice, optimizers), once=self._called(once, optimizers))

    def report_unstepped(self, optimizers: Sequence[Any], others: Collection[int]) -> str:
        """Warn of parameters that require gradients and that no known optimizer steps: once, and again if something begins to
        train them. Returns the warning; empty if there is nothing new.

        Args:
            others: The ids of those that an optimizer has stepped that was not passed.
        """
        if self._unstepped_said or (self._unstepped_said is False and not self._trains_free(others)):
            return ""
        self._divide(optimizers)
        free = set(self._free)
        gradients_are_seen = any(self._has_gradient(one.tensor) for one in self._parameters if one not in free)
        trained = self._unstepped_said = not free or not gradients_are_seen or self._trains_free(others)
        belong = counted(len(self._parameters), "parameter belongs", "parameters belong")
        names = listed([one.name for one in self._free])
        said = (
            f"{len(free)} of {belong} to no optimizer that was passed to set_monitor ({names}). They have no rows of "
            f"reduced gradients, weights, moments and updates. {PASS_ALL if trained else UNTRAINED}"
        )
        if free:
            (self._failures.warn if trained else self._failures.nothing_of)("parameters of no optimizer", said)
        return said if free else ""

    def _trains_free(self, others: Collection[int]) -> bool:
        return any(id(one.tensor) in others or self._has_gradient(one.tensor) for one in self._free)

    def _called(self, optimizer: Any, optimizers: Sequence[Any]) -> str:
        """The description of an optimizer in messages: its class, and the first parameter that it steps."""
        among = self.by(optimizer, optimizers)
        first = next((one.name for one in self._parameters if among is None or one in among), "")
        return f"{type(optimizer).__name__} of {first!r}"

    def _divide(self, optimizers: Sequence[Any]) -> None:
        self._ids = {id(one): self._framework.held(one) for one in optimizers}
        counts = Counter(one for ids in self._ids.values() for one in ids or ())
        self._of_several = {one for one, count in counts.items() if count > 1}
        if any(not self._known.issuperset(ids or ()) for ids in self._ids.values()):
            self.late.look()  # an optimizer steps new tensors, which may have replaced others
        self._divided, self._free = self.late.present, []
        if not all(ids is not None for ids in self._ids.values()):
            held = {of: dict.fromkeys(self._divided) for of in self._ids}
        else:
            held = self._by_owner(optimizers)
        self._held = {of: None if len(among) == len(self._parameters) else among for of, among in held.items()}

    def _by_owner(self, optimizers: Sequence[Any]) -> dict[int, dict[NamedParameter, None]]:
        owner = {one: of for of, ids in reversed(self._ids.items()) for one in ids or ()}
        held: dict[int, dict[NamedParameter, None]] = {of: {} for of in self._ids}
        for parameter in self._divided if optimizers else ():
            of = owner.get(id(parameter.tensor))
            if of is None and parameter.tensor.requires_grad:
                self._free.append(parameter)
            else:
                held[id(optimizers[0]) if of is None else of][parameter] = None
        return held
