"""A run whose features are recorded is the run that it would have been: every loss, weight, moment and random number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from observing import small_gpt, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from watching import EVERYTHING, Output, attached


class Block(nn.Module):
    """Attention, a gate over experts, and a layer that changes what it is given."""

    def __init__(self, width: int = 16, *, written_out: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.gate = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.written_out = written_out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        if self.written_out:
            shares = F.dropout(torch.softmax(q @ k.transpose(2, 3) / 3, -1), 0.1, self.training)
            mixed = shares @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + self.mlp(x) * torch.softmax(self.gate(x), -1).amax(-1, keepdim=True)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.reentrant = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(2)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x).float()


def sequence() -> Tensor:
    return torch.sin(torch.arange(2 * 6 * 16) * 1.7).view(2, 6, 16)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (small_gpt, tokens),
    "dropout": (lambda: nn.Sequential(Block(), Block()), sequence),
    "written out": (lambda: nn.Sequential(Block(written_out=True), Block()), sequence),
    "reentrant checkpoints": (lambda: Checkpointed(reentrant=True), sequence),
    "non-reentrant checkpoints": (lambda: Checkpointed(reentrant=False), sequence),
    "autocast": (Autocast, sequence),
    "bfloat16": (lambda: Block().bfloat16(), lambda: sequence().bfloat16()),
}


def features_of(model: nn.Module) -> dict[str, Any]:
    """All of them, of everything that has them."""
    names = dict(model.named_modules())
    attentions = [name for name in names if name.endswith("attn") or isinstance(names[name], Block)]
    gates = [name for name in names if name.endswith(("gate", "proj"))]
    routers = {"moe_router_weight_hook": gates, "moe_router_logit_hook": gates}
    outputs = [name for name in names if name and not name.endswith("blocks")]
    attending = {"attention_hook": attentions, "attention_head_hook": attentions}
    targets = {**attending, "linear_hook": [], "activation_hook": outputs, **routers}
    sampled = {"sa_heads": 0, "sa_batch_rows": 0, "dead_after_steps": 1}
    return {"recording_l2_features": True, "l2_targets": targets, **sampled}


def result_of(build: Callable[[], nn.Module], inputs: Callable[[], Tensor], output: Output | None) -> dict[str, Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = None if output is None else attached(output, model, optimizer, **EVERYTHING, **features_of(model))
    losses = []
    for _ in range(3):
        loss = model(inputs()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if monitor is not None:
        monitor.close()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    drawn = torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64)), torch.tensor(random.random())
    return {"losses": losses, "weights": [*model.state_dict().values()], "moments": moments, "random": [*drawn]}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_is_the_same_bit_for_bit(case: tuple[Callable[[], nn.Module], Callable[[], Tensor]], output: Output) -> None:
    unmonitored, monitored = result_of(*case, None), result_of(*case, output)
    for what, expected in unmonitored.items():
        for one, other in zip(expected, monitored[what], strict=True):
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), what
    attending = ("attention_hook", "attention_head_hook")
    for kind in (*attending, "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook", "activation_hook"):
        assert {row.step for row in output.rows(kind)} == {0, 1, 2}
