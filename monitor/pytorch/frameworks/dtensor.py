"""Placement of DTensors: the mesh, the ranks that hold the same part, and the part's position."""

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
    """The placement of the local part of a DTensor; None for any other tensor.

    Between forwards DistributedDataParallel replaces DTensors by their local parts, and notes their layout there.
    """
    spec = getattr(tensor, "_st_info", None)
    if spec is not None:
        return placed(spec.mesh, spec.placements, tuple(spec.shape))
    layout = layout_of(tensor)
    return None if layout is None else placed(*layout, tuple(tensor.shape))


def part_like(whole: Tensor, part: Tensor) -> Tensor | None:
    """The elements of ``whole`` on this rank that correspond to ``part``; None if unknown.

    The gradient of a sharded parameter may be replicated, and is then sharded when the optimizer steps.

    Args:
        whole: Any tensor, of the global shape of ``part``.
        part: Any tensor. Without a layout it corresponds to the local part of ``whole``.
    """
    held = local_shard(whole)
    if held is None:
        return None
    wide, narrow = placement_of(whole), placement_of(part)
    if wide is None or narrow is None or layout_of(whole) == layout_of(part):
        return held  # also beside a part whose elements only its class finds, as a quantized weight
    cut, other = narrow.shard, local_shard(part)
    if other is None or wide.partial or wide.shard is not None or cut is None or cut.flat or not cut.offset:
        return None
    for dim, (start, length) in enumerate(zip(cut.offset, other.shape, strict=True)):
        held = held.narrow(dim, start, length)
    return held


def activation_placement(tensor: Tensor) -> Placement:
    """The placement of an activation or its gradient. Every rank writes it, replica or not: users may want to compare the
    ranks.
    """
    found = placement_of(tensor)
    return LOCAL if found is None else replace(found, replicas=(), unclaimed=found.replicas, differing=())


def placed(mesh: Any, placements: Sequence[Any], shape: tuple[int, ...], apart: Collection[int] = ()) -> Placement:
    """The placement of the local part of a tensor.

    Args:
        shape: Shape of the whole tensor.
        apart: Mesh dimensions along which each rank has numbers of its own, whatever the placements say.
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
    """Whether a placement shards a tensor."""
    return not (placement.is_replicate() or placement.is_partial())


def ranks_along(mesh: Any, places: Sequence[int]) -> Ranks:
    """The ranks of the mesh along these dimensions, through this rank."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    at = tuple(slice(None) if place in places else coordinate for place, coordinate in enumerate(here))
    return ranks_of(mesh.mesh[at].flatten().tolist())


def _offset(mesh: Any, cuts: Mapping[int, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The offset of the local part; empty if the part is not contiguous or has no element.

    Args:
        cuts: The shard placement of each mesh dimension, in order.
    """
    here, sizes = mesh.get_coordinate(), mesh.shape
    held = {cut.dim: np.arange(shape[cut.dim]) for cut in cuts.values()}
    for place, cut in cuts.items():
        held[cut.dim] = _part(held[cut.dim], sizes[place], here[place], getattr(cut, "split_factor", 1))
    if any(len(indices) == 0 or indices[-1] - indices[0] >= len(indices) for indices in held.values()):
        return ()
    return tuple(int(held[dim][0]) if dim in held else 0 for dim in range(len(shape)))


def _part(indices: Indices, ranks: int, rank: int, runs: int) -> Indices:
    """The indices that one of ``ranks`` holds. A strided shard takes one chunk of each of ``runs`` runs: a later mesh dimension
    has split the tensor before.
    """
    return np.concatenate([_chunk(run, ranks, rank) for run in (_chunk(indices, runs, place) for place in range(runs))])


def _chunk(indices: Indices, chunks: int, chunk: int) -> Indices:
    """One chunk as ``torch.chunk`` splits: all of the same length, but for a shorter last one and empty ones after it."""
    length = -(-len(indices) // chunks)
    return indices[chunk * length : (chunk + 1) * length]


# --- Assumed replicas: parameters that are laid out over fewer ranks than the model's meshes, or are plain tensors.
# ``parallelize_module`` skips modules that its plan does not name: every tensor-parallel rank has them whole, as plain tensors.
# A mesh may also be a slice of a mesh of more ranks, over which a training loop averages gradients itself.
# That these are replicas is an assumption. The ranks may hold different experts, or their gradients may be terms of a sum
# (sequence parallelism by hand). So the placement is marked as assumed, and a merge compares the ranks' numbers.

Layout = tuple[Any, Sequence[Any]]
"""A mesh and placements."""


def layouts_of(tensors: Iterable[Tensor]) -> list[Layout]:
    """The distinct layouts of DTensors, also of those that DistributedDataParallel replaced by local parts."""
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
        self._cut: dict[Ranks, bool] = {}  # by group: whether a parameter is sharded over it
        self._around: set[Ranks] = set()  # groups of the meshes that a mesh is a slice of
        for mesh, placements in layouts:
            if mesh.get_coordinate() is not None:
                self._rank = mesh.get_rank()
                for dim, placement in enumerate(placements):
                    ranks = ranks_along(mesh, [dim])
                    self._cut[ranks] = self._cut.get(ranks, False) or is_cut(placement)
                whole = _sliced_from(mesh)
                self._around.update(ranks_along(whole, [dim]) for dim in range(whole.ndim))

    def assumed(self, kind: str, placed: Placement, apart: Collection[int], *, around: bool) -> Placement:
        """``placed``, with assumed replicas over those groups that it does not mention.

        Local gradients differ between ranks with different data. Ranks that shard a parameter are assumed to get the same data.

        Args:
            apart: Ranks known to hold other numbers.
            around: Whether ranks outside the model's meshes may hold replicas.
        """
        if placed.partial or not self._cut:
            return placed
        cut = set(placed.shard.ranks if placed.shard else ())
        known = {self._rank, *cut, *placed.replicas, *placed.unclaimed}
        others = {*cut, *apart} - {self._rank}
        reduced = kind in SAME_AFTER_REDUCTION
        groups = [ranks for ranks, is_cut in self._cut.items() if is_cut or reduced]
        groups += sorted(self._around.difference(self._cut)) if around and reduced else []
        silent = [ranks for ranks in groups if not known.issuperset(ranks) and others.isdisjoint(ranks)]
        if not silent:
            return placed
        alike = alike_over(self._rank, [ranks for ranks in (placed.replicas, placed.unclaimed, *silent) if ranks])
        return replace(placed, unclaimed=alike, assumed=True)


def _sliced_from(mesh: Any) -> Any:
    """The mesh that a mesh is a slice of; the mesh itself if it is none."""
    find = getattr(mesh, "_get_root_mesh", None)
    return (None if find is None else find()) or mesh
