"""Entropy and greatest of attention weights are those of the definition, and no square of the sequence is ever in memory."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from definitions import attention_weights, entropy_and_greatest
from observing import drawn
from torch import Tensor

from monitor.pytorch.features import attention
from monitor.pytorch.features.attention import Scores, spread, summed

MEMORY = Path(__file__).parent / "scripts" / "attention_memory.py"


def means(scores: Scores, heads: int = 1, rows: int = 1) -> tuple[float, float]:
    found = summed(spread(scores, heads, rows))
    return found.entropy.item() / int(found.queries), found.greatest.item() / int(found.queries)


def scores_of(query: Tensor, key: Tensor, *, causal: bool = True, mask: Tensor | None = None) -> Scores:
    return Scores(query, key, causal, query.shape[3] ** -0.5, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("sample", [(1, 1), (0, 0), (3, 2)])
def test_a_causal_attention_is_spread_as_defined(
    dtype: torch.dtype, heads: int, key_heads: int, sample: tuple[int, int]
) -> None:
    query, key = 3 * drawn(3, heads, 33, 8, dtype=dtype), drawn(3, key_heads, 33, 8, dtype=dtype, seed=1)
    assert means(scores_of(query, key), *sample) == pytest.approx(
        entropy_and_greatest(attention_weights(query, key), *sample), rel=2e-6
    )


@pytest.mark.parametrize(("block", "keys"), [(1, 1), (64, 8), (100, 7), (1 << 18, 1024)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_size_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch, block: int, keys: int, *, causal: bool) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(attention, "KEYS", keys)
    query, key = 2 * drawn(2, 3, 29, 4), drawn(2, 3, 29, 4, seed=1)
    expected = entropy_and_greatest(attention_weights(query, key, causal=causal), 0, 0)
    assert means(scores_of(query, key, causal=causal), 0, 0) == pytest.approx(expected, rel=2e-6)


def test_queries_may_be_fewer_or_more_than_keys() -> None:
    for queries, keys in ((5, 9), (9, 5)):
        query, key = drawn(1, 2, queries, 4), drawn(1, 2, keys, 4, seed=1)
        for causal in (True, False):
            expected = entropy_and_greatest(attention_weights(query, key, causal=causal), 0, 0)
            assert means(scores_of(query, key, causal=causal), 0, 0) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (2, 1, 6, 6), (1, 1, 6, 6), (6, 6), (2, 1, 1, 6)])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_is_applied_as_it_is(shape: tuple[int, ...], *, boolean: bool) -> None:
    query, key = drawn(2, 3, 6, 4), drawn(2, 3, 6, 4, seed=1)
    mask = drawn(*shape, seed=2) > -0.5 if boolean else 2 * drawn(*shape, seed=2)
    if boolean:
        mask[..., 0] = True
    expected = entropy_and_greatest(attention_weights(query, key, causal=False, mask=mask), 0, 0)
    assert means(scores_of(query, key, causal=False, mask=mask), 0, 0) == pytest.approx(expected, rel=2e-6)


def test_a_query_that_sees_no_key_has_no_weights_and_is_left_out() -> None:
    query, key = drawn(1, 1, 4, 4), drawn(1, 1, 4, 4, seed=1)
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first sees none
    assert int(summed(spread(scores_of(query, key, causal=False, mask=mask))).queries) == 3
    weights = attention_weights(query, key, causal=False, mask=mask)[:, :, 1:]
    assert means(scores_of(query, key, causal=False, mask=mask)) == pytest.approx(entropy_and_greatest(weights), rel=2e-6)


def test_a_collapsed_attention_has_no_entropy_and_an_even_one_all_of_it() -> None:
    one_hot = 100 * torch.eye(8).view(1, 1, 8, 8)
    assert means(Scores(one_hot, one_hot, True, 1.0)) == pytest.approx((0.0, 1.0), abs=1e-12)
    even = torch.zeros(1, 1, 8, 8)
    logs, shares = [math.log(n) for n in range(1, 9)], [1 / n for n in range(1, 9)]
    assert means(Scores(even, even, True, 1.0)) == pytest.approx((sum(logs) / 8, sum(shares) / 8), rel=1e-7)


@pytest.mark.parametrize("size", [1e-20, 1e4, 1e15])
def test_scores_of_any_size_are_recorded(size: float) -> None:
    query, key = size * drawn(1, 1, 16, 4), drawn(1, 1, 16, 4, seed=1)
    expected = entropy_and_greatest(attention_weights(query, key))
    assert means(scores_of(query, key)) == pytest.approx(expected, rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_key", [True, False])
def test_what_is_not_finite_is_never_hidden(value: float, *, in_key: bool) -> None:
    query, key = drawn(1, 2, 8, 4), drawn(1, 2, 8, 4, seed=1)
    (key if in_key else query)[0, 0, 7, 2] = value
    assert all(math.isnan(one) for one in means(scores_of(query, key)))


def test_a_part_that_is_not_looked_at_tells_nothing() -> None:
    query, key = drawn(2, 2, 8, 4), drawn(2, 2, 8, 4, seed=1)
    expected = means(scores_of(query, key))
    query[0, 1], key[1] = math.nan, math.inf
    assert means(scores_of(query, key)) == expected


def test_a_batch_of_one_goes_with_every_other() -> None:
    query, key = drawn(1, 2, 8, 4), drawn(3, 2, 8, 4, seed=1)
    expected = entropy_and_greatest(attention_weights(query.expand(3, -1, -1, -1), key), 0, 0)
    assert means(scores_of(query, key), 0, 0) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("how", ["plain", "flex"])
def test_a_sequence_of_8192_adds_less_than_64_mb(how: str) -> None:
    """The weights of one head alone would be 256 MB."""
    told = subprocess.run([sys.executable, str(MEMORY), how], capture_output=True, text=True, check=True)
    assert 0 < float(told.stdout) < 64
