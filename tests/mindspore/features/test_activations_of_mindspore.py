"""The health of activations is what float64 and a decomposition say, on the host, as on a device, and in cells that train."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, as_measured, attached, step_with, warnings_in, with_fixed_weights
from mindspore import Tensor, mint, nn, ops
from numpy_definitions import FLOATS, active_units, drawn, exact, health, number

from monitor.mindspore.features.activations import activation_of, active_share, last_active
from monitor.recording.features import reading
from monitor.stats.mindspore import tensors as ms_tensors

RIGHT = 1e-5


def columns(x: Tensor) -> dict[str, float]:
    found = activation_of(x)
    massive = {"massive": number(found.ratio), "massive_channel": number(found.channel)}
    assert number(found.channel_squared) == number(found.channel) ** 2
    return {
        **({} if number(found.ratio) == -math.inf else massive),
        **({} if number(found.rank) == -math.inf else {"effective_rank": number(found.rank)}),
        "residual_norm": number(found.norms) / found.tokens,
    }


def entries(x: Any) -> np.ndarray:
    return x.asnumpy() if isinstance(x, Tensor) else x


def planted(value: float) -> np.ndarray:
    x = drawn(20, 30)
    x[3, 4] = value
    return x


TENSORS = {
    "a batch of sequences": drawn(3, 17, 24),
    "more elements and tokens than are sampled": drawn(4, 60, 96),
    "one channel": drawn(50, 1),
    "one element": np.array([-3.0], np.float32),
    "large numbers": drawn(5, 8) * np.float32(1e30),
    "small numbers": drawn(5, 8) * np.float32(1e-30),
    "one massive activation": planted(-1e6),
    "after a ReLU": np.maximum(drawn(30, 40), 0),
    "sparse": np.maximum(drawn(30, 40) - 2, 0),
    "some tokens of zeros": drawn(30, 40) * (np.arange(30) % 3 > 0)[:, None].astype(np.float32),
    "zeros": np.zeros((4, 5), np.float32),
}


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_the_numbers_are_those_of_the_definition(x: np.ndarray) -> None:
    assert columns(Tensor(x)) == pytest.approx(health(x.astype(np.float64)), rel=RIGHT)
    assert np.array_equal(entries(activation_of(Tensor(x)).seen)[:-1] > 0, active_units(x))


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_precision_is_read_as_it_is(dtype: ms.Type) -> None:
    x = Tensor(drawn(4, 30, 16)).to(dtype)
    assert columns(x) == pytest.approx(health(exact(x)), rel=RIGHT)


@pytest.mark.usefixtures("where")
def test_a_transposed_tensor_is_read_in_the_order_of_its_dimensions() -> None:
    x = drawn(60, 4, 96)
    assert columns(mint.transpose(Tensor(x), 0, 1)) == pytest.approx(health(x.swapaxes(0, 1).astype(np.float64)), rel=RIGHT)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_never_hidden(wrong: float) -> None:
    found = activation_of(Tensor(planted(wrong)))
    assert all(math.isnan(number(one)) for one in (found.norms, found.ratio, found.rank))
    assert entries(found.seen)[-1] == 1


@pytest.mark.usefixtures("where")
def test_units_are_active_up_to_the_step_in_which_they_were_last_seen() -> None:
    last = None
    for step, seen in enumerate([[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]], start=1):
        last = last_active(last, operand(seen), step)
    assert [number(active_share(last, 3, step)) for step in (0, 1, 2)] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    spoiled = last_active(last, operand([1, 1, 1, 1]), 4)
    assert math.isnan(number(active_share(spoiled, 3, 3)))
    assert number(active_share(spoiled, 3, 4)) == 0.0


def operand(seen: list[int]) -> Any:
    return np.array(seen, np.float64) if ms_tensors.on_the_host() else Tensor(np.array(seen, np.float32))


class Block(nn.Cell):
    """Takes (batch, 4), as the inputs of the other tests are. Three quarters of its units are dead."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Dense(4, 16), nn.ReLU(), nn.Dense(16, 3)
        self.kept: list[np.ndarray] = []

    def construct(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        self.kept.append(exact(hidden))
        return ops.tanh(self.down(hidden)).sum()


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
def test_cells_that_train_have_rows_of_their_outputs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    output = as_measured(tmp_path, monkeypatch, there=there)
    net = with_fixed_weights(Block())
    bias = net.up.bias.asnumpy().copy()
    bias[:12] = -1e3
    net.up.bias.set_data(Tensor(bias))
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    targets = {"activation_hook": ["act"]}
    with attached(output, net, optimizer, recording_l2_features=True, l2_targets=targets, ndigits=17, dead_after_steps=2):
        for step in range(4):
            step_with(net, optimizer, step)
    found = output.rows("activation_hook")
    assert [(row.name, row.step, row.micro_step) for row in found] == [("act.activation", step, 0) for step in range(4)]
    for row, hidden in zip(found, net.kept, strict=True):
        expected = health(hidden)
        assert {name: row.values[name] for name in expected} == pytest.approx(expected, rel=RIGHT)
    active = [active_units(hidden) for hidden in net.kept]
    assert [row.values["dead_units"] for row in found[:2]] == [None, None]
    assert [row.values["dead_units"] for row in found[2:]] == pytest.approx(
        [1 - (active[step - 2] | active[step - 1]).mean() for step in (2, 3)]
    )
    assert found[3].values["dead_units"] >= 0.75


class Other(nn.Cell):
    """Returns no tensor of floating-point numbers with channels."""

    def construct(self, x: Tensor) -> Tensor:
        return x.sum()


def test_what_does_not_fit_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.SequentialCell(nn.Dense(4, 4), Other())
    net.set_train(True)
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, recording_l2_features=True, l2_targets={"activation_hook": ["1"]}):
        step_with(net, optimizer)
    assert output.rows("activation_hook") == []
    assert f"{reading.NO_OUTPUT}: '1'" in warnings_in(caplog)[-1]
