"""The order in which a rank of a pipeline takes its passes, as schedules have it."""

from __future__ import annotations

import itertools

from monitor.coordinator.series_file import Pass


def gpipe(_rank, _size, micro_steps, _chunks):
    return [Pass(way, 0, m) for way in (True, False) for m in range(micro_steps)]


def one_forward_one_backward(rank, size, micro_steps, _chunks):
    forward, backward = ([Pass(way, 0, m) for m in range(micro_steps)] for way in (True, False))
    return taking_turns(forward, backward, size - rank - 1)


def interleaved(rank, size, micro_steps, chunks):
    """Micro-batches in groups of as many as there are ranks, each group through all chunks before the next."""
    rounds = itertools.product(range(-(-micro_steps // size)), range(chunks), range(size))
    turns = [(group * size + m, chunk) for group, chunk, m in rounds if group * size + m < micro_steps]
    forward = [Pass(True, chunk, m) for m, chunk in turns]
    backward = [Pass(False, chunks - 1 - chunk, m) for m, chunk in turns]
    return taking_turns(forward, backward, 2 * (size - rank - 1) + (chunks - 1) * size)


def taking_turns(forward, backward, ahead):
    ahead = min(ahead, len(forward))
    steady = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return forward[:ahead] + steady + backward[len(forward) - ahead :]
