"""The job's key: the secret by which ranks recognise the store of their job, and the store its ranks.

The user or the launcher sets it in the environment. Otherwise it is in a file of the output directory that only this user may
read. The first rank to look for it creates it.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from monitor.coordinator.output import OUTPUT_VARIABLE, OutputError, base_directory

KEY_VARIABLE: Final = "MONITOR_STORE_KEY"
KEY_FILE: Final = ".store-key"
SHORTEST_KEY: Final = 16
"""Characters. Shorter secrets can be guessed by trying."""

SET_KEY: Final = (
    f"Set {KEY_VARIABLE} to one secret of at least {SHORTEST_KEY} characters on all ranks, "
    "for example the output of `openssl rand -hex 32`"
)
LENGTH: Final = 64
"""Characters of the key in the file."""

ATTEMPTS: Final = 10
PAUSE_S: Final = 0.1


class StoreKeyError(Exception):
    """There is no key that this process may use. The message says why, and what to do."""


def job_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """The job's key.

    Raises:
        StoreKeyError: It is too short, or its file could be another user's, or cannot be read or created.
    """
    given = environment.get(KEY_VARIABLE)
    if given is not None:
        if len(given) < SHORTEST_KEY:
            raise StoreKeyError(f"{KEY_VARIABLE} has {len(given)} characters. {SET_KEY}.")
        return os.fsencode(given)
    try:
        return _key_in(base_directory(environment) / KEY_FILE)
    except OutputError as error:
        raise StoreKeyError(f"{error} Or: {SET_KEY}.") from error


def _key_in(path: Path) -> bytes:
    """The key in the file at ``path``, which is created if there is none."""
    for attempt in range(ATTEMPTS):
        try:
            return _read(path)
        except FileNotFoundError:
            if attempt > 0:
                time.sleep(PAUSE_S)  # a network file system may show the file of another host late
            _create(path)
        except OSError as error:
            raise _unusable(path, "it is a link" if path.is_symlink() else error.strerror) from error
    raise _unusable(path, "it does not appear after it was created")


def _read(path: Path) -> bytes:
    """The key. All checks are of the opened file, so it cannot be replaced between a check and the read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if wrong := _wrong(os.fstat(descriptor)):
            raise _unusable(path, wrong)
        key = os.read(descriptor, 2 * LENGTH).strip()
    finally:
        os.close(descriptor)
    if len(key) != LENGTH:
        raise _unusable(path, f"it does not hold a key of {LENGTH} characters")
    return key


def _wrong(status: os.stat_result) -> str:
    """Why another user may know or have chosen the content of a file; "" if no other user may."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid != os.geteuid():
        return f"it belongs to the user {status.st_uid}, and this process to the user {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"its mode is {stat.S_IMODE(status.st_mode):03o}, and must be 600"
    return ""


def _create(path: Path) -> None:
    """Create the file, unless another rank is faster: it appears with its whole content, and is never replaced."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(secrets.token_hex(LENGTH // 2).encode() + b"\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:
        raise _unusable(path, f"it cannot be created: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _unusable(path: Path, why: str | None) -> StoreKeyError:
    return StoreKeyError(
        f"the key of the job's store in {path} is not used: {why}. Delete this file, "
        f"or name a directory of your own in {OUTPUT_VARIABLE}, the same on all ranks. Or: {SET_KEY}."
    )
