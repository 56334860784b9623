"""Micro-steps: which forward a row belongs to, whatever the order of forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from observing import ACTIVATIONS, observed, seeded
from torch import Tensor, nn
from watching import Output, attached

from monitor.recording import activations


def batch(number: int) -> Tensor:
    """Inputs whose norm is 2 (number + 1)."""
    return torch.full((1, 4), number + 1.0, dtype=torch.float64)


class Scaled(nn.Module):
    """x · weight, whose gradient with respect to the weight is that of its output times x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def two_layers() -> nn.Module:
    return nn.Sequential(Scaled(), Scaled())


def run_batches(model: nn.Module, count: int) -> None:
    for number in range(count):
        # The loss has the gradient 1 + number everywhere.
        ((number + 1) * model(batch(number))).sum().backward()


def test_each_micro_batch_of_an_accumulated_step_has_rows_of_its_own(output: Output) -> None:
    model = two_layers()

    found = observed(output, model, lambda: run_batches(model, 3), grad_acc_steps=3)

    for kind in ("actv", "actv_grad"):
        rows = {(row.name, row.micro_step): row.values["norm"] for row in found.rows(kind)}
        assert {place: norm for place, norm in rows.items() if place[0] == "1.output"} == {
            ("1.output", 0): 2.0,
            ("1.output", 1): 4.0,
            ("1.output", 2): 6.0,
        }
    assert found.names("actv") == [".input", "0.input", "0.output", "1.input", "1.output", ".output"] * 3


SCHEDULES = {
    "one forward, one backward": "f0 f1 b0 f2 b1 f3 b2 b3",
    "all forwards first": "f0 f1 f2 f3 b0 b1 b2 b3",
    "last backward first": "f0 f1 f2 f3 b3 b2 b1 b0",
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_backward_row_has_the_micro_step_of_its_forward(schedule: str, output: Output) -> None:
    model = two_layers()

    def run() -> None:
        losses: dict[int, Tensor] = {}
        for action, number in ((word[0], int(word[1:])) for word in schedule.split()):
            if action == "f":
                losses[number] = ((number + 1) * model(batch(number))).sum()
            else:
                losses.pop(number).backward()

    found = observed(output, model, run, grad_acc_steps=4)

    gradients = {(row.name, row.micro_step): row.values["norm"] for row in found.rows("actv_grad")}
    expected = {
        (name, number): 2.0 * (number + 1) for name in (".output", "1.output", "1.input", "0.output") for number in range(4)
    }
    assert gradients == expected
    order = [int(word[1:]) for word in schedule.split() if word[0] == "b"]
    assert [row.micro_step for row in found.rows("actv_grad") if row.name == "1.output"] == order


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_gradients_of_each_micro_batch_are_distinguished_in_every_schedule(schedule: str, output: Output) -> None:
    model = two_layers()
    order = [int(word[1:]) for word in schedule.split() if word[0] == "b"]

    def run() -> None:
        losses: dict[int, Tensor] = {}
        for action, number in ((word[0], int(word[1:])) for word in schedule.split()):
            if action == "f":
                losses[number] = model(batch(number)).sum()
            else:
                losses.pop(number).backward()

    found = observed(output, model, run, grad_acc_steps=4, wg_distribution=True, monitor_mbs_grad=True, xy_distribution=False)

    # What micro-step n leaves behind is the sum of those whose backward has run by then.
    left = {number: 2.0 * sum(other + 1 for other in order[: place + 1]) for place, number in enumerate(order)}
    rows = {(row.name, row.micro_step): row.values["norm"] for row in found.rows("grad_unreduced")}
    assert rows == {(name, number): norm for name in ("0.weight", "1.weight") for number, norm in left.items()}


def test_more_root_forwards_than_announced_are_numbered_on_with_one_warning(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, grad_acc_steps=2, **ACTIVATIONS):
        for _ in range(3):
            run_batches(model, 4)
            optimizer.step()

    for kind in ("actv", "actv_grad"):
        rows = [(row.step, row.micro_step, row.values["norm"]) for row in output.rows(kind) if row.name == "1.output"]
        assert rows == [(step, number, 2.0 * (number + 1)) for step in range(3) for number in range(4)]
    assert sum("grad_acc_steps is 2" in record.message for record in caplog.records) == 1


def test_a_step_that_no_optimizer_ends_takes_a_bounded_number_of_rows(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activations, "MOST_FORWARDS", 4)
    model = two_layers()
    other = torch.optim.SGD(two_layers().parameters(), lr=0.0)
    with attached(output, model, other, grad_acc_steps=2, **ACTIVATIONS):
        run_batches(model, 50)
    assert [row.micro_step for row in output.rows("actv") if row.name == "1.output"] == [0, 1, 2, 3]
    assert sum("Step 0 has had 4 training forwards and has not ended" in record.message for record in caplog.records) == 1


def test_numbering_begins_anew_with_each_step(output: Output) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, grad_acc_steps=3, **ACTIVATIONS):
        for batches in (3, 1, 2):
            run_batches(model, batches)
            optimizer.step()

    rows = [(row.step, row.micro_step) for row in output.rows("actv") if row.name == ".input"]
    assert rows == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


def test_evaluation_between_micro_batches_is_not_counted(output: Output) -> None:
    model = two_layers()

    def run() -> None:
        run_batches(model, 1)
        model.eval()
        model(batch(7))
        model.train()
        with torch.no_grad():
            model(batch(7))
        ((1 + 1) * model(batch(1))).sum().backward()

    found = observed(output, model, run, grad_acc_steps=2)

    expected = observed(output, model, lambda: run_batches(model, 2), grad_acc_steps=2)
    assert [(row.name, row.micro_step, row.values) for row in found.rows("actv")] == [
        (row.name, row.micro_step, row.values) for row in expected.rows("actv")
    ]


def test_parts_called_without_their_root_are_in_the_first_micro_step_call_by_call(output: Output) -> None:
    model = two_layers()

    def run() -> None:
        for number in range(2):
            model[0](batch(number)).sum().backward()

    found = observed(output, model, run, grad_acc_steps=2)

    assert found.places("actv") == [("0.input", 0), ("0.output", 0), ("0.input#1", 0), ("0.output#1", 0)]


def test_calls_are_counted_within_each_micro_step(output: Output) -> None:
    class CalledTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    model = CalledTwice()

    found = observed(output, model, lambda: run_batches(model, 2), grad_acc_steps=2)

    outputs = [place for place in found.places("actv") if place[0].startswith("layer.output")]
    assert outputs == [("layer.output", 0), ("layer.output#1", 0), ("layer.output", 1), ("layer.output#1", 1)]
    assert sorted(place for place in found.places("actv_grad") if place[0].startswith("layer.output")) == sorted(outputs)


def test_combined_micro_steps_are_the_combination_of_each(output: Output) -> None:
    """Over all elements of all micro-steps, in one row: batches of different sizes count by their elements."""

    def run() -> Callable[[], None]:
        sizes = (2, 3, 5)

        def batches() -> None:
            for number, size in enumerate(sizes):
                x = torch.sin(torch.arange(4.0 * size, dtype=torch.float64) + number).view(size, 4)
                model(x).square().sum().backward()

        return batches

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    each = observed(output, model, run(), grad_acc_steps=3)
    combined = observed(output, model, run(), grad_acc_steps=3, micro_steps="combined")

    weights = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    share = weights / weights.sum()
    for kind in ("actv", "actv_grad"):
        rows = {row.name: row for row in combined.rows(kind)}
        assert list(rows) == each.names(kind)[: len(rows)]
        assert len(rows) == len(combined.rows(kind))
        for name, row in rows.items():
            parts = {
                op: torch.tensor([part.values[op] for part in each.rows(kind) if part.name == name], dtype=torch.float64)
                for op in row.values
            }
            mean = (share * parts["mean"]).sum()
            variance = (share * (parts["std"].square() + (parts["mean"] - mean).square())).sum()
            assert row.micro_step is None
            assert row.values == pytest.approx(
                {
                    "min": parts["min"].min().item(),
                    "max": parts["max"].max().item(),
                    "mean": mean.item(),
                    "norm": parts["norm"].norm().item(),
                    "zeros": (share * parts["zeros"]).sum().item(),
                    "nans": 0,
                    "infs": 0,
                    "std": variance.sqrt().item(),
                },
                rel=1e-12,
            )


def test_chunks_of_a_virtual_pipeline_count_each_for_itself(output: Output) -> None:
    first, second = Scaled(), Scaled()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.0)
    with attached(output, [first, second], optimizer, grad_acc_steps=2, **ACTIVATIONS):
        held = [first(batch(number)) for number in range(2)]
        for number, hidden in enumerate(held):
            ((number + 1) * second(hidden)).sum().backward()
        optimizer.step()

    norms = {
        (kind, row.chunk, row.name, row.micro_step): row.values["norm"]
        for kind in ("actv", "actv_grad")
        for row in output.rows(kind)
    }
    # The first chunk's input needs no gradient.
    sides = [("actv", 0, ".input"), ("actv", 0, ".output"), ("actv", 1, ".input"), ("actv", 1, ".output")]
    sides += [("actv_grad", 0, ".output"), ("actv_grad", 1, ".input"), ("actv_grad", 1, ".output")]
    assert norms == {(*side, number): 2.0 * (number + 1) for side in sides for number in range(2)}


def test_micro_batches_whose_root_forward_is_not_seen_are_counted_by_their_backwards(output: Output) -> None:
    """Only a part of the model is called, so that no root forward tells the micro-batches apart."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, grad_acc_steps=2, wg_distribution=True, monitor_mbs_grad=True, ops=["max"]):
        for _ in range(2):
            model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert output.table("grad_unreduced", "max") == {("0.weight", 0, 0): 1.0, ("0.weight", 0, 1): 2.0}


class CallsItself(nn.Module):
    """Its forward is a training step, which calls the model: Lightning makes this of every module it trains with others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled()
        self.within = False

    def forward(self, x: Tensor) -> Tensor:
        if self.within:
            return self.layer(x)
        self.within = True
        try:
            return self(x).sum()
        finally:
            self.within = False


def test_a_root_that_calls_itself_is_in_one_micro_step(output: Output) -> None:
    model = CallsItself()

    def two_batches() -> None:
        for number in range(2):
            ((number + 1) * model(batch(number))).backward()

    found = observed(output, model, two_batches, grad_acc_steps=2)

    for kind in ("actv", "actv_grad"):
        rows = {(row.name, row.micro_step): row.values["norm"] for row in found.rows(kind)}
        assert {place: norm for place, norm in rows.items() if place[0] == "layer.output"} == {
            ("layer.output", 0): 2.0,
            ("layer.output", 1): 4.0,
        }
    assert found.names("actv") == [".input", ".input#1", "layer.input", "layer.output", ".output#1", ".output"] * 2
