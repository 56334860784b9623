"""What may make a loss jump, each looked at in the rows around it: what a step is computed from, link by link.

A link is broken if its numbers do not follow from what they are computed from: weights that are not what the step before had
left, moments that no gradient gives, a learning rate beyond all before it, replicas that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from monitor.anomalies.odd_copies import who
from monitor.report import bands
from monitor.report.bands import Ints, Limit, Numbers, Window
from monitor.report.facts import Facts
from monitor.report.findings import Place
from monitor.report.replicas import found_while_running
from monitor.series import GRAD_NORM, LEFT_BY_STEP, RUN_KIND

BEFORE: Final = bands.LEVEL + bands.SPREAD
"""Steps before a jump whose rows are read."""
AFTER: Final = 3
"""Steps after it."""
MOST_READ: Final = 5_000_000
"""Values of a kind around a jump. A kind with more counts as not recorded."""

LOOK_BACK: Final = 8
"""Steps before a jump in which a broken link may have caused it."""
SOON: Final = 2
"""Steps within which a broken link usually shows. One before that is a cause only beside others."""
_DRIFT: Final = Limit(4, 1.05)
_NARROWEST_DRIFT: Final = 0.01

WEIGHTS, MOMENTS, RATE, DEVICE = "weights", "moments", "learning rate", "device"
BATCH, RANK_DATA, NOT_FINITE, SKIPPED = "batch", "rank data", "not finite", "skipped steps"

BEGINS, FORWARD, BACKWARD, UPDATE = range(4)
"""The phases of a step, in order."""


class Spike(NamedTuple):
    """A jump of the loss or of the total norm of gradients.

    Attributes:
        level: What it was before.
        lasts: Whether the next value is still clearly above the level; None if there is none.
        beyond: How far it has left its band: 1 at the limit.
    """

    name: str
    step: int
    value: float
    level: float
    lasts: bool | None
    beyond: float = math.inf


class Evidence(NamedTuple):
    """What speaks for a cause.

    Attributes:
        phase: Of the step in which it is seen first.
        is_exclusive: Whether nothing else gives it, if no other link is broken before it.
        is_local: Whether it is about a part of the ranks or micro-steps of a step, and the others are as usual.
        suspects: Ranks that it may be about.
    """

    cause: str
    step: int
    phase: int
    says: str
    place: Place
    is_exclusive: bool
    is_local: bool = False
    suspects: tuple[int, ...] = ()


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
        curves: Of the losses and norms that are judged all recorded steps and the mean of all ranks.
    """

    facts: Facts
    spike: Spike
    loss: str = "loss"
    rates: dict[str, tuple[Ints, Numbers]] = field(default_factory=dict)
    curves: dict[str, tuple[Ints, Numbers]] = field(default_factory=dict)
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

    def sizes(self, kind: str, series: int) -> Window | None:
        """The numbers of elements of a series; None if they are not known."""
        reader = self.facts.kinds[kind]
        if "count" not in reader.columns:
            return None
        found, steps = Window(self.steps), range(int(self.steps[0]), int(self.steps[-1]) + 1)
        replace(reader, op="count").feed(found, steps, [reader.series[series][1]])
        found = found.filled()
        return found.of(np.flatnonzero(found.series == series).tolist()) if series in found.series else None

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

    def is_soon(self, step: int) -> bool:
        return self.spike.step - step <= SOON

    def follows(self, evidence: Evidence) -> bool:
        """Whether the jump is in the first step that a cause acts on, or a loss or norm has drifted from there to the jump."""
        acts = evidence.step + (evidence.cause not in (WEIGHTS, DEVICE))  # updates act on the next step
        return self.spike.step <= acts or any(self._drifts(acts, *one) for one in self.curves.values())

    def _drifts(self, acts: int, steps: Ints, values: Numbers) -> bool:
        """Whether the value right before the jump is above the band of those before a step."""
        first, last = np.searchsorted(steps, (acts, self.spike.step)).tolist()
        if first == last or steps[last - 1] != self.spike.step - 1:
            return False
        course = np.append(values[max(first - BEFORE, 0) : first], values[last - 1])
        return bool(bands.bands_of(course[:, None], _NARROWEST_DRIFT).out(_DRIFT)[-1, 0])


# --- Weights: they are what the step before has left.

_SAME: Final = 1e-6
"""Relative difference of norms of the same bits: files may round them."""
_SIZABLE: Final = 0.01
"""Change of the logarithm of a norm that a jump may come from. It must also be ``_ABOVE`` the changes of other steps."""
_ABOVE: Final = 10
_USUAL: Final = 0.75
"""The quantile of earlier changes that is usual: a weight that was wrong once before may be wrong again."""


class Between(NamedTuple):
    """How weights changed between two steps. Arrays have the shape ``(steps, columns)``.

    Attributes:
        columns: Name and rank of each.
        begins, left: What steps began with, and what they left.
        changed: The change of the logarithm between a step and the next one, one step less.
        updated: That of an update.
    """

    columns: Sequence[tuple[str, int]]
    begins: Numbers
    left: Numbers
    changed: Numbers
    updated: Numbers


def weights(around: Around) -> Link:
    """Whether weights changed between two steps."""
    pair, what = around.pair("param_origin", "param_updated"), "weights"
    look = '"param_distribution": true in every step'
    if pair is None:
        return Link(what, look=look)
    columns, begins, left = pair
    between = Between(columns, begins, left, _apart(begins[1:], left[:-1]), _apart(left, begins))
    found = [one for at in around.past if (one := _changed_weights(around, at, between)) is not None]
    found += _changed_bits(around, {one.step for one in found})
    if found:
        return Link(what, min(found, key=lambda one: (not one.is_exclusive, not around.is_soon(one.step), one.step)))
    known = around.has("param_origin", both=True) and around.has("param_updated", both=True)
    return Link(_of_copies(around, what, set(columns)), look="" if known else look)


def _apart(one: Numbers, other: Numbers) -> Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        apart: Numbers = np.abs(np.log(np.maximum(one, bands.SMALLEST) / np.maximum(other, bands.SMALLEST)))
    return apart


def _changed_weights(around: Around, at: int, between: Between) -> Evidence | None:
    changed, before = between.changed[at - 1], between.changed[: at - 1]
    found = np.flatnonzero(changed > _SAME + _ABOVE * _usual(before))
    if not len(found):
        return None
    first, step = int(found[np.argmax(changed[found])]), int(around.steps[at])
    name, rank = between.columns[first]
    others = len({between.columns[one][0] for one in found.tolist()}) - 1
    continued = any(one["step"] == step for one in around.facts.told.get("joints", {}).get("listed", ()))
    says = (
        f"the weight {name} changed between steps {step - 1} and {step}{', where the run was continued' if continued else ''}: "
        f"its norm was {_became(between.left[at - 1, first], between.begins[at, first])}{_and_others(others, 'weight')}"
    )
    most = max(np.fmax.reduce(before[:, first], initial=0.0), float(_usual(between.updated[:at, [first]])[0]))
    exclusive = bool(around.is_soon(step) and changed[first] > max(_SIZABLE, _ABOVE * most))
    return Evidence(WEIGHTS, step, BEGINS, says, Place(step, around.rank(rank), "param_origin", name), exclusive)


def _changed_bits(around: Around, steps: Collection[int]) -> Iterator[Evidence]:
    """What ranks found from bits, in other steps: a weight may change and keep its norm. By how much is not known."""
    past = {int(around.steps[at]) for at in around.past}
    for one in found_while_running(around.facts, "between steps"):
        kind, step, rank = one["kind"], one["step"], one["rank"]
        if kind == "param_origin" and one["names"] and step in past - set(steps):
            name = around.facts.shown_name(kind, one["names"][0])
            says = (
                f"the bits of the weight {name} changed between steps {step - 1} and {step} on rank {rank}, "
                f"and its norm stayed{_and_others(len(one['names']) - 1, 'weight')}"
            )
            yield Evidence(WEIGHTS, step, BEGINS, says, Place(step, rank, kind, name), is_exclusive=False)


def _usual(changes: Numbers) -> Numbers:
    """The usual change of each column; 0 where none is known."""
    padded = np.vstack([changes, np.where(np.isfinite(changes).any(axis=0), np.nan, 0.0)])
    usual: Numbers = np.nanquantile(np.where(np.isfinite(padded), padded, np.nan), _USUAL, axis=0)
    return usual


def sized(number: float, unit: str = "", digits: int = 3) -> str:
    """The number and its unit, or words. A window does not tell NaN from infinity."""
    return f"{number:.{digits}g}{unit}" if np.isfinite(number) else "NaN or infinite"


def _became(before: float, after: float) -> str:
    """Both numbers, with digits enough to tell them apart."""
    if not np.isfinite([before, after]).all():
        return " and became ".join(sized(one, digits=4) for one in (before, after))
    pairs = ((f"{before:.{digits}g}", f"{after:.{digits}g}") for digits in range(4, 18))
    return " and became ".join(next((one for one in pairs if one[0] != one[1]), (str(before), str(after))))


def _of_copies(around: Around, what: str, known: set[tuple[str, int]]) -> str:
    """Words for the case that only one of several copies, which may differ, has rows: that copy was as usual."""
    local = around.window("grad_unreduced")
    if local is None:
        lacking = len({rank for _, rank in known}) < len(around.facts.ranks)
    else:
        names = {name for name, _ in known}
        lacking = any(key[0] in names and key not in known for key in around.columns("grad_unreduced", local))
    agree = _are_compared(around) and not any(_differing(around))
    return f"one copy of the {what}" if lacking and not agree else what


def _and_others(count: int, what: str, did: str = "changed") -> str:
    return f"; {count} other {what}{'s' if count > 1 else ''} {did}, too" if count else ""


# --- Moments: they follow from those of the step before and its gradients.

_SHRINKS: Final = {"exp_avg_sq": 0.5, "exp_avg": 1e-3}
"""What a step leaves of a moment at least. The second one only decays; the first may shrink by chance, but not to nothing."""
_GROWS: Final = 1.5
"""By what factor a moment may be greater than itself and the gradient together, which bound it."""
_MANY, _ALIKE = 3, 1.5
"""Tensors whose moments grew by multiples of their weights that differ by this factor at most: by a weight decay."""
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
    recorded = [kind for kind in known if around.has(kind, both=True)]
    if not recorded:
        return Link(what, look=look)
    window = around.window(recorded[0])
    assert window is not None
    return Link(_of_copies(around, what, set(around.columns(recorded[0], window))))


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
        if grown.any() and _is_decay(around, at):
            grown[:] = False
        broken = np.flatnonzero(lost | grown)
        if len(broken) and (kind != "exp_avg" or len(broken) > sizable.sum() / 2 or grown.any()):
            yield _moment_evidence(around, at, kind, broken)
            return


def _is_decay(around: Around, at: int) -> bool:
    """Whether first moments grew in proportion to their weights, as by a weight decay that is added to gradients."""
    pair = around.pair("exp_avg", "param_origin")
    if pair is None:
        return False
    _, moment, weight = pair
    before, now = moment[at - 1], moment[at]
    with np.errstate(divide="ignore", invalid="ignore"):
        added = ((now - before) / weight[at - 1])[now > _GROWS * before]
    return len(added) >= _MANY and bool(added.max() <= _ALIKE * added.min())


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
        f"the moment {kind} of {name} was {sized(before[first])} before step {step - 1} and {sized(now[first])} "
        f"before step {step}, which no gradient gives{_and_others(len(broken) - 1, 'moment')}"
    )
    grown = updates_grew(around, at)
    says += f". Updates were {sized(grown, ' times as large')}" if grown else ""
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
_SURE: Final = 5.0
"""Times all rates before. New stages of a schedule raise rates by factors of 2 or 3, so these are not certain as a cause."""
_FEW: Final = 4
"""The first rates of a warm-up grow by large factors."""


def updates_grew(around: Around, at: int, end: int | None = None) -> float | None:
    """The factor by which updates grew from an index to the jump, or to before ``end``; None if they did not, or if unknown."""
    window = around.window("update_ratio")
    if window is None:
        return None
    total = window.together()
    found = bands.bands_of(total.values, 0.05)
    until = slice(at, around.at + 1 if end is None else end)
    there = found.out(_UPDATES)[until]
    return float(found.factor[until][there].max()) if there.any() else None


def rates(around: Around) -> Link:
    """Whether a learning rate jumped beyond all before it; otherwise, whether one jumped at all shortly before."""
    what, look = "learning rates", '"run_numbers": true'
    if not around.rates:
        return Link(what, look=look)
    found = [one for name, (steps, values) in around.rates.items() for one in _jumps(around, name, steps, values)]
    return Link(what, min(found, key=lambda one: (not one.is_exclusive, one.step)) if found else None)


def _jumps(around: Around, name: str, steps: Ints, values: Numbers) -> Iterator[Evidence]:
    last = int(np.searchsorted(steps, around.spike.step))  # its own rate is used after its loss
    begin = max(last - LOOK_BACK, _FEW)
    for at in range(begin, last):
        low = float(values[max(at - LOOK_BACK, 0) : at].min())
        if not values[at] > max(_RATE_GROWS * low, values[at - 1]):
            continue
        most, step = float(values[:begin].max()), int(steps[at])
        is_new = bool(values[at] > _BEYOND * most)
        if not is_new and not around.is_soon(step):
            continue
        grown = updates_grew(around, int(np.searchsorted(around.steps, step)))
        ranks = _of_ranks(around, name, step, (low + float(values[at])) / 2)
        what = (name if len(around.rates) > 1 else "the learning rate") + (
            f" of rank {', '.join(map(str, ranks))}" if ranks else ""
        )
        high = at + int(np.argmax(values[at:last]))
        when = f"step {step}" if high == at else f"steps {step} to {steps[high]}"
        says = f"{what} rose from {low:.3g} to {values[high]:.3g} in {when}"
        says += f", and updates were {sized(grown, ' times as large')}" if grown else ""
        exclusive = bool(values[high] > _SURE * most) and grown is not None and around.spike.lasts is not False
        place = Place(step, ranks[0] if ranks else None, RUN_KIND, name)
        yield Evidence(RATE, step, UPDATE, says, place, exclusive, is_local=bool(ranks))
        return


def _of_ranks(around: Around, name: str, step: int, most: float) -> list[int]:
    """The ranks with a rate above ``most``; none if all of them have one."""
    window = around.window(RUN_KIND)
    if window is None:
        return []
    rates = window.values[np.searchsorted(window.steps, step)]
    there = {rank: rates[at] for (one, rank), at in around.columns(RUN_KIND, window).items() if one == name}
    above = [around.rank(rank) for rank, rate in there.items() if rate > most]
    return above if any(rate <= most for rate in there.values()) else []


# --- Replicas hold the same bits.

_COMPARED: Final = '"replica_check": true and "param_distribution": true, and dp_group'


def replicas(around: Around) -> Link:
    """Whether copies of a weight, moment or gradient differ between ranks."""
    what, spike = "replicas", around.spike
    if len(around.facts.ranks) == 1:
        return Link("")
    first = min(_differing(around), key=lambda one: one.step, default=None)
    if first is not None and first.step < spike.step - LOOK_BACK:
        return Link(what, look=f"replicas that agree: they have differed since step {first.step}")
    if first is not None and first.step <= spike.step:
        return Link(what, first)
    return Link(what, look="" if _are_compared(around) else _COMPARED)


def _are_compared(around: Around) -> bool:
    told = around.facts.told
    bits = told.get("bits", {"compared": {}})
    return any(one for one in bits["compared"].values()) or bool(told["rows"].get("replica", 0))


def _differing(around: Around) -> Iterator[Evidence]:
    """The first differences of bits; if bits are not known, of values."""
    told = around.facts.told
    first = told.get("bits", {"first": []})["first"]
    for one in first:
        suspects = one.get("changed_on") or one["odd_ranks"]
        yield _difference(around, one["step"], one["kind"], one["name"], suspects, who(one))
    for one in told["disagreements"]["listed"] if not first else ():
        says = f"its {one['op']} is {one['value']} on rank {one['rank']} and {one['others_value']} on rank {one['other_rank']}"
        yield _difference(around, one["step"], one["kind"], one["name"], [one["rank"], one["other_rank"]], says)


def _difference(around: Around, step: int, kind: str, name: str, suspects: Sequence[int], says: str) -> Evidence:
    begins = kind == "param_origin" or kind.startswith("exp_avg")
    shown = around.facts.shown_name(kind, name)
    others = {one["name"] for one in around.facts.told.get("bits", {"first": []})["first"]} - {name}
    text = f"{kind} {shown} differed between replicas in step {step}{_and_others(len(others), 'tensor', 'differed')}: {says}"
    place, phase = Place(step, suspects[0], kind, shown), BEGINS if begins else UPDATE
    apart = begins or (step < around.spike.step and around.is_soon(step))  # the jump's step began with other copies
    return Evidence(DEVICE, step, phase, text, place, kind == "param_origin", apart, tuple(suspects))


# --- Numbers that are not finite, and steps that were skipped. They come with another cause, or are all that is known.

_FIRST: Final = {"param_origin": BEGINS, "actv": FORWARD, "actv_grad": BACKWARD, "grad_unreduced": BACKWARD}


def finite(around: Around) -> Link:
    """Where the first value that is not finite is, if the jump is not finite either."""
    what = "other numbers"
    if np.isfinite(around.spike.value):
        return Link("")
    found = [(one.step, kind, one) for kind, of in around.facts.histories.items() if (one := of.first_infinite) is not None]
    is_norm = around.spike.name == GRAD_NORM
    before = around.spike.step, UPDATE if is_norm else FORWARD  # a loss comes before the backward
    rows = [one for one in found if one[1] != RUN_KIND and (one[0], _phase_of(one[1])) <= before]
    if not rows and not is_norm and around.has("actv"):
        return Link("")
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
