"""One step of one rank while it is recorded: its directory, how often each thing was called, what was caught so far."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monitor.capture.hooks import HookSet
from monitor.dump.assembly import assemble, finish
from monitor.dump.backend import Reader
from monitor.dump.config import DumpConfig
from monitor.dump.directories import begun
from monitor.dump.measured import Leaf, Slot
from monitor.dump.names import CallName
from monitor.dump.selection import Section, Selection
from monitor.dump.stacks import Stacks
from monitor.dump.values import file_name, filled
from monitor.dump.writer import DATA, Entry, Writer
from monitor.failures import Failures


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


class Thread(threading.local):
    """What a thread is at, with these values in each that asks."""

    def __init__(self) -> None:
        self.open_modules: list[CallName] = []
        self.open_ids: list[int] = []
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
    def open_modules(self) -> list[CallName]:
        """The modules that this thread is calling, outermost first, by the names of their forwards."""
        return self._threads.open_modules

    @property
    def reading(self) -> bool:
        """Whether what this thread calls now is called by us."""
        return self._threads.reading

    def module_begins(self, name: CallName, module: Any) -> None:
        """From here on it is the parent of what is called."""
        self._threads.open_modules.append(name)
        self._threads.open_ids.append(id(module))

    def module_ended(self, name: CallName) -> None:
        """What is still open below it has raised."""
        thread = self._threads
        while thread.open_modules:
            thread.open_ids.pop()
            if thread.open_modules.pop() == name:
                break

    def keep_open(self, calling: Sequence[int]) -> None:
        """Of what is open, what is being called: a framework need not tell of what has raised.

        Args:
            calling: The ids of modules, outermost first, each as often as it is being called.
        """
        thread, left = self._threads, Counter(calling)
        for place, one in enumerate(thread.open_ids):
            left[one] -= 1
            if left[one] < 0:
                del thread.open_ids[place:], thread.open_modules[place:]
                break

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
        self._failures.hand_back()
        return self._reader.leaf(x, self._file(name) if self._config.task == "tensor" else None)

    def _file(self, name: str) -> str:
        """A file that no other tensor of the step has: several names may become the same file."""
        candidates = (file_name(f"{name}.same{n}" if n else name) for n in itertools.count())
        file = next(one for one in candidates if one not in self._files)
        self._files.add(file)
        return file

    def wants(self, name: CallName, direction: Any, section: Section | None = None) -> bool:
        return self.selection.wants(direction, section) and self.selection.lists(
            name.of(direction), [module.of(direction) for module in self.open_modules]
        )

    def parent(self, direction: str) -> str | None:
        """The module that is being called."""
        return self.open_modules[-1].of(direction) if self.open_modules else None

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
        self.closed = True
        self._records.close()
        finish(self.directory)

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
