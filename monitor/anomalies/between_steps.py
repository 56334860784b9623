"""Whether weights and moments are, when a step uses them, what the step before left. It also sees shards that no other rank
holds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.checked_rows import NO_ROWS, CheckedRows, Numbers
from monitor.anomalies.corruption import CHANGED_BETWEEN, CorruptionAlerts
from monitor.coordinator.manifest_format import WrongBits
from monitor.series import LEFT_BY_STEP, MOMENT_KINDS, SeriesTable
from monitor.stats.partials import Words
from monitor.terminal import counted, first_of

WEIGHTS: Final = "weights"
KINDS: Final = (
    ("param_origin", "param_updated", WEIGHTS),
    *((kind, f"{kind}{LEFT_BY_STEP}", kind) for kind in MOMENT_KINDS),
)
"""Kinds of the same tensors before and after the optimizer's step, and what these tensors are called."""

MOST_SAID: Final = 10
"""Warnings of a run about each of these. Loops may write to some weights in every step, so each tensor is named once."""

OF_A_LOOP: Final = 3
"""Steps before which most tensors had been written. Then the loop does so, and is not compared any more: rounding may leave all
but a few as they were.
"""

WRITTEN: Final = "written between steps"
"""The end of the name of the manifest's note that says so."""

NAMED: Final = 5
"""Tensors that a warning names."""

NOT_COMPARED: Final = "{what} are not compared between steps, so corrupted memory of them is not found."

_FEW: Final = 3
"""Fewest tensors of which more than half count as most of them."""

_CAUSES: Final = (
    "a loaded checkpoint, averaged or clamped weights, a mask, merged adapters, an optimizer that moves weights and moves them "
    "back (SAM), a second optimizer, a router's bias"
)
_CAUSES_OF_MOMENTS: Final = "a loaded checkpoint, or a reset of the optimizer's state"


class BetweenSteps:
    """Compares the checksums of tensors after a step and before the next one, for each of ``KINDS``."""

    def __init__(self, series: SeriesTable, alerts: CorruptionAlerts) -> None:
        self._each = [_Interval(began, left, what, series, alerts) for began, left, what in KINDS]

    def look(self, step: int, rows: Mapping[str, CheckedRows], rewritten: Collection[tuple[int, str]] = ()) -> None:
        """Compare what the step began with, and keep what it left.

        Args:
            rewritten: See ``StepRows``. These weights are not compared; their moments are those of one optimizer.
        """
        for one in self._each:
            one.look(step, rows, rewritten)

    def forget(self) -> None:
        """Nothing is known of what the last step left."""
        for one in self._each:
            one.forget()


class _Interval:
    """The same for the kinds ``began`` and ``left``."""

    def __init__(self, began: str, left: str, what: str, series: SeriesTable, alerts: CorruptionAlerts) -> None:
        self._began_with, self._left_kind, self._what = began, left, what
        self._series, self._alerts = series, alerts
        self._step, self._left = -1, NO_ROWS
        self._began, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._said: set[int] = set()
        self._before_step: dict[tuple[int, str], int] | None = {}
        self._of_program: set[tuple[int, str]] = set()
        self._warnings = 0
        self._written = 0
        self._rewritten: Collection[tuple[int, str]] = ()

    def look(self, step: int, rows: Mapping[str, CheckedRows], rewritten: Collection[tuple[int, str]]) -> None:
        began, left = rows.get(self._began_with, NO_ROWS), rows.get(self._left_kind, NO_ROWS)
        if self._written == OF_A_LOOP:
            return
        if len(began.series) and step == self._step + 1:
            self._compare(step, began, rewritten if self._what == WEIGHTS else ())
        if not np.array_equal(left.series, self._left.series):
            self._began = np.zeros(0, np.int64)  # so that places are found anew
        self._step, self._left = step, left
        if self._before_step is not None:
            self._before_step = dict(zip(map(self._name, began.series.tolist()), began.checksums.tolist(), strict=True))

    def forget(self) -> None:
        self._step = -1

    def _compare(self, step: int, began: CheckedRows, rewritten: Collection[tuple[int, str]]) -> None:
        before: Words = np.append(self._left.checksums, np.uint64(0))[self._places_of(began.series)]
        known = (began.checksums != 0) & (before != 0)
        if rewritten:
            self._note_rewritten(rewritten)
        if left_out := self._of_program.union(rewritten):
            known &= [self._name(one) not in left_out for one in began.series.tolist()]
        changed = np.flatnonzero(known & (began.checksums != before))
        if self._before_step:
            changed = self._without_program(step, self._before_step, began.series, before, changed)
            self._before_step = None
        if len(changed):
            self._tell(step, began.series[changed], began.call_id[changed], int(known.sum()))

    def _without_program(
        self, step: int, first: Mapping[tuple[int, str], int], began: Numbers, before: Words, changed: Numbers
    ) -> Numbers:
        """The changed tensors without those that the program writes, as a momentum encoder: at the first comparison they have
        changed, though the optimizer left them as they were. They are not compared from now on.

        Args:
            first: Checksums that the step before began with.
        """
        named = {place: self._name(began[place]) for place in changed.tolist()}
        written = [place for place, name in named.items() if first.get(name) == before[place]]
        if written:
            self._of_program = {named[place] for place in written}
            names = first_of([named[place][1] for place in written], NAMED)
            what = f"{len(written)} of {len(began)} {self._what}"
            said = f"The program writes to {what}, which the optimizer does not step: {names}. First seen before step {step}. "
            self._alerts.note(f"{self._what} of the program, {WRITTEN}", said + NOT_COMPARED.format(what="They"))
        return np.setdiff1d(changed, written)

    def _note_rewritten(self, rewritten: Collection[tuple[int, str]]) -> None:
        """Note which weights are not compared, each time that there are others."""
        if rewritten != self._rewritten:
            self._rewritten = rewritten
            names = first_of([name for _, name in sorted(rewritten)], NAMED)
            said = f"{counted(len(rewritten), 'weight is', 'weights are')} stepped by several optimizers: {names}. "
            self._alerts.note(f"weights of several optimizers, {WRITTEN}", said + NOT_COMPARED.format(what="They"))

    def _places_of(self, began: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place of the same tensor among those that the last step left; one past the end if it is not there."""
        if not len(self._began) or not np.array_equal(began, self._began):
            names = {self._name(one): place for place, one in enumerate(self._left.series.tolist())}
            places = [names.get(self._name(one), len(names)) for one in began.tolist()]
            self._began, self._places = began.copy(), np.array(places, dtype=np.int64)
        return self._places

    def _name(self, series: int) -> tuple[int, str]:
        one = self._series[series]
        return one.vpp_stage, one.name.removeprefix(f"{self._began_with}/").removeprefix(f"{self._left_kind}/")

    def _tell(self, step: int, changed: NDArray[np.int64], call_ids: NDArray[np.int64], of: int) -> None:
        what = f"{len(changed):,} of {of:,} {self._what} changed after the optimizer's step {step - 1} and before step {step}"
        causes = _CAUSES if self._what == WEIGHTS else _CAUSES_OF_MOMENTS
        if of >= _FEW and 2 * len(changed) > of:
            self._written += 1
            if self._written == 1:
                said = f"{what}. So many at once means that something wrote to them, such as {causes}. Reported once."
                self._alerts.note(f"{self._what} before step {step}", said, logging.WARNING)
            elif self._written == OF_A_LOOP:
                said = (
                    f"Most {self._what} were written before {OF_A_LOOP} steps, the last of them step {step}: the loop does so."
                )
                then = NOT_COMPARED.format(what=f"From there on {self._what}")
                self._alerts.note(f"{self._what} {WRITTEN}", f"{said} {then}")
            return
        fresh = {
            one: call_id for one, call_id in zip(changed.tolist(), call_ids.tolist(), strict=True) if one not in self._said
        }
        if fresh and self._warnings < MOST_SAID:
            self._warnings += 1
            self._said.update(fresh)
            places = [self._name(one) for one in list(fresh)[:NAMED]]
            named = tuple(name for _, name in places)
            in_words = (f"{name} of chunk {chunk}" if chunk else name for chunk, name in places)
            names = ", ".join(in_words) + (", …" if len(fresh) > NAMED else "")
            said = f"{what}: {names}. The memory of this device was corrupted, or something else wrote to it: {causes}."
            self._alerts.say(
                WrongBits(
                    check="between steps", step=step, kind=self._began_with, names=named, ranks=(self._alerts.rank,), said=said
                )
            )
            for one, call_id in fresh.items():
                self._alerts.event(CHANGED_BETWEEN, step, one, call_id)
