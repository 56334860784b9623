"""Which ranks hold what of a parameter that DistributedDataParallel of Megatron wraps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION, alike_over
from monitor.pytorch.place import group_ranks
from monitor.recording.parameter_series import NamedParameter
from monitor.series import LOCAL, Placement, Ranks, Shard, ranks_of


@dataclass(frozen=True, slots=True)
class _Groups:
    """The ranks around this one that concern a parameter.

    Attributes:
        reduced: Those whose gradients are added up: data- and context-parallel ranks, of an expert those that have it, too.
        copies: Those that keep a copy which is neither: of an embedding that is tied over pipeline stages, and the same part of
            other instances of the distributed optimizer.
        tensor: Tensor-parallel ranks, in the order of the parts.
        experts: Expert-parallel ranks, which have other experts under the same names.
    """

    reduced: Ranks
    copies: tuple[Ranks, ...]
    tensor: Sequence[int]
    experts: Ranks


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a distributed optimizer cuts a parameter: each of ``ranks`` steps a run of its elements.

    Attributes:
        begin: The first element of this one's run; None if it has none.
    """

    ranks: Ranks
    begin: int | None


class Layout:
    """Where the parameters of wrapped model chunks are. It asks Megatron once, and issues no collective."""

    def __init__(self, rank: int, wrappers: Sequence[DistributedDataParallel]) -> None:
        self._rank = rank
        self._wrappers = wrappers
        self._terms = {id(p) for wrapper in wrappers for p in _added_up_later(wrapper)}
        self._groups = {id(p): _groups_of(wrapper, p) for wrapper in wrappers for p in wrapper.module.parameters()}
        self._cuts = {id(p): cut for wrapper in wrappers for p, cut in _cuts(wrapper)}

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank by role. All chunks of a rank have the same."""
        one = self._wrappers[0]
        found = {role: getattr(one, f"{role}_group", None) for role in ("dp", "tp", "pp", "ep")}
        found["cp"] = parallel_state.get_context_parallel_group(check_initialized=False)
        return {role: ranks for role, group in found.items() if (ranks := _ranks(group))}

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        """How what this rank records of a parameter relates to what others record."""
        groups = self._groups.get(id(parameter.tensor))
        if groups is None:
            return LOCAL
        if kind in SAME_AFTER_REDUCTION:
            return self._reduced(parameter.tensor, groups)
        if id(parameter.tensor) in self._terms:
            return Placement(partial=True, differing=ranks_of(groups.tensor))
        shard = self._tensor_shard(parameter.tensor, groups)
        return Placement(unclaimed=self._alike(*_mates(parameter.tensor, groups)), shard=shard, differing=groups.experts)

    def _reduced(self, parameter: nn.Parameter, groups: _Groups) -> Placement:
        cut = self._cuts.get(id(parameter))
        copies = self._alike(*groups.copies)
        shard = self._tensor_shard(parameter, groups) if cut is None else self._flat_shard(parameter, groups, cut)
        alike = self._alike(*groups.copies, *([groups.reduced] if cut is None else []), *_mates(parameter, groups))
        return Placement(
            replicas=copies,
            unclaimed=alike if alike != copies else (),
            shard=shard,
            differing=groups.experts,
            data_parallel=groups.reduced,
        )

    def _tensor_shard(self, parameter: nn.Parameter, groups: _Groups) -> Shard | None:
        if _dim(parameter, groups) is None:
            return None
        return Shard(ranks_of(groups.tensor), _whole_shape(parameter, groups), _offset(self._rank, parameter, groups))

    def _flat_shard(self, parameter: nn.Parameter, groups: _Groups, cut: _Cut) -> Shard:
        """Of a parameter that is cut over tensor-parallel ranks first, if it is."""
        split = _dim(parameter, groups) is not None
        ranks = alike_over(self._rank, [cut.ranks, groups.tensor] if split else [cut.ranks])
        begin = _flat_offset(self._rank, parameter, groups)
        offset = (begin + cut.begin,) if begin is not None and cut.begin is not None else ()
        return Shard(ranks, _whole_shape(parameter, groups), offset, flat=True)

    def _alike(self, *groups: Sequence[int]) -> Ranks:
        return alike_over(self._rank, [group for group in groups if len(group) > 1])


def _groups_of(wrapper: Any, parameter: nn.Parameter) -> _Groups:
    expert = not getattr(parameter, "allreduce", True)
    reduced = wrapper.expt_dp_group if expert else wrapper.dp_cp_group
    tensor = parallel_state.get_expert_tensor_parallel_group(check_initialized=False) if expert else wrapper.tp_group
    tied = getattr(parameter, "shared_embedding", False)
    stages = parallel_state.get_embedding_group(check_initialized=False) if tied else None
    instances = getattr(wrapper, "inter_dist_opt_group", None)
    return _Groups(
        reduced=ranks_of(_ranks(reduced)),
        copies=tuple(ranks_of(_ranks(group)) for group in (stages, instances) if group is not None),
        tensor=_ranks(tensor),
        experts=ranks_of(_ranks(wrapper.ep_group)) if expert else (),
    )


def _cuts(wrapper: Any) -> Iterator[tuple[nn.Parameter, _Cut]]:
    """The parameters whose gradients a distributed optimizer has each rank reduce a part of."""
    if not wrapper.ddp_config.use_distributed_optimizer:
        return
    for buffer in [*wrapper.buffers, *wrapper.expert_parallel_buffers]:
        ranks = ranks_of(_ranks(buffer.data_parallel_group))
        buckets = next(iter(DistributedOptimizer._build_gbuf_range_map(buffer).values()))
        own = {id(p): at["param"].start for bucket in buckets for p, at in bucket["param_map"].items()}
        yield from ((p, _Cut(ranks, own.get(id(p)))) for p in buffer.params if len(ranks) > 1)


def _added_up_later(wrapper: Any) -> Iterator[nn.Parameter]:
    """The parameters of which tensor-parallel ranks hold the same, and gradients that Megatron adds up after the reduction."""
    config = wrapper.config
    if len(_ranks(wrapper.tp_group)) < 2:
        return
    for name, parameter in wrapper.module.named_parameters():
        sequence = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        of_norm = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if sequence or of_norm or getattr(parameter, "average_gradients_across_tp_domain", False):
            yield parameter


def _mates(parameter: nn.Parameter, groups: _Groups) -> list[Sequence[int]]:
    """The tensor-parallel ranks, as far as they hold the same."""
    return [] if getattr(parameter, "tensor_model_parallel", False) else [groups.tensor]


def _dim(parameter: nn.Parameter, groups: _Groups) -> int | None:
    """The dimension that is cut over tensor-parallel ranks; None if none is, or it is not known which."""
    if not getattr(parameter, "tensor_model_parallel", False) or len(groups.tensor) < 2:
        return None
    dim = getattr(parameter, "partition_dim", -1)
    return dim if 0 <= dim < parameter.ndim else None


def _whole_shape(parameter: nn.Parameter, groups: _Groups) -> tuple[int, ...]:
    cut = _dim(parameter, groups)
    return tuple(size * len(groups.tensor) if dim == cut else size for dim, size in enumerate(parameter.shape))


def _offset(rank: int, parameter: nn.Parameter, groups: _Groups) -> tuple[int, ...]:
    """Where the tensor-parallel part begins; empty where it is several runs (gate and projection of a gated layer)."""
    if getattr(parameter, "partition_stride", 1) != 1:
        return ()
    cut, place = _dim(parameter, groups), groups.tensor.index(rank)
    return tuple(size * place if dim == cut else 0 for dim, size in enumerate(parameter.shape))


def _flat_offset(rank: int, parameter: nn.Parameter, groups: _Groups) -> int | None:
    """The same in the flattened whole; None where it is no run of that."""
    cut = _dim(parameter, groups)
    if cut is None:
        return 0
    offset = _offset(rank, parameter, groups)
    if not offset or prod(parameter.shape[:cut]) != 1:
        return None
    return offset[cut] * prod(parameter.shape[cut + 1 :])


def _ranks(group: Any) -> Sequence[int]:
    """Of a process group, or of the first of several; none where there is no group."""
    one = group[0] if isinstance(group, list) else group
    return group_ranks("a group of Megatron", one) or ()
