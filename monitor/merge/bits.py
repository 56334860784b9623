"""Copies of a tensor that do not hold the same bits: what a piece finds, and what all pieces together say.

Norms do not show a flipped bit: of one float32 in ten million it changes the norm by a ten-millionth or less. Checksums do. A
rank that computes or remembers wrongly once has other bits from that step on, while the other copies agree. So the first step
says what went wrong, and later differences follow from it.

Copies may also differ by design: ranks add in another order, or round at random. Then most tensors differ from the first step
on, and in no copy more than in another. Such kinds are named once and are compared by value alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.odd_copies import EARLY, ENOUGH, MOST_RANKS, STATE_KINDS, WEIGHTS, suspect, who
from monitor.merge.rows import Rows
from monitor.merge.statistics import Flags, Index
from monitor.series import CHECKED_KINDS
from monitor.terminal import counted

MOST: Final = 200
"""Differences that a piece lists: the first ones."""


@dataclass(frozen=True, slots=True)
class BitDifference:
    """A tensor, or a part of one, of which copies differ in a step.

    Attributes:
        step: Comes first, as differences are in order of it.
        tensor: Its place in the order of the model.
        copies: How many copies there are.
        lowest: The lowest rank that has one: copies of the same ranks have the same.
        odd: Ranks whose copy is not what most copies are, the lowest ones if they are many. All ranks, if no more than half of
            the copies agree.
        agree: How many of the copies agree; 0 if no more than half do.
    """

    step: int
    tensor: int
    name: str
    copies: int
    lowest: int
    odd: tuple[int, ...]
    agree: int


@dataclass(frozen=True, slots=True)
class FoundBits:
    """The differing bits in a piece.

    Attributes:
        compared: By step, how many tensors or parts have several copies with checksums.
        differing: By step, of how many of these copies differ.
        first: The first differences, at most ``MOST``.
    """

    compared: Counter[int] = field(default_factory=Counter)
    differing: Counter[int] = field(default_factory=Counter)
    first: list[BitDifference] = field(default_factory=list)


def compare_bits(rows: Rows, checksums: NDArray[np.uint64], reference: Index, assumed: Flags) -> FoundBits:
    """Compare the bits of copies.

    Args:
        checksums: Of each row; 0 where there is none.
        reference: The row that each one is held against; its own number where there is none (``combine.references``).
        assumed: Rows that nothing says are copies. They are left out.
    """
    known = (checksums != 0) & ~assumed
    reference = _among_replicas(rows, reference)
    copies = np.flatnonzero((reference != np.arange(len(reference))) & known & known[reference])
    if not len(copies):
        return FoundBits()
    copies = copies[np.argsort(reference[copies], kind="stable")]
    held = reference[copies]
    groups, starts = np.unique(held, return_index=True)
    unlike = np.logical_or.reduceat(checksums[copies] != checksums[held], starts)
    step, tensor = rows.column("step")[groups], rows.known("tensor")[groups]
    ends = np.append(starts[1:], len(copies))
    differing = np.flatnonzero(unlike)
    first = differing[np.lexsort([rows.known("part")[groups[differing]], tensor[differing], step[differing]])[:MOST]]
    names = rows.text("global_name", groups[first]).to_pylist()
    listed = []
    for name, one in zip(names, first.tolist(), strict=True):
        members = np.append(groups[one], copies[starts[one] : ends[one]])
        listed.append(_difference(name, int(step[one]), int(tensor[one]), rows.rank[members], checksums[members]))
    return FoundBits(_by_step(step), _by_step(step[differing]), listed)


def _among_replicas(rows: Rows, reference: Index) -> Index:
    """Replicas whose owner has no row are held against the first one of them."""
    alone = np.flatnonzero(rows.replica & (reference == np.arange(len(reference))))
    if not len(alone):
        return reference
    key = np.stack([rows.column("step")[alone], rows.known("tensor")[alone], rows.known("part")[alone]])
    _, first, which = np.unique(key, axis=1, return_index=True, return_inverse=True)
    reference = reference.copy()
    reference[alone] = alone[first][which.reshape(-1)]
    return reference


def _by_step(steps: Index) -> Counter[int]:
    each, counts = np.unique(steps, return_counts=True)
    return Counter(dict(zip(each.tolist(), counts.tolist(), strict=True)))


def _difference(name: str, step: int, tensor: int, ranks: Index, checksums: NDArray[np.uint64]) -> BitDifference:
    values, counts = np.unique(checksums, return_counts=True)
    agree = int(counts.max()) if 2 * counts.max() > len(checksums) else 0
    odd = ranks[checksums != values[counts.argmax()]] if agree else ranks
    lowest = sorted(odd.tolist())[:MOST_RANKS]
    return BitDifference(step, tensor, name, len(ranks), int(ranks.min()), tuple(lowest), agree)


# --- What all pieces say together.


@dataclass
class BitsOfKind:
    """All that the pieces of one kind have found."""

    compared: Counter[int] = field(default_factory=Counter)
    differing: Counter[int] = field(default_factory=Counter)
    first: list[BitDifference] = field(default_factory=list)

    def add(self, found: FoundBits) -> None:
        self.compared.update(found.compared)
        self.differing.update(found.differing)
        every = [*self.first, *found.first]
        self.first = sorted(every, key=lambda one: (one.step, one.tensor, one.lowest, one.odd))[:MOST]

    def most_differ(self, step: int) -> bool:
        """Whether most tensors differ in a step, and no copy more than another."""
        most = self.compared[step] >= ENOUGH and 2 * self.differing[step] > self.compared[step]
        return most and not _one_copy_is_odd([one for one in self.first if one.step == step])

    @property
    def by_design(self) -> bool:
        """Whether most tensors differ in one of the first steps, and of all tensors and steps at least every fourth."""
        often = 4 * self.differing.total() >= self.compared.total()
        return often and any(self.most_differ(step) for step in sorted(self.compared)[:EARLY])


def _one_copy_is_odd(differences: Iterable[BitDifference]) -> bool:
    """Whether in most of these it is always the same rank, among the ranks that hold the same tensors."""
    by_ranks: dict[tuple[int, int], Counter[tuple[int, ...]]] = {}
    for one in differences:
        by_ranks.setdefault((one.lowest, one.copies), Counter())[one.odd if one.agree else ()] += 1
    every = sum(counts.total() for counts in by_ranks.values())
    same = sum(max((count for odd, count in counts.items() if odd), default=0) for counts in by_ranks.values())
    return 2 * same > every


def _by_design(kinds: Mapping[str, BitsOfKind]) -> set[str]:
    """The kinds that differ by design. If one does, so do others that part later, as with a learning rate of 0 at first."""
    found = {kind for kind, one in kinds.items() if one.by_design}
    if found:
        found |= {kind for kind, one in kinds.items() if one.differing and one.most_differ(min(one.differing))}
    return found


HostAt = Callable[[int, int], str]
"""Returns the host of a rank in a step; empty if it is not known."""


def told(kinds: Mapping[str, BitsOfKind], host_at: HostAt) -> dict[str, Any]:
    """What there is to report, for JSON.

    Returns:
        ``compared``: How many tensors of each kind were compared, over all steps. ``by_design``: The kinds whose copies differ
        by design. ``first``: The differences of the first step with any, of the first kind in that step. ``later``: How many
        differences follow, and of how many of the tensors that are known by name. ``agreed_until``: The last step in which
        copies were compared and agreed. ``checkpoint``: The last step whose checkpoint is known good: copies of weights
        and moments in the next step agree. None if there is none.
    """
    designed = _by_design(kinds)
    single = {kind: one for kind, one in kinds.items() if kind not in designed}
    odd = sorted((min(one.differing), _place(kind), kind) for kind, one in single.items() if one.differing)
    answer: dict[str, Any] = {
        "compared": {kind: one.compared.total() for kind, one in sorted(kinds.items()) if one.compared},
        "by_design": sorted(designed),
        "first": [],
        "later": {"differences": 0, "tensors": 0},
        "agreed_until": None,
        "checkpoint": None,
    }
    if odd:
        step, _, first_kind = odd[0]
        began_well = not any(single[kind].differing[step] for kind in STATE_KINDS if kind in single)
        at_first = [one for one in single[first_kind].first if one.step == step]
        names = {one.name for of_kind in single.values() for one in of_kind.first}
        compared = [one for of_kind in single.values() for one in of_kind.compared if one < step]
        began = single[WEIGHTS].compared if WEIGHTS in single else ()
        good = [one - 1 for one in began if one < step + began_well]
        differences = sum(one.differing.total() for one in single.values())
        answer["first"] = [_spelled(first_kind, one, host_at) for one in at_first]
        answer["later"]["differences"] = differences - single[first_kind].differing[step]
        answer["later"]["tensors"] = len(names - {one.name for one in at_first})
        answer["agreed_until"] = max(compared, default=None)
        answer["checkpoint"] = max((one for one in good if one >= 0), default=None)
    return answer


def _place(kind: str) -> int:
    return CHECKED_KINDS.index(kind) if kind in CHECKED_KINDS else len(CHECKED_KINDS)


def _spelled(kind: str, one: BitDifference, host_at: HostAt) -> dict[str, Any]:
    odd = {"odd_ranks": list(one.odd), "hosts": [host_at(rank, one.step) for rank in one.odd]}
    return {"kind": kind, "name": one.name, "step": one.step, **odd, "copies": one.copies, "agreeing": one.agree}


def lines(about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines to print: a label and a text each."""
    for one in about["while_running"][:5]:
        yield "bits", f"rank {one['rank']} ({one['host']}): {one['said']}"
    if len(about["while_running"]) > 5:
        yield "", f"and {len(about['while_running']) - 5} more"
    first = about["first"]
    for one in first[:5]:
        yield "bits", f"{one['kind']} {one['name']} at step {one['step']}: {who(one)}"
    if len(first) > 5:
        yield "", f"and {len(first) - 5} more of the same step"
    if first:
        yield "", suspect(about)
        if (later := about["later"])["differences"]:
            others = f", also in {counted(later['tensors'], 'other tensor')}" if later["tensors"] else ""
            yield "", f"{counted(later['differences'], 'later difference')} may follow from it{others}"
    if about["by_design"]:
        said = "copies differ in most tensors from the first steps on, so by design; they are compared by value"
        yield "bits", f"{', '.join(about['by_design'])}: {said}"
