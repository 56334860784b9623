"""Watches the user's configuration file while training runs, and edits single values of it in place."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path as FilePath
from threading import Event, Lock, Thread
from typing import Any, Final, NamedTuple

from filelock import FileLock, Timeout

from monitor.config import ConfigError, MonitorConfig
from monitor.config.jsonc import SPACE_OR_COMMENT, Document, JsonError, Path, parse, path_text, shown
from monitor.config.loading import config_in, content_of
from monitor.coordinator.output import NO_LOCKS_HERE, write_whole
from monitor.failures import LOGGER, Failures

# --- Edits one value in the text of a configuration file. Comments, order, spacing and newlines stay.

_STEP: Final = re.compile(r'\.([A-Za-z_][A-Za-z0-9_]*)|\[(0|[1-9][0-9]{0,8})\]|\[("(?:[^"\\]|\\.)*")\]')
_REST_OF_LINE: Final = re.compile(r"(?:[ \t]+|/\*[\s\S]*?\*/|//[^\n]*)*")
_NEWLINE: Final = re.compile(r"\r?\n")


class EditError(ValueError):
    """A value cannot be set at the given path. The message says why."""


def path_of(key: str) -> Path:
    """Parse a path as users write it: ``alert.rules[0].rule_name``, ``targets["h.0.mlp"].input``.

    Raises:
        EditError: ``key`` is not a path.
    """
    path: list[str | int] = []
    text, at = f".{key}", 0
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None or (not path and step[1] is None):
            raise EditError(f'{key!r} names no field: write it like format, alert.dump or targets["h.0.mlp"].input')
        path.append(step[1] or (int(step[2]) if step[2] else json.loads(step[3])))
        at = step.end()
    return tuple(path)


def edited(text: str, path: Path, value: Any) -> str:
    """``text`` with ``value`` at ``path``: replaces the value there, or becomes the last member of the enclosing object.

    Args:
        text: A file as ``monitor.config.jsonc`` parses it.
        value: In the types of ``json.loads``.

    Raises:
        JsonError: ``text`` is not JSON.
        EditError: The enclosing value is not an object, or the list has no such element.
    """
    document = parse(text)
    if path in document.spans:
        start, end = document.spans[path]
        return text[:start] + _json_text(value) + text[end:]
    around = _innermost(document, path)
    for name in reversed(path[len(around) + 1 :]):
        value = {name: value}
    return _with_member(text, document, around, f"{_json_text(path[len(around)])}: {_json_text(value)}")


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _innermost(document: Document, path: Path) -> Path:
    """The path of the object that gets a new member. Raises ``EditError``."""
    around = next(path[:end] for end in range(len(path) - 1, -1, -1) if path[:end] in document.spans)
    held = document.value
    for step in around:
        held = held[step]
    if not isinstance(held, dict):
        where = path_text(around) if around else "the file"
        raise EditError(f"{path_text(path)} cannot be set: {where} is {shown(held)}, which is not an object with fields")
    if numbers := [step for step in path[len(around) :] if isinstance(step, int)]:
        raise EditError(f"{path_text(path)} cannot be set: there is no element {numbers[0]}; set the whole list")
    return around


def _with_member(text: str, document: Document, around: Path, member: str) -> str:
    members = [span for path, span in document.spans.items() if len(path) == len(around) + 1 and path[:-1] == around]
    start, _ = document.spans[around]
    if not members:
        return text[: start + 1] + member + text[start + 1 :]
    last = max(members)[1]
    comma = _comma_after(text, last)
    line_end = _end_of_line(text, comma or last)
    indent = _indent_of_members(text, start, members)
    if line_end is None or indent is None:  # all on one line
        at = comma or last
        return f"{text[:at]}{'' if comma else ','} {member}{',' if comma else ''}{text[at:]}"
    newline = "\r\n" if text.startswith("\r\n", line_end) else "\n"
    before = text[: comma or last] + ("" if comma else ",") + text[comma or last : line_end]
    return f"{before}{newline}{indent}{member}{',' if comma else ''}{text[line_end:]}"


def _comma_after(text: str, at: int) -> int | None:
    """The index after the next comma; None where the object ends without a comma."""
    while skipped := SPACE_OR_COMMENT.match(text, at):
        at = skipped.end()
    return at + 1 if text.startswith(",", at) else None


def _end_of_line(text: str, at: int) -> int | None:
    """The index of the next newline, if only comments lie in between; otherwise None."""
    rest = _REST_OF_LINE.match(text, at)
    end = at if rest is None else rest.end()
    if text.startswith("\n", end) and text.startswith("\r", end - 1) and end > at:
        end -= 1  # a comment took the first half of the newline
    return end if _NEWLINE.match(text, end) else None


def _indent_of_members(text: str, start: int, members: list[tuple[int, int]]) -> str | None:
    """The white space before the last member that begins a line; None if no member begins a line."""
    for at, _ in sorted(members, reverse=True):
        line = text[text.rfind("\n", start, at) + 1 : at]
        if "\n" in text[start:at] and (found := re.match(r'([ \t]*)"', line)):
            return found[1]
    return None


LOCK_S: Final = 5.0
"""Timeout for the lock. Editing takes milliseconds: a process that holds the lock for longer is stuck."""

FRESH_NS: Final = 3_000_000_000
"""A file that changed less than this ago may change again with the same timestamp: some clocks tick every two seconds."""


class Refused(NamedTuple):
    """The file now holds a configuration that cannot be used.

    Attributes:
        reason: Names the field, the value and what is allowed.
        content: Digest of the file's content.
    """

    reason: str
    content: str


class FileWatch:
    """Reports each change of the file's content once. For one thread.

    The file is read when its time, size or inode differ from the last look, or when its time is too recent to tell. An
    unusable file is read twice before it is reported: some editors write in place, others remove the file for a moment.

    Args:
        known: The configuration that the file last held.
    """

    def __init__(self, path: str, known: MonitorConfig) -> None:
        self.known = known
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._content = ""
        self._doubtful = ""
        self._refused = ""

    def look(self, now_ns: int) -> MonitorConfig | Refused | None:
        """The file's new configuration; None if unchanged since the last look. ``now_ns`` comes from ``time.time_ns``."""
        stamp = _stamp(self._path)
        if stamp is not None and stamp == self._stamp and not self._doubtful:
            return None
        try:
            content = _regular(self._path)
            found = _digest(content)
            config = None if found == self._content else config_in(self._path, content, dynamic=True)
        except ConfigError as error:
            return self._bad(Refused(str(error), _digest(str(error).encode())))
        self._doubtful = ""
        # A stamp taken before the content can only be too old, and is looked at again.
        self._stamp = stamp if stamp is None or now_ns - stamp[0] > FRESH_NS else None
        if config is None:
            return None
        self._content, self._refused = found, ""
        return self._news(config)

    def holds(self, content: bytes) -> bool:
        """Whether ``content`` is the file's last seen content and was usable."""
        return _digest(content) == self._content and not self._doubtful and not self._refused

    def wrote(self, content: bytes, config: MonitorConfig) -> None:
        """Note that this process wrote the file, so the change is not reported as the user's."""
        self._content, self.known = _digest(content), config
        self._stamp = None

    def _news(self, config: MonitorConfig) -> MonitorConfig | None:
        """None if only comments, spacing or order changed."""
        changed, self.known = config != self.known, config
        return config if changed else None

    def _bad(self, refused: Refused) -> Refused | None:
        if refused.content == self._refused:
            return None
        if refused.content != self._doubtful:
            self._doubtful = refused.content
            return None
        self._refused, self._doubtful = refused.content, ""
        self._content = ""  # a return to the earlier content is read again, and changes nothing
        return refused


def change_file(
    path: str, edits: Mapping[Path, Any], may: Callable[[bytes], bool] = lambda _: True
) -> tuple[bytes, MonitorConfig] | None:
    """Set values in the configuration file ``path``: all or none. Everything else stays as it was.

    Args:
        edits: Values in the types of ``json.loads``, by their path.
        may: Called with the file's content. If it returns False, the file is not changed and None is returned.

    Returns:
        The content written and its configuration. Content that is not a usable configuration is not written.

    Raises:
        ConfigError: The file cannot be read, or is not a usable configuration before or after the edit.
        EditError: A value cannot be set at its path.
        OSError: The file cannot be written, or another process does not release its lock.
    """
    real = FilePath(os.path.realpath(os.path.expanduser(path)))  # a symbolic link stays a link
    with _Locked(real):
        content = content_of(str(real))
        if not may(content):
            return None
        config_in(path, content, dynamic=True)
        changed = _changed(path, content, edits)
        config = config_in(path, changed, dynamic=True)
        if changed != content:
            write_whole(real, changed, durable=True, like=real.stat())
        return changed, config


def _changed(path: str, content: bytes, edits: Mapping[Path, Any]) -> bytes:
    try:
        text = content.decode("utf-8")
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        text = text.removeprefix(mark)
        for place, value in edits.items():
            text = edited(text, place, value)
        return (mark + text).encode("utf-8")
    except (JsonError, UnicodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


class _Locked:
    """A lock beside the file, held while this module changes it. The system releases the lock of a process that dies."""

    def __init__(self, path: FilePath) -> None:
        self._path = path.with_name(f".{path.name}.lock")
        self._lock = FileLock(self._path, timeout=LOCK_S, fallback_to_soft=False)

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise TimeoutError(f"another process has held {self._path} for {LOCK_S:g} s: try again") from None
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:
            with suppress(OSError):  # while held: a process that has opened the file finds it removed, and opens another
                self._path.unlink()
            self._lock.release()


def _regular(path: str) -> bytes:
    """Like ``content_of``, but refuses a pipe, on which a read would block."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ConfigError(f"{path}: it is not a regular file any more")
    return content_of(path)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Time, size and inode; None if the file cannot be opened. Opening makes a network file system ask its server."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


# --- The thread of the one rank that watches the file, and sets ``dynamic_on`` to false when monitoring ends by itself.

JOIN_S: Final = 1.0
LAST_WORD_S: Final = 5.0
"""How long ``stop`` waits until ``dynamic_on`` is written."""


class ConfigWatcher:
    """Looks at the file again and again, on a daemon thread, so that a file system that hangs does not block training.

    Args:
        changed: Called on that thread with each new configuration.
        interval_s: Seconds between two looks.

    Attributes:
        retired: Set to end the thread after its next turn, without waking it.
    """

    def __init__(
        self,
        path: str,
        known: MonitorConfig,
        changed: Callable[[MonitorConfig], None],
        failures: Failures,
        interval_s: float,
    ) -> None:
        self._path, self._changed, self._failures, self._interval_s = path, changed, failures, interval_s
        self.retired = False
        self._watch = FileWatch(path, known)
        self._ended: MonitorConfig | None = None
        self._looking = Lock()
        self._wake, self._stopped, self._idle = Event(), Event(), Event()
        self._thread = Thread(target=self._run, name="monitor-settings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def switch_off(self, ended: MonitorConfig) -> None:
        """Set ``dynamic_on`` to false in the file soon, if it still holds the configuration ``ended``. Does not wait."""
        self._ended = ended
        self._idle.clear()
        self._wake.set()

    def stop(self) -> None:
        """End within seconds. A pending write is done first, unless the file system hangs."""
        if self._ended is not None:
            self._idle.wait(LAST_WORD_S)
        self._stopped.set()
        self._wake.set()
        self._thread.join(JOIN_S)

    def turn(self) -> None:
        """Look once, now."""
        with self._looking:
            self._look()
            self._write()
        self._idle.set()

    def _run(self) -> None:
        turn = self._failures.guarded("watching the configuration file", self.turn)
        while not (self._stopped.is_set() or self.retired):
            turn()
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _look(self) -> None:
        found = self._watch.look(time.time_ns())
        if isinstance(found, Refused):
            said = f"{found.reason}\nThe changed configuration cannot be used: the one before stays in force. Correct the file."
            self._failures.warn(f"configuration refused ({found.content[:8]})", said)
        elif found is not None:
            self._changed(found)

    def _write(self) -> None:
        ended, self._ended = self._ended, None
        if ended is None or not ended.dynamic_on or self._watch.known != ended:
            return
        try:
            written = change_file(self._path, {("dynamic_on",): False}, self._watch.holds)
        except (ConfigError, OSError) as error:
            advice = "Monitoring has ended, but the file still says dynamic_on: true. To start again, change any other field."
            self._failures.report("switching dynamic_on off", error, advice)
            return
        if written is not None:
            self._watch.wrote(*written)
            LOGGER.info("[rank %d] %s: dynamic_on is false now", self._failures.rank, self._path)
