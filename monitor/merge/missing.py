"""Which ops of whole tensors have no value because of what was recorded, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from monitor.merge.statistics import WEIGHTED, Flags, Statistics
from monitor.stats.features import FEATURES

NOT_RECORDED: Final = "not in the shards"
NOT_COUNTED: Final = "how many elements the parts have is not known: record the op shape, or the format hdf5"
NOT_WEIGHTED: Final = "how much each part weighs is not known: record the format hdf5"
OF_A_WHOLE: Final = "of a matrix that is cut no rank knows it, and what ranks know of their parts does not make it up"

_OF_A_WHOLE: Final = ("sr", "kernel_norm", "router_weight_similarity")


def missing_ops(tensors: Statistics, several: Flags) -> Counter[tuple[str, str]]:
    """How often an op has no value, by op and reason.

    Args:
        several: Whether a tensor is of several parts, shape ``(rows,)``.
    """
    found: Counter[tuple[str, str]] = Counter()
    rounded = ~tensors.exact & ~(tensors.count == 0)
    for op, known in zip(tensors.ops, tensors.known, strict=True):
        if op in _OF_A_WHOLE or rounded.any():
            found.update({(op, reason): int(which.sum()) for reason, which in _lacking(op, tensors, ~known, rounded, several)})
    return +found


def _lacking(op: str, tensors: Statistics, lacking: Flags, rounded: Flags, several: Flags) -> Iterator[tuple[str, Flags]]:
    """The reasons that there may be, and the rows that lack a value because of each."""
    if op in _OF_A_WHOLE:
        yield OF_A_WHOLE, lacking & several
    elif op in FEATURES:  # a row that was recorded has what there is
        yield NOT_COUNTED if op in WEIGHTED else NOT_WEIGHTED, lacking & rounded & several
    else:
        uncounted = np.isnan(tensors.count) & (op in (*WEIGHTED, "std"))
        yield NOT_COUNTED, lacking & rounded & uncounted
        yield NOT_RECORDED, lacking & rounded & ~uncounted
