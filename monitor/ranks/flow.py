"""How data ran through a rank in a step: which series fed which, and in what order micro-batches went through its chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from monitor.series import ADAM_KINDS, MOMENT_KINDS, Series

MOST_EDGES: Final = 200_000
"""What is kept of the edges that were seen; a module of a thousand inputs and outputs alone has a million."""

MOST_PASSES: Final = 20_000

_FED_BY: Final = {
    "grad_reduced": ("grad_unreduced",),
    "param_updated": ("grad_reduced", "param_origin", *MOMENT_KINDS),
    **dict.fromkeys(ADAM_KINDS, ("grad_reduced", *MOMENT_KINDS)),
}
"""Kinds of a parameter, and the kinds of the same parameter that they are made from within a step. Moments are those from
before the step: this step's gradient shows in the next one's.
"""


class Edge(NamedTuple):
    """Two series by their numbers: what was measured as ``source`` went into what was measured as ``target``."""

    source: int
    target: int


class Pass(NamedTuple):
    """The forward or the backward of one micro-batch through one chunk of the model."""

    forward: bool
    vpp_stage: int
    micro_step: int


@dataclass(frozen=True, slots=True)
class Flow:
    """What one step has shown.

    Attributes:
        edges: Each once. Along them the first rows of a step stand in the order in which they were measured, so there is no
            way from a series back to itself.
        passes: In the order in which the rank began them.
        cut: Whether there was more than is kept.
    """

    edges: tuple[Edge, ...] = ()
    passes: tuple[Pass, ...] = ()
    cut: bool = False


NO_FLOW: Final = Flow()


def edges_of_parameters(series: Sequence[Series]) -> Iterator[Edge]:
    """The edges between the kinds of each parameter: from its local gradient over the aggregated one to the new weight."""
    number = {one: index for index, one in enumerate(series)}
    for target, one in enumerate(series):
        for kind in _FED_BY.get(one.kind, ()):
            source = number.get(Series(kind, one.vpp_stage, one.name))
            if source is not None:
                yield Edge(source, target)
