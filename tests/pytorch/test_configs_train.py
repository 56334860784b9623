"""Every file in ``configs/`` trains a tiny model and leaves the files that it promises."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from watching import Output

from monitor import open_run
from monitor.anomalies.events import ScanSummary
from monitor.config import load_config
from monitor.pytorch import RunEnded, TrainerMon
from monitor.sinks.hdf5 import read_hdf5
from monitor.stats.features import COLUMNS_OF

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
STEPS, MICRO_BATCHES = 3, 2
PARAMETERS, WEIGHTS = 4, 4 * STEPS
FORWARD = 2 * 4 * MICRO_BATCHES * STEPS
"""Rows of activations: input and output of four modules, in each micro-step."""

GRADIENTS = {"grad_reduced": WEIGHTS, "grad_unreduced": WEIGHTS}
ACTIVATIONS = {"actv": FORWARD, "actv_grad": FORWARD - 2 * MICRO_BATCHES * STEPS}
"""Nothing asks for the gradient of the model's input, which is also that of its first layer."""

MOMENTS = {"exp_avg": PARAMETERS * (STEPS - 1), "exp_avg_sq": PARAMETERS * (STEPS - 1)}

RATES = {"run": STEPS}
NORMS = {"run": 2 * STEPS}
"""With the norm of all gradients."""

PROMISED: dict[str, dict[str, int]] = {
    "activations": {**ACTIVATIONS, **RATES},
    "alerts": {},
    "api": {},
    "communication": RATES,
    "everything": {**ACTIVATIONS, **GRADIENTS, **MOMENTS, "param_origin": WEIGHTS, "param_updated": WEIGHTS, **NORMS},
    "features": {"linear_hook": 2 * STEPS, **RATES},
    "first_fault": {},
    "gradients": {},
    "hdf5": {},
    "health": {},
    "low_precision": {
        **ACTIVATIONS,
        **GRADIENTS,
        "param_origin": WEIGHTS,
        "param_updated": WEIGHTS,
        "update_ratio": WEIGHTS,
        **NORMS,
    },
    "micro_batch_gradients": {"grad_reduced": WEIGHTS, "grad_unreduced": WEIGHTS * MICRO_BATCHES, **NORMS},
    "optimizer_moments": {**MOMENTS, **RATES},
    "print_structure": {},
    "stack_info": {},
    "tensorboard": {**GRADIENTS, "param_origin": WEIGHTS, "param_updated": WEIGHTS, **NORMS},
    "updates": {"other": WEIGHTS, "update_ratio": WEIGHTS, "adam_update": WEIGHTS, "adam_ratio": WEIGHTS, **RATES},
    "weight_gradients": {**GRADIENTS, **NORMS},
}
"""By the file's stem: how many rows of each kind there are in CSV."""


def trained(config: Path) -> TrainerMon:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = TrainerMon(config, params_have_main_grad=False)
    monitor.set_monitor(model, grad_acc_steps=MICRO_BATCHES, optimizer=optimizer)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return monitor


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "print_structure"))
def test_a_ready_file_leaves_the_rows_it_promises(output: Output, name: str) -> None:
    trained(CONFIGS / f"{name}.json").close()
    kinds = {path.stem.rpartition("_")[0] for path in output.directory().glob("*_*-*.csv")}
    assert {kind: len(output.rows(kind)) for kind in kinds} == PROMISED[name]
    ops = load_config(CONFIGS / f"{name}.json").ops
    for kind in kinds:
        assert all(list(row.values) == list(COLUMNS_OF.get(kind, ops)) for row in output.rows(kind))
    assert output.manifest()["steps"]["written"]["ranges"] == [[0, STEPS - 1, 1]]


def test_the_one_for_the_program_itself_answers_it(output: Output) -> None:
    with trained(CONFIGS / "api.json") as monitor:
        (reduced, unreduced), (actv, actv_grad) = monitor.generate_wgrad_metrics(), monitor.generate_xy_metrics()
    assert [len(found) * STEPS for found in (reduced, unreduced, actv, actv_grad)] == [
        WEIGHTS,
        WEIGHTS,
        FORWARD,
        ACTIVATIONS["actv_grad"],
    ]
    assert not list(output.directory().glob("*.csv"))


def test_the_one_for_alerts_judges_every_step_and_finds_nothing_in_healthy_training(output: Output) -> None:
    trained(CONFIGS / "alerts.json").close()
    (said,) = (output.base / "anomaly_detected" / "rank0").iterdir()
    judged = ScanSummary.model_validate_json(said.read_bytes())
    assert (list(judged.steps.steps()), judged.not_judged, judged.closed) == (list(range(STEPS)), {}, True)
    assert judged.events == 0
    (path,) = output.directory().glob("metrics_0-99.h5")
    assert Counter(read_hdf5(path)["kind"].to_pylist()) == {**GRADIENTS, **ACTIVATIONS, **NORMS}


def test_the_one_for_communication_leaves_what_was_communicated_and_where(output: Output, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(5, 4))
        optimizer = torch.optim.SGD(model.parameters())
        with TrainerMon(CONFIGS / "communication.json", params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
            model(torch.randn(6, 5)).square().mean().backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
    assert {row.name: row.values["calls"] for row in output.rows("other")} == {"all_reduce.pre_0": 1, "all_reduce.post_0": 1}
    assert (output.directory() / "communication_log.csv").is_file()


def test_the_one_for_hdf5_leaves_one_file_of_all_kinds(output: Output) -> None:
    trained(CONFIGS / "hdf5.json").close()
    (path,) = output.directory().glob("metrics_0-99.h5")
    kinds = Counter(read_hdf5(path)["kind"].to_pylist())
    assert kinds == {**GRADIENTS, **MOMENTS, "param_origin": WEIGHTS, "param_updated": WEIGHTS, **NORMS}


BOTH = {"param_origin": WEIGHTS, "param_updated": WEIGHTS}
PRESETS: dict[str, dict[str, int]] = {
    "first_fault": {**ACTIVATIONS, **GRADIENTS, **MOMENTS, **BOTH, **NORMS},
    "gradients": {"grad_reduced": WEIGHTS, "update_ratio": PARAMETERS, **NORMS},
    "health": {"actv": (1 + 3) * MICRO_BATCHES, "grad_reduced": WEIGHTS, **BOTH, **NORMS},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_the_rows_it_promises_as_parquet(output: Output, name: str) -> None:
    trained(CONFIGS / f"{name}.json").close()
    run = open_run(output.base)
    rows = {kind: run.rows(kind, columns=["step"]).num_rows for kind in run.kinds}
    # Moments after a step, which "all" compares, are of each step.
    promised = {
        **PRESETS[name],
        **({"exp_avg_updated": WEIGHTS, "exp_avg_sq_updated": WEIGHTS} if name == "first_fault" else {}),
    }
    assert rows == promised


def test_the_one_for_tensorboard_leaves_an_event_file_too(output: Output) -> None:
    trained(CONFIGS / "tensorboard.json").close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(output.directory()))
    run.Reload()
    ops = load_config(CONFIGS / "tensorboard.json").ops
    assert len(run.Tags()["scalars"]) == len(ops) * PARAMETERS * 4 + len(("learning_rate.0", "grad_norm"))
    assert [one.step for one in run.Scalars("0:0.weight/rank0/grad_reduced_norm")] == list(range(STEPS))


def test_the_one_for_the_structure_ends_the_run_with_it(output: Output) -> None:
    with pytest.raises(RunEnded):
        trained(CONFIGS / "print_structure.json")
    assert (output.base / "module_struct" / "rank0" / "module_struct.json").stat().st_size > 0


def test_the_one_for_stacks_leaves_them(output: Output) -> None:
    trained(CONFIGS / "stack_info.json").close()
    with open(output.directory() / "stack_info.csv", newline="") as file:
        assert [row["module_name"] for row in csv.DictReader(file)] == ["0:", "0:0", "0:1", "0:2"]


def test_every_file_is_here() -> None:
    assert sorted(PROMISED) == sorted(path.stem for path in CONFIGS.glob("*.json"))
