"""What ``docs/distributed.md`` shows can be done as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from two_ranks import TORCHRUN

from monitor.coordinator.series_file import PlacementRecord, ShardRecord
from monitor.pytorch import TrainerMon

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
TRAINING, ATTACHING, READING = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"param_distribution": True}))
    model = nn.Linear(2, 2)
    groups = dict.fromkeys(("pipeline_group", "data_parallel_group", "tensor_parallel_group"))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "TrainerMon": TrainerMon,
        "torch": torch,
        **groups,
    }


def step(training: dict[str, Any]) -> None:
    training["model"](torch.ones(1, 2)).sum().backward()
    training["optimizer"].step()


def test_two_ranks_record_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "config.json").write_text('{"wg_distribution": true}')
    ended = subprocess.run(
        [sys.executable, *TORCHRUN, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MONITOR_OUTPUT_DIR": "monitor_output"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    first, second = sorted(tmp_path.glob("monitor_output/*-rank*"), key=lambda path: path.name.split("-rank")[1])
    assert {path.name.rsplit("_", 1)[0] for path in first.glob("*.csv")} == {"grad_unreduced", "grad_reduced", "run"}
    assert {path.name.rsplit("_", 1)[0] for path in second.glob("*.csv")} == {"grad_unreduced", "run"}


def test_the_way_to_attach_and_the_way_to_read_what_a_row_is(
    training: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(ATTACHING, training)
    step(training)
    training["monitor"].close()
    (directory,) = Path("monitor_output").glob("*-rank0-*")
    (shown,) = re.findall(r"monitor_output/\S+-rank0-\w+", READING)
    exec(READING.replace(shown, str(directory)), {})
    printed = [line.split(" Placement")[0] for line in capsys.readouterr().out.splitlines()]
    weights = [f"{kind} {name}" for kind in ("param_origin", "param_updated") for name in ("weight", "bias")]
    assert printed == [*weights, "run learning_rate.0"]


def test_every_field_of_a_placement_is_explained() -> None:
    fields = [*PlacementRecord.model_fields, *(f"shard.{field}" for field in ShardRecord.model_fields)]
    rows = re.findall(r"^\| (`.*?) \|", TEXT, flags=re.MULTILINE)
    explained = {field for row in rows for field in re.findall(r"`([\w.]+)`", row)}
    assert {*fields} - {"shard"} <= explained
