"""The entropy of a router is that of its definition, on the host and as a device computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from numpy_definitions import FLOATS, drawn, entropy_per_token, exact, number, softmax

from monitor.mindspore.features.choices import choices_of, confirmed
from monitor.mindspore.features.matrices import (
    dtype_of_routing,
    entropy_from,
    entropy_of,
    logit_sums_from,
    logit_sums_of,
    logits_from,
)
from monitor.recording.features.reading import ANOTHER_CHOICE, NO_CHOICE, NotARouterError, RouterCall
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


@pytest.mark.parametrize(
    ("logits", "squares"), [([1.0, math.inf], math.inf), ([-math.inf] * 2, math.inf), ([0.0, math.nan], math.nan)]
)
def test_the_z_loss_of_infinite_logits_is_infinite(logits: list[float], squares: float) -> None:
    found = logit_sums_of(Tensor(np.array([[0.5, 0.25], logits], np.float32)))
    assert number(found.squares) == pytest.approx(squares, nan_ok=True)


def test_no_tokens_have_neither_entropy_nor_a_greatest_logit() -> None:
    none = Tensor(np.zeros((0, 4), np.float32))
    assert [number(one) for one in entropy_of(none)] == [0, 0.0]
    assert [number(one) for one in logit_sums_of(none)] == [0, 0.0, -math.inf]


def test_a_router_computes_in_what_it_says_or_in_what_it_is_given() -> None:
    cell, tokens, weight = nn.Dense(4, 3), Tensor(drawn(2, 4)).to(ms.bfloat16), Tensor(drawn(3, 4))
    assert dtype_of_routing(cell, tokens, weight) == ms.float32
    assert dtype_of_routing(cell, tokens, weight.to(ms.bfloat16)) == ms.bfloat16
    cell.to_float(ms.float16)
    assert dtype_of_routing(cell, tokens, weight) == ms.float16
    cell.config = SimpleNamespace(moe_router_dtype="fp64")
    assert dtype_of_routing(cell, tokens, weight) == ms.float64


TOKENS, WEIGHT = drawn(20, 16), drawn(4, 16, seed=1)


def sparse(logits: np.ndarray) -> np.ndarray:
    """The scaled weights of the two chosen experts, and zeros."""
    return np.where(logits >= np.sort(logits)[:, -2:-1], 2.5 * softmax(logits), 0.0)


@pytest.mark.parametrize("block", [8, 1 << 18])
@pytest.mark.parametrize(
    ("result", "known"),
    [
        (lambda x: x, True),
        (softmax, True),
        (lambda x: 1 / (1 + np.exp(-x)), True),
        (sparse, True),
        (lambda x: np.tanh(x / 3) * 3, False),
        (lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True) / 0.1, False),
        (lambda x: softmax(x / 2), False),
        (lambda x: x + 0.1 * np.linspace(-1, 1, 4), False),
    ],
    ids=["logits", "softmax", "sigmoid", "sparse", "softcap", "cosine", "temperature", "noise"],
)
def test_computed_logits_count_unless_the_router_returns_others(
    where: str, monkeypatch: pytest.MonkeyPatch, result: Callable[[np.ndarray], np.ndarray], known: bool, block: int
) -> None:
    arithmetic = mindspore_arithmetic.HOST if where == "host" else mindspore_arithmetic.DEVICE
    monkeypatch.setattr(arithmetic, "block", block)
    given = Tensor(TOKENS), Tensor(WEIGHT), None, ms.float32
    logits = (TOKENS @ WEIGHT.T).astype(np.float64)
    returned = Tensor(result(logits).astype(np.float32)), Tensor(np.argsort(-logits)[:, :2].astype(np.int32))
    for form in (entropy_from, logit_sums_from):
        sums = form(*given)
        found = confirmed(sums, logits_from(*given), returned, False)
        assert found is not None
        assert [number(one) for one in found] == ([number(one) for one in sums] if known else [0, *neutral(sums)])


def neutral(sums: tuple[object, ...]) -> list[float]:
    return [0.0] if len(sums) == 2 else [0.0, -math.inf]


def test_a_result_that_shows_no_logits_confirms_none_and_denies_none() -> None:
    given = Tensor(TOKENS), Tensor(WEIGHT), None, ms.float32
    sums, logits = entropy_from(*given), logits_from(*given)
    weights = Tensor(drawn(20, 2)), Tensor(np.zeros((20, 2), np.int32))
    assert confirmed(sums, logits, weights, False) is sums
    assert confirmed(sums, logits, weights, True) is None


def test_a_loss_that_a_router_returns_too_confirms_nothing_and_denies_nothing() -> None:
    given = Tensor(TOKENS), Tensor(WEIGHT), None, ms.float32
    sums, logits, loss = logit_sums_from(*given), logits_from(*given), Tensor(np.float32(0.5))
    found = confirmed(sums, logits, (Tensor((TOKENS @ WEIGHT.T).astype(np.float32)), loss), True)
    assert found is not None
    assert [number(one) for one in found] == [number(one) for one in sums]
    assert confirmed(sums, logits, loss, False) is sums
    assert confirmed(sums, logits, (loss,), True) is None


def test_logits_that_are_not_finite_stay_in_the_row() -> None:
    given = Tensor(np.where(TOKENS > 2, np.nan, TOKENS)), Tensor(WEIGHT), None, ms.float32
    found = confirmed(entropy_from(*given), logits_from(*given), Tensor(drawn(20, 4)), False)
    assert found is not None
    assert (number(found.tokens), math.isnan(number(found.entropy))) == (20, True)


def test_of_equal_logits_those_count_that_topk_chooses() -> None:
    cell = nn.Dense(16, 64, has_bias=False)
    cell.top_k = 3
    chosen = ms.ops.topk(Tensor(np.zeros((5, 64), np.float32)), 3)[1].asnumpy()
    for dtype in FLOATS:
        found = choices_of(cell, Tensor(np.zeros((5, 64), np.float32)).to(dtype), RouterCall())
        assert found.counts.asnumpy().tolist() == np.bincount(chosen.ravel(), minlength=64).tolist()


def test_the_greatest_logits_of_a_linear_router_are_its_choice() -> None:
    cell, logits = nn.Dense(16, 4, has_bias=False), drawn(20, 4)
    with pytest.raises(NotARouterError, match=NO_CHOICE):
        choices_of(cell, Tensor(logits), RouterCall())
    cell.top_k = 2
    other = nn.SequentialCell(cell)  # not linear, so its logits are its choice only if the program says so
    other.top_k = 2
    with pytest.raises(NotARouterError, match=ANOTHER_CHOICE):
        choices_of(other, Tensor(logits), RouterCall())
    expected = np.bincount(np.argsort(-logits)[:, :2].ravel(), minlength=4).tolist()
    for found in (
        choices_of(cell, Tensor(logits), RouterCall()),
        choices_of(other, Tensor(logits), RouterCall(picks_greatest=True)),
    ):
        assert found.counts.asnumpy().tolist() == expected
    cell.expert_bias = Tensor(np.zeros(4, np.float32))
    with pytest.raises(NotARouterError, match=ANOTHER_CHOICE):
        choices_of(cell, Tensor(logits), RouterCall())
