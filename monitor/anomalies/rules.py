"""The alert rules, by their names in the configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.bounds import GROUPS, Bound
from monitor.anomalies.scanner import AnomalyRule, Fired, Flags, KindColumns
from monitor.series import KINDS
from monitor.stats.features import own_columns
from monitor.stats.histograms import COUNTED
from monitor.stats.ops import derive
from monitor.stats.partials import COUNT, EXPONENT, MAX, MIN, NANS, SUM, SUMSQ, Floats, Partials

# --- ``AnomalyNan``: values that are not finite or too large.


class AnomalyNan:
    """Fires on a tensor with a NaN (statistic ``nans``), else with an Inf (``infs``), else with a magnitude above the
    threshold, if there is one (``absmax``): at most once a row.
    """

    name: ClassVar[str] = "AnomalyNan"
    fields: ClassVar[int] = 0
    judges_features: ClassVar[bool] = False
    advice: ClassVar[str] = ""

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold: Final = threshold

    def judge(self, columns: KindColumns, _state: Floats, /) -> Iterator[Fired]:
        """See ``AnomalyRule``."""
        bad = columns.faulty
        if bad is not None:
            nans = columns.partials.columns[NANS] > 0
            yield Fired("nans", np.flatnonzero(nans), nonfinite=True)
            yield Fired("infs", np.flatnonzero(bad & ~nans), nonfinite=True)
        if self._threshold is not None:
            yield from self._too_large(columns, self._threshold)

    def _too_large(self, columns: KindColumns, threshold: float) -> Iterator[Fired]:
        """Extremes are over the finite elements; without finite elements the maximum is -Inf."""
        low, high = columns.partials.columns[MIN], columns.partials.columns[MAX]
        if not len(low) or (high.max() <= threshold and low.min() >= -threshold):
            return
        large = (high > threshold) | (low < -threshold)
        yield Fired("absmax", np.flatnonzero(large if columns.nonfinite is None else large & ~columns.nonfinite))


# --- ``AnomalyTurbulence``: the relative deviation of a norm or a mean from its running mean.
#
# A value x is compared with the running mean m of earlier values, in both directions: |x - m| > threshold * |m|.
#
# - **The mean forgets.** A new value has the weight 1/min(n, 100): a plain mean at first, then one over about a hundred
#   steps.
# - **A spike does not spoil the mean.** A value that fired enters the mean only up to the bound that it crossed. So healthy
#   steps after a spike do not fire. A level that lasts is accepted in time.
# - **Values that are not finite never enter the mean**; they fire once for their row. A tensor without elements is not an
#   observation.
# - **A mean near zero fluctuates by any factor.** The tensor's scale is its running root mean square. If the running ``mean``
#   is below a tenth of the scale, deviations of ``mean`` are judged against the scale. The same holds below twice the
#   sampling error: the mean of n elements, half of them negative, is of the order of the scale over the root of n.
# - **Zero has no relative deviation.** The running norm can be exactly 0 (a bias before its first update). Then the first
#   value other than 0 is no event, and restarts the means.

OPS: Final = ("norm", "mean")
"""The order of the two columns in all arrays below."""

LONGEST: Final = 100.0
"""The weight of a new value is at least one over this."""

NEAR_ZERO: Final = 0.1
"""Fraction of the root mean square below which a running mean says little about the tensor."""

SAMPLING_ERRORS: Final = 2.0
"""A running mean below this many sampling errors says little, too."""

BLOCK: Final = 32768
"""Rows judged together, so that intermediate results stay in the cache."""

# The state of a row: the two running means, the number of values in them, up to ``LONGEST``, and the number of elements. Since
# tensors seldom change their size, two factors are stored as well: norm to root mean square, and norm to near-zero bound.
_MEANS: Final = slice(0, 2)
_NORM, _MEAN, _SEEN, _COUNT, _SHARE, _NEAR = range(6)


class _Deviants(NamedTuple):
    """Rows that fired, and the running means that their values were compared with."""

    rows: NDArray[np.int64]
    means: Floats


class AnomalyTurbulence:
    """Fires on relative deviations from the running mean; the comment above gives the definition.

    Args:
        threshold: The largest normal relative deviation. From 1 on the rule misses every fall of a norm, even to 0.
    """

    name: ClassVar[str] = "AnomalyTurbulence"
    fields: ClassVar[int] = 6
    judges_features: ClassVar[bool] = False
    advice: ClassVar[str] = ""

    def __init__(self, threshold: float) -> None:
        self._threshold: Final = threshold
        self._work = np.empty((3, len(OPS), BLOCK))
        self._above = np.empty((len(OPS), BLOCK), np.bool_)

    def judge(self, columns: KindColumns, state: Floats, /) -> Iterator[Fired]:
        """See ``AnomalyRule``."""
        found: dict[str, list[_Deviants]] = defaultdict(list)
        with np.errstate(all="ignore"):
            for begin in range(0, len(columns.partials), BLOCK):
                self._judge(columns, state, begin, found)
        if columns.faulty is not None:
            yield Fired("norm", np.flatnonzero(columns.faulty), nonfinite=True)
        for op in OPS:
            if op in found:
                rows, means = (np.concatenate(parts) for parts in zip(*found[op], strict=True))
                yield Fired(op, rows, means)

    def _judge(self, columns: KindColumns, state: Floats, begin: int, found: dict[str, list[_Deviants]]) -> None:
        """Judge one block of rows, from ``begin`` on. In place: allocation would take as long as the computation."""
        block = slice(begin, begin + BLOCK)
        known, partials = state[:, block], columns.partials.columns[:, block]
        values, bounds, off = self._work[:, :, : known.shape[1]]
        above = self._above[:, : known.shape[1]]
        observed = _observe(partials, known[_MEANS], values, careful=_any(columns.nonfinite, block))
        self._bound(known, partials[COUNT], bounds, scratch=off[0])
        weight = _weigh(known, observed, bounds)
        np.subtract(values, known[_MEANS], out=off)
        if np.count_nonzero(np.greater(np.abs(off, out=values), bounds, out=above)):
            _note(found, begin, above, known[_MEANS])
            np.clip(off, -bounds, bounds, out=off)
        off *= weight
        known[_MEANS] += off

    def _bound(self, known: Floats, counts: Floats, bounds: Floats, scratch: Floats) -> None:
        """Compute how far each value may be from its mean."""
        norm, mean = bounds
        if not np.array_equal(counts, known[_COUNT]):
            known[_COUNT] = counts
            known[_SHARE] = 1.0 / np.sqrt(np.maximum(counts, 1.0))
            known[_NEAR] = known[_SHARE] * np.maximum(NEAR_ZERO, SAMPLING_ERRORS * known[_SHARE])
        scale = np.multiply(known[_NORM], known[_SHARE], out=norm)
        np.abs(known[_MEAN], out=mean)
        np.copyto(mean, scale, where=mean < np.multiply(known[_NORM], known[_NEAR], out=scratch))
        mean *= self._threshold
        np.multiply(known[_NORM], self._threshold, out=norm)


def _observe(partials: Floats, means: Floats, values: Floats, *, careful: bool) -> Flags | None:
    """Write the statistics of each row to ``values``. Rows without a valid observation keep their running mean.

    Returns:
        Which rows are observations; None if all are.
    """
    if careful or partials[COUNT].min() == 0 or not partials[EXPONENT].min() == 0 == partials[EXPONENT].max():
        values[0], _ = derive("norm", Partials(partials))
        values[1], measured = derive("mean", Partials(partials))
        observed: Flags = measured & np.isfinite(values).all(axis=0)
        np.copyto(values, means, where=~observed)
        return observed
    np.sqrt(partials[SUMSQ], out=values[0])
    np.divide(partials[SUM], partials[COUNT], out=values[1])
    return None


def _weigh(known: Floats, observed: Flags | None, bounds: Floats) -> Floats | float:
    """Count the new values and return their weights. Rows without a mean yet get infinite bounds."""
    unknown = known[_NORM] == 0 if known[_NORM].min() == 0 else None
    if unknown is None and known[_SEEN].min() == LONGEST:
        return 1.0 / LONGEST
    known[_SEEN] += 1.0 if observed is None else observed
    np.minimum(known[_SEEN], LONGEST, out=known[_SEEN])
    if unknown is not None:
        known[_SEEN, unknown] = 1.0
        bounds[:, unknown] = np.inf
    weight: Floats = 1.0 / known[_SEEN]
    return weight


def _note(found: dict[str, list[_Deviants]], begin: int, above: Flags, means: Floats) -> None:
    for op, where, mean in zip(OPS, above, means, strict=True):
        rows = np.flatnonzero(where)
        if len(rows):
            found[op].append(_Deviants(rows + begin, mean[rows]))


def _any(flags: Flags | None, block: slice) -> bool:
    return flags is not None and bool(flags[block].any())


# --- ``AnomalyBounds``: numbers beyond the bounds of ``monitor.anomalies.bounds``.


def _bounds_of(kind: str) -> tuple[Bound, ...]:
    """The bounds of a kind's own columns; for other kinds, those of ops."""
    columns = own_columns(kind) or COUNTED
    return tuple(one for group in GROUPS for one in group.bounds if one.is_of(kind, one.column) and one.column in columns)


BOUNDS: Final[Mapping[str, tuple[Bound, ...]]] = MappingProxyType({kind: _bounds_of(kind) for kind in KINDS})
"""The bounds of each kind."""


class AnomalyBounds:
    """Fires on a number that crosses its bound: in the first row beyond it, or after as many in a row as the bound asks for. It
    fires again when the number has been within the bound in between. NaN does not fire.
    """

    name: ClassVar[str] = "AnomalyBounds"
    fields: ClassVar[int] = 2 * max(map(len, BOUNDS.values()))
    judges_features: ClassVar[bool] = True
    advice: ClassVar[str] = "docs/report.md has the bound of this number, what lies beyond it, and where it comes from."

    def judge(self, columns: KindColumns, state: Floats, /) -> Iterator[Fired]:
        """See ``AnomalyRule``. The state of each bound: the values so far, and those beyond it in a row."""
        for place, bound in enumerate(BOUNDS[columns.kind]):
            if bound.column not in COUNTED or columns.partials.histogram is not None:
                yield Fired(bound.column, self._crossing(columns, bound, state[2 * place : 2 * place + 2]))

    def _crossing(self, columns: KindColumns, bound: Bound, state: Floats) -> NDArray[np.int64]:
        values, there = derive(bound.column, columns.partials)
        if bound.ends:
            there = there & np.array([name.endswith(bound.ends) for name in columns.names()], np.bool_)
        seen, in_a_row = state
        np.copyto(in_a_row, bound.rows_in_a_row(values, seen, in_a_row), where=there)
        seen += there
        return np.flatnonzero(there & (in_a_row == bound.in_a_row))


RULES: Final[Mapping[str, Callable[..., AnomalyRule]]] = MappingProxyType(
    {rule.name: rule for rule in (AnomalyTurbulence, AnomalyNan, AnomalyBounds)}
)
"""A rule is made with the fields of ``args`` that are set, by name. ``RULE_ARGUMENTS`` says which it takes."""
