"""Damages files of a recording, and has every command read them."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from verdicts import DrillError, run_command

BOMB: Final = b"[" * 200_000
TEXTS: Final = (b"", b"{}", b"[]", b"null", BOMB, b"\xff" * 100, b'{"schema_version": 99}', b'{"schema_version": 1e400}')


def damaged(directory: Path, random_: random.Random) -> str:
    """Damage one to three files, and say what was done."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    said = []
    for path in random_.sample(files, min(len(files), random_.randrange(1, 4))):
        how = random_.choice(DAMAGES)
        how(path, random_)
        said.append(f"{path.relative_to(directory)}: {how.__name__}")
    return "; ".join(said)


def flipped(path: Path, random_: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(random_.randrange(1, 9)):
        if content:
            content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    path.write_bytes(content)


def cut(path: Path, random_: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: random_.randrange(len(content) + 1)])


def zeroed(path: Path, random_: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = random_.randrange(len(content) + 1)
    content[begin:] = bytes(len(content) - begin)
    path.write_bytes(content)


def doubled(path: Path, random_: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content + content[random_.randrange(len(content) + 1) :])


def written_over(path: Path, random_: random.Random) -> None:
    path.write_bytes(random_.choice(TEXTS))


def numbers_changed(path: Path, random_: random.Random) -> None:
    """A digit becomes another one, or a number becomes large."""
    content = path.read_bytes()
    digits = [place for place, byte in enumerate(content) if 48 <= byte <= 57]
    if digits:
        place = random_.choice(digits)
        text = random_.choice((b"9" * 30, b"-1", b"1e999", b'"x"', b"7"))
        path.write_bytes(content[:place] + text + content[place + 1 :])


def made_a_pipe(path: Path, _random: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def made_a_directory(path: Path, _random: random.Random) -> None:
    path.unlink()
    path.mkdir()


def made_a_link(path: Path, random_: random.Random) -> None:
    path.unlink()
    path.symlink_to(random_.choice(("/dev/zero", "/etc/passwd", path.name, "..")))


def made_unreadable(path: Path, _random: random.Random) -> None:
    path.unlink()


DAMAGES: Final[tuple[Callable[[Path, random.Random], None], ...]] = (
    flipped, cut, zeroed, doubled, written_over, numbers_changed, made_a_pipe, made_a_directory, made_a_link, made_unreadable,
)  # fmt: skip


def look_at_everything(directory: Path, scratch: Path, said: str, random_: random.Random) -> None:
    """Read the recording and the merged set with four commands.

    Raises:
        DrillError: A command hangs, aborts, or prints a traceback.
    """
    scratch.mkdir()
    output, merged = str(directory / "out"), str(directory / "merged")
    commands = [
        ["merge", output, "-o", str(scratch / "merged")],
        ["report", output, "-o", str(scratch / "a.html")],
        ["report", merged, "-o", str(scratch / "b.html")],
        ["query", output, "select count(*) from grad_reduced"],
        ["query", merged, "select name, max(norm) from grad_reduced group by name"],
        ["rank-anomalies", output],
        ["convert", output, "--to", "sqlite", "-o", str(scratch / "a.db")],
        ["convert", merged, "--to", "tensorboard", "-o", str(scratch / "curves")],
        ["compare", output, merged],
        ["dump-recover", output],
        ["top", output, "--once"],
        ["ctl", "show", output],
    ]
    for arguments in random_.sample(commands, 4):
        try:
            run_command(arguments)
        except DrillError as error:
            raise DrillError(f"with {said}: {error}") from None
    shutil.rmtree(scratch)
