"""A small GPT trained on the sources of Python's standard library, recorded in single steps that change nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_fp8 import fp8
from torch import Tensor, nn
from torch.nn import functional as F

from gpt import GPT, GPTConfig
from monitor.precision.advice import SAFE, Advice, advise
from monitor.precision.judging import Scaling
from monitor.pytorch import TrainerMon
from monitor.query.opened import open_source
from monitor.query.sources import ALL
from text import random_batch, standard_library

CONFIG = GPTConfig(context=64, layers=2, width=64)
RECORDED = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "ops": ["absmax", "norm", "shape", "magnitude_histogram"],
    "ndigits": 16,
}
Loss = Callable[[Tensor, Tensor], Tensor]


def mean_loss(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def nothing(_step: int) -> None:
    """Nothing changes before a step."""


def recorded(
    model: nn.Module,
    batches: list[Any],
    base: Path,
    loss: Loss = mean_loss,
    before: Callable[[int], object] = nothing,
    micro_batches: int = 1,
    **config: Any,
) -> Path:
    """Record a step of each ``micro_batches`` batches. The learning rate is 0; ``before`` may change the model."""
    base.mkdir(parents=True, exist_ok=True)
    (base / "config.json").write_text(json.dumps({"targets": {}, "format": "hdf5", **RECORDED, **config}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONITOR_OUTPUT_DIR", str(base / "run"))
        monitor = TrainerMon(str(base / "config.json"), params_have_main_grad=False)
        monitor.set_monitor(model, grad_acc_steps=micro_batches, optimizer=optimizer)
    with monitor:
        for step, (tokens, following) in enumerate(batches):
            before(step)
            (loss(model(tokens), following) / micro_batches).backward()
            if (step + 1) % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
    return base / "run"


def advised(run: Path, **scaling: Any) -> Advice:
    return advise(open_source(run), ALL, Scaling(**scaling))


def formats_of(advice: Advice, verdict: str = SAFE) -> dict[str, dict[str, str]]:
    """Of the layers with this verdict, the formats that are advised, or else were tried."""
    return {one.name: {what: of.shown for what, of in one.operands.items()} for one in advice.having(verdict)}


@dataclass(frozen=True, slots=True)
class Trained:
    """A model and the text that it was trained on."""

    model: GPT
    text: Tensor

    @classmethod
    def on_text(cls, steps: int) -> Trained:
        torch.manual_seed(0)
        model, text, draw = GPT(CONFIG), standard_library(300_000), torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(steps):
            tokens, following = random_batch(text, 8, CONFIG.context, draw)
            mean_loss(model(tokens), following).backward()
            optimizer.step()
            optimizer.zero_grad()
        return cls(model, text)

    def copy(self) -> GPT:
        return copy.deepcopy(self.model)

    def batch(self, seed: int, size: int = 4) -> Any:
        return random_batch(self.text, size, CONFIG.context, torch.Generator().manual_seed(seed))


@torch.no_grad()
def change(model: nn.Module, batch: Any, formats: Mapping[str, Mapping[str, str]]) -> float:
    """By how much the loss of a batch changes if these layers are in FP8."""
    tokens, following = batch
    before = mean_loss(model(tokens).double(), following)
    with fp8(model, formats):
        after = mean_loss(model(tokens).double(), following)
    return float(after - before)
