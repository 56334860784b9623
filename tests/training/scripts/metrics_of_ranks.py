"""One rank of a job that shows its training metrics; ``metrics_of_ranks.py HOW YAML RESULTS``.

``HOW`` is ``loop``, ``huggingface`` or ``lightning``. What a rank knows of its steps goes to ``RESULTS/rank{i}.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from by_hand import EXPERTS, ByHand
from torch import Tensor, nn

HOW, YAML, RESULTS = sys.argv[1:4]
STEPS, MICRO_STEPS, ROWS = 3, 2, 2
SCALE = 1024.0
torch.set_num_threads(1)


class Gate(nn.Module):
    """Logits of four experts, of which each token goes to two."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.last = nn.Linear(EXPERTS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(x).softmax(-1))


def two_greatest(logits: Tensor) -> Tensor:
    return logits.detach().topk(Gate.top_k).indices


def rows(step: int, micro_step: int) -> Tensor:
    """Each rank has others."""
    seed = (step * MICRO_STEPS + micro_step) * dist.get_world_size() + dist.get_rank()
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))


def loop() -> dict[str, Any]:
    from monitor.pytorch.training import TrainingMetrics

    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    by_hand = ByHand(network, optimizer, SCALE)
    by_hand.watch(network.gate, two_greatest)
    model = nn.parallel.DistributedDataParallel(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    told: dict[str, Any] = {"local_losses": [], "loss": []}
    with TrainingMetrics(YAML, model, optimizer, grad_acc_steps=MICRO_STEPS, routers=["gate"], model_flops=1e9) as metrics:
        for number in range(STEPS):
            with metrics.step(batch_size=ROWS * MICRO_STEPS * dist.get_world_size()) as step:
                losses = []
                for micro_step in range(MICRO_STEPS):
                    model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
                    loss = model(rows(number, micro_step)).square().mean() / MICRO_STEPS
                    scaler.scale(loss).backward()
                    step.local_loss(loss)
                    losses.append(loss.item())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                mean = torch.tensor(sum(losses))
                dist.all_reduce(mean)
                step.loss = mean / dist.get_world_size()
                told["loss"].append(step.loss.item())
            told["local_losses"].append(losses)
    return told | by_hand.told


def huggingface() -> dict[str, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

    from monitor.pytorch.training.huggingface import TrainingMetricsCallback

    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(
        MixtralConfig(**small, num_key_value_heads=2, num_experts_per_tok=2, num_local_experts=EXPERTS, use_cache=False)
    )
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    by_hand = ByHand(model, optimizer, SCALE)
    by_hand.watch(model.model.layers[0].mlp.gate, lambda result: result[2])
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callback = TrainingMetricsCallback(YAML, model_flops="measure")
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[callback])
    scale_losses(trainer.accelerator)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    told = {name: [float(entry[name]) for entry in logs] for name in ("loss", "grad_norm", "learning_rate")}
    return told | by_hand.told


def scale_losses(accelerator: Any) -> None:
    """As with ``fp16=True``, which accelerate refuses without a GPU."""
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)


def lightning() -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision

    from monitor.pytorch.training.lightning import TrainingMetricsCallback

    told: dict[str, Any] = {"local_losses": []}

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss = self.network(batch).square().mean()
            told["local_losses"].append(loss.item() / MICRO_STEPS)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            by_hand = ByHand(self, optimizer, SCALE)
            by_hand.watch(self.network.gate, two_greatest)
            told.update(by_hand.told)
            return optimizer

    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))],
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
