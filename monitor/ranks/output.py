"""Where output goes, and that it can go there: found out before anything is attached."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

OUTPUT_VARIABLE: Final = "MONITOR_OUTPUT_DIR"
_DRAFT: Final = re.compile(r"\..+\.[0-9a-f]{8}")
DEFAULT_OUTPUT: Final = "./monitor_output"


class OutputError(Exception):
    """The output directory cannot be used. The message names the path, the reason and what to do."""


def base_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The base directory, absolute: a training script that changes its directory later does not move its output.

    Raises:
        OutputError: ``~`` stands for a home directory that is not known.
    """
    configured = environment.get(OUTPUT_VARIABLE) or DEFAULT_OUTPUT
    try:
        return Path(configured).expanduser().absolute()
    except RuntimeError as error:
        raise OutputError(f"{OUTPUT_VARIABLE} is {configured!r}: {error} Write the path out.") from error


def prepare(directory: Path, named_by: str = OUTPUT_VARIABLE) -> Path:
    """Make ``directory`` with its parents and prove, by writing a nameless file, that it can be written.

    Args:
        named_by: Where its name comes from.

    Raises:
        OutputError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise unusable(directory, error, named_by) from error
    return directory


def unusable(path: Path, error: OSError, named_by: str = OUTPUT_VARIABLE) -> OutputError:
    """What to tell the user when ``path`` could not be made, written or renamed."""
    return OutputError(
        f"no output can be written to {path}: {error.strerror or error}. "
        f"Make it a directory that this process may write, or name another one in {named_by}."
    )


def write_whole(path: Path, content: bytes, *, durable: bool = False, like: os.stat_result | None = None) -> None:
    """Write a file that is seen complete or not at all; an earlier one under this name is replaced in one move.

    Args:
        like: Of a file whose permissions it is to have, and as far as possible its owner.
        durable: Wait until the content has reached the disk, so that it also survives a crash of the machine.

    Raises:
        OSError: it could not be written; what stood under the name before still stands there.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            if like is not None:
                _resemble(file.fileno(), like)
            if durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _resemble(descriptor: int, like: os.stat_result) -> None:
    """The owner first: a change of owner takes the set-user-id bit away. Another's file stays with who writes it."""
    with suppress(PermissionError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(like.st_mode))


def remove_drafts(directory: Path) -> None:
    """Remove what ``write_whole`` leaves when its process is killed: what was to be replaced still stands.

    Raises:
        OSError: one cannot be removed.
    """
    for path in directory.iterdir():
        if _DRAFT.fullmatch(path.name):
            path.unlink()
