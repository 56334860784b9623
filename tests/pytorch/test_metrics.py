"""What the training loop gets when it asks.

Peers, fault 22: generate_wgrad_metrics() as documented raised, and the format ``api`` did not work.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from watching import EVERYTHING, Output, assert_statistics, attached, train, warnings_in

from monitor.pytorch import TrainerMon
from monitor.stats.table import StatsTable

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm", "max"]}


def small_model(layers: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)), nn.Tanh(), nn.Linear(5, 3))


OPS = ("min", "max", "mean", "norm", "nans")


def parts(monitor: TrainerMon) -> tuple[set[str], ...]:
    """The names without what all tags share, of each of the four dictionaries."""
    found = (*monitor.generate_xy_metrics(), *monitor.generate_wgrad_metrics())
    return tuple({tag.split("/")[0].split(":", 1)[1] for tag in one} for one in found)


@pytest.mark.parametrize("form", ["api", "csv", ["csv", "api"]], ids=str)
def test_they_give_what_is_known_of_the_current_step_wherever_they_are_called(output: Output, form: str | list[str]) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    config = {"xy_distribution": True, "wg_distribution": True, "format": form}
    weights, nothing = {"weight", "bias"}, set()
    with attached(output, model, optimizer, **config) as monitor:
        assert parts(monitor) == (nothing,) * 4
        for _ in range(2):
            loss = model(X).square().sum()
            forward = {".input:0", ".output:0"}
            assert parts(monitor) == (forward, nothing, nothing, nothing)
            loss.backward()
            assert parts(monitor) == (forward, {".output:0"}, weights, weights)  # one process has nothing to reduce
            optimizer.step()
            assert parts(monitor) == (forward, {".output:0"}, weights, weights)
            optimizer.zero_grad()
            assert parts(monitor) == (forward, {".output:0"}, weights, weights)
    assert parts(monitor) == (forward, {".output:0"}, weights, weights)
    assert bool(list(output.directory().glob("*.csv"))) == ("csv" in form)


def test_before_the_step_of_one_process_reduced_gradients_are_what_backward_has_left(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, grad_acc_steps=2, wg_distribution=True, format="api", ops=[*OPS]) as monitor:
        for last in (False, True):
            model(X).square().sum().backward()
            reduced, unreduced = monitor.generate_wgrad_metrics()
            assert bool(reduced) == bool(unreduced) == last
        assert_statistics(reduced["0:weight/rank0/grad_reduced"], model.weight.grad)
        optimizer.step()
        assert monitor.generate_wgrad_metrics()[0] == reduced


def test_they_are_absent_where_rows_are_of_micro_batches(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, wg_distribution=True, monitor_mbs_grad=True, format="api") as monitor:
        model(X).square().sum().backward()
        reduced, unreduced = monitor.generate_wgrad_metrics()
        assert (bool(reduced), bool(unreduced)) == (False, True)


def test_their_values_are_those_of_the_tensors(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    config = {"xy_distribution": True, "wg_distribution": True, "format": "api", "ops": [*OPS, "shape", "dtype"]}
    with attached(output, model, optimizer, **config) as monitor:
        result = model(X)
        result.retain_grad()
        result.square().sum().backward()
        gradient = model.weight.grad.clone()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        (reduced, unreduced), (actv, actv_grad) = monitor.generate_wgrad_metrics(), monitor.generate_xy_metrics()
    assert set(reduced) == {"0:weight/rank0/grad_reduced", "0:bias/rank0/grad_reduced"}
    for values, x in (
        (reduced["0:weight/rank0/grad_reduced"], model.weight.grad),
        (unreduced["0:weight/rank0/grad_unreduced"], gradient),
        (actv["0:.input:0/rank0/actv"], X),
        (actv["0:.output:0/rank0/actv"], result),
        (actv_grad["0:.output:0/rank0/actv_grad"], result.grad),
    ):
        assert set(values) == {*OPS, "shape", "dtype"}
        assert_statistics(values, x)
        assert (values["shape"], values["dtype"]) == (str(list(x.shape)), "torch.float32")
        assert isinstance(values["nans"], int)


def test_a_gradient_is_not_known_before_its_last_micro_batch(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, grad_acc_steps=2, format="api", **GRADIENTS) as monitor:
        known = []
        for _ in range(2):
            model(X).square().sum().backward()
            known.append(len(monitor.generate_wgrad_metrics()[1]))
    assert known == [0, 2]


def test_of_a_step_that_is_not_collected_nothing_is_known(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    known = []
    with attached(output, model, optimizer, step_interval=2, format="api", **GRADIENTS) as monitor:
        for _ in range(3):
            model(X).square().sum().backward()
            known.append(len(monitor.generate_wgrad_metrics()[1]))
            optimizer.step()
            known.append(len(monitor.generate_wgrad_metrics()[0]))
    assert known == [2, 2, 0, 0, 2, 2]


def test_of_communication_nothing_is_returned_where_it_is_not_recorded(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, format="api", **GRADIENTS) as monitor:
        train(model, optimizer, 1, X)
        assert monitor.generate_cc_metrics() == {}


def test_an_evaluation_between_steps_does_not_make_them_forget_the_step(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, format="api", **GRADIENTS) as monitor:
        train(model, optimizer, 1, X)
        model.eval()
        model(X)
        assert len(monitor.generate_wgrad_metrics()[0]) == 2


def test_combined_micro_steps_have_no_number_while_the_step_runs_and_after(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    config = {"xy_distribution": True, "micro_steps": "combined", "format": "api", "ops": ["max"]}
    with attached(output, model, optimizer, grad_acc_steps=2, **config) as monitor:
        for factor in (2, 1):
            model(factor * X).square().sum().backward()
        during = monitor.generate_xy_metrics()
        optimizer.step()
        assert monitor.generate_xy_metrics() == during
    assert during[0]["0:.input/rank0/actv"]["max"] == pytest.approx(2 * X.max().item())


def test_the_ops_of_the_moment_are_given(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, format="api", **GRADIENTS) as monitor:
        train(model, optimizer, 1, X)
        monitor.ops = ["infs"]
        reduced, _ = monitor.generate_wgrad_metrics()
    assert set(reduced["0:weight/rank0/grad_reduced"]) == {"infs"}


def test_two_models_are_in_one_answer(output: Output) -> None:
    one, two = nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 3))
    of_one, of_two = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
    with attached(output, one, of_one, format="api", **GRADIENTS) as monitor:
        monitor.set_monitor(two, 1, of_two)
        train(one, of_one, 1, X)
        train(two, of_two, 1, X)
        reduced, _ = monitor.generate_wgrad_metrics()
    names = ("weight", "bias", "0.weight", "0.bias")
    assert set(reduced) == {f"0:{name}/rank0/grad_reduced" for name in names}


def test_asking_changes_no_row(output: Output) -> None:
    model = small_model()
    twin = copy.deepcopy(model)
    for one, asks in ((model, True), (twin, False)):
        optimizer = SGD(one.parameters(), lr=0.1)
        with attached(output, one, optimizer, **EVERYTHING) as monitor:
            for _ in range(2):
                loss = one(X).square().sum()
                if asks:
                    monitor.generate_xy_metrics()
                loss.backward()
                if asks:
                    monitor.generate_wgrad_metrics()
                optimizer.step()
                optimizer.zero_grad()
    asked, not_asked = output.directories()
    for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced"):
        assert output.rows(kind, asked) == output.rows(kind, not_asked) != []


def test_what_cannot_be_read_is_absent_and_said_once(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: StatsTable) -> None:
        raise MemoryError("no room")

    model = nn.Linear(5, 3)
    monkeypatch.setattr(StatsTable, "kinds_now", fail)
    with attached(output, model, SGD(model.parameters(), lr=0.1), format="api", **GRADIENTS) as monitor:
        model(X).square().sum().backward()
        assert [monitor.generate_wgrad_metrics() for _ in range(3)] == [({}, {})] * 3
    assert len(warnings_in(caplog)) == 1
