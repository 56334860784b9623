"""Megatron-core: models in its own ``DistributedDataParallel``, stepped by its optimizers around those of torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer, MixedPrecisionOptimizer
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from monitor.coordinator.ownership import SAME_AFTER_REDUCTION, alike_over
from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework, LocalGradients
from monitor.pytorch.frameworks.optimizer_state import SteppedTensor
from monitor.pytorch.hooks import TorchCallPatch, runs_backward
from monitor.pytorch.optimizer_steps import innermost
from monitor.pytorch.process_group import group_ranks
from monitor.recording.arguments import MAX_WRAPPERS
from monitor.recording.attached_model import NamedParameter
from monitor.recording.backend import HookSet, Removable, StepListener, StepNotifier
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.phases import Clipping
from monitor.series import LOCAL, Placement, Ranks, Shard, ranks_of

# --- Placement of parameters in Megatron's DistributedDataParallel, and the tensors that its optimizers step for them.


@dataclass(frozen=True, slots=True)
class _RankGroups:
    """The groups of this rank for a parameter.

    Attributes:
        reduced: Ranks whose gradients are summed: data- and context-parallel ranks; for an expert, the ranks with the same
            expert.
        copies: Other groups of replicas: pipeline stages of a tied embedding, and instances of the distributed optimizer with
            the same part.
        tensor: Tensor-parallel ranks, in the order of the shards.
        experts: Expert-parallel ranks, with different experts under the same names.
    """

    reduced: Ranks
    copies: tuple[Ranks, ...]
    tensor: Sequence[int]
    experts: Ranks


@dataclass(frozen=True, slots=True)
class _OptimizerShard:
    """How a distributed optimizer shards a parameter: each of ``ranks`` steps a run of its elements.

    Attributes:
        begin: The first element of this rank's run; None if it has none.
    """

    ranks: Ranks
    begin: int | None


class MegatronLayout:
    """Placement of the parameters of wrapped model chunks. Queries Megatron once, and issues no collective."""

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
        """The placement of this rank's numbers of a parameter."""
        groups = self._groups.get(id(parameter.tensor))
        if groups is None:
            return LOCAL
        if kind in SAME_AFTER_REDUCTION:
            return self._reduced(parameter.tensor, groups)
        if id(parameter.tensor) in self._terms:
            return Placement(partial=True, differing=ranks_of(groups.tensor))
        shard = self._tensor_shard(parameter.tensor, groups)
        return Placement(unclaimed=self._alike(*_tp_replicas(parameter.tensor, groups)), shard=shard, differing=groups.experts)

    def _reduced(self, parameter: nn.Parameter, groups: _RankGroups) -> Placement:
        cut = self._cuts.get(id(parameter))
        copies = self._alike(*groups.copies)
        shard = self._tensor_shard(parameter, groups) if cut is None else self._flat_shard(parameter, groups, cut)
        alike = self._alike(*groups.copies, *([groups.reduced] if cut is None else []), *_tp_replicas(parameter, groups))
        return Placement(
            replicas=copies,
            unclaimed=alike if alike != copies else (),
            shard=shard,
            differing=groups.experts,
            data_parallel=groups.reduced,
        )

    def _tensor_shard(self, parameter: nn.Parameter, groups: _RankGroups) -> Shard | None:
        if _dim(parameter, groups) is None:
            return None
        return Shard(ranks_of(groups.tensor), _whole_shape(parameter, groups), _offset(self._rank, parameter, groups))

    def _flat_shard(self, parameter: nn.Parameter, groups: _RankGroups, cut: _OptimizerShard) -> Shard:
        """The flat shard of a parameter, which may also be sharded over tensor-parallel ranks."""
        split = _dim(parameter, groups) is not None
        ranks = alike_over(self._rank, [cut.ranks, groups.tensor] if split else [cut.ranks])
        begin = _flat_offset(self._rank, parameter, groups)
        offset = (begin + cut.begin,) if begin is not None and cut.begin is not None else ()
        return Shard(ranks, _whole_shape(parameter, groups), offset, flat=True)

    def _alike(self, *groups: Sequence[int]) -> Ranks:
        return alike_over(self._rank, [group for group in groups if len(group) > 1])


def _groups_of(wrapper: Any, parameter: nn.Parameter) -> _RankGroups:
    expert = not getattr(parameter, "allreduce", True)
    reduced = wrapper.expt_dp_group if expert else wrapper.dp_cp_group
    tensor = parallel_state.get_expert_tensor_parallel_group(check_initialized=False) if expert else wrapper.tp_group
    tied = getattr(parameter, "shared_embedding", False)
    stages = parallel_state.get_embedding_group(check_initialized=False) if tied else None
    instances = getattr(wrapper, "inter_dist_opt_group", None)
    return _RankGroups(
        reduced=ranks_of(_ranks(reduced)),
        copies=tuple(ranks_of(_ranks(group)) for group in (stages, instances) if group is not None),
        tensor=_ranks(tensor),
        experts=ranks_of(_ranks(wrapper.ep_group)) if expert else (),
    )


def _cuts(wrapper: Any) -> Iterator[tuple[nn.Parameter, _OptimizerShard]]:
    """The parameters whose gradients a distributed optimizer reduce-scatters."""
    if not wrapper.ddp_config.use_distributed_optimizer:
        return
    for buffer in [*wrapper.buffers, *wrapper.expert_parallel_buffers]:
        ranks = ranks_of(_ranks(buffer.data_parallel_group))
        buckets = next(iter(DistributedOptimizer._build_gbuf_range_map(buffer).values()))
        own = {id(p): at["param"].start for bucket in buckets for p, at in bucket["param_map"].items()}
        yield from ((p, _OptimizerShard(ranks, own.get(id(p)))) for p in buffer.params if len(ranks) > 1)


def _added_up_later(wrapper: Any) -> Iterator[nn.Parameter]:
    """The parameters that tensor-parallel ranks replicate and whose gradients Megatron sums over them after the reduction."""
    config = wrapper.config
    if len(_ranks(wrapper.tp_group)) < 2:
        return
    for name, parameter in wrapper.module.named_parameters():
        sequence = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        of_norm = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if sequence or of_norm or getattr(parameter, "average_gradients_across_tp_domain", False):
            yield parameter


def _tp_replicas(parameter: nn.Parameter, groups: _RankGroups) -> list[Sequence[int]]:
    """The tensor-parallel ranks, if they replicate the parameter."""
    return [] if getattr(parameter, "tensor_model_parallel", False) else [groups.tensor]


def _dim(parameter: nn.Parameter, groups: _RankGroups) -> int | None:
    """The dimension that is sharded over tensor-parallel ranks; None if there is none, or it is unknown."""
    if not getattr(parameter, "tensor_model_parallel", False) or len(groups.tensor) < 2:
        return None
    dim = getattr(parameter, "partition_dim", -1)
    return dim if 0 <= dim < parameter.ndim else None


def _whole_shape(parameter: nn.Parameter, groups: _RankGroups) -> tuple[int, ...]:
    cut = _dim(parameter, groups)
    return tuple(size * len(groups.tensor) if dim == cut else size for dim, size in enumerate(parameter.shape))


def _offset(rank: int, parameter: nn.Parameter, groups: _RankGroups) -> tuple[int, ...]:
    """The offset of the tensor-parallel shard; empty if it is several runs (gate and projection of a gated layer)."""
    if getattr(parameter, "partition_stride", 1) != 1:
        return ()
    cut, place = _dim(parameter, groups), groups.tensor.index(rank)
    return tuple(size * place if dim == cut else 0 for dim, size in enumerate(parameter.shape))


def _flat_offset(rank: int, parameter: nn.Parameter, groups: _RankGroups) -> int | None:
    """The offset in the flattened whole; None if the shard is no contiguous run there."""
    cut = _dim(parameter, groups)
    if cut is None:
        return 0
    offset = _offset(rank, parameter, groups)
    if not offset or prod(parameter.shape[:cut]) != 1:
        return None
    return offset[cut] * prod(parameter.shape[cut + 1 :])


def _ranks(group: Any) -> Sequence[int]:
    """The ranks of a process group, or of the first of a list; empty without a group."""
    one = group[0] if isinstance(group, list) else group
    return group_ranks("a group of Megatron", one) or ()


# --- The tensors that torch optimizers inside Megatron's step: fp32 copies of parameters, shards of copies, or parameters.

GROUPS: Final = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
)
"""Attributes of Megatron's optimizers: parameters of the model, and the tensors stepped for them. First those of
``DistributedOptimizer``, then those of ``Float16OptimizerWithFloat16Params``.
"""


@dataclass(frozen=True, slots=True)
class MasterWeight:
    """The tensor that a torch optimizer steps for a parameter of the model.

    Attributes:
        tensor: Its fp32 copy, this rank's flat part of that copy, or the parameter itself.
        optimizer: Keeps the moments, under ``tensor``.
        decoupled: Whether the optimizer keeps master weight and moments in its own format (precision-aware).
    """

    tensor: Tensor
    optimizer: Optimizer
    decoupled: bool = False

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the step. Between ``prepare_grads`` and clipping it is the reduced gradient without the loss
        scale.
        """
        found: Tensor | None = getattr(self.tensor, "decoupled_grad", None) if self.decoupled else self.tensor.grad
        return found


class MasterWeights:
    """The parameters of a model, and the tensors stepped for them.

    Attributes:
        given: The optimizer that the user passed: Megatron's, or torch's inside it.
        optimizer: The first torch optimizer inside; None on a rank where there is nothing to step.
    """

    def __init__(self, optimizer: Any) -> None:
        """Take what the user passed.

        Raises:
            TypeError: It is no known optimizer.
        """
        self.given = _megatron_optimizer(optimizer)
        inner = torch_optimizers(self.given) if isinstance(self.given, MegatronOptimizer) else [self.given]
        self.optimizer: Optimizer | None = inner[0] if inner else None
        self._inner = inner
        self._stepping: Any = None
        self._of: dict[int, MasterWeight] = {}
        if isinstance(self.given, MegatronOptimizer):
            self._adopt(self.given)

    def belong_to(self, optimizer: Any) -> bool:
        """Whether an optimizer of Megatron is, wraps or belongs to the one that was passed. If so, its stepped tensors are
        taken.
        """
        wrapped = torch_optimizers(optimizer)
        if optimizer is not self.given and not any(one is other for one in wrapped for other in self._inner):
            return False
        if optimizer is not self._stepping:
            self._adopt(optimizer)
        return True

    def of(self, parameter: nn.Parameter) -> MasterWeight | None:
        """The tensor stepped for a parameter; None if there is none on this rank, or it is not known yet."""
        return self._of.get(id(parameter))

    @property
    def known(self) -> bool:
        """Whether the stepped tensors are known."""
        return bool(self._of)

    @property
    def parameters(self) -> set[int]:
        """The ids of the parameters of the model that are stepped on this rank."""
        return set(self._of)

    def _adopt(self, optimizer: Any) -> None:
        self._stepping = optimizer
        self._of = {id(p): stepped for member in members(optimizer) for p, stepped in _stepped_by(member)}


def members(optimizer: Any) -> Sequence[Any]:
    """The members of a chained optimizer; any other optimizer alone."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [member for one in chained for member in members(one)]


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """The torch optimizers inside. A member without parameters has none."""
    return [member.optimizer for member in members(optimizer) if isinstance(member.optimizer, Optimizer)]


def _megatron_optimizer(optimizer: Any) -> Any:
    """Megatron's optimizer inside other wrappers, or else the torch optimizer."""
    found = optimizer
    for _ in range(MAX_WRAPPERS):
        if found is None or isinstance(found, MegatronOptimizer):
            break
        found = getattr(found, "optimizer", None)
    if not isinstance(found, MegatronOptimizer):
        return innermost(optimizer)
    if any("LayerWise" in cls.__name__ for cls in type(found).__mro__):
        raise TypeError(
            f"optimizer is a {type(found).__name__}, which the monitor cannot observe: each of its ranks steps whole layers. "
            "Use the optimizer that get_megatron_optimizer makes."
        )
    return found


def _stepped_by(member: Any) -> Iterator[tuple[nn.Parameter, MasterWeight]]:
    inner = member.optimizer
    if not isinstance(inner, Optimizer):
        return
    decoupled = bool(getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
    for parameter, tensor in _pairs(member, inner, decoupled=decoupled):
        yield parameter, MasterWeight(tensor, inner, decoupled)


def _pairs(member: Any, inner: Optimizer, *, decoupled: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
    grouped = [(model, stepped) for model, stepped in GROUPS if hasattr(member, model)]
    for model, stepped in grouped:
        kept = "shard_float16_groups" if decoupled and stepped == "shard_fp32_from_float16_groups" else stepped
        for parameters, tensors in zip(getattr(member, model), getattr(member, kept), strict=True):
            yield from zip(parameters, tensors, strict=True)
    if not grouped:
        yield from ((p, p) for group in inner.param_groups for p in group["params"])


# --- Patches of calls inside Megatron for which it has no hooks: the beginning of a gradient reduction, and its optimizers'
# steps. The wrapped torch optimizers have hooks, but these run after clipping and not in a skipped step.

START_GRAD_SYNC: Final = TorchCallPatch(_ParamAndGradBucketGroup, "start_grad_sync")
STEPS: Final = tuple(
    TorchCallPatch(owner, name)
    for owner in (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer)
    for name in ("step", "prepare_grads")
)


def check_version() -> None:
    """Raises ``ValueError`` if a method to be patched is missing."""
    for patch in (START_GRAD_SYNC, *STEPS):
        if not patch.fits:
            raise ValueError(unknown_version(f"{patch.owner.__name__} has no {patch.name}"))


def unknown_version(what: str) -> str:
    """The message that this version of Megatron is unknown."""
    import megatron.core

    version = getattr(megatron.core, "__version__", "of no known version")
    return f"The monitor cannot observe megatron-core {version} ({what}): use a version that is known to work, such as 0.16."


# --- Local gradients under Megatron: its hooks add each backward's gradient to ``main_grad``, until it is reduced.


class MainGradients(CallListener):
    """Reports ``main_grad`` after each backward, and the local sum when its reduction begins.

    Megatron adds in a hook after the accumulation of each parameter's gradient; the monitor's hook runs after it. With
    ``overlap_grad_reduce`` Megatron's hook itself begins the reduction, for its parameter and others. Gradients not reported by
    then are reported before the reduction.
    """

    def __init__(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> None:
        self._known = {id(one.tensor): one for one in parameters if _main_grad(one) is not None}
        self._gradients = gradients
        self._failures = failures
        self._backward: dict[NamedParameter, int] = {}
        self._hooks = HookSet()
        for one in self._known.values():
            # Gradients computed after backward come later than this hook; a frozen parameter has none.
            if one.tensor.requires_grad and not getattr(one.tensor, "skip_backward_post_hook", False):
                self._hooks.add(self._hook(one))
        START_GRAD_SYNC.add(self)

    def remove(self) -> None:
        START_GRAD_SYNC.remove(self)
        self._hooks.remove()

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._gradients.wanted:
            self._failures.guarded("reading gradients before they are reduced", self._sync_begins)(*args, **kwargs)

    def _sync_begins(self, group: Any, *_: Any, **__: Any) -> None:
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # the reduction has begun already: this call does nothing
        for parameter in group.params:
            known = self._known.get(id(parameter))
            if known is not None:
                if runs_backward():
                    self._added(known)
                self._report(known, complete=True)

    def _hook(self, parameter: NamedParameter) -> Removable:
        # Python's garbage collector does not traverse these hooks: a strong reference would leak the model.
        added, known = weakref.WeakMethod(self._added), weakref.ref(parameter)

        def after(*_: Any) -> None:
            living, watched = added(), known()
            if living is not None and watched is not None:
                living(watched)

        with torch.enable_grad():
            node = get_gradient_edge(parameter.tensor).node
        return node.register_hook(self._failures.guarded("reading the gradient", after, of=parameter.name))

    def _added(self, parameter: NamedParameter) -> None:
        """Megatron has added this backward's gradient, or is about to reduce it."""
        if not self._gradients.wanted:
            return
        backward = torch._C._current_graph_task_id()
        if self._backward.get(parameter) != backward:
            self._backward[parameter] = backward
            self._report(parameter, complete=False)

    def _report(self, parameter: NamedParameter, *, complete: bool) -> None:
        gradient = _main_grad(parameter)
        if gradient is not None:
            self._gradients.arrived(parameter, gradient, complete=complete)


def _main_grad(parameter: NamedParameter) -> Tensor | None:
    found: Tensor | None = getattr(parameter.tensor, "main_grad", None)
    return found


# --- Steps and skipped steps of Megatron's optimizers.


class MegatronSteps(CallListener):
    """Reports the steps of Megatron's optimizer to a listener. A chained optimizer's members step together.

    Gradients are ready when ``prepare_grads`` has returned: reduced, divided by the loss scale, and not yet clipped.

    Attributes:
        optimizers: The first torch optimizer inside it, which represents all; None on a rank where nothing is stepped.
    """

    evaluating = False

    def __init__(self, weights: MasterWeights, listener: StepListener, failures: Failures) -> None:
        self.optimizers: tuple[Optimizer | None] = (weights.optimizer,)
        self._weights = weights
        self._listener = listener
        self._guarded = failures.guarded
        self._stepping: Any = None
        for patch in STEPS:
            patch.add(self)

    def remove(self) -> None:
        for patch in STEPS:
            patch.remove(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if patch.name == "step" and self._stepping is None:
            self._guarded("reading before the step", self._begin)(args[0])

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del kwargs
        if args[0] is not self._stepping:
            return
        if patch.name == "prepare_grads":
            self._guarded("reading gradients", self._listener.gradients_ready)(*self.optimizers)
        else:
            self._guarded("ending the step", self._end)(result)

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if patch.name == "step" and args[0] is self._stepping:
            self._stepping = None

    def _begin(self, optimizer: Any) -> None:
        if not self._weights.belong_to(optimizer):
            return
        self._stepping = optimizer
        if any(getattr(member, "grad_scaler", None) is not None for member in members(optimizer)):
            self._listener.loss_scale(*self.optimizers, optimizer.get_loss_scale())
        if self.optimizers != (None,):
            self._listener.before_step(*self.optimizers)

    def _end(self, result: Any) -> None:
        """Take the result of ``step``, whose first element is whether it was done."""
        stepping, self._stepping = self._stepping, None
        if result[0]:
            if result[1]:  # None or 0 without clipping
                limit = members(stepping)[0].config.clip_grad
                self._listener.clipped(Clipping(result[1], limit if limit > 0 else None, is_total=True))
            self._listener.after_step(*self.optimizers)
        else:
            self._listener.after_step(*self.optimizers, skipped=True)


MEAN: Final = (
    "a rank's own sum over its micro-batches; grad_reduced is the mean of these over the data- and context-parallel ranks"
)
PER_TOKEN: Final = (
    "a rank's own sum over its micro-batches; grad_reduced is the sum of these over the data- and context-parallel ranks, "
    "divided by the number of tokens"
)
REDUCED: Final = "divided by the loss scale, before clipping"
TIED: Final = "for an embedding that is tied over pipeline stages also summed over these stages"
EXPERTS: Final = (
    "for experts the sum over the ranks with the same expert, divided by the number of all data- and context-parallel ranks; "
    "each expert-parallel rank has experts of its own under the same names"
)
DECOUPLED: Final = "missing: a precision-aware optimizer keeps them in its own format"


class Megatron(Framework):
    """Model chunks inside Megatron's DistributedDataParallel, stepped by one of its optimizers, possibly a chained one."""

    name = "megatron"
    reports_twice = clips_in_step = True

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(chunks, None, main_grad=main_grad)
        check_version()
        self._weights = MasterWeights(optimizer)
        self.optimizers = () if self._weights.optimizer is None else (self._weights.optimizer,)
        self._wrappers = list(dict.fromkeys(_wrappers(chunks, self._weights.given)))
        if not self._wrappers:
            raise ValueError(
                "No chunk of the model is inside DistributedDataParallel of megatron.core: pass the chunks after it has "
                "wrapped them. Megatron's optimizers are not observed with another wrapper, such as Megatron-FSDP."
            )
        # Gathered weights overwrite gradients.
        self.loses_gradients = any(getattr(w.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False) for w in self._wrappers)
        try:
            self._layout = MegatronLayout(dist.get_rank(), self._wrappers)
        except (AttributeError, KeyError) as error:
            raise ValueError(unknown_version(f"DistributedDataParallel lacks an attribute: {error}")) from error

    def groups(self) -> Mapping[str, Sequence[int]]:
        return self._layout.groups()

    def notes(self) -> Mapping[str, str]:
        parameters = [p for wrapper in self._wrappers for p in wrapper.module.parameters()]
        per_token = any(wrapper.config.calculate_per_token_loss for wrapper in self._wrappers)
        special = [TIED] if any(getattr(p, "shared_embedding", False) for p in parameters) else []
        special += [EXPERTS] if any(not getattr(p, "allreduce", True) for p in parameters) else []
        notes = {"grad_unreduced": PER_TOKEN if per_token else MEAN, "grad_reduced": "; ".join([REDUCED, *special])}
        return notes | ({"param_origin": DECOUPLED, "exp_avg": DECOUPLED} if self._decoupled() else {})

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        return self._layout.placement(kind, parameter)

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        return MainGradients(parameters, gradients, failures)

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        stepped = self._weights.of(parameter.tensor)
        return None if stepped is None else stepped.gradient

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """Megatron's schedules reduce gradients before the step."""
        del parameter
        return True

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        stepped = self._weights.of(parameter.tensor)
        if stepped is not None:
            return None if stepped.decoupled else stepped.tensor
        # If the parameter is trained, another rank steps it. If not, the weight stays in place.
        return parameter.tensor if self._weights.known and not parameter.tensor.requires_grad else None

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> SteppedTensor | None:
        del optimizer  # the first one of a chain
        found = self._weights.of(parameter.tensor)
        return None if found is None or found.decoupled else SteppedTensor(found.optimizer, found.tensor)

    def held(self, optimizer: Any) -> None:
        """None for all: members of a chained optimizer step together."""
        del optimizer

    def steps(self, listener: StepListener, failures: Failures) -> StepNotifier:
        return MegatronSteps(self._weights, listener, failures)

    def _decoupled(self) -> bool:
        stepped = (self._weights.of(p) for chunk in self.chunks for p in chunk.parameters())
        return any(one is not None and one.decoupled for one in stepped)


def _wrappers(chunks: Sequence[nn.Module], optimizer: Any) -> Iterator[DistributedDataParallel]:
    """The wrappers of the chunks; if chunks were passed unwrapped, those that the optimizer references."""
    yield from (module for chunk in chunks for module in chunk.modules() if isinstance(module, DistributedDataParallel))
    for member in members(optimizer):
        yield from (one for one in getattr(member, "model_chunks", ()) if isinstance(one, DistributedDataParallel))
