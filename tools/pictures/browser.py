"""A headless Chromium, told what to do over two pipes: no port, no library, and nothing stays behind."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # which root may not have; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

BECOME: Final = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(one), fcntl.F_DUPFD_CLOEXEC, 5) for one in sys.argv[1:3])  # neither is 3 or 4 itself
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Becomes another program, which has two descriptors of this one as 3 and 4."""

PATIENCE_S: Final = 60.0
ANSWER_S: Final = 120.0
"""On a busy machine with a cold disk a browser takes a while to start."""
REPEAT_S: Final = 10.0
"""A question to a page that is just being replaced by another one has no answer; it is asked again."""
LEAVING_S: Final = 10.0


class BrowserError(Exception):
    """The browser refused what it was asked, or did not show what was awaited in good time."""


class BrowserGone(BrowserError):  # noqa: N818 - it says what has happened
    """The browser has ended."""


def program() -> str | None:
    """Where a Chromium is, if there is any."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """A page in a browser.

    Args:
        session: Which page is meant, in the browser's words.
    """

    def __init__(self, pipes: Pipes, session: str) -> None:
        self._pipes = pipes
        self._session = session

    def open(self, address: str) -> None:
        """Begin to load another page."""
        self.ask("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """What JavaScript makes of an expression, as far as JSON can say it; promises are awaited.

        Raises:
            BrowserError: It throws.
        """
        return self._evaluated(expression, ANSWER_S)

    def _evaluated(self, expression: str, seconds: float) -> Any:
        question = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self._pipes.ask("Runtime.evaluate", self._session, seconds, **question)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = PATIENCE_S) -> Any:
        """What an expression is once that is something. It may throw until then: the page is being made."""
        end = time.monotonic() + seconds
        while True:
            try:
                if found := self._evaluated(expression, REPEAT_S):
                    return found
            except BrowserGone:
                raise
            except BrowserError:
                pass
            if time.monotonic() > end:
                raise BrowserError(f"not seen in {seconds:g} s: {expression}")
            time.sleep(0.1)

    def picture(self, *, left: float, top: float, width: float, height: float) -> bytes:
        """A part of the page, in pixels from its corner, in the format PNG."""
        clip = {"x": left, "y": top, "width": width, "height": height, "scale": 1}
        shot = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        """Any method of the DevTools protocol that is about a page."""
        return self._pipes.ask(method, self._session, **parameters)


class Pipes:
    """Messages to a browser and its answers: JSON, with a zero behind each."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._read = b""

    def ask(self, method: str, session: str | None = None, seconds: float = ANSWER_S, **parameters: object) -> dict[str, Any]:
        """The result of a method, waited for so long.

        Raises:
            BrowserError: There is none.
        """
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._write(json.dumps(message).encode() + b"\0")
        while (answer := self._next(method, seconds)).get("id") != self._number:
            pass  # news that no one asked for
        if "result" not in answer:
            raise BrowserError(f"{method}: {answer.get('error')}")
        result: dict[str, Any] = answer["result"]
        return result

    def _write(self, message: bytes) -> None:
        try:
            while message:
                message = message[os.write(self._to, message) :]
        except BrokenPipeError as error:
            raise BrowserGone("the browser has ended") from error

    def _next(self, asked: str, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            if not select.select([self._from], [], [], seconds)[0]:
                raise BrowserError(f"no answer to {asked} in {seconds:g} s")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise BrowserGone("the browser has ended")
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def page(width: int, height: int, chromium: str | None = None) -> Iterator[Page]:
    """A page of this size, in a browser that is there for as long as this lasts, as is all that it writes.

    Raises:
        BrowserError: There is no Chromium.
    """
    chromium = chromium or program()
    if chromium is None:
        raise BrowserError(f"no Chromium is installed: none of {', '.join(PROGRAMS)} is found")
    with _folder() as folder, _running(chromium, folder, width, height) as pipes:
        target = pipes.ask("Target.createTarget", url="about:blank")["targetId"]
        session = pipes.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        pipes.ask("Emulation.setDeviceMetricsOverride", session, **size)
        yield Page(pipes, session)


@contextmanager
def _folder() -> Iterator[Path]:
    """For all that the browser writes. Its helpers may write a moment longer than it is there."""
    folder = Path(mkdtemp(prefix="browser-"))
    try:
        yield folder
    finally:
        end = time.monotonic() + LEAVING_S
        while folder.exists() and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.05)


@contextmanager
def _running(chromium: str, folder: Path, width: int, height: int) -> Iterator[Pipes]:
    to_browser, from_browser = os.pipe(), os.pipe()
    ours, its = (to_browser[1], from_browser[0]), (to_browser[0], from_browser[1])
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}", "about:blank"]
    try:
        process = _started(command, *its, folder)
    finally:
        for end in its:
            os.close(end)
    try:
        yield Pipes(*ours)
    finally:
        _end(process, *ours)


def _started(command: list[str], reads: int, writes: int, folder: Path) -> subprocess.Popen[bytes]:
    """The browser takes its messages from descriptor 3 and answers on 4."""
    return subprocess.Popen(
        [sys.executable, "-c", BECOME, str(reads), str(writes), *command],
        pass_fds=(reads, writes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CONFIG_HOME": str(folder)},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes], *pipes: int) -> None:
    """With all of its own processes: they are a group. A browser whose pipes are closed leaves by itself."""
    for pipe in pipes:
        os.close(pipe)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LEAVING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
