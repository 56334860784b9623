"""Lightning; ``lightning_run.py HOW MICRO_STEPS LIMIT``.

``wrapped`` attaches to the model and optimizer as the strategy has wrapped them, ``inner`` to the LightningModule and torch
optimizer, ``callback`` by a ``MonitorCallback``, ``manual`` optimizes in ``training_step``. Gradients are clipped to ``LIMIT``;
not at all if it is 0.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, Attached, norm_of, run
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

HOW, MICRO_STEPS, LIMIT = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
STEPS = 3
ROWS = 2
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Network(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout()
        self.last = nn.Linear(16, 4)
        self.automatic_optimization = HOW != "manual"
        self.losses: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x)))

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = self(batch).square().sum()
        self.losses.append(loss.item().hex())
        if HOW == "manual":
            self.manual_backward(loss)
            if (number + 1) % MICRO_STEPS == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Monitoring(Callback):
    """When training starts, both the model and its optimizers are there, and the strategy has wrapped them."""

    def __init__(self, attach: Attach) -> None:
        self.told: dict[str, list[Any]] = {"before": [], "gradients": [], "moments": []}
        self._attach = attach

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrapped = (trainer.strategy.model, pl_module.optimizers())
        given = wrapped if HOW == "wrapped" else (pl_module, trainer.optimizers[0])
        start = trainer.global_step
        if HOW != "callback":
            self._attach(*given, MICRO_STEPS, dp_group=dist.group.WORLD, start_iteration=start)

    def on_before_optimizer_step(self, _: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.told["before"].append(norm_of(pl_module.parameters()))
        self.told["gradients"].append(float(grad_norm(pl_module, 2)["grad_2.0_norm_total"]))
        if optimizer.state:
            self.told["moments"].append(
                [norm_of(state[name] for state in optimizer.state.values()) for name in ("exp_avg", "exp_avg_sq")]
            )


def train(attach: Attach) -> Any:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    network, monitoring = Network(), Monitoring(attach)
    callbacks: list[Callback] = [monitoring]
    if HOW == "callback" and isinstance(attach, Attached):
        from monitor.pytorch.callbacks.lightning import MonitorCallback

        callbacks.append(MonitorCallback(None, **attach.fields))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=STEPS if HOW != "manual" else -1,
        max_epochs=1,
        accumulate_grad_batches=MICRO_STEPS if HOW != "manual" else 1,
        gradient_clip_val=LIMIT or None,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ["FRAMEWORK_RESULTS"],
    )
    data = torch.randn(STEPS * MICRO_STEPS * ROWS * ranks, 8)
    trainer.fit(network, torch.utils.data.DataLoader(data, batch_size=ROWS))
    weights = [norm_of([p]).hex() for p in network.parameters()]
    return {**monitoring.told, "losses": network.losses, "weights": weights}


run(train)
