"""What compares the experts of a router follows from counts, after these were added."""

from __future__ import annotations

import numpy as np
import pytest

from monitor.series import Series, SeriesTable
from monitor.stats.features import ASSIGNED, ROUTERS
from monitor.stats.loads import LOAD_KIND, NO_EXPERT, ExpertIndex, expert_name, router_and_expert, summaries, with_summaries
from monitor.stats.ops import derive
from monitor.stats.partials import COLUMNS, COUNT, Partials, combine_groups

FEW = (6, 0, 3, 1)
MANY = (0, 5, 5, 10, 0)


def listed(*routers: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of these routers, each before those of its experts."""
    rows = [(number, NO_EXPERT, sum(counts)) for number, counts in enumerate(routers)]
    rows += [(number, expert, count) for number, counts in enumerate(routers) for expert, count in enumerate(counts)]
    router, expert, assigned = np.array(rows).T
    return router, expert, assigned.astype(np.float64)


def defined(counts: tuple[int, ...]) -> list[float]:
    loads = np.array(counts) / sum(counts)
    percentiles = [float(np.percentile(loads, share)) for share in (5, 50, 95)]
    return [*percentiles, max(counts) / np.mean(counts), float(counts.count(0))]


def test_routers_of_different_numbers_of_experts_are_summed_up_side_by_side() -> None:
    found = summaries(*listed(FEW, MANY))
    assert pytest.approx(np.array([defined(FEW), defined(MANY)]), rel=1e-15) == found.T


def test_the_order_of_rows_does_not_matter() -> None:
    rows = np.array(listed(FEW, MANY))[:, ::-1]
    found = summaries(rows[0].astype(int), rows[1].astype(int), rows[2])
    assert found == pytest.approx(summaries(*listed(FEW, MANY)), rel=1e-15)


def test_a_router_without_tokens_and_one_that_lacks_an_expert_have_none() -> None:
    router, expert, assigned = listed((0, 0), FEW, MANY)
    there = ~((router == 1) & (expert == 0))
    found = summaries(router[there], expert[there], assigned[there])
    assert np.isnan(found).all(axis=0).tolist() == [True, True, False]


@pytest.mark.parametrize("router", ["h.0.gate.experts", "h.0.gate.experts#2", "experts.3.experts", ".experts"])
def test_the_name_of_an_expert_leads_to_its_router(router: str) -> None:
    assert router_and_expert(expert_name(router, 12)) == (router, 12)
    assert router_and_expert(router) == (router, NO_EXPERT)


def test_rows_of_a_step_are_told_apart_by_router_call_and_micro_step() -> None:
    names = [one for call in ("", "#1") for one in (f"r.experts{call}", f"r.experts.0{call}", f"r.experts.1{call}")]
    table = SeriesTable([Series("actv", 0, "x"), *(Series(LOAD_KIND, 0, name) for name in names)])
    counts = np.array([4.0, 1, 3, 2, 2, 0, 6, 6, 0, 2, 1, 1])
    columns = np.zeros((len(COLUMNS), len(counts)))
    columns[ASSIGNED], columns[COUNT] = counts, 1.0
    columns[ROUTERS, ::3] = 1.0
    series, micro_step = np.tile(np.arange(1, 7), 2), np.repeat([0, 1], 6)
    rows = with_summaries(ExpertIndex().of(table), series, micro_step, Partials(columns))
    values, known = derive("imbalance", rows)
    assert known.tolist() == [True, False, False] * 4
    assert values[known].tolist() == [1.5, 2.0, 2.0, 1.0]
    assert derive("dead_experts", rows)[0][known].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_a_row_of_several_routers_has_no_percentile_until_it_is_computed_anew() -> None:
    table = SeriesTable(Series(LOAD_KIND, 0, name) for name in ("r.experts", "r.experts.0"))
    columns = np.zeros((len(COLUMNS), 2))
    columns[ASSIGNED], columns[ROUTERS] = 4.0, (1.0, 0.0)
    row = with_summaries(ExpertIndex().of(table), np.arange(2), np.zeros(2, np.int64), Partials(columns)).take(slice(0, 1))
    both = combine_groups(Partials.joined([row, row]), np.zeros(1, dtype=np.int64))
    assert [derive("load_p50", one)[1].tolist() for one in (row, both)] == [[True], [False]]
    assert derive("assigned", both)[0].tolist() == [8.0]


def test_the_index_of_experts_grows_with_the_table() -> None:
    table, index = SeriesTable([Series(LOAD_KIND, 0, "a.experts"), Series(LOAD_KIND, 0, "a.experts.0")]), ExpertIndex()
    assert index.of(table).tolist() == [[0, 0], [-1, 0]]
    for name in ("b.experts", "b.experts.0", "b.experts.1"):
        table.index_of(Series(LOAD_KIND, 1, name))
    assert index.of(table).tolist() == [[0, 0, 2, 2, 2], [-1, 0, -1, 0, 1]]
