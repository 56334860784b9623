"""Records what compiled code has measured: gives the entries of a program's tape to the collectors, as hooks would have.

Compiled code makes entries in the order in which MindSpore executes it. They are replayed when an optimizer has stepped in
compiled code, and when Python sees the end of something. Then it is known which forwards had a backward: those that train.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from mindspore import nn
from mindspore.nn.cell import _pynative_executor

from monitor.mindspore.compiled import roles
from monitor.mindspore.compiled.order import Entry, beginnings, in_order, in_parts
from monitor.mindspore.compiled.program import ObservedCell, ObservedOptimizer, ObservedParameter, Program, Tap
from monitor.mindspore.tape import MARK, Measurements, TapedTensor, whole_steps_are_measured
from monitor.recording.module_calls import CallIndex
from monitor.recording.recorder import Recorder

REPLAYING: Final = ContextVar("replaying", default=False)
"""Whether hooks are called for compiled code that has run."""

_ATTRIBUTE: Final = "_monitored_program"
_LOCK: Final = threading.RLock()
"""Replays come from Python and from MindSpore's threads."""

MIXED: Final = (
    "Two forwards of the model run at the same time in compiled code. It is not known which of them its cells belong to, and "
    "they have no rows there. Compile a step for each micro-batch."
)
DROPPED: Final = (
    "Compiled code ran more forwards before their backwards than the monitor keeps. The activations "
    "and parameters' gradients of such steps have no rows. Pass the number of micro-batches as grad_acc_steps."
)
UNEQUAL: Final = (
    "Compiled code has computed several gradients of one parameter in a step: of several micro-batches, or several parts of "
    "one gradient. It does not show which is which, so such parameters have no rows of grad_unreduced. grad_reduced has the "
    "whole gradient."
)


def program_of(root: nn.Cell) -> Program | None:
    """The compiled code of a model, by its first chunk; None if compiled code cannot be observed."""
    attributes = vars(root)
    found: Program | None = attributes.get(_ATTRIBUTE)
    if found is None and whole_steps_are_measured():
        found = attributes[_ATTRIBUTE] = Program(replay)
    return found


def join(root: nn.Cell, first: nn.Cell) -> Program | None:
    """Let the root of a further chunk belong to the compiled code of the first one."""
    program = program_of(first)
    if program is not None:
        vars(root)[_ATTRIBUTE] = program
    return program


def flush(program: Program | None, *, island: bool = False) -> None:
    """Replay what compiled code has measured so far. Waits for it.

    Args:
        island: Whether a forward of the model from Python, which is part of training, has just ended.
    """
    if program is not None and program.is_compiled and not REPLAYING.get():
        _pynative_executor.sync()
        replay(program, whole=True, island=island)


def replay(program: Program, *, whole: bool = False, island: bool = False) -> None:
    """Replay the entries that are there. Does not raise.

    Args:
        whole: Whether compiled code has ended. Otherwise entries after the last step of an optimizer wait for the rest of their
            step: it is not known yet which forwards train.
        island: See ``flush``.
    """
    with _LOCK:
        token = REPLAYING.set(True)
        try:
            if program.tape is not None:
                Replay.of(program).run(program.tape.drain(), whole=whole, island=island)
        except Exception as error:
            if program.failures is not None:
                program.failures.report("recording compiled code", error, "Rows of this step are missing.")
        finally:
            REPLAYING.reset(token)


class Replay:
    """The entries of one program. It lives as long as the program: gradients may come later than their forwards."""

    def __init__(self, program: Program) -> None:
        self._known = weakref.ref(program)
        self._waiting: list[Entry] = []
        self._calls: dict[int, tuple[Any, CallIndex] | None] = {}
        self._roots: dict[int, tuple[ObservedCell, int]] = {}
        self._in_backward: set[int] = set()
        self._turns: dict[int, list[tuple[Tap, TapedTensor]]] = {}
        self._gradients: dict[ObservedParameter, list[TapedTensor]] = {}
        self._open: int | None = None
        self._ended: set[int] = set()
        self._island = self._mixed = False
        self._step = -1
        self._dropped = 0
        self._training: set[int] = set()
        self._parts: set[ObservedParameter] = set()

    @classmethod
    def of(cls, program: Program) -> Replay:
        if program.replay is None:
            program.replay = cls(program)
        found: Replay = program.replay
        return found

    def run(self, measured: Measurements, *, whole: bool, island: bool) -> None:
        """Replay entries in their order."""
        program = self._known()
        assert program is not None
        calls, numbers, sites = measured.calls.tolist(), measured.numbers.tolist(), measured.sites.tolist()
        self._dropped = max(self._dropped, measured.dropped)
        for place, tap in enumerate(measured.ids.tolist()):
            made = Entry(program.taps[tap], calls[place], numbers[place], _tensor(measured, place), sites[place])
            self._waiting.append(made)
        ends = [place for place, entry in enumerate(self._waiting, 1) if entry.tap.role == roles.TURN_ENDS]
        end = len(self._waiting) if whole else max(ends, default=0)
        entries, self._waiting = self._waiting[:end], self._waiting[end:]
        self._replay(entries, island=island)

    def _replay(self, entries: Sequence[Entry], *, island: bool) -> None:
        program = self._known()
        if entries and program is not None:
            program.absences.replayed()
        self._island, self._open, self._mixed = island, None, False
        self._forget_ended_step()
        self._training = self._trained(entries)
        steps: dict[str, Callable[[Tap, int, int, TapedTensor], None]] = {
            roles.BEGIN: self._begins,
            roles.EVALUATION: self._evaluates,
            roles.INPUT: self._forward,
            roles.OUTPUT: self._result,
            roles.INPUT_GRAD: self._gradient,
            roles.OUTPUT_GRAD: self._gradient_of_result,
            roles.PARAMETER: self._of_parameter,
            roles.TURN_ENDS: self._turn_ends,
        }
        entries = in_order(entries)
        begins = beginnings(entries, self._warn)
        waiting = {call for calls in begins.values() for _, call in calls}
        parts = in_parts(entries, self._training)
        early: dict[int, list[Entry]] = {}
        for place, entry in enumerate(entries):
            self._parts = parts.get(place, self._parts)
            for cell, call in begins.get(place, ()):
                self._cell_begins(cell, call)
                waiting.remove(call)
            if entry.call in waiting:
                early.setdefault(entry.call, []).append(entry)
                continue
            for one in (*early.pop(entry.call, ()), entry):
                steps.get(one.tap.role, self._of_optimizer)(one.tap, one.call, one.number, one.x)
        self._take_gradients()

    def _trained(self, entries: Sequence[Entry]) -> set[int]:
        """The forwards of the model that have a backward; none if one of them was dropped: its micro-step is not known."""
        training = {entry.call for entry in entries if _is_gradient_of_root(entry.tap)}
        begun = {entry.number for entry in entries if entry.tap.role == roles.BEGIN} | self._roots.keys()
        if any(call <= self._dropped for call in training - begun):
            self._warn("dropped forwards", DROPPED)
            return set()
        return training

    def _begins(self, tap: Tap, _call: int, number: int, _x: TapedTensor) -> None:
        if self._root_begins(tap.owner, number, ordered=tap.position == roles.ORDERED):
            self._begin(tap.owner, number)

    def _cell_begins(self, cell: ObservedCell, call: int) -> None:
        """Begin a call of a cell inside the model."""
        if not self._mixed and (self._open is not None or self._island):
            self._begin(cell, call)

    def _begin(self, cell: ObservedCell, number: int) -> None:
        if cell.watcher is not None and cell.watcher.collector.due.now:
            call = cell.watcher.begin(repeating=False)
            self._calls[number] = None if call is None else (cell.watcher, call.place)

    def _root_begins(self, cell: ObservedCell, number: int, *, ordered: bool) -> bool:
        """Begin a forward of the model. False if it is not part of training.

        Args:
            ordered: Whether calls begin in the order of the program.
        """
        if self._open is not None and self._open not in self._ended:
            if not ordered:
                self._mixed = True
                self._warn("mixed forwards", MIXED)
            self._root_ends(self._open)  # the tensors of the forward come later, and are known by its number
        self._open = None
        if number not in self._training or not cell.begins:
            return False
        self._take_gradients()
        root = cell.cell()
        count, *others = cell.begins
        count(root, (), {})
        with _inactive(cell.collector.recorder):
            for begins in others:
                begins(root, (), {})
        self._open = number
        self._roots[number] = cell, cell.collector.clock.micro_step(cell.chunk)
        return True

    def _evaluates(self, _tap: Tap, _call: int, _number: int, _x: TapedTensor) -> None:
        self._open = None

    def _forward(self, tap: Tap, call: int, _number: int, x: TapedTensor) -> None:
        known = self._calls.get(call)
        if known is None:
            return
        watcher, place = known
        choice = watcher.fitting(tap.role, getattr(watcher.wanted, tap.role), tap.found)
        if choice.wanted and choice.takes(tap.position) and watcher.collector.due.now:
            watched = watcher.series("actv", tap.role + tap.suffix, place.call, x)
            watcher.collector.recorder.record(watched, x, place.micro_step)

    def _result(self, tap: Tap, call: int, number: int, x: TapedTensor) -> None:
        if call in self._roots and call not in self._ended:
            self._root_ends(call)
        if x.dtype:
            self._forward(tap, call, number, x)

    def _root_ends(self, call: int) -> None:
        self._ended.add(call)
        cell, _ = self._roots[call]
        for ends in cell.ends:
            ends(cell.cell(), (), {}, ())

    def _gradient(self, tap: Tap, call: int, _number: int, x: TapedTensor) -> None:
        known = self._calls.get(call)
        if known is None:
            return
        watcher, place = known
        choice = watcher.fitting(tap.role, getattr(watcher.wanted, tap.role), tap.found)
        if choice.wanted and choice.takes(tap.position):
            slot = tap.role.removesuffix("_grad") + tap.suffix
            gate = watcher.collector.gate
            gate.take(watcher.expected("actv_grad", slot, place.call), x, gate.clock.step, place.micro_step)

    def _gradient_of_result(self, tap: Tap, call: int, number: int, x: TapedTensor) -> None:
        if call in self._roots and call not in self._in_backward:
            self._in_backward.add(call)
            cell, micro_step = self._roots[call]
            cell.collector.backward_begins(cell.chunk, micro_step, None)
        if x.dtype:
            self._gradient(tap, call, number, x)

    def _of_parameter(self, tap: Tap, _call: int, _number: int, x: TapedTensor) -> None:
        self._gradients.setdefault(tap.owner, []).append(x)

    def _take_gradients(self) -> None:
        """Record the gradients of parameters of one backward."""
        gradients, self._gradients = self._gradients, {}
        for parameter, every in gradients.items():
            if parameter in self._parts:
                self._warn("parts of gradients", UNEQUAL)
            elif parameter.read is not None:
                parameter.read(every[0])

    def _of_optimizer(self, tap: Tap, call: int, number: int, x: TapedTensor) -> None:
        self._turns.setdefault(number if tap.role == roles.TURN_BEGINS else call, []).append((tap, x))

    def _turn_ends(self, tap: Tap, call: int, _number: int, _x: TapedTensor) -> None:
        """Record the step of an optimizer. It may end the step of training."""
        self._take_gradients()
        optimizer: ObservedOptimizer = tap.owner
        entries = self._turns.pop(call, [])
        by_role = {role: {one.position: x for one, x in entries if one.role == role} for role in _OF_TURNS}
        reduced, before, after = (by_role[role] for role in _OF_TURNS)
        gradients = [reduced.get(place) for place in range(max(reduced, default=-1) + 1)]
        program = self._known()
        if program is not None:
            program.warn_of_unreached(optimizer.state)
        if optimizer.stepped is not None:
            optimizer.stepped(gradients, _by_id(optimizer, before), _by_id(optimizer, after))
        self._forget_ended_step()

    def _forget_ended_step(self) -> None:
        """Forget the calls of a step that has ended."""
        program = self._known()
        step = -1 if program is None or program.clock is None else program.clock.step
        if step != self._step:
            self._step = step
            self._calls.clear()
            self._roots.clear()
            self._in_backward.clear()
            self._ended.clear()
            self._open = None

    def _warn(self, key: str, said: str) -> None:
        program = self._known()
        if program is not None:
            program.warn(key, said)


@contextmanager
def _inactive(recorder: Recorder) -> Iterator[None]:
    """Collectors must not read at the beginning of a forward that has ended."""
    active, recorder.active = recorder.active, False
    try:
        yield
    finally:
        recorder.active = active


_OF_TURNS: Final = (roles.REDUCED, roles.BEFORE, roles.AFTER)


def _by_id(optimizer: ObservedOptimizer, found: dict[int, TapedTensor]) -> dict[int, TapedTensor]:
    return {id(optimizer.state[place]): x for place, x in found.items() if place < len(optimizer.state)}


def _is_gradient_of_root(tap: Tap) -> bool:
    return tap.role == roles.OUTPUT_GRAD and tap.owner.chunk is not None


def _tensor(measured: Measurements, place: int) -> TapedTensor:
    """An entry as a tensor; without a dtype if it holds no measurements."""
    if measured.flags[place] & MARK:
        return TapedTensor(measured.rows[place], None, (), "")
    shape, dtype = measured.layouts[measured.layout[place]]
    histogram = None if measured.histograms is None else measured.histograms[place]
    return TapedTensor(measured.rows[place], histogram, shape, dtype)
