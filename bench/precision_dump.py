"""What a precision dump costs: a training step with it against one without, in turn, in one process.

python bench/precision_dump.py
python bench/precision_dump.py --workload tiny --level L0 --task tensor
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from dumping import Training, main
from models import WORKLOADS
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "demo"))

from gpt import GPT, GPTConfig
from monitor.pytorch import PrecisionDebugger


def training_of(workload: str) -> Training:
    """AdamW, float32, and a batch that never changes."""
    chosen = WORKLOADS[workload]
    config = GPTConfig(**chosen.shape)
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(config.vocabulary, (chosen.batch, config.context))

    def gradients() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, gradients, update)


if __name__ == "__main__":
    main(__doc__ or "", training_of, PrecisionDebugger, torch.set_num_threads)
