"""TensorBoard on some recordings, and what its pages show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple
from urllib.parse import quote

from browser import BrowserError, Page

PATIENCE_S: Final = 60.0
OPENINGS_S: Final = (5.0, 10.0, 20.0, 40.0, 60.0)

CARDS: Final = "[...document.querySelectorAll('metrics-filtered-view card-view')]"
"""Of the page Time Series: a card is of one tag, one of images or of histograms also of one run."""

_DRAWN: Final = f"""
    {CARDS}.every(card => card.querySelector('image-card') ? card.querySelector('img')?.naturalWidth > 0
        : card.querySelector('histogram-card') ? card.querySelector('.histograms path') : card.querySelector('line-chart'))
"""


class Box(NamedTuple):
    """A part of a page, in pixels."""

    left: float
    top: float
    width: float
    height: float


@contextmanager
def tensorboard(recordings: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows a directory, for as long as this lasts.

    Raises:
        BrowserError: It does not start.
    """
    with TemporaryDirectory(prefix="tensorboard-") as own, (Path(own) / "said").open("w+b") as said:
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(recordings), "--host", "127.0.0.1", "--port", "0"]
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"TMPDIR": own})
        try:
            yield _address(process, Path(said.name))
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _address(process: subprocess.Popen[bytes], said: Path) -> str:
    end = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", said.read_text())):
        if process.poll() is not None or time.monotonic() > end:
            raise BrowserError(f"TensorBoard has not started: {said.read_text()}")
        time.sleep(0.05)
    return found[0]


def keep_settings(page: Page, address: str, **settings: object) -> None:
    """Set what TensorBoard lets its users choose, in its own names, for all pages that are opened later."""
    page.open(address)
    page.until(f"location.href.startsWith('{address}')")
    page.evaluate(f"localStorage.setItem('_tb_global_settings', {json.dumps(json.dumps(settings))})")


def open_time_series(page: Page, address: str, tags: str, cards: int) -> None:
    """Open the page Time Series on some tags, and wait until every card shows something.

    Args:
        tags: A regular expression.
        cards: How many there are going to be.
    """
    _open(page, f"{address}/?tagFilter={quote(tags)}#timeseries", f"{CARDS}.length == {cards}")
    page.until(_DRAWN)


def open_images(page: Page, address: str, tags: str, images: int) -> None:
    """Open the page Images likewise. Below those that are looked for it shows all."""
    drawn = f"{everywhere('img')}.filter(img => img.naturalWidth > 0)"
    _open(page, f"{address}/#images&tagFilter={quote(tags)}", f"{drawn}.length >= {images}")


def _open(page: Page, where: str, there: str) -> None:
    """TensorBoard shows what it has read so far: the page is opened again until everything is there.

    A machine that is busy may need long for one opening, so each has more time than the one before.
    """
    for seconds in OPENINGS_S:
        page.open("about:blank")
        page.open(where)
        with suppress(BrowserError):
            page.until(there, seconds)
            return
    raise BrowserError(f"{where} does not show {there}, but:\n{page.evaluate('document.body.innerText')}")


def box_of(page: Page, elements: str) -> Box:
    """The smallest part of a page that has all of some elements in it.

    Args:
        elements: An expression that is a list of them.
    """
    left, top, right, bottom = page.evaluate(f"""
        (boxes => [Math.min(...boxes.map(one => one.left)), Math.min(...boxes.map(one => one.top)),
                   Math.max(...boxes.map(one => one.right)), Math.max(...boxes.map(one => one.bottom))])
        ({elements}.map(one => one.getBoundingClientRect()))
    """)
    return Box(left, top, right - left, bottom - top)


def everywhere(selector: str) -> str:
    """All elements of a page that a selector is true of, also those in components that hide what they are made of."""
    return f"""
        (function all(root) {{
            return [...root.querySelectorAll('*')].flatMap(one =>
                [...(one.matches('{selector}') ? [one] : []), ...(one.shadowRoot ? all(one.shadowRoot) : [])])
        }})(document)
    """
