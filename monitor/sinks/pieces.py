"""The rows of steps cut and gathered into pieces of a convenient size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from monitor.stats.rows import KindRows, StepRows


class Piece(NamedTuple):
    """Some of the rows that a step has of a kind."""

    step: StepRows
    kind: str
    rows: KindRows

    @property
    def ops(self) -> tuple[str, ...]:
        """What is written of them."""
        return self.step.ops_of(self.kind)

    @property
    def has_histograms(self) -> bool:
        """Whether magnitudes were counted in the step."""
        return self.rows.partials.histogram is not None

    def goes_with(self, other: Piece) -> bool:
        """Whether what one column is made of is the same for both. Rows of a step without histograms, put beside some that have
        them, would seem to have empty ones.
        """
        alike = self.step.layouts is other.step.layouts and self.ops == other.ops
        return alike and self.has_histograms == other.has_histograms


def blocks(steps: Iterable[StepRows], most: int) -> Iterator[list[Piece]]:
    """The rows of steps in blocks of at most ``most`` rows; small kinds with the same ops share one, whatever their steps."""
    block: list[Piece] = []
    room = most
    for whole in (Piece(step, kind, step.read(kind)) for step in steps for kind in step.kinds):
        if block and not whole.goes_with(block[0]):
            yield block
            block, room = [], most
        start, count = 0, len(whole.rows)
        while start < count:
            taken = min(count - start, room)
            fits = taken == count
            block.append(whole if fits else whole._replace(rows=_part(whole.rows, slice(start, start + taken))))
            start, room = start + taken, room - taken
            if not room:
                yield block
                block, room = [], most
    if block:
        yield block


def _part(rows: KindRows, part: slice) -> KindRows:
    return KindRows(rows.series[part], rows.micro_step[part], rows.call_id[part], rows.layout[part], rows.partials.take(part))
