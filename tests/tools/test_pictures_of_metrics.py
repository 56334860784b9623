"""Training metrics as a browser shows them on TensorBoard's page."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_runs import ROOT, run_python
from evidence import PROVES

import browser
import take_metrics
import tensorboard_page

pytestmark = [
    pytest.mark.skipif(browser.program() is None, reason="no Chromium is installed"),
    pytest.mark.skipif(not PROVES, reason="make prove takes the pictures of the documents"),
]


def test_a_run_is_trained_shown_and_pictured(tmp_path: Path) -> None:
    run = run_python(tmp_path, str(ROOT / "tools" / "pictures" / "train_metrics.py"), str(tmp_path), "--steps", "5")
    assert run.returncode == 0, run.stderr
    with (
        tensorboard_page.tensorboard(tmp_path / "board") as address,
        browser.page(take_metrics.WIDTH, take_metrics.HEIGHT) as page,
    ):
        picture = take_metrics.take_metrics(page, address, tmp_path)
        said = page.evaluate(f"{tensorboard_page.CARDS}.map(card => card.innerText.split('\\n').join(''))")
    assert all(any(one.startswith(tag) for one in said) for tag in take_metrics.TAGS), said
    assert len(said) == len(take_metrics.TAGS)
    assert take_metrics.has_curves(picture)
