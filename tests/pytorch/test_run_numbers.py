"""The run's own numbers: learning rates, the total norm of gradients before and after clipping, and what a loop logs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from pyarrow.parquet import read_table
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from watching import Output, attached, warnings_in

from monitor import open_run
from monitor.coordinator.batches import MOST_CHARACTERS, MOST_IN_A_STEP, read_batches
from monitor.merge.merge import Wanted, merge
from monitor.sinks.hdf5 import read_hdf5

GRADIENTS = {"wg_distribution": True, "ops": ["norm"], "ndigits": 17, "run_numbers": None}
RANGE = ["Jan01_00-00-00", "Dec31_23-59-59"]
Clip = Callable[[nn.Module], Any]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def backward(model: nn.Module) -> Tensor:
    loss = model(torch.randn(6, 5)).square().sum()
    loss.backward()
    return loss


def norm_of_gradients(model: nn.Module) -> float:
    """In float64."""
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))


def numbers(output: Output, directory: Path | None = None) -> dict[tuple[str, int], float]:
    """By name and step."""
    rows = output.rows("run", directory)
    found = {(row.name, row.step): row.values["value"] for row in rows}
    assert len(found) == len(rows)
    return found


def of_step(output: Output, step: int) -> dict[str, float]:
    return {name: value for (name, of), value in numbers(output).items() if of == step}


def no_clipping(model: nn.Module) -> None:
    del model


def in_groups(model: nn.Module) -> None:
    """Each layer by a norm of its own."""
    clip_grad_norm_(model[0].parameters(), 0.5)
    clip_grad_norm_(list(model[2].parameters()), 0.25)


def by_given_norm(model: nn.Module) -> None:
    """As loops do that sum the norm over the ranks by themselves."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(list(model.parameters()), 1.0, norm)


CLIPPING: dict[str, tuple[Clip, bool]] = {
    "none": (no_clipping, False),
    "binds": (lambda model: clip_grad_norm_(model.parameters(), 1.0), True),
    "does not bind": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9), True),
    "only the norm": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), math.inf), True),
    "in groups": (in_groups, True),
    "by a given norm": (by_given_norm, True),
}
"""How a loop clips, and whether there is a norm after clipping."""


@pytest.mark.parametrize("gradients", [True, False], ids=["with rows of gradients", "without"])
@pytest.mark.parametrize("name", CLIPPING)
def test_the_norm_before_and_after_clipping_is_that_of_all_gradients(output: Output, name: str, gradients: bool) -> None:
    model, expected = small_model(), {}
    optimizer, (clip, clips) = torch.optim.SGD(model.parameters(), lr=0.01), CLIPPING[name]
    with attached(output, model, optimizer, **GRADIENTS | {"wg_distribution": gradients, "run_numbers": True}):
        for step in range(3):
            backward(model)
            expected["grad_norm", step] = norm_of_gradients(model)
            clip(model)
            if clips:
                expected["grad_norm_clipped", step] = norm_of_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    if not gradients and not clips:  # then nothing has computed it
        expected = {}
    found = {place: value for place, value in numbers(output).items() if place[0].startswith("grad_norm")}
    assert found == pytest.approx(expected, rel=2e-6)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
        lambda model: [p.grad.mul_(0.5) for p in model.parameters()],
        lambda model: [p.grad.data.mul_(0.5) for p in model.parameters()],
        lambda model: clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
        lambda model: clip_grad_norm_(model[0].parameters(), 1.0),
        lambda model: [clip_grad_norm_(model.parameters(), limit) for limit in (2.0, 1.0)],
        lambda model: (clip_grad_norm_(model.parameters(), 1.0), model.eval(), backward(model)),
    ],
    ids=["by value", "by hand", "past the version", "by another norm", "some", "twice", "before the last backward"],
)
def test_where_the_norm_before_is_not_known_only_the_norm_that_the_optimizer_received_has_a_row(
    output: Output, change: Clip
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model)
        change(model)
        received = norm_of_gradients(model)
        optimizer.step()
    assert of_step(output, 0) == pytest.approx({"learning_rate.0": 0.01, "grad_norm_clipped": received}, rel=1e-12)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("each", [False, True], ids=["their sum", "each micro-batch"])
@pytest.mark.parametrize("all_arrive", [False, True], ids=["with an earlier gradient", "with gradients of this step"])
def test_a_gradient_between_the_first_and_the_last_that_the_loop_changed_has_no_norm_before(
    output: Output, scaled: bool, each: bool, all_arrive: bool
) -> None:
    """Only the first and the last gradient of a backward are followed: rows of ``grad_unreduced`` say it of the others."""
    model = nn.Sequential(small_model(), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    root = model if all_arrive else model[0]
    with attached(output, model, optimizer, **GRADIENTS, grad_acc_steps=2, monitor_mbs_grad=each):
        for _ in range(2):
            backward(root)
        if scaled:
            model[0][0].bias.grad *= 0.5
        received = norm_of_gradients(model)
        optimizer.step()
    name = "grad_norm_clipped" if scaled else "grad_norm"
    assert of_step(output, 0) == pytest.approx({"learning_rate.0": 0.01, name: received}, rel=1e-12)


@pytest.mark.parametrize(
    ("times", "change"),
    [
        (math.nan, lambda p: torch.where(p.grad.isnan(), 0.0, p.grad)),
        (math.inf, lambda p: torch.where(p.grad.isinf(), 0.0, p.grad)),
        (1e-160, lambda p: p.grad * 0.5),
    ],
    ids=["nan by zero", "infinity by zero", "tiny numbers by their halves"],
)
def test_gradients_that_the_loop_replaces_have_no_norm_before(
    output: Output, times: float, change: Callable[[nn.Parameter], Tensor]
) -> None:
    """Partials leave out what is not finite, and scale tiny numbers by a power of two: the sums of squares stay the same."""
    model = small_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS):
        loss = model(torch.randn(6, 5, dtype=torch.float64)).square().sum()
        (loss + model[2].bias[0] * times if times > 1 or math.isnan(times) else loss * times).backward()
        for parameter in model.parameters():
            parameter.grad = change(parameter)
        received = math.hypot(*(x for p in model.parameters() if p.grad is not None for x in p.grad.flatten().tolist()))
        optimizer.step()
    assert of_step(output, 0) == pytest.approx({"learning_rate.0": 0.01, "grad_norm_clipped": received}, rel=1e-12, abs=0)


@pytest.mark.parametrize(("unscales", "fused"), [(True, False), (False, False), (False, True)])
def test_a_norm_of_gradients_that_are_still_multiplied_by_a_loss_scale_has_no_row(
    output: Output, unscales: bool, fused: bool
) -> None:
    """Without ``unscale_`` a loop clips them: the norm is that many times too large."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with attached(output, model, optimizer, **GRADIENTS):
        scaler.scale(model(torch.randn(6, 5)).square().sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        norm = norm_of_gradients(model)
        clip_grad_norm_(model.parameters(), 1.0)
        clipped = norm_of_gradients(model)
        scaler.step(optimizer)
    found = {name: value for name, value in of_step(output, 0).items() if name != "learning_rate.0"}
    expected = {"grad_norm": norm, "grad_norm_clipped": clipped} if unscales else {"grad_norm_clipped": clipped / 1024}
    assert found == pytest.approx({} if fused else expected, rel=2e-6)


def test_a_norm_that_includes_parameters_of_no_recorded_model_is_not_that_of_the_model(output: Output) -> None:
    model, head = small_model(), nn.Linear(3, 2)
    both = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(both, lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS):
        head(model(torch.randn(6, 5))).square().sum().backward()
        clip_grad_norm_(both, 0.1)
        optimizer.step()
    assert of_step(output, 0) == {"learning_rate.0": 0.01}


def test_a_norm_of_some_gradients_is_no_total_norm(output: Output) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS, targets={"0": {}}):
        backward(model)
        optimizer.step()
    assert of_step(output, 0) == {"learning_rate.0": 0.01}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_recorded_as_it_is(output: Output, value: float) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        loss = backward(model)
        model[0].weight.grad[0, 0] = value
        clip_grad_norm_(model.parameters(), 1.0)
        monitor.log(loss=loss * value)
        optimizer.step()
    found = of_step(output, 0)
    assert repr((found["grad_norm"], found["loss"])) == repr((value, value))
    assert math.isnan(found["grad_norm_clipped"])


def test_learning_rates_are_those_of_the_groups_at_the_step_and_counted_over_the_optimizers(output: Output) -> None:
    model = small_model()
    first = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.5}], lr=0.25)
    second = torch.optim.Adam(model[2].parameters(), lr=torch.tensor(0.125))
    scheduler = torch.optim.lr_scheduler.StepLR(first, step_size=1, gamma=0.5)
    with attached(output, model, [first, second], **GRADIENTS):
        for _ in range(2):
            backward(model)
            for one in (first, second):
                one.step()
            scheduler.step()
    expected = {0: (0.25, 0.5, 0.125), 1: (0.125, 0.25, 0.125)}
    for step, rates in expected.items():
        found = of_step(output, step)
        assert [found[f"learning_rate.{group}"] for group in range(3)] == list(rates)
        assert "grad_norm" in found


@pytest.mark.parametrize(
    "number",
    [
        2,
        2.5,
        np.float32(0.1),
        np.int64(7),
        np.array(0.3),
        torch.tensor(0.7),
        torch.tensor([3]),
        torch.ones((), requires_grad=True),
    ],
    ids=repr,
)
def test_a_logged_number_is_recorded_in_float64(output: Output, number: Any) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        backward(model)
        monitor.log(own=number)
        optimizer.step()
    assert of_step(output, 0)["own"] == pytest.approx(number.item() if isinstance(number, Tensor) else float(number), rel=1e-15)


def test_of_several_calls_in_a_step_the_mean_is_recorded_and_of_tokens_the_sum(output: Output) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS) as monitor:
        for step in range(2):
            for loss in (1.0, 4.0):
                backward(model)
                monitor.log(loss=torch.tensor(loss + step), tokens=10, norm=np.float32(loss))
            monitor.log(grad_norm=9.0)
            optimizer.step()
    for step in range(2):
        found = of_step(output, step)
        assert (found["loss"], found["tokens"], found["norm"]) == (2.5 + step, 20, 2.5)
        assert found["grad_norm"] == 9.0, "a logged number replaces the monitor's own"


def test_bad_numbers_have_no_row_and_are_reported_once_and_counted(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        for _ in range(2):
            backward(model)
            monitor.log(loss="0.5", text=None, vector=torch.ones(2), meta=torch.ones((), device="meta"), phase=1j, good=1)
            optimizer.step()
    assert {name for name, _ in numbers(output)} == {"good", "learning_rate.0", "grad_norm"}
    (said,) = [one for one in warnings_in(caplog) if "logging a number" in one]
    assert "of 'loss' failed" in said
    assert "got a str" in said
    assert output.manifest()["failures"]["logging a number: TypeError"] == 10


def test_a_call_between_two_steps_has_no_row_and_says_where_to_call(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        monitor.log(early=1)
        for _ in range(2):
            backward(model)
            optimizer.step()
            monitor.log(late=2)
    monitor.log(closed=3)
    assert {name for name, _ in numbers(output)} == {"early", "learning_rate.0", "grad_norm"}
    (said,) = [one for one in warnings_in(caplog) if "log(late)" in one]
    assert "Call log before optimizer.step()" in said


@pytest.mark.parametrize("output_format", ["csv", "hdf5", "parquet"])
@pytest.mark.parametrize("train", [True, False])
def test_a_call_with_a_loss_between_two_steps_belongs_to_the_step_that_has_ended(
    output: Output, caplog: pytest.LogCaptureFixture, output_format: str, train: bool
) -> None:
    """Where the model is in evaluation mode, gradients alone show that a step has begun."""
    model = small_model().train(train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected: dict[tuple[str, int], float] = {}
    with attached(output, model, optimizer, **{**GRADIENTS, "format": output_format}) as monitor:
        for step in range(40):
            loss = backward(model)
            if step % 3:
                monitor.log(loss=1.0, tokens=5)
            optimizer.step()
            if step % 10 == 9:
                time.sleep(0.15)  # the writer waits for this step by now
            monitor.log(loss=loss.detach() + step, tokens=7, grad_norm=2.0 * step, batch=f"shard:{step}")
            logged = [loss.item() + step, *([1.0] if step % 3 else [])]
            expected |= {("loss", step): sum(logged) / len(logged), ("grad_norm", step): 2.0 * step}
            expected["tokens", step] = 7 + 5 * (len(logged) - 1)
    rows = open_run(output.base).rows("run").to_pydict()
    found = {(name, step): value for name, step, value in zip(rows["name"], rows["step"], rows["value"], strict=True)}
    assert {place: value for place, value in found.items() if place[0] != "learning_rate.0"} == pytest.approx(
        expected, rel=1e-6
    )
    assert [step for name, step in found if name == "learning_rate.0"] == list(range(40))
    assert read_batches(output.directory(), range(40)) == {step: [[f"shard:{step}"]] for step in range(40)}
    assert not [said for said in warnings_in(caplog) if "log" in said]


def test_a_forward_without_gradients_between_the_step_and_the_call_begins_no_step(output: Output) -> None:
    """As an evaluation in training mode, or the experience that an agent collects."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        for step in range(3):
            backward(model)
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(2, 5))
            monitor.log(loss=step)
    assert {step: value for (name, step), value in numbers(output).items() if name == "loss"} == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("when", ["before backward", "before the optimizer", "after the optimizer"])
@pytest.mark.parametrize("intervals", [{}, {"wg_distribution": 3}])
@pytest.mark.parametrize("kind", ["wg_distribution", "param_distribution"])
def test_where_no_forward_is_seen_the_first_step_shows_where_the_loop_logs(
    output: Output, caplog: pytest.LogCaptureFixture, when: str, intervals: dict[str, int], kind: str
) -> None:
    """The loop uses the weights themselves."""
    model = torch.nn.ParameterList([torch.ones(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, ops=["norm"], run_numbers=True, intervals=intervals, **{kind: True}) as monitor:
        for step in range(5):
            loss = (model[0] * torch.randn(3)).square().sum()
            for moment in ("before backward", "before the optimizer", "after the optimizer"):
                if moment == "before the optimizer":
                    loss.backward()
                if moment == "after the optimizer":
                    optimizer.step()
                    optimizer.zero_grad()
                if moment == when:
                    monitor.log(loss=step)
    assert [numbers(output).get(("loss", step)) for step in range(5)] == [0, 1, 2, 3, 4]
    assert not [said for said in warnings_in(caplog) if "log" in said]


@pytest.mark.parametrize("late", [False, True])
def test_where_no_forward_is_seen_and_the_first_step_logs_nothing_a_loss_has_no_row(
    output: Output, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    model = torch.nn.ParameterList([torch.ones(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, ops=["norm"], run_numbers=True, param_distribution=True) as monitor:
        for step in range(5):
            model[0].square().sum().backward()
            if step == 3 and not late:
                monitor.log(loss=step)
            optimizer.step()
            if step == 3 and late:
                monitor.log(loss=step)
    assert "loss" not in {name for name, _ in numbers(output)}
    assert any("Call log in the first step, too" in said for said in warnings_in(caplog))


def test_a_loss_after_an_optimizer_that_has_begun_a_step_with_its_turn_belongs_to_that_step(output: Output) -> None:
    """The critic steps three times for each step of the other optimizer: its second turn ends a step, and begins the next."""
    model = nn.ModuleDict({"critic": nn.Linear(5, 1), "maker": nn.Linear(3, 5)})
    critic, maker = (torch.optim.SGD(model[name].parameters(), lr=0.01) for name in ("critic", "maker"))
    turn = 0
    with attached(output, model, [critic, maker], **GRADIENTS) as monitor:
        for _ in range(3):
            for _ in range(3):
                model["critic"](torch.randn(4, 5)).sum().backward()
                critic.step()
                monitor.log(critic_loss=turn)
                turn += 1
            model["critic"](model["maker"](torch.randn(4, 3))).sum().backward()
            maker.step()
            monitor.log(maker_loss=turn - 1)
    found = numbers(output)
    assert [found.get(("critic_loss", step)) for step in range(9)] == list(range(9))
    assert {step: value for (name, step), value in found.items() if name == "maker_loss"} == {2: 2, 5: 5, 8: 8}


def test_what_belongs_to_the_next_step_has_no_row_after_this_one(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """After ``GradScaler.update`` the scale is that of the next step."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        backward(model)
        optimizer.step()
        monitor.log(loss=1.0, loss_scale=65536.0)
    assert {name for name, _ in numbers(output)} == {"learning_rate.0", "grad_norm"}
    assert any("log(loss, loss_scale)" in said for said in warnings_in(caplog))


def test_a_loss_that_comes_after_its_rows_were_written_has_none_and_is_counted(
    output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monitor.stats.table.MOST_WAITED", 0.0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        for _ in range(2):
            backward(model)
            optimizer.step()
            assert monitor.flush(30)
            monitor.log(loss=1.0)
    assert {name for name, _ in numbers(output)} == {"learning_rate.0", "grad_norm"}
    (said,) = [one for one in warnings_in(caplog) if "log(loss)" in one]
    assert "after the rows of its step were written" in said
    assert output.manifest()["failures"]["logging too late"] == 2


def test_a_flush_does_not_wait_for_numbers_that_may_come(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monitor.stats.table.MOST_WAITED", 3600.0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        for step in range(3):
            backward(model)
            optimizer.step()
            assert monitor.generate_wgrad_metrics()[0]
            assert monitor.flush(30), step
    assert {step for _, step in numbers(output)} == {0, 1, 2}


@pytest.mark.parametrize("step_interval", [1, 2])
def test_the_writer_goes_on_when_the_next_forward_begins_in_a_collected_step_or_not(
    output: Output, monkeypatch: pytest.MonkeyPatch, step_interval: int
) -> None:
    monkeypatch.setattr("monitor.stats.table.MOST_WAITED", 3600.0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS, step_interval=step_interval) as monitor:
        backward(model)
        optimizer.step()
        monitor.log(loss=1.0)
        backward(model)
        until = time.monotonic() + 30
        while not list(output.directory().glob("run_0-0.csv")) and time.monotonic() < until:
            time.sleep(0.01)
        assert {name for name, step in numbers(output) if step == 0} == {"learning_rate.0", "grad_norm", "loss"}
        assert numbers(output)["loss", 0] == 1.0


@pytest.mark.accelerator
def test_a_number_on_a_device_is_refused_after_the_step(
    output: Output, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    model = small_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        loss = model(torch.randn(6, 5, device=device)).square().sum()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss)
    assert "loss" not in {name for name, _ in numbers(output)}
    assert any("pass loss.item()" in said for said in warnings_in(caplog))


class Agent(torch.nn.Module):
    """A policy and a value without a forward, as most agents of reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.heads = torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 1)])

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.policy(x))


@pytest.mark.parametrize("late", [False, True])
def test_a_model_without_a_forward_has_numbers_of_its_own_step(
    output: Output, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    """Its parts show that a step has begun, whether anything of them is recorded or not."""
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)
    with attached(output, agent, optimizer, **GRADIENTS) as monitor:
        for step in range(3):
            loss = agent.value(torch.ones(2)).square().mean()
            if not late:
                monitor.log(loss=step)
            loss.backward()
            optimizer.step()
            if late:
                monitor.log(loss=step)
    assert {step: value for (name, step), value in numbers(output).items() if name == "loss"} == {0: 0, 1: 1, 2: 2}
    assert not any("optimizer.step()" in said for said in warnings_in(caplog))


@pytest.mark.parametrize("late", [False, True])
def test_numbers_of_steps_that_are_not_collected_have_no_row(
    output: Output, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS, start_step=1, step_interval=2) as monitor:
        for step in range(4):
            backward(model)
            if not late:
                monitor.log(loss=step)
            optimizer.step()
            if late:
                monitor.log(loss=step)
    assert {place: value for place, value in numbers(output).items() if place[0] == "loss"} == {("loss", 1): 1, ("loss", 3): 3}
    assert not [said for said in warnings_in(caplog) if "log" in said]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"run_numbers": False, "wg_distribution": True}, set()),
        ({"run_numbers": None}, {"loss"}),
        ({"run_numbers": None, "param_distribution": True}, {"loss", "learning_rate.0"}),
        ({"run_numbers": True}, {"loss", "learning_rate.0"}),
    ],
)
def test_the_field_says_which_numbers_are_recorded(output: Output, config: dict[str, Any], expected: set[str]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **config) as monitor:
        loss = backward(model)
        monitor.log(loss=loss)
        optimizer.step()
    assert {name for name, _ in numbers(output)} == expected


def train(model: nn.Module, optimizer: Optimizer, steps: int, log: Callable[..., object]) -> list[Tensor]:
    """With clipping; the losses, and the norms that clipping returned."""
    found = []
    for _ in range(steps):
        loss = backward(model)
        log(loss=loss, tokens=torch.tensor(6))
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), norm]
    return found


def test_training_has_the_same_bits_and_the_functions_of_torch_are_restored(output: Output) -> None:
    results = []
    before = clip_grad_norm_.__wrapped__.__globals__["_get_total_norm"]
    for monitored in (False, True):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
        if monitored:
            with attached(output, model, optimizer, **GRADIENTS) as monitor:
                found = train(model, optimizer, 3, monitor.log)
        else:
            found = train(model, optimizer, 3, lambda **_: None)
        results.append([*found, *model.parameters(), *(x for state in optimizer.state.values() for x in state.values())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert clip_grad_norm_.__wrapped__.__globals__["_get_total_norm"] is before
    assert len(numbers(output)) == 3 * 5


def test_clipping_that_is_compiled_is_not_observed_and_compiles_whole(output: Output) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clip = torch.compile(lambda parameters: clip_grad_norm_(parameters, 1.0), backend="eager", fullgraph=True)
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model)
        clip(list(model.parameters()))
        optimizer.step()
    assert of_step(output, 0) == pytest.approx({"learning_rate.0": 0.01, "grad_norm_clipped": 1.0}, rel=1e-5)


def test_every_format_has_them_and_a_resumed_run_continues_them(output: Output, tmp_path: Path) -> None:
    for start in (0, 2):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 + start)
        config = {**GRADIENTS, "format": ["csv", "hdf5", "parquet", "tensorboard"], "append_output": RANGE if start else []}
        with attached(output, model, optimizer, start_iteration=start, **config) as monitor:
            train(model, optimizer, 2, monitor.log)
    csv, directory = numbers(output), output.directory()
    assert [csv["learning_rate.0", step] for step in range(4)] == [0.01, 0.01, 2.01, 2.01]
    assert len(csv) == 4 * 5
    hdf5 = [
        row for path in directory.glob("*.h5") for row in read_hdf5(path, ops=["value"]).to_pylist() if row["kind"] == "run"
    ]
    assert {(row["name"], row["step"]): row["value"] for row in hdf5} == csv
    parquet = [row for path in directory.glob("*.parquet") for row in read_table(path).to_pylist() if row["kind"] == "run"]
    assert {(row["name"], row["step"]): row["value"] for row in parquet} == csv
    merged = tmp_path / "merged"
    merge(Wanted(output.base, merged), lambda _done, _total: None)
    assert [path.stem for path in merged.rglob("run_*")] == ["run_0-99"]
    for path in (output.base, merged):
        rows = open_run(path).rows("run", columns=["name", "step", "rank", "value"])
        assert {(row["name"], row["step"]): row["value"] for row in rows.to_pylist()} == csv
        assert pc.unique(rows["rank"]).to_pylist() == [0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(directory))
    run.Reload()
    shown = {one.step: one.value for one in run.Scalars("0:grad_norm/rank0/run_value")}
    assert shown == pytest.approx({step: csv["grad_norm", step] for step in range(4)}, rel=1e-6)


def test_identifiers_of_batches_are_written_beside_the_rows_and_have_none(output: Output) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = [["shard-7:1", ["shard-7:2", 3]], [np.int64(4), ("a",)]]
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS) as monitor:
        for of_step in given:
            for batch in of_step:
                loss = backward(model)
                monitor.log(loss=loss, batch=batch)
            optimizer.step()
    assert read_batches(output.directory(), {0, 1}) == {0: [["shard-7:1"], ["shard-7:2", 3]], 1: [[4], ["a"]]}
    assert {name for name, _ in numbers(output)} == {"loss", "learning_rate.0", "grad_norm"}


def test_identifiers_of_batches_are_written_without_numbers_of_the_run_and_at_any_length(output: Output) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = ["\N{GRINNING FACE}" * MOST_CHARACTERS] * MOST_IN_A_STEP
    with attached(output, model, optimizer, **{**GRADIENTS, "run_numbers": False}) as monitor:
        monitor.log(loss=backward(model), batch=given)
        optimizer.step()
    assert read_batches(output.directory(), {0}) == {0: [given]}


@pytest.mark.parametrize("given", [torch.ones(2), 1.5, object()])
def test_what_identifies_no_batch_is_reported_and_hides_no_number(
    given: Any, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        for _ in range(2):
            monitor.log(loss=backward(model), batch=given)
            optimizer.step()
    assert [said for said in warnings_in(caplog) if "logging a batch failed: TypeError" in said] == warnings_in(caplog)
    assert len(warnings_in(caplog)) == 1
    assert read_batches(output.directory(), {0, 1}) == {}
    assert [step for name, step in numbers(output) if name == "loss"] == [0, 1]


def test_batches_of_steps_that_are_not_collected_are_not_written(output: Output) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attached(output, model, optimizer, step_interval=2, **GRADIENTS) as monitor:
        for step in range(3):
            monitor.log(loss=backward(model), batch=step)
            optimizer.step()
    assert read_batches(output.directory(), range(3)) == {0: [[0]], 2: [[2]]}
