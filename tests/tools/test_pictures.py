"""A run that is trained, its TensorBoard, and a browser that looks at it: what people see is what was measured."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from demo_runs import ROOT, run_python
from evidence import PROVES
from PIL import Image

import browser
import take
import tensorboard_page
from browser import Page
from monitor.sinks.heatmaps import HeatmapHistory, drawn

PICTURES = ROOT / "tools" / "pictures"
STEPS = 9
PARAMETER = "h.0.mlp.0.weight"

TEXT = """
function text(node) {
    const inside = [...node.childNodes, ...(node.shadowRoot ? [node.shadowRoot] : [])]
    return node.nodeName == 'STYLE' ? '' : node.nodeType == Node.TEXT_NODE ? node.data : inside.map(text).join(' ')
}
"""
"""All that an element says, components within it included."""

pytestmark = [
    pytest.mark.skipif(browser.program() is None, reason="no Chromium is installed"),
    pytest.mark.skipif(not PROVES, reason="make prove takes the pictures of the documents"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a small GPT was trained for a few steps."""
    base = tmp_path_factory.mktemp("pictured")
    run = run_python(base, str(PICTURES / "train.py"), "--steps", str(STEPS))
    assert run.returncode == 0, run.stderr
    return base


@pytest.fixture(scope="module")
def taken(recorded: Path) -> Iterator[dict[str, Any]]:
    """A page on the recording, and the address of what shows it."""
    with tensorboard_page.tensorboard(recorded) as address, browser.page(1400, 1300) as page:
        yield {"page": page, "address": address}


@pytest.fixture(scope="module")
def time_series(taken: dict[str, Any]) -> Page:
    """The page Time Series with six cards: a heatmap and a histogram of the update, and what a gradient has twice."""
    tags = f"{PARAMETER}/.*(adam_update_h|magnitude|underflow_e4m3)"
    tensorboard_page.open_time_series(taken["page"], taken["address"], tags, 6)
    return taken["page"]


def cards(page: Page, expression: str) -> list[Any]:
    """What an expression is for each card, by the card's tag."""
    tag = "card.innerText.split('\\n').slice(0, 2).join('')"
    return dict(page.evaluate(f"{tensorboard_page.CARDS}.map(card => [{tag}, {expression}])"))


def pixels(page: Page, elements: str) -> np.ndarray:
    """Red, green and blue of a part of the page, shape ``(height, width, 3)``."""
    box = tensorboard_page.box_of(page, elements)
    return np.array(Image.open(BytesIO(page.picture(**box._asdict()))).convert("RGB"))


def shades_in(picture: np.ndarray) -> np.ndarray:
    """How many pixels there are of each colour that heatmaps are made of, from pale to deep."""
    palette = Image.open(BytesIO(drawn(HeatmapHistory.empty(66).with_step(0, np.zeros(66, np.uint8), 2)).png)).getpalette()
    colours = np.array(palette).reshape(-1, 3)[1:254]
    colour, place = np.unique(colours @ [1 << 16, 1 << 8, 1], return_inverse=True)
    found, counts = np.unique(picture.reshape(-1, 3).astype(int) @ [1 << 16, 1 << 8, 1], return_counts=True)
    by_colour = dict(zip(found.tolist(), counts.tolist(), strict=True))
    return np.array([by_colour.get(one, 0) for one in colour.tolist()])[place]


def test_the_cards_are_those_of_the_parameter(time_series: Page) -> None:
    gradients = {f"grad_{how}_{what}" for how in ("reduced", "unreduced") for what in ("magnitude_histogram", "underflow_e4m3")}
    kinds = gradients | {"adam_update_heatmap", "adam_update_histogram"}
    assert set(cards(time_series, "0")) == {f"0:{PARAMETER}/rank0/{kind}" for kind in kinds}


def test_a_histogram_is_drawn_for_every_step(time_series: Page) -> None:
    drawn = cards(time_series, "card.querySelectorAll('.histograms path').length")
    assert {tag: count for tag, count in drawn.items() if "histogram" in tag} == {
        tag: STEPS for tag in drawn if "histogram" in tag
    }


def test_the_axis_of_magnitudes_is_of_powers_of_two(time_series: Page) -> None:
    axes = cards(time_series, "[...card.querySelectorAll('.x-axis .tick text')].map(one => Number(one.textContent))")
    powers = axes[f"0:{PARAMETER}/rank0/grad_reduced_magnitude_histogram"]
    assert powers == sorted(powers)
    assert -60 < powers[0] < powers[-1] < 5


def test_the_axis_of_updates_has_minus_one_and_one(time_series: Page) -> None:
    axes = cards(time_series, "[...card.querySelectorAll('.x-axis .tick text')].map(one => Number(one.textContent))")
    ticks = axes[f"0:{PARAMETER}/rank0/adam_update_histogram"]
    assert ticks[0] >= -2
    assert ticks[-1] <= 2
    assert max(ticks) >= 0.8


def test_a_heatmap_is_seen_in_its_colours(time_series: Page) -> None:
    found = shades_in(pixels(time_series, f"{tensorboard_page.CARDS}.filter(card => card.querySelector('img'))"))
    assert (found[10:240:10] > 0).sum() > 10
    assert found.sum() > 20_000


def test_histograms_are_not_blank(time_series: Page) -> None:
    shown = pixels(time_series, f"{tensorboard_page.CARDS}.filter(card => card.querySelector('.histograms')).slice(0, 1)")
    assert (shown.min(axis=2) < 128).sum() > 1_000


def test_the_page_images_shows_the_heatmap_of_the_last_step(taken: dict[str, Any], time_series: Page) -> None:
    del time_series  # it is looked at before this page takes its place
    page: Page = taken["page"]
    tensorboard_page.open_images(page, taken["address"], f"{PARAMETER}/.*update", 1)
    first = f"{tensorboard_page.everywhere('tf-image-loader')}.slice(0, 1)"
    words = " ".join(page.evaluate(f"({TEXT})({first}[0])").split())
    assert f"0:{PARAMETER}/rank0/adam_update_heatmap" in words
    assert f"step {STEPS - 1}" in words
    assert shades_in(pixels(page, first)).sum() > 20_000


def test_the_pictures_are_small_and_not_blank(taken: dict[str, Any], tmp_path: Path) -> None:
    paths = take.take(taken["page"], taken["address"], PARAMETER, tmp_path)
    assert {path.name for path in paths} == {"adam-update.png", "magnitudes.png", "images.png"}
    assert [path.name for path in paths if path.stat().st_size > 150_000] == []
    colours = [len(Image.open(path).convert("RGB").getcolors(1 << 24)) for path in paths]
    assert min(colours) > 20


def test_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/tmp") as own:  # a short name: the browser has a socket in it
        monkeypatch.setattr(tempfile, "tempdir", own)
        with browser.page(300, 200) as page:
            page.open("data:text/html,<p>here")
            assert page.until("document.body.innerText") == "here"
            assert os.listdir(own)
            its = subprocess.run(["pgrep", "-f", own], capture_output=True, text=True, check=True).stdout.split()
        assert os.listdir(own) == []
        assert [one for one in its if is_alive(int(one))] == []


def is_alive(process: int) -> bool:
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_page_that_never_shows_what_is_awaited_is_an_error() -> None:
    with browser.page(300, 200) as page, pytest.raises(browser.BrowserError, match=r"not seen in 0\.2 s: window\.never"):
        page.until("window.never", seconds=0.2)


def test_a_browser_that_ends_is_an_error() -> None:
    with browser.page(300, 200) as page:
        page.ask("Browser.close")
        with pytest.raises(browser.BrowserGone, match="has ended"):
            page.until("window.never", seconds=30)
