"""What may make a loss jump, each looked at in the rows around it: what a step is computed from, link by link.

A link is broken if its numbers do not follow from what they are computed from: weights that are not what the step before had
left, moments that no gradient gives, a learning rate beyond all before it, replicas that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from monitor.anomalies.odd_copies import who
from monitor.report import bands
from monitor.report.bands import Ints, Limit, Numbers, Window
from monitor.report.facts import Facts
from monitor.report.findings import Place
from monitor.series import LEFT_BY_STEP, RUN_KIND

BEFORE: Final = bands.LEVEL + bands.SPREAD
"""Steps before a jump whose rows are read."""
AFTER: Final = 3
"""Steps after it."""
MOST_READ: Final = 5_000_000
"""Values of a kind around a jump. A kind with more counts as not recorded."""

LOOK_BACK: Final = 8
"""Steps before a jump in which a broken link may have caused it."""
SOON: Final = 2
"""Steps within which wrong weights show."""

WEIGHTS, MOMENTS, RATE, DEVICE = "weights", "moments", "learning rate", "device"
BATCH, RANK_DATA, NOT_FINITE, SKIPPED = "batch", "rank data", "not finite", "skipped steps"

BEGINS, FORWARD, BACKWARD, UPDATE = range(4)
"""The phases of a step, in order."""


class Spike(NamedTuple):
    """A jump of the loss or of the total norm of gradients.

    Attributes:
        level: What it was before.
        lasts: Whether the next value is still clearly above the level; None if there is none.
    """

    name: str
    step: int
    value: float
    level: float
    lasts: bool | None


class Evidence(NamedTuple):
    """What speaks for a cause.

    Attributes:
        phase: Of the step in which it is seen first.
        is_exclusive: Whether nothing else gives it, if no other link is broken before it.
        is_local: Whether it is about a part of the ranks or micro-steps of a step, and the others are as usual.
    """

    cause: str
    step: int
    phase: int
    says: str
    place: Place
    is_exclusive: bool
    is_local: bool = False


class Link(NamedTuple):
    """A link, looked at.

    Attributes:
        what: Its numbers, such as ``weights``; empty if there is nothing to say about them.
        evidence: None if it is not broken, or not known.
        look: What to record to know it; empty if it is known.
    """

    what: str
    evidence: Evidence | None = None
    look: str = ""


@dataclass
class Around:
    """The rows around a jump.

    Attributes:
        loss: The name of the loss.
        rates: Of each learning rate all recorded steps and the greatest of all ranks.
    """

    facts: Facts
    spike: Spike
    loss: str = "loss"
    rates: dict[str, tuple[Ints, Numbers]] = field(default_factory=dict)
    _windows: dict[str, Window | None] = field(default_factory=dict)

    @cached_property
    def steps(self) -> Ints:
        every = self.facts.axis.steps
        at = int(np.searchsorted(every, self.spike.step))
        steps: Ints = every[max(at - BEFORE, 0) : at + AFTER + 1]
        return steps

    @cached_property
    def at(self) -> int:
        """The index of the jump among ``steps``."""
        return int(np.searchsorted(self.steps, self.spike.step))

    @property
    def past(self) -> Iterator[int]:
        """Indices of the steps in which a cause may be, the earliest first, each with the step right before it recorded."""
        first = max(self.at - LOOK_BACK, 1)
        return (at for at in range(first, self.at + 1) if self.steps[at] == self.steps[at - 1] + 1)

    def has(self, kind: str, *, both: bool = False) -> bool:
        """Whether the step of the jump has rows of a kind; with ``both``, also the step right before it."""
        window, at = self.window(kind), self.at
        if window is None or (both and (at == 0 or self.steps[at] != self.steps[at - 1] + 1)):
            return False
        return all(bool((~np.isnan(window.values[one])).any()) for one in ((at - 1, at) if both else (at,)))

    def window(self, kind: str) -> Window | None:
        """The rows of a kind; None if there are none, or too many."""
        if kind not in self._windows:
            self._windows[kind] = self._read(kind)
        return self._windows[kind]

    def _read(self, kind: str) -> Window | None:
        if kind not in self.facts.kinds or len(self.steps) * len(self.facts.histories[kind].pair_series) > MOST_READ:
            return None
        found = Window(self.steps)
        self.facts.kinds[kind].feed(found, range(int(self.steps[0]), int(self.steps[-1]) + 1))
        return found.filled() if len(found.filled().series) else None

    def names(self, kind: str, window: Window) -> list[str]:
        """The name of each column."""
        names = self.facts.kinds[kind].names
        return [names[one] for one in window.series.tolist()]

    def columns(self, kind: str, window: Window) -> dict[tuple[str, int], int]:
        """The column of each name on each rank."""
        return {key: at for at, key in enumerate(zip(self.names(kind, window), window.rank.tolist(), strict=True))}

    def pair(self, kind: str, other: str) -> tuple[list[tuple[str, int]], Numbers, Numbers] | None:
        """The same tensors on the same ranks in two kinds: name and rank of each column, and the values of both."""
        one, two = self.window(kind), self.window(other)
        if one is None or two is None:
            return None
        keys = [self.columns(kind, one), self.columns(other, two)]
        both = [key for key in keys[0] if key in keys[1]]
        columns = ([known[key] for key in both] for known in keys)
        return both, one.values[:, next(columns)], two.values[:, next(columns)]

    def rank(self, number: int) -> int:
        return self.facts.ranks[number]


# --- Weights: they are what the step before has left.

_SAME: Final = 1e-6
"""Of norms of the same bits; files may round them."""


def weights(around: Around) -> Link:
    """Whether weights changed between two steps."""
    pair, what = around.pair("param_origin", "param_updated"), "weights"
    look = '"param_distribution": true in every step'
    if pair is None:
        return Link(what, look=look)
    columns, begins, left = pair
    with np.errstate(divide="ignore", invalid="ignore"):
        changed = np.abs(np.log(np.maximum(begins[1:], bands.SMALLEST) / np.maximum(left[:-1], bands.SMALLEST)))
    for at in around.past:
        usual = np.fmax.reduce(changed[: at - 1], axis=0, initial=0.0)
        found = np.flatnonzero(changed[at - 1] > _SAME + 10 * usual)
        if len(found) and around.at - at <= SOON:
            return Link(what, _changed_weights(around, at, columns, found, begins[at], left[at - 1]))
    known = around.has("param_origin", both=True) and around.has("param_updated", both=True)
    return Link(what, look="" if known else look)


def _changed_weights(
    around: Around, at: int, columns: Sequence[tuple[str, int]], found: Ints, begins: Numbers, left: Numbers
) -> Evidence:
    by_size = found[np.argsort(-np.abs(np.log(begins[found] / np.maximum(left[found], bands.SMALLEST))), kind="stable")]
    first, step = int(by_size[0]), int(around.steps[at])
    name, rank = columns[first]
    others = len({columns[one][0] for one in found.tolist()}) - 1
    continued = any(one["step"] == step for one in around.facts.told.get("joints", {}).get("listed", ()))
    says = (
        f"the weight {name} changed between steps {step - 1} and {step}"
        f"{', where the run was continued' if continued else ''}: its norm was {left[first]:.4g} and became {begins[first]:.4g}"
        f"{_and_others(others, 'weight')}"
    )
    place = Place(step, around.rank(rank), "param_origin", name)
    return Evidence(WEIGHTS, step, BEGINS, says, place, is_exclusive=True)


def _and_others(count: int, what: str) -> str:
    return f"; {count} other {what}{'s' if count > 1 else ''} changed, too" if count else ""


# --- Moments: they follow from those of the step before and its gradients.

_SHRINKS: Final = {"exp_avg_sq": 0.5, "exp_avg": 1e-3}
"""What a step leaves of a moment at least. The second one only decays; the first may shrink by chance, but not to nothing."""
_GROWS: Final = 1.5
"""By what factor a moment may be greater than itself and the gradient together, which bound it."""
_BOUNDED: Final = ("norm", "absmax")
"""Ops for which these bounds hold."""
_LEAST_IN_CSV: Final = 1e-4
"""Smaller values are rounded to few digits in CSV."""


def moments(around: Around) -> Link:
    """Whether moments were reset, lost, or replaced."""
    what, look = "moments", '"mv_distribution": true in every step'
    known = [kind for kind in _SHRINKS if around.window(kind) is not None and around.facts.kinds[kind].op in _BOUNDED]
    found = [one for kind in known for one in _broken_moments(around, kind)]
    if found:
        return Link(what, min(found, key=lambda one: one.step))
    return Link(what, look="" if any(around.has(kind, both=True) for kind in known) else look)


def _broken_moments(around: Around, kind: str) -> Iterator[Evidence]:
    window = around.window(kind)
    assert window is not None
    gradients = _gradients_of(around, kind, window)
    formats = around.facts.first.get("format", ["csv"])
    least = _LEAST_IN_CSV if formats == ["csv"] else 0.0
    for at in around.past:
        before, now = window.values[at - 1], window.values[at]
        sizable = before > least
        if np.isnan(now).all() and np.isfinite(before).any() and around.at > at:
            continue  # this step has no rows of the kind
        lost = sizable & (now < _SHRINKS[kind] * before)
        with np.errstate(invalid="ignore"):
            grown = (now > _GROWS * (before + gradients[at - 1])) & np.isfinite(now) & (now > least)
        broken = np.flatnonzero(lost | grown)
        if len(broken) and (kind != "exp_avg" or len(broken) > sizable.sum() / 2 or grown.any()):
            yield _moment_evidence(around, at, kind, broken)
            return


def _gradients_of(around: Around, kind: str, window: Window) -> Numbers:
    """The part of gradients that bounds each column; infinite where it is not known."""
    found: Numbers = np.full(window.values.shape, np.inf)
    gradients = around.window("grad_reduced")
    if gradients is None or around.facts.kinds["grad_reduced"].op != around.facts.kinds[kind].op:
        return found
    columns = around.columns("grad_reduced", gradients)
    for key, number in around.columns(kind, window).items():
        if key in columns:
            found[:, number] = gradients.values[:, columns[key]]
    found[np.isnan(found)] = np.inf
    with np.errstate(over="ignore"):
        return np.square(found) if kind == "exp_avg_sq" else found


def _moment_evidence(around: Around, at: int, kind: str, broken: Ints) -> Evidence:
    window = around.window(kind)
    assert window is not None
    before, now = window.values[at - 1], window.values[at]
    with np.errstate(divide="ignore"):
        apart = np.abs(np.log(np.maximum(now[broken], bands.SMALLEST) / np.maximum(before[broken], bands.SMALLEST)))
    first = int(broken[np.argmax(apart)])
    step, name = int(around.steps[at]), around.names(kind, window)[first]
    says = (
        f"the moment {kind} of {name} was {before[first]:.3g} before step {step - 1} and {now[first]:.3g} before step {step}, "
        f"which no gradient gives{_and_others(len(broken) - 1, 'moment')}"
    )
    grown = updates_grew(around, at)
    says += f". Updates were {grown:.3g} times as large" if grown else ""
    return Evidence(
        MOMENTS,
        step,
        BEGINS,
        says,
        Place(step, around.rank(int(window.rank[first])), kind, name),
        is_exclusive=grown is not None and around.spike.lasts is not False,
    )


# --- Learning rates, and the updates that follow from them.

_UPDATES: Final = Limit(5, 1.5)
_RATE_GROWS: Final = 2.0
_BEYOND: Final = 1.5
"""Times all rates before. A rate that returns to what it was is a schedule that begins anew."""
_FEW: Final = 4
"""The first rates of a warm-up grow by large factors."""


def updates_grew(around: Around, at: int) -> float | None:
    """By how much updates were larger than usual from an index to the jump; None if they were not, or are not known."""
    window = around.window("update_ratio")
    if window is None:
        return None
    total = window.together()
    found = bands.bands_of(total.values, 0.05)
    there = found.out(_UPDATES)[at : around.at + 1]
    return float(found.factor[at : around.at + 1][there].max()) if there.any() else None


def rates(around: Around) -> Link:
    """Whether a learning rate jumped beyond all before it; otherwise, whether one jumped at all shortly before."""
    what, look = "learning rates", '"run_numbers": true'
    if not around.rates:
        return Link(what, look=look)
    found = [one for name, (steps, values) in around.rates.items() for one in _jumps(around, name, steps, values)]
    return Link(what, min(found, key=lambda one: (not one.is_exclusive, one.step)) if found else None)


def _jumps(around: Around, name: str, steps: Ints, values: Numbers) -> Iterator[Evidence]:
    last = int(np.searchsorted(steps, around.spike.step))  # its own rate is used after its loss
    for at in range(max(last - LOOK_BACK, _FEW), last):
        if not values[at] > _RATE_GROWS * values[at - 1]:
            continue
        is_new, step = bool(values[at] > _BEYOND * values[:at].max()), int(steps[at])
        if not is_new and around.spike.step - step > SOON:
            continue
        index = int(np.searchsorted(around.steps, step))
        grown = updates_grew(around, index)
        what = name if len(around.rates) > 1 else "the learning rate"
        says = f"{what} rose from {values[at - 1]:.3g} to {values[at]:.3g} in step {step}"
        says += f", and updates were {grown:.3g} times as large" if grown else ""
        exclusive = is_new and grown is not None and around.spike.lasts is not False
        yield Evidence(RATE, step, UPDATE, says, Place(step, None, RUN_KIND, name), exclusive)
        return


# --- Replicas hold the same bits.

_COMPARED: Final = '"replica_check": true and "param_distribution": true, and dp_group'


def replicas(around: Around) -> Link:
    """Whether copies of a weight, moment or gradient differ between ranks."""
    told, what, spike = around.facts.told, "replicas", around.spike
    if len(around.facts.ranks) == 1:
        return Link("")
    first = min(_differing(around), key=lambda one: one.step, default=None)
    if first is not None and first.step < spike.step - LOOK_BACK:
        return Link(what, look=f"replicas that agree: they have differed since step {first.step}")
    if first is not None and first.step <= spike.step:
        return Link(what, first)
    bits = told.get("bits", {"compared": {}})
    compared = any(one for one in bits["compared"].values()) or told["rows"].get("replica", 0)
    return Link(what, look="" if compared else _COMPARED)


def _differing(around: Around) -> Iterator[Evidence]:
    """The first differences of bits; if bits are not known, of values."""
    told = around.facts.told
    first = told.get("bits", {"first": []})["first"]
    for one in first:
        suspects = one.get("changed_on") or one["odd_ranks"]
        yield _difference(around, one["step"], one["kind"], one["name"], suspects[0], who(one))
    for one in told["disagreements"]["listed"] if not first else ():
        says = f"its {one['op']} is {one['value']} on rank {one['rank']} and {one['others_value']} on rank {one['other_rank']}"
        yield _difference(around, one["step"], one["kind"], one["name"], one["rank"], says)


def _difference(around: Around, step: int, kind: str, name: str, rank: int, says: str) -> Evidence:
    begins = kind == "param_origin" or kind.startswith("exp_avg")
    shown = around.facts.shown_name(kind, name)
    text = f"{kind} {shown} differed between replicas in step {step}: {says}"
    place, phase = Place(step, rank, kind, shown), BEGINS if begins else UPDATE
    return Evidence(DEVICE, step, phase, text, place, is_exclusive=kind == "param_origin", is_local=begins)


# --- Numbers that are not finite, and steps that were skipped. They come with another cause, or are all that is known.

_FIRST: Final = {"param_origin": BEGINS, "actv": FORWARD, "actv_grad": BACKWARD, "grad_unreduced": BACKWARD}


def finite(around: Around) -> Link:
    """Where the first value that is not finite is, if the jump is not finite either."""
    what = "other numbers"
    if np.isfinite(around.spike.value):
        return Link("")
    found = [(one.step, kind, one) for kind, of in around.facts.histories.items() if (one := of.first_infinite) is not None]
    rows = [one for one in found if one[1] != RUN_KIND and one[0] <= around.spike.step]
    if not rows:
        return Link(what, look='"wg_distribution": true and "xy_distribution": true')
    step, kind, first = min(rows, key=lambda one: (one[0], _phase_of(one[1])))
    name, rank = around.facts.kinds[kind].names[first.series], around.rank(first.rank)
    says = f"{kind} {name} on rank {rank} was not finite in step {step}, the first of all"
    return Link(what, Evidence(NOT_FINITE, step, _phase_of(kind), says, Place(step, rank, kind, name), is_exclusive=False))


def _phase_of(kind: str) -> int:
    return BEGINS if kind.startswith("exp_avg") and not kind.endswith(LEFT_BY_STEP) else _FIRST.get(kind, UPDATE)


def steps(around: Around) -> Link:
    """Whether the optimizer skipped steps right before the jump."""
    spike = around.spike.step
    skipped = sorted(step for step in skipped_steps(around.facts) if spike - SOON <= step < spike)
    if not skipped:
        return Link("")
    says = f"the optimizer skipped {len(skipped)} of the {SOON} steps before it, from step {skipped[0]} on"
    return Link("steps", Evidence(SKIPPED, skipped[0], UPDATE, says, Place(skipped[0]), is_exclusive=False))


def skipped_steps(facts: Facts) -> set[int]:
    """The steps that the optimizer skipped, as after an overflow under a loss scale."""
    ranges = facts.told["skipped_steps"]["ranges"]
    return {step for first, last, interval in ranges for step in range(first, last + 1, interval)}


LINKS: Final[tuple[Callable[[Around], Link], ...]] = (weights, moments, rates, replicas, finite, steps)
"""What a step has from the steps before it. Its batch is the other thing that it has."""
