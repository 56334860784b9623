"""The cells, parameters and optimizers of a model that compiled code measures: GRAPH_MODE, and code inside ``@jit``.

``monitor.mindspore.compiled.taps`` is what MindSpore compiles. ``monitor.mindspore.compiled.replay`` records what was measured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from mindspore import Parameter, Tensor, nn
from mindspore.nn.cell import _pynative_executor

from monitor.failures import Failures
from monitor.mindspore.compiled import roles
from monitor.mindspore.compiled.absences import UNREACHED, Absences
from monitor.mindspore.compiled.bytecode import BytecodeRuns
from monitor.mindspore.compiled.constructs import has_taps, install, is_installed, uninstall
from monitor.mindspore.compiled.fallback import Fallback
from monitor.mindspore.compiled.operations import ByOperations, Operations
from monitor.mindspore.compiled.parameter_tape import ParameterTape
from monitor.mindspore.compiled.rewriting import Rewriting
from monitor.mindspore.compiled.taps import functions_of
from monitor.mindspore.hooks import is_exporting
from monitor.mindspore.tape import Layout, Tape, new_tape, operations_are_used, wait_for_turn
from monitor.recording.backend import Removable
from monitor.recording.recorder import Recorder
from monitor.recording.step_clock import Clock

RECOMPUTED: Final = (
    "Cells that are recomputed have no rows in compiled code: MindSpore runs their operations twice there. Take recompute() "
    "off to record them."
)


HIDDEN: Final = (
    "A {name} takes or returns lists or dictionaries in compiled code, or very deep tuples. Tensors in these have no rows "
    "there. Pass tuples or keyword arguments."
)

NO_TAPE: Final = (
    "Compiled code of too many models is being recorded in this process. This model has no rows of it. Close monitors of other "
    "models before set_monitor."
)

MOST_FORWARDS: Final = 64
"""How many forwards without a backward are kept at least."""

LACKING: Final = {
    "shape": "Compiled code has tensors of dynamic shape. MindSpore cannot measure these, and they have no rows. Compile with "
    "fixed shapes to record them.",
    "layout": "Compiled code has tensors of wide integers, float64 or complex numbers, or of sizes that MindSpore's operations "
    "do not measure. They have no rows.",
    "room": "A cell has more arguments and results in compiled code than the monitor has room for. Some have no rows.",
    "sparse": "Compiled code has sparse gradients, which have no rows.",
    "reference": "Cells take or return Parameters, or views such as those of mint.transpose, in compiled code. These arguments "
    "and results have no rows of actv and actv_grad: MindSpore would confuse Parameters.",
}
"""What the monitor says of tensors that compiled code cannot measure."""


class Tap(NamedTuple):
    """A place in compiled code that makes entries.

    Attributes:
        owner: The cell, parameter or optimizer to which the entries belong.
        suffix: The path of the tensor (``TensorPath``).
        position: Its position (``TensorPath``); for an optimizer the index of a gradient or of its state.
        found: The number of arguments or results of the call.
    """

    owner: Any
    role: str
    suffix: str = ""
    position: int = 0
    found: int = 1


@dataclass(eq=False)
class ObservedCell:
    """A cell with taps.

    Attributes:
        roles: What its taps measure.
        watcher: Records its entries; None while it is not watched.
        chunk: For a root: the number of its chunk; None for other cells.
        collector: For a root: counts its forwards.
        begins, ends: For a root: called before and after each training forward, as the hooks of a root.
    """

    cell: weakref.ref[nn.Cell]
    number: int
    roles: set[str] = field(default_factory=set)
    watcher: Any = None
    chunk: int | None = None
    collector: Any = None
    begins: list[Callable[..., object]] = field(default_factory=list)
    ends: list[Callable[..., object]] = field(default_factory=list)


@dataclass(eq=False)
class ObservedParameter:
    """A parameter whose gradient is measured.

    Attributes:
        read: Receives its gradient; None while it is not recorded.
        is_computed: Whether a backward computes it, compiled or not.
    """

    number: int
    read: Callable[[Any], object] | None = None
    is_computed: bool = False


@dataclass(eq=False)
class ObservedOptimizer:
    """An optimizer with taps.

    Attributes:
        state: Its weights and moments.
        kinds: Returns the kinds that are recorded.
        stepped: Receives the gradients, and its state before and after the step, by the id of the parameter.
    """

    number: int
    state: Sequence[Parameter]
    kinds: Callable[[], frozenset[str]]
    stepped: Callable[[Sequence[Any], Mapping[int, Any], Mapping[int, Any]], object] | None


@dataclass(frozen=True)
class Handle:
    """A handle that calls a function."""

    remove: Callable[[], None]


class Handles:
    """Several handles as one."""

    def __init__(self, *handles: Removable) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Program:
    """The compiled code that contains one model.

    Attributes:
        tape: Receives the entries; None before the compiler has seen a tap, and while the model is not recorded.
        taps: The taps by the id of their entries.
        observed: The observed cells, parameters and optimizers by number.
        most_forwards: How many forwards without a backward are kept.
        clock: Counts the steps; None before the model has a root.
        recorder: Records them; None likewise.
        replay: What is known of the step in progress.
        note: Adds a note to the manifest; None while no optimizer is followed.
        notes: The notes so far: what compiled code has no rows of.
    """

    def __init__(self, replay: Callable[[Program], object]) -> None:
        self._replay = replay
        self._follower: threading.Thread | None = None
        self.tape: Tape | ParameterTape | None = None
        self._resting: Tape | ParameterTape | None = None
        self.is_on = False
        self.taps: list[Tap] = []
        self.failures: Failures | None = None
        self.clock: Clock | None = None
        self.recorder: Recorder | None = None
        self._prepared: list[Removable] = []
        self.replay: Any = None
        self.note: Callable[[str, str], object] | None = None
        self.notes: dict[str, str] = {}
        self.observed: dict[int, Any] = {}
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._slots: dict[tuple[Any, ...], Tensor] = {}
        self._taps_by_key: dict[tuple[Any, ...], int] = {}
        self._checked = self._is_taken = False
        self._has_dynamic_shapes = False
        self.most_forwards = MOST_FORWARDS
        self.by_operations = ByOperations(self) if operations_are_used() else None
        self.settings: tuple[float, bool, bool, bool] | None = None
        self.functions = functions_of(self)
        self.fallback, self.absences = Fallback(self), Absences(self)
        self.bytecode, self.rewriting = BytecodeRuns(self), Rewriting(self)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a model has no monitor."""

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def is_compiled(self) -> bool:
        """Whether the compiler has seen a tap."""
        return bool(self.taps)

    def set_up(self, eps: float, *, higher: bool, check_sums: bool, magnitudes: bool) -> None:
        """Set what is measured from now on. The model is recorded again, if it was not."""
        changed = self.settings != (eps, higher, check_sums, magnitudes)
        self.settings = eps, higher, check_sums, magnitudes
        if changed and self.by_operations is not None:
            self._forget_code()
            self.by_operations.set_up(*self.settings)
        self._wake_tape()
        if changed:
            self._set_up_tape()

    def _forget_code(self) -> None:
        """Code that was compiled earlier has no rows any more."""
        self.tape = self._resting = None
        self._slots, self._taps_by_key, self.taps = {}, {}, []
        self.absences.tape_is_gone()

    def _wake_tape(self) -> None:
        """Continue with the tape that code knows which was compiled earlier. If it is gone, this code has no rows."""
        resting, self._resting = self._resting, None
        if resting is None:
            return
        if resting.wake():
            self.tape = resting
            self._set_up_tape()
        else:
            self._forget_code()

    def bound(self, forwards: int) -> None:
        """Let a step of training have so many forwards."""
        self.most_forwards = max(MOST_FORWARDS, 2 * forwards)
        self._set_up_tape()

    def check(self) -> None:
        """Measure check sums of gradients, weights and moments in code that is compiled from now on."""
        self._checked = True

    def follow(self) -> None:
        """Replay each step that compiled code ends, on a thread: MindSpore's thread must not wait for Python."""
        if isinstance(self.tape, Tape) and (self._follower is None or not self._follower.is_alive()):
            arguments = weakref.ref(self), self.tape.number, self._replay
            self._follower = threading.Thread(target=_follow, args=arguments, name="monitor-compiled-steps", daemon=True)
            self._follower.start()

    def unfollow(self) -> None:
        """End the thread."""
        follower, self._follower = self._follower, None
        if isinstance(self.tape, Tape) and follower is not None and follower is not threading.current_thread():
            self.tape.stop_waiting()
            follower.join()

    def warn(self, key: str, said: str) -> None:
        """Warn once, and note it in the manifest. If nothing is recorded yet, the manifest takes ``notes`` when that begins."""
        if self.failures is None:
            return
        self.failures.nothing_of(key, said)
        if self.notes.get(key := f"compiled_code: {key}") != said:
            self.notes[key] = said
            if self.note is not None and self.recorder is not None and self.recorder.active:
                self.failures.guarded("noting what has no rows", self.note)(key, said)

    # What the compiler calls.

    def has_tape(self) -> bool:
        """Whether compiled code can make entries. A process has a limited number of tapes, so the first tap opens one."""
        self.fallback.takes_part = True
        if is_exporting() or self._is_taken or self.bytecode.depth:
            return False
        if self.by_operations is not None:
            can_measure = self.by_operations.can_measure()
            if self.tape is not self.by_operations.tape:
                self.tape = self.by_operations.tape
                self._set_up_tape()
            return can_measure
        if self.tape is None:
            self.tape = new_tape()
            self._set_up_tape()
        if self.tape is None:
            self.warn("no tape", NO_TAPE)
        return self.tape is not None

    @property
    def operations(self) -> Operations | None:
        """The operations of MindSpore that measure in compiled code; None if the operator in C does, or nothing."""
        return None if self.by_operations is None else self.by_operations.functions

    def _set_up_tape(self) -> None:
        if self.tape is not None and self.settings is not None:
            eps, higher, check_sums, magnitudes = self.settings
            self.tape.set_up(eps, higher=higher, check_sums=check_sums, magnitudes=magnitudes)
            self.tape.bound(self.most_forwards)
            self.tape.turn(self.is_on)

    def slot(self, number: int, role: str, suffix: str, position: int, found: int) -> Tensor:
        """The slot of a tap."""
        key = number, role, suffix, position, found
        if key not in self._slots:
            assert isinstance(self.tape, Tape)
            owner = self.observed[number]
            mark = role in roles.MARKS or (isinstance(owner, ObservedCell) and role not in owner.roles)
            checked = self._checked and not isinstance(owner, ObservedCell) and not mark
            of_model = isinstance(owner, ObservedCell) and owner.chunk is not None
            self._slots[key] = self.tape.slot(
                len(self.taps),
                gated=True,
                checked=checked,
                mark=mark,
                turn=role == roles.TURN_ENDS,
                forward=of_model and role in (roles.BEGIN, roles.EVALUATION),
                backward=of_model and role == roles.OUTPUT_GRAD,
            )
            self.taps.append(Tap(owner, role, suffix, position, found))
            self.follow()
        return self._slots[key]

    def slot_of_operations(
        self, number: int, role: str, suffix: str = "", position: int = 0, found: int = 1, *, layout: Layout | None = None
    ) -> Tensor | None:
        """The slot of a tap for operations of MindSpore; None if there is no place for it.

        Args:
            layout: The shape and dtype of the tensor; None for a mark.
        """
        assert self.by_operations is not None
        key = number, role, suffix, position, found
        if key not in self._taps_by_key:
            self._taps_by_key[key] = len(self.taps)
            self.taps.append(Tap(self.observed[number], role, suffix, position, found))
        return self.by_operations.slot(self._taps_by_key[key], self.taps[self._taps_by_key[key]], layout)

    def takes(self, number: int, role: str) -> bool:
        """Whether a tap is needed: outputs have marks if they are not recorded, and so has the gradient of a root's."""
        owner = self.observed.get(number)
        if owner is None:  # the compiler did not know the number
            return False
        return role in owner.roles or role == roles.OUTPUT or (owner.chunk is not None and role == roles.OUTPUT_GRAD)

    def is_root(self, number: int) -> bool:
        """Whether calls of a cell are forwards of the model."""
        return self.observed[number].chunk is not None

    def observes(self, number: int) -> bool:
        """Whether a cell has taps."""
        owner = self.observed.get(number)
        cell = None if owner is None else owner.cell()
        if cell is None or not self.has_tape():
            return False
        if getattr(cell, "_has_config_recompute", False):
            self.warn("recomputed in compiled code", RECOMPUTED)
            return False
        return True

    def evaluates(self, number: int, training: bool) -> bool:
        """Whether a call of a cell is the evaluation of a model."""
        return self.observed[number].chunk is not None and not training

    def hides(self, number: int) -> None:
        """A call of a cell has lists or dictionaries, whose tensors are not measured."""
        owner = self.observed.get(number)
        name = "cell" if owner is None else type(owner.cell()).__name__  # the compiler may not know the number
        self.warn(f"structures of {number}", HIDDEN.format(name=name))

    def has_fixed(self, shape: Sequence[int] | None, *, gradient: bool = False) -> bool:
        """Whether a tensor has a fixed shape. Gradients have none, whatever the compiler says, if activations have none."""
        if shape is None or any(size is None or size < 0 for size in shape):
            self._has_dynamic_shapes = True
            self.lacks("shape")
            return False
        return not (gradient and self._has_dynamic_shapes)

    def lacks(self, what: str) -> None:
        """Compiled code has tensors that it cannot measure."""
        self.warn(f"{what} in compiled code", LACKING[what])

    def reads(self, number: int, kind: str) -> bool:
        """Whether an optimizer's gradients, or its state before or after a step, are recorded."""
        if self._prepared:
            return True
        kinds = self.observed[number].kinds()
        wanted = {
            roles.REDUCED: ("grad_reduced",),
            roles.BEFORE: ("param_origin", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
            roles.AFTER: ("param_updated", "exp_avg_updated", "exp_avg_sq_updated", "max_exp_avg_sq_updated"),
        }
        return not kinds.isdisjoint(wanted[kind])

    def measures(self, phase: str) -> bool:
        """Whether the operator in C measures code, and its steps."""
        return self.by_operations is None and self.fallback.has_taps and not self.absences.said_of(phase)

    def is_measured_by(self, tapes: Sequence[Parameter]) -> bool:
        """Whether MindSpore's operations measure code that writes to these."""
        used = None if self.by_operations is None else self.by_operations.tape
        return used is not None and self.fallback.has_taps and any(one is used.rows for one in tapes)

    def compiled(self, executor: Any, phase: str, others: Sequence[Any]) -> None:
        """Code is about to be executed, in which ``others`` have taps."""
        self.absences.compiled(executor, phase)
        self.absences.compared(others)

    def arrives(self, number: int) -> bool:
        """A gradient of a parameter is computed in compiled code. Whether it is measured."""
        owner = self.observed.get(number)
        if owner is not None:
            owner.is_computed = True
        return self.has_tape()

    # What hooks call.

    def roots(self) -> list[nn.Cell]:
        return [
            root
            for one in self.observed.values()
            if isinstance(one, ObservedCell) and one.chunk is not None and (root := one.cell()) is not None
        ]

    def cells_of_optimizers(self) -> list[nn.Cell]:
        found = [(known(), self.observed[number]) for known, number in self._numbers.values()]
        return [cell for cell, owner in found if cell is not None and isinstance(owner, ObservedOptimizer)]

    def warn_of_unreached(self, parameters: Iterable[Parameter]) -> None:
        """Warn of parameters whose gradients are recorded and not computed, unless those of no parameter are."""
        if not self.fallback.has_hooks:
            return
        known = [(one.name, self.observed[number]) for one in parameters if (number := self._number_of(one)) is not None]
        missing = [name for name, owner in known if owner.read not in (None, _ignore) and not owner.is_computed]
        if missing and len(missing) < len(known):
            self.warn("unreached", UNREACHED.format(count=len(missing), name=missing[0]))

    def cell(self, cell: nn.Cell) -> ObservedCell:
        """The cell as an observed one. From now on its compiled code has taps."""
        number = self._number_of(cell)
        if number is None:
            number = self._new_number(cell)
            self.observed[number] = ObservedCell(weakref.ref(cell), number)
        found: ObservedCell = self.observed[number]
        self._install(cell, number)
        return found

    def _install(self, cell: nn.Cell, number: int) -> None:
        if not self.fallback.has_taps:
            return
        owner, functions = self.observed[number], self.functions
        of_optimizer = isinstance(owner, ObservedOptimizer)
        made_by = functions.optimizer(number, tuple(owner.state)) if of_optimizer else functions.cell
        install(cell, number, made_by, functions)
        if not is_installed(cell, functions):
            self.absences.taken.append(weakref.ref(cell))
            self._is_taken |= of_optimizer  # no step would end, and entries would wait for ever

    def inside(self, number: int) -> set[int | None]:
        """The numbers of the cells inside a cell."""
        cell = self.observed[number].cell()
        return set() if cell is None else {self._number_of(one) for _, one in cell.cells_and_names() if one is not cell}

    def cells_with_taps(self) -> list[nn.Cell]:
        return [cell for cell, _ in self._cells() if has_taps(cell)]

    def take_out(self) -> Iterator[Callable[[], None]]:
        """Uninstall all taps of cells, and return functions that install them again."""
        for cell, number in self._cells():
            if is_installed(cell, self.functions):
                uninstall(cell)
                yield partial(self._install, cell, number)

    def _cells(self) -> Iterator[tuple[nn.Cell, int]]:
        """The cells that are still there, with their numbers."""
        for known, number in tuple(self._numbers.values()):
            if isinstance(cell := known(), nn.Cell):
                yield cell, number

    def parameter(self, parameter: Parameter, read: Callable[[Any], object]) -> Removable:
        """Observe the gradient of a parameter, in compiled code and in the dynamic graph."""
        number = self._number_of(parameter)
        if number is None:
            number = self._new_number(parameter)
            self.observed[number] = ObservedParameter(number)
        found: ObservedParameter = self.observed[number]
        found.read = read
        if self.by_operations is not None:
            self.by_operations.make()  # the hook names them

        def read_and_note(gradient: Any) -> None:
            found.is_computed = True
            read(gradient)

        def remove() -> None:
            found.read = None

        return Handles(self.fallback.hook(parameter, read_and_note, self.functions.gradient(number)), Handle(remove))

    def optimizer(
        self,
        optimizer: nn.Cell,
        state: Sequence[Parameter],
        kinds: Callable[[], frozenset[str]],
        stepped: Callable[[Sequence[Any], Mapping[int, Any], Mapping[int, Any]], object],
    ) -> Removable:
        """Observe the steps of an optimizer in compiled code."""
        number = self._number_of(optimizer)
        if number is None:
            number = self._new_number(optimizer)
        found = self.observed[number] = ObservedOptimizer(number, state, kinds, stepped)
        self._retarget(number, found)
        self._install(optimizer, number)

        def remove() -> None:
            found.stepped = None
            uninstall(optimizer)

        return Handle(remove)

    def prepare(self, cells: Iterable[nn.Cell], parameters: Iterable[Parameter]) -> None:
        """Have code that is compiled from now on measure everything that may be recorded later."""
        for cell in cells:
            self.cell(cell).roles |= {roles.INPUT, roles.OUTPUT, roles.INPUT_GRAD, roles.OUTPUT_GRAD}
        for parameter in parameters if not self._prepared else ():
            self._prepared.append(self.parameter(parameter, _ignore))

    def begin(self) -> None:
        """Measure from now on. The model may have been trained without a monitor before."""
        _pynative_executor.sync()
        self.replay = None
        self.notes.clear()
        if self.tape is not None:
            self.tape.drain()
        self.turn(on=True)
        self.fallback.begin()
        self.bytecode.begin()
        self.rewriting.begin()
        self.absences.begin()
        self.follow()

    def turn(self, *, on: bool) -> None:
        """Whether code with taps makes entries."""
        self.is_on = on
        if self.tape is not None:
            self.tape.turn(on)

    def release(self) -> None:
        """Leave the cells as they were. Code that was compiled with taps keeps them, and makes no entries."""
        self.turn(on=False)
        self.fallback.end()
        self.bytecode.end()
        self.rewriting.end()
        while self._prepared:
            self._prepared.pop().remove()
        for owner in self.observed.values():
            if isinstance(owner, ObservedCell) and (cell := owner.cell()) is not None:
                uninstall(cell)
        self.unfollow()
        if self.tape is not None:
            self.tape.rest()
            self._resting, self.tape = self.tape, None

    def _number_of(self, one: Any) -> int | None:
        known = self._numbers.get(id(one))
        return known[1] if known is not None and known[0]() is one else None

    def _new_number(self, one: Any) -> int:
        number = len(self.observed) + 1
        self._numbers[id(one)] = weakref.ref(one), number
        return number

    def _retarget(self, number: int, owner: Any) -> None:
        """Let entries of code that was compiled earlier belong to ``owner``."""
        self.taps = [tap._replace(owner=owner) if tap.owner.number == number else tap for tap in self.taps]


def _follow(known: weakref.ref[Program], number: int, replay: Callable[[Program], object]) -> None:
    while wait_for_turn(number):
        program = known()
        if program is None:
            return
        replay(program)
        del program  # or it would live until the next step


def _ignore(_: Any) -> None:
    """No gradient is recorded yet."""
