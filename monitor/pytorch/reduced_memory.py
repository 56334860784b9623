"""Which memory holds sums over ranks: runs of bytes of storages, each with the groups that it was summed over."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monitor.series import Ranks
from monitor.stats.torch.tensors import end_of, is_unbroken, local_shard


@dataclass(frozen=True, eq=False)
class Over:
    """A group of ranks that a sum was formed over. One object for each process group, compared as an object."""

    ranks: Ranks


Groups = tuple[Over, ...]
"""The groups that a sum was formed over, one after the other."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of a storage, from ``start`` to before ``end``."""

    start: int
    end: int
    groups: Groups


class ReducedMemory:
    """What is known of the memory of a step.

    A tensor is known by the bytes that it covers, so that gradients and buckets that share a storage are kept apart, and a
    gradient that is a view of a bucket is what the bucket is.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[_Run]]] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def clear(self) -> None:
        self._storages.clear()

    def groups_of(self, x: Tensor) -> Groups | None:
        """The groups that all of ``x`` was summed over; None where that does not show of every element."""
        place = _place(x)
        if place is None:
            return None
        storage, start, end = place
        runs = self._runs(storage)
        at, found = bisect_right(runs, start, key=_start) - 1, None
        while start < end:
            if not 0 <= at < len(runs) or not runs[at].start <= start < runs[at].end:
                return None
            groups = runs[at].groups
            found = groups if found is None else tuple(one for one in found if one in groups)
            start, at = runs[at].end, at + 1
        return found

    def groups_within(self, x: Tensor) -> Groups:
        """The groups that some part of ``x`` was summed over."""
        place = _place(x)
        if place is None:
            return ()
        storage, start, end = place
        found = (run.groups for run in self._runs(storage) if run.start < end and start < run.end)
        return tuple(dict.fromkeys(group for groups in found for group in groups))

    def add(self, x: Tensor, groups: Groups) -> None:
        """``x`` has been summed over ``groups``, beside what it was summed over before."""
        known = self.groups_of(x) or ()
        self._put(x, tuple(dict.fromkeys((*known, *groups))))

    def copied(self, to: Tensor, source: Any) -> None:
        """``to`` holds what ``source`` does, whatever it held before."""
        whole = isinstance(source, Tensor) and source.numel() == to.numel()
        self._put(to, self.groups_of(source) if whole else None)

    def forget(self, x: Tensor) -> None:
        """Something else was written to ``x``."""
        self._put(x, None)

    def common(self, tensors: Iterable[Tensor]) -> Groups | None:
        """The groups that each of ``tensors`` was summed over; None where one was not, or there is none."""
        found: Groups | None = None
        for x in tensors:
            groups = self.groups_of(x)
            if groups is None:
                return None
            found = groups if found is None else tuple(one for one in found if one in groups)
        return found

    def _runs(self, storage: torch.UntypedStorage) -> list[_Run]:
        known = self._storages.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else []

    def _put(self, x: Tensor, groups: Groups | None) -> None:
        place = _place(x)
        if place is None:
            return
        storage, start, end = place
        runs = self._runs(storage)
        # In place, and as few runs as can be: of one buffer there may be ten thousand gradients.
        first = max(0, bisect_left(runs, start, key=_start) - 1)
        after = bisect_right(runs, end, key=_start)
        kept = [part for run in runs[first:after] for part in _outside(run, start, end)]
        if groups and _is_dense(x):  # of what has gaps it is not known which bytes were written
            kept.append(_Run(start, end, groups))
        runs[first:after] = _joined(sorted(kept, key=_start))
        if runs:
            self._storages[storage._cdata] = weakref.ref(storage), runs
        else:
            self._storages.pop(storage._cdata, None)


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """The memory of what this rank holds of ``x``; None where there is none to be told by."""
    place = _place(x)
    return None if place is None else place[0]


def _place(x: Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """Where ``x`` lies: its storage, its first byte and the one after its last. None of what has no storage or no element."""
    local = local_shard(x)
    if local is None or local.is_meta or local.layout is not torch.strided or local.is_nested or local.numel() == 0:
        return None
    offset: Any = local.storage_offset()
    end: int = end_of(local.shape, local.stride(), offset)
    return local.untyped_storage(), offset * local.itemsize, end * local.itemsize


def _is_dense(x: Tensor) -> bool:
    local = local_shard(x)
    return local is not None and is_unbroken(local)


def _start(run: _Run) -> int:
    return run.start


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    """The same bytes, those that lie end to end and were summed over the same groups as one run."""
    joined: list[_Run] = []
    for run in runs:
        if joined and joined[-1].end == run.start and joined[-1].groups == run.groups:
            joined[-1] = _Run(joined[-1].start, run.end, run.groups)
        else:
            joined.append(run)
    return joined


def _outside(run: _Run, start: int, end: int) -> list[_Run]:
    """What is left of a run when the bytes from ``start`` to ``end`` are taken out of it."""
    if run.end <= start or end <= run.start:
        return [run]
    parts = _Run(run.start, start, run.groups), _Run(end, run.end, run.groups)
    return [part for part in parts if part.start < part.end]
