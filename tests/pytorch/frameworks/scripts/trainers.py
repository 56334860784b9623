"""Trainer of transformers, and accelerate; ``trainers.py HOW MICRO_STEPS LIMIT``.

``accelerate`` attaches to what it has prepared, ``accelerate-inner`` to what that was made of; ``trainer-callback`` passes the
Trainer a ``MonitorCallback``. Gradients are clipped to ``LIMIT``; not at all if it is 0.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from framework_run import Attach, Attached, norm_of, run
from torch import nn

HOW, MICRO_STEPS, LIMIT = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
STEPS = 3
ROWS = 2


def moments_of(optimizer: Any) -> list[float]:
    return [norm_of(state[name] for state in optimizer.state.values()) for name in ("exp_avg", "exp_avg_sq")]


def with_accelerate(attach: Attach) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_STEPS)
    told: dict[str, Any] = {"before": [], "gradients": [], "moments": []}
    network = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 4))
    data = torch.randn(STEPS * MICRO_STEPS * ROWS * dist.get_world_size(), 8)
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.01), loader)
    given = (network, optimizer.optimizer) if HOW == "accelerate-inner" else (model, optimizer)
    attach(*given, MICRO_STEPS, dp_group=dist.group.WORLD)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().sum())
            if accelerator.sync_gradients:
                told["before"].append(norm_of(model.parameters()))
                told["gradients"].append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
                if LIMIT:
                    assert told["gradients"][-1] == float(accelerator.clip_grad_norm_(model.parameters(), LIMIT))
            optimizer.step()
            if accelerator.sync_gradients:
                told["moments"].append(moments_of(optimizer))
            optimizer.zero_grad()
    return {**told, "weights": [norm_of([p]).hex() for p in network.parameters()]}


def with_trainer(attach: Attach) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    told: dict[str, Any] = {"before": [], "moments": []}

    class Monitoring(TrainerCallback):
        """When training begins, both the model and what wraps its optimizer are there."""

        def on_train_begin(self, args: Any, state: Any, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            micro_steps, start = args.gradient_accumulation_steps, state.global_step
            if HOW == "trainer":
                attach(model, optimizer, micro_steps, dp_group=dist.group.WORLD, start_iteration=start)

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            told["before"].append(norm_of(model.parameters()))

        def on_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            told["moments"].append(moments_of(optimizer))

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False))
    tokens = torch.randint(32, (STEPS * MICRO_STEPS * ROWS * dist.get_world_size(), 8))
    arguments = TrainingArguments(
        output_dir=os.environ["FRAMEWORK_RESULTS"],
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICRO_STEPS,
        max_grad_norm=LIMIT,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callbacks: list[TrainerCallback] = [Monitoring()]
    if HOW == "trainer-callback" and isinstance(attach, Attached):
        from monitor.pytorch.callbacks.huggingface import MonitorCallback

        callbacks.append(MonitorCallback(None, **attach.fields))
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    told["gradients"] = [float(entry["grad_norm"]) for entry in logs]
    told["losses"] = [entry["loss"].hex() for entry in logs]
    return {**told, "weights": [norm_of([p]).hex() for p in model.parameters()]}


def train(attach: Attach) -> Any:
    AcceleratorState._reset_state()  # of the training before: there is one in a process
    GradientState._reset_state()
    torch.manual_seed(0)
    return with_trainer(attach) if HOW.startswith("trainer") else with_accelerate(attach)


run(train)
