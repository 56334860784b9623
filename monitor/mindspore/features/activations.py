"""Massive activations, active units, effective rank and norms of the tokens of an output, in MindSpore."""

from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor

from monitor.recording.features import reading
from monitor.stats.mindspore.tensors import Arithmetic, Array, computing


def activation_of(x: Tensor) -> reading.Activation:
    """What a floating-point tensor with elements shows. On a device, numbers are float32.

    Raises:
        EarlierFailure: An earlier operation of training has failed.
    """
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    with computing() as on:
        tokens = on.of(x).reshape(shape)
        peaks, norms, wrong = _peaks_and_norms(on, tokens, shape)
        largest = on.amax(peaks)
        median, typical = _quantiles(on, tokens.reshape(-1), shape)
        places = on.where(peaks == largest, on.constant(np.arange(shape[1])), float(shape[1]))
        channel = -on.amax(-places)  # the first of several
        ratio = on.where(median > 0, largest / median, -math.inf) + wrong
        active = on.where(peaks > reading.QUIET * typical, 1.0, 0.0).reshape(-1)
        seen = on.joined([active, on.where(wrong == 0, 0.0, 1.0).reshape(-1)])
        rank = _effective_rank(on, on.every(tokens, reading.distance_of_tokens(shape[0])), shape[1]) + wrong
        norms, ratio, channel, squared, rank = (
            on.number(one.reshape(())) for one in (norms + wrong, ratio, channel, channel * channel, rank)
        )
        return reading.Activation(shape[0], norms, ratio, channel, squared, rank, seen)


def last_active(before: Array | None, seen: Array, step: int) -> Array:
    """The last step of each entry."""
    with computing() as on:
        return seen * float(step) if before is None else on.maximum(before, seen * float(step))


def active_share(last: Array, units: int, step: int) -> reading.Number:
    """The share of units that were active after ``step``. The last entry is that of NaN and Inf."""
    with computing() as on:
        active = on.where(last > float(step), 1.0, 0.0)
        share = on.sum(on.part(active, 0, 0, units)) / units
        return on.number(on.where(on.part(active, 0, units, 1) > 0, math.nan, share).reshape(()))


def _peaks_and_norms(on: Arithmetic, tokens: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """The largest magnitude of each channel, shape (1, channels), the sum of the norms of the tokens, and 0 or NaN."""
    peaks: Array = on.constant(np.zeros((1, shape[1])))
    norms: Array = 0.0
    wrong: Array = 0.0
    for block in on.rows(tokens, shape):
        magnitudes = on.abs(on.floats(block))
        wrong = wrong + on.sum(magnitudes * 0.0)
        peak = on.amax(magnitudes, 0)
        scale = _unless_zero(on, on.amax(peak))
        scaled = on.wide(magnitudes / scale)
        norms = norms + on.sum(on.sqrt(on.sum(scaled * scaled, -1))) * scale
        peaks = on.maximum(peaks, peak)
    return peaks, norms, wrong


def _quantiles(on: Arithmetic, elements: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """The median and the typical magnitude of sampled elements."""
    distance = reading.distance_of_elements(math.prod(shape), shape[1])
    size = -(-math.prod(shape) // distance)
    ranks = [reading.rank_of_quantile(size, quantile) for quantile in (0.5, reading.TYPICAL)]
    ordered = on.largest(on.abs(on.floats(on.every(elements, distance))), size - ranks[0] + 1)
    median, typical = (on.part(ordered, 0, size - rank, 1) for rank in ranks)
    return median, typical


def _effective_rank(on: Arithmetic, sample: Array, channels: int) -> Array:
    """The effective rank of sampled tokens, from the matrix of their cosines."""
    numbers = on.wide(on.floats(sample))
    numbers = numbers / _unless_zero(on, on.amax(on.abs(numbers), -1))
    squares = on.sum(numbers * numbers, -1)
    units = numbers / on.sqrt(_unless_zero(on, squares))
    cosines = on.matmul(units, on.swapped(units))
    number = on.sum(on.where(squares == 0, 0.0, 1.0))
    rank = on.where(number > 1, number * number / on.sum(cosines * cosines), -math.inf)
    return rank if channels > 1 else on.where(number > 1, -math.inf, rank)


def _unless_zero(on: Arithmetic, x: Array) -> Array:
    """1 where a number is 0, so that it may divide."""
    return on.where(x == 0, 1.0, x)
