"""Compiles without the monitor what MindSpore does not compile with it, or compiles to other computations.

The two functions of Python through which MindSpore compiles are patched while a model is observed. If a compilation raises, it
is tried again without the hooks of parameters, and then also without the taps of cells and optimizers. If one of these
succeeds, the compiled code of the model has fewer rows from there on, and one warning says so. Otherwise the program receives
the error that it has without a monitor.

Taps may change last bits of training. Unless a user accepts that (``tape.COMPILED_VARIABLE``), code is compiled without taps
first. A whole graph is then compiled with them, and executed with them if both graphs have the same computations.
"""

from __future__ import annotations

import os
import random
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

import mindspore as ms
import numpy as np
from mindspore import Parameter
from mindspore.nn.cell import _cell_graph_executor

from monitor.failures import LOGGER, Failures
from monitor.mindspore.compiled.computations import Computations, computations
from monitor.mindspore.hooks import on_gradient
from monitor.mindspore.tape import ON_REQUEST, changes_are_accepted
from monitor.recording.backend import Removable
from monitor.recording.patches import CallListener, CallPatch

if TYPE_CHECKING:
    from monitor.mindspore.compiled.copies import GradientCopies
    from monitor.mindspore.compiled.program import Program

EVERYTHING: Final = 0
WITHOUT_HOOKS: Final = 1
WITHOUT_TAPS: Final = 2
LEVELS: Final = (EVERYTHING, WITHOUT_HOOKS, WITHOUT_TAPS)
"""What is compiled: all, no hooks of parameters, or the program as without a monitor."""

LOST: Final = {
    WITHOUT_HOOKS: "MindSpore cannot compile this model with hooks of its parameters ({error}). It was compiled without them, "
    "and grad_unreduced has no rows in compiled code. Parameters below stop_gradient are a known cause: set requires_grad to "
    "False for them before set_monitor to record the others.",
    WITHOUT_TAPS: "MindSpore cannot compile this model with the monitor's operators ({error}). It was compiled without them, "
    "and from now on compiled code of the model has rows of weights and moments only. Watch fewer cells with targets, or train "
    "without @jit in PYNATIVE_MODE, to record it.",
}
"""What the monitor says when it compiles less."""

LONG_S: Final = 10.0
"""Seconds of a compilation that make a user wonder."""
AGAIN: Final = (
    "MindSpore has compiled a graph in %.0f s, and compiles it again with the monitor's operators, which may take a few times "
    "as long. It does so once for each graph. Fewer kinds and targets take less."
)
CHANGED: Final = (
    "With the monitor's operators, MindSpore would compile other computations for this model, or this is unknown because loops "
    "and branches on tensors hide it. Last bits of training could change. So the model was compiled without these operators, "
    "and from now on its compiled code has rows of weights and moments only. Train in PYNATIVE_MODE without @jit to record it, "
    f"or {ON_REQUEST}."
)

OVERTAKEN: Final = (
    "A hook was registered after the monitor's for a parameter of compiled code. The monitor's cannot be put back before it, "
    "so grad_unreduced has no rows of such parameters. Register hooks before set_monitor."
)
UNCACHED: Final = (
    "MindSpore's compile cache is not used while this monitor is attached. Code from the cache would have no rows, or those of "
    "another process. So code is compiled in each run."
)
MOST_CHARACTERS: Final = 200


class CompilerListener(CallListener):
    """Sees what MindSpore compiles."""

    def succeeded(self, others: Sequence[Fallback], executor: Any, phase: str) -> None:
        """Code was compiled, now or earlier, and is about to be executed.

        Args:
            others: The programs that may have taps in it.
            phase: The name of the code.
        """


class ParameterHooks(CompilerListener, ABC):
    """Hooks of parameters that are taken out while something is compiled without them.

    Attributes:
        takes_part: Whether the compiler has called a function of the monitor since the compilation began.
    """

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []
        self.takes_part = False

    @property
    @abstractmethod
    def failures(self) -> Failures | None:
        """Where failures are reported; None if the program is gone, or was never recorded."""

    @abstractmethod
    def warn(self, cause: str, said: str) -> None:
        """Warn once of each cause."""

    def begin(self) -> None:
        """Follow compilations from now on."""
        self.end()
        for patch in COMPILERS:
            patch.add(self)

    def end(self) -> None:
        for patch in COMPILERS:
            patch.remove(self)

    def hook(
        self, parameter: Parameter, read: Callable[[Any], object], measure: Callable[[Any], Any] | None = None
    ) -> Removable:
        """Hook a parameter (``on_gradient``), except while something is compiled without hooks."""
        return _Hook(parameter, partial(on_gradient, parameter, read, measure), self._hooks)

    def loses(self, level: int) -> bool:
        """Whether less is compiled at a level."""
        return level == WITHOUT_HOOKS and bool(self._hooks)

    def fall_back(self, level: int, said: str) -> None:
        """Accept that less was compiled, at a level. Hooks remain, since Python calls them too."""

    @contextmanager
    def at(self, level: int) -> Iterator[None]:
        """Let MindSpore see what is compiled at a level."""
        failures = self.failures
        if level == EVERYTHING or failures is None:
            yield
            return
        put_back = list[Callable[[], object]]()
        failures.guarded("taking hooks out", partial(self._take_out, level, put_back))()
        try:
            yield
        finally:
            for one in put_back:
                failures.guarded("putting hooks back", one)()

    def _take_out(self, level: int, put_back: list[Callable[[], object]]) -> None:
        del level  # hooks are out at each but EVERYTHING
        for hook in tuple(self._hooks):
            if hook.take_out():
                put_back.append(hook.put_back)
            else:
                self.warn("hooks after the monitor's", OVERTAKEN)


class HooksOfPython(ParameterHooks):
    """Hooks of parameters where no operator measures in compiled code: Python alone calls them.

    MindSpore cannot compile some, such as those of parameters below ``stop_gradient``. No rows are lost without them.
    """

    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self._failures = failures

    @property
    def failures(self) -> Failures:
        return self._failures

    def warn(self, cause: str, said: str) -> None:
        self._failures.warn(cause, said)

    def hook(
        self, parameter: Parameter, read: Callable[[Any], object], measure: Callable[[Any], Any] | None = None
    ) -> Removable:
        if not self._hooks:
            self.begin()
        return super().hook(parameter, read, measure)


class Fallback(ParameterHooks):
    """Takes hooks and taps of one program out, and puts them back.

    Attributes:
        has_hooks, has_taps: False from when the program was compiled without them until it is observed anew.
        parts: The names of code that was compiled without them because it is a part of the dynamic graph.
    """

    def __init__(self, program: Program | GradientCopies) -> None:
        super().__init__()
        self._known = weakref.ref(program)
        self.has_hooks = self.has_taps = True
        self.parts: set[str] = set()

    @property
    def program(self) -> Program | GradientCopies | None:
        """The program, if it still exists."""
        return self._known()

    @property
    def failures(self) -> Failures | None:
        program = self.program
        return None if program is None else program.failures

    def warn(self, cause: str, said: str) -> None:
        program = self.program
        if program is not None:
            program.warn(cause, said)

    def end(self) -> None:
        self.has_hooks = self.has_taps = True
        super().end()

    def loses(self, level: int) -> bool:
        return super().loses(level) or (level == WITHOUT_TAPS and self.has_taps)

    def fall_back(self, level: int, said: str) -> None:
        """The program has fewer rows from now on. Without some of its taps, the others have no use."""
        program = self.program
        if program is None:
            return
        self.has_hooks = False
        program.warn(f"compiling {level}", said)
        if level == WITHOUT_TAPS:
            self.has_taps = False
            program.turn(on=False)  # steps without taps are not counted, so the others would have wrong numbers
            deque(program.take_out(), maxlen=0)

    def succeeded(self, others: Sequence[Fallback], executor: Any, phase: str) -> None:
        program = self.program
        if program is not None and program.failures is not None:
            there = [found for one in others if one.takes_part and (found := one.program) is not None]
            program.failures.guarded("looking at compiled code", program.compiled)(executor, phase, there)

    def _take_out(self, level: int, put_back: list[Callable[[], object]]) -> None:
        super()._take_out(level, put_back)
        program = self.program
        if level == WITHOUT_TAPS and program is not None:
            put_back.extend(program.take_out())


class _Hook:
    """The hook of a parameter, which can be taken out for a while."""

    def __init__(self, parameter: Parameter, register: Callable[[], Removable], among: list[_Hook]) -> None:
        self._parameter, self._register, self._among = parameter, register, among
        self._function: Any = None
        among.append(self)
        self.put_back()

    def put_back(self) -> None:
        """Register it, unless it is registered: MindSpore removes no hooks from before a call that raised."""
        if self._function not in self._parameter.hooks():
            self._handle = self._register()
            self._function = self._parameter.hooks()[-1]

    def take_out(self) -> bool:
        """Take it out. False if it must not be put back: hooks run in the order of registration, and another one follows."""
        is_last = self._parameter.hooks()[-1:] == [self._function]
        self._handle.remove()
        if not is_last and self._function not in self._parameter.hooks():
            self._among.remove(self)
            return False
        return True

    def remove(self) -> None:
        self._handle.remove()
        if self in self._among:
            self._among.remove(self)


# --- The patches.


class _CompilerPatch(CallPatch):
    """Patches a function that compiles. Its listeners are the models that are observed, and those who follow executions."""

    def _patched(self, original: Any) -> Any:
        @wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            listeners: Any = self._listeners if self._ours is patched else ()
            living: list[CompilerListener] = [one for known in listeners if (one := known()) is not None]
            hooked = [one for one in living if isinstance(one, ParameterHooks)]
            programs = [one for one in hooked if isinstance(one, Fallback)]
            compile_ = partial(original, *args, **kwargs)
            with _without_cache([one for one in programs if one.has_taps]):
                result = _proven(hooked, programs, _Compilation(_as_first(compile_), args)) if hooked else compile_()
            for one in living:
                one.succeeded(programs, args[0], _phase(result))
            return result

        return patched


def _compilers() -> Iterator[_CompilerPatch]:
    """MindSpore's compilers of cells and of functions. They have moved between versions."""
    of_cells = type(_cell_graph_executor)
    for owner in (of_cells, getattr(sys.modules[of_cells.__module__], "_JitExecutor", None)):
        if owner is not None:
            yield _CompilerPatch(owner, "compile")


COMPILERS: Final = tuple(_compilers())


@contextmanager
def _without_cache(programs: Sequence[Fallback]) -> Iterator[None]:
    """A while in which MindSpore neither reads nor writes its compile cache, if models are observed."""
    known = [program for one in programs if (program := one.program) is not None]
    if not known or not _caches():
        yield
        return
    for program in known:
        program.warn("compile cache", UNCACHED)
    ms.set_context(enable_compile_cache=False)
    try:
        yield
    finally:
        ms.set_context(enable_compile_cache=True)


def _caches() -> bool:
    asked = ms.get_context("enable_compile_cache")
    return bool(asked) or (asked is None and os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1")


def _as_first(compile_: Callable[[], Any]) -> Callable[[], Any]:
    """A function that compiles, and can be repeated: random operators get the seeds that they have without a monitor.

    MindSpore counts what random operators it has compiled, and has a seed for each.
    """
    before, after = dict(_counted()), list[dict[Any, int]]()

    def run() -> Any:
        _set_seeds(before)
        result = compile_()
        after.append(dict(_counted()))
        _set_seeds(after[0])
        return result

    return run


def _counted() -> dict[Any, int]:
    """MindSpore's counts of random operators, by seed; private, so they may be missing in other versions."""
    found: dict[Any, int] = getattr(sys.modules[ms.set_seed.__module__], "_KERNEL_SEED", {})
    return found


def _set_seeds(counts: dict[Any, int]) -> None:
    _counted().clear()
    _counted().update(counts)


class _Drawn:
    """What Python has drawn of its random numbers, and of NumPy's."""

    def __init__(self) -> None:
        self._of_python, self._of_numpy = random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        """Draw the same numbers again, since a network draws constants while it is compiled.

        Only then: threads may draw samples of a data set meanwhile.
        """
        random.setstate(self._of_python)
        np.random.set_state(self._of_numpy)


class _Compilation:
    """A call of one of MindSpore's compilers, which can be repeated.

    Attributes:
        run: Compiles. Code that is there already is returned.
    """

    def __init__(self, run: Callable[[], Any], args: Sequence[Any]) -> None:
        self.run = run
        self._executor, self._of = args[0], args[1]

    @property
    def is_of_mindspore(self) -> bool:
        """Whether the compiled function is MindSpore's own: its optimizers have some."""
        return str(getattr(getattr(self._executor, "fn", None), "__module__", "")).startswith("mindspore.")

    def known(self) -> int:
        """How much compiled code there is."""
        return len(self._compiled())

    def computations(self, result: Any) -> Computations | None:
        """What was compiled, as far as it can be told."""
        return computations(self._executor, _phase(result))

    def forget(self, result: Any) -> None:
        """Compile anew the next time."""
        self._compiled().discard(_phase(result))

    def _compiled(self) -> set[str]:
        """The phases of which there is code: those of the cell, or those of all functions."""
        found = getattr(self._of, "compile_cache", None)
        if found is None:
            found = getattr(sys.modules[type(self._executor).__module__], "ms_compile_cache", None)
        return found if found is not None else set()


def _phase(result: Any) -> str:
    """A cell's compiler also returns whether it has compiled anything."""
    return str(result[0] if isinstance(result, tuple) else result)


def _proven(hooked: Sequence[ParameterHooks], programs: Sequence[Fallback], compilation: _Compilation) -> Any:
    """What is compiled. Without the user's consent it has taps only if these change no computation."""
    if changes_are_accepted() or not any(one.has_taps for one in programs):
        return _compiled(hooked, compilation.run)
    known, drawn, began = compilation.known(), _Drawn(), time.monotonic()
    with _at(WITHOUT_TAPS, hooked):
        result = compilation.run()
    if compilation.known() == known:  # compiled before, with taps or without
        return result
    if ms.get_context("mode") != ms.GRAPH_MODE:  # the backward of a part is not in its graph
        for one in () if compilation.is_of_mindspore else programs:
            one.parts.add(_phase(result))
        return result
    if (took := time.monotonic() - began) >= LONG_S:
        LOGGER.info(AGAIN, took)
    expected = compilation.computations(result)
    compilation.forget(result)
    tapped = _compiled(hooked, compilation.run)
    measured = [one for one in programs if one.has_taps and one.takes_part]
    found = compilation.computations(tapped)
    alike = expected is not None and found is not None and found.returned == expected.returned
    drew_again = expected is not None and found is not None and found.differs_in_constants(expected)
    executed = tapped
    if drew_again or not (alike or not measured):
        compilation.forget(tapped)
        if drew_again:
            drawn.put_back()
        with _at(WITHOUT_TAPS, hooked):
            executed = compilation.run()
        for one in measured:
            one.fall_back(WITHOUT_TAPS, CHANGED)
    if _phase(executed) != _phase(result):
        # The code of an earlier step was deleted meanwhile, which had the key of these arguments. Without a monitor MindSpore
        # compiles again at the next call, and random operators begin anew.
        compilation.forget(executed)
    return executed


def _compiled(hooked: Sequence[ParameterHooks], compile_: Callable[[], Any]) -> Any:
    said, failed = "", Exception()
    for one in hooked:
        one.takes_part = False
    for level in LEVELS:
        losing = [one for one in hooked if one.loses(level)]
        if said and not losing:
            continue
        try:
            with _at(level, hooked):
                result = compile_()
        except Exception as error:
            said, failed = said or _first_line(error), error
            continue
        # A hook may fail before the compiler has called a function of its program.
        for one in [one for one in losing if one.takes_part] or losing:
            one.fall_back(level, LOST[level].format(error=said))
        return result
    raise failed


@contextmanager
def _at(level: int, hooked: Sequence[ParameterHooks]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in hooked:
            stack.enter_context(one.at(level))
        yield


def _first_line(error: Exception) -> str:
    said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return said if len(said) <= MOST_CHARACTERS else said[:MOST_CHARACTERS] + "…"
