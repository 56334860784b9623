"""Make a virtual environment, or make it anew: ``python3 tools/environment.py DIRECTORY [--over OTHER] PIP_ARGUMENT...``

With ``--over`` it sees all that is in another environment of the project, too, behind what is installed into it.

The environment is made from scratch when it is missing, when the last attempt did not finish, and when anything that decides
what belongs into it has changed: ``pyproject.toml``, ``constraints.txt``, the sources in C, the arguments, the interpreter,
the place of the project. What it was made from is written into it last, so that a half-made one is never taken for a whole one.
Attempts at the same time wait for each other on a lock that the system takes back from a process that dies.

Standard library only: this runs before anything is installed. Its syntax is that of old interpreters, so that they can say
that they are too old.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
STAMP = "made-from"
DECIDING = (
    "pyproject.toml",
    "setup.py",
    "constraints.txt",
    *sorted(str(path.relative_to(PROJECT)) for path in PROJECT.glob("monitor/*/*.[ch]")),
)
"""What is in an environment: the packages, and what was built of the project's own."""


def main(arguments):
    """Set up the environment that ``arguments`` describe. Returns the exit status."""
    if len(arguments) < 2:
        return "usage: python3 tools/environment.py DIRECTORY [--over OTHER] PIP_ARGUMENT..."
    complaint = unusable_interpreter()
    if complaint:
        return complaint
    directory, rest = PROJECT / arguments[0], arguments[1:]
    below, requirements = (PROJECT / rest[1], rest[2:]) if rest[0] == "--over" else (None, rest)
    with one_at_a_time():
        if stamp_of(directory) == fingerprint(rest):
            return 0
        return make(directory, requirements, below, fingerprint(rest))


def unusable_interpreter():
    """Why this interpreter cannot serve, or an empty string."""
    if sys.version_info < OLDEST_PYTHON:
        return f"This is Python {sys.version.split()[0]}; 3.11 or newer is needed. Name another: make PYTHON=python3.11 ..."
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "This Python has no venv or no pip of its own. Install them (Debian and Ubuntu: the package python3-venv)."
    return ""


@contextmanager
def one_at_a_time():
    """Hold the lock of the project: the system's lock on its directory, which leaves no file behind."""
    descriptor = os.open(PROJECT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up of this project to finish", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make(directory, requirements, below, stamp):
    """Make ``directory`` from scratch, over ``below`` if that is not None, install ``requirements``, and note ``stamp``.

    Returns the exit status.
    """
    print(f"Setting up {directory.name} (once; some minutes on a slow network)", flush=True)
    python = str(directory / "bin" / "python")
    empty = [sys.executable, "-m", "venv", "--clear", str(directory)]
    filled = [python, "-m", "pip", "install", "--quiet", "--quiet", *requirements]
    for step in (empty, filled):
        if subprocess.run(step, cwd=PROJECT, check=False).returncode != 0:
            return f"Setting up {directory.name} failed; the reason is above. The next attempt starts from scratch."
    if below is not None:
        see_through(directory, below)
    (directory / STAMP).write_text(stamp)
    return 0


def see_through(directory, below):
    """Let the interpreter of ``directory`` find what is in ``below``, after what is its own."""
    (own,), (others,) = (list(one.glob("lib/python*/site-packages")) for one in (directory, below))
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")


def stamp_of(directory):
    """What ``directory`` was made from; empty if it is missing or was never finished."""
    try:
        return (directory / STAMP).read_text()
    except OSError:
        return ""


def fingerprint(arguments):
    """What decides the content of an environment, as one line."""
    digest = hashlib.sha256()
    for part in (sys.version, str(PROJECT), *arguments):
        digest.update(part.encode() + b"\0")
    for name in DECIDING:
        path = PROJECT / name
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
