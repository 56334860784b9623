"""A process that has imported much and has no thread yet, from which scripts are forked: a tenth of the time of a start.

What it imports (``modules``) and the named pipe from which it reads (``requests``) stand in its argument, as JSON. A line of
JSON from that pipe asks for a script. The child is what a new interpreter would be: it runs the script as its main program, in
its own session, and ends the way an interpreter ends. Its id and its exit status are written to files. Of a request that says
``brief`` a script that has come to its end leaves what was imported as it is: to free it takes longer than most jobs.

A request with ``modules`` asks for a second process like this one, which has imported those, too.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def asked() -> dict[str, Any]:
    """Returns in the children only; in this process when nothing more is asked for, by ending it."""
    gc.collect()
    gc.freeze()  # a child that ends would go through all that was imported here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no one to wait for them
    while line := sys.stdin.readline():
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
        request = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if child := os.fork():
                keep(child, Path(request["place"]))
            return request
    sys.exit(0)


def keep(child: int, place: Path) -> None:
    """Tell of the child's beginning and end."""
    tell(place / "pid", child)
    tell(place / "status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def tell(path: Path, number: int) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(str(number))
    draft.replace(path)


def import_more(request: dict[str, Any]) -> None:
    """Become a process that has imported more, and reads its own requests."""
    requests = os.open(request["requests"], os.O_RDONLY)
    os.dup2(requests, sys.stdin.fileno())
    os.close(requests)
    sys.stdin = open(sys.stdin.fileno(), closefd=False)  # noqa: SIM115  (the one before may have read ahead)
    os.environ.update(request["environment"])
    for module in request["modules"]:
        importlib.import_module(module)


def settle(request: dict[str, Any]) -> None:
    """Become the process that was asked for."""
    os.setsid()
    os.chdir(request["work"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    sys.path[0:1] = [os.path.dirname(sys.argv[0]), *request.get("path", [])]
    for number, path in enumerate((os.devnull, f"{request['place']}/out", f"{request['place']}/errors")):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)  # both may be one file
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable()  # whatever crashes says in whose hands it was


request: dict[str, Any] = json.loads(sys.argv[1])
if child := os.fork():
    keep(child, Path(request["place"]))
while "modules" in request:
    import_more(request)
    request = asked()
settle(request)
exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), globals())  # what it defines lives until the interpreter ends
if request["brief"]:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
