"""The load of experts in rows of whole tensors, computed from the counts of all ranks that have a part."""

from __future__ import annotations

import numpy as np

from monitor.merge.rows import Rows
from monitor.merge.statistics import FROM_EXPERTS, Flags, Index, Statistics
from monitor.merge.tables import order_by, starts_of_runs
from monitor.stats.loads import NO_EXPERT, router_and_expert, summaries


def fill_loads(rows: Rows, starts: Index, tensors: Statistics) -> Flags:
    """Set the columns ``FROM_EXPERTS`` of ``tensors``.

    Args:
        rows: The rows of the parts.
        starts: Where the parts of each tensor begin.

    Returns:
        Which tensors are routers, and not experts.
    """
    router, expert = _routers_and_experts(rows, starts)
    key = [rows.column("step")[starts], rows.micro_step()[starts], rows.rank[starts], rows.known("stage")[starts], router]
    order = order_by(key)
    order = np.arange(len(starts)) if order is None else order
    number = np.zeros(len(starts), dtype=np.int64)
    number[order[starts_of_runs([column[order] for column in key])[1:]]] = 1
    number[order] = np.cumsum(number[order])
    assigned = tensors.values[tensors.ops.index("assigned")]
    whole = np.bincount(number, np.where(expert == NO_EXPERT, assigned, 0.0))[number]
    columns = np.array([assigned / np.where(whole > 0, whole, 1.0), *summaries(number, expert, assigned)[:, number]])
    known = ~np.isnan(columns) & (whole > 0)
    known[0] &= expert != NO_EXPERT
    known[1:] &= expert == NO_EXPERT
    for op, values, there in zip(FROM_EXPERTS, columns, known, strict=True):
        at = tensors.ops.index(op)
        tensors.values[at], tensors.known[at] = values, there
    routers: Flags = expert == NO_EXPERT
    return routers


def _routers_and_experts(rows: Rows, starts: Index) -> tuple[Index, Index]:
    """The number of each tensor's router, and that of the expert."""
    names = rows.catalogue.texts("global_name", rows.series[starts])
    parts = [router_and_expert(name) for name in names.values.to_pylist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(router for router, _ in parts))}
    index: Index = np.array([(numbers[router], expert) for router, expert in parts], dtype=np.int64).reshape(-1, 2)
    router, expert = index[names.codes].T
    return router, expert
