"""What a DTensor says of itself: its mesh, which ranks hold the same part, and which part that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monitor.placement import Placement, Ranks, Shard, ranks_of


def placement_of(tensor: Tensor) -> Placement | None:
    """How the local part of a DTensor relates to the parts of other ranks; None for any other tensor."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is None or placements is None or not hasattr(tensor, "_local_tensor"):
        return None
    if any(one.is_partial() for one in placements):
        return Placement(partial=True)
    alike = [place for place, one in enumerate(placements) if one.is_replicate()]
    cut = [place for place, one in enumerate(placements) if not one.is_replicate()]
    replicas = _along(mesh, alike)
    shard = Shard(_along(mesh, cut), tuple(tensor.shape), _offset(tensor)) if cut else None
    return Placement(replicas=replicas if len(replicas) > 1 else (), shard=shard if shard and len(shard.ranks) > 1 else None)


def mesh_groups(tensors: Iterable[Tensor]) -> Mapping[str, Sequence[int]]:
    """The groups of this rank in the meshes of DTensors, by the names of the meshes' dimensions."""
    found: dict[str, Sequence[int]] = {}
    for tensor in tensors:
        mesh: Any = getattr(tensor, "device_mesh", None)
        for place, name in enumerate((mesh.mesh_dim_names if mesh is not None else None) or ()):
            if name not in found:
                found[name] = _along(mesh, [place])
    return found


def _along(mesh: Any, places: Sequence[int]) -> Ranks:
    """The ranks that differ from this one in these dimensions of the mesh only."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    at = tuple(slice(None) if place in places else coordinate for place, coordinate in enumerate(here))
    return ranks_of(mesh.mesh[at].flatten().tolist())


def _offset(tensor: Any) -> tuple[int, ...]:
    """Where the local part begins; empty where it is not one piece (strided shards)."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(one).__name__ == "_StridedShard" for one in tensor.placements):
        return ()
    with torch._C._DisableTorchDispatch():
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)
