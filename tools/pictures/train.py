"""The run that the pictures in ``docs/features.md`` are of: the demo's GPT in bfloat16, with histograms for TensorBoard.

MONITOR_OUTPUT_DIR=pictured python tools/pictures/train.py --steps 200
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR

sys.path.append(str(Path(__file__).resolve().parents[1] / "demo"))

from gpt import GPT, GPTConfig
from monitor.pytorch import TrainerMon
from text import random_batch, standard_library

BATCH = 8
WARM_UP_STEPS = 20
CONFIG = {
    "targets": {"tokens": {}, "h.0": {}, "head": {}},
    "wg_distribution": True,
    "ur_distribution": True,
    "format": "tensorboard",
    "ops": ["norm", "magnitude_histogram", "underflow_e4m3", "underflow_fp16"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    with TemporaryDirectory() as folder:
        config = Path(folder) / "monitor_config.json"
        config.write_text(json.dumps(CONFIG))
        train(config, parser.parse_args().steps)


def train(config: Path, steps: int) -> None:
    """Train for ``steps`` steps, monitored; after a warm-up the learning rate is constant."""
    torch.manual_seed(0)
    shape = GPTConfig()
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = LinearLR(optimizer, start_factor=1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)
    text, generator = standard_library(), torch.Generator().manual_seed(0)
    monitor = TrainerMon(str(config), params_have_main_grad=False)
    monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    with monitor:
        for _ in range(steps):
            tokens, following = random_batch(text, BATCH, shape.context, generator)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f} after {steps} steps")


if __name__ == "__main__":
    main()
