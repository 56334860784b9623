"""Entropy and maximum of attention weights, computed block by block, so the whole matrix is never in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from monitor.recording.features.reading import Spread
from monitor.stats.torch.tensors import working_precision

BLOCK: Final = 1 << 18
"""Attention weights in a block: 1 MB in float32, which fits a core's cache."""

KEYS: Final = 1024
"""Most keys of a block."""

OUT_OF_SIGHT: Final = -1e4
"""A score this far below the maximum has weight 0, in float64 too. Unlike -Inf it can be multiplied by 0."""


class Scores(NamedTuple):
    """The inputs of attention weights: softmax(query @ key^T * scale + mask).

    Attributes:
        query: Shape ``(batch, heads, queries, size)``.
        key: Shape ``(batch, key heads, keys, size)``: head i has key head ``i // (heads // key heads)``.
        causal: Whether query i sees only the keys up to i.
        mask: Boolean (False where a query does not see a key), or a float that is added to the scores. Its shape broadcasts to
            ``(batch, heads, queries, keys)``.
    """

    query: Tensor
    key: Tensor
    causal: bool
    scale: float
    mask: Tensor | None = None

    def sampled(self, heads: int, rows: int) -> Scores:
        """The first heads of the first rows of the batch; 0 for all of them."""
        batch = max(self.query.shape[0], self.key.shape[0])
        query = self.query.expand(batch, -1, -1, -1)
        of_each = max(1, query.shape[1] // self.key.shape[1])
        heads, rows = min(heads or query.shape[1], query.shape[1]), min(rows or batch, batch)
        mask = self.mask
        if mask is not None:
            mask = mask.expand(batch, query.shape[1], query.shape[2], self.key.shape[2])[:rows, :heads]
        key = self.key.expand(batch, -1, -1, -1)[:rows]
        keys = key.unsqueeze(2).expand(-1, -1, of_each, -1, -1)  # a view: (rows, key heads, heads of each, keys, size)
        return self._replace(query=query[:rows, :heads], key=keys, mask=mask)


def spread(scores: Scores, heads: int = 1, rows: int = 1) -> Spread:
    """Entropy and maximum of the attention weights for a sample of heads and rows of the batch; 0 for all.

    Online softmax, block by block, in float32 at least, summed in float64: memory does not grow with the square of the
    sequence. NaN or Inf in a query or key of the sample makes both sums NaN.
    """
    sample = scores.sampled(heads, rows)
    total = _Sums(sample.query.device)
    for part in _parts(sample):
        for first in range(0, part.query.shape[1], part.queries_at_once):
            _add_queries(part, first, total)
    seen = sample.query.shape[0] * sample.query.shape[1] * sample.query.shape[2] if sample.mask is None else total.seen
    return Spread(seen, total.entropy, total.greatest)


class _Part(NamedTuple):
    """Some heads of one row of the batch: ``query`` of shape ``(heads, queries, size)``, each with its own ``keys``."""

    query: Tensor
    keys: list[Tensor]
    causal: bool
    scale: float
    mask: Tensor | None
    queries_at_once: int


class _Sums:
    def __init__(self, device: torch.device) -> None:
        self.entropy, self.greatest, self.seen = torch.zeros(3, dtype=torch.float64, device=device)


class _Running:
    """Running sums of some queries over the keys so far: the greatest score, Σ e^(score - greatest), and Σ (score - greatest)
    e^(score - greatest). Float64, shape ``(heads, queries)``.
    """

    def __init__(self, like: Tensor) -> None:
        self.greatest = torch.full(like.shape[:2], -math.inf, dtype=torch.float64, device=like.device)
        self.total = torch.zeros_like(self.greatest)
        self.weighted = torch.zeros_like(self.greatest)

    def add(self, scores: Tensor) -> None:
        """Take in scores of shape ``(heads, queries, keys)``, which are overwritten."""
        greatest = torch.maximum(self.greatest, scores.amax(-1).double())
        base = torch.where(greatest == -math.inf, 0.0, greatest)
        below = scores.sub_(base.to(scores.dtype).unsqueeze(-1)).clamp_(min=OUT_OF_SIGHT)
        weights = below.exp()
        down = (self.greatest - base).clamp(min=OUT_OF_SIGHT)
        kept = down.exp()
        self.weighted = kept * (self.weighted + self.total * down) + below.mul_(weights).sum(-1).double()
        self.total = kept * self.total + weights.sum(-1).double()
        self.greatest = greatest

    def finish(self, into: _Sums) -> None:
        sees = self.total != 0  # NaN does
        total = torch.where(sees, self.total, 1.0)
        into.entropy += torch.where(sees, total.log() - self.weighted / total, 0.0).sum()
        into.greatest += torch.where(sees, 1.0 / total, 0.0).sum()
        into.seen += sees.sum()


def _parts(sample: Scores) -> Iterator[_Part]:
    """Blocks of heads, for one row of the batch after the other."""
    queries, keys = sample.query.shape[2], sample.key.shape[3]
    of_each = sample.key.shape[2]
    width = max(1, min(keys, KEYS))
    at_once = max(1, min(queries, BLOCK // width))
    heads = max(1, BLOCK // (width * at_once))
    for row in range(sample.query.shape[0]):
        for first in range(0, sample.query.shape[1], heads):
            chosen = slice(first, first + heads)
            query = sample.query[row, chosen]
            own = [sample.key[row, head // of_each, head % of_each] for head in range(first, first + query.shape[0])]
            mask = None if sample.mask is None else sample.mask[row, chosen]
            yield _Part(query, own, sample.causal, sample.scale, mask, at_once)


def _add_queries(part: _Part, first: int, into: _Sums) -> None:
    query = part.query[:, first : first + part.queries_at_once]
    query = query.to(working_precision(query.dtype)) * part.scale
    running, last = _Running(query), first + query.shape[1]
    keys = part.keys[0].shape[0]
    end = min(keys, last) if part.causal else keys
    unusable = (query * 0).sum().double()
    for begin in range(0, end, KEYS):
        until = min(end, begin + KEYS)
        key = torch.stack([one[begin:until] for one in part.keys]).to(query.dtype)
        scores = torch.bmm(query, key.transpose(1, 2))
        running.add(_masked(scores, part, first, begin))
        unusable += (key * 0).sum()
    running.finish(into)
    into.entropy += unusable  # 0, or NaN
    into.greatest += unusable


def _masked(scores: Tensor, part: _Part, query: int, key: int) -> Tensor:
    """The scores from this query and this key on, with -Inf where a query does not see a key."""
    _, queries, keys = scores.shape
    if part.mask is not None:
        mask = part.mask[:, query : query + queries, key : key + keys]
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    if part.causal and key + keys - 1 > query:
        rows = torch.arange(query, query + queries, device=scores.device).unsqueeze(1)
        later = torch.arange(key, key + keys, device=scores.device) > rows
        scores = scores.masked_fill_(later, -math.inf)
    return scores
