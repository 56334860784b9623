"""Where a loop makes its tensors by default is its own affair (``torch.set_default_device``, ``with torch.device``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from observing import small_gpt, tokens
from watching import EVERYTHING, Output, Row, attached, train, warnings_in

RECORDED: dict[str, Any] = {
    **EVERYTHING,
    "ops": [*EVERYTHING["ops"], "magnitude_histogram"],
    "monitor_mbs_grad": True,
    "mg_direction": True,
    "update_ratio": True,
    "ur_distribution": True,
    "format": ["csv", "parquet"],
}


def test_rows_do_not_depend_on_the_default_device(
    output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(device: str) -> list[list[Row]]:
        torch.manual_seed(0)
        model, batch = small_gpt(), tokens()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        monkeypatch.setattr(model, "forward", inside(model.forward))
        before = set(output.directories())
        with attached(output, model, optimizer, **RECORDED), torch.device(device):
            train(model, optimizer, 3, batch)
        (directory,) = set(output.directories()) - before
        return [output.rows(kind, directory) for kind in kinds(directory)]

    def inside(forward: Any) -> Any:
        """A forward that makes its own tensors on the host."""

        def called(*inputs: torch.Tensor) -> torch.Tensor:
            with torch.device("cpu"):
                return forward(*inputs)

        return called

    assert rows("meta") == rows("cpu")
    assert warnings_in(caplog) == []


def kinds(directory: Path) -> list[str]:
    found = sorted({path.stem.rsplit("_", 1)[0] for path in directory.glob("*_[0-9]*.csv")})
    assert len(found) > 8
    return found
