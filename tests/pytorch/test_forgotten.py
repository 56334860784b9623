"""A loop that never clears its gradients, or trains in evaluation mode, is warned of, once. Other loops are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watching import Output, attached, footprint, on_two_ranks, warnings_in

STEPS = 8
SAID = "is not cleared between steps: in step 4 a backward has added"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def clear_data(optimizer: torch.optim.Optimizer) -> None:
    """Of which autograd's versions know nothing."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.data.zero_()


Clear = Callable[[torch.optim.Optimizer], object]
CLEARING: dict[str, Clear] = {
    "taken away": lambda optimizer: optimizer.zero_grad(),
    "zeroed": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "zeroed behind autograd's back": clear_data,
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, clear: Clear | None, *, micro_steps: int = 1, clips: bool = False
) -> None:
    torch.manual_seed(1)
    for _ in range(STEPS):
        for _ in range(micro_steps):
            model(torch.randn(3, 4)).square().sum().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if clear is not None:
            clear(optimizer)


def watched(output: Output, clear: Clear | None, micro_steps: int = 1, **loop: Any) -> list[list[float]]:
    """The weights that came of it. No hook is left."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hooks = footprint(model, optimizer)
    with attached(output, model, optimizer, micro_steps, wg_distribution=True, ops=["norm"]):
        train(model, optimizer, clear, micro_steps=micro_steps, **loop)
    assert footprint(model, optimizer) == hooks
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_gradients_that_are_kept_are_told_once_and_counted(
    output: Output, caplog: pytest.LogCaptureFixture, micro_steps: int, clips: bool
) -> None:
    found = watched(output, None, micro_steps, clips=clips)
    assert [one.count(SAID) for one in warnings_in(caplog)] == [1]
    assert output.manifest()["failures"] == {"gradients that are kept": 1}
    model = network()
    train(model, torch.optim.SGD(model.parameters(), 0.01), None, micro_steps=micro_steps, clips=clips)
    assert found == [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("how", CLEARING)
def test_gradients_that_are_cleared_are_not(
    output: Output, caplog: pytest.LogCaptureFixture, how: str, micro_steps: int
) -> None:
    watched(output, CLEARING[how], micro_steps)
    assert warnings_in(caplog) == []


def test_what_a_generator_leaves_in_its_critic_is_not(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """The critic's gradients are cleared only before the critic's own backward."""
    model = nn.ModuleList([network(), nn.Linear(2, 1)])
    generator, critic = (torch.optim.SGD(one.parameters(), 0.01) for one in model)
    with attached(output, model, [generator, critic], wg_distribution=True, ops=["norm"]):
        for _ in range(STEPS):
            made = model[0](torch.ones(3, 4))
            generator.zero_grad()
            model[1](made).sum().backward()
            generator.step()
            critic.zero_grad()
            (model[1](made.detach()) - model[1](torch.randn(3, 2))).sum().backward()
            critic.step()
    assert [one for one in warnings_in(caplog) if "cleared" in one] == []


def test_a_step_that_is_not_collected_proves_nothing(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with attached(output, model, optimizer, wg_distribution=True, ops=["norm"], step_interval=2):
        train(model, optimizer, None)
    assert warnings_in(caplog) == []


def reduced(output: Output) -> None:
    """With a reducer of torch, which writes to the gradients, too."""
    counted = {}
    for how, clear in {"kept": None, "cleared": CLEARING["taken away"]}.items():
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with attached(output, model, optimizer, wg_distribution=True, ops=["norm"]):
            train(model, optimizer, clear)
        own = [one for one in output.directories() if f"rank{dist.get_rank()}" in one.name]
        counted[how] = json.loads((own[-1] / "manifest.json").read_text())["failures"]
    assert counted == {"kept": {"gradients that are kept": 1}, "cleared": {}}


def test_gradients_that_a_wrapper_reduces_are_followed(tmp_path: Path) -> None:
    on_two_ranks(reduced, tmp_path)


# --- The mode of the model.

LEFT = "It was in training mode before: call model.train() after each evaluation."
FROM_THE_START = "Call model.train() before training, unless this is intended."


def evaluated(output: Output, modes: Callable[[nn.Module, int], object]) -> dict[str, Any]:
    """The manifest of a training whose loop sets the mode before each step, by its number."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with attached(output, model, optimizer, wg_distribution=True, xy_distribution=True, ops=["norm"]):
        for step in range(STEPS):
            modes(model, step)
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return output.manifest()


def told_of_mode(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one for one in warnings_in(caplog) if "was in evaluation mode" in one]


def test_a_model_that_is_left_in_evaluation_mode_is_told_once_and_counted(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = evaluated(output, lambda model, step: model.train(step < 4))
    assert [one.endswith(LEFT) and "when step 4 trained it" in one for one in told_of_mode(caplog)] == [True]
    assert manifest["failures"] == {"evaluation mode": 1}
    assert manifest["notes"]["evaluation_mode"] == "the model trains in evaluation mode, first in step 4"


def test_a_model_that_trains_in_evaluation_mode_from_the_start_is_advice(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = evaluated(output, lambda model, _: model.eval())
    assert [one.endswith(FROM_THE_START) and "when step 0 trained it" in one for one in told_of_mode(caplog)] == [True]
    assert "evaluation mode" not in manifest["failures"]


def test_a_model_of_which_a_part_trains_in_training_mode_is_not_told(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    evaluated(output, lambda model, _: model.eval()[2].train())  # type: ignore[index]
    assert told_of_mode(caplog) == []


def test_an_evaluation_between_steps_is_not_told(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """With gradients, and also between a backward and the optimizer's step."""

    def evaluate(model: nn.Module, _: int) -> None:
        model.eval()(torch.randn(3, 4)).sum().backward()
        model.train()

    manifest = evaluated(output, evaluate)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with attached(output, model, optimizer, wg_distribution=True, ops=["norm"]):
        for _ in range(3):
            model.train()(torch.randn(3, 4)).sum().backward()
            model.eval()(torch.randn(3, 4))
            optimizer.step()
            optimizer.zero_grad()
    assert told_of_mode(caplog) == []
    assert "evaluation_mode" not in manifest["notes"]
