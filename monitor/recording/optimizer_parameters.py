"""Which recorded parameters each optimizer steps, and which ones a model got, lost or moved after it was attached."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from monitor.recording.attached_model import Attached, ModelNames, NamedParameter, ParameterSubset
from monitor.recording.late_modules import Rarely
from monitor.recording.phases import listed, measures_optimizers

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
        self._gone: list[str] = []
        self._said: dict[str, str] = {}

    def look_again(self) -> None:
        """Look at the model if the last time is long enough ago. In a backward it may have others for its computation."""
        if self._has_rows and self._rarely.due and not self._attached.backend.modules.repeating():
            self._guarded_look()

    def look(self) -> None:
        """Look at the model, before rows of parameters are read in a step."""
        attached = self._attached
        with self._rarely.looking():
            parts = [attached.backend.modules.parts(one) for one in attached.watch.chunks]
            now = list(ModelNames(parts, attached.config).parameters())
        ids = {id(one.tensor) for one in now}
        names = {(one.chunk, one.name): id(one.tensor) for one in now}
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


class OptimizerParameters:
    """The recorded parameters of each optimizer, read in every step, since parameter groups may change.

    A parameter of several optimizers belongs to the first of them. A frozen parameter without an optimizer belongs to the
    first of all optimizers. A parameter that has left the model belongs to none: its name may be that of another one.

    Attributes:
        late: Finds the parameters that have left the model.
    """

    def __init__(self, attached: Attached) -> None:
        self._parameters, self._framework = attached.parameters, attached.framework
        self.late = LateParameters(attached)
        self._known = {id(one.tensor) for one in self._parameters}
        self._ids: dict[int, Collection[int] | None] = {}
        self._held: dict[int, ParameterSubset] = {}
        self._free: list[NamedParameter] = []
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

    def left_out(self, twice: Any, once: Any, optimizers: Sequence[Any]) -> str:
        """The warning that a step ends because ``twice`` takes a second turn, before ``once`` has had its first."""
        return LEFT_OUT.format(twice=self._called(twice, optimizers), once=self._called(once, optimizers))

    def unstepped_warning(self, optimizers: Sequence[Any]) -> str:
        """The warning that no known optimizer steps some trained parameters; empty if each has an optimizer."""
        self._divide(optimizers)
        count, names = len(self._free), listed([one.name for one in self._free])
        said = (
            f"{count} of {len(self._parameters)} parameters belong to no optimizer that was passed to set_monitor "
            f"({names}). They have no rows of reduced gradients, weights, moments and updates. Pass every optimizer of "
            "the model: set_monitor(model, grad_acc_steps, [first, second])."
        )
        return said if count else ""

    def _called(self, optimizer: Any, optimizers: Sequence[Any]) -> str:
        """The description of an optimizer in messages: its class, and the first parameter that it steps."""
        among = self.by(optimizer, optimizers)
        first = next((one.name for one in self._parameters if among is None or one in among), "")
        return f"{type(optimizer).__name__} of {first!r}"

    def _divide(self, optimizers: Sequence[Any]) -> None:
        self._ids = {id(one): self._framework.held(one) for one in optimizers}
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
