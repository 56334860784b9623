"""What is to be known of measurements, beside their rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from monitor.sinks.shard_names import Steps
from monitor.stats.rows import StepRows

SCHEMA_VERSION: Final = 2
"""Of the ``hdf5`` format. Columns of version 1 were compressed by gzip."""

METADATA: Final = b"monitor"
"""Where ``Facts`` stand in the metadata of an Arrow schema, as JSON."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is to be known of some steps.

    Attributes:
        rank: Who measured.
        eps: What the partial ``smalls`` counts is below this.
        ops: The statistics that were asked for when the last of the steps was sealed.
        skipped: The steps that the optimizer skipped.
        incomplete: The steps in the middle of which the run ended.
    """

    rank: int
    eps: float
    ops: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()
    incomplete: tuple[int, ...] = ()

    def of(self, rows: StepRows) -> Facts:
        """The same of one step."""
        marked = {status: (rows.step,) if rows.status == status else () for status in ("skipped", "incomplete")}
        return Facts(self.rank, self.eps, rows.ops, marked["skipped"], marked["incomplete"])

    def fits(self, other: Facts) -> bool:
        """Whether rows of both mean the same."""
        return (self.rank, self.eps) == (other.rank, other.eps)

    def then(self, later: Facts) -> Facts:
        """Of these steps and later ones."""
        skipped, incomplete = (*self.skipped, *later.skipped), (*self.incomplete, *later.incomplete)
        return replace(later, skipped=skipped, incomplete=incomplete)

    def only(self, steps: Steps) -> Facts:
        """Of those of the steps that lie between these."""
        within = ((s for s in marked if steps.first <= s <= steps.last) for marked in (self.skipped, self.incomplete))
        skipped, incomplete = map(tuple, within)
        return replace(self, skipped=skipped, incomplete=incomplete)

    def packed(self) -> dict[bytes, bytes]:
        """As metadata of an Arrow schema."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {METADATA: json.dumps({"schema_version": SCHEMA_VERSION, **fields}).encode()}

    @classmethod
    def unpacked(cls, metadata: Mapping[bytes, bytes]) -> Facts:
        fields = json.loads(metadata[METADATA])
        lists = {name: tuple(fields[name]) for name in ("ops", "skipped", "incomplete")}
        return cls(fields["rank"], fields["eps"], **lists)
