"""The page of a model: one HTML file that makes no request.

The browser runs only the scripts and styles whose digests are in the page's content security policy. Text of the run is in a
block of JSON, where no ``<`` is left, and the page's scripts put it into text nodes.
"""

from __future__ import annotations

import base64
import gzip
import json
from hashlib import sha256
from pathlib import Path
from typing import Final

from monitor.report.model import Model

FILES: Final = Path(__file__).resolve().parent / "page"
STYLES: Final = ("uplot/uPlot.min.css", "report.css")
SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "heatmap.js", "curves.js", "page.js", "against.js")

VENDORED: Final = {
    "uplot/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot/LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""Files of uPlot 1.6.32 (MIT) as the npm registry has them, with their SHA-256."""


def page_of(model: Model) -> str:
    """The HTML of a model."""
    styles, scripts = [(FILES / name).read_text("utf-8") for name in STYLES], [_script(name) for name in SCRIPTS]
    filled = {
        "styles": " ".join(map(_digest, styles)),
        "scripts": " ".join(map(_digest, scripts)),
        "css": "\n".join(f"<style>{one}</style>" for one in styles),
        "js": "\n".join(f"<script>{one}</script>" for one in scripts),
        "data": json.dumps(model.data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "arrays": base64.b64encode(gzip.compress(bytes(model.arrays), 6, mtime=0)).decode(),
    }
    first, *others = (FILES / "report.html").read_text("utf-8").split("{{")
    parts = (one.partition("}}") for one in others)
    return first + "".join(filled[name] + rest for name, _, rest in parts)


def _script(name: str) -> str:
    return (FILES / name).read_text("utf-8")


def _digest(text: str) -> str:
    """The digest by which a content security policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
