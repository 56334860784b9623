"""Whether the ranks of a data-parallel group have different data: otherwise several do the work of one. Whether data changes
from step to step: otherwise a training sees one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.ranking.ranking import capitalized, listed
from monitor.report.bands import Numbers, Window
from monitor.report.facts import Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place, first_names
from monitor.report.kind_reader import KindReader

STEPS: Final = 8
"""Number of steps that are compared: the last ones of which all ranks have rows. Our choice."""
SAME: Final = 1e-4
"""Relative difference up to which numbers are equal: kernels of some devices add up in any order. Our choice."""
MOST_TENSORS: Final = 32
"""Tensors that are compared, spread over the model. More than a thousand ranks compare fewer, to stay within memory."""
MOST_PAIRS: Final = 40_000
"""Most pairs of a tensor and a rank. One with 8 micro-steps takes a kilobyte."""
ROLES: Final = ("dp", "dp_shard", "dp_replicate")
"""Groups whose ranks should have different data."""
OF_DATA: Final = {
    "actv_grad": (
        "gradients of activations",
        " But if the loss is linear in these activations, as that of a critic, the data may differ.",
    ),
    "grad_unreduced": (
        "local gradients",
        " But if the loop reduces gradients in the middle of backward, the data may differ.",
    ),
}
"""Kinds that depend on a rank's data, and the doubt that remains if nothing else was recorded."""
ALSO_OF_DATA: Final = {"actv": ("activations", "")}
"""Kinds that clear a suspicion. Alone, they may be of tensors that depend on no data, such as embeddings of positions, unless
inputs of the model are among them.
"""
INPUT: Final = ".input"
"""How the names of the model's own inputs begin."""

_THEN: Final = (
    "Give each rank its own part of the data: by torch's DistributedSampler, or by num_shards and shard_id of a dataset of "
    "MindSpore."
)
_IF_ONE_BATCH: Final = "That is right if it trains on one batch; if not, look at what gives it data."


def data_of_ranks(facts: Facts) -> CheckFinding:
    """Whether ranks of a data-parallel group have computed other gradients than each other."""
    if len(facts.ranks) == 1:
        return CheckFinding(NOT_LOOKED_AT, "One rank recorded: there is no other to compare with it.")
    every = {(role, ranks) for one in facts.manifests.values() for role, ranks in one.groups.items()}
    groups = [ranks for role, ranks in sorted(every) if role in ROLES and len(ranks) > 1]
    if not groups:
        return CheckFinding(NOT_LOOKED_AT, "It is not known which ranks are data-parallel.")
    kinds = {kind: words for kind, words in (OF_DATA | ALSO_OF_DATA).items() if kind in facts.kinds}
    found = {kind: last for kind in kinds if (last := _last_steps(facts.kinds[kind], len(facts.ranks)))[0]}
    by_group = [_alike(facts.ranks, group, [values for _, values in found.values()]) for group in groups]
    compared = [alike for alike in by_group if sum(map(len, alike)) > 1]
    kind = next(iter(found), "")
    has_inputs = kind in ALSO_OF_DATA and any(one.startswith(INPUT) for one in _compared(facts.kinds[kind], len(facts.ranks)))
    if not compared or not (kind in OF_DATA or has_inputs):
        says = f"Among the last steps are no {STEPS} with gradients, or inputs of the model, of all ranks of a group."
        return CheckFinding(NOT_LOOKED_AT, says)
    largest = max((one for alike in compared for one in alike), key=len)
    if len(largest) == 1:
        named = " and ".join(kinds[one][0] for one in found)
        return CheckFinding(GOOD, f"No ranks of a data-parallel group had equal {named} in all of the last {STEPS} steps.")
    steps, (what, doubt) = found[kind][0], kinds[kind]
    what = f"inputs of the model and {what}" if has_inputs else what
    says = f"{capitalized(listed(largest))} of a data-parallel group had equal {what} in each of {STEPS} steps"
    says += f" until step {steps[-1]}: they had the same data."
    return CheckFinding(BAD, says, Place(steps[0], largest[1], kind), _THEN + (doubt if len(found) == 1 else ""))


def _last_steps(rows: KindReader, ranks: int) -> tuple[list[int], Numbers]:
    """The last steps of which all ranks with rows have some, and the values of each rank, step and column.

    Columns are tensors in micro-steps. NaN is where there is none. Too few steps count as none.
    """
    window = Window(rows.steps[-2 * STEPS :])
    if len(window.steps) < STEPS:
        return [], np.zeros((ranks, 0, 0))
    chosen = _compared(rows, ranks)
    rows.feed(window, range(int(window.steps[0]), int(window.steps[-1]) + 1), names=sorted(set(chosen)))
    window = window.filled()
    _, column = np.unique(np.stack([window.series, window.micro_step]), axis=1, return_inverse=True)
    values = np.full((ranks, len(window.steps), int(column.max(initial=-1)) + 1), np.nan)
    values[window.rank, :, column.reshape(-1)] = window.values.T
    there = np.any(_shows(values), axis=2)
    of_ranks = there[there.any(axis=1)]
    shown = np.flatnonzero(of_ranks.all(axis=0))[-STEPS:]
    return (window.steps[shown].tolist() if len(of_ranks) > 1 and len(shown) == STEPS else []), values[:, shown]


def _compared(rows: KindReader, ranks: int) -> list[str]:
    """The names of the tensors that are compared: the first one executed, and others spread over the model."""
    every = [name for _, name in rows.series]
    most = max(min(MOST_PAIRS // ranks, MOST_TENSORS), 1)
    return every[:: -(-len(every) // most)]


def _shows(values: Numbers) -> NDArray[np.bool_]:
    """The values that depend on the data."""
    shows: NDArray[np.bool_] = np.isfinite(values) & (values != 0)
    return shows


def _alike(ranks: Sequence[int], group: Sequence[int], kinds: Sequence[Numbers]) -> list[list[int]]:
    """The ranks of a group by their values of all kinds. Those without any of the first kind are left out."""
    place_of = {rank: place for place, rank in enumerate(ranks)}
    there = [rank for rank in group if kinds and rank in place_of and _shows(kinds[0][place_of[rank]]).any()]
    own = {rank: np.concatenate([values[place_of[rank]].reshape(-1) for values in kinds]) for rank in there}
    found: list[list[int]] = []
    # Equal ranks are neighbours in this order, so each is compared with one other only.
    for rank in sorted(own, key=lambda one: float(np.abs(own[one][np.isfinite(own[one])]).sum())):
        if found and np.allclose(own[rank], own[found[-1][0]], rtol=SAME, atol=0, equal_nan=True):
            found[-1].append(rank)
        else:
            found.append([rank])
    return [sorted(one) for one in found]


def data_of_steps(facts: Facts) -> CheckFinding:
    """Whether every rank's inputs of the model have changed in the last steps."""
    rows = facts.kinds.get("actv")
    inputs = [name for _, name in rows.series if name.startswith(INPUT)] if rows is not None else []
    if rows is None or not inputs or len(rows.steps) < STEPS:
        return CheckFinding(NOT_LOOKED_AT, f"There are no {STEPS} steps with inputs of the model.")
    window = Window(rows.steps[-STEPS:])
    rows.feed(window, range(int(window.steps[0]), int(window.steps[-1]) + 1), names=inputs)
    window = window.filled()
    stays = (np.isfinite(window.values) & (window.values == window.values[0])).all(axis=0)
    with_inputs, changing = np.unique(window.rank), np.unique(window.rank[~stays])
    if not len(with_inputs):
        return CheckFinding(NOT_LOOKED_AT, f"The last {STEPS} steps have no inputs of the model.")
    same = [facts.ranks[rank] for rank in np.setdiff1d(with_inputs, changing).tolist()]
    if not same:
        return CheckFinding(GOOD, f"Inputs of the model changed in the last {STEPS} recorded steps.")
    where = f" on {listed(same)}" if len(facts.ranks) > 1 else ""
    same_inputs = f"The model had the same inputs ({first_names(inputs)}) in each of the last {STEPS} recorded steps{where}."
    says = f"{same_inputs} {_IF_ONE_BATCH}"
    return CheckFinding(GOOD, says, then=says)
