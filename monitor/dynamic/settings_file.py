"""The user's configuration file while training runs: seen when it changes, and changed in one place alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path as FilePath
from typing import Any, Final, NamedTuple

from filelock import FileLock, Timeout

from monitor.config import ConfigError, MonitorConfig
from monitor.config.jsonc import JsonError, Path
from monitor.config.loading import config_in, content_of
from monitor.coordinator.output import NO_LOCKS_HERE, write_whole
from monitor.dynamic.editing import edited

LOCK_S: Final = 5.0
"""Editing takes milliseconds: whoever holds the lock for longer is stuck."""

FRESH_NS: Final = 3_000_000_000
"""A file changed this short a time ago may be changed again without its time showing it: some clocks tick every two seconds."""


class Refused(NamedTuple):
    """The file was changed to what cannot be used.

    Attributes:
        reason: With the field, the value and what is allowed.
        content: A digest.
    """

    reason: str
    content: str


class FileWatch:
    """Tells of a change of content, once. For one thread.

    A file is looked into when its time, size or inode differ from the last look, or are too fresh to tell. What cannot be used
    is looked at twice before it counts, since some editors write in place, and others have no file for a moment.

    Args:
        known: The configuration that the file is known to have held.
    """

    def __init__(self, path: str, known: MonitorConfig) -> None:
        self.known = known
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._content = ""
        self._doubtful = ""
        self._refused = ""

    def look(self, now_ns: int) -> MonitorConfig | Refused | None:
        """What the file has come to hold since the last look, None if nothing new. ``now_ns`` as ``time.time_ns`` gives it."""
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
        """Whether ``content`` is what the file was seen to hold last, and could be used."""
        return _digest(content) == self._content and not self._doubtful and not self._refused

    def wrote(self, content: bytes, config: MonitorConfig) -> None:
        """This process has written the file itself: no change of the user's."""
        self._content, self.known = _digest(content), config
        self._stamp = None

    def _news(self, config: MonitorConfig) -> MonitorConfig | None:
        """Comments, spacing and order are no change of the configuration."""
        changed, self.known = config != self.known, config
        return config if changed else None

    def _bad(self, refused: Refused) -> Refused | None:
        if refused.content == self._refused:
            return None
        if refused.content != self._doubtful:
            self._doubtful = refused.content
            return None
        self._refused, self._doubtful = refused.content, ""
        self._content = ""  # going back to what was there before is seen, and found to change nothing
        return refused


def change_file(
    path: str, edits: Mapping[Path, Any], may: Callable[[bytes], bool] = lambda _: True
) -> tuple[bytes, MonitorConfig] | None:
    """Put each value at its place of the configuration in ``path``: all or none, with everything else as it was.

    Args:
        edits: Values in the types of ``json.loads``, by where they belong.
        may: Asked with the content that the file has; where it says no, nothing is done and None returned.

    Returns:
        The content written, and what it spells. What would not be a usable configuration is not written.

    Raises:
        ConfigError: The file cannot be read or is no configuration, or would be none.
        EditError: A value cannot be put there.
        OSError: The file cannot be written, or somebody else does not let go of it.
    """
    real = FilePath(os.path.realpath(os.path.expanduser(path)))  # a link goes on being one
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
    """A lock beside the file, for all who change it by this module. A process that dies lets go of it."""

    def __init__(self, path: FilePath) -> None:
        self._path = path.with_name(f".{path.name}.lock")
        self._lock = FileLock(self._path, timeout=LOCK_S, fallback_to_soft=False)

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise TimeoutError(f"{self._path} has been held by another process for {LOCK_S:g} s: try again") from None
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:
            with suppress(OSError):  # while it is held: whoever has opened it meanwhile finds it gone, and opens another
                self._path.unlink()
            self._lock.release()


def _regular(path: str) -> bytes:
    """As ``content_of``, which would wait for somebody to write to a pipe."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ConfigError(f"{path}: it is no file any more")
    return content_of(path)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Time, size and inode. Opening has a network file system ask its server. None where there is no file to be opened."""
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
