"""Several trainings of one process in one output directory: each has its own events, and none has those of another."""

from __future__ import annotations

import gc
import json
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hanging import until
from torch import nn
from typer.testing import CliRunner

from monitor.anomalies.ranking.cli import app as rank_anomalies
from monitor.coordinator.manifest_format import MANIFEST_FILE
from monitor.pytorch import TrainerMon
from monitor.report.cli import app as report
from monitor.report.findings import BAD, GOOD

STEPS = 12
CONFIG = {"wg_distribution": True, "xy_distribution": True, "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}


def train(fault_at: int | None) -> tuple[TrainerMon, nn.Module]:
    """The monitor and its model, after steps of which one may have a batch with a NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = TrainerMon(CONFIG, params_have_main_grad=False)
    monitor.set_monitor(model, 1, optimizer)
    for step in range(STEPS):
        batch = torch.randn(3, 4)
        if step == fault_at:
            batch[0, 0] = torch.nan
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return monitor, model


def manifests_in(base: Path) -> list[dict[str, Any]]:
    """Those that are there already, in the order of the recordings."""
    found = (json.loads(path.read_text()) for path in base.glob(f"*-rank0-*/{MANIFEST_FILE}"))
    return sorted(found, key=itemgetter("recording"))


def reported(base: Path, job: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(CliRunner().invoke(report, [str(base), "--job", job, "--json"]).stdout)
    return told


@pytest.mark.parametrize("ended", ["closed", "freed", "open"])
def test_each_training_of_a_process_has_its_own_events(ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next training begins before the writer of a model that was freed has ended."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    trained = []
    for fault_at in (6, None, 5):
        trained.append(train(fault_at))
        if ended == "closed":
            trained[-1][0].close()
        elif ended == "freed":
            trained.clear()
            gc.collect()
    for monitor, _ in trained:
        monitor.close()
    assert until(lambda: [one["closed"] for one in manifests_in(tmp_path)] == [True] * 3, 60.0)
    manifests = manifests_in(tmp_path)
    said = CliRunner().invoke(rank_anomalies, [str(tmp_path), "-k", "1000"], env={"COLUMNS": "1000"}).stdout
    rows = [line.split() for line in said.splitlines() if "AnomalyNan" in line]
    first = min(int(row[2]) for row in rows)
    assert "; 2 origins" in said
    assert {(int(row[2]) - first, row[3]) for row in rows if "origin" in row} == {(0, "6"), (2, "5")}
    found = [reported(tmp_path, one["job_id"]) for one in manifests]
    states = [next(one["state"] for one in each["checks"] if one["name"] == "Alert rules") for each in found]
    assert states == [BAD, GOOD, BAD]
    assert [one["place"].get("step") for one in found] == [6, None, 5]
