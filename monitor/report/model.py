"""The model of the page: plain data, made of facts, and the verdict for programs. Neither needs a browser.

Names, sentences and small numbers are JSON. Cells and curves are arrays in one block of bytes; the JSON has their offsets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from monitor.anomalies.ranking.ranking import Ranked
from monitor.anomalies.ranking.report import described_value, remark
from monitor.merge.report import summary
from monitor.report import history as cell
from monitor.report.checks import CheckResult, RowEvent, may_not_jump, place_of, row_events, said
from monitor.report.facts import NOT_PICTURED, TOTAL_KIND, Facts, at_step, of_series
from monitor.report.findings import Place, Verdict
from monitor.report.history import KindHistory, by_rank, most_unusual
from monitor.report.optimizer import clipped_steps, share_of_clipped
from monitor.report.spikes import SPIKES
from monitor.series import LEARNING_RATE, NO_MICRO_STEP, RUN_KIND
from monitor.stats.histograms import MAGNITUDES, upper_text
from monitor.terminal import counted

SCHEMA_VERSION: Final = 1
"""Version of the verdict for programs."""

MOST_ROWS: Final = 10_000
"""Series of a page of which each has a row. With more, rows are layers, which open."""
MOST_FRAMES: Final = 4_000_000
"""Cells of ranks and series, over all columns. With more, only the column of the verdict is kept."""
MOST_RANK_CELLS: Final = 10_000_000
"""Cells of ranks and series in one column. With more, neighbouring ranks share a row."""
MOST_NUMBERS: Final = 1_500_000
"""Numbers of all curves together."""
MOST_CURVES: Final = 20_000
"""Tensors with curves: what surrounds the numbers of each has its size, too."""
MOST_MEMBERS: Final = 20_000_000
"""Cells of the members of layers. Layers beyond that do not open; the most unusual ones come first."""
MOST_READ_AGAIN: Final = 40_000_000
"""Values of single ranks that are held while the curves of a kind are made."""
MOST_LINES: Final = 8
"""Ranks of which each has a line. Of more, a curve has the median, a band and the most unusual rank."""
MOST_LISTED: Final = 50
MOST_HISTOGRAMS: Final = 4
MOST_COLUMNS: Final = 200
"""Steps of a histogram over time."""

_LAYER: Final = re.compile(r"^(.*?\D)??(\d+)(?=[._]|$)")


@dataclass
class Model:
    """All that a page shows.

    Attributes:
        data: What JSON can hold.
        arrays: Bytes of the arrays, each at a multiple of 4.
    """

    data: dict[str, Any]
    arrays: bytearray = field(default_factory=bytearray)

    def put(self, values: np.ndarray[Any, Any]) -> int:
        """Add an array. Returns its offset."""
        self.arrays.extend(bytes(-len(self.arrays) % 4))
        offset = len(self.arrays)
        self.arrays.extend(np.ascontiguousarray(values).tobytes())
        return offset


def model_of(facts: Facts, checks: Sequence[CheckResult], verdict: Verdict) -> Model:
    """The model of a run's page."""
    model = Model({})
    pictured = [kind for kind in facts.kinds if kind not in (*NOT_PICTURED, RUN_KIND, TOTAL_KIND)]
    unusual = unusual_of(facts)
    at = verdict.place.step
    if at is None:
        at = next((one["step"] for one in unusual if one["kind"] in pictured), int(facts.axis.steps[-1]))
    curves = _Curves(facts, model, [*_named(verdict, checks), *((one["kind"], one["tensor"]) for one in unusual)])
    grouped = sum(len(facts.kinds[kind].series) for kind in pictured) > MOST_ROWS
    model.data = {
        "title": f"Run {str(facts.told['job_id'])[:8]}",
        "subtitle": _subtitle(facts),
        "verdict": {"state": verdict.state, "says": verdict.says, "then": verdict.then},
        "checks": [{"name": one.name, "state": one.state, "says": one.finding.says, "look": one.look} for one in checks],
        "codes": {
            "warmUp": cell.HISTORY_BEGINS,
            "least": cell.LEAST,
            "calm": cell.CALM,
            "partly": cell.PARTLY,
            "most": cell.MOST,
            "differs": cell.DIFFERS,
            "infinite": cell.INFINITE,
            "nan": cell.NAN,
        },
        "first": facts.axis.first.tolist(),
        "last": facts.axis.last.tolist(),
        "at": int(facts.axis.bin_of(np.array([at]))[0]),
        "atStep": verdict.place.step,
        "marks": list(_marks(facts)),
        "ranks": all_ranks(facts),
        "run": sorted([*curves.of_kind(RUN_KIND), *curves.of_kind(TOTAL_KIND)], key=_is_learning_rate),
        "kinds": [_kind(facts, model, kind, int(at), grouped, curves) for kind in pictured],
        "start": _start(facts, pictured, verdict, unusual),
        "events": events_of(facts),
        "unusual": unusual,
        "histograms": list(_histograms(facts, model, verdict, unusual)),
        "about": list(_about(facts)),
        "configuration": json.dumps(facts.first, indent=1) if facts.first else "",
    }
    return model


def _is_learning_rate(curve: dict[str, Any]) -> bool:
    return str(curve["name"]).startswith(LEARNING_RATE)


def verdict_for_programs(facts: Facts, checks: Sequence[CheckResult], verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON. ``docs/report.md`` documents its fields."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": facts.path,
        "job_id": facts.told["job_id"],
        "state": {"good": "healthy", "bad": "unhealthy"}.get(verdict.state, verdict.state),
        "verdict": verdict.says,
        "next": verdict.then,
        "place": {name: value for name, value in verdict.place._asdict().items() if value not in (None, "")},
        "steps": [int(facts.axis.steps[0]), int(facts.axis.steps[-1])] if len(facts.axis.steps) else [],
        "ranks": len(facts.ranks),
        "rows": sum(facts.told["rows"].values()),
        "checks": [
            {"name": one.name, "state": one.state, "says": one.finding.says, "look": one.look, "needed": one.is_needed}
            for one in checks
        ],
        "spikes": [entry for one in checks if one.name == SPIKES for entry in one.finding.listed],
        "clipping": share_of_clipped(facts),
        "first_events": events_of(facts),
        "unusual_tensors": unusual_of(facts),
    }


def unusual_of(facts: Facts) -> list[dict[str, Any]]:
    """The tensors with the greatest deviations from their own history, each with its step and rank."""
    kinds = [kind for kind in facts.histories if kind not in NOT_PICTURED]
    histories = [facts.histories[kind] for kind in kinds]
    found = []
    for number, pair in most_unusual(histories, MOST_LISTED):
        of, rows = histories[number], facts.kinds[kinds[number]]
        if not may_not_jump(kinds[number], rows.names[of.pair_series[pair]]):
            continue
        found.append(
            {
                "kind": kinds[number],
                "tensor": rows.names[of.pair_series[pair]],
                "rank": facts.ranks[of.pair_rank[pair]],
                "step": int(of.at[pair]),
                "statistic": rows.op,
                "value": _number(of.value[pair]),
                "before": _number(of.typical[pair]),
                "deviations": round(min(float(of.deviations[pair]), 1e6), 1),
            }
        )
    return found


def events_of(facts: Facts) -> list[dict[str, Any]]:
    """The first events, in order: those of alert rules, or what rows alone show."""
    if facts.ranking is not None and facts.ranking.ranked:
        return [_ranked(one, facts) for one in facts.ranking.ranked]
    events = [_of_rows(one, facts) for one in row_events(facts)]
    events += [_differing(one) for one in facts.told["disagreements"]["listed"][:MOST_LISTED]]
    return sorted(events, key=lambda one: int(one["step"]))[:MOST_LISTED]


def _ranked(one: Ranked, facts: Facts) -> dict[str, Any]:
    place = place_of(one, facts)
    return {
        "kind": place.kind,
        "tensor": place.name,
        "rank": place.rank,
        "step": place.step,
        "micro_step": None if one.micro_step == NO_MICRO_STEP else one.micro_step,
        "statistic": one.op,
        "value": _number(one.value),
        "origin": one.is_origin,
        "says": described_value(one),
        "remark": f"{one.rule}. {remark(one)}".strip(),
    }


def _of_rows(one: RowEvent, facts: Facts) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "tensor": one.name,
        "rank": one.rank,
        "step": one.sudden.step,
        "micro_step": None if one.sudden.micro_step < 0 else one.sudden.micro_step,
        "statistic": facts.kinds[one.kind].op,
        "value": _number(one.sudden.value),
        "origin": False,
        "says": said(one, facts),
        "remark": "seen in rows",
    }


def _differing(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": one["kind"],
        "tensor": one["name"],
        "rank": one["rank"],
        "step": one["step"],
        "micro_step": one["micro_step"],
        "statistic": one["op"],
        "value": one["value"],
        "origin": False,
        "says": f"{one['op']} is {one['value']}, on rank {one['other_rank']} {one['others_value']}",
        "remark": "replicas differ",
    }


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return float(value) if math.isfinite(value) else str(float(value))


# --- Heat maps.


def _kind(facts: Facts, model: Model, kind: str, at: int, grouped: bool, curves: _Curves) -> dict[str, Any]:
    rows, history = facts.kinds[kind], facts.histories[kind]
    names = rows.names
    found: dict[str, Any] = {"name": kind, "op": rows.op, "series": names, "cells": None, "layers": None}
    if grouped:
        found["layers"] = _layers(model, history, names)
    else:
        found["cells"] = model.put(history.grid)
    found["frames"], found["rankGroup"] = _frames(facts, model, kind, at)
    found["curves"] = curves.of_kind(kind)
    return found


def layer_of(name: str) -> str:
    """The name up to the number of its layer; of a name without a number, up to its last dot."""
    match = _LAYER.match(name)
    return match[0] if match is not None else name.rpartition(".")[0] or name


def _layers(model: Model, history: KindHistory, names: Sequence[str]) -> dict[str, Any]:
    """Rows of layers, and the rows of their members as far as there is room: the most unusual layers first."""
    members: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        members.setdefault(layer_of(name), []).append(number)
    cells = np.stack([history.grid[each].max(axis=0) for each in members.values()])
    room, opens = MOST_MEMBERS, {}
    for place in np.argsort(-cells.max(axis=1).astype(np.int64), kind="stable").tolist():
        each = list(members.values())[place]
        room -= len(each) * cells.shape[1]
        if room >= 0:
            opens[place] = model.put(history.grid[each])
    listed = [{"name": name, "members": each, "cells": opens.get(place)} for place, (name, each) in enumerate(members.items())]
    return {"cells": model.put(cells), "listed": listed}


def _frames(facts: Facts, model: Model, kind: str, at: int) -> tuple[list[dict[str, int]], int]:
    """Ranks and series of one column each; and how many neighbouring ranks share a row."""
    history, ranks = facts.histories[kind], len(facts.ranks)
    size = len(all_ranks(facts)) * len(history.grid)
    bins = facts.axis.bins
    place = np.searchsorted(all_ranks(facts), facts.ranks)
    if history.cells is not None and size * bins * len(facts.kinds) <= MOST_FRAMES:
        of_bins = ((one, by_rank(history, history.cells[:, one], ranks)) for one in range(bins))
        return [{"at": one, "cells": model.put(_spread(cells, place, len(all_ranks(facts))))} for one, cells in of_bins], 1
    then = at_step(facts, kind, at)
    column = int(facts.axis.bin_of(np.array([at]))[0])
    share = -(-size // MOST_RANK_CELLS)
    if then.cells is None or not len(then.grid):
        return [], share
    cells = np.zeros((ranks, len(history.grid)), np.uint8)
    cells[:, : len(then.grid)] = by_rank(then, then.cells[:, 0], ranks)
    cells = _spread(cells, place, len(all_ranks(facts)))
    ranks = len(cells)
    cells = np.concatenate([cells, np.zeros((-ranks % share, len(history.grid)), np.uint8)])
    return [{"at": column, "cells": model.put(cells.reshape(-1, share, len(history.grid)).max(axis=1))}], share


def all_ranks(facts: Facts) -> list[int]:
    """The ranks that recorded, and those of the job that did not."""
    return sorted({*facts.ranks, *facts.told["missing_ranks"]})


def _spread(cells: cell.Codes, place: cell.Ints, ranks: int) -> cell.Codes:
    """Rows of the ranks that recorded, each at its place among all ranks."""
    found = np.zeros((ranks, cells.shape[1]), np.uint8)
    found[place] = cells
    return found


def _start(facts: Facts, kinds: Sequence[str], verdict: Verdict, unusual: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The kind and the tensor that the page shows first: those of the verdict, or the most unusual one."""
    first = [verdict.place, *(Place(one["step"], one["rank"], one["kind"], one["tensor"]) for one in unusual)]
    place = next((one for one in first if one.kind in kinds), Place(kind=kinds[0] if kinds else ""))
    names = facts.kinds[place.kind].names if place.kind else []
    return {"kind": place.kind, "tensor": place.name if place.name in names else next(iter(names), ""), "rank": place.rank}


def _marks(facts: Facts) -> Iterator[dict[str, Any]]:
    """What happened at a step beside its rows, each with its column."""
    skipped = facts.told["skipped_steps"]["ranges"]
    steps = {
        "clipped": clipped_steps(facts),
        "skipped": [step for first, last, interval in skipped for step in range(first, last + 1, interval)],
        "restarted": [int(one["step"]) for one in facts.told.get("joints", {}).get("listed", ())],
        "reconfigured": [
            one.since for each in facts.manifests.values() for one in each.configurations if one.origin != "start"
        ],
    }
    for what, every in steps.items():
        for column in np.unique(facts.axis.bin_of(np.array(every, np.int64))).tolist() if every else ():
            yield {"what": what, "at": column}


# --- Curves.


class _Curves:
    """Curves of tensors, as many as there is room for: the wanted ones first.

    Args:
        wanted: Kinds and names.
    """

    def __init__(self, facts: Facts, model: Model, wanted: Sequence[tuple[str, str]]) -> None:
        self._facts, self._model = facts, model
        self._wanted = list(dict.fromkeys(wanted))
        lines = len(facts.ranks) if len(facts.ranks) <= MOST_LINES else 4
        self._room = min(max(MOST_NUMBERS // (lines * facts.axis.bins), 1), MOST_CURVES)
        self._room_to_read = max(MOST_READ_AGAIN // (len(facts.ranks) * facts.axis.bins), 1)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        if kind not in self._facts.kinds:
            return []
        names, number_of = self._facts.kinds[kind].names, self._facts.kinds[kind].numbers
        first = [one for of, one in self._wanted if of == kind and one in number_of]
        every = sum(len(one.series) for one in self._facts.kinds.values())
        share = len(names) if every <= self._room else max(self._room * len(names) // every, 1)
        chosen = list(dict.fromkeys([*first, *names]))[: max(share, min(len(first), self._room))]
        history = self._facts.histories[kind]
        if history.values is None:
            chosen = chosen[: self._room_to_read]
            texts = [name for _, name in self._facts.kinds[kind].series]
            history = of_series(self._facts, kind, [texts[number_of[one]] for one in chosen])
        numbers = np.array(sorted(number_of[one] for one in chosen), np.int64)
        order = np.lexsort((history.pair_rank, history.pair_series))
        ends = np.searchsorted(history.pair_series[order], [numbers, numbers + 1]).T.tolist()
        pairs_of = zip(numbers.tolist(), (order[slice(*end)] for end in ends), strict=True)
        return [one for number, pairs in pairs_of if (one := self._curve(kind, history, number, pairs)) is not None]

    def _curve(self, kind: str, history: KindHistory, series: int, pairs: cell.Ints) -> dict[str, Any] | None:
        """The curve of a series. ``pairs``: of it and a rank, in order of ranks."""
        if history.values is None or not len(pairs):
            return None
        values = history.values[pairs]
        labels = [f"rank {self._facts.ranks[one]}" for one in history.pair_rank[pairs]]
        if len(pairs) > MOST_LINES:
            worst = self._worst(history, pairs)
            low, middle, high = _quantiles(values)
            labels, values = ["median", "5 %", "95 %", labels[worst]], np.stack([middle, low, high, values[worst]])
        elif kind == TOTAL_KIND:
            labels = ["all ranks"]
        name, op = self._facts.kinds[kind].names[series], self._facts.kinds[kind].op
        banded = len(pairs) > MOST_LINES
        lines, cells = self._model.put(values.astype("<f4")), None if banded or history.cells is None else history.cells[pairs]
        codes = None if cells is None else self._model.put(cells)
        return {"name": name, "op": op, "series": series, "band": banded, "labels": labels, "lines": lines, "codes": codes}

    def _worst(self, history: KindHistory, pairs: cell.Ints) -> int:
        """Which of the pairs of a series has its own line: the first that is not finite or changes suddenly."""
        of, ranks = history.pair_series[pairs[0]], history.pair_rank[pairs]
        first = next((int((ranks == one.rank).argmax()) for one in history.events if one.series == of), None)
        return int(history.deviations[pairs].argmax()) if first is None else first


def _quantiles(values: cell.Values) -> tuple[cell.Values, cell.Values, cell.Values]:
    """The 5th, 50th and 95th percentile of the finite values of each column; NaN where there are none."""
    found = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)
    count = np.isfinite(found).sum(axis=0)
    places = (np.minimum(np.maximum(count - 1, 0) * part // 100, len(found) - 1) for part in (5, 50, 95))
    low, middle, high = (np.take_along_axis(found, one[None], axis=0)[0] for one in places)
    return low, middle, high


def _named(verdict: Verdict, checks: Sequence[CheckResult]) -> list[tuple[str, str]]:
    places = [verdict.place, *(one.finding.place for one in checks)]
    return [(one.kind, one.name) for one in places if one.name]


# --- Beside the pictures.


def _histograms(facts: Facts, model: Model, verdict: Verdict, unusual: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Histograms of magnitudes of a few tensors of each kind that has some: a row a power of two, a column a step."""
    for kind, rows in facts.kinds.items():
        if MAGNITUDES in rows.ops:
            wanted = [one["tensor"] for one in unusual if one["kind"] == kind]
            first = [one for one in dict.fromkeys([verdict.place.name, *wanted, *rows.names]) if one in rows.numbers]
            for name in first[:MOST_HISTOGRAMS]:
                yield _histogram(facts, model, kind, name)


def _histogram(facts: Facts, model: Model, kind: str, name: str) -> dict[str, Any]:
    """The last steps of a tensor on its first rank that has histograms."""
    counted: dict[int, dict[float, int]] = {}
    rank = None
    for row in facts.kinds[kind].last_rows(name, ("step", "rank", MAGNITUDES), MOST_COLUMNS):
        if row[MAGNITUDES] and rank in (None, row["rank"]):
            rank = row["rank"]
            of_step = counted.setdefault(row["step"], {})
            for upper, _, elements in (one.partition(":") for one in row[MAGNITUDES].split()):
                of_step[float(upper)] = of_step.get(float(upper), 0) + int(elements)
    steps = sorted(counted)[-MOST_COLUMNS:]
    uppers = sorted({upper for one in steps for upper in counted[one]}, reverse=True)
    counts = np.array([[counted[step].get(upper, 0) for step in steps] for upper in uppers]).reshape(len(uppers), len(steps))
    level = (np.log1p(counts) / max(np.log1p(counts.max(initial=1)), 1) * (cell.MOST - 1)).astype(np.int64)
    cells = np.where(counts > 0, cell.LEAST + level + (level >= cell.CALM), 0).astype(np.uint8)
    return {
        "kind": kind,
        "tensor": name,
        "rank": rank,
        "rows": len(uppers),
        "columns": len(steps),
        "steps": steps,
        "names": [f"up to {upper_text(one)}" for one in uppers],
        "counts": counts.ravel().tolist(),
        "cells": model.put(cells),
    }


def _subtitle(facts: Facts) -> str:
    steps = facts.axis.steps
    between = f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) else "no steps"
    ranks, rows = counted(facts.told["world_size"], "rank"), counted(sum(facts.told["rows"].values()), "row")
    return f"{len(facts.ranks):,} of {ranks}, {between}, {rows}, from {facts.path}"


def _about(facts: Facts) -> Iterator[list[str]]:
    """Label and text of what else is known of the run."""
    for what, line in summary(facts.told):
        yield [what, line]
    for rank, one in list(facts.manifests.items())[:MOST_LISTED]:
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        yield [f"rank {rank}", f"{one.host}, process {one.pid}, from {one.started} to {one.saved}; {versions}"]
