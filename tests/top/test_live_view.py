"""The live view of a job that begins while it waits, raises an alert, and ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from monitor.pytorch import TrainerMon
from monitor.top import cli

CONFIG = {
    "wg_distribution": True,
    "format": "parquet",
    "step_count_per_record": 1,
    "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
}


def job(base: Path, steps: int, kept: ExitStack) -> TrainerMon:
    """Trains; the gradients of the last step are NaN."""
    (base.parent / "config.json").write_text(json.dumps(CONFIG))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = kept.enter_context(TrainerMon(base.parent / "config.json", params_have_main_grad=False))
    monitor.set_monitor(model, 1, optimizer)
    for step in range(steps):
        loss = model(torch.full((4, 3), torch.nan if step == steps - 1 else 1.0)).square().mean()
        monitor.log(loss=loss, accuracy=step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.generate_wgrad_metrics()
    return monitor


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    with ExitStack() as stack:
        yield stack


def pauses(patched: pytest.MonkeyPatch, *happens: Callable[[], object]) -> None:
    """Let something happen in each pause of the view."""
    turns = iter(happens)
    patched.setattr(cli, "time", SimpleNamespace(**vars(time) | {"sleep": lambda _seconds: next(turns)()}))


def test_it_waits_for_the_job_shows_what_rules_found_and_ends_with_it(
    tmp_path: Path, kept: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses(monkeypatch, lambda: job(tmp_path / "out", 12, kept), kept.close)
    shown = Console(file=StringIO(), force_terminal=True, width=80)
    look = cli._live(shown, tmp_path / "out", None, 2.0)
    assert look.has_ended
    assert look.alerts is not None
    assert look.alerts.events > 0
    text = " ".join(str(shown.file.getvalue()).split())  # type: ignore[attr-defined]
    assert "has no directory of a rank" in text
    assert "Looking again every 2 s." in text
    assert "most unusual now (up to step 11)" in text
    assert f"alerts: {look.alerts.events}. First came" in text
    assert "step 11: loss nan, " in text


def test_ctrl_c_ends_the_view_and_leaves_the_last_look(
    tmp_path: Path, kept: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    job(tmp_path / "out", 3, kept)
    pauses(monkeypatch, interrupted)
    look = cli._live(Console(file=StringIO(), force_terminal=True), tmp_path / "out", None, 2.0)
    assert [one.rank for one in look.ranks] == [0]


def test_without_a_terminal_it_prints_one_look_with_the_status_of_the_job(tmp_path: Path, kept: ExitStack) -> None:
    job(tmp_path / "out", 3, kept)
    done = CliRunner().invoke(cli.app, [str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "alerts: " in done.stdout
    assert "AnomalyNan" in done.stdout
    assert CliRunner().invoke(cli.app, [str(tmp_path / "nowhere")]).exit_code == 2


def test_wrong_bits_that_a_rank_has_found_are_shown_and_not_well(kept: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"param_distribution": True, "replica_check": True, "format": "parquet"}))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = kept.enter_context(TrainerMon(tmp_path / "config.json", params_have_main_grad=False))
    monitor.set_monitor(model, 1, optimizer)
    for step in range(6):
        if step == 4:
            model[1].weight.detach().view(torch.int32)[0, 0] ^= 1
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    result = CliRunner().invoke(cli.app, [str(tmp_path / "out"), "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["well"]) == (1, False)
    (said,) = told["wrong_bits"]
    assert "changed after the optimizer's step 3 and before step 4: 1.weight" in said
    shown = CliRunner().invoke(cli.app, [str(tmp_path / "out"), "--once"])
    assert "wrong bits: rank 0" in shown.stdout
