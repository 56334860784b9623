"""How the weights of an attention are spread, without ever holding them all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from mindspore import Tensor

from monitor.recording.features.reading import Spread
from monitor.stats.mindspore.arithmetic import Arithmetic, Array, computing

KEYS: Final = 1024
"""Most keys of a block."""

OUT_OF_SIGHT: Final = -1e4
"""A score so far below the greatest has the weight 0, in float64 too; unlike -Inf it can be multiplied by 0."""

AS_COMPUTED: Final = (0, 1, 2, 3)


class Scores(NamedTuple):
    """What the weights of an attention are made of: softmax(query @ key^T * scale), where query i sees the keys up to i.

    Attributes:
        query: Shape ``(batch, heads, sequence, size)``, in that order if ``places`` does not say another.
        key: The same of the key heads: head i has key head ``i // (heads // key heads)``.
        places: The dimensions in which batch, heads, sequence and size stand. They stay there until somebody reads: a view
            made of a tensor of the user's is an operation that training would see.
    """

    query: Tensor
    key: Tensor
    scale: float
    places: tuple[int, ...] = AS_COMPUTED


def spread(scores: Scores, heads: int = 1, rows: int = 1) -> Spread:
    """Entropy and greatest of the attention weights of a sample of heads and rows of the batch; 0 for all.

    The softmax is formed block by block, as online softmax does it, in float32 at least, and summed in float64 on the host:
    what is in memory does not grow with the square of the sequence. NaN or Inf in a query or key of the sample makes both
    sums NaN.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    with computing() as on:
        sample = _sampled(on, scores, heads, rows)
        total = _Sums(0.0, 0.0)
        for part in _parts(on, sample):
            for first in range(0, part.query.shape[2], part.queries_at_once):
                total = _with_queries(on, part, first, total)
        queries = max(sample.query.shape[0], sample.key.shape[0]) * math.prod(sample.query.shape[1:3])
        return Spread(queries, on.number(total.entropy), on.number(total.greatest))


class _Sample(NamedTuple):
    """Shapes (rows, heads, sequence, size), of which ``key`` has one head for ``of_each`` of the query's.

    A batch of one goes with all rows of the other.
    """

    query: Array
    key: Array
    scale: float
    of_each: int


class _Part(NamedTuple):
    """Some heads of one row of the batch: ``query`` of shape (1, heads, sequence, size), and which head of ``key`` each has."""

    query: Array
    key: Array
    key_heads: list[int]
    scale: float
    queries_at_once: int


class _Sums(NamedTuple):
    entropy: Array
    greatest: Array


class _Running(NamedTuple):
    """Of some queries, over the keys so far: the greatest score, Σ e^(score - greatest), and the same sum of it times the
    difference in the exponent. Shape (1, heads, queries, 1).
    """

    greatest: Array
    total: Array
    weighted: Array


def _sampled(on: Arithmetic, scores: Scores, heads: int, rows: int) -> _Sample:
    query, key = (on.permute(on.of(one), scores.places) for one in (scores.query, scores.key))
    batch, of_each = max(query.shape[0], key.shape[0]), max(1, query.shape[1] // key.shape[1])
    heads, rows = min(heads or query.shape[1], query.shape[1]), min(rows or batch, batch)
    query, key = (on.part(one, 0, 0, min(rows, one.shape[0])) for one in (query, key))
    return _Sample(on.part(query, 1, 0, heads), key, scores.scale, of_each)


def _parts(on: Arithmetic, sample: _Sample) -> Iterator[_Part]:
    """As many heads at a time as make a block, of one row of the batch after the other."""
    heads, queries = sample.query.shape[1:3]
    width = min(sample.key.shape[2], KEYS)
    at_once = max(1, min(queries, on.block // width))
    heads_at_once = max(1, on.block // (width * at_once))
    for row in range(max(sample.query.shape[0], sample.key.shape[0])):
        query, key = (on.part(one, 0, min(row, one.shape[0] - 1), 1) for one in (sample.query, sample.key))
        for first in range(0, heads, heads_at_once):
            some = on.part(query, 1, first, min(heads_at_once, heads - first))
            key_heads = [head // sample.of_each for head in range(first, first + some.shape[1])]
            yield _Part(some, key, key_heads, sample.scale, at_once)


def _with_queries(on: Arithmetic, part: _Part, first: int, so_far: _Sums) -> _Sums:
    """With those from ``first`` on, as many as make a block."""
    length = min(part.queries_at_once, part.query.shape[2] - first)
    query = on.floats(on.part(part.query, 2, first, length)) * part.scale
    unusable = on.sum(query * 0.0)  # 0, or NaN
    running = None
    for begin in range(0, first + length, KEYS):
        keys = on.part(part.key, 2, begin, min(KEYS, first + length - begin))
        key = on.floats(on.take(keys, 1, part.key_heads))
        scores = _causal(on, on.matmul(query, on.swapped(key)), first, begin)
        running = _with_scores(on, scores, running)
        unusable = unusable + on.sum(key * 0.0)
    assert running is not None
    entropy = on.log(running.total) - running.weighted / running.total
    return _Sums(so_far.entropy + on.sum(entropy) + unusable, so_far.greatest + on.sum(1.0 / running.total) + unusable)


def _with_scores(on: Arithmetic, scores: Array, so_far: _Running | None) -> _Running:
    """With scores of shape (1, heads, queries, keys)."""
    greatest = on.amax(scores, -1)
    if so_far is not None:
        greatest = on.maximum(so_far.greatest, greatest)
    below = on.at_least(scores - greatest, OUT_OF_SIGHT)
    weights = on.exp(below)
    total, weighted = (on.wide(on.sum(one, -1)) for one in (weights, below * weights))
    if so_far is None:
        return _Running(greatest, total, weighted)
    down = on.at_least(on.wide(so_far.greatest - greatest), OUT_OF_SIGHT)
    kept = on.exp(down)
    return _Running(greatest, kept * so_far.total + total, kept * (so_far.weighted + so_far.total * down) + weighted)


def _causal(on: Arithmetic, scores: Array, query: int, key: int) -> Array:
    """The scores from this query and this key on, with -Inf where a key comes after its query."""
    queries, keys = scores.shape[-2:]
    if key + keys - 1 <= query:
        return scores
    places, rows = (on.constant(np.arange(*span)) for span in ((key, key + keys), (query, query + queries)))
    return on.where(places > on.column(rows), -math.inf, scores)
