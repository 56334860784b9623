"""Recomputed cells have the rows that they have without recomputation: a row a call, also for calls in several places."""

from __future__ import annotations

import itertools
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, attached, warnings_in
from mindspore import Tensor, nn, ops, recompute
from tapping import Job, Twin, assert_rows, drawn, with_drawn_weights

from monitor.mindspore import autograd

HOW: dict[str, dict[str, Any]] = {
    "reentrant": {},
    "saved tensors": {"use_reentrant": False},
    "saved tensors, to the end": {"use_reentrant": False, "early_stop": False},
    "with the output": {"output_recompute": True},
}


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(8, 5), nn.Dense(5, 8)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(ops.tanh(self.a(x)))


class Recomputed(nn.Cell):
    """Calls a block ``times`` times, recomputed by a method, by the function, or not at all."""

    def __init__(self, by: str = "", how: str = "reentrant", times: int = 1) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Dense(8, 8), Block(), nn.Dense(8, 2)
        self.by, self.options, self.times = by, HOW[how], times
        if by == "method":
            self.block.recompute(**self.options)

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = recompute(self.block, x, **self.options) if self.by == "function" else self.block(x)
        return self.last(x)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("by", "how"), [*itertools.product(["method", "function"], HOW)])
def test_every_call_has_its_rows(output: Output, by: str, how: str, times: int, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(lambda: Recomputed(by, how, times), twin=lambda: Recomputed(times=times))
    assert job.train(output) == job.train(None)
    assert_rows(output, job)
    assert warnings_in(caplog) == []


class Branches(nn.Cell):
    """The backward reaches the calls in the order of the last operations on their results, and one of them not at all."""

    def __init__(self, by: str = "function") -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Dense(8, 8), Block(), nn.Dense(8, 2)
        self.by = by

    def called(self, x: Tensor) -> Tensor:
        return recompute(self.block, x) if self.by == "function" else self.block(x)

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        one, two, unused = self.called(x), self.called(ops.sin(x)), self.called(ops.cos(x))
        later = ops.tanh(two * 2.0)
        return self.last(ops.tanh(one) * later) + ops.stop_gradient(unused).sum()


def test_calls_are_told_apart_by_what_is_recomputed_and_not_by_their_order(output: Output) -> None:
    job = Job(Branches)
    assert job.train(output) == job.train(None)
    nets = [with_drawn_weights(Branches("")) for _ in range(2)]
    twin = Twin(*nets, job.optimizer(nets[0].trainable_params()), job.loss)
    expected = {
        place: np.linalg.norm(x) for place, x in twin.rows().items() if place[0] == "actv_grad" and "block.b.output" in place[1]
    }
    found = {("actv_grad", row.name, row.step): row.values["norm"] for row in output.rows("actv_grad")}
    assert {place: found.get(place, 0.0) for place in expected} == pytest.approx(expected, rel=1e-5)
    assert all(norm == 0.0 for (_, name, _), norm in expected.items() if name.endswith("#2"))
    assert len({norm for (_, _, step), norm in expected.items() if step == 0}) == 3


class Nested(nn.Cell):
    """A recomputed cell that calls a recomputed cell ``times`` times."""

    def __init__(self, times: int, *, recomputed: bool, how: str = "reentrant") -> None:
        super().__init__()
        self.first, self.last = nn.Dense(8, 8), nn.Dense(2, 1)
        self.outer = Recomputed("method" if recomputed else "", how, times)
        if recomputed:
            self.outer.recompute()

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.outer(self.first(x)))


@pytest.mark.parametrize(("how", "times"), [("reentrant", 1), ("saved tensors", 1), ("saved tensors", 2)])
def test_a_recomputed_cell_inside_a_recomputed_cell_has_its_rows(output: Output, how: str, times: int) -> None:
    job = Job(lambda: Nested(times, recomputed=True, how=how), twin=lambda: Nested(times, recomputed=False))
    assert job.train(output) == job.train(None)
    assert_rows(output, job)


def test_calls_that_cannot_be_told_apart_have_no_gradients_and_one_warning_says_so(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    autograd._warn_of_nesting.cache_clear()
    job = Job(lambda: Nested(2, recomputed=True), twin=lambda: Nested(2, recomputed=False))
    assert job.train(output) == job.train(None)
    found = {row.name for row in output.rows("actv_grad")}
    assert {name for kind, name, _ in job.expected() if kind == "actv_grad"} - found == {
        f"outer.block.{cell}.{slot}{call}" for cell in "ab" for slot in ("input", "output") for call in ("", "#1")
    }
    (said,) = warnings_in(caplog)
    assert "it is unknown which call is repeated" in said


def trained_by_halves(output: Output, by: str) -> tuple[list[bytes], dict[Any, float]]:
    """The weights after a step of two micro-batches, and the norms of its gradients of activations."""
    before = output.directories()
    net = with_drawn_weights(Recomputed(by, times=2))
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, 2, monitor_mbs_grad=True, **EVERYTHING):
        for half in range(2):
            _, gradients = ms.value_and_grad(lambda half=half: net(drawn(half, 6, 8)).sum(), None, optimizer.parameters)()
        optimizer(gradients)
    (directory,) = [one for one in output.directories() if one not in before]
    rows = output.rows("actv_grad", directory)
    return [one.asnumpy().tobytes() for one in net.get_parameters()], {(r.name, r.micro_step): r.values["norm"] for r in rows}


def test_micro_batches_have_their_own_calls(output: Output) -> None:
    plain, expected = trained_by_halves(output, "")
    recomputed, found = trained_by_halves(output, "method")
    assert recomputed == plain
    assert found == pytest.approx(expected, rel=1e-6)
    assert {("block.a.output", 0), ("block.a.output#1", 0), ("block.a.output", 1), ("block.a.output#1", 1)} <= found.keys()
