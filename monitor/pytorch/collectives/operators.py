"""Describes the communication operators of torch: names, positions of inputs and outputs, and process groups."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from monitor.recording.collectives import Labels, NamedGroup

NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
ISSUERS: Final = ("_dtensor",)

Rooted = Literal["inputs", "outputs", ""]


@dataclass(frozen=True, slots=True)
class _C10dOperator:
    """An operator of ``c10d``: the positions of its input and output, and which of them exists on the root only.

    Attributes:
        methods: Methods of ``ProcessGroup`` that call it, with tensors at the same positions after the group.
    """

    name: str
    inputs: int | None
    outputs: int | None
    methods: tuple[str, ...]
    rooted: Rooted = ""


_C10D: Final[Mapping[str, _C10dOperator]] = {
    "allreduce_": _C10dOperator("all_reduce", 0, 0, ("allreduce",)),
    "allreduce_coalesced_": _C10dOperator("all_reduce_coalesced", 0, 0, ("allreduce_coalesced",)),
    "broadcast_": _C10dOperator("broadcast", 0, 0, ("broadcast",), "inputs"),
    "reduce_": _C10dOperator("reduce", 0, 0, ("reduce",), "outputs"),
    "allgather_": _C10dOperator("all_gather", 1, 0, ("allgather",)),
    "_allgather_base_": _C10dOperator("all_gather_into_tensor", 1, 0, ("_allgather_base", "all_gather_single")),
    "allgather_coalesced_": _C10dOperator("all_gather_coalesced", 1, 0, ("allgather_coalesced",)),
    "allgather_into_tensor_coalesced_": _C10dOperator(
        "all_gather_into_tensor_coalesced", 1, 0, ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")
    ),
    "reduce_scatter_": _C10dOperator("reduce_scatter", 1, 0, ("reduce_scatter",)),
    "_reduce_scatter_base_": _C10dOperator("reduce_scatter_tensor", 1, 0, ("_reduce_scatter_base", "reduce_scatter_single")),
    "reduce_scatter_tensor_coalesced_": _C10dOperator(
        "reduce_scatter_tensor_coalesced", 1, 0, ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
    ),
    "alltoall_": _C10dOperator("all_to_all", 1, 0, ("alltoall",)),
    "alltoall_base_": _C10dOperator("all_to_all_single", 1, 0, ("alltoall_base", "all_to_all_single")),
    "gather_": _C10dOperator("gather", 1, 0, ("gather",), "outputs"),
    "scatter_": _C10dOperator("scatter", 1, 0, ("scatter",), "inputs"),
    "send": _C10dOperator("send", 0, None, ("send",)),
    "recv_": _C10dOperator("recv", None, 0, ("recv",)),
    "recv_any_source_": _C10dOperator("recv", None, 0, ("recv_anysource",)),
    "barrier": _C10dOperator("barrier", None, None, ("barrier",)),
}

_NO_TRAFFIC: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "monitored_barrier_"})
_P2P_BATCH: Final = "batch_p2p_ops"


@dataclass(frozen=True, slots=True)
class TorchOperator:
    """A way to call an operator.

    Attributes:
        name: Its name in the recording.
        inputs, outputs: Argument positions; None if there are none, or if the result holds them.
        rooted: What only the root has: inputs, outputs or nothing.
        group: Position of the process group, or of its name.
    """

    name: str
    inputs: int | None
    outputs: int | None
    rooted: Rooted
    group: int

    functional: ClassVar[bool] = False
    """Whether the result holds the outputs, which are complete once ``wait_tensor`` has returned."""

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        """The input tensors. Empty for a call that torch will refuse."""
        return _tensors(args[self.inputs]) if self.inputs is not None and self.inputs < len(args) else []

    def given(self, args: Sequence[Any], _result: Any) -> list[Tensor]:
        """The output tensors, filled once the call has completed."""
        return _tensors(args[self.outputs]) if self.outputs is not None and self.outputs < len(args) else []

    def root(self, args: Sequence[Any]) -> int:
        """The root's rank in the group, for an operator that is ``rooted``."""
        raise NotImplementedError

    def group_of(self, args: Sequence[Any]) -> Any:
        """The process group, or its name."""
        return args[self.group]


@dataclass(frozen=True, slots=True)
class Overload(TorchOperator):
    """One overload in torch's dispatcher.

    Attributes:
        namespace: Its namespace in the dispatcher.
        schema_name: Its name there, with the overload's.
        overload: The operator itself.
        rooted_at: Position of the root's rank.
    """

    namespace: str
    schema_name: str
    overload: Any
    rooted_at: int | None

    def root(self, args: Sequence[Any]) -> int:
        return int(args[self.rooted_at])  # type: ignore[index]


class Functional(Overload):
    """An operator whose result holds its outputs."""

    functional = True

    def given(self, _args: Sequence[Any], result: Any) -> list[Tensor]:
        return _tensors(result)


class BatchedP2P(Functional):
    """``batch_p2p_ops``: sent tensors are inputs, received tensors are outputs."""

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return [tensor for kind, tensor in zip(args[0], args[3], strict=True) if kind == "isend"]

    def given(self, args: Sequence[Any], result: Any) -> list[Tensor]:
        return [tensor for kind, tensor in zip(args[0], result, strict=True) if kind == "irecv"]


@dataclass(frozen=True, slots=True)
class Method(TorchOperator):
    """A method of ``ProcessGroup``; the group is its first argument.

    Attributes:
        method: Its name.
    """

    method: str

    def root(self, args: Sequence[Any]) -> int:
        rest = args[1 + max(self.inputs or 1, self.outputs or 1)]
        return int(getattr(rest, "rootRank", rest))

    def positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Arguments by position, including those passed by keyword."""
        given = dict(kwargs)
        found = list(args)
        for names in (_FIRST, _SECOND)[len(args) - 1 : 1 + ((self.inputs or 1) != (self.outputs or 1))]:
            found.append(next((given.pop(name) for name in names if name in given), None))
        return [*found, *given.values()]


_OUTPUTS: Final = ("output_tensors", "output_tensor", "outputTensors", "outputTensor", "output_lists", "output")
_FIRST: Final = ("tensors", "tensor", *_OUTPUTS)
_SECOND: Final = ("input_tensors", "input_tensor", "inputTensors", "inputTensor", "input_list", "input")
"""Names of the tensor arguments of ``ProcessGroup`` methods."""


@cache
def methods() -> tuple[Method, ...]:
    """The methods of ``ProcessGroup`` in this version of torch that move tensors between ranks."""
    return tuple(
        Method(known.name, _next(known.inputs), _next(known.outputs), known.rooted, 0, method)
        for known in _C10D.values()
        for method in known.methods
        if hasattr(dist.ProcessGroup, method)
    )


def _next(position: int | None) -> int | None:
    return None if position is None else position + 1


@cache
def operators() -> tuple[Overload, ...]:
    """Every operator in this version of torch that moves tensors between ranks."""
    import torch.distributed._functional_collectives  # registers the functional ones

    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in NAMESPACES and name not in _NO_TRAFFIC:
            found.append(_described(namespace, name, schema))
    return tuple(one for one in found if one is not None)


@cache
def issuers() -> tuple[tuple[str, str, Any], ...]:
    """Operators written in C++ that call those of ``c10d``: the namespace of each, its name there, and the operator."""
    import torch.distributed._functional_collectives  # registers them

    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in ISSUERS and any(argument.name == "group_name" for argument in schema.arguments):
            full_name = f"{name}.{schema.overload_name}" if schema.overload_name else name
            overload = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
            found.append((namespace, full_name, overload))
    return tuple(found)


def wait_operator() -> Any:
    """The operator that waits for functional collectives."""
    return torch.ops._c10d_functional.wait_tensor.default


def _described(namespace: str, name: str, schema: Any) -> Overload | None:
    """An operator's overload; None for one of another version of torch, whose inputs and outputs are unknown."""
    known = _C10D.get(name) if namespace == "c10d" else _functional(name)
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    group = places.get("process_group", places.get("group_name"))
    if known is None or group is None:
        return None
    packet = getattr(getattr(torch.ops, namespace), name)
    full_name = f"{name}.{schema.overload_name}" if schema.overload_name else name
    overload = getattr(packet, schema.overload_name or "default")
    made = Overload if namespace == "c10d" else BatchedP2P if name == _P2P_BATCH else Functional
    root = places.get("root_rank", places.get("src"))
    return made(known.name, known.inputs, known.outputs, known.rooted, group, namespace, full_name, overload, root)


def _functional(name: str) -> _C10dOperator:
    """A functional operator: named like the function plus the suffix of an in-place or out variant. Its first argument is the
    input.
    """
    if name == _P2P_BATCH:
        return _C10dOperator("batch_isend_irecv", None, None, ())
    if name in ("isend", "irecv"):
        return _C10dOperator(name.removeprefix("i"), 0 if name == "isend" else None, None, ())
    plain = name.removesuffix("_out").rstrip("_")
    return _C10dOperator(plain, 0, None, (), "inputs" if plain == "broadcast" else "")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    if len(value) == 1 and isinstance(value[0], Tensor):  # as most calls have it
        return [value[0]]
    return [tensor for one in value for tensor in _tensors(one)]


# --- Process groups: their ranks and labels.


class TorchProcessGroups:
    """The process groups of recorded calls."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._known: dict[weakref.ref[dist.ProcessGroup], NamedGroup] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Name groups of ranks by role. If several roles have the same ranks, the first one counts."""
        self._labels.learn(roles)
        self._known.clear()

    def of(self, given: Any) -> NamedGroup | None:
        """The label and ranks of a process group; None if torch does not know it.

        Args:
            given: The group, its name, or the dispatcher's boxed object.
        """
        if not isinstance(given, dist.ProcessGroup):
            try:
                given = _resolve(given) if isinstance(given, str) else dist.ProcessGroup.unbox(given)
            except (RuntimeError, TypeError):
                return None
        group = self._known.get(weakref.ref(given))
        if group is None and (group := self._described(given)) is not None:
            self._known[weakref.ref(given, self._forget)] = group
        return group

    def _forget(self, gone: weakref.ref[dist.ProcessGroup]) -> None:
        self._known.pop(gone, None)

    def _described(self, given: dist.ProcessGroup) -> NamedGroup | None:
        try:
            ranks = dist.get_process_group_ranks(given)
        except KeyError:  # made without torch's registry: its ranks are unknown
            return None
        return NamedGroup(self._labels.of(ranks, dist.get_world_size()), given.rank())


_resolve: Final[Any] = torch._C._distributed_c10d._resolve_process_group
