"""Take the picture of what TensorBoard shows of training metrics. Needs a Chromium.

python tools/pictures/train_metrics.py pictured
python tools/pictures/take_metrics.py pictured/board docs/pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from browser import Page, page
from take import save
from tensorboard_page import CARDS, box_of, open_time_series, tensorboard

WIDTH: Final = 1400
HEIGHT: Final = 1300

TAGS: Final = (
    "B-samples-per-day",
    "adam_m_norm/h.0.mlp.0.weight",
    "device_local_norm",
    "grad-norm",
    "learning-rate",
    "local_norm/h.0.mlp.0.weight",
    "loss",
    "loss-vs-samples",
    "weight_norm",
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
    tags = "|".join(tag.replace(".", r"\.") for tag in TAGS)
    open_time_series(shown, address, f"^({tags})$", len(TAGS))
    return save(shown, box_of(shown, CARDS), pictures / "training-metrics.png")


if __name__ == "__main__":
    main()
