"""A run that is monitored and one that is not are the same run: every loss, weight, buffer, moment and random number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from observing import BertBlock, Residual, Twice, convolutions, small_gpt, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from watching import EVERYTHING, Output, attached

STEPS = 3
MICRO_STEPS = 2

OF_THE_STEP: dict[str, Any] = {
    "mg_direction": True,
    "update_ratio": True,
    "ur_distribution": True,
    "ops": [*EVERYTHING["ops"], "magnitude_histogram", "underflow_e4m3"],
    "format": ["csv", "hdf5"],
}

reentrant = partial(checkpoint, use_reentrant=True)
non_reentrant = partial(checkpoint, use_reentrant=False)


def values(*shape: int) -> Tensor:
    return torch.sin(torch.arange(math.prod(shape)) * 1.7 + 0.3).view(shape)


class Checkpointed(nn.Module):
    """Blocks with dropout, one segment each."""

    def __init__(self, segment: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(BertBlock(8, dropout=0.3) for _ in range(3))
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.segment(block, x)
        return x


class TiedWeights(nn.Module):
    """What embeds the tokens also reads them out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = Residual(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x)))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class InPlaceViews(nn.Module):
    """Halves of one tensor, changed in place by a module and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.doubled = Doubled()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        left, right = x[:, :4], x[:, 4:]
        self.doubled(left)
        right += left
        self.doubled(x)
        return self.last(torch.tanh(x) + torch.cat([right, left], dim=1))


def in_place_chain() -> nn.Module:
    def block() -> list[nn.Module]:
        return [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(0.2, inplace=True)]

    return nn.Sequential(*block(), *block(), nn.Linear(8, 8), nn.Hardtanh(inplace=True))


class Autocast(nn.Module):
    """Matrix products in bfloat16, norms in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.block = BertBlock(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x).float()


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


class Last(nn.Module):
    """The outputs of a recurrent layer: nested tuples inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.lstm(x)
        return out.sum(dim=1) + (hidden + cell).sum(dim=0)


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


CASES = {
    "gpt": Case(small_gpt, tokens),
    "norm of a sum": Case(lambda: nn.Sequential(*(BertBlock(8) for _ in range(3))), lambda: values(4, 8)),
    "norm of a sum, input with a gradient": Case(
        lambda: nn.Sequential(*(BertBlock(8) for _ in range(3))), lambda: values(4, 8).requires_grad_()
    ),
    "residuals": Case(lambda: nn.Sequential(*(Residual(8) for _ in range(3))), lambda: values(4, 8)),
    "in-place chain": Case(in_place_chain, lambda: values(4, 8)),
    "in-place views": Case(InPlaceViews, lambda: values(4, 8)),
    "reentrant checkpoints": Case(lambda: Checkpointed(reentrant), lambda: values(4, 8)),
    "non-reentrant checkpoints": Case(lambda: Checkpointed(non_reentrant), lambda: values(4, 8)),
    "dropout": Case(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)), lambda: values(4, 8)),
    "tied weights": Case(TiedWeights, tokens),
    "module called twice": Case(lambda: Twice(8), lambda: values(4, 8)),
    "convolutions": Case(convolutions, lambda: values(2, 2, 4, 4)),
    "encoder layer": Case(attention, lambda: values(2, 3, 8)),
    "autocast": Case(Autocast, lambda: values(4, 8)),
    "recurrent": Case(Last, lambda: values(2, 3, 8)),
}

Result = dict[str, Any]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Callable[[], Tensor], scale: float = 1.0) -> list[Tensor]:
    """Steps of two micro-batches each, gradients aggregated with the last of them; the losses."""
    losses = []
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            held_back = isinstance(model, DistributedDataParallel) and micro_step < MICRO_STEPS - 1
            with model.no_sync() if held_back else nullcontext():
                x = inputs()
                x = x * (scale + step + micro_step) if x.is_floating_point() else (x + int(scale) + step + micro_step) % 16
                loss = model(x).square().mean()
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def result_of(
    case: Case, output: Output | None, wrap: Callable[[nn.Module], nn.Module] = lambda model: model, **inputs: float
) -> Result:
    """All that is left of a run, and all that was random in it."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = wrap(case.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    recording = {**EVERYTHING, **OF_THE_STEP, "monitor_mbs_grad": True}
    with nullcontext() if output is None else attached(output, model, optimizer, MICRO_STEPS, **recording):
        losses = train(model, optimizer, case.inputs, **inputs)
    return {
        "losses": losses,
        "state": model.state_dict(),
        "moments": optimizer.state_dict()["state"],
        "random": (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()),
        "training": [module.training for module in model.modules()],
    }


def assert_same(expected: Any, found: Any) -> None:
    """Equal in every bit, through dictionaries, lists and tuples."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        # As bytes: -0 is not 0, and a NaN is itself.
        assert found.dtype == expected.dtype
        assert torch.equal(found.detach().reshape(-1).view(torch.uint8), expected.detach().reshape(-1).view(torch.uint8))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(expected[key], found[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_is_the_same_bit_for_bit(case: Case, output: Output) -> None:
    unmonitored = result_of(case, None)
    monitored = result_of(case, output)

    assert_same(unmonitored, monitored)
    steps_seen = {
        kind: {row.step for row in output.rows(kind)} for kind in ("actv", "actv_grad", "grad_reduced", "param_updated")
    }
    assert steps_seen == {kind: set(range(STEPS)) for kind in steps_seen}
    assert {row.step for row in output.rows("exp_avg")} == {1, 2}


def run_rank(rank: int, directory: str) -> None:
    """One of two ranks: trains without and with a monitor, and keeps what came of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    for name, case in RANKED.items():
        unmonitored = result_of(case, None, DistributedDataParallel, scale=1.0 + rank)
        monitored = result_of(case, Output(Path(directory) / "out"), DistributedDataParallel, scale=1.0 + rank)
        torch.save((unmonitored, monitored), Path(directory) / f"{name}-{rank}.pt")
    dist.destroy_process_group()


RANKED = {"gpt": Case(lambda: small_gpt(1), tokens), "checkpointed": CASES["non-reentrant checkpoints"]}


def test_training_on_two_ranks_is_the_same_bit_for_bit(output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    torch.multiprocessing.start_processes(run_rank, args=(str(tmp_path),), nprocs=2, start_method="fork")

    for name in RANKED:
        ranks = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]
        for unmonitored, monitored in ranks:
            assert_same(unmonitored, monitored)
        assert_same(ranks[0][0]["state"], ranks[1][0]["state"])
    directories = output.directories()
    assert ["rank0" in path.name for path in directories] == [True, True, False, False]
    for directory in directories:
        for kind in ("actv", "actv_grad", "grad_unreduced"):
            assert {row.step for row in output.rows(kind, directory)} == set(range(STEPS))
        assert {row.name.startswith("module.") for row in output.rows("grad_unreduced", directory)} == {True}
