"""Attention weights in MindSpore, computed block by block: their entropy, their greatest, and the weight on sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from mindspore import Tensor

from monitor.recording.features import reading
from monitor.stats.mindspore.tensors import Arithmetic, Array, computing

KEYS: Final = 1024
"""Keys of a block, at most."""

OUT_OF_SIGHT: Final = -1e4
"""A score this far below the greatest has weight 0, in float64 too. Unlike -Inf it can be multiplied by 0."""

AS_COMPUTED: Final = (0, 1, 2, 3)


class Scores(NamedTuple):
    """The factors of an attention's weights: softmax(query @ key^T * scale), where query i sees the keys up to i.

    Attributes:
        query: Shape ``(batch, heads, sequence, size)``, unless ``places`` says another order.
        key: The same for the key heads: head i has key head ``i // (heads // key heads)``.
        places: The dimensions of batch, heads, sequence and size. Tensors are permuted only when they are read: a view of the
            user's tensor is an operation that training would see.
    """

    query: Tensor
    key: Tensor
    scale: float
    places: tuple[int, ...] = AS_COMPUTED

    @property
    def measured(self) -> Tensor:
        return self.query


def spread(scores: Scores, heads: int = 1, rows: int = 1, sinks: int = 1, bound: float = math.inf) -> reading.Spread:
    """Sums over the queries of each head, for a sample of heads and rows of the batch; 0 for all.

    The softmax is computed block by block, as online softmax does it, in float32 at least. It is summed in float64 on the host.
    So memory does not grow with the square of the sequence. NaN or Inf in a query or key of a head makes its sums NaN.

    Args:
        sinks: The number of first keys that are attention sinks.
        bound: The greatest score beyond which a head counts as above it.

    Returns:
        Lists with a number for each head.

    Raises:
        EarlierFailure: An earlier operation of training has failed.
    """
    with computing() as on:
        sample = _sampled(on, scores, heads, rows)
        batch, length = max(sample.query.shape[0], sample.key.shape[0]), sample.query.shape[2]
        counts = batch * length, batch * max(0, length - sinks)
        found: list[reading.Spread] = []
        for first in range(0, sample.query.shape[1], _heads_at_once(on, sample)):
            found += _by_head(on, _of_heads(on, sample, first, sinks), counts, bound)
        return reading.Spread(*map(list, zip(*found, strict=True)))


def summed(found: reading.Spread, heads: int = 0) -> reading.Spread:
    """The sums of the first heads; 0 for all heads."""
    with computing() as on:
        first = reading.Spread(*(one[: heads or None] for one in found))
        logits = on.stack(first.logit)
        logit = on.amax(logits) + on.sum(logits * 0.0)  # NaN if one is not finite
        of_queries = {name: sum(getattr(first, name)) for name in ("queries", "sink_queries", "heads")}
        sums = {name: on.number(on.sum(on.stack(getattr(first, name)))) for name in ("entropy", "greatest", "sink", "above")}
        return reading.Spread(logit=on.number(logit), **of_queries, **sums)


def heads_of(found: reading.Spread) -> list[reading.Spread]:
    """The sums of each head."""
    return [reading.Spread(*one) for one in zip(*found, strict=True)]


class _Sample(NamedTuple):
    """Shapes (rows, heads, sequence, size). ``key`` has one head for every ``of_each`` heads of the query.

    If one side has a batch of one, it is used with all rows of the other.
    """

    query: Array
    key: Array
    scale: float
    of_each: int


class _Part(NamedTuple):
    """Some heads of one row of the batch: ``query`` of shape (1, heads, sequence, size), and the ``key`` head of each."""

    query: Array
    key: Array
    key_heads: list[int]
    scale: float
    queries_at_once: int


class _Sums(NamedTuple):
    """Sums over queries, and the greatest score, shape (1, heads, 1, 1)."""

    entropy: Array
    greatest: Array
    sink: Array
    logit: Array


class _Running(NamedTuple):
    """Running sums over the keys so far, for some queries, shape (1, heads, queries, 1): the greatest score, Σ e^(score -
    greatest), that sum weighted by (score - greatest), and the part of it that belongs to sinks.
    """

    greatest: Array
    total: Array
    weighted: Array
    sink: Array


def _sampled(on: Arithmetic, scores: Scores, heads: int, rows: int) -> _Sample:
    query, key = (on.permute(on.of(one), scores.places) for one in (scores.query, scores.key))
    batch, of_each = max(query.shape[0], key.shape[0]), max(1, query.shape[1] // key.shape[1])
    heads, rows = min(heads or query.shape[1], query.shape[1]), min(rows or batch, batch)
    query, key = (on.part(one, 0, 0, min(rows, one.shape[0])) for one in (query, key))
    return _Sample(on.part(query, 1, 0, heads), key, scores.scale, of_each)


def _queries_at_once(on: Arithmetic, sample: _Sample) -> int:
    queries, keys = int(sample.query.shape[2]), int(sample.key.shape[2])
    return max(1, min(queries, on.block // min(keys, KEYS)))


def _heads_at_once(on: Arithmetic, sample: _Sample) -> int:
    keys = min(int(sample.key.shape[2]), KEYS)
    return max(1, on.block // (keys * _queries_at_once(on, sample)))


def _of_heads(on: Arithmetic, sample: _Sample, first: int, sinks: int) -> _Sums:
    """The sums of as many heads as fit into a block, one row of the batch after the other."""
    total: _Sums | None = None
    heads = min(_heads_at_once(on, sample), sample.query.shape[1] - first)
    for row in range(max(sample.query.shape[0], sample.key.shape[0])):
        query, key = (on.part(one, 0, min(row, one.shape[0] - 1), 1) for one in (sample.query, sample.key))
        key_heads = [head // sample.of_each for head in range(first, first + heads)]
        part = _Part(on.part(query, 1, first, heads), key, key_heads, sample.scale, _queries_at_once(on, sample))
        for begin in range(0, sample.query.shape[2], part.queries_at_once):
            found = _of_queries(on, part, begin, sinks)
            total = found if total is None else _added(on, total, found)
    assert total is not None
    return total


def _added(on: Arithmetic, a: _Sums, b: _Sums) -> _Sums:
    return _Sums(a.entropy + b.entropy, a.greatest + b.greatest, a.sink + b.sink, on.maximum(a.logit, b.logit))


def _by_head(on: Arithmetic, sums: _Sums, counts: tuple[int, int], bound: float) -> Iterator[reading.Spread]:
    """Split sums.

    Args:
        counts: The queries of a head, and those that see a key besides the sinks.
    """
    for head in range(sums.logit.shape[1]):
        entropy, greatest, sink, logit = (on.sum(on.part(one, 1, head, 1)) for one in sums)
        logit = on.floats(logit) + entropy * 0.0  # NaN if an input is not finite
        above = on.where(logit > bound, 1.0, 0.0)
        entropy, greatest, logit, sink, above = map(on.number, (entropy, greatest, logit, sink, above))
        yield reading.Spread(counts[0], entropy, greatest, logit, counts[1], sink, 1, above)


def _of_queries(on: Arithmetic, part: _Part, first: int, sinks: int) -> _Sums:
    """The sums of the queries from ``first`` on, as many as fit into a block."""
    length = min(part.queries_at_once, part.query.shape[2] - first)
    query = on.floats(on.part(part.query, 2, first, length)) * part.scale
    unusable = _over_both(on, query * 0.0)  # 0, or NaN
    running = None
    for begin in range(0, first + length, KEYS):
        keys = on.part(part.key, 2, begin, min(KEYS, first + length - begin))
        key = on.floats(on.take(keys, 1, part.key_heads))
        scores = _causal(on, on.matmul(query, on.swapped(key)), first, begin)
        running = _with_scores(on, scores, running, max(0, min(sinks - begin, keys.shape[2])))
        unusable = unusable + _over_both(on, key * 0.0)
    assert running is not None
    entropy, greatest = on.log(running.total) - running.weighted / running.total, 1.0 / running.total
    behind = min(length, max(0, sinks - first))  # the first queries see no key besides the sinks
    share = on.part(running.sink / running.total, 2, behind, length - behind)
    entropy, greatest = (on.sum(one, 2) + unusable for one in (entropy, greatest))
    sink = unusable + (on.sum(share, 2) if behind < length else 0.0)
    return _Sums(entropy, greatest, sink, on.amax(running.greatest, 2))


def _over_both(on: Arithmetic, x: Array) -> Array:
    """The sum over the last two dimensions, which stay with length 1, in ``wide`` precision."""
    return on.sum(on.wide(on.sum(x, 3)), 2)


def _with_scores(on: Arithmetic, scores: Array, so_far: _Running | None, sinks: int) -> _Running:
    """Add scores of shape (1, heads, queries, keys).

    Args:
        sinks: How many of the first keys are sinks.
    """
    greatest = on.amax(scores, -1)
    if so_far is not None:
        greatest = on.maximum(so_far.greatest, greatest)
    below = on.at_least(scores - greatest, OUT_OF_SIGHT)
    weights = on.exp(below)
    total, weighted = (on.wide(on.sum(one, -1)) for one in (weights, below * weights))
    sink = on.wide(on.sum(on.part(weights, 3, 0, sinks), -1)) if sinks else total * 0.0
    if so_far is None:
        return _Running(greatest, total, weighted, sink)
    down = on.at_least(on.wide(so_far.greatest - greatest), OUT_OF_SIGHT)
    kept = on.exp(down)
    weighted = kept * (so_far.weighted + so_far.total * down) + weighted
    return _Running(greatest, kept * so_far.total + total, weighted, kept * so_far.sink + sink)


def _causal(on: Arithmetic, scores: Array, query: int, key: int) -> Array:
    """Scores whose first query and key have these positions, with -Inf where a key comes after its query."""
    queries, keys = scores.shape[-2:]
    if key + keys - 1 <= query:
        return scores
    places, rows = (on.constant(np.arange(*span)) for span in ((key, key + keys), (query, query + queries)))
    return on.where(places > on.column(rows), -math.inf, scores)
