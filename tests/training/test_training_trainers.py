"""Trainers that fail, train again, end with a smaller batch, or clip otherwise: what is shown stays right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from shown import scalars
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import Trainer, TrainingArguments

from monitor.pytorch.training import huggingface, lightning

YAML = """
monitor_config: {{monitor_on: true, dump_path: {base}/dump, device_local_norm_format: tensorboard}}
tensorboard: {{tensorboard_dir: {base}/board}}
"""
SAMPLES = 5
DATA = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(YAML.format(base=tmp_path))
    return path


class Network(nn.Module):
    """Fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.failures = 0
        self.norms: list[float] = []

    def forward(self, x: Tensor, **_: Any) -> dict[str, Tensor]:
        loss = self.linear(x).square().mean()
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError
        return {"loss": loss}

    def see(self, *_: Any) -> None:
        found = [parameter.grad.double().numpy().ravel() for parameter in self.parameters()]
        self.norms.append(float(np.linalg.norm(np.concatenate(found))))


class Module(pl.LightningModule):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.network(batch)["loss"]

    def on_before_optimizer_step(self, _: Any) -> None:
        self.network.see()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InTwoGroups(Module):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        for parameter in self.network.parameters():
            torch.nn.utils.clip_grad_norm_([parameter], 1e9)


def hugging(network: Network, yaml: Path, tmp_path: Path) -> Any:
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    callback = huggingface.TrainingMetricsCallback(yaml, model_flops="measure")
    data = [{"x": row} for row in DATA]
    return Trainer(model=network, args=arguments, train_dataset=data, callbacks=[callback]).train


def lit(module: Module, yaml: Path, tmp_path: Path, **clipping: Any) -> Any:
    callback = lightning.TrainingMetricsCallback(yaml, model_flops="measure")

    def train() -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[callback], default_root_dir=tmp_path, **quiet, **clipping
        )
        trainer.fit(module, torch.utils.data.DataLoader(DATA, batch_size=2))

    return train


@pytest.mark.parametrize("how", ["huggingface", "lightning"])
def test_a_training_that_follows_one_that_failed_has_its_own_steps_samples_and_flops(
    how: str, yaml: Path, tmp_path: Path
) -> None:
    network = Network()
    train = hugging(network, yaml, tmp_path) if how == "huggingface" else lit(Module(network), yaml, tmp_path)
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
        (Module, {"gradient_clip_val": 0.1}),
        (Module, {"gradient_clip_val": 1e9, "gradient_clip_algorithm": "value"}),
        (InTwoGroups, {"gradient_clip_val": 1e9}),
    ],
    ids=["norm", "value", "groups"],
)
def test_the_gradient_norm_of_lightning_is_that_of_all_parameters(
    module: type[Module], clipping: dict[str, Any], yaml: Path, tmp_path: Path
) -> None:
    network = Network()
    lit(module(network), yaml, tmp_path, **clipping)()
    shown = scalars(tmp_path / "board" / "rank_0")["grad-norm"]
    assert [value for _, value in shown] == pytest.approx(network.norms, rel=1e-4)
