"""``wg_reduced_only``: the rows of reduced gradients are the same as beside those of local ones, which have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from observing import small_gpt, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from watching import Output, attached, on_two_ranks, warnings_in

from monitor import ConfigError, MonitorConfig
from monitor.config.loading import config_of

STEPS = 3
FIELDS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm", "min", "mean"], "ndigits": 17, "run_numbers": True}


def nothing(_model: nn.Module) -> None: ...


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def summed_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)


def trained(
    output: Output, only: bool, micro_batches: int, before_step: Callable[[nn.Module], None], wrap: Any = lambda model: model
) -> tuple[Path, list[Tensor]]:
    torch.manual_seed(0)
    model = wrap(small_gpt(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = set(output.base.iterdir())
    with attached(output, model, optimizer, micro_batches, **FIELDS, wg_reduced_only=only):
        for step in range(STEPS):
            for number in range(micro_batches):
                model((tokens() + step + number) % 16).square().mean().backward()
            before_step(model)
            optimizer.step()
            optimizer.zero_grad()
    rank = dist.get_rank() if dist.is_initialized() else 0
    (directory,) = (path for path in set(output.base.iterdir()) - before if f"-rank{rank}-" in path.name)
    return directory, [p.detach() for p in model.parameters()]


def assert_only_the_reduced_are_left(output: Output, *loop: Any) -> None:
    (both, expected), (only, weights) = (trained(output, one, *loop) for one in (False, True))
    assert output.rows("grad_reduced", only) == output.rows("grad_reduced", both)
    assert output.rows("grad_reduced", only)
    assert output.rows("grad_unreduced", both)
    assert not list(only.glob("grad_unreduced*"))
    numbers = [
        [row for row in output.rows("run", one) if row.name.startswith(("grad_norm", "learning_rate"))] for one in (both, only)
    ]
    assert numbers[0] == numbers[1]
    assert all(map(torch.equal, expected, weights))


@pytest.mark.parametrize("before_step", [nothing, clipped])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_rows_of_reduced_gradients_are_the_same(
    micro_batches: int, before_step: Callable[[nn.Module], None], output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    assert_only_the_reduced_are_left(output, micro_batches, before_step)
    assert warnings_in(caplog) == []


def check_rank(output: Output) -> None:
    assert_only_the_reduced_are_left(output, 2, summed_by_hand)
    assert_only_the_reduced_are_left(output, 1, nothing, DistributedDataParallel)


def test_on_two_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    on_two_ranks(check_rank, tmp_path)


def test_rows_of_micro_batches_cannot_be_asked_for_at_the_same_time() -> None:
    with pytest.raises(ConfigError, match="wg_reduced_only: true is not allowed: monitor_mbs_grad asks for rows"):
        config_of({"wg_distribution": True, "monitor_mbs_grad": True, "wg_reduced_only": True})
    assert not MonitorConfig().wg_reduced_only
