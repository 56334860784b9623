"""One rank whose model FSDP2 cuts over ranks in Lightning's Trainer; ``metrics_of_sharded_lightning.py HOW YAML RESULTS``.

The norms of the first step's local gradients, as the model in one piece has them, go to ``RESULTS/rank{i}.json``.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from by_hand import arrays, norm
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from monitor.pytorch.training.lightning import TrainingMetricsCallback

YAML, RESULTS = sys.argv[2:4]
STEPS, ROWS = 3, 2
first: dict[str, float] = {}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3))

    def configure_model(self) -> None:
        self._whole = [copy.deepcopy(self.network)]
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        if number == 0:
            (whole,) = self._whole
            whole(batch).square().mean().backward()
            first.update({f"network.{name}": norm(*arrays([p.grad])) for name, p in whole.named_parameters()})
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.set_num_threads(1)
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    max_steps=STEPS,
    gradient_clip_val=0.5,
    callbacks=[TrainingMetricsCallback(YAML)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=RESULTS,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(2 * STEPS * ROWS, 7), batch_size=ROWS))
(Path(RESULTS) / f"rank{dist.get_rank()}.json").write_text(json.dumps({"first": first}))
dist.barrier()
dist.destroy_process_group()
