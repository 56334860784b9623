"""Take the picture of what TensorBoard shows of training metrics. Needs a Chromium.

python tools/pictures/train_metrics.py pictured
python tools/pictures/take_metrics.py pictured/board docs/pictures
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from browser import BrowserError, Page, page
from take import save
from tensorboard_page import CARDS, box_of, keep_settings, open_time_series, tensorboard

WIDTH: Final = 1400
HEIGHT: Final = 1700
"""Of the browser's window: a card below it is not drawn."""

RUN: Final = (66, 80, 102)
"""The colour that TensorBoard gives to the first run."""
PIXELS_OF_DOTS: Final = 1000
PATIENCE_S: Final = 60.0

TAGS: Final = (
    "adam_m_norm/h.0.mlp.0.weight",
    "grad-norm",
    "learning-rate",
    "local_norm/h.0.mlp.0.weight",
    "loss",
    "loss-vs-samples",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("board", type=Path, help="the directory of the ranks' directories")
    parser.add_argument("pictures", type=Path, help="where to put the picture")
    arguments = parser.parse_args()
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    with tensorboard(arguments.board) as address, page(WIDTH, HEIGHT) as shown:
        print(take_metrics(shown, address, arguments.pictures))


def take_metrics(shown: Page, address: str, pictures: Path) -> Path:
    """Take the picture. Returns where it is."""
    keep_settings(shown, address, ignoreOutliers=False)
    tags = "|".join(tag.replace(".", r"\.") for tag in TAGS)
    open_time_series(shown, address, f"^({tags})$", len(TAGS))
    end = time.monotonic() + PATIENCE_S
    while not has_curves(path := save(shown, box_of(shown, CARDS), pictures / "training-metrics.png")):
        if time.monotonic() > end:
            raise BrowserError(f"no curves are drawn in {path}")
        time.sleep(0.2)
    return path


def has_curves(picture: Path) -> bool:
    """Whether there is more in the colour of the run than the dot beside its name: curves come after all else on the page."""
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    return int((np.abs(pixels - RUN).max(axis=2) < 12).sum()) > PIXELS_OF_DOTS


if __name__ == "__main__":
    main()
