"""Output that appears whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

# --- What stops a merge.


class MergeError(Exception):
    """Nothing was merged. The message says what is wrong, and what to change."""


class NothingRecordedError(MergeError):
    """The ranks of the job can be read, and have recorded no row."""


@contextmanager
def draft_of(output: Path, work: str, elsewhere: str) -> Iterator[Path]:
    """Where to make a directory or a file that becomes ``output`` if all goes well, and of which nothing is left otherwise.

    What drafts of the same output have left whose process was killed is removed.

    Args:
        output: Nothing stands there yet, or an empty directory.
        work: What another process would be doing that writes there.
        elsewhere: What to name instead.

    Raises:
        MergeError: something stands there, or another process is writing there.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with _alone(output, work, elsewhere):
        if os.path.lexists(output) and not _is_empty(output):
            raise MergeError(f"{output} exists. Remove it, or name {elsewhere}.")
        _remove_drafts(output)
        draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}.draft")
        try:
            yield draft
            os.rename(draft, output)
        except BaseException:
            with suppress(OSError):
                _remove(draft)
            raise


def _is_empty(output: Path) -> bool:
    return output.is_dir() and not output.is_symlink() and not any(output.iterdir())


@contextmanager
def _alone(output: Path, work: str, elsewhere: str) -> Iterator[None]:
    # A lock that is a file would outlive a process that is killed.
    path = output.with_name(f".{output.name}.lock")
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise MergeError(f"another {work} is writing to {output}. Wait for it, or name {elsewhere}.") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who opened it meanwhile sees that it has no name, and makes another
        lock.release()


def _remove_drafts(output: Path) -> None:
    draft = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.draft")
    for path in output.parent.iterdir():
        if draft.fullmatch(path.name):
            _remove(path)


def _remove(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft)
    else:
        draft.unlink(missing_ok=True)
