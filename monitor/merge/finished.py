"""What is done of a merge, where several processes do it, or one does it in several goes: files of windows, and what there is
to report of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any, Final, TypeVar

import pyarrow as pa

from monitor.failures import LOGGER
from monitor.merge.bits import BitDifference
from monitor.merge.combine import Disagreement, Outcome
from monitor.merge.discovery import SetAside, leads_out
from monitor.merge.execution import MergeError, without_password
from monitor.sinks.files import StepSpan

PATIENCE: Final = 60.0
"""Seconds for which an object store may fail again and again before a merge ends."""

LONGEST_PAUSE: Final = 8.0

CONNECTIONS: Final = 8
"""Files that are read or written at the same time."""

_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_LASTING: Final = (PermissionError, FileExistsError, ValueError, TypeError)
"""Errors that do not go away by waiting."""

T = TypeVar("T")


class Folder:
    """A directory, local or behind a URL that fsspec opens.

    Args:
        patience: Seconds for which requests to a server may fail before that is an error.

    Raises:
        MergeError: It is behind a URL, and fsspec or the package for it is missing.
    """

    def __init__(self, path: str, patience: float = 0.0) -> None:
        self._files: Any = None
        self._root, self._patience, self._shown = path, patience, without_password(path)
        if "://" in path:
            try:
                from fsspec.core import url_to_fs  # installed where there are URLs

                files, self._root = url_to_fs(path)
            except (ImportError, ValueError) as error:
                raise MergeError(
                    f"{self} cannot be opened: {error}. Install fsspec and the package for this URL: "
                    "for s3:// pip install 'trainermon[s3]'."
                ) from error
            self._files = None if files.protocol == ("file", "local") else files

    def __str__(self) -> str:
        return self._shown

    @property
    def local(self) -> Path | None:
        """Its path on this machine; None if it is elsewhere."""
        return Path(self._root) if self._files is None else None

    def names(self, below: str = "") -> list[str]:
        """The names of what is in a directory below, sorted; empty if there is no such directory.

        Raises:
            OSError: It cannot be listed.
        """
        path = f"{self._root}/{below}".rstrip("/")
        try:
            if self._files is None:
                return sorted(one.name for one in Path(path).iterdir())
            self._files.invalidate_cache()  # other processes write here, too
            listed = [str(one).rstrip("/") for one in self._tried(lambda: self._files.ls(path, detail=False))]
            return sorted(one.rpartition("/")[2] for one in listed if one != path)  # an object may have the directory's name
        except _ABSENT:
            return []

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """A file to read: its path, or a file object if it is behind a URL. What pyarrow finds damaged in it is named."""
        path = None if self._files is not None else str(self._regular(name))
        try:
            if path is not None:
                yield path
            else:
                with self._files.open(f"{self._root}/{name}", "rb") as file:
                    yield file
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, _ABSENT) or getattr(error, "errno", None) is not None:
                raise
            raise type(error)(f"{name}: {error}") from error

    @contextmanager
    def copied(self, name: str) -> Iterator[Path]:
        """A file on this machine: itself, or a copy for the time being."""
        if self._files is None:
            yield self._regular(name)
            return
        with TemporaryDirectory() as directory:
            path = Path(directory, name.rpartition("/")[2])
            self._tried(lambda: self._files.get_file(f"{self._root}/{name}", str(path)))
            yield path

    def _regular(self, name: str) -> Path:
        """Raises ``OSError`` for what is better not opened. To open a pipe would wait for somebody to write to it."""
        path = Path(self._root, name)
        if path.exists() and not path.is_file():
            raise OSError(f"{name}: it is not a file")
        return path

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none, or if it leads elsewhere.

        Raises:
            OSError: It cannot be read.
        """
        path = f"{self._root}/{name}"
        try:
            if self._files is None:
                return None if leads_out(Path(path)) or not Path(path).is_file() else Path(path).read_bytes()
            content: bytes = self._tried(lambda: self._files.cat_file(path))
        except _ABSENT:
            return None
        return content

    def put(self, path: Path, name: str) -> None:
        """Move a file of this machine to here. It appears whole.

        Raises:
            OSError: It cannot be written.
        """
        if self._files is None:
            target = Path(self._root, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            hidden = target.with_name(f".{target.name}.{token_hex(4)}.part")  # processes of two machines may have one number
            shutil.move(path, hidden)  # the same file system, if all is well
            os.replace(hidden, target)
        else:
            self._tried(lambda: self._files.put_file(str(path), f"{self._root}/{name}"))
            path.unlink()

    def write(self, content: str, name: str) -> None:
        """Write a file, which appears whole.

        Raises:
            OSError: It cannot be written.
        """
        with TemporaryDirectory() as directory:
            path = Path(directory, "content")
            path.write_text(content)
            self.put(path, name)

    def remove(self, name: str) -> None:
        """Remove a file or a directory, if it is there.

        Raises:
            OSError: It cannot be removed.
        """
        path = f"{self._root}/{name}"
        with suppress(FileNotFoundError):
            if self._files is not None:
                self._files.invalidate_cache()
                self._tried(lambda: self._files.rm(path, recursive=True))
            elif os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def _tried(self, request: Callable[[], T]) -> T:
        """Ask a server, and again if that fails, with growing pauses: it may be away for a while.

        Raises:
            OSError: It failed for too long, or waiting does not help. What packages raise is not always one.
        """
        pause, deadline = 0.5, 0.0
        while True:
            try:
                return request()
            except _ABSENT:
                raise
            except Exception as error:
                deadline = deadline or monotonic() + self._patience
                kind, said = type(error).__name__, f"{self}: {without_password(str(error)) or type(error).__name__}"
                lasting = isinstance(error, _LASTING) or "Credential" in kind or "Validation" in kind
                if lasting or monotonic() + pause > deadline:
                    raise OSError(said) from error
                LOGGER.warning("%s. Trying again in %g s.", said, pause)
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


# --- Windows that are done.

DONE: Final = ".done"
"""The directory of the records."""


def record_of(kind: str, steps: StepSpan) -> str:
    """The name of the record of a window."""
    return f"{kind}_{steps.first}-{steps.last}.json"


@dataclass(frozen=True, slots=True)
class FinishedWindow:
    """A window whose files are in their place.

    Attributes:
        fingerprint: Of what they were made from (``Plan.fingerprint``).
        files: Their paths in the folder.
        outcomes: What there is to report of it.
    """

    kind: str
    steps: StepSpan
    fingerprint: str
    files: tuple[str, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        return f"{DONE}/{record_of(self.kind, self.steps)}"

    def to_json(self) -> str:
        told = [[_plain(getattr(one, field.name)) for field in fields(Outcome)] for one in self.outcomes]
        return json.dumps([self.kind, *self.steps, self.fingerprint, self.files, told])

    @classmethod
    def from_json(cls, text: str | bytes) -> FinishedWindow:
        """Raises: ValueError, TypeError: It is damaged."""
        kind, first, last, fingerprint, files, told = json.loads(text)
        outcomes = (Outcome(*map(_restored, fields(Outcome), one)) for one in told)
        return cls(kind, StepSpan(first, last), fingerprint, tuple(files), tuple(outcomes))


def _plain(value: Any) -> Any:
    """A field of an outcome for JSON: mappings have keys of any type."""
    if isinstance(value, dict):
        return [[key, of_key] for key, of_key in value.items()]
    if isinstance(value, list):
        return [one if isinstance(one, int) else astuple(one) for one in value]
    return value


_LISTED: Final = {"set_aside": SetAside, "disagreements": Disagreement, "bit_differences": BitDifference}


def _restored(field: Any, value: Any) -> Any:
    if isinstance(value, int):
        return value
    if field.name in _LISTED:
        return [_LISTED[field.name](*(tuple(part) if isinstance(part, list) else part for part in one)) for one in value]
    empty = field.default_factory()
    if isinstance(empty, dict):
        return type(empty)({tuple(key) if isinstance(key, list) else key: of_key for key, of_key in value})
    return value


class FinishedWindows:
    """The windows of a merge that are done, in a folder that all who work on the merge see."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def listed(self, wanted: Container[str] | None = None) -> Iterator[FinishedWindow]:
        """All whose records can be read: one that is damaged is as if it was never done.

        Args:
            wanted: Names of records; None: all.
        """
        names = [f"{DONE}/{name}" for name in self.folder.names(DONE) if wanted is None or name in wanted]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for content in pool.map(self.folder.read, names):
                with suppress(ValueError, TypeError, RecursionError):
                    yield FinishedWindow.from_json(content or b"")

    def add(self, finished: FinishedWindow, made: Path) -> None:
        """Put the files of a window in their place, then the record that says so.

        Args:
            made: The directory of this machine that has the files.

        Raises:
            OSError: A file cannot be written.
        """
        for name in finished.files:
            self.folder.put(made / name, name)
        record = made / Path(finished.name).name
        record.write_text(finished.to_json())
        self.folder.put(record, finished.name)
