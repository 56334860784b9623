"""What a DTensor says of itself: its mesh, which ranks hold the same part, and which part that is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION, alike_over
from monitor.series import LOCAL, Placement, Ranks, Shard, ranks_of
from monitor.stats.torch.tensors import local_shard

Indices = NDArray[np.int64]


def layout_of(tensor: Any) -> tuple[Any, Any] | None:
    """The mesh of a DTensor and its placements, which compare; None for any other tensor."""
    if not hasattr(tensor, "_local_tensor"):
        return None
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    return None if mesh is None or placements is None else (mesh, tuple(placements))


def placement_of(tensor: Tensor) -> Placement | None:
    """How the local part of a DTensor relates to the parts of other ranks; None for any other tensor.

    Between forwards DistributedDataParallel has the local parts of DTensors in their place, and notes what they are parts of.
    """
    spec = getattr(tensor, "_st_info", None)
    if spec is not None:
        return placed(spec.mesh, spec.placements, tuple(spec.shape))
    layout = layout_of(tensor)
    return None if layout is None else placed(*layout, tuple(tensor.shape))


def part_like(whole: Tensor, part: Tensor) -> Tensor | None:
    """What this rank holds of ``whole``, as far as ``part`` is of the same elements; None where that cannot be told.

    The gradient of a parameter that is cut may be whole on every rank, and is then cut when the optimizer steps.

    Args:
        whole: A tensor of any kind, of the shape of ``part``.
        part: A tensor of any kind. Without a layout of its own it is of what this rank holds of ``whole``.
    """
    held, other = local_shard(whole), local_shard(part)
    if held is None or other is None:
        return None
    wide, narrow = placement_of(whole), placement_of(part)
    if wide is None or narrow is None or layout_of(whole) == layout_of(part):
        return held
    cut = narrow.shard
    if wide.partial or wide.shard is not None or cut is None or cut.flat or not cut.offset:
        return None
    for dim, (start, length) in enumerate(zip(cut.offset, other.shape, strict=True)):
        held = held.narrow(dim, start, length)
    return held


def activation_placement(tensor: Tensor) -> Placement:
    """The same for an activation or its gradient, which every rank writes, replica or not: that it has computed it, too, may be
    what people look for.
    """
    found = placement_of(tensor)
    return LOCAL if found is None else replace(found, replicas=(), unclaimed=found.replicas, differing=())


def placed(mesh: Any, placements: Sequence[Any], shape: tuple[int, ...], apart: Collection[int] = ()) -> Placement:
    """How the local part of a tensor relates to the parts of other ranks.

    Args:
        shape: Of the whole tensor.
        apart: Dimensions of the mesh in which each rank has numbers of its own, whatever its placements say.
    """
    places = [place for place in range(len(placements)) if place not in apart]
    replicas = ranks_along(mesh, [place for place in places if placements[place].is_replicate()])
    cuts = {place: placements[place] for place in places if is_cut(placements[place])}
    parts = ranks_along(mesh, tuple(cuts))
    terms = ranks_along(mesh, [place for place in places if placements[place].is_partial()])
    return Placement(
        replicas=replicas if len(replicas) > 1 else (),
        shard=Shard(parts, shape, _offset(mesh, cuts, shape)) if len(parts) > 1 else None,
        partial=any(placements[place].is_partial() for place in places),
        differing=terms if len(terms) > 1 else (),
    )


def mesh_groups(tensors: Iterable[Tensor]) -> Mapping[str, Sequence[int]]:
    """The groups of this rank in the meshes of DTensors, by the names of the meshes' dimensions."""
    found: dict[str, Sequence[int]] = {}
    for tensor in tensors:
        mesh: Any = getattr(tensor, "device_mesh", None)
        for place, name in enumerate((mesh.mesh_dim_names if mesh is not None else None) or ()):
            if name not in found:
                found[name] = ranks_along(mesh, [place])
    return found


def mesh_ranks(tensor: Any) -> Ranks:
    """The ranks of the mesh that a DTensor is on; empty for any other tensor."""
    layout = layout_of(tensor)
    return () if layout is None else ranks_of(layout[0].mesh.flatten().tolist())


def is_cut(placement: Any) -> bool:
    """Whether it splits a tensor."""
    return not (placement.is_replicate() or placement.is_partial())


def ranks_along(mesh: Any, places: Sequence[int]) -> Ranks:
    """The ranks that differ from this one in these dimensions of the mesh only."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    at = tuple(slice(None) if place in places else coordinate for place, coordinate in enumerate(here))
    return ranks_of(mesh.mesh[at].flatten().tolist())


def _offset(mesh: Any, cuts: Mapping[int, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where the local part begins; empty where it does not lie in one piece, or has no element.

    Args:
        cuts: Dimensions of the mesh, in order, and how the tensor is cut over each.
    """
    here, sizes = mesh.get_coordinate(), mesh.shape
    held = {cut.dim: np.arange(shape[cut.dim]) for cut in cuts.values()}
    for place, cut in cuts.items():
        held[cut.dim] = _part(held[cut.dim], sizes[place], here[place], getattr(cut, "split_factor", 1))
    if any(len(indices) == 0 or indices[-1] - indices[0] >= len(indices) for indices in held.values()):
        return ()
    return tuple(int(held[dim][0]) if dim in held else 0 for dim in range(len(shape)))


def _part(indices: Indices, ranks: int, rank: int, runs: int) -> Indices:
    """The indices that one of ``ranks`` holds. A strided shard is one of each of ``runs`` runs: what is cut over this dimension
    of the mesh is what a later one has cut before.
    """
    return np.concatenate([_chunk(run, ranks, rank) for run in (_chunk(indices, runs, place) for place in range(runs))])


def _chunk(indices: Indices, chunks: int, chunk: int) -> Indices:
    """As ``torch.chunk`` cuts: all but the last of the same length, and those behind it empty."""
    length = -(-len(indices) // chunks)
    return indices[chunk * length : (chunk + 1) * length]


# --- What the meshes of a model's DTensors suggest of parameters that are laid out over fewer ranks, or are plain tensors.
#
# ``parallelize_module`` leaves a module that its plan does not name as it was: every tensor-parallel rank has it whole,
# and no tensor says so. That the ranks hold replicas is an assumption. They may as well hold experts of their own, or
# their gradients be terms of a sum (sequence parallelism by hand). So the placement is marked, and a merge holds the
# ranks' numbers together.

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
