"""Two runs of which one was thinned: the common steps are compared, and the others are named."""

from __future__ import annotations

from pathlib import Path

from test_thinned_jobs import job
from typer.testing import CliRunner

from monitor.compare.cli import app


def test_steps_that_were_thinned_are_named_as_not_compared(tmp_path: Path) -> None:
    for name, count in (("left", 6), ("right", 0)):
        (rank,) = job(tmp_path / name, "csv", count)
        rank.close()
    ran = CliRunner().invoke(app, [str(tmp_path / "left"), str(tmp_path / "right")])
    said = " ".join(ran.stdout.split())
    assert "left: rank 0, steps 1 to 11 by 2: thinned to stay within max_output_bytes" in said
    assert "the same: 102 rows that both sides have" in said
    assert ran.exit_code == 1
