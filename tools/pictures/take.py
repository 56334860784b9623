"""Take pictures of what TensorBoard shows of a recording: histograms, heatmaps, curves. Needs a Chromium.

MONITOR_OUTPUT_DIR=pictured python tools/pictures/train.py
python tools/pictures/take.py pictured docs/pictures
"""

from __future__ import annotations

import argparse
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL import Image

from browser import Page, page
from tensorboard_page import CARDS, Box, box_of, everywhere, open_images, open_time_series, tensorboard

WIDTH: Final = 1400
HEIGHT: Final = 1300
"""Of the browser's window: every card that is in a picture has to be in it."""

COLOURS: Final = 128
"""In a picture, so that it is small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, help="a directory of ranks' directories, of a run with histograms")
    parser.add_argument("pictures", type=Path, help="where to put the pictures")
    parser.add_argument("--parameter", default="h.0.mlp.0.weight", help="which one to show")
    arguments = parser.parse_args()
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    with tensorboard(arguments.recordings) as address, page(WIDTH, HEIGHT) as shown:
        for path in take(shown, address, arguments.parameter, arguments.pictures):
            print(path)


def take(shown: Page, address: str, parameter: str, pictures: Path) -> list[Path]:
    """Take all pictures. Returns where they are."""
    tag = parameter.replace(".", r"\.")
    open_time_series(shown, address, f"{tag}/.*(adam_update_h|magnitude|underflow_e4m3)", 6)
    adam, magnitudes = f"{CARDS}.slice(0, 2)", f"{CARDS}.slice(2, 4)"
    paths = [
        save(shown, box_of(shown, adam), pictures / "adam-update.png"),
        save(shown, box_of(shown, magnitudes), pictures / "magnitudes.png"),
    ]
    open_images(shown, address, f"{tag}/", 2)
    first = f"{everywhere('tf-category-paginated-view')}.slice(0, 1)"
    return [*paths, save(shown, box_of(shown, first), pictures / "images.png")]


def save(shown: Page, box: Box, path: Path) -> Path:
    """Save a part of a page."""
    picture = Image.open(BytesIO(shown.picture(**box._asdict()))).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


if __name__ == "__main__":
    main()
