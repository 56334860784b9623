"""What is done of a merge, where several processes do it, or one does it in several goes: files of windows, and what there is to
report of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from monitor.merge.combine import Disagreement, Outcome
from monitor.merge.discovery import SetAside
from monitor.merge.execution import MergeError
from monitor.sinks.files import StepSpan


class Folder:
    """A directory, local or behind a URL that fsspec opens.

    Raises:
        MergeError: It is behind a URL, and fsspec or the package for it is missing.
    """

    def __init__(self, path: str) -> None:
        self._files, self._root = None, path
        if "://" in path:
            try:
                from fsspec.core import url_to_fs  # installed where there are URLs

                self._files, self._root = url_to_fs(path)
            except ImportError as error:
                raise MergeError(f"{path} cannot be opened: {error}. Install fsspec and the package for this URL.") from error

    @property
    def local(self) -> Path | None:
        """Where it is on this machine, if it is."""
        return Path(self._root) if self._files is None else None

    def names(self, below: str = "") -> list[str]:
        """The names of what is in a directory below, sorted; empty if there is no such directory.

        Raises:
            OSError: It cannot be listed.
        """
        path = f"{self._root}/{below}"
        try:
            if self._files is None:
                return sorted(one.name for one in Path(path).iterdir())
            return sorted(str(one).rstrip("/").rpartition("/")[2] for one in self._files.ls(path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """A file to read: its path, or a file object if it is behind a URL."""
        if self._files is None:
            yield f"{self._root}/{name}"
        else:
            with self._files.open(f"{self._root}/{name}", "rb") as file:
                yield file

    @contextmanager
    def copied(self, name: str) -> Iterator[Path]:
        """A file on this machine: itself, or a copy for the time being."""
        if self._files is None:
            yield Path(self._root, name)
            return
        with TemporaryDirectory() as directory:
            path = Path(directory, name.rpartition("/")[2])
            self._files.get_file(f"{self._root}/{name}", str(path))
            yield path

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none.

        Raises:
            OSError: It cannot be read.
        """
        try:
            with self.copied(name) as path:
                return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, path: Path, name: str) -> None:
        """Move a file of this machine to here. It appears whole.

        Raises:
            OSError: It cannot be written.
        """
        if self._files is None:
            target = Path(self._root, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            hidden = target.with_name(f".{target.name}.{os.getpid()}.part")
            shutil.move(path, hidden)  # the same file system, if all is well
            os.replace(hidden, target)
        else:
            self._files.put_file(str(path), f"{self._root}/{name}")
            path.unlink()

    def remove(self, name: str) -> None:
        """Remove a file or a directory, if it is there.

        Raises:
            OSError: It cannot be removed.
        """
        path = f"{self._root}/{name}"
        if self._files is None:
            shutil.rmtree(path) if os.path.isdir(path) else Path(path).unlink(missing_ok=True)
        elif self._files.exists(path):
            self._files.rm(path, recursive=True)


# --- Windows that are done.

DONE: Final = ".done"
"""The directory of the records."""


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
        return f"{DONE}/{self.kind}_{self.steps.first}-{self.steps.last}.json"

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


_LISTED: Final = {"set_aside": SetAside, "disagreements": Disagreement}


def _restored(field: Any, value: Any) -> Any:
    if isinstance(value, int):
        return value
    if field.name in _LISTED:
        return [_LISTED[field.name](*one) for one in value]
    empty = field.default_factory()
    if isinstance(empty, dict):
        return type(empty)({tuple(key) if isinstance(key, list) else key: of_key for key, of_key in value})
    return value


class FinishedWindows:
    """The windows of a merge that are done, in a folder that all who work on the merge see."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def listed(self) -> Iterator[FinishedWindow]:
        """All whose records can be read: one that is damaged is as if it was never done."""
        for name in self.folder.names(DONE):
            try:
                yield FinishedWindow.from_json(self.folder.read(f"{DONE}/{name}") or b"")
            except (ValueError, TypeError):
                continue

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
