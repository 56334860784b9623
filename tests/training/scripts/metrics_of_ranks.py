"""One rank of a job that shows its training metrics; ``metrics_of_ranks.py HOW YAML RESULTS``.

``HOW`` is ``loop``, ``huggingface`` or ``lightning``. What a rank knows of its steps goes to ``RESULTS/rank{i}.json``.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

HOW, YAML, RESULTS = sys.argv[1:4]
STEPS, MICRO_STEPS, ROWS = 3, 2, 2
torch.set_num_threads(1)
os.environ["LOCAL_RANK"] = os.environ["RANK"]


class Gate(nn.Module):
    """Logits of four experts, of which each token goes to two."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(x).softmax(-1))


def norm(tensors: Any) -> float:
    return float(np.linalg.norm(np.concatenate([one.detach().double().numpy().ravel() for one in tensors])))


def rows(step: int, micro_step: int) -> Tensor:
    """Each rank has others."""
    seed = (step * MICRO_STEPS + micro_step) * dist.get_world_size() + dist.get_rank()
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))


def losses_of(model: nn.Module, step: int, after: Any = None) -> list[Tensor]:
    losses = []
    for micro_step in range(MICRO_STEPS):
        loss = model(rows(step, micro_step)).square().mean() / MICRO_STEPS
        loss.backward()
        losses.append(loss)
        if after is not None:
            after(micro_step)
    return losses


def by_hand(model: nn.Module, step: int, told: dict[str, list[Any]]) -> None:
    """What this rank alone makes of a step."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    told["local_losses"].append([loss.item() for loss in losses_of(alone, step)])
    told["local_norms"].append({name: norm([parameter.grad]) for name, parameter in alone.named_parameters()})
    with torch.no_grad():
        tokens = torch.cat([alone.gate(rows(step, micro_step)) for micro_step in range(MICRO_STEPS)])
    told["tokens"].append(np.bincount(tokens.topk(2).indices.flatten().numpy(), minlength=4).tolist())


def loop() -> dict[str, Any]:
    from monitor.pytorch.training import TrainingMetrics

    told: dict[str, Any] = {name: [] for name in ("local_losses", "local_norms", "tokens", "grad_norms", "weights")}
    plain = Network()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    names = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    with TrainingMetrics(YAML, model, optimizer, grad_acc_steps=MICRO_STEPS, routers=["gate"], model_flops=1e9) as metrics:
        for number in range(STEPS):
            plain.load_state_dict({name: parameter.detach() for name, parameter in names.items()})
            by_hand(plain, number, told)
            with metrics.step(batch_size=ROWS * MICRO_STEPS * dist.get_world_size()) as step:
                for micro_step in range(MICRO_STEPS):
                    model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
                    loss = model(rows(number, micro_step)).square().mean() / MICRO_STEPS
                    loss.backward()
                    step.local_loss(loss)
                told["grad_norms"].append(norm([parameter.grad for parameter in names.values()]))
                optimizer.step()
                optimizer.zero_grad()
                mean = torch.tensor(sum(told["local_losses"][-1]))
                dist.all_reduce(mean)
                step.loss = mean / dist.get_world_size()
            told["weights"].append(norm(names.values()))
    return told


def huggingface() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from monitor.pytorch.training.huggingface import TrainingMetricsCallback

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, use_cache=False))
    tokens = torch.randint(32, (STEPS * MICRO_STEPS * ROWS * dist.get_world_size(), 8))
    arguments = TrainingArguments(
        output_dir=RESULTS,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICRO_STEPS,
        max_grad_norm=0.5,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[TrainingMetricsCallback(YAML, model_flops="measure")]
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {name: [float(entry[name]) for entry in logs] for name in ("loss", "grad_norm", "learning_rate")}


def lightning() -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.utilities import grad_norm

    from monitor.pytorch.training.lightning import TrainingMetricsCallback

    told: dict[str, Any] = {"local_losses": [], "grad_norms": []}

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss = self.network(batch).square().mean()
            told["local_losses"].append(loss.item() / MICRO_STEPS)
            return loss

        def on_before_optimizer_step(self, _: Any) -> None:
            told["grad_norms"].append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_steps=STEPS,
        accumulate_grad_batches=MICRO_STEPS,
        gradient_clip_val=0.01,
        callbacks=[TrainingMetricsCallback(YAML, routers=["network.gate"], model_flops="measure")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=RESULTS,
    )
    data = torch.randn(STEPS * MICRO_STEPS * ROWS * dist.get_world_size(), 8)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=ROWS))
    return told


dist.init_process_group("gloo")
torch.manual_seed(0)
told = {"loop": loop, "huggingface": huggingface, "lightning": lightning}[HOW]()
(Path(RESULTS) / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
