"""Which GEMMs of a run are safe in FP8, in which formats, and how much the loss would change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from monitor.bars import Progress, silent
from monitor.precision.judging import FP8, Casting, OperandJudge, Scaling, judges, reason
from monitor.precision.loss import FORWARD, Judged, LossEffects
from monitor.precision.operands import GRADIENT, INPUT, OPERANDS, RESULTS, WEIGHT, OperandRows, RecordedGemms
from monitor.query.sources import RunSource

SAFE, KEEP, NOT_LOOKED_AT = "fp8", "bf16", "not looked at"

PREFERRED: Final = {INPUT: FP8, WEIGHT: FP8, GRADIENT: FP8[::-1]}
"""The formats of each operand in order: more digits forward, more range backward (arXiv 2209.05433)."""

RARELY: Final = 5.0
"""Times the expected change of the loss, which was not exceeded in our measurements."""


@dataclass(frozen=True, slots=True)
class Cast:
    """What a casting loses of an operand, in the row of which it loses most.

    Attributes:
        badness: The greatest number over its limit; above 1 it is not safe.
        rank: -1: the row is of the whole tensor.
        numbers: The fields of ``Lost``.
    """

    badness: float
    step: int
    rank: int
    numbers: dict[str, float]

    @property
    def error(self) -> float:
        """The relative error, of all elements or of the lesser half."""
        return max(self.numbers["error"], self.numbers["small_error"])


@dataclass(frozen=True, slots=True)
class OperandVerdict:
    """An operand of a GEMM.

    Attributes:
        format: The format in which it is safe; empty if it is in none, or was not looked at.
        shown, way: The casting of which the numbers are shown.
        why: What is wrong, or what is missing; empty if it is safe.
        rows: How many were judged.
    """

    what: str
    format: str
    shown: str
    way: str
    why: str
    rows: int
    casts: dict[Casting, Cast]

    @property
    def badness(self) -> float:
        """In the format shown; -1 if no row was judged."""
        cast = self.casts.get(Casting(self.shown, self.way))
        return -1.0 if cast is None else cast.badness


@dataclass(frozen=True, slots=True)
class LossChange:
    """The change of a step's loss: at most, and as expected.

    None where norms are missing.
    """

    most: float | None
    expected: float | None


@dataclass(frozen=True, slots=True)
class GemmVerdict:
    """A layer: ``verdict`` is SAFE, KEEP or NOT_LOOKED_AT."""

    name: str
    verdict: str
    operands: dict[str, OperandVerdict]
    loss: LossChange

    @property
    def worst(self) -> OperandVerdict:
        """The operand that decides: not safe, or not looked at, or nearest to its limit."""
        unknown = self.verdict == NOT_LOOKED_AT

        def weight(one: OperandVerdict) -> tuple[bool, float]:
            return unknown and not one.format, one.badness

        return max(self.operands.values(), key=weight)


@dataclass(frozen=True, slots=True)
class Advice:
    """What is advised for a run.

    Attributes:
        gemms: In order of depth.
        loss: Of all GEMMs that are safe, together.
        lacking: What the run did not record, a sentence each.
        without_layer: Matrices that belong to no layer, so nothing is said of their products.
        steps: How many were read.
    """

    scaling: Scaling
    gemms: list[GemmVerdict]
    loss: LossChange
    lacking: list[str]
    without_layer: list[str]
    steps: int

    def having(self, verdict: str) -> list[GemmVerdict]:
        return [one for one in self.gemms if one.verdict == verdict]

    @property
    def is_clean(self) -> bool:
        """Whether every layer was looked at, and is safe, and every matrix belongs to a layer."""
        return bool(self.gemms) and not self.lacking and not self.without_layer and len(self.having(SAFE)) == len(self.gemms)


def advise(source: RunSource, steps: range, scaling: Scaling, progress: Progress = silent) -> Advice:
    """Read a run and judge its GEMMs.

    Raises:
        QueryError: The run cannot be read, or has no rows in these steps.
    """
    recorded = RecordedGemms(source)
    judged, effects, done = judges(len(recorded.gemms), scaling), LossEffects(recorded.gemms), 0
    for window, first, count in recorded.windows(steps) if recorded.gemms else ():
        progress("steps", first, count)
        found = _judged(WEIGHT, recorded.read(WEIGHT, window), judged)
        for ranks in recorded.groups:
            for what in (INPUT, GRADIENT):
                found = {one: of for one, of in found.items() if one != what}
                found |= _judged(what, recorded.read(what, window, ranks), judged)
            effects.add(found, {what: recorded.read(what, window, ranks) for what in RESULTS})
        done = count
    gemms = [_gemm(number, one.name, judged, effects) for number, one in enumerate(recorded.gemms)]
    lacking = recorded.lacking(any(one.without.any() for one in judged.values()))
    return Advice(scaling, gemms, _together(gemms, effects), lacking, recorded.without_layer, done)


def _judged(what: str, rows: OperandRows | None, judged: Mapping[str, OperandJudge]) -> dict[str, Judged]:
    """The rows of an operand with their errors, by operand; empty if there are none."""
    return {} if rows is None or not len(rows) else {what: judged[what].add(rows)}


# --- Verdicts.


def _gemm(number: int, name: str, judged: dict[str, OperandJudge], effects: LossEffects) -> GemmVerdict:
    operands = {what: _operand(number, judged[what]) for what in OPERANDS}
    if any(one.badness > 1 for one in operands.values()):
        verdict = KEEP
    else:
        verdict = SAFE if all(one.format for one in operands.values()) else NOT_LOOKED_AT
    return GemmVerdict(name, verdict, operands, _loss_of([(number, operands)], effects))


def _operand(gemm: int, judge: OperandJudge) -> OperandVerdict:
    way, preferred = judge.scaling.way, PREFERRED[judge.what]
    casts = {
        cast: Cast(float(worst.badness[gemm]), int(worst.step[gemm]), int(worst.rank[gemm]), worst.at(gemm))
        for cast, worst in judge.worst.items()
        if not math.isnan(worst.badness[gemm])
    }
    safe = [name for name in preferred if (cast := casts.get(Casting(name, way))) is not None and cast.badness <= 1]
    shown, missing = safe[0] if safe else preferred[0], _missing(gemm, judge)
    lost = casts.get(Casting(shown, way))
    why = missing if safe or lost is None else reason(shown, lost.numbers)
    return OperandVerdict(judge.what, "" if missing or not safe else shown, shown, way, why, int(judge.judged[gemm]), casts)


def _missing(gemm: int, judge: OperandJudge) -> str:
    if judge.not_finite[gemm] >= 0:
        return f"NaN or an infinity in step {judge.not_finite[gemm]}"
    if judge.without[gemm]:
        return "rows that lack one of histogram, norm and absmax"
    if not judge.judged[gemm]:
        return "no histograms"
    way = judge.scaling.way
    return "one row only, so no earlier absmax" if math.isnan(judge.worst[Casting(FP8[0], way)].badness[gemm]) else ""


def _together(gemms: Sequence[GemmVerdict], effects: LossEffects) -> LossChange:
    return _loss_of([(number, one.operands) for number, one in enumerate(gemms) if one.verdict == SAFE], effects)


def _loss_of(gemms: Sequence[tuple[int, dict[str, OperandVerdict]]], effects: LossEffects) -> LossChange:
    """The change of the loss by several GEMMs, in the formats shown for their operands."""
    if not all(effects.known[number] for number, _ in gemms):
        return LossChange(None, None)
    each = np.array(
        [[one[number] for one in effects.of(what, operands[what].shown)] for number, operands in gemms for what in FORWARD]
    ).reshape(-1, 3)
    most, variance, curvature = each.sum(axis=0).tolist()
    return LossChange(most, math.hypot(math.sqrt(variance), curvature))
