"""Gradients that cells hand back to their inputs, found in MindSpore's graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import _no_grad

from monitor.failures import EarlierFailure
from monitor.mindspore import autograd
from monitor.mindspore.autograd import (
    _number,
    engine,
    gradient_target,
    in_backward,
    made_since,
    on_gradient,
    producers,
    recording,
    requires_grad,
    sequence_nr,
)

SHAPE = (3, 4)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(*shape: int, seed: int = 1) -> Parameter:
    return Parameter(Tensor(values(*(shape or SHAPE), seed=seed)), name=f"w{seed}")


def differentiated(function: Callable[[Tensor], Tensor], weights: Sequence[Parameter], x: np.ndarray | None = None) -> Any:
    return ms.value_and_grad(function, None, list(weights))(Tensor(values(*SHAPE) if x is None else x))


class Inner(nn.Cell):
    """Uses its input twice."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.sin(x) * 0.5 + x * 3.0


def inner_derivative(x: np.ndarray) -> np.ndarray:
    return np.cos(x.astype(np.float64)) * 0.5 + 3.0


class Watched:
    """The gradients that a cell hands back to its first argument, by the hooks of two calls."""

    def __init__(self, cell: nn.Cell) -> None:
        self.seen: list[np.ndarray] = []
        self.kept: list[Any] = []
        self.edges: list[Any] = []
        cell.register_forward_pre_hook(self.before, with_kwargs=True)
        cell.register_forward_hook(self.after, with_kwargs=True)

    def before(self, _cell: nn.Cell, args: Any, _kwargs: Any) -> None:
        self.target, self.start = gradient_target(args[0]), sequence_nr()

    def after(self, _cell: nn.Cell, _args: Any, _kwargs: Any, result: Any) -> None:
        outputs = result if isinstance(result, tuple) else (result,)
        self.edges = producers(outputs, [self.target], self.start)[self.target]
        self.kept += engine.watch(self.target, self.edges, self.take)

    def take(self, gradient: Tensor) -> None:
        self.seen.append(gradient.asnumpy().copy())


def test_a_walk_over_a_known_graph_finds_the_edges_into_an_input() -> None:
    w, found = weight(), {}

    def function(x: Tensor) -> Tensor:
        u = x * w
        target, start = gradient_target(u), sequence_nr()
        left, right = ops.sin(u), ops.tanh(u)
        out = left * right
        found.update(producers([out], [target], start))
        found["names"] = sorted((node._node.name(), k) for node, k in found[target])
        return out.sum() + u.sum()

    differentiated(function, [w])
    assert found["names"] == [("Sin", 0), ("Tanh", 0)]


@pytest.mark.parametrize("first", [True, False], ids=["other consumers after", "other consumers before"])
def test_the_parts_of_one_cell_are_summed_and_those_of_others_left_out(first: bool) -> None:
    cell, w, kept = Inner(), weight(), {}
    watched = Watched(cell)

    def function(x: Tensor) -> Tensor:
        v = x * w
        kept["v"] = v.asnumpy().copy()
        one, other = (cell(v), v * v) if first else reversed((v * v, cell(v)))
        return (one + other).sum()

    differentiated(function, [w])
    (seen,) = watched.seen
    np.testing.assert_allclose(seen, inner_derivative(kept["v"]), rtol=1e-6)


def test_which_output_of_an_operation_an_input_is_tells_it_from_the_others() -> None:
    cell, w, kept = Inner(), weight(), {}
    watched = Watched(cell)

    def function(x: Tensor) -> Tensor:
        a, b = ops.split(x * w, 2, axis=1)
        kept["b"] = b.asnumpy().copy()
        return (cell(b) * a).sum()

    differentiated(function, [w])
    assert watched.target[1] == 1
    expected = inner_derivative(kept["b"]) * (values(*SHAPE) * values(*SHAPE, seed=1))[:, :2]
    np.testing.assert_allclose(watched.seen, [expected], rtol=1e-5)


def test_what_was_made_before_the_call_is_no_part_of_it_though_it_comes_in_by_another_way() -> None:
    w, kept = weight(), {}

    class Aside(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x * 2.0 + self.memory[0]

    cell = Aside()
    watched = Watched(cell)

    def function(x: Tensor) -> Tensor:
        v = x * w
        kept["between"] = ops.exp(v)
        cell.memory = [kept["between"]]
        return cell(v).sum()

    differentiated(function, [w])
    np.testing.assert_array_equal(watched.seen, [np.full(SHAPE, 2.0)])


def test_an_input_that_is_no_result_of_an_operation_has_a_gradient_where_one_is_asked_for() -> None:
    cell = Inner()
    watched = Watched(cell)
    x = values(*SHAPE)
    ms.grad(lambda x: cell(x).sum())(Tensor(x))
    np.testing.assert_allclose(watched.seen, [inner_derivative(x)], rtol=1e-6)
    watched.seen.clear()
    w = weight()
    differentiated(lambda x: (cell(x) * w).sum(), [w], x)
    assert watched.seen == []


def test_each_pass_has_its_own_sum() -> None:
    cell, w = Inner(), weight()
    watched = Watched(cell)
    for seed in (3, 4, 5):
        x = values(*SHAPE, seed=seed)
        differentiated(lambda x: cell(x * w).sum(), [w], x)
        np.testing.assert_allclose(watched.seen[-1], inner_derivative(x * values(*SHAPE, seed=1)), rtol=1e-5)
    assert len(watched.seen) == 3


@pytest.mark.parametrize("wrap", [lambda cell: cell, lambda cell: cell.recompute() or cell], ids=["plain", "recomputed"])
def test_hooks_change_no_bit_of_gradients(wrap: Callable[[nn.Cell], nn.Cell]) -> None:
    def gradients(hooked: bool) -> list[bytes]:
        ws = [weight(seed=seed) for seed in (1, 2, 3)]
        cells = [wrap(Inner()) for _ in range(2)]
        _ = [Watched(cell) for cell in cells if hooked]

        def function(x: Tensor) -> Tensor:
            u = x * ws[0]
            v = cells[0](u) * ws[1] + u * 0.1
            return (cells[1](v) * v * ws[2] + ops.sin(u) + ops.exp(v) * 0.01).sum()

        loss, grads = differentiated(function, ws)
        return [loss.asnumpy().tobytes(), *(g.asnumpy().tobytes() for g in grads)]

    assert gradients(hooked=True) == gradients(hooked=False)


def test_summing_is_recorded_by_no_one_also_in_the_backward_of_a_backward() -> None:
    cell, states = Inner(), []
    watched = Watched(cell)
    take = watched.take
    watched.take = lambda gradient: (states.append(gradient._grad_node is None), take(gradient))[1]  # type: ignore[method-assign]
    x = values(*SHAPE)
    second = ms.grad(lambda x: ms.grad(lambda y: cell(y * 1.0).sum())(x).sum())(Tensor(x))
    np.testing.assert_allclose(second.asnumpy(), -np.sin(x.astype(np.float64)) * 0.5, rtol=1e-5)
    assert states[0] is True


def test_a_gradient_of_an_output_is_the_sum_over_its_consumers() -> None:
    w, seen = weight(), []

    def function(x: Tensor) -> Tensor:
        v = x * w
        on_gradient(v, lambda gradient: seen.append(gradient.asnumpy().copy()))
        return (v * 2.0 + v * 3.0).sum()

    differentiated(function, [w])
    np.testing.assert_array_equal(seen, [np.full(SHAPE, 5.0)])


def test_a_hook_that_was_taken_away_is_silent_and_hooks_keep_no_tensor_alive() -> None:
    w, seen, dead = weight(), [], []

    def function(x: Tensor) -> Tensor:
        v = x * w
        on_gradient(v, seen.append).remove()
        handle = on_gradient(ops.sin(v), seen.append)
        dead.append((weakref.ref(v), handle))
        return v.sum()

    differentiated(function, [w])
    assert seen == []
    assert dead[0][0]() is None


def where_it_records() -> dict[str, bool]:
    w, told = weight(), {}

    def note(name: str, x: Tensor) -> Tensor:
        told[name] = recording()
        return (x * w).sum()

    def without(x: Tensor) -> Tensor:
        with _no_grad():
            note("no_grad", x)
        return note("after no_grad", x)

    x = Tensor(values(*SHAPE))
    note("outside", x)
    differentiated(lambda x: note("value_and_grad", x), [w])
    ms.grad(lambda x: note("grad", x))(x)
    ms.grad(lambda x: ms.grad(lambda y: note("nested", y))(x).sum())(x)
    differentiated(without, [w])
    differentiated(lambda x: note("no gradient of the input", ops.stop_gradient(x)), [w])
    note("afterwards", x)
    return told


def test_recording_is_known_wherever_a_forward_may_run() -> None:
    assert where_it_records() == {
        "outside": False,
        "value_and_grad": True,
        "grad": True,
        "nested": True,
        "no_grad": False,
        "after no_grad": True,
        "no gradient of the input": True,
        "afterwards": False,
    }


def test_what_requires_a_gradient_is_known_of_every_kind_of_tensor() -> None:
    w, told = weight(), {}
    frozen = Parameter(Tensor(values(*SHAPE)), name="frozen", requires_grad=False)

    def function(x: Tensor) -> Tensor:
        v = x * w
        with _no_grad():
            unrecorded = x * w
        kinds = {
            "result": v,
            "argument": x,
            "parameter": w,
            "frozen parameter": frozen,
            "constant": Tensor(values(*SHAPE)),
            "of constants": ops.sin(Tensor(values(*SHAPE))),
            "stopped": ops.stop_gradient(v),
            "unrecorded": unrecorded,
            "whole numbers": ops.argmax(v, 1),
        }
        told.update({name: requires_grad(one) for name, one in kinds.items()})
        return v.sum()

    differentiated(function, [w])
    assert [name for name, does in told.items() if does] == ["result", "argument", "parameter"]


def test_what_was_made_since_is_distinguished_from_what_was_there() -> None:
    w, told = weight(), []

    def function(x: Tensor) -> Tensor:
        before = x * w
        start = sequence_nr()
        after = x * w
        told.extend(made_since(one, start) for one in (before, after, x, w, Tensor(1.0)))
        return (before + after).sum()

    differentiated(function, [w])
    assert told == [False, True, False, False, False]


def test_numbers_grow_while_operations_are_recorded_and_are_0_elsewhere() -> None:
    w, numbers = weight(), []

    def function(x: Tensor) -> Tensor:
        begins = [sequence_nr()]
        out = (x * w).sum()
        begins.append(sequence_nr())
        numbers.extend(map(_number, begins))
        return out

    differentiated(function, [w])
    assert 0 <= numbers[0] < numbers[1]
    assert sequence_nr() == 0


def test_a_forward_that_repeats_another_in_a_backward_knows_it() -> None:
    told = []

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.w = weight()
            self.inner.register_forward_pre_hook(self.note)

        def note(self, _cell: nn.Cell, _args: Any) -> None:
            told.append((in_backward(), recording()))

        def construct(self, x: Tensor) -> Tensor:
            return ms.recompute(self.inner, x * self.w).sum()

    net = Net()
    differentiated(net, net.trainable_params())
    assert told == [(False, False), (True, True)]


def test_an_error_of_training_that_a_question_meets_is_training_s() -> None:
    w = weight()
    mint.mul(Tensor(values(*SHAPE)), 2.0).asnumpy()
    errors = []

    def function(x: Tensor) -> Tensor:
        v = x * w
        mint.zeros_like(x)  # has no kernel on the CPU, as is found out later
        deadline = monotonic() + 30
        while monotonic() < deadline:
            try:
                requires_grad(v)
            except EarlierFailure as failure:
                errors.append(failure.error)
                break
        return v.sum()

    if ms.get_context("device_target") == "CPU":
        differentiated(function, [w])
        assert isinstance(errors[0], RuntimeError)


def test_without_a_graph_to_ask_nothing_requires_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "GRAPH_IS_THERE", False)
    w, told = weight(), []

    def function(x: Tensor) -> Tensor:
        v = x * w
        told.extend([requires_grad(v), sequence_nr(), made_since(v, 0), in_backward()])
        return v.sum()

    differentiated(function, [w])
    assert told == [False, 0, False, False]
