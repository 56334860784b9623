"""The checks of a report that tensors hold the bits that they should."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from monitor.anomalies.between_steps import WRITTEN
from monitor.anomalies.odd_copies import suspect, who
from monitor.anomalies.ranking.ranking import listed
from monitor.coordinator.manifest_format import checks_replicas
from monitor.merge.report import ranges_of
from monitor.report.bands import Window
from monitor.report.facts import Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place
from monitor.series import REPLICA_KIND, RUN_KIND, WITHOUT_ROWS
from monitor.terminal import counted

WEIGHTS: Final = "param_origin"
MOST_RATES: Final = 4
_APART: Final = (
    "If they train one model, nothing averages their gradients: wrap it, as in DistributedDataParallel, and call the wrapper, "
    "or average them. If each rank trains its own, pass process_group to TrainerMon."
)

_LOCAL: Final = (
    "In step {step}, for the first time, no reduction of gradients over these ranks was seen{where}. See whether the wrapper "
    "was called, and whether the last micro-batch was under no_sync. In local SGD, weights differ until they are averaged; "
)


def replicas_agree(facts: Facts) -> CheckFinding:
    """Whether copies have the same bits; if these are not known, the same values."""
    bits = facts.told.get("bits", {"first": [], "compared": {}, "by_design": []})  # an earlier version compared none
    if bits["first"]:
        first = bits["first"][0]
        says = (
            f"{first['kind']} {first['name']} does not have the same bits on all ranks in step {first['step']}: {who(first)}."
        )
        name = facts.shown_name(first["kind"], first["name"])
        cause = _rates_apart(facts, first) or _not_reduced(facts, first["step"])
        then = f"{cause}{suspect(bits, of_device=not cause)}."
        return CheckFinding(BAD, says, Place(first["step"], first["odd_ranks"][0], first["kind"], name), then)
    if said := _said_while_running(facts, "copies"):
        return said
    differing = facts.told["disagreements"]["listed"]
    if differing:
        first = differing[0]
        says = (
            f"{first['kind']} {first['name']} differs between replicas in step {first['step']}: its {first['op']} is "
            f"{first['value']} on rank {first['rank']}, {first['others_value']} on rank {first['other_rank']}."
        )
        suspected = f"Suspect rank {first['rank']}: its memory, its device, or what it loaded."
        then = _APART if first["kind"] in bits["by_design"] and _differ_together(facts, differing) else suspected
        name = facts.shown_name(first["kind"], first["name"])
        return CheckFinding(BAD, says, Place(first["step"], first["rank"], first["kind"], name), then)
    if len(facts.ranks) == 1:
        return CheckFinding(NOT_LOOKED_AT, "One rank recorded: there is no replica to compare with.")
    if said := _came_apart(facts):
        return said
    if same := {kind: count for kind, count in bits["compared"].items() if kind not in bits["by_design"]}:
        of = ", ".join(same)
        times = counted(sum(same.values()), "time")
        return CheckFinding(GOOD, f"{times} a tensor of {of} had the same bits on all ranks that hold it.")
    if (compared := facts.told["rows"].get(REPLICA_KIND, 0)) > sum(one["rows"] for one in facts.told["not_compared"]["listed"]):
        return CheckFinding(GOOD, f"{counted(compared, 'row')} of replicas, the same as in their owners.")
    if any(checks_replicas(one.config) for one in facts.manifests.values()):
        says = "No tensor is known to be a replica. If ranks hold the same, pass their group to set_monitor as dp_group."
        return CheckFinding(NOT_LOOKED_AT, says)
    return CheckFinding(NOT_LOOKED_AT, "No rank recorded its replicas.")


def _rates_apart(facts: Facts, first: Mapping[str, Any]) -> str:
    """What is said of a learning rate that the ranks with other bits have alone, in the step or in the one before."""
    rows = facts.kinds.get(RUN_KIND)
    names = list(facts.rates)
    steps = facts.axis.steps[facts.axis.steps <= first["step"]][-2:]
    if rows is None or not names or not len(steps):
        return ""
    window = Window(steps)
    rows.feed(window, range(int(steps[0]), int(steps[-1]) + 1), names)
    window, odd = window.filled(), set(first["odd_ranks"])
    for name, at in ((name, at) for name in names for at in range(len(steps))):
        columns = np.flatnonzero((window.series == rows.numbers[name]) & ~np.isnan(window.values[at])).tolist()
        rates = {facts.ranks[window.rank[one]]: float(window.values[at, one]) for one in columns}
        usual = {rate for rank, rate in rates.items() if rank not in odd}
        others = {rank: rate for rank, rate in rates.items() if rank in odd and rate not in usual}
        if others and (usual if first["agreeing"] else len(set(others.values())) > 1):
            ranks = {rate: rank for rank, rate in reversed(rates.items())}
            each = ", ".join(f"{rate:g} on rank {rank}" for rate, rank in sorted(ranks.items())[:MOST_RATES])
            return f"Look at what sets the learning rate on each rank: {name} is {each} in step {steps[at]}; "
    return ""


def _not_reduced(facts: Facts, step: int) -> str:
    """What is said if copies differ since the first step in which ranks have seen no reduction of gradients."""
    noted = {rank: str(one.notes.get("grad_reduced", "")) for rank, one in facts.manifests.items()}
    found = {rank: re.search(rf"{WITHOUT_ROWS}.*? in step (\d+)", note) for rank, note in noted.items()}
    first = {rank: int(one[1]) for rank, one in found.items() if one}
    since = min(first.values(), default=-2)
    ranks = [rank for rank, one in first.items() if one == since]
    where = f" on {listed(ranks)}" if len(ranks) < len(noted) else ""
    return _LOCAL.format(step=since, where=where) if step in (since, since + 1) else ""


def _differ_together(facts: Facts, differing: Sequence[Mapping[str, Any]]) -> bool:
    """Whether most tensors of a kind have other values in the first step of these: then no device is the cause."""
    kind, step = differing[0]["kind"], differing[0]["step"]
    names = {one["name"] for one in differing if (one["kind"], one["step"]) == (kind, step)}
    known = facts.kinds[kind].names if kind in facts.kinds else ()
    cut = len(names) == len(differing) < facts.count("disagreements")
    return cut or 2 * len(names) > len(set(known)) > 0


def _came_apart(facts: Facts) -> CheckFinding | None:
    """Weights that all ranks had alike at first, and that nothing has kept so: a model that was not wrapped."""
    rows, parts = facts.kinds.get(WEIGHTS), facts.told["without_global"]["listed"]
    apart = [one for one in parts if one["kind"] == WEIGHTS and "steps" in one]
    begin = min((some.start for one in apart for some in ranges_of(one["steps"])), default=0)
    if rows is None or begin <= int(rows.steps.min(initial=begin)):  # ranks that never had the same may hold parts of them
        return None
    more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
    first = apart[0]["name"]
    says = f"The ranks began with the same weights, and have different ones from step {begin} on: {WEIGHTS} {first}{more}."
    return CheckFinding(BAD, says, Place(begin, None, WEIGHTS, facts.shown_name(WEIGHTS, first)), _APART)


def unchanged_between_steps(facts: Facts) -> CheckFinding:
    """Whether weights and moments were what the step before had left, as each rank found while training ran."""
    if said := _said_while_running(facts, "between steps"):
        return said
    written = [str(text) for one in facts.manifests.values() for about, text in one.notes.items() if about.endswith(WRITTEN)]
    if written:
        return CheckFinding(NOT_LOOKED_AT, written[0])
    asked = [one.config for one in facts.manifests.values() if checks_replicas(one.config)]
    several = len(facts.axis.steps) > 1 and "while_running" in facts.told.get("bits", {})
    if not asked or not several or not facts.told["rows"].get("param_updated"):
        return CheckFinding(NOT_LOOKED_AT, "Weights were not compared between steps.")
    rarely = (one.get("intervals", {}).get("param_distribution", 1) for one in asked)
    if any(one.get("step_interval", 1) != 1 for one in asked) or any(interval != 1 for interval in rarely):
        return CheckFinding(NOT_LOOKED_AT, "Weights are compared between steps only if every step is collected.")
    return CheckFinding(GOOD, "No weight changed between steps, except where most were written at once.")


def found_while_running(facts: Facts, check: Literal["copies", "between steps"]) -> list[dict[str, Any]]:
    """The ``WrongBits`` of one check, with the rank that found each."""
    every = facts.told.get("bits", {}).get("while_running", [])  # an earlier version told none
    return [one for one in every if one["check"] == check]


def _said_while_running(facts: Facts, check: Literal["copies", "between steps"]) -> CheckFinding | None:
    """What ranks have found while training ran."""
    found = found_while_running(facts, check)
    if not found:
        return None
    first = found[0]
    name = facts.shown_name(first["kind"], first["names"][0]) if first["names"] else ""
    says = f"Rank {first['rank']} ({first['host']}): {first['said']}"
    warnings = counted(len(found) - 1, "more such warning is", "more such warnings are")
    more = f"{warnings} in the log and in manifest.json." if len(found) > 1 else ""
    return CheckFinding(BAD, says, Place(first["step"], first["ranks"][0], first["kind"], name), more)
