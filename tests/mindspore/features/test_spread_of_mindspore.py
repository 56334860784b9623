"""Entropy and greatest of attention weights are those of the definition, on the host and as a device computes them."""

from __future__ import annotations

import math
import tracemalloc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from numpy_definitions import (
    FLOATS,
    attention_scores,
    attention_weights,
    drawn,
    entropies,
    entropy_and_greatest,
    exact,
    number,
    softmax,
)

from monitor.mindspore.features import attention
from monitor.mindspore.features.attention import Scores, heads_of, spread, summed
from monitor.stats.mindspore import tensors as mindspore_arithmetic

pytestmark = pytest.mark.usefixtures("where")

ROUNDING = 5e-6
"""Scores are formed in float32, of numbers up to some dozens: their exponentials have 2e-6, and sums of few queries no less."""


def of(x: np.ndarray, dtype: ms.Type = ms.float32) -> Tensor:
    return Tensor(x).to(dtype)


def scores_of(query: Tensor, key: Tensor) -> Scores:
    return Scores(query, key, query.shape[3] ** -0.5)


def means(scores: Scores, heads: int = 1, rows: int = 1) -> tuple[float, float]:
    found = summed(spread(scores, heads, rows))
    return number(found.entropy) / found.queries, number(found.greatest) / found.queries


def expected(query: Tensor, key: Tensor, heads: int = 1, rows: int = 1) -> object:
    definition = entropy_and_greatest(attention_weights(exact(query), exact(key)), heads, rows)
    return pytest.approx(definition, rel=ROUNDING, abs=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2)])
def test_it_is_that_of_the_definition(dtype: ms.Type, heads: int, key_heads: int) -> None:
    query, key = of(3 * drawn(2, heads, 17, 8), dtype), of(drawn(2, key_heads, 17, 8, seed=1), dtype)
    for sample in ((1, 1), (0, 0), (3, 2)):
        assert expected(query, key, *sample) == means(scores_of(query, key), *sample)


@pytest.mark.parametrize(("block", "keys"), [(1, 1), (64, 8), (100, 7)])
def test_the_size_of_blocks_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch, block: int, keys: int) -> None:
    arithmetic = mindspore_arithmetic.HOST if where == "host" else mindspore_arithmetic.DEVICE
    monkeypatch.setattr(arithmetic, "block", block)
    monkeypatch.setattr(attention, "KEYS", keys)
    query, key = of(2 * drawn(1, 2, 13, 4)), of(drawn(1, 1, 13, 4, seed=1))
    assert expected(query, key, 0, 0) == means(scores_of(query, key), 0, 0)


@pytest.mark.parametrize("places", [(1, 2, 0, 3), (0, 2, 1, 3), (3, 1, 0, 2)])
def test_the_order_of_dimensions_is_that_of_places(places: tuple[int, ...]) -> None:
    query, key = drawn(3, 4, 9, 8), drawn(3, 2, 9, 8, seed=1)
    back = np.argsort(places)
    laid_out = Scores(of(query.transpose(back).copy()), of(key.transpose(back).copy()), 8**-0.5, places)
    assert expected(of(query), of(key), 0, 0) == means(laid_out, 0, 0)


def test_a_single_query_sees_itself_alone() -> None:
    assert summed(spread(scores_of(of(drawn(1, 1, 1, 4)), of(drawn(1, 1, 1, 4))))).queries == 1
    assert means(scores_of(of(drawn(1, 1, 1, 4)), of(drawn(1, 1, 1, 4)))) == (0.0, 1.0)


def test_a_collapsed_attention_has_no_entropy_and_an_even_one_all_of_it() -> None:
    one_hot = of(100 * np.eye(8, dtype=np.float32).reshape(1, 1, 8, 8))
    assert means(Scores(one_hot, one_hot, 1.0)) == pytest.approx((0.0, 1.0), abs=1e-12)
    even = of(np.zeros((1, 1, 8, 8), np.float32))
    logs, shares = [math.log(n) for n in range(1, 9)], [1 / n for n in range(1, 9)]
    assert means(Scores(even, even, 1.0)) == pytest.approx((sum(logs) / 8, sum(shares) / 8), rel=1e-6)


@pytest.mark.parametrize("size", [1e-20, 1e4, 1e15])
def test_scores_of_any_size_are_recorded(size: float) -> None:
    query, key = of(np.float32(size) * drawn(1, 1, 16, 4)), of(drawn(1, 1, 16, 4, seed=1))
    assert expected(query, key) == means(scores_of(query, key))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_key", [True, False])
def test_what_is_not_finite_is_never_hidden(value: float, *, in_key: bool) -> None:
    query, key = drawn(1, 2, 8, 4), drawn(1, 2, 8, 4, seed=1)
    (key if in_key else query)[0, 0, 7, 2] = value
    assert all(math.isnan(one) for one in means(scores_of(of(query), of(key))))


def test_a_part_that_is_not_looked_at_tells_nothing() -> None:
    query, key = drawn(2, 2, 8, 4), drawn(2, 2, 8, 4, seed=1)
    before = means(scores_of(of(query), of(key)))
    query[0, 1], key[1] = math.nan, math.inf
    assert before == means(scores_of(of(query), of(key)))


def test_a_batch_of_one_goes_with_every_other() -> None:
    query, key = drawn(1, 2, 8, 4), drawn(3, 2, 8, 4, seed=1)
    assert expected(of(query.repeat(3, axis=0)), of(key), 0, 0) == means(scores_of(of(query), of(key)), 0, 0)


@pytest.mark.parametrize(("block", "keys"), [(1 << 16, 1024), (64, 8), (5, 3)])
@pytest.mark.parametrize("sinks", [1, 4, 12])
def test_each_head_has_the_numbers_of_its_definition(
    where: str, monkeypatch: pytest.MonkeyPatch, block: int, keys: int, sinks: int
) -> None:
    monkeypatch.setattr(mindspore_arithmetic.HOST if where == "host" else mindspore_arithmetic.DEVICE, "block", block)
    monkeypatch.setattr(attention, "KEYS", keys)
    query, key = of(4 * drawn(2, 4, 13, 8)), of(drawn(2, 2, 13, 8, seed=1))
    scores = attention_scores(exact(query), exact(key))
    bound = float(np.median(scores.max((0, 2, 3))))
    found = spread(scores_of(query, key), 0, 0, sinks, bound)
    for one, heads in [(summed(found), slice(None)), *((one, slice(i, i + 1)) for i, one in enumerate(heads_of(found)))]:
        part = scores[:, heads]
        weights, greatest = softmax(part), part.max((0, 2, 3))
        assert number(one.logit) == pytest.approx(greatest.max(), rel=ROUNDING)
        assert (number(one.above), one.heads) == ((greatest > bound).sum(), part.shape[1])
        assert number(one.entropy) / one.queries == pytest.approx(entropies(weights).mean(), rel=1e-5)
        share = weights[:, :, sinks:, :sinks].sum(-1)  # earlier queries see no other key
        assert number(one.sink) / one.sink_queries == pytest.approx(share.mean(), rel=1e-5)


def test_a_head_that_is_not_finite_spoils_no_other() -> None:
    query, key = drawn(1, 3, 8, 4), of(drawn(1, 3, 8, 4, seed=1))
    query[0, 1, 7, 2] = math.nan
    found = spread(scores_of(of(query), key), 0)
    spoilt = [[math.isnan(number(getattr(one, name))) for name in ("logit", "entropy", "sink")] for one in heads_of(found)]
    assert spoilt == [[False] * 3, [True] * 3, [False] * 3]
    assert math.isnan(number(summed(found).logit))


@pytest.mark.parametrize("where", ["host"], indirect=True)
def test_no_square_of_the_sequence_is_ever_in_memory() -> None:
    """What MindSpore allocates on a device no one tells."""
    query, key = of(drawn(1, 1, 4096, 16)), of(drawn(1, 1, 4096, 16, seed=1))
    tracemalloc.start()
    try:
        spread(scores_of(query, key))
        assert tracemalloc.get_traced_memory()[1] < 4e6  # the weights would be 67 MB
    finally:
        tracemalloc.stop()
