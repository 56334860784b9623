"""The entropy of a router is that of its definition, on the host and as a device computes it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from numpy_definitions import FLOATS, drawn, entropy_per_token, exact, number

from monitor.mindspore.features import dtype_of_routing, entropy_from, entropy_of
from monitor.stats.mindspore import tensors as mindspore_arithmetic

pytestmark = pytest.mark.usefixtures("where")


@pytest.mark.parametrize("block", [1, 40, 1 << 18])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_entropy_is_that_of_the_softmax_over_experts(
    where: str, monkeypatch: pytest.MonkeyPatch, block: int, dtype: ms.Type
) -> None:
    arithmetic = mindspore_arithmetic.HOST if where == "host" else mindspore_arithmetic.DEVICE
    monkeypatch.setattr(arithmetic, "block", block)
    logits = Tensor(3 * drawn(4, 5, 8)).to(dtype)
    found = entropy_of(logits)
    assert found.tokens == 20
    assert number(found.entropy) / 20 == pytest.approx(entropy_per_token(exact(logits)), rel=2e-6)


def test_logits_follow_from_input_and_weight() -> None:
    tokens, weight, bias = drawn(3, 7, 16), drawn(6, 16, seed=1), drawn(6, seed=2)
    found = entropy_from(Tensor(tokens), Tensor(weight), Tensor(bias), ms.float32)
    assert found.tokens == 21
    expected = entropy_per_token(tokens.astype(np.float64) @ weight.T.astype(np.float64) + bias)
    assert number(found.entropy) / 21 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("dtype", "digit"), [(ms.float16, 2.0**-10), (ms.bfloat16, 2.0**-7)], ids=str)
def test_logits_are_as_coarse_as_the_router_makes_them(dtype: ms.Type, digit: float) -> None:
    """Of a token of one number and a weight of one: their product, rounded, is the difference of the two logits."""
    for factor in (1.0 + digit, 1.0 + 0.4 * digit, 1.0 + 0.6 * digit, -3.0 - 0.9 * digit):
        product = exact(Tensor(np.float32(exact(Tensor(np.float32(factor)).to(dtype)))).to(dtype))
        found = entropy_from(Tensor([[factor]], ms.float32), Tensor([[1.0], [0.0]], ms.float32), None, dtype)
        expected = entropy_per_token(np.array([[float(product), 0.0]]))
        # What is not rounded differs by 1e-4 at least.
        assert number(found.entropy) == pytest.approx(expected, rel=3e-6)


def test_an_even_router_has_all_the_entropy_and_a_sure_one_none() -> None:
    assert number(entropy_of(Tensor(np.zeros((3, 8), np.float32))).entropy) / 3 == pytest.approx(math.log(8))
    assert number(entropy_of(Tensor(1e4 * np.eye(8, dtype=np.float32))).entropy) == 0.0


def test_an_expert_that_a_token_cannot_go_to_adds_nothing() -> None:
    assert number(entropy_of(Tensor([[0.0, 0.0, -math.inf]])).entropy) == pytest.approx(math.log(2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_not_hidden(value: float) -> None:
    assert math.isnan(number(entropy_of(Tensor([[0.0, value, 1.0], [0.0, 0.0, 0.0]])).entropy))


def test_no_tokens_have_no_entropy() -> None:
    found = entropy_of(Tensor(np.zeros((0, 4), np.float32)))
    assert (found.tokens, number(found.entropy)) == (0, 0.0)


def test_a_router_computes_in_what_it_says_or_in_what_it_is_given() -> None:
    cell, tokens, weight = nn.Dense(4, 3), Tensor(drawn(2, 4)).to(ms.bfloat16), Tensor(drawn(3, 4))
    assert dtype_of_routing(cell, tokens, weight) == ms.float32
    assert dtype_of_routing(cell, tokens, weight.to(ms.bfloat16)) == ms.bfloat16
    cell.to_float(ms.float16)
    assert dtype_of_routing(cell, tokens, weight) == ms.float16
    cell.config = SimpleNamespace(moe_router_dtype="fp64")
    assert dtype_of_routing(cell, tokens, weight) == ms.float64
