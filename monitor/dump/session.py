"""One step of one rank while it is recorded: its directory, how often each thing was called, what was caught so far."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from monitor.dump.backend import Reader
from monitor.dump.config import DumpConfig, Section, Selection
from monitor.dump.files import FILE, MAIN, Records, assemble, damage_found, finish, is_written
from monitor.dump.values import Leaf, Slot, file_name, filled
from monitor.dump.writer import DATA, Entry, Writer
from monitor.failures import Failures
from monitor.recording.module_info import MACHINERY, MAX_FRAMES
from monitor.recording.protocols import HookSet

# --- Who sees the calls of APIs: one debugger at a time, since each would stand in the way of the other and be seen by it.


class Turn:
    """Is had by one object of a process, as long as it lives."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._pid = 0

    def refuse_another(self, holder: object) -> None:
        """Raises ``RuntimeError`` if somebody else has it."""
        now = self._holder() if self._holder is not None and self._pid == os.getpid() else None
        if now is not None and now is not holder:
            said = "another PrecisionDebugger records the calls of APIs (level L1 or mix)"
            raise RuntimeError(f"{said}: call its stop() before this start().")

    def take(self, holder: object) -> None:
        self._holder, self._pid = weakref.ref(holder), os.getpid()

    def give_back(self, holder: object) -> None:
        if self._holder is not None and self._holder() is holder:
            self._holder = None


TURN: Final = Turn()
"""A framework's functions are there once in a process."""

# --- The directory of a rank's step, and what stands in it when it is begun.


def begun(directory: Path, failures: Failures) -> Records:
    """The directory is there, with records that are this process's own. What another process has left is set aside.

    Raises:
        BlockingIOError: Another process writes there.
        OSError: It cannot be made.
    """
    try:
        _set_aside(directory, failures)
        directory.mkdir(parents=True, exist_ok=True)
        return Records(directory / FILE)
    except BlockingIOError:
        said = f"another process writes to {directory}: give each process a number of its own, start(rank_id=...)"
        raise BlockingIOError(said) from None


def _set_aside(directory: Path, failures: Failures) -> None:
    records = directory / FILE
    left = os.path.lexists(records)
    if left and is_written(records):
        raise BlockingIOError
    if not left and not any(os.path.lexists(directory / name) for name in MAIN):
        return
    aside = _free(directory)
    aside.parent.mkdir(exist_ok=True)
    directory.rename(aside)
    directory.mkdir()  # where what is said is written, too
    held = "what a process had recorded that was killed" if left else "the dump of an earlier run"
    todo = ": trainermon dump-recover makes its files." if left else "."
    failures.warn(f"set aside {aside}", f"{directory} held {held}. It is in {aside} now{todo}")


def _free(directory: Path) -> Path:
    """``step0.left1/rank0`` for ``step0/rank0``: no step of the dump."""
    step = directory.parent
    places = (step.with_name(f"{step.name}.left{n}") / directory.name for n in itertools.count(1))
    return next(place for place in places if not os.path.lexists(place))


# --- What calls are called in the files.


class CallName(NamedTuple):
    """A call among those of its step.

    Attributes:
        base: ``Module.conv1.Conv2d`` of a module, ``Functional.relu`` of an API.
        number: How many calls of the same came before.
        of_module: Modules have the direction before the number, APIs behind it.
    """

    base: str
    number: int
    of_module: bool

    def of(self, direction: str) -> str:
        """The name of its forward or its backward."""
        return f"{self.base}.{direction}.{self.number}" if self.of_module else f"{self.base}.{self.number}.{direction}"


# --- The Python stacks that calls come from. A program has few: each is spelled once, and a number afterwards.

_Key = tuple[tuple[CodeType, int], ...]


class Stacks:
    """The stacks of a step."""

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._unused = itertools.count()

    def here(self) -> tuple[int, list[str] | None]:
        """The number of the stack that leads here, and where it is new its frames, innermost first."""
        key = _frames(sys._getframe(1))
        number = self._numbers.get(key)
        if number is not None:
            return number, None
        number = self._numbers[key] = next(self._unused)  # two threads that meet here have one each
        return number, [_spelled(code, line) for code, line in key]


def _frames(frame: FrameType | None) -> _Key:
    """Those of the user's program and of libraries, without ours and the machinery that calls modules."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < MAX_FRAMES:
        if not str(frame.f_globals.get("__name__", "")).startswith(MACHINERY):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _spelled(code: CodeType, line: int) -> str:
    return f"File {code.co_filename}, line {line}, in {code.co_name}, \n {linecache.getline(code.co_filename, line).strip()}"


class Backward:
    """The gradients of one call.

    Attributes:
        name: In the files.
        content: The tree, with slots.
        missing: How many slots are still empty.
    """

    def __init__(self, name: str, parent: str | None, stack: int | None) -> None:
        self.name = name
        self.parent = parent
        self.stack = stack
        self.content: dict[str, Any] = {}
        self.missing = 0
        self.at = 0


class OpenModule(NamedTuple):
    """A module that is being called.

    Attributes:
        name: Of the call.
        module: Its id.
        raised: What is to be done when it turns out to have raised.
    """

    name: CallName
    module: int
    raised: Callable[[], object]


class Thread(threading.local):
    """What a thread is at, with these values in each that asks."""

    def __init__(self) -> None:
        self.open_modules: list[OpenModule] = []
        self.reading = False


class Session:
    """What is recorded between the first ``start`` of a step and ``step``.

    Attributes:
        until_end: Hooks on what may outlive the step's graph.
        closed: Gradients that come later belong to no step.
        pid: The process that opened it.
    """

    def __init__(
        self, directory: Path, config: DumpConfig, framework: str, reader: Reader, writer: Writer, failures: Failures
    ) -> None:
        self.directory = directory
        self.selection = Selection(config.chosen)
        self._threads = Thread()
        self.until_end = HookSet()
        self.closed = False
        self._config, self._reader, self._writer, self._failures = config, reader, writer, failures
        self._counts: dict[str, Iterator[int]] = {}
        self._files: set[str] = set()
        self._order = itertools.count()
        self._stacks = Stacks()
        self._waiting: dict[int, Backward] = {}
        self.pid = os.getpid()
        self._new_directory(framework)

    @property
    def here(self) -> bool:
        """Whether this is the process that opened it: a child that was forked records nothing."""
        return not self.closed and self.pid == os.getpid()

    @property
    def open_modules(self) -> list[OpenModule]:
        """The modules that this thread is calling, outermost first."""
        return self._threads.open_modules

    @property
    def reading(self) -> bool:
        """Whether what this thread calls now is called by us."""
        return self._threads.reading

    def module_begins(self, module: OpenModule) -> None:
        """From here on it is the parent of what is called."""
        self._threads.open_modules.append(module)

    def module_ended(self, name: CallName) -> None:
        """What is still open below it has raised."""
        places = [place for place, one in enumerate(self.open_modules) if one.name == name]
        if places:
            self._close_above(places[-1] + 1)
            self.open_modules.pop()

    def keep_open(self, calling: Sequence[int]) -> None:
        """Of what is open, what is being called: a framework need not tell of what has raised.

        Args:
            calling: The ids of modules, outermost first, each as often as it is being called.
        """
        left = Counter(calling)
        for place, one in enumerate(self.open_modules):
            left[one.module] -= 1
            if left[one.module] < 0:
                self._close_above(place)
                break

    def _close_above(self, place: int) -> None:
        while len(self.open_modules) > place:
            self.open_modules.pop().raised()  # once it is no parent any more, its own least of all

    def forget_open_modules(self) -> None:
        """Of every thread: nobody is told of their ends any more."""
        self._threads = Thread()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While a tensor is read, or its graph: what that calls is none of the program's."""
        thread = self._threads
        before, thread.reading = thread.reading, True
        try:
            yield
        finally:
            thread.reading = before

    def number(self, base: str) -> int:
        """How often ``base`` was called before, in this step."""
        return next(self._counts.setdefault(base, itertools.count()))

    def leaf(self, x: Any, name: str) -> Leaf:
        """Read a tensor now."""
        self._failures.reraise_deferred()
        return self._reader.leaf(x, self._file(name) if self._config.task == "tensor" else None)

    def _file(self, name: str) -> str:
        """A file that no other tensor of the step has: several names may become the same file."""
        candidates = (file_name(f"{name}.same{n}" if n else name) for n in itertools.count())
        file = next(one for one in candidates if one not in self._files)
        self._files.add(file)
        return file

    def wants(self, name: CallName, direction: Any, section: Section | None = None) -> bool:
        return self.selection.wants(direction, section) and self.selection.lists(
            name.of(direction), [module.name.of(direction) for module in self.open_modules]
        )

    def parent(self, direction: str) -> str | None:
        """The module that is being called."""
        return self.open_modules[-1].name.of(direction) if self.open_modules else None

    def stack(self) -> int | None:
        """The Python stack that leads here, by its number among those of the step."""
        number, frames = self._stacks.here()
        if frames is not None:
            self._put({"stack": number, "frames": frames})
        return number

    def enter(self, name: str, content: Any, parent: str | None = None, stack: int | None = None) -> None:
        """Hand an entry to the writer."""
        record = {"entry": name, "at": next(self._order), "parent": parent, "stack": stack, "content": content}
        self._put(record)

    def expect(self, backward: Backward, slot: Slot) -> Callable[[Any], None]:
        """What takes the gradient that belongs into ``slot``; a second backward's is not taken."""
        backward.missing += 1

        def take(gradient: Any) -> None:
            if gradient is None or not self.here or slot.leaf is not None:
                return
            with self.at_work():
                slot.leaf = self.leaf(gradient, slot.name)
            backward.missing -= 1
            backward.at = next(self._order)
            self._waiting[id(backward)] = backward
            if not backward.missing:
                self._enter_backward(backward)

        return take

    def flush(self) -> None:
        """Enter gradients of calls of which not all have come, and have everything in the files."""
        for backward in sorted(self._waiting.values(), key=lambda one: one.at):
            self._enter_backward(backward)
        self._writer.drain()

    def assemble(self) -> None:
        """Make the files of what was recorded so far."""
        self._writer.drain()
        assemble(self.directory)

    def leave(self) -> None:
        """In a process that was forked: let go of what is the parent's."""
        self.until_end.remove()
        self._records.close()

    def close(self) -> None:
        """The step is over."""
        self.until_end.remove()
        if not self.here:
            return
        self.flush()
        self._warn_of_nothing()
        self.closed = True
        self._records.close()
        if damaged := finish(self.directory).damaged:
            self._failures.warn("damaged records", damage_found(damaged, self.directory))

    def _warn_of_nothing(self) -> None:
        """That a choice of names has chosen nothing is seldom what was meant."""
        chosen = self._config.chosen
        if self._counts and (chosen.scope or chosen.names) and next(self._order) == 0:
            said = f"scope {chosen.scope} and list {chosen.names} have chosen none of the calls of this step"
            self._failures.warn("nothing chosen", f"{said}: names are those that dump.json has without them.")

    def _enter_backward(self, backward: Backward) -> None:
        self._waiting.pop(id(backward), None)
        record = {"entry": backward.name, "at": backward.at, "parent": backward.parent, "stack": backward.stack}
        self._put({**record, "content": filled(backward.content)})

    def _put(self, record: dict[str, Any]) -> None:
        self._writer.put(Entry(self._records, self.directory, record))

    def _new_directory(self, framework: str) -> None:
        self._records = begun(self.directory, self._failures)
        keeps = self._config.task == "tensor"
        if keeps:
            (self.directory / DATA).mkdir(exist_ok=True)
        told = {"task": self._config.task, "level": self._config.level, "framework": framework}
        self._put({"header": {**told, "dump_data_dir": str((self.directory / DATA).absolute()) if keeps else None}})
