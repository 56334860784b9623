"""Which directories of one launch are of the same recording, where ranks began unequal numbers of them.

Ranks agree on a job id for each model by what is the same on all ranks (``monitor.coordinator.manifest_format``). Where a rank
watches one more model that looks like another's (an average of the weights, not wrapped either), that id goes by how many came
before, and is another on each rank. All manifests together tell more: the names of the parameters, and which rank has how many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from monitor.merge.discovery import RankRun


Runs = tuple["RankRun", ...]

UNMATCHED: Final = (
    "ranks {ranks} of this launch have unequal numbers of recordings of models that look alike ({role}). Which of them are of "
    "one model is not known, so none is merged. Move the directories of the model that only some ranks watch elsewhere"
)


def matched(jobs: Mapping[str, Runs]) -> tuple[dict[str, Runs], list[tuple[RankRun, str]]]:
    """The recordings of all ranks that belong together, by a job id that one of them has.

    Args:
        jobs: Directories by the job id in their manifest.

    Returns:
        Directories by job id; and those that cannot be matched, with the reason.
    """
    found: dict[str, Runs] = {}
    alone: list[tuple[RankRun, str]] = []
    of_roles: dict[tuple[str, str], list[str]] = defaultdict(list)
    for job, runs in jobs.items():
        known = {(run.manifest.launch, _role(run)) for run in runs}
        if len(known) == 1 and all(next(iter(known))):
            of_roles[next(iter(known))].append(job)
        else:
            found[job] = runs
    for (_, role), ids in of_roles.items():
        every = [run for job in ids for run in jobs[job]]
        if len(ids) == 1 and not _repeats(every):
            found[ids[0]] = jobs[ids[0]]
            continue
        together, unmatched = _matched(every)
        found |= _named(together, found)
        reason = UNMATCHED.format(ranks=_spelled(every), role=role)
        alone += [(run, reason) for run in unmatched]
    return found, alone


def _role(run: RankRun) -> str:
    return "" if run.manifest.watched is None else run.manifest.watched.role


def _names(run: RankRun) -> str:
    return "" if run.manifest.watched is None else run.manifest.watched.names


def _repeats(runs: Iterable[RankRun]) -> bool:
    """Whether a rank is among them twice: as of two recordings, and not as of one that was carried on elsewhere."""
    seen = [(run.rank, run.manifest.recording) for run in runs]
    return len({rank for rank, _ in seen}) < len(set(seen))


def _matched(runs: Sequence[RankRun]) -> tuple[list[Runs], list[RankRun]]:
    """Recordings of one role: those of the same names in the order in which they began; failing that, all in that order."""
    ranks = {run.rank for run in runs}
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for run in runs:
        counts[_names(run)][run.rank] += 1
    everywhere = {names for names, each in counts.items() if set(each) == ranks and len(set(each.values())) == 1}
    of_names = [run for run in runs if _names(run) in everywhere]
    others = [run for run in runs if _names(run) not in everywhere]
    together = [one for names in everywhere for one in _in_order(run for run in of_names if _names(run) == names)]
    if not others:
        return together, []
    totals = Counter(run.rank for run in others)
    if set(totals) == ranks and len(set(totals.values())) == 1:  # stages of a pipeline, experts of their own
        return [*together, *_in_order(others)], []
    apart = {names for names in counts if everywhere and len(set(counts[names].values())) == 1} - everywhere
    together += [one for names in apart for one in _in_order(run for run in others if _names(run) == names)]
    return together, [run for run in others if _names(run) not in apart]


def _in_order(runs: Iterable[RankRun]) -> Iterator[Runs]:
    """The first of each rank, the second of each rank …"""
    by_rank: dict[int, list[RankRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.manifest.recording):
        by_rank[run.rank].append(run)
    for place in range(max(map(len, by_rank.values()))):
        yield tuple(each[place] for each in by_rank.values() if place < len(each))


def _named(together: Iterable[Runs], taken: Mapping[str, object]) -> dict[str, Runs]:
    """By the id of the lowest rank that has one of its own."""
    found: dict[str, Runs] = {}
    for runs in sorted(together, key=lambda runs: (len(runs), min((run.rank, run.directory.name) for run in runs))):
        ids = [run.manifest.job_id for run in sorted(runs, key=lambda run: run.rank)]
        own = sha256("".join(ids).encode()).hexdigest()[:32]
        found[next((one for one in ids if one not in found and one not in taken), own)] = runs
    return found


def _spelled(runs: Iterable[RankRun]) -> str:
    ranks = sorted({run.rank for run in runs})
    return ", ".join(map(str, ranks[:20])) + (f" and {len(ranks) - 20} more" if len(ranks) > 20 else "")
