"""What ``docs/mindspore.md`` says of compiled code: rows with other names or types, and calls that cannot have any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, attached, warnings_in, with_fixed_weights
from compiled_steps import OUTSIDE, RECORDED, WHOLE, Rows, adam, mode_of, plain, recorded, rows_in, step_of, train
from evidence import in_turn
from mindspore import Tensor, nn, ops
from training import inputs

from monitor.mindspore.tape import COMPILED_VARIABLE


class Attention(nn.Cell):
    def construct(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.softmax(q @ k.T) @ v


class AttendingToItself(nn.Cell):
    """Gives one tensor in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.attention, self.b = nn.Dense(4, 4), Attention(), nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        y = ops.tanh(self.a(x))
        return self.b(self.attention(y, y, y)).sum()


class Mixed(nn.Cell):
    """A cell computes in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 4).to_float(ms.float16), nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).astype(ms.float32)).sum()


class Two(nn.Cell):
    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.tanh(x), ops.exp(x)


class Leaving(nn.Cell):
    """Uses one of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.two, self.b = nn.Dense(4, 4), Two(), nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        y, _ = self.two(self.a(x))
        return self.b(y).sum()


def of_both(make: Callable[[], nn.Cell], how: str, output: Output) -> tuple[Rows, Rows]:
    """The rows of the dynamic graph and of compiled code, which computes as without a monitor."""
    _, dynamic = recorded("dynamic", make, output)
    bits, compiled = recorded(how, make, output)
    assert bits == plain(how, make)
    return dynamic, compiled


def names_in(rows: Rows) -> set[tuple[str, str]]:
    return {(kind, name) for kind, name, *_ in rows}


@pytest.mark.parametrize("how", WHOLE)
def test_a_tensor_in_several_places_has_a_gradient_for_each_and_not_one_total(how: str, output: Output) -> None:
    dynamic, compiled = of_both(AttendingToItself, how, output)
    assert names_in(dynamic) - names_in(compiled) == {("actv_grad", "attention.input_0+1+2")}
    assert names_in(compiled) - names_in(dynamic) == {("actv_grad", f"attention.input_{place}") for place in range(3)}
    parts = [compiled["actv_grad", f"attention.input_{place}", 0, 0]["mean"] for place in range(3)]
    assert np.isclose(sum(parts), dynamic["actv_grad", "attention.input_0+1+2", 0, 0]["mean"], 1e-5, 1e-7)


@pytest.mark.parametrize("how", WHOLE)
def test_inputs_are_read_after_they_were_cast(how: str, output: Output) -> None:
    of_input = [rows["actv", "a.input", 0, 0]["dtype"] for rows in of_both(Mixed, how, output)]
    assert of_input == ["mindspore.float32", "mindspore.float16"]


@pytest.mark.parametrize("how", WHOLE)
def test_an_output_that_nothing_uses_has_no_row(how: str, output: Output) -> None:
    dynamic, compiled = of_both(Leaving, how, output)
    assert names_in(dynamic) ^ names_in(compiled) == {("actv", "two.output_1")}


# --- Derivatives in forward mode.


class Normalized(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Dense(4, 4), nn.LayerNorm((4,)), nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x))).sum()


def derivative(net: nn.Cell) -> Any:
    return ms.jvp(net, inputs(0), ops.ones((3, 4)))[1].asnumpy()


@pytest.mark.parametrize("hooked", [False, True])
def test_forward_mode_works_beside_a_monitor_that_measures_nothing_in_compiled_code(
    hooked: bool, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMPILED_VARIABLE)
    net = with_fixed_weights(Normalized())
    optimizer = adam(net.trainable_params())
    expected = derivative(net)
    with attached(output, net, optimizer, **{**RECORDED, "wg_distribution": hooked}):
        assert derivative(net).tobytes() == expected.tobytes()
        train(step_of("dynamic", net, optimizer))
    assert {step for _, _, step, _ in rows_in(output, output.directory())} == {0, 1, 2}


@pytest.mark.parametrize(("of_a_copy", "how"), in_turn([False, True], WHOLE))
def test_forward_mode_ends_the_rows_of_compiled_code_unless_it_is_that_of_a_copy(
    how: str, of_a_copy: bool, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    with mode_of(how):
        net = with_fixed_weights(Normalized())
        other = copy.deepcopy(net)
        optimizer = adam(net.trainable_params())
        expected = derivative(with_fixed_weights(Normalized()))
        with attached(output, net, optimizer, **RECORDED):
            assert derivative(other if of_a_copy else net).tobytes() == expected.tobytes()
            train(step_of(how, net, optimizer))
    kinds = {kind for kind, *_ in rows_in(output, output.directory())}
    assert (kinds > set(OUTSIDE)) if of_a_copy else (kinds == set(OUTSIDE))
    assert len([one for one in warnings_in(caplog) if "cannot compile this model" in one]) == (not of_a_copy)
