"""The recording of one step of one rank: its directory, call counts, stacks, and gradients that have not arrived yet."""

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

from monitor.dump import files
from monitor.dump.backend import DumpReader
from monitor.dump.config import LEVELS, CallSelection, DumpConfig, Section
from monitor.dump.values import GradientSlot, TensorLeaf, file_name, filled
from monitor.failures import Failures
from monitor.recording.backend import HookSet
from monitor.recording.module_info import MACHINERY, MAX_FRAMES

# --- Only one debugger at a time intercepts API calls: two would patch the same functions and record each other's calls.


class ExclusiveInterception:
    """Held by at most one object per process, as long as that object lives."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._pid = 0

    def refuse_another(self, holder: object) -> None:
        """Raise ``RuntimeError`` if another object holds it."""
        now = self._holder() if self._holder is not None and self._pid == os.getpid() else None
        if now is not None and now is not holder:
            named = " or ".join(name for name, level in LEVELS.items() if level.apis)
            said = f"another PrecisionDebugger records the calls of APIs (level {named})"
            raise RuntimeError(f"{said}: call its stop() before this start().")

    def take(self, holder: object) -> None:
        self._holder, self._pid = weakref.ref(holder), os.getpid()

    def give_back(self, holder: object) -> None:
        if self._holder is not None and self._holder() is holder:
            self._holder = None


EXCLUSIVE_INTERCEPTION: Final = ExclusiveInterception()
"""A process has one, since a framework's functions exist once in a process."""

# --- The directory of a rank's step, and stale output in it.


def open_records(directory: Path, failures: Failures) -> files.Records:
    """Create the directory and its records. Renames stale output that another process has left there.

    Raises:
        BlockingIOError: Another process writes there.
        OSError: The directory cannot be created.
    """
    try:
        _rotate_stale_dump(directory, failures)
        directory.mkdir(parents=True, exist_ok=True)
        return files.Records(directory / files.FILE)
    except BlockingIOError:
        said = f"another process writes to {directory}: give each process its own number, start(rank_id=...)"
        raise BlockingIOError(said) from None


def _rotate_stale_dump(directory: Path, failures: Failures) -> None:
    records = directory / files.FILE
    left = os.path.lexists(records)
    if left and files.is_being_written(records):
        raise BlockingIOError
    if not left and not any(os.path.lexists(directory / name) for name in files.MAIN):
        return
    aside = _unused_path(directory)
    aside.parent.mkdir(exist_ok=True)
    directory.rename(aside)
    directory.mkdir()  # for the file of warnings
    held = "records of a process that was killed" if left else "the dump of an earlier run"
    todo = ": trainermon dump-recover completes it." if left else "."
    failures.warn(f"set aside {aside}", f"{directory} held {held}. It was moved to {aside}{todo}")


def _unused_path(directory: Path) -> Path:
    """An unused path, ``step0.left1/rank0`` for ``step0/rank0``, that is no step of the dump."""
    step = directory.parent
    places = (step.with_name(f"{step.name}.left{n}") / directory.name for n in itertools.count(1))
    return next(place for place in places if not os.path.lexists(place))


# --- Names of calls in the files.


class CallName(NamedTuple):
    """The name of a call in its step.

    Attributes:
        base: ``Module.conv1.Conv2d`` for a module, ``Functional.relu`` for an API.
        number: The number of earlier calls with the same base.
        of_module: Modules have the direction before the number, APIs after it.
    """

    base: str
    number: int
    of_module: bool

    def of(self, direction: str) -> str:
        """The name of its forward or its backward."""
        return f"{self.base}.{direction}.{self.number}" if self.of_module else f"{self.base}.{self.number}.{direction}"


# --- The Python stacks of calls. A program has few: each is written once, and referred to by its number.

_Key = tuple[tuple[CodeType, int], ...]


class Stacks:
    """Numbers the stacks of a step."""

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._unused = itertools.count()

    def here(self) -> tuple[int, list[str] | None]:
        """The number of the current stack. If it is new, also its frames, innermost first."""
        key = _frames(sys._getframe(1))
        number = self._numbers.get(key)
        if number is not None:
            return number, None
        number = self._numbers[key] = next(self._unused)  # two threads may number the same stack twice, which is harmless
        return number, [_frame_text(code, line) for code, line in key]


def _frames(frame: FrameType | None) -> _Key:
    """The frames of the user's program and of libraries, without the monitor's and those that call modules."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < MAX_FRAMES:
        if not str(frame.f_globals.get("__name__", "")).startswith(MACHINERY):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _frame_text(code: CodeType, line: int) -> str:
    return f"File {code.co_filename}, line {line}, in {code.co_name}, \n {linecache.getline(code.co_filename, line).strip()}"


class Backward:
    """The gradients of one call.

    Attributes:
        name: The name of the entry in the files.
        content: The tree, with slots.
        missing: The number of slots that are still empty.
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
        name: The name of the call.
        module: Its id.
        raised: Called when the module turns out to have raised.
    """

    name: CallName
    module: int
    raised: Callable[[], object]


class ThreadState(threading.local):
    """State that each thread has for itself."""

    def __init__(self) -> None:
        self.open_modules: list[OpenModule] = []
        self.reading = False


class Session:
    """Everything recorded between the first ``start`` of a step and ``step``.

    Attributes:
        until_end: Hooks on objects that may outlive the step's graph.
        closed: Whether the step is over. Later gradients belong to no step.
        pid: The process that opened the session.
    """

    def __init__(
        self,
        directory: Path,
        config: DumpConfig,
        framework: str,
        reader: DumpReader,
        writer: files.DumpWriter,
        failures: Failures,
    ) -> None:
        self.directory = directory
        self.selection = CallSelection(config.chosen)
        self._threads = ThreadState()
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
    def is_active(self) -> bool:
        """Whether the session is open and belongs to this process: a forked child records nothing."""
        return not self.closed and self.pid == os.getpid()

    @property
    def open_modules(self) -> list[OpenModule]:
        """The modules that this thread is calling, outermost first."""
        return self._threads.open_modules

    @property
    def reading(self) -> bool:
        """Whether the monitor itself is reading on this thread, so that its calls are not recorded."""
        return self._threads.reading

    def module_begins(self, module: OpenModule) -> None:
        """Make the module the parent of the calls that follow."""
        self._threads.open_modules.append(module)

    def module_ended(self, name: CallName) -> None:
        """The module has ended. Modules still open below it have raised."""
        places = [place for place, one in enumerate(self.open_modules) if one.name == name]
        if places:
            self._close_above(places[-1] + 1)
            self.open_modules.pop()

    def keep_open(self, calling: Sequence[int]) -> None:
        """Close open modules that are not being called any more: a framework may not report that they raised.

        Args:
            calling: The ids of the modules being called, outermost first, repeated for nested calls.
        """
        left = Counter(calling)
        for place, one in enumerate(self.open_modules):
            left[one.module] -= 1
            if left[one.module] < 0:
                self._close_above(place)
                break

    def _close_above(self, place: int) -> None:
        while len(self.open_modules) > place:
            self.open_modules.pop().raised()  # after the pop, so that the module is not its own parent

    def forget_open_modules(self) -> None:
        """Forget the open modules of every thread: their hooks are gone."""
        self._threads = ThreadState()

    @contextmanager
    def reading_in_progress(self) -> Iterator[None]:
        """A context for reading a tensor or its graph: calls inside it are the monitor's, not the program's."""
        thread = self._threads
        before, thread.reading = thread.reading, True
        try:
            yield
        finally:
            thread.reading = before

    def number(self, base: str) -> int:
        """The number of earlier calls of ``base`` in this step."""
        return next(self._counts.setdefault(base, itertools.count()))

    def has_numbered(self, base: str) -> bool:
        """Whether ``base`` was called in this step."""
        return base in self._counts

    def leaf(self, x: Any, name: str) -> TensorLeaf:
        """Read a tensor now."""
        self._failures.reraise_deferred()
        return self._reader.leaf(x, self._file(name) if self._config.task == "tensor" else None)

    def _file(self, name: str) -> str:
        """A file name that no other tensor of the step has. Several names may map to the same file name."""
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
        """The number of the current Python stack among those of the step."""
        number, frames = self._stacks.here()
        if frames is not None:
            self._put({"stack": number, "frames": frames})
        return number

    def enter(self, name: str, content: Any, parent: str | None = None, stack: int | None = None) -> None:
        """Pass an entry to the writer."""
        record = {"entry": name, "at": next(self._order), "parent": parent, "stack": stack, "content": content}
        self._put(record)

    def expect(self, backward: Backward, slot: GradientSlot) -> Callable[[Any], None]:
        """A function that stores the first gradient for ``slot``. Gradients of a second backward are ignored."""
        backward.missing += 1

        def take(gradient: Any) -> None:
            if gradient is None or not self.is_active or slot.leaf is not None:
                return
            with self.reading_in_progress():
                slot.leaf = self.leaf(gradient, slot.name)
            backward.missing -= 1
            backward.at = next(self._order)
            self._waiting[id(backward)] = backward
            if not backward.missing:
                self._enter_backward(backward)

        return take

    def flush(self) -> None:
        """Write gradients of calls that are incomplete, and wait until all records are in the file."""
        for backward in sorted(self._waiting.values(), key=lambda one: one.at):
            self._enter_backward(backward)
        self._writer.drain()

    def assemble(self) -> None:
        """Assemble the files from the records so far."""
        self._writer.drain()
        files.assemble(self.directory)

    def leave(self) -> None:
        """In a forked process: drop hooks and the records file, which belong to the parent."""
        self.until_end.remove()
        self._records.close()

    def close(self) -> None:
        """End the step and complete its files."""
        self.until_end.remove()
        if not self.is_active:
            return
        self.flush()
        self._warn_of_empty_selection()
        self.closed = True
        self._records.close()
        if damaged := files.finish(self.directory).damaged:
            self._failures.warn("damaged records", files.damage_found(damaged, self.directory))

    def _warn_of_empty_selection(self) -> None:
        """Warn if ``scope`` and ``list`` have selected no call: that is seldom intended."""
        chosen = self._config.chosen
        if self._counts and (chosen.scope or chosen.names) and next(self._order) == 0:
            said = f"scope {chosen.scope} and list {chosen.names} select none of the calls of this step"
            self._failures.warn("nothing chosen", f"{said}: run once without them, and take the names from dump.json.")

    def _enter_backward(self, backward: Backward) -> None:
        self._waiting.pop(id(backward), None)
        record = {"entry": backward.name, "at": backward.at, "parent": backward.parent, "stack": backward.stack}
        self._put({**record, "content": filled(backward.content)})

    def _put(self, record: dict[str, Any]) -> None:
        self._writer.put(files.DumpEntry(self._records, self.directory, record))

    def _new_directory(self, framework: str) -> None:
        self._records = open_records(self.directory, self._failures)
        keeps = self._config.task == "tensor"
        if keeps:
            (self.directory / files.DATA).mkdir(exist_ok=True)
        header = {"task": self._config.task, "level": self._config.level, "framework": framework}
        self._put({"header": {**header, "dump_data_dir": str((self.directory / files.DATA).absolute()) if keeps else None}})
