"""The rows of a step cut and gathered into pieces of a convenient size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from monitor.stats.rows import KindRows, StepRows


class Piece(NamedTuple):
    """Some of the rows of a kind."""

    kind: str
    rows: KindRows


def blocks(rows: StepRows, most: int) -> Iterator[list[Piece]]:
    """The rows of the step in blocks of at most ``most`` rows; small kinds with the same ops share one."""
    block: list[Piece] = []
    room = most
    for kind in rows.kinds:
        of_kind = rows.read(kind)
        if block and rows.ops_of(kind) != rows.ops_of(block[0].kind):
            yield block
            block, room = [], most
        start = 0
        while start < len(of_kind):
            piece = _part(of_kind, slice(start, start + room))
            block.append(Piece(kind, piece))
            start, room = start + len(piece), room - len(piece)
            if not room:
                yield block
                block, room = [], most
    if block:
        yield block


def _part(rows: KindRows, part: slice) -> KindRows:
    return KindRows(rows.series[part], rows.micro_step[part], rows.call_id[part], rows.layout[part], rows.partials.take(part))
