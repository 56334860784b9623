"""What a report did not see is not green, and what is no fault is not red."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import compute
from pyarrow.parquet import read_table, write_table
from recorded_job import FORMATS, RecordedRank, merged
from reported_job import NAMES, STEPS, WHEN, cells, modelled, record, reported
from sink_rows import Measured
from torch import nn

from monitor.coordinator.manifest_format import MANIFEST_FILE, ConfigurationRecord
from monitor.pytorch import TrainerMon
from monitor.report.checks import CheckResult
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding
from monitor.report.history import DIFFERS, NAN, Axis, KindHistory
from monitor.sinks.files import StepSpan
from monitor.stats.partials import COUNT, SUM, SUMSQ


def state_of(checks: Iterable[CheckResult], name: str) -> str:
    return next(one.state for one in checks if one.name == name)


@pytest.mark.parametrize(
    ("ops", "element", "state"),
    [
        (("nans",), np.nan, BAD),
        (("nans",), 1.0, NOT_LOOKED_AT),
        (("max",), 1.0, NOT_LOOKED_AT),
        (("min", "max"), -np.inf, BAD),
        (("max", "infs", "nans"), -np.inf, BAD),
        (("min", "max"), 1.0, GOOD),
        (("zeros",), np.nan, NOT_LOOKED_AT),
    ],
)
def test_a_nan_or_an_infinity_that_no_op_shows_is_not_called_absent(
    ops: tuple[str, ...], element: float, state: str, tmp_path: Path
) -> None:
    one = RecordedRank(tmp_path, format="csv", ops=ops)
    for step in range(12):
        one.write(step, {"grad_unreduced": [Measured("w", [1.0, element if step == 9 else 1.0])]})
    one.close()
    with reported(tmp_path) as (_, checks, verdict):
        assert state_of(checks, "NaN and infinity") == state
        if state == BAD:
            assert (verdict.place.step, verdict.place.kind, verdict.place.name) == (9, "grad_unreduced", "w")
        else:
            assert verdict.state == NOT_LOOKED_AT or state == GOOD


def test_warnings_and_failures_of_the_monitor_are_told_with_their_reasons(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    one.write(0, {"grad_unreduced": [Measured("w")]})
    for _ in range(2):
        one.failures.warn("moments", "This optimizer keeps no moments: choose another.")
    one.close()
    with reported(tmp_path) as (_, checks, _verdict):
        (check,) = [check for check in checks if check.name == "Monitoring itself"]
    says = "The monitor warned or failed. Rank 0 (2 times): This optimizer keeps no moments: choose another."
    assert check.finding == CheckFinding(BAD, says)


def test_a_message_of_several_ranks_is_told_once(tmp_path: Path) -> None:
    for rank, times in ((0, 2), (1, 2), (2, 5)):
        one = RecordedRank(tmp_path, rank, world_size=3)
        one.write(0, {"grad_unreduced": [Measured("w")]})
        for _ in range(times):
            one.failures.warn("moments", "This optimizer keeps no moments.")
        if rank < 2:
            one.failures.warn("disk", "The disk is full.")
        one.close()
    with reported(tmp_path) as (_, checks, _verdict):
        (check,) = [check for check in checks if check.name == "Monitoring itself"]
    moments = "Ranks 0, 1, 2 (2 to 5 times each): This optimizer keeps no moments"
    assert check.finding.says == f"The monitor warned or failed. {moments}; ranks 0, 1 (once each): The disk is full."


def test_tensors_that_are_newer_than_the_manifest_of_a_running_job_lack_nothing(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    one.write(0, {"grad_unreduced": [Measured("w")]})
    one.manifest.save()
    one.write(1, {"grad_unreduced": [Measured("w")], "exp_avg": [Measured("w")]})
    one.flush()
    with reported(tmp_path) as (_, checks, _verdict):
        assert state_of(checks, "Tensors whole") == NOT_LOOKED_AT
    one.close()
    with reported(tmp_path) as (_, checks, _verdict):
        assert state_of(checks, "Tensors whole") == GOOD


def test_a_kind_that_the_training_does_not_have_is_told_and_makes_no_run_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD without momentum keeps no moments."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with TrainerMon({"wg_distribution": True, "mv_distribution": True}) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for _ in range(20):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with reported(tmp_path) as (_, checks, verdict):
        assert state_of(checks, "Monitoring itself") == NOT_LOOKED_AT
    assert verdict.state == GOOD
    assert "Some of the requested rows or numbers are missing. Rank 0 (once): mv_distribution is on" in verdict.says


@pytest.mark.parametrize("again", [True, False])
def test_the_first_step_of_a_new_optimizer_lacks_no_moments(
    tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer whose state was removed, as by a failed load, is not a new one."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with TrainerMon({"mv_distribution": True, "param_distribution": True, "ops": ["norm", "nans"]}) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for step in range(20):
            if step == 12 and again:
                optimizer = torch.optim.Adam(model.parameters())
                monitor.set_monitor(model, 1, optimizer)
            elif step == 12:
                optimizer.state.clear()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with reported(tmp_path) as (_, checks, _verdict):
        assert state_of(checks, "No step missing") == (GOOD if again else NOT_LOOKED_AT)


@pytest.mark.parametrize("fault", ["none", "a scale that never fits", "a batch with a NaN"])
def test_a_loss_scale_that_is_too_high_at_first_is_no_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=40)
    config = {
        "wg_distribution": True,
        "monitor_mbs_grad": True,
        "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
    }
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for step in range(60):
            if fault == "a scale that never fits" and step >= 40:
                scaler._scale.fill_(2.0**60)  # as with weights so large that every gradient overflows
            x = torch.randn(16, 4)
            if fault == "a batch with a NaN" and step == 30:
                x[3, 2] = torch.nan
            with torch.autocast("cpu", torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            monitor.log(loss=loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    with reported(tmp_path) as (facts, checks, verdict):
        assert len(facts.overflows) > 0
        expected = GOOD if fault == "none" else BAD
        assert (state_of(checks, "NaN and infinity"), verdict.state) == (expected, expected)
        assert state_of(checks, "Alert rules") == (BAD if fault == "a scale that never fits" else GOOD)
        if fault == "none":
            assert f"The optimizer skipped {len(facts.overflows)} steps, first 0: the loss scale was too high" in verdict.says


def test_weights_that_the_loop_writes_in_every_step_were_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAM adds to the weights before each step, and subtracts the same: some of them are as before, by rounding."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with TrainerMon({"param_distribution": True, "replica_check": True}) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for step in range(30):
            with torch.no_grad():
                for number, p in enumerate(model.parameters()):
                    p.add_(0.01 if step < 4 or number == step % 4 else 0.0)
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with reported(tmp_path) as (_, checks, verdict):
        assert state_of(checks, "Unchanged between steps") == NOT_LOOKED_AT
    assert verdict.state == GOOD


@pytest.mark.parametrize(("update", "state"), [(0.25, GOOD), (np.nan, NOT_LOOKED_AT)])
def test_a_ratio_of_a_weight_of_zeros_is_not_missed_where_the_norm_of_its_update_is_known(
    update: float, state: str, tmp_path: Path
) -> None:
    one = RecordedRank(tmp_path)
    for step in range(12):
        numbers = {COUNT: 4.0, SUM: update if step == 0 else 0.25, SUMSQ: 0.0 if step == 0 else 1.0}
        one.write(step, {"update_ratio": [Measured("w", numbers=numbers)]})
    one.close()
    with reported(tmp_path) as (_, checks, _verdict):
        assert state_of(checks, "NaN and infinity") == state


@pytest.mark.parametrize("fault", [False, True])
def test_updates_that_are_not_there_yet_leave_nothing_unseen(
    fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer begins with zeros, so nothing before it has an update in the first step of which a share could be lost."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with TrainerMon({"optimizer_health": True, "update_ratio": True, "wg_distribution": not fault}) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for step in range(20):
            x = torch.randn(16, 4)
            x[3, 2] = torch.nan if fault and step == 10 else 0.0
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with reported(tmp_path) as (_, checks, _verdict):
        assert state_of(checks, "NaN and infinity") == (BAD if fault else GOOD)


@pytest.mark.parametrize("form", FORMATS)
def test_shares_of_equal_signs_leave_nothing_unseen(form: str, tmp_path: Path) -> None:
    """They are finite, and files of CSV hold them as another kind."""
    one = RecordedRank(tmp_path, format=form, ops=("norm",))
    for step in range(12):
        share = Measured("w", numbers={COUNT: 4.0, SUM: 2.0})
        one.write(step, {"grad_reduced": [Measured("w")], "mg_direction": [share]})
    one.close()
    with reported(tmp_path) as (_, checks, _verdict):
        assert {state_of(checks, name) for name in ("NaN and infinity", "No step missing")} == {GOOD}


def test_rows_without_the_op_that_is_judged_are_not_green(tmp_path: Path) -> None:
    record(tmp_path)
    merged(tmp_path)
    (path,) = (tmp_path / "merged" / "per_rank").glob("actv_*.parquet")
    rows = read_table(path)
    late = compute.greater_equal(rows["step"], WHEN)
    norm = compute.if_else(late, None, rows["norm"])
    write_table(rows.set_column(rows.column_names.index("norm"), "norm", norm), path)
    with reported(tmp_path / "merged") as (_, checks, verdict):
        assert state_of(checks, "NaN and infinity") == NOT_LOOKED_AT
        assert "80 rows of actv have no norm" in next(one.finding.says for one in checks if one.name == "NaN and infinity")
        assert verdict.state == NOT_LOOKED_AT


@pytest.mark.parametrize("kept", [0, 900])
def test_a_damaged_file_of_a_merged_set_is_named(kept: int, tmp_path: Path) -> None:
    record(tmp_path, steps=2)
    merged(tmp_path)
    (path,) = (tmp_path / "merged" / "per_rank").glob("actv_*.parquet")
    content = path.read_bytes()
    path.write_bytes(content[:kept] + bytes(900) + content[kept + 900 :] if kept else b"")
    with pytest.raises((OSError, pa.ArrowException), match=path.name), reported(tmp_path / "merged"):
        pass


def test_a_kind_that_ends_early_on_all_ranks_is_named(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    for step in range(STEPS):
        rows = {kind: [Measured("w", micro_step=0 if kind == "actv" else -1)] for kind in ("actv", "grad_unreduced")}
        one.write(step, rows if step < WHEN else {"grad_unreduced": rows["grad_unreduced"]})
    one.close()
    with reported(tmp_path) as (_, _, verdict):
        assert (verdict.state, verdict.place.step, verdict.place.kind) == (BAD, WHEN, "actv")
        assert f"no rank has actv after step {WHEN - 1}" in verdict.says


def test_a_kind_that_ends_after_the_configuration_changed_is_not_looked_at(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path)
    start = ConfigurationRecord(number=0, origin="start", from_step=0, since=0, on=True, digest="0" * 16, changed="")
    one.manifest.configured(start)
    one.manifest.configured(start.model_copy(update={"number": 1, "origin": "file", "from_step": 5, "since": 5}))
    for step in range(STEPS):
        rows = {kind: [Measured("w", micro_step=0 if kind == "actv" else -1)] for kind in ("actv", "grad_unreduced")}
        one.write(step, rows if step < WHEN else {"grad_unreduced": rows["grad_unreduced"]})
    one.close()
    with reported(tmp_path) as (_, checks, verdict):
        assert (state_of(checks, "No step missing"), verdict.state) == (NOT_LOOKED_AT, NOT_LOOKED_AT)
        says = next(one.finding.says for one in checks if one.name == "No step missing")
        assert f"No rank has actv after step {WHEN - 1}. The configuration was changed" in says


@pytest.mark.parametrize(
    ("file", "kept", "lacking"),
    [
        ("actv_10-19.csv", 0, "actv at 10 steps, the first is 10"),
        ("merged/per_rank/actv_0-29.parquet", 0, "Ranks recorded actv"),
        ("merged/per_rank/actv_0-29.parquet", 20, "20 of 30 rows of actv"),
    ],
)
def test_files_or_rows_that_have_gone_are_not_called_healthy(file: str, kept: int, lacking: str, tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="csv", ops=("norm",), steps_per_record=10)
    for step in range(STEPS):
        one.write(step, {"actv": [Measured("y", micro_step=0)], "grad_unreduced": [Measured("w")]})
    one.close()
    merged(tmp_path, format="parquet")
    of_the_rank = file.endswith(".csv")
    path = (one.directory if of_the_rank else tmp_path) / file
    if kept:
        write_table(read_table(path).slice(0, kept), path)
    else:
        path.unlink()
    with reported(tmp_path if of_the_rank else tmp_path / "merged") as (_, checks, verdict):
        assert (state_of(checks, "No step missing"), verdict.state) == (NOT_LOOKED_AT, NOT_LOOKED_AT)
        assert lacking in next(one.finding.says for one in checks if one.name == "No step missing")


def test_a_set_of_a_part_is_not_called_healthy(tmp_path: Path) -> None:
    record(tmp_path)
    for wanted, says in (({"kinds": ["actv", "replica"]}, "grad_reduced"), ({"steps": StepSpan(0, 15)}, "14 steps more")):
        merged(tmp_path, says, **wanted)
        with reported(tmp_path / says) as (_, checks, verdict):
            assert (state_of(checks, "No step missing"), verdict.state) == (NOT_LOOKED_AT, NOT_LOOKED_AT)
            assert says in next(one.finding.says for one in checks if one.name == "No step missing")


@pytest.mark.parametrize("is_dead", [False, True])
def test_ranks_of_a_running_job_may_be_some_steps_apart(is_dead: bool, tmp_path: Path) -> None:
    for rank, last in ((0, 17), (1, 14)):
        one = RecordedRank(tmp_path, rank, 2, "parquet", ops=("norm",), steps_per_record=1)
        for step in range(last + 1):
            one.write(step, {"grad_unreduced": [Measured("w")]})
            if step == 12:
                one.manifest.save()
        one.flush()
    if is_dead:
        path = one.directory / MANIFEST_FILE
        told = json.loads(path.read_text())
        path.write_text(json.dumps(told | {"saved": told["saved"].replace("20", "19", 1)}))
    with reported(tmp_path) as (_, checks, verdict):
        assert [one.name for one in checks if one.state == BAD] == (["Ranks ended cleanly"] if is_dead else [])
        assert verdict.state == (BAD if is_dead else NOT_LOOKED_AT)
        assert is_dead or "steps 14 to 17" in next(one.finding.says for one in checks if one.name == "Ranks ended cleanly")


@pytest.mark.parametrize("name", ["learning_rate.0", "epoch", "loss_scale", "loss"])
def test_only_losses_and_norms_among_the_numbers_of_a_run_may_not_jump(name: str, tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="parquet")
    for step in range(STEPS):
        number = {COUNT: 1.0, SUM: 1e-9 if step < WHEN else 1.0}
        one.write(step, {"run": [Measured(name, numbers=number)], "grad_unreduced": [Measured("w")]})
    one.close()
    with reported(tmp_path) as (_, checks, verdict):
        assert state_of(checks, "Sudden changes") == verdict.state == (BAD if name == "loss" else GOOD)


def test_what_follows_zeros_is_no_sudden_change_and_large_values_stay_finite(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="parquet", ops=("norm",))
    for step in range(STEPS):
        rows = [Measured("bias", [0.0 if step < WHEN else 1.0]), Measured("large", [1e100])]
        one.write(step, {"grad_unreduced": rows})
    one.close()
    model, checks, verdict = modelled(tmp_path)
    assert (verdict.state, state_of(checks, "Sudden changes")) == (GOOD, GOOD)
    assert cells(model, "grad_unreduced").max() < DIFFERS
    (curve,) = (one for one in model.data["kinds"][0]["curves"] if one["name"] == "large")
    assert np.isfinite(np.frombuffer(bytes(model.arrays), "<f4", STEPS, curve["lines"])).all()


def test_a_tensor_that_explodes_and_then_is_nan_is_named_where_it_exploded(tmp_path: Path) -> None:
    def explodes(_rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
        late = step - WHEN if (kind, name) == ("grad_unreduced", NAMES[kind][0]) else -1
        return values * (np.nan if late > 3 else 1e30 ** (late + 1) if late >= 0 else 1.0)

    _, _, verdict = modelled(record(tmp_path, explodes))
    assert (verdict.place.step, verdict.place.kind) == (WHEN, "grad_unreduced")


def test_stages_that_count_their_layers_from_zero_have_rows_and_curves_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        one = RecordedRank(tmp_path, rank, 2, "parquet", {"pp": (0, 1)}, ops=("norm",))
        for step in range(STEPS):
            last = np.nan if rank == 1 and step >= WHEN else 1.0
            one.write(step, {"actv": [Measured(f"layers.{layer}.y", [last if layer else 1.0], 0) for layer in range(2)]})
        one.close()
    model, _, verdict = modelled(tmp_path)
    assert (verdict.place.step, verdict.place.rank, verdict.place.name) == (WHEN, 1, "layers.3.y")
    assert model.data["kinds"][0]["series"] == [f"layers.{layer}.y" for layer in range(4)]
    assert [(row == NAN).sum() for row in cells(model, "actv")] == [0, 0, 0, STEPS - WHEN]
    (curve,) = (one for one in model.data["kinds"][0]["curves"] if one["name"] == "layers.3.y")
    assert curve["labels"] == ["rank 1"]


def test_with_many_ranks_the_line_of_its_own_is_that_of_the_fault(tmp_path: Path) -> None:
    for rank in range(10):
        one = RecordedRank(tmp_path, rank, 10, "parquet", ops=("norm",))
        for step in range(STEPS):
            value = np.nan if rank == 7 and step == WHEN else 100.0 if rank == 3 and step == 15 else 1.0
            one.write(step, {"actv": [Measured("output", [value], micro_step=0)]})
        one.close()
    model, _, verdict = modelled(tmp_path)
    assert verdict.place.rank == 3
    history = model.data["kinds"][0]["curves"][0]
    assert history["labels"][-1] == "rank 3"


def test_a_series_has_its_first_event_however_many_another_has() -> None:
    history = KindHistory(Axis(np.arange(3), 3), 60, most_events=50)
    of = np.repeat(np.arange(2), 60)
    history.add(np.zeros(120, np.int64), np.full(120, -1), of, np.tile(np.arange(60), 2), np.full(120, np.nan))
    assert (len(history.events), history.events[-1].series, history.events[-1].rank) == (51, 1, 0)
