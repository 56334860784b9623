"""What ``docs/optimizers.md`` shows can be done as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from monitor.pytorch import TrainerMon

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_example_attaches_both_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"param_distribution": True}))
    model = nn.Linear(4, 4)
    names: dict[str, object] = {"torch": torch, "TrainerMon": TrainerMon, "model": model}
    exec(EXAMPLE, names)
    model(torch.ones(2, 4)).sum().backward()
    for name in ("muon", "adamw"):
        optimizer = names[name]
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.step()
    monitor = names["monitor"]
    assert isinstance(monitor, TrainerMon)
    monitor.close()
    (found,) = tmp_path.glob("monitor_output/*-rank0-*/param_updated_*.csv")
    assert [line.split(",")[1:3] for line in found.read_text().splitlines()[1:]] == [["weight", "0"], ["bias", "0"]]
