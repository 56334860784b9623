"""Several runs of a program in one start of it, each in a process that is forked once the framework is imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path


def one_of(hows: list[str]) -> str:
    """What this process is to run.

    A single run stays in this process. Of several, each runs in a child, in a folder of the same name, where its output is kept
    as ``out`` and ``errors``, and its exit status as ``status``. This returns in the children only.
    """
    if len(hows) == 1:
        return hows[0]
    for module in ("torch._dynamo", "monitor.pytorch"):  # an optimizer's first step imports them
        import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    for how in hows:
        Path(how).mkdir()
        if os.fork() == 0:
            os.chdir(how)
            for number, name in ((1, "out"), (2, "errors")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
            return how
        Path(how, "status").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
    sys.exit()
