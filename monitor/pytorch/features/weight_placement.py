"""What other ranks hold of a weight, as the forward of its module finds it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from monitor.coordinator.ownership import alike_over
from monitor.pytorch.frameworks.dtensor import placement_of
from monitor.pytorch.frameworks.framework import Framework
from monitor.recording.parameter_series import NamedParameter
from monitor.series import Placement


def weight_placement(framework: Framework, rank: int, parameter: NamedParameter, seen: Tensor) -> Placement:
    """How it relates to what other ranks find: one that is cut between forwards may be gathered for it.

    Args:
        parameter: As it is between forwards.
        seen: As it is now: whole, or the part of this rank.
    """
    said = placement_of(seen)
    if said is not None:
        return said
    kept = framework.placement("param_origin", parameter)
    if kept.shard is None:
        return kept
    if tuple(seen.shape) == kept.shard.global_shape:
        alike = alike_over(rank, [ranks for ranks in (kept.replicas, kept.shard.ranks) if ranks])
        return Placement(replicas=alike, unclaimed=kept.unclaimed, differing=kept.differing)
    if not kept.shard.flat:
        return kept
    # What is stepped is a run of elements; what is multiplied with, a part of the matrix.
    part = framework.placement("grad_unreduced", parameter)
    return replace(part, partial=False, data_parallel=kept.data_parallel)
