"""``intervals``: kinds have rows in every n-th collected step, equal to those of a run that has them in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from observing import small_gpt, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner
from watching import Output, attached, on_two_ranks, warnings_in

from monitor.anomalies.events import ScanSummary
from monitor.anomalies.ranking.ranking import ranking_of
from monitor.coordinator.manifest_format import MANIFEST_FILE, read_manifest
from monitor.coordinator.series_file import read_columns
from monitor.pytorch.gradients import CHANGED
from monitor.report.cli import app

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

STEPS = 7
WHOLE: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "update_ratio": True,
    "mg_direction": True,
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": []},
    "cc_distribution": {"enable": True},
    "run_numbers": True,
    "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
    "ops": ["norm", "min", "mean", "nans"],
    "ndigits": 17,
}
INTERVALS = {
    "xy_distribution": 5,
    "wg_distribution": 2,
    "param_distribution": 3,
    "mv_distribution": 4,
    "update_ratio": 3,
    "mg_direction": 4,
    "recording_l2_features": 6,
    "cc_distribution": 2,
}
EVERY = {
    **dict.fromkeys(["actv", "actv_grad"], 5),
    **dict.fromkeys(["grad_unreduced", "grad_reduced"], 2),
    **dict.fromkeys(["param_origin", "param_updated"], 3),
    **dict.fromkeys(["exp_avg", "exp_avg_sq"], 4),
    "update_ratio": 3,
    "linear_hook": 6,
    "run": 1,
}


def nothing(_model: nn.Module) -> None: ...


def summed_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)


def trained(
    output: Output,
    micro_batches: int,
    wrap: Callable[[nn.Module], nn.Module],
    before_step: Callable[[nn.Module], None],
    *,
    monitored: bool = True,
    **config: Any,
) -> tuple[Path, list[Tensor]]:
    torch.manual_seed(0)
    model = small_gpt(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    called, before = wrap(model), set(output.base.iterdir())
    monitor = attached(output, called, optimizer, micro_batches, **config) if monitored else None
    for step in range(STEPS):
        for number in range(micro_batches):
            called((tokens() + step + number) % 16).square().mean().backward()
        before_step(called)
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = [path for path in set(output.base.iterdir()) - before if f"-rank{rank}-" in path.name]
    return found[0] if found else output.base, [p.detach() for p in model.parameters()]


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    return model


def plain(model: nn.Module) -> nn.Module:
    return model


def check_rows(output: Output, micro_batches: int, wrap: Any, before_step: Callable[[nn.Module], None]) -> None:
    config = {**WHOLE, "recording_l2_features": wrap is not compiled}  # compiled code has no features
    _, expected = trained(output, micro_batches, wrap, before_step, monitored=False)
    whole, _ = trained(output, micro_batches, wrap, before_step, **config)
    fewer, weights = trained(output, micro_batches, wrap, before_step, **config, intervals=INTERVALS)
    assert all(map(torch.equal, expected, weights))
    for kind, interval in EVERY.items() if wrap is not compiled else (EVERY.items() - {("linear_hook", 6)}):
        every = [row for row in output.rows(kind, whole) if not row.name.startswith("grad_norm")]
        rows = [row for row in output.rows(kind, fewer) if not row.name.startswith("grad_norm")]
        assert rows == [row for row in every if row.step % interval == 0], kind
        assert rows, kind
    of_parameters = {name for name, _ in small_gpt(1).named_parameters()}
    others = {
        where: [(row.name.removeprefix("module."), row) for row in output.rows("other", where)] for where in (whole, fewer)
    }
    for of, interval in (True, 4), (False, 2):  # directions, and communication
        every, rows = ([row for name, row in others[where] if (name in of_parameters) == of] for where in (whole, fewer))
        assert rows == [row for row in every if row.step % interval == 0]
        assert rows or not (of or dist.is_initialized())
    norms = {where: [row for row in output.rows("run", where) if row.name == "grad_norm"] for where in (whole, fewer)}
    assert norms[fewer] == [row for row in norms[whole] if row.step % INTERVALS["wg_distribution"] == 0]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("wrap", [plain, compiled])
def test_rows_are_those_of_every_nth_step(
    wrap: Any, micro_batches: int, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    check_rows(output, micro_batches, wrap, nothing)
    assert {said for said in warnings_in(caplog) if "cc_distribution" not in said} == set()


def check_rank(output: Output) -> None:
    check_rows(output, 2, plain, summed_by_hand)
    check_rows(output, 1, DistributedDataParallel, nothing)
    check_what_was_judged(output)


def check_what_was_judged(output: Output) -> None:
    """Replicas that another rank writes count as the kinds that they replicate."""
    directory, _ = trained(output, 1, DistributedDataParallel, nothing, **WHOLE, intervals=INTERVALS)
    every = output.base.glob("anomaly_detected*/rank*/judged*.json")
    summaries = (ScanSummary.model_validate_json(path.read_bytes()) for path in every)
    (judged,) = (one for one in summaries if one.directory == directory.name)
    held = {kind: set(steps.steps()) for kind, steps in judged.kinds.items()}
    for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated"):
        assert held[kind] == set(range(0, STEPS, EVERY[kind])), kind
    assert held["exp_avg"] == held["exp_avg_sq"] == set(range(4, STEPS, 4))  # there are none in the first step


def test_on_two_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    on_two_ranks(check_rank, tmp_path)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"start_step": 1}, [1, 3, 5]),
        ({"step_interval": 2}, [0, 4]),
        ({"start_step": 1, "step_interval": 3}, [1]),
        ({"collect_times": 3}, [0, 2]),
    ],
)
def test_steps_are_counted_among_those_that_are_collected(fields: dict[str, int], steps: list[int], output: Output) -> None:
    config = {"param_distribution": True, "wg_distribution": True, "intervals": {"param_distribution": 2}, **fields}
    trained(output, 1, plain, nothing, **config)
    assert sorted({row.step for row in output.rows("param_origin")}) == steps


def test_a_kind_without_rows_is_told_of_in_the_first_step_that_should_have_them(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"mv_distribution": True, "param_distribution": True, "intervals": {"mv_distribution": 3}}
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **config) as monitor:
        for step in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            monitor.flush(30.0)
            assert any("no row of exp_avg" in said for said in warnings_in(caplog)) == (step >= 3)


def test_the_flow_of_data_is_that_of_a_step_with_activations(output: Output) -> None:
    config: dict[str, Any] = {"xy_distribution": True, "wg_distribution": True, "intervals": {"xy_distribution": 3}}
    model = small_gpt(1)
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(output, model, optimizer, start_iteration=1, **config):
        for _ in range(3):
            model(tokens()).square().mean().backward()
            optimizer.step()
    columns = read_columns(output.directory(), read_manifest(output.directory() / MANIFEST_FILE))
    assert columns is not None
    assert columns.flow().edges


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, often: bool) -> Any:
        return (self.often if often else self.seldom)(x)


def trained_in_turns(output: Output, **config: Any) -> Path:
    """One optimizer steps three times as often as the other, so that steps end just before its next turn."""
    torch.manual_seed(0)
    model, before = Halves(), set(output.base.iterdir())
    optimizers = {often: torch.optim.Adam(half.parameters()) for often, half in ((True, model.often), (False, model.seldom))}
    with attached(output, model, [*optimizers.values()], wg_distribution=True, run_numbers=True, ndigits=17, **config):
        for _ in range(3):
            for often in (True, True, True, False):
                model(torch.randn(2, 4), often).square().mean().backward()
                summed_by_hand(model) if dist.is_initialized() else None
                optimizers[often].step()
                optimizers[often].zero_grad()
    rank = dist.get_rank() if dist.is_initialized() else 0
    (directory,) = (path for path in set(output.base.iterdir()) - before if f"-rank{rank}-" in path.name)
    return directory


def test_gradients_that_came_in_a_step_without_rows_are_not_called_changed(output: Output) -> None:
    whole, fewer = trained_in_turns(output), trained_in_turns(output, intervals={"wg_distribution": 2})
    every = [row for row in output.rows("grad_reduced", whole) if row.step % 2 == 0]
    assert output.rows("grad_reduced", fewer) == every
    notes = read_manifest(fewer / MANIFEST_FILE).notes
    assert CHANGED not in str(notes.get("grad_reduced"))


def check_rank_in_turns(output: Output) -> None:
    whole, fewer = trained_in_turns(output), trained_in_turns(output, intervals={"wg_distribution": 2})
    every, rows = output.rows("grad_reduced", whole), output.rows("grad_reduced", fewer)
    assert all(row in every for row in rows)
    assert {row.step for row in rows} == {0, 2, 6, 8}  # of step 4, all gradients came before it
    notes = read_manifest(fewer / MANIFEST_FILE).notes
    assert "came before their step began" in str(notes["grad_reduced"])


def test_on_ranks_they_are_missing_and_the_manifest_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    on_two_ranks(check_rank_in_turns, tmp_path)


@pytest.mark.parametrize("format_name", ["csv", "parquet"])
def test_a_report_misses_no_kind_in_steps_that_are_not_due(format_name: str, output: Output) -> None:
    config = {"xy_distribution": True, "wg_distribution": True, "intervals": {"xy_distribution": 3}, "format": format_name}
    trained(output, 1, plain, nothing, **config)
    told = CliRunner().invoke(app, [str(output.base), "-o", str(output.base.parent / "page.html")])
    assert "No step is missing on any rank." in told.output


def test_moments_after_a_step_come_from_its_gradients(output: Output) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    fields = json.loads((CONFIGS / "first_fault.json").read_text())
    with attached(output, model, optimizer, **fields):
        for step in range(4):
            model(torch.full((2, 4), float("nan") if step == 2 else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    ranking = ranking_of(output.base / "anomaly_detected", 100)
    assert [one.subject.series.kind for one in ranking.ranked if one.is_origin] == ["actv"]
