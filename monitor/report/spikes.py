"""Why the loss or the total norm of gradients jumped: the check of the report that looks at each link of a step.

``because`` is said only if the evidence is exclusive and every other link is known and was as usual. Otherwise it is
``probably``, or that what was recorded cannot tell; then the sentence says what to record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from monitor.report import bands, spike_links
from monitor.report.bands import Ints, Limit, Means, Numbers
from monitor.report.facts import TOTAL_KIND, Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place
from monitor.report.spike_batches import activations, batches, lone_rank, smaller
from monitor.report.spike_links import Around, Evidence, Link, Spike
from monitor.series import GRAD_NORM, RUN_KIND

SPIKES: Final = "Spikes"
"""The name of the check."""
LOSS: Final = Limit(7, 1.1)
NORM: Final = Limit(8, 5)
"""Our measurement (``bench/spikes.py``): without a fault, losses stay below 6 deviations, and norms below 7."""
LASTING: Final = Limit(5, 1.5)
"""The limit of two losses in a row. Our measurement: without a fault, two in a row stay below 4 deviations."""
_NARROWEST: Final = {GRAD_NORM: 0.05}
_NARROWEST_OF_LOSS: Final = 0.01
_WARM_UP: Final = 12
"""Values before the first that is judged beyond those that a band needs: at the beginning all numbers change fast."""
_LEAST: Final = bands.LEVEL + bands.ENOUGH + _WARM_UP
"""Values of a number that is judged: more than these."""
_MOST_NAMED: Final = 4
"""Further jumps whose steps are named."""
_LASTS: Final = 0.3
"""Share of a jump, in logarithms, that is left in the next step if its cause lasts."""
_ZERO: Final = 1e-30
"""A number that was zero has no band: a part of a loss that begins to count, for example."""
_OF_DATA: Final = (spike_links.BATCH, spike_links.RANK_DATA)
_FEWEST_OF_A_CYCLE: Final = 4
"""Jumps at the same distance that make a cycle."""
_SHARE_OF_A_CYCLE: Final = 0.6
"""The part of the values that are due which must be jumps."""
_HIGH: Final = 2.0
"""Deviations of those before the first jump."""
_ALIKE: Final = 1.5
"""A factor within which the values of a cycle are alike."""
_MOST_TRIED: Final = 16
"""The first jumps, among which cycles are looked for."""
_IF_PLANNED: Final = "That is right if these steps have other data."
MOST_EXPLAINED: Final = 3
"""Jumps of which each is explained. They are separate if ``LEVEL`` steps between them are in their bands."""

Certainty = Literal["because", "probably", "cannot tell"]


class Explained(NamedTuple):
    """A jump and its cause, as far as it is known."""

    spike: Spike
    certainty: Certainty
    cause: str
    says: str
    place: Place
    look: tuple[str, ...]


def spikes(facts: Facts) -> CheckFinding:
    """Whether the loss or the total norm left its band, and why."""
    named = _numbers(facts)
    signed = sorted(name for name, (_, values) in named.items() if _is_signed(values))
    skipped = np.array(sorted(spike_links.skipped_steps(facts)), np.int64)
    early = sorted(name for name, one in named.items() if name not in signed and _is_lost_early(*one, skipped))
    judged = {name: one for name, one in named.items() if name not in (*signed, *early) and len(one[0]) > _LEAST}
    without = f" {' and '.join(signed)} had values below zero, which have no logarithm: not looked at." if signed else ""
    without += f" {' and '.join(early)} had values that are not finite before there was a band: not looked at." if early else ""
    if not judged:
        return CheckFinding(NOT_LOOKED_AT, without.strip() or _too_few(named))
    first_loss = next((name for name in named if name != GRAD_NORM), "")
    every, cycles = list[Spike](), list[str]()
    for name, each in judged.items():
        out = [*jumps(name, *each, skipped)]
        for cycle in cycles_of(*each, out):
            if explain(Around(facts, cycle.jumps[0], first_loss, facts.rates, judged)).cause in ("", *_OF_DATA):
                out = [one for one in out if one not in cycle.jumps]
                cycles.append(cycle.said)
        every += out
    found, small = _separate(facts, every)
    cyclic = f"{' '.join(cycles)} {_IF_PLANNED}" if cycles else ""
    if not found:
        apart = f", but for {_those_of_small_batches(small)}" if small else ""
        says = f"{' and '.join(sorted(judged))} stayed in the band of the values before{apart}.{without} {cyclic}".rstrip()
        return CheckFinding(GOOD, says, then=cyclic)
    explained = [explain(Around(facts, one, first_loss, facts.rates, judged)) for one in found[:MOST_EXPLAINED]]
    first = explained[0]
    more = f" {_more(found[1:])}" if len(found) > 1 else ""
    listed = tuple(map(_for_programs, explained))
    return CheckFinding(BAD, f"{first.says}{more} {cyclic}".rstrip(), first.place, _then(first), listed)


def _those_of_small_batches(count: int) -> str:
    values = "a value" if count == 1 else f"{count} values"
    return f"{values} of smaller batches, which may be as far from it"


def _more(jumps: Sequence[Spike]) -> str:
    shown = [str(one.step) for one in jumps[:_MOST_NAMED]]
    if len(jumps) == 1:
        return f"Another jump began in step {shown[0]}."
    steps = f"{', '.join(shown)} and {len(jumps) - len(shown)} more" if len(jumps) > len(shown) else _listed(shown)
    return f"More jumps began in steps {steps}."


def _too_few(names: Collection[str]) -> str:
    if set(names) <= {GRAD_NORM}:
        return "No loss and no total norm has enough values. Pass the loss to log(loss=...)."
    return f"{' and '.join(sorted(names))} had no more than {_LEAST} values."


def _is_signed(values: Numbers) -> bool:
    return bool((values[np.isfinite(values)] < 0).any())


def _is_lost_early(steps: Ints, values: Numbers, skipped: Ints) -> bool:
    """Whether a value is not finite among the first, which are not judged. What follows has no band."""
    lost = ~np.isfinite(values) & ~np.isin(steps, skipped)
    return bool(lost[: bands.LEVEL + _WARM_UP].any())


def _is_judged(name: str) -> bool:
    return name == GRAD_NORM or is_loss(name)


def is_loss(name: str) -> bool:
    """Whether a number that the loop logs is a loss, and no scale of it."""
    return "loss" in name.lower() and "scale" not in name.lower()


# --- Jumps.


def _numbers(facts: Facts) -> dict[str, tuple[Ints, Numbers]]:
    """For each judged loss and norm, all recorded steps, and the means of all ranks."""
    found: dict[str, tuple[Ints, Numbers]] = {}
    rows = facts.kinds.get(RUN_KIND)
    if rows is not None and (wanted := list(filter(_is_judged, rows.names))):
        means = Means(facts.axis.steps)
        rows.feed(means, None, wanted)
        found |= {name: means.of(rows.numbers[name])[:2] for name in wanted}
    if facts.totals and GRAD_NORM not in found:
        found[GRAD_NORM] = (np.concatenate([one[0] for one in facts.totals]), np.concatenate([one[1] for one in facts.totals]))
    return found


def jumps(name: str, steps: Ints, values: Numbers, skipped: Ints) -> Iterator[Spike]:
    """The values above their band.

    Args:
        skipped: Steps that the optimizer skipped. There, a number that is not finite only says that the loss scale was large.
    """
    if not len(steps) or _is_signed(values):
        return  # a number that may be negative has no logarithm
    numbers = np.where(np.isfinite(values), values, np.inf)
    of = bands.bands_of(numbers[:, None], _NARROWEST.get(name, _NARROWEST_OF_LOSS))
    if name == GRAD_NORM:
        out, beyond = of.out(NORM)[:, 0], of.factor[:, 0] / NORM.factor
    else:
        out, beyond = of.out(LOSS)[:, 0], of.deviations[:, 0] / LOSS.deviations
        high = of.out(LASTING)[:, 0]
        lasting = high & np.append(high[1:], False)
        out, beyond = out | lasting, np.where(lasting, of.deviations[:, 0] / LASTING.deviations, beyond)
    out[: bands.LEVEL + _WARM_UP] = False
    out &= (np.isfinite(values) | ~np.isin(steps, skipped)) & (of.level[:, 0] > _ZERO)
    for at in np.flatnonzero(out).tolist():
        level, next_one = float(of.level[at, 0]), numbers[at + 1 : at + 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            lasts = bool(np.log(next_one[0] / level) > _LASTS * np.log(numbers[at] / level)) if len(next_one) else None
        yield Spike(name, int(steps[at]), float(values[at]), level, lasts, float(beyond[at]))


def _separate(facts: Facts, found: Sequence[Spike]) -> tuple[list[Spike], int]:
    """The first jump of each time of trouble, of the loss if both jump in the same step, and how many are left out because the
    batch was so small. Only jumps that would be the first are looked at for that: the size of a batch is read from files.
    """
    ordered = sorted(found, key=lambda one: (one.step, one.name == GRAD_NORM))
    kept: list[Spike] = []
    last, small = -1, 0
    for one in ordered:
        if not kept or one.step > last + bands.LEVEL:
            if one.beyond < np.sqrt(smaller(Around(facts, one))):
                small += 1
                continue
            kept.append(one)
        last = max(last, one.step)
    return kept, small


class Cycle(NamedTuple):
    """Jumps of a number that come back at the same distance, in recorded steps."""

    jumps: Sequence[Spike]
    distance: int

    @property
    def said(self) -> str:
        one = self.jumps[0]
        times = np.median([jump.value / jump.level for jump in self.jumps])
        since = f"every {self.distance} recorded steps since step {one.step}"
        return f"{_called(one)} is about {times:.2g} times as high {since}."


def cycles_of(steps: Ints, values: Numbers, found: Sequence[Spike]) -> Iterator[Cycle]:
    """The jumps that come back at the same distance, such as those of a task whose turn it is. They have done so since the
    first value that is judged: those before the first jump were high, too. A jump that is far above the others is none, nor is
    a value that is not finite.
    """
    high = bands.bands_of(values[:, None], _NARROWEST_OF_LOSS).deviations[:, 0] >= _HIGH
    first, finite = bands.LEVEL + _WARM_UP, [one for one in found if np.isfinite(one.value)]
    at = {int(np.searchsorted(steps, one.step)): one for one in finite}
    early = sorted(at)[:_MOST_TRIED]
    for distance in sorted({later - one for one in early for later in early if later - one > 1}):
        for phase in sorted({one % distance for one in early}):
            due = range(first + (phase - first) % distance, len(steps), distance)
            fewest = max(_FEWEST_OF_A_CYCLE, _SHARE_OF_A_CYCLE * len(due))
            out = [one for one in due if one in at] if len(at) >= fewest else []
            if len(out) < fewest or not high[due.start : out[0] : distance].all():
                continue
            cycle = Cycle(_alike([at[one] for one in out]), distance)
            at = {place: one for place, one in at.items() if one not in cycle.jumps}
            yield cycle


def _alike(found: Sequence[Spike]) -> list[Spike]:
    """Those whose values are about the same, or at most twice as far from their levels as the others in logarithms: levels
    fall while the data that makes jumps stays as hard.
    """
    values = np.array([one.value for one in found])
    heights = np.log(values / [one.level for one in found])
    alike = (values <= _ALIKE * np.median(values)) | (heights <= 2 * np.median(heights))
    return [one for one, is_alike in zip(found, alike.tolist(), strict=True) if is_alike]


# --- The cause of a jump.


def explain(around: Around) -> Explained:
    """Look at every link, and join what is known."""
    looked = [*(look(around) for look in spike_links.LINKS), batches(around), activations(around)]
    links = [one._replace(evidence=weighed(around, one.evidence)) for one in looked]
    found = sorted((one.evidence for one in links if one.evidence is not None), key=lambda one: _order(around, one))
    unknown = [one for one in links if one.look]
    chosen, clue = _told(_chosen(found), unknown, around.spike)
    if chosen is not None and chosen.cause not in _OF_DATA:
        unknown = [one for one in unknown if one.what != "activations"]  # they only tell data and device apart
    start = _says(around)
    if chosen is None:
        says = f"{start}. {_cannot_tell(links)}{clue}{_larger_updates(around)}"
        return Explained(around.spike, "cannot tell", "", says, _place(around), _looks(unknown))
    others = [one for one in links if one.evidence is not chosen]
    rivals = [one for one in others if _is_rival(around, one.evidence, chosen)]
    is_certain = chosen.is_exclusive and not unknown and not rivals
    usual = _listed([one.what for one in others if one.what and not one.look and one.evidence is None])
    word: Certainty = "because" if is_certain else "probably"
    joined = f", because {chosen.says}" if is_certain else f", probably because {chosen.says}"
    says = f"{start}{joined}. {usual.capitalize()} were as usual before." if usual else f"{start}{joined}."
    if unknown and not is_certain:
        says += f" Not known: {_listed([one.what for one in unknown])}."
    return Explained(around.spike, word, chosen.cause, says, chosen.place, _looks(unknown))


def weighed(around: Around, own: Evidence | None) -> Evidence | None:
    """Evidence, exclusive only if the jump follows from it. Of replicas, the rank that differs must stand out alone, too."""
    if own is None or not own.is_exclusive or own.cause in _OF_DATA:
        return own
    follows = around.follows(own)
    if own.cause != spike_links.DEVICE:
        return own._replace(is_exclusive=follows)
    rank = lone_rank(around)
    if rank is None or rank not in own.suspects:
        return own._replace(is_exclusive=False, is_local=False)
    return own._replace(is_exclusive=follows and around.is_soon(own.step), place=own.place._replace(rank=rank))


def _order(around: Around, own: Evidence) -> tuple[bool, int, int]:
    """What broke first comes first, and last what broke long before the jump and did not show."""
    is_remote = not own.is_local and not around.is_soon(own.step) and not around.follows(own)
    return is_remote, own.step, own.phase


def _chosen(found: Sequence[Evidence]) -> Evidence | None:
    """The cause: what is broken first, of what nothing else gives. If a rank or a micro-step stands out alone, the cause is not
    one that all have, unless all that stands out are numbers of its batch. These may be large by chance.
    """
    local = [one for one in found if one.is_local]
    of = [local] if any(one.cause not in _OF_DATA for one in local) else [local, found]
    sure = [one for some in of for one in some if one.is_exclusive]
    return next(iter(sure or local or found), None)


def _told(chosen: Evidence | None, unknown: Sequence[Link], spike: Spike) -> tuple[Evidence | None, str]:
    """The cause, unless it cannot be told from others that are not known; then what is known of it."""
    if chosen is None or chosen.is_exclusive or chosen.cause not in _OF_DATA:
        return chosen, ""
    if chosen.cause == spike_links.RANK_DATA and any(one.what == "replicas" for one in unknown):
        return None, f" From step {chosen.step} on rank {chosen.place.rank} stands out alone: its data, or its device."
    shared = [one for one in unknown if one.what in ("weights", "moments", "learning rates")]
    if shared and not chosen.is_local:  # what every rank and micro-step shows may come from what they share
        return None, " All local gradients or inputs of the step stand out alike."
    if chosen.cause == spike_links.BATCH and not chosen.is_local and spike.lasts:
        return (
            None,
            " The next batches stand out, too: "
            "the data of all ranks, the code, a buffer or the loss function may have changed.",
        )
    return chosen, ""


def _is_rival(around: Around, own: Evidence | None, chosen: Evidence) -> bool:
    """Whether other evidence is as early, or not explained by the cause. Replicas differ if a weight of one rank changes.

    Nothing else explains a weight that changed between steps, and no shared cause a rank or micro-step that stands out alone. A
    batch that stands out is explained only by a cause that is soon before it.
    """
    if own is None or (chosen.cause == spike_links.DEVICE and own.cause == spike_links.WEIGHTS and own.step == chosen.step):
        return False
    if own.cause == spike_links.WEIGHTS or own.is_local > chosen.is_local:
        return True
    late = own.cause in _OF_DATA and not around.is_soon(chosen.step)
    return own.is_exclusive or late or (own.step, own.phase) <= (chosen.step, chosen.phase)


def _says(around: Around) -> str:
    spike = around.spike
    return f"{_called(spike)} was {spike.value:.4g} in step {spike.step}, {spike.level:.4g} before"


def _called(one: Spike) -> str:
    return {GRAD_NORM: "The total gradient norm", "loss": "The loss"}.get(one.name, f"The number {one.name}")


def _cannot_tell(links: Sequence[Link]) -> str:
    unknown = [one for one in links if one.look]
    known = _listed([one.what for one in links if one.what and not one.look and one.evidence is None])
    usual = f" {known.capitalize()} were as usual." if known else ""
    if not unknown:
        return f"What was recorded cannot tell why.{usual}"
    return f"What was recorded cannot tell why: it lacks {_listed([one.what for one in unknown])}.{usual}"


def _larger_updates(around: Around) -> str:
    """In which step right before the jump updates were larger than usual; empty if they were not."""
    for at in range(max(around.at - spike_links.SOON, 0), around.at):
        if (grown := spike_links.updates_grew(around, at, at + 1)) is not None:
            return f" Updates in step {around.steps[at]} were {spike_links.sized(grown, ' times as large as usual')}."
    return ""


def _looks(unknown: Sequence[Link]) -> tuple[str, ...]:
    return tuple(one.look for one in unknown)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _place(around: Around) -> Place:
    kind = RUN_KIND if RUN_KIND in around.facts.kinds else TOTAL_KIND
    return Place(around.spike.step, None, kind, around.spike.name)


_THEN: Final = {
    spike_links.WEIGHTS: "Look at what writes to weights between steps: a loaded checkpoint, a broadcast, memory.",
    spike_links.MOMENTS: "Look at what the optimizer's state was loaded from, and at code that resets it.",
    spike_links.RATE: "Look at the schedule of the learning rate.",
    spike_links.BATCH: "Look at this batch. To continue, resume from the checkpoint before it and skip it.",
    spike_links.RANK_DATA: "Look at what this rank reads: its files, its sampler, its preprocessing.",
    spike_links.DEVICE: "Suspect the device of this rank, or what wrote to its weights, such as a checkpoint that it alone "
    "loaded: run its diagnostics, and the step again on another device.",
}


_ELSE: Final = "Look at the labels of this step and at the loss function: no row shows them."
"""If everything that may tell was recorded, and does not tell."""


def _then(one: Explained) -> str:
    if not one.cause and not one.look:
        return _ELSE
    record = f"To know more, record {'; '.join(one.look)}." if one.look and one.certainty != "because" else ""
    return " ".join(filter(None, [_THEN.get(one.cause, ""), record]))


def _for_programs(one: Explained) -> dict[str, Any]:
    spike = one.spike
    return {
        "number": spike.name,
        "step": spike.step,
        "value": spike.value if np.isfinite(spike.value) else str(spike.value),
        "before": spike.level,
        "certainty": one.certainty,
        "cause": one.cause,
        "says": one.says,
        "place": {name: value for name, value in one.place._asdict().items() if value not in (None, "")},
        "record": list(one.look),
    }
