"""What the meshes of a model's DTensors suggest of parameters that are laid out over fewer ranks, or are plain tensors.

``parallelize_module`` leaves a module that its plan does not name as it was: every tensor-parallel rank has it whole, and no
tensor says so. That the ranks hold replicas is an assumption. They may as well hold experts of their own, or their gradients be
terms of a sum (sequence parallelism by hand). So the placement is marked, and a merge holds the ranks' numbers together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION, alike_over
from monitor.pytorch.frameworks.dtensor import is_cut, layout_of, ranks_along
from monitor.series import Placement, Ranks

Layout = tuple[Any, Sequence[Any]]
"""A mesh and placements."""


def layouts_of(tensors: Iterable[Tensor]) -> list[Layout]:
    """Of DTensors, each once; also of those that DistributedDataParallel has local parts of in their place."""
    found: dict[Layout, None] = {}
    for tensor in tensors:
        spec = getattr(tensor, "_st_info", None)
        layout = layout_of(tensor) if spec is None else (spec.mesh, tuple(spec.placements))
        if layout is not None:
            found[layout] = None
    return list(found)


class Meshes:
    """The groups of this rank in the meshes of a model."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self._rank = -1
        self._cut: dict[Ranks, bool] = {}  # by group, whether a parameter is cut over it
        for mesh, placements in layouts:
            if mesh.get_coordinate() is not None:
                self._rank = mesh.get_rank()
                for dim, placement in enumerate(placements):
                    ranks = ranks_along(mesh, [dim])
                    self._cut[ranks] = self._cut.get(ranks, False) or is_cut(placement)

    def assumed(self, kind: str, placed: Placement, apart: Collection[int]) -> Placement:
        """``placed``, with the replicas over those groups that it says nothing of.

        Local gradients differ over ranks that are given other data. Over ranks that parameters are cut among they are given the
        same.

        Args:
            apart: Ranks known to hold other numbers.
        """
        if placed.partial or not self._cut:
            return placed
        cut = set(placed.shard.ranks if placed.shard else ())
        known = {self._rank, *cut, *placed.replicas, *placed.unclaimed}
        others = {*cut, *apart} - {self._rank}
        groups = [ranks for ranks, is_cut in self._cut.items() if is_cut or kind in SAME_AFTER_REDUCTION]
        silent = [ranks for ranks in groups if not known.issuperset(ranks) and others.isdisjoint(ranks)]
        if not silent:
            return placed
        alike = alike_over(self._rank, [ranks for ranks in (placed.replicas, placed.unclaimed, *silent) if ranks])
        return replace(placed, unclaimed=alike, assumed=True)
