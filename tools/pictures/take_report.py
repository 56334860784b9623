"""Take pictures of reports: of a healthy run and of one in which a number went bad. Needs a Chromium.

MONITOR_OUTPUT_DIR=healthy make demo ARGS="--steps 240"
MONITOR_OUTPUT_DIR=broken make demo-fault
python tools/pictures/take_report.py healthy/merged-*/report.html docs/pictures/report.png
python tools/pictures/take_report.py broken/report.html docs/pictures/report-fault.png
"""

from __future__ import annotations

import argparse
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL import Image

from browser import Page, page

WIDTH: Final = 1280
HEIGHT: Final = 1000
COLOURS: Final = 128
"""In a picture, so that it is small. Rare colours are kept: those of single cells and of the legend."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="a page that trainermon report has written")
    parser.add_argument("picture", type=Path, help="the PNG file to write")
    arguments = parser.parse_args()
    with page(WIDTH, HEIGHT) as shown:
        print(take(shown, arguments.report, arguments.picture))


def take(shown: Page, report: Path, picture: Path) -> Path:
    """Save the page from its top to the end of the curve."""
    shown.open(report.absolute().as_uri())
    shown.until("document.body.dataset.ready")
    end = shown.evaluate("document.getElementById('curve-section').getBoundingClientRect().bottom + scrollY")
    image = Image.open(BytesIO(shown.picture(left=0, top=0, width=WIDTH, height=end))).convert("RGB")
    picture.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)
    return picture


if __name__ == "__main__":
    main()
