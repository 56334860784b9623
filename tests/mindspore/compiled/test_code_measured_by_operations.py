"""With ``MONITOR_COMPILED_CODE=operations``, MindSpore's own operations measure activations and gradients of compiled steps."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, attached, footprint, warnings_in, with_fixed_weights
from compiled_steps import (
    OUTSIDE,
    RECORDED,
    STEPS,
    WHOLE,
    Deep,
    Rows,
    Sinking,
    Skipping,
    adam,
    assert_same,
    by_model,
    called,
    mode_of,
    plain,
    read_from,
    recorded,
    rows_in,
    state_of,
    step_of,
    train,
)
from evidence import in_turn
from mindspore import Tensor, nn, ops
from training import inputs

from monitor.mindspore.tape import BY_OPERATIONS, COMPILED_VARIABLE


@pytest.fixture(autouse=True)
def _by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VARIABLE, BY_OPERATIONS)


class Twice(nn.Cell):
    """A cell that is called twice, with rows of a LayerNorm between."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Dense(4, 4), nn.LayerNorm((4,))

    def construct(self, x: Tensor) -> Tensor:
        return (self.norm(self.dense(ops.tanh(self.dense(x)))) ** 3).mean()


class Narrow(nn.Cell):
    """Computes in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 4).to_float(ms.float16), nn.Dense(4, 4).to_float(ms.float16)

    def construct(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x)) ** 3).mean().astype(ms.float32)


class Tuples(nn.Cell):
    """A cell with several arguments and results."""

    class Both(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Dense(4, 4)

        def construct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.dense(x) * y, self.dense(y)

    def __init__(self) -> None:
        super().__init__()
        self.both, self.end = Tuples.Both(), nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        a, b = self.both(x, ops.tanh(x))
        return self.end(a * b).square().mean()


@pytest.mark.parametrize(("make", "how"), in_turn([Deep, Twice, Narrow, Tuples], WHOLE))
def test_rows_are_those_of_the_operator_in_c_and_training_keeps_its_bits(
    how: str, make: Any, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits, rows = recorded(how, make, output)
    assert bits == plain(how, make)
    monkeypatch.setenv(COMPILED_VARIABLE, "1")
    _, expected = recorded(how, make, output)
    assert {kind for kind, *_ in expected} >= {"actv", "actv_grad", "grad_unreduced", "grad_reduced"}
    assert_same(rows, expected)


def of_step(rows: Rows, *steps: int) -> Rows:
    return {key: values for key, values in rows.items() if key[2] in steps}


@pytest.mark.parametrize("sink", [False, True], ids=["not sunk", "sunk"])
def test_model_train_has_the_rows_of_the_dynamic_graph(sink: bool, output: Output) -> None:
    _, expected = by_model("dynamic", output, sink=False)
    bits, rows = by_model("graph", output, sink=sink)
    assert bits == by_model("graph", output, sink=sink, monitored=False)[0]
    assert_same(rows, expected)


def test_steps_that_are_not_due_are_counted(output: Output) -> None:
    chosen = {"start_step": 1, "step_interval": 2, "intervals": {"mv_distribution": 2}}
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 5}, **chosen)
    _, rows = recorded("jit", Deep, output, loop={"steps": 5}, **chosen)
    assert_same(rows, expected)


@pytest.mark.parametrize(("training", "how"), [(False, "graph"), (True, "jit")])
def test_evaluations_change_no_row_of_training_however_many_they_are(
    how: str, training: bool, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = recorded(how, Deep, output)
    caplog.clear()
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with read_from(output) as rows, attached(output, net, optimizer, **RECORDED):
            step, evaluate = step_of(how, net, optimizer), net if how == "graph" else ms.jit(called(net))
            for number in range(STEPS):
                step(inputs(number))
                net.set_train(training)
                for _ in range(200):  # with the calls of their cells more than the tape holds
                    evaluate(inputs(number))
                net.set_train(True)
        assert state_of(net, optimizer) == plain(how, Deep)[STEPS:]
    assert_same(rows, expected)
    assert [said for said in warnings_in(caplog) if "more calls of cells" in said] == []


@pytest.mark.parametrize("part", ["forward and backward", "optimizer"])
def test_a_step_of_which_one_half_is_compiled_has_the_rows_of_the_dynamic_graph(part: str, output: Output) -> None:
    _, expected = recorded("dynamic", Deep, output)
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    gradients_of: Any = ms.value_and_grad(net, None, optimizer.parameters)

    def differentiate(x: Tensor) -> Any:
        return gradients_of(x)

    def apply(gradients: Any) -> Any:
        return optimizer(gradients)

    with read_from(output) as rows, attached(output, net, optimizer, **RECORDED):
        first, second = (differentiate, ms.jit(apply)) if part == "optimizer" else (ms.jit(differentiate), optimizer)
        for number in range(STEPS):
            second(first(inputs(number))[1])
    assert_same(rows, expected)


def test_micro_batches_and_steps_that_are_skipped_have_the_rows_of_the_operator_in_c(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[list[bytes], Rows]:
        with mode_of("graph"):
            net = with_fixed_weights(Deep())
            optimizer = adam(net.trainable_params())
            with read_from(output) as rows, attached(output, net, optimizer, grad_acc_steps=2, **RECORDED) as monitor:
                step = Skipping(net, optimizer)
                for number, apply in enumerate([0, 1, 0, 1, 0, 0, 0, 1]):
                    step(inputs(number), Tensor([apply], ms.int32))
                    monitor.batch_ended()
            return state_of(net, optimizer), rows

    bits, rows = run()
    monkeypatch.setenv(COMPILED_VARIABLE, "1")
    expected_bits, expected = run()
    assert bits == expected_bits
    assert_same(rows, expected)


def test_several_steps_in_one_call_have_no_rows_of_activations_and_one_warning_says_so(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with read_from(output) as rows, attached(output, net, optimizer, **RECORDED) as monitor:
            sinking, step = Sinking(net, optimizer), step_of("graph", net, optimizer)
            train(sinking, 2)
            assert monitor.step == 6
            train(step, 1)
    assert not {kind for kind, *_ in of_step(rows, *range(6))} & {"actv", "actv_grad", "grad_unreduced"}
    assert {kind for kind, *_ in of_step(rows, 6)} >= {"actv", "actv_grad", "grad_unreduced", "grad_reduced", "exp_avg"}
    assert sum("made 3 steps in one call" in said and "actv" in said for said in warnings_in(caplog)) == 1


@pytest.mark.parametrize("how", WHOLE)
def test_a_model_can_be_attached_again_after_its_code_was_compiled(how: str, output: Output) -> None:
    _, expected = recorded("dynamic", Deep, output, loop={"steps": 4})
    rows: Rows = {}
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        before = footprint(net, optimizer)
        step = step_of(how, net, optimizer)
        for number in range(4):
            if number == 1:  # not recorded
                step(inputs(number))
                continue
            with read_from(output) as found, attached(output, net, optimizer, start_iteration=number, **RECORDED):
                step(inputs(number))
            rows |= found
        assert footprint(net, optimizer) == before
    assert_same(
        {key: values for key, values in rows.items() if key[0] != "grad_reduced"},
        {key: values for key, values in expected.items() if key[2] != 1 and key[0] != "grad_reduced"},
    )


def test_other_statistics_after_the_code_was_compiled_have_no_rows_of_it(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        step = step_of("graph", net, optimizer)
        with attached(output, net, optimizer, **RECORDED):
            train(step, 1)
        with read_from(output) as rows, attached(output, net, optimizer, **{**RECORDED, "eps": 0.5}):
            train(step, 1)
    assert {kind for kind, *_ in rows} == {*OUTSIDE, "grad_reduced"}
    (said,) = [said for said in warnings_in(caplog) if "A training step is compiled" in said]
    assert "was compiled before the monitor was attached" in said


@pytest.mark.parametrize("op", ["kurtosis", "abs_p50"])
def test_statistics_that_the_operations_do_not_measure_are_refused_in_one_warning(
    op: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    bits, rows = recorded("graph", Deep, output, ops=["norm", op])
    assert bits == plain("graph", Deep)
    assert {kind for kind, *_ in rows} == {*OUTSIDE, "grad_reduced"}
    assert sum("compiled code measures no higher moments" in said for said in warnings_in(caplog)) == 1


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU())

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Around(nn.Cell):
    """The dynamic graph around a compiled cell."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.block, self.b = nn.Dense(4, 4), Block(), nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.block(self.a(x)))).sum()


def test_parts_of_the_dynamic_graph_keep_their_bits_and_one_warning_says_that_they_have_no_rows(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    bits, rows = recorded("dynamic", Around, output)
    assert bits == plain("dynamic", Around)
    activations = {name for kind, name, *_ in rows if kind == "actv"}
    assert {"a.output", "block.input", "block.output", "b.output"} <= activations
    assert not any(name.startswith("block.inner") for name in activations)
    (said,) = warnings_in(caplog)
    assert "parts of the dynamic graph that are compiled (@jit) have no rows" in said


class Looping(nn.Cell):
    """Calls one cell in a loop on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.end = nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x: Tensor) -> Tensor:
        i = Tensor(0)
        while i < 3:
            x = ops.tanh(self.dense(x))
            i = i + 1
        return (self.end(x) ** 3).mean()


def test_each_call_in_a_loop_has_its_row_and_gradients_in_parts_have_none(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bits, rows = recorded("jit", Looping, output)
    assert bits == plain("jit", Looping)
    (said,) = warnings_in(caplog)
    assert "several gradients of one parameter" in said
    monkeypatch.setenv(COMPILED_VARIABLE, "1")
    _, expected = recorded("jit", Looping, output)
    assert_same(rows, {key: values for key, values in expected.items() if key[0] != "grad_unreduced"})


class Given(nn.Cell):
    """Passes its argument on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.dense = nn.Identity(), nn.Dense(4, 1)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.depend(self.dense(y).sum(), self.seen(x))


EVERY = ["min", "max", "mean", "norm", "std", "zeros", "nans", "infs", "absmax", "rms"]
TENSORS = {
    "large": np.random.default_rng(0).normal(size=(64, 33)) * 1e37,
    "small": np.random.default_rng(1).normal(size=(7, 5)) * 1e-39,
    "far from zero": 1e6 + np.random.default_rng(2).normal(size=4097),
    "long": 100 + np.random.default_rng(3).normal(size=(300, 1000)),
    "not finite": np.array([np.nan, 1.0, np.inf, -np.inf, 0.0, -3.0, 1e-9, np.nan]),
    "nothing finite": np.array([np.nan, np.inf]),
    "zeros": np.zeros((3, 1)),
    "one": np.array([-2.5]),
}


def test_numbers_are_those_of_the_operator_in_c(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of numbers that float32 holds, but not their squares or their sum."""

    def run() -> Rows:
        with mode_of("graph"):
            net = with_fixed_weights(Given())
            optimizer = adam(net.trainable_params())
            chosen = {"xy_distribution": True, "param_distribution": True, "ops": EVERY, "ndigits": 9}
            with read_from(output) as rows, attached(output, net, optimizer, **chosen):
                step = Whole(net, optimizer)
                for x in TENSORS.values():
                    step(Tensor(x.astype(np.float32)), inputs(0))
        return {key: values for key, values in rows.items() if key[:2] == ("actv", "seen.output")}

    rows = run()
    monkeypatch.setenv(COMPILED_VARIABLE, "1")
    assert len(rows) == len(TENSORS)
    assert_same(rows, run(), 2e-6)


class Whole(nn.Cell):
    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x, y)
        self.optimizer(gradients)
        return loss


@pytest.mark.parametrize("dtype", [ms.float64, ms.int32])
def test_what_float32_does_not_hold_has_no_rows_and_one_warning_says_so(
    dtype: Any, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of("graph"):
        net = with_fixed_weights(Given())
        optimizer = adam(net.trainable_params())
        with read_from(output) as rows, attached(output, net, optimizer, **RECORDED):
            Whole(net, optimizer)(Tensor(np.arange(3), dtype), inputs(0))
    activations = {name for kind, name, *_ in rows if kind == "actv"}
    assert "dense.output" in activations
    assert not any(name.startswith("seen") for name in activations)
    assert sum("MindSpore's operations do not measure" in said for said in warnings_in(caplog)) == 1


def test_two_models_have_rows_of_their_own(output: Output) -> None:
    _, expected = recorded("graph", Deep, output)
    before = set(output.directories())
    with mode_of("graph"):
        nets = [with_fixed_weights(Deep()) for _ in range(2)]
        optimizers = [adam(net.trainable_params()) for net in nets]
        with ExitStack() as stack:
            for net, optimizer in zip(nets, optimizers, strict=True):
                stack.enter_context(attached(output, net, optimizer, **RECORDED))
            steps = [step_of("graph", *both) for both in zip(nets, optimizers, strict=True)]
            for number in range(STEPS):
                for step in steps:
                    step(inputs(number))
    for directory in set(output.directories()) - before:
        assert_same(rows_in(output, directory), expected)


def test_cells_that_targets_leave_out_have_no_rows(output: Output) -> None:
    chosen = {"targets": {"b": {"input": "tuple[1]:0", "output": "tensor", "output_grad": "tensor"}}}
    _, expected = recorded("dynamic", Deep, output, **chosen)
    bits, rows = recorded("graph", Deep, output, **chosen)
    assert bits == plain("graph", Deep)
    assert_same(rows, expected)


class Dividing(nn.Cell):
    """Divides by a given number between two cells."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(4, 8), nn.Dense(8, 4)

    def construct(self, x: Tensor, by: Tensor) -> Tensor:
        return x + self.down(ops.tanh(self.up(x)) / by)


class Nested(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Dividing(), Dividing(), nn.Dense(4, 2)

    def construct(self, x: Tensor, by: Tensor) -> Tensor:
        return (self.head(self.second(self.first(x, by), by * 0 + 1)) ** 2).mean()


def test_rows_come_in_the_order_of_execution(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of one step have this order, by which the first fault is found."""

    def events() -> list[str]:
        folder = output.base / "anomaly_detected" / "rank0"
        earlier = set(folder.glob("anomaly*.json"))
        with mode_of("graph"):
            net = with_fixed_weights(Nested())
            optimizer = adam(net.trainable_params())
            alert = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
            with attached(output, net, optimizer, xy_distribution=True, param_distribution=True, all_xy=True, alert=alert):
                Whole(net, optimizer)(inputs(0), Tensor(0.0, ms.float32))
        (path,) = set(folder.glob("anomaly*.json")) - earlier
        found = sorted(json.loads(path.read_text()).values(), key=lambda one: one["call_id"])
        return [one["tag_name"] for one in found if one["tag_name"].rpartition("/")[2] in ("actv", "actv_grad")]

    found = events()
    assert len(found) > 20
    monkeypatch.setenv(COMPILED_VARIABLE, "1")
    assert found == events()


def test_a_cell_has_rows_however_many_shapes_it_is_compiled_for(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    steps = 10  # a call has place for fewer tensors

    def given(number: int) -> Tensor:
        return Tensor(np.random.default_rng(number).normal(size=(number + 1, 4)).astype(np.float32))

    loop, chosen = {"steps": steps, "given": given}, {"targets": {"a": {}}}
    _, expected = recorded("dynamic", Deep, output, loop=loop, **chosen)
    _, rows = recorded("jit", Deep, output, loop=loop, **chosen)
    assert sum(kind == "actv_grad" for kind, *_ in expected) >= steps
    assert_same(rows, expected)
    assert [said for said in warnings_in(caplog) if "has room for" in said] == []
