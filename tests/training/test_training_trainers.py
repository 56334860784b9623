"""Trainers that fail, train again, end with a smaller batch, or clip otherwise: what is shown stays right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shown import scalars
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from monitor import open_run
from monitor.config import MonitorConfig
from monitor.pytorch import TrainerMon

YAML = """
monitor_config: {{monitor_on: true, dump_path: {base}/dump, device_local_norm_format: tensorboard}}
tensorboard: {{tensorboard_dir: {base}/board}}
"""


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(YAML.format(base=tmp_path))
    return path


@pytest.fixture
def trainers() -> Any:
    """Of frameworks that only these tests import."""
    import trained_here

    return trained_here


@pytest.mark.parametrize("how", ["huggingface", "lightning"])
def test_a_training_that_follows_one_that_failed_has_its_own_steps_samples_and_flops(
    trainers: Any, how: str, yaml: Path, tmp_path: Path
) -> None:
    network = trainers.Network()
    if how == "huggingface":
        train = trainers.hugging(network, yaml, tmp_path)
    else:
        train = trainers.lit(trainers.Module(network), yaml, tmp_path)
    network.failures = 1
    with pytest.raises(ZeroDivisionError):
        train()
    assert _get_current_dispatch_mode_stack() == []
    train()
    shown = scalars(tmp_path / "board" / "rank_0")
    assert shown["batch-size"] == [(1, 2.0), (2, 2.0), (3, 1.0)]
    assert [x for x, _ in shown["loss-vs-samples"]] == [2, 4, 5]
    assert [x for x, _ in shown["device_local_norm"]] == [1, 2, 3]
    assert len(shown["model-flops-throughput-per-npu"]) == 3
    if how == "lightning":
        for tag in ("grad-norm", "device_local_norm"):
            assert [value for _, value in shown[tag]] == pytest.approx(network.norms, rel=1e-5)


@pytest.mark.parametrize(
    ("module", "clipping"),
    [
        ("Module", {"gradient_clip_val": 0.1}),
        ("Module", {"gradient_clip_val": 1e9, "gradient_clip_algorithm": "value"}),
        ("InTwoGroups", {"gradient_clip_val": 1e9}),
    ],
    ids=["norm", "value", "groups"],
)
def test_the_gradient_norm_of_lightning_is_that_of_all_parameters(
    trainers: Any, module: str, clipping: dict[str, Any], yaml: Path, tmp_path: Path
) -> None:
    network = trainers.Network()
    trainers.lit(getattr(trainers, module)(network), yaml, tmp_path, **clipping)()
    shown = scalars(tmp_path / "board" / "rank_0")["grad-norm"]
    assert [value for _, value in shown] == pytest.approx(network.norms, rel=1e-4)


@pytest.mark.parametrize("how", ["huggingface", "lightning"])
def test_the_loss_of_each_step_is_logged_in_a_monitor_that_records_the_model(
    trainers: Any, how: str, yaml: Path, tmp_path: Path
) -> None:
    network, base = trainers.Network(), tmp_path / "recorded"
    config = MonitorConfig(run_numbers=True, format=("parquet",))
    with TrainerMon.of_config(config, base, params_have_main_grad=False) as monitor:
        monitor.set_monitor(network, 1, network.optimizer)
        if how == "huggingface":
            trainers.hugging(network, yaml, tmp_path, monitor=monitor)()
        else:
            trainers.lit(trainers.Module(network), yaml, tmp_path, monitor)()
    rows = open_run(base).rows("run", name="loss", columns=["step", "value"]).to_pylist()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["value"] for row in rows] == pytest.approx(network.losses, rel=1e-6)
