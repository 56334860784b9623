"""A step that is compiled as a whole has the rows of the dynamic graph, and the bits of training without a monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import RECORDED, STEPS, WHOLE, Deep, adam, assert_same, by_model, mode_of, plain, recorded, step_of
from evidence import in_turn
from mindspore import Parameter, Tensor, nn, ops
from training import inputs

from monitor.mindspore.compiled import taps


class Repeated(nn.Cell):
    """A cell is called three times, one of them with the result of another call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 4)
        self.b = nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        twice = self.a(ops.tanh(self.a(x)))
        y = self.b(ops.tanh(twice))
        return (y * self.b(self.a(twice * y))).sum()


class Mixing(nn.Cell):
    """Takes tensors in tuples, by keyword, and beside a number; returns a tuple and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(4, 4)

    def construct(self, x: Tensor, pair: Any, scale: float = 1.0, *, mask: Any = None) -> Any:
        y = self.inner(x) * scale
        if mask is not None:
            y = y * mask
        return y + pair[0], (y - pair[1],)


class Structured(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = Mixing()

    def construct(self, x: Tensor) -> Tensor:
        y, (z,) = self.mixing(x, (x * 2.0, ops.tanh(x)), 0.5, mask=x)
        return (ops.tanh(y) * z).sum()


class OfIntegers(nn.Cell):
    """Its first cell takes integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.b = nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.table(x))).sum()


class Scaled(nn.Cell):
    """Multiplies in a narrow type."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.factor = Parameter(Tensor([[0.5, -1.5, 2.0, 3.0]] * 3, ms.float32))

    def construct(self, x: Tensor) -> Tensor:
        return x.astype(self.dtype) * self.factor.astype(self.dtype)


class Narrow(nn.Cell):
    """Activations and their gradients are of a narrow type."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.a, self.b = Scaled(dtype), Scaled(dtype)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.a(x)).astype(ms.float32)).sum()


def integers(step: int) -> Tensor:
    return Tensor([[step, 1], [5, 6]], ms.int32)


def as_in_the_dynamic_graph(
    how: str, make: Callable[[], nn.Cell], output: Output, optimizer_of: Any = None, given: Any = inputs
) -> None:
    of = {} if optimizer_of is None else {"optimizer_of": optimizer_of}
    _, expected = recorded("dynamic", make, output, loop={"given": given}, **of)
    bits, rows = recorded(how, make, output, loop={"given": given}, **of)
    assert bits == plain(how, make, given=given, **of)
    assert_same(rows, expected)


@pytest.mark.parametrize("how", WHOLE)
def test_every_kind_has_the_rows_of_the_dynamic_graph(how: str, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    as_in_the_dynamic_graph(how, Deep, output)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(("together", "how"), in_turn([1, 3], WHOLE))
def test_each_of_many_weights_has_its_rows(how: str, together: int, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "TOGETHER", together)
    as_in_the_dynamic_graph(how, Deep, output)


@pytest.mark.parametrize(("make", "how"), in_turn([Repeated, Structured], WHOLE))
def test_calls_and_arguments_have_the_names_of_the_dynamic_graph(how: str, make: type[nn.Cell], output: Output) -> None:
    as_in_the_dynamic_graph(how, make, output)


@pytest.mark.parametrize("how", WHOLE)
def test_a_cell_of_integers_has_no_gradient_of_its_input(how: str, output: Output) -> None:
    as_in_the_dynamic_graph(how, OfIntegers, output, given=integers)


@pytest.mark.parametrize(("dtype", "how"), in_turn([ms.float16, ms.bfloat16], WHOLE))
def test_narrow_types_are_read(how: str, dtype: Any, output: Output) -> None:
    as_in_the_dynamic_graph(how, lambda: Narrow(dtype), output)


OPTIMIZERS: dict[str, Callable[[Any], nn.Cell]] = {
    "SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9),
    "Momentum": lambda p: nn.Momentum(p, 0.1, momentum=0.9),
    "AMSGrad": lambda p: nn.Adam(p, 0.01, use_amsgrad=True),
}


@pytest.mark.parametrize(("name", "how"), in_turn(OPTIMIZERS, WHOLE))
def test_moments_of_other_optimizers_are_read(name: str, how: str, output: Output) -> None:
    as_in_the_dynamic_graph(how, Deep, output, OPTIMIZERS[name])


@pytest.mark.parametrize("sink", [False, True], ids=["not sunk", "sunk"])
def test_model_train_has_the_rows_of_the_dynamic_graph(sink: bool, output: Output) -> None:
    _, expected = by_model("dynamic", output, sink=False)
    bits, rows = by_model("graph", output, sink=sink)
    assert bits == by_model("graph", output, sink=sink, monitored=False)[0]
    assert {step for _, _, step, _ in rows} == set(range(STEPS))
    assert_same(rows, expected)


# --- The loss, which is known when the step has ended.


def losses(output: Output) -> dict[int, float]:
    """In the rows of the newest run, by step."""
    rows = output.rows("run", max(output.directories(), key=lambda one: one.stat().st_ctime_ns))
    return {row.step: row.values["value"] for row in rows if row.name == "loss"}


@pytest.mark.parametrize("how", [*WHOLE, "dynamic"])
def test_a_loss_that_is_logged_after_a_step_is_a_row_of_the_step(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {}
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        step = step_of(how, net, optimizer)
        with attached(output, net, optimizer, **RECORDED | {"run_numbers": True, "ndigits": 17}) as monitor:
            for number in range(STEPS):
                loss = step(inputs(number))
                monitor.log(loss=loss, tokens=number)
                expected[number] = float(loss.asnumpy())
    assert losses(output) == pytest.approx(expected, rel=1e-7)
    assert not [said for said in warnings_in(caplog) if "log(" in said]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_where_only_the_gradients_are_compiled_a_loss_is_a_row_of_its_own_step(
    output: Output, when: str, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python calls the optimizer, and sees no forward where compiled code measures nothing."""
    monkeypatch.setenv("MONITOR_COMPILED_CODE", "1" if measured else "0")
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    @ms.jit
    def compiled(x: Tensor) -> Any:
        return gradients_of(x)

    expected = {}
    with attached(output, net, optimizer, param_distribution=True, ops=["norm"], run_numbers=True, ndigits=17) as monitor:
        for number in range(STEPS):
            loss, gradients = compiled(inputs(number))
            if when == "before":
                monitor.log(loss=loss)
            optimizer(gradients)
            if when == "after":
                monitor.log(loss=loss)
            expected[number] = float(loss.asnumpy())
    assert losses(output) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sink", [False, True])
def test_the_loss_of_a_compiled_model_train_is_that_of_the_dynamic_graph(output: Output, sink: bool) -> None:
    found = []
    for how in ("dynamic", "graph"):
        by_model(how, output, sink=sink and how == "graph", run_numbers=True, ndigits=17)
        found.append(losses(output))
    dynamic, graph = found
    assert sorted(dynamic) == list(range(STEPS))
    assert graph == pytest.approx({step: dynamic[step] for step in graph}, rel=1e-6)
    assert STEPS - 1 in graph
    assert sink or len(graph) == STEPS
