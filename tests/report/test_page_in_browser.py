"""The page in a real browser: what it shows is what was recorded, and it asks the network for nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reported_job import LAYERS, NAMES, STEPS, WHEN, modelled, record, reported

import browser
from browser import Page
from monitor.compare.runs import How
from monitor.report import page
from monitor.report.against import OtherRun
from monitor.report.model import Model, model_of
from monitor.report.page import FILES, VENDORED, page_of

HOSTILE = "</script><img src=x onerror=alert(1)>.weight"
NAME = NAMES["actv"][2]
MODIFIERS = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38}

needs_browser = pytest.mark.skipif(
    browser.program() is None and os.environ.get("CHROMIUM_IS_THERE") != "1", reason="no Chromium is installed"
)

CONTRASTS = """(() => {
    const parse = text => (text.match(/[0-9.]+/g) || []).map(Number)
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
    const behind = node => {
        for (; node; node = node.parentElement) {
            const found = parse(getComputedStyle(node).backgroundColor)
            if (found.length < 4 || found[3] > 0) return found
        }
        return [255, 255, 255]
    }
    const found = {}
    for (const node of document.querySelectorAll('body *')) {
        const own = [...node.childNodes].some(one => one.nodeType === 3 && one.data.trim())
        if (!own || ['SCRIPT', 'STYLE'].includes(node.tagName) || !node.getClientRects().length) continue
        const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))]
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
        const name = node.tagName + '.' + node.className
        found[name] = Math.min(ratio, found[name] || 99)
    }
    return found
})()"""

PAINTED = """(() => {
    const canvas = document.querySelector('#tensors canvas.cells'), context = canvas.getContext('2d')
    const rows = Number(canvas.dataset.rows), columns = Number(canvas.dataset.columns), found = []
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
        const x = Math.floor((column + 0.5) * canvas.width / columns), y = Math.floor((row + 0.5) * canvas.height / rows)
        found.push([...context.getImageData(x, y, 1, 1).data.slice(0, 3)].join())
    }
    return found
})()"""
NAN_COLOUR = "179,0,27"


def broken(rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
    return values * np.nan if rank == 1 and step >= WHEN and (kind, name) == ("actv", NAME) else values


@contextmanager
def opened_page(model: Model, path: Path) -> Iterator[Page]:
    """The page of a model, in a browser that notes errors."""
    path.write_text(page_of(model), encoding="utf-8")
    with browser.page(1400, 1100) as opened:
        for domain in ("Page", "Runtime", "Network", "Log"):
            opened.ask(f"{domain}.enable")
        opened.ask(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.errors = []; onerror = text => errors.push(text);"
            "addEventListener('securitypolicyviolation', one => errors.push(one.violatedDirective));"
            "addEventListener('unhandledrejection', one => errors.push(String(one.reason)));"
            "console.error = console.warn = (...all) => errors.push(all.join(' '))",
        )
        opened.open(path.as_uri())
        opened.until("document.body.dataset.ready")
        yield opened


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, dict[str, Any]]]:
    """The page of a run with a NaN and a hostile name, in one browser for all tests."""
    folder = tmp_path_factory.mktemp("page")
    names = {**NAMES, "grad_unreduced": [*NAMES["grad_unreduced"], HOSTILE]}
    model, _, _ = modelled(record(folder / "run", broken, names=names))
    with opened_page(model, folder / "report.html") as opened:
        yield opened, model.data


def press(opened: Page, key: str, times: int = 1) -> None:
    code = {"key": key, "code": key, "windowsVirtualKeyCode": MODIFIERS[key]}
    for _ in range(times):
        opened.ask("Input.dispatchKeyEvent", type="keyDown", **code, **({"text": "\r"} if key == "Enter" else {}))
        opened.ask("Input.dispatchKeyEvent", type="keyUp", **code)


def focused(opened: Page) -> str:
    return str(opened.evaluate("(one => (one.closest('[id]') || one).id + ' ' + one.tagName)(document.activeElement)"))


def centre(opened: Page, selector: str, row: float, column: float) -> dict[str, float]:
    """The middle of a cell, on the screen."""
    opened.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    box = opened.evaluate(
        f"(box => [box.left, box.top, box.width, box.height])(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    rows, columns = opened.evaluate(
        f"(data => [Number(data.rows), Number(data.columns)])(document.querySelector({selector!r}).dataset)"
    )
    return {"x": box[0] + (column + 0.5) * box[2] / columns, "y": box[1] + (row + 0.5) * box[3] / rows}


def point(opened: Page, selector: str, row: float, column: float, *, click: bool = False) -> None:
    """Move the mouse to a cell."""
    where = centre(opened, selector, row, column)
    opened.ask("Input.dispatchMouseEvent", type="mouseMoved", **where)
    for what in ("mousePressed", "mouseReleased") if click else ():
        opened.ask("Input.dispatchMouseEvent", type=what, button="left", clickCount=1, **where)


def painted(opened: Page, map: str) -> list[str]:  # noqa: A002
    """The colour of each cell of a heat map."""
    found: list[str] = opened.evaluate(PAINTED.replace("#tensors", map))
    return found


@needs_browser
def test_it_opens_without_an_error_and_without_a_request(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, data = shown
    assert opened.evaluate("errors") == []
    assert opened.evaluate("performance.getEntriesByType('resource').map(one => one.name)") == []
    assert opened.evaluate("document.getElementById('says').textContent") == data["verdict"]["says"]
    assert NAME in data["verdict"]["says"]


@needs_browser
def test_as_many_cells_are_painted_nan_as_were_recorded(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, _ = shown
    found = painted(opened, "#tensors")
    assert len(found) == LAYERS * STEPS
    row = NAMES["actv"].index(NAME)
    assert [place for place, one in enumerate(found) if one == NAN_COLOUR] == [
        row * STEPS + step for step in range(WHEN, STEPS)
    ]


@needs_browser
def test_pointing_names_the_cell_and_clicking_shows_its_curve(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, _ = shown
    point(opened, "#tensors canvas.cells", 1, 12)
    assert opened.evaluate("document.getElementById('tip').textContent").startswith("layers.1.output, step 12: ")
    point(opened, "#tensors canvas.cells", 1, 12, click=True)
    assert opened.evaluate("document.getElementById('curve-title').textContent") == "actv layers.1.output: norm by step"
    assert "step 12" in opened.evaluate("document.getElementById('frame-step').textContent")
    assert opened.evaluate("document.querySelectorAll('#curve .u-legend .u-series').length") == 3


@needs_browser
def test_the_keyboard_alone_reaches_every_control_and_chooses_a_cell(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, _ = shown
    opened.evaluate("document.activeElement.blur(); scrollTo(0, 0); getSelection().removeAllRanges()")
    reached = set()
    for _ in range(80):
        press(opened, "Tab")
        reached.add(focused(opened))
        if focused(opened) == "tensors CANVAS":
            before = opened.evaluate("document.getElementById('tip').textContent")
            press(opened, "ArrowDown")
            press(opened, "ArrowLeft")
            assert opened.evaluate("document.getElementById('tip').textContent") != before
            press(opened, "Enter")
            name = opened.evaluate("document.getElementById('tip').textContent").partition(",")[0]
            assert opened.evaluate("document.getElementById('curve-title').textContent") == f"actv {name}: norm by step"
    assert {"kind SELECT", "tensors CANVAS", "by-rank CANVAS", "curve DIV", "events BUTTON", "about SUMMARY"} <= reached
    assert "maps SUMMARY" in reached


@needs_browser
def test_an_event_is_a_link_to_its_place(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, data = shown
    opened.evaluate(
        "document.querySelector('#kind').value = '1', document.querySelector('#kind').dispatchEvent(new Event('change'))"
    )
    opened.evaluate("document.querySelector('#events button.link').click()")
    assert opened.evaluate("document.getElementById('tip').textContent") == f"{NAME}, step {WHEN}: NaN"
    assert opened.evaluate("document.getElementById('rank-tip').textContent") == f"rank 1, {NAME}: NaN"
    assert data["events"][0]["tensor"] == NAME


@needs_browser
def test_tables_have_what_the_pictures_show(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, _ = shown
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    rows = "[...document.querySelectorAll('#maps tr')].map(one => one.innerText).filter(one => one.startsWith(NAME))[0]"
    cells = opened.until(rows.replace("NAME", repr(NAME)))
    assert cells.split("\t") == [NAME, str(WHEN), "NaN", str(STEPS - WHEN), "0", "0"]
    assert opened.until("document.querySelectorAll('#curve details tbody tr').length") == STEPS


@needs_browser
def test_a_name_with_markup_stays_text(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, data = shown
    assert HOSTILE in data["kinds"][1]["series"]
    opened.evaluate(
        "document.querySelector('#kind').value = '1', document.querySelector('#kind').dispatchEvent(new Event('change'))"
    )
    opened.evaluate("document.querySelector('#tensors canvas.cells').focus()")
    press(opened, "ArrowUp", LAYERS + 1)
    press(opened, "ArrowDown", LAYERS)
    press(opened, "Enter")
    assert opened.evaluate("document.getElementById('tip').textContent").startswith(HOSTILE)
    assert opened.evaluate("document.getElementById('curve-title').textContent") == f"grad_unreduced {HOSTILE}: norm by step"
    assert opened.evaluate("document.querySelectorAll('img').length") == 0


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(shown: tuple[Page, dict[str, Any]], scheme: str) -> None:
    opened, _ = shown
    opened.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    found = opened.evaluate(CONTRASTS)
    assert len(found) > 10
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    assert opened.evaluate("errors") == []


# --- Against another run.


def text(opened: Page, place: str) -> str:
    return str(opened.evaluate(f"document.getElementById({place!r}).textContent"))


def heading(opened: Page, place: str) -> str:
    return str(opened.evaluate(f"document.querySelector('#{place} h3').textContent"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, dict[str, Any]]]:
    """The page of a run in which two tensors are larger or smaller than in another run, and one of them has markup."""
    folder = tmp_path_factory.mktemp("against")
    names = {**NAMES, "grad_unreduced": [*NAMES["grad_unreduced"], HOSTILE]}

    def fault(_rank: int, step: int, _kind: str, name: str, values: np.ndarray) -> np.ndarray:
        return values * {NAME: 4.0, HOSTILE: 0.25}.get(name, 1.0) if step >= WHEN else values

    other, run = record(folder / "other", names=names), record(folder / "run", fault, names=names)
    with reported(run) as (facts, checks, verdict):
        model = model_of(facts, checks, verdict)
        OtherRun(str(other), How()).compared_with(facts).show_in(model)
    with opened_page(model, folder / "report.html") as opened:
        yield opened, model.data["against"]


@needs_browser
def test_the_section_says_what_the_comparison_found_without_a_request(compared: tuple[Page, dict[str, Any]]) -> None:
    opened, data = compared
    assert text(opened, "against-says") == data["says"]
    assert text(opened, "against-title") == data["title"]
    assert not opened.evaluate("document.getElementById('against').hidden")
    assert opened.evaluate("errors") == []
    assert opened.evaluate("performance.getEntriesByType('resource').map(one => one.name)") == []


@needs_browser
def test_a_page_of_one_run_has_no_such_section(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, _ = shown
    assert opened.evaluate("document.getElementById('against').hidden")


@needs_browser
@pytest.mark.parametrize(("scheme", "colours"), [("light", ("179,71,0", "11,79,168")), ("dark", ("255,157,87", "88,166,255"))])
def test_ratios_are_painted_away_from_the_same_in_two_colours(
    compared: tuple[Page, dict[str, Any]], scheme: str, colours: tuple[str, str]
) -> None:
    opened, data = compared
    opened.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    opened.until(f"{PAINTED.replace('#tensors', '#against-map')}.includes({colours[0]!r})")  # the page has seen the change
    found = painted(opened, "#against-map")
    assert len(found) == len(data["tensors"]) * STEPS
    for name, colour in zip((NAME, HOSTILE), colours, strict=True):
        row = [one[1] for one in data["tensors"]].index(name)
        cells = found[row * STEPS : (row + 1) * STEPS]
        assert set(cells[WHEN:]) == {colour}
        assert len({*cells[:WHEN], colour}) == 2
    assert len(set(found)) == 3


@needs_browser
def test_a_click_on_a_tensor_that_differs_shows_the_curves_of_both_runs(compared: tuple[Page, dict[str, Any]]) -> None:
    opened, data = compared
    buttons = opened.evaluate("[...document.querySelectorAll('#against-places button.link')].map(one => one.textContent)")
    assert sorted(buttons) == sorted([f"actv {NAME}", f"grad_unreduced {HOSTILE}"])
    for number, name in enumerate(buttons):
        opened.evaluate(f"document.querySelectorAll('#against-places button.link')[{number}].click()")
        assert heading(opened, "against-curve") == f"{name}: norm by step"
        assert heading(opened, "against-apart") == f"{name}: relative difference"
    labels = opened.evaluate("[...document.querySelectorAll('#against-curve .u-label')].map(one => one.textContent)")
    assert [one.rstrip(":") for one in labels] == ["step", *data["labels"]]
    assert opened.evaluate("document.querySelectorAll('img').length") == 0
    assert opened.evaluate("errors") == []


@needs_browser
def test_pointing_at_a_ratio_gives_both_numbers_and_a_click_shows_the_curves(compared: tuple[Page, dict[str, Any]]) -> None:
    opened, data = compared
    row = [one[1] for one in data["tensors"]].index(NAME)
    point(opened, "#against-map canvas.cells", row, WHEN)
    said = text(opened, "against-tip")
    match = re.fullmatch(r"(.*), step (\d+): norm (\S+) in (\S+), (\S+) in (\S+): (\S+ %) larger", said)
    assert match is not None, said
    assert (match[1], match[2], match[4], match[6]) == (f"actv {NAME}", str(WHEN), *data["labels"])
    assert float(match[5]) / float(match[3]) == pytest.approx(4, rel=1e-4)
    assert float(match[7].removesuffix(" %")) == pytest.approx(300, rel=1e-4)
    point(opened, "#against-map canvas.cells", 0, 0, click=True)
    assert heading(opened, "against-curve") == f"param_origin {NAMES['param_origin'][0]}: norm by step"
    assert text(opened, "against-apart") == f"param_origin {NAMES['param_origin'][0]} is the same in both runs."


@needs_browser
def test_one_kind_of_ratios_can_be_chosen_and_has_a_table(compared: tuple[Page, dict[str, Any]]) -> None:
    opened, data = compared
    kind = data["kinds"].index("actv")
    opened.evaluate(f"(one => {{ one.value = '{kind}'; one.dispatchEvent(new Event('change')) }})($('against-kind'))")
    assert opened.evaluate("Number(document.querySelector('#against-map canvas.cells').dataset.rows)") == LAYERS
    opened.evaluate("document.querySelectorAll('#against details').forEach(one => { one.open = true })")
    rows = opened.until("[...document.querySelectorAll('#against > details tbody tr')].map(one => one.innerText)")
    assert len(rows) == len(data["tensors"])
    assert [sum(one.endswith(end) for one in rows) for end in ("larger", "smaller")] == [1, 1]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_the_comparison_has_contrast(compared: tuple[Page, dict[str, Any]], scheme: str) -> None:
    opened, _ = compared
    opened.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    assert {name: ratio for name, ratio in opened.evaluate(CONTRASTS).items() if ratio < 4.5} == {}
    assert opened.evaluate("errors") == []


# --- Without a browser.


def test_the_page_allows_no_request_and_only_its_own_scripts(tmp_path: Path) -> None:
    model, _, _ = modelled(record(tmp_path, names={"grad_unreduced": [HOSTILE]}, steps=3))
    text = page_of(model)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-", policy)) == len(page.SCRIPTS) + len(page.STYLES)
    assert "<img" not in text
    assert len(re.findall("</script", text, re.IGNORECASE)) == len(page.SCRIPTS) + 2
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["kinds"][0]["series"] == [HOSTILE]


def test_uplot_is_that_of_the_registry_with_its_licence() -> None:
    assert {path.relative_to(FILES).as_posix() for path in (FILES / "uplot").iterdir()} == set(VENDORED)
    for name, digest in VENDORED.items():
        assert sha256((FILES / name).read_bytes()).hexdigest() == digest


def test_scripts_put_text_into_text_nodes_only_and_stay_small() -> None:
    own = [(FILES / name).read_text("utf-8") for name in page.SCRIPTS if not name.startswith("uplot/")]
    assert not any(re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|XMLHttp", one) for one in own)
    assert sum(len(one.splitlines()) for one in own) < 800


@needs_browser
def test_ticks_are_round_steps_or_multiples_of_the_interval(shown: tuple[Page, dict[str, Any]]) -> None:
    opened, _ = shown
    ticks = (
        "Report.prototype.ticks.call({{columns: {0}.length, data: {{first: {0}, last: {1}}}}}, 8).map(column => {0}[column])"
    )
    every_fourth = [*range(0, 240, 4)]
    assert opened.evaluate(ticks.format(every_fourth, every_fourth)) == [0, 40, 80, 120, 160, 200]
    wide = [*range(0, 100_000, 50)], [*range(49, 100_000, 50)]
    assert opened.evaluate(ticks.format(*wide)) == [0, 25_000, 50_000, 75_000]
    assert opened.evaluate(ticks.format([7], [7])) == [7]
    assert opened.evaluate(ticks.format([0, 1, 2, 900, 901], [0, 1, 2, 900, 901])) == [0, 900]
