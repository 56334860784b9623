"""The run that the picture in ``docs/training-metrics.md`` is of: the demo's GPT with training metrics in TensorBoard.

python tools/pictures/train_metrics.py pictured --steps 200
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR

sys.path.append(str(Path(__file__).resolve().parents[1] / "demo"))

from gpt import GPT, GPTConfig
from monitor.pytorch.training import TrainingMetrics
from monitor.training.config import training_config_in
from text import random_batch, standard_library

BATCH = 8
WARM_UP_STEPS = 20
YAML = """
monitor_config:
    monitor_on: true
    dump_path: {base}/dump
    target: ['h\\.0\\.mlp']
    local_norm_format: tensorboard
    device_local_norm_format: tensorboard
    optimizer_state_format: tensorboard
    weight_state_format: tensorboard
tensorboard:
    tensorboard_dir: {base}/board
    log_timers_to_tensorboard: true
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="where to record to")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    train(arguments.base, arguments.steps)


def train(base: Path, steps: int) -> None:
    """Train for ``steps`` steps; after a warm-up the learning rate is constant."""
    torch.manual_seed(0)
    shape = GPTConfig()
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = LinearLR(optimizer, start_factor=1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)
    text, generator = standard_library(), torch.Generator().manual_seed(0)
    config = training_config_in("train.yaml", YAML.format(base=base.absolute()))
    with TrainingMetrics(config, model, optimizer, model_flops="measure", total_steps=steps) as metrics:
        for _ in range(steps):
            with metrics.step(batch_size=BATCH) as step:
                tokens, following = random_batch(text, BATCH, shape.context, generator)
                step.loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
                step.loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
