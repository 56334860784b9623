"""A network that the Trainers of transformers and of Lightning train in this process. Importing both takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from monitor.pytorch.training import huggingface, lightning

SAMPLES = 5
DATA = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """Fails as often as it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.failures = 0
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def forward(self, x: Tensor, **_: Any) -> dict[str, Tensor]:
        loss = self.linear(x).square().mean()
        self.losses.append(loss.item())
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
        return self.network.optimizer


class InTwoGroups(Module):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        for parameter in self.network.parameters():
            torch.nn.utils.clip_grad_norm_([parameter], 1e9)


def hugging(network: Network, yaml: Path, tmp_path: Path, **options: Any) -> Any:
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
    callback = huggingface.TrainingMetricsCallback(yaml, model_flops="measure", **options)
    data = [{"x": row} for row in DATA]
    given = {"optimizers": (network.optimizer, None)} if options else {}
    return Trainer(model=network, args=arguments, train_dataset=data, callbacks=[callback], **given).train


def lit(module: Module, yaml: Path, tmp_path: Path, monitor: Any = None, **clipping: Any) -> Any:
    callback = lightning.TrainingMetricsCallback(yaml, model_flops="measure", monitor=monitor)

    def train() -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[callback], default_root_dir=tmp_path, **quiet, **clipping
        )
        trainer.fit(module, torch.utils.data.DataLoader(DATA, batch_size=2))

    return train
