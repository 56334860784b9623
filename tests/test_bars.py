"""Progress bars: in a terminal only, and gone at the end."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

WORK = """
import sys
from monitor.bars import bars

with bars(quiet=sys.argv[1:] == ["quiet"]) as progress:
    for done in range(1, 4):
        progress("grad_reduced", done, 3)
"""
SHOW_CURSOR = "\x1b[?25h"
"""What a terminal is sent when bars have vanished."""


def said_to_a_terminal(*arguments: str) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", WORK, *arguments]
    with subprocess.Popen(command, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"}) as process:
        assert process.wait(60) == 0
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # the other end is closed, and nothing is left
        pass
    os.close(ours)
    return said.decode()


def test_a_terminal_shows_what_is_done_and_of_how_much_and_nothing_is_left() -> None:
    said = said_to_a_terminal()
    assert "grad_reduced" in said
    assert "3/3" in said
    assert SHOW_CURSOR in said.rpartition("3/3")[2], "the bars have vanished"


def test_nothing_is_shown_on_request() -> None:
    assert said_to_a_terminal("quiet") == ""


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    ended = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


pytestmark = pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
