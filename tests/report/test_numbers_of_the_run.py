"""The run's own numbers have curves and checks, where they were recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow.parquet import write_table
from recorded_job import merged
from reported_job import STEPS, WHEN, modelled, record

from monitor.merge.outputs import PER_RANK
from monitor.pytorch import TrainerMon
from monitor.report.findings import BAD, GOOD


def numbers_of_the_run(folder: Path, losses: Mapping[int, float]) -> None:
    """Add a loss, and the norm of gradients before and after clipping, to a merged set."""
    of_step = {"loss": np.linspace(4, 2, STEPS), "grad_norm": np.linspace(3, 1, STEPS)}
    for step, loss in losses.items():
        of_step["loss"][step] = loss
    of_step["grad_norm_clipped"] = np.minimum(of_step["grad_norm"], 2.0)
    rows = [(step, rank, name) for step in range(STEPS) for rank in range(2) for name in of_step]
    known = {"kind": ["run"] * len(rows), "step": [one[0] for one in rows], "rank": [one[1] for one in rows]}
    known |= {"name": [one[2] for one in rows], "vpp_stage": [0] * len(rows)}
    columns = [pa.array(known[one.name], one.type) if one.name in known else pa.nulls(len(rows), one.type) for one in PER_RANK]
    values = pa.array([of_step[name][step] for step, _, name in rows])
    write_table(
        pa.table([*columns, values], names=[*PER_RANK.names, "value"]), folder / "per_rank" / f"run_0-{STEPS - 1}.parquet"
    )


@pytest.mark.parametrize("loss", [2.5, np.nan, 1e6])
def test_loss_and_norm_have_curves_and_clipped_steps_are_marked(loss: float, tmp_path: Path) -> None:
    record(tmp_path)
    merged(tmp_path)
    numbers_of_the_run(tmp_path / "merged", {WHEN: loss})
    model, checks, verdict = modelled(tmp_path / "merged")
    states = {one.name: one.state for one in checks}
    assert [one["name"] for one in model.data["run"]] == ["loss", "grad_norm", "grad_norm_clipped"]
    assert (states["Loss"], states["Total gradient norm"]) == (GOOD if loss == 2.5 else BAD, GOOD)
    clipped = [one["at"] for one in model.data["marks"] if one["what"] == "clipped"]
    assert clipped == [step for step in range(STEPS) if 3 - 2 * step / (STEPS - 1) > 2]
    if loss != 2.5:
        assert verdict.says.startswith(f"First came loss on rank 0 in step {WHEN}: its value is ")
        assert model.data["at"] == WHEN
    assert "run" not in [one["name"] for one in model.data["kinds"]]


@pytest.mark.parametrize(("first", "state"), [(-2.0, GOOD), (2.0, BAD)])
def test_a_loss_that_was_below_zero_may_pass_it(first: float, state: str, tmp_path: Path) -> None:
    record(tmp_path)
    merged(tmp_path)
    numbers_of_the_run(tmp_path / "merged", {0: first, WHEN: 1e-3})
    _, checks, _verdict = modelled(tmp_path / "merged")
    assert next(one.state for one in checks if one.name == "Loss") == state


@pytest.mark.parametrize("fault", [False, True])
def test_a_run_that_logs_its_loss_and_clips_shows_both(fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    (tmp_path / "config.json").write_text(json.dumps({"wg_distribution": True, "format": "parquet"}))
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with TrainerMon(tmp_path / "config.json", params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
        for step in range(STEPS):
            loss = model(torch.randn(64, 5)).square().mean()
            loss.backward()
            monitor.log(loss=loss * (1e6 if fault and step == WHEN else 1))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if step % 3 else 1e3)
            optimizer.step()
            optimizer.zero_grad()
    model_of_page, checks, verdict = modelled(tmp_path / "out")
    states = {one.name: one.state for one in checks}
    shown = [one["name"] for one in model_of_page.data["run"]]
    assert shown == ["loss", "grad_norm", "grad_norm_clipped", "learning_rate.0"]
    assert (states["Loss"], states["Total gradient norm"]) == (BAD if fault else GOOD, GOOD)
    clipped = [one["at"] for one in model_of_page.data["marks"] if one["what"] == "clipped"]
    assert clipped == [step for step in range(STEPS) if step % 3]
    if fault:
        assert verdict.says.startswith(f"First came loss on rank 0 in step {WHEN}: its value is ")
