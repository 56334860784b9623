"""Warns of what the configuration asks for and never comes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from monitor.failures import Failures
from monitor.series import MOMENT_KINDS
from monitor.stats.rows import StepRows

FIELDS: Final = (
    ("xy_distribution", ("actv",)),
    ("xy_distribution", ("actv_grad",)),
    ("wg_distribution", ("grad_unreduced",)),
    ("wg_distribution", ("grad_reduced",)),
    ("param_distribution", ("param_origin",)),
    ("mv_distribution", MOMENT_KINDS),
    ("update_ratio", ("update_ratio",)),
)
"""Fields of the configuration, each with kinds of which at least one has rows where it works."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Kinds that a field asks for.

    Attributes:
        after: Complete steps after which one of them has to have come: the first step of a fresh optimizer has no moments.
    """

    field: str
    kinds: tuple[str, ...]
    after: int


class Announced:
    """Looks at the first steps that are collected (``Watcher``)."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._expected: Sequence[Expected] = ()
        self._steps = self._first = 0

    def expect(self, kinds: Collection[str], first: int) -> None:
        """From step ``first`` on: warn if one of ``kinds``, which this rank is to record, does not come."""
        found = [(field, tuple(one for one in of if one in kinds)) for field, of in FIELDS]
        self._steps, self._first = 0, first
        self._expected = [Expected(field, of, 2 if of[0] in MOMENT_KINDS else 1) for field, of in found if of]

    def look(self, rows: StepRows) -> None:
        """Look at a step. One that was skipped, or cut short, says nothing."""
        if not self._expected or rows.status != "complete" or rows.step < self._first:
            return  # earlier steps may still be on their way when another configuration holds
        self._steps += 1
        missing = [one for one in self._expected if not any(kind in rows.kinds for kind in one.kinds)]
        for one in missing:
            if self._steps >= one.after and not self._has_failed(one):
                self._failures.warn(f"nothing of {one.kinds[0]}", _said(one, rows.step))
        self._expected = [one for one in missing if self._steps < one.after]

    def _has_failed(self, one: Expected) -> bool:
        """Whether reading a kind has failed, which was said then."""
        return any(kind in said for said in self._failures.counts for kind in one.kinds)

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost, and says nothing."""

    def save(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """Nothing is kept here."""


def _said(one: Expected, step: int) -> str:
    kinds = ", ".join(one.kinds)
    moments = "An optimizer without momentum keeps no moments. " if one.kinds[0] in MOMENT_KINDS else ""
    steps = f"step {step} has" if one.after == 1 else f"the steps up to {step} have"
    return (
        f"{one.field} is on, and {steps} no row of {kinds}. {moments}The notes in manifest.json say why where that is known; "
        "docs/formats.md says when a kind is measured."
    )
