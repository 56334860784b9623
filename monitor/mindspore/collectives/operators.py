"""The communication operators of MindSpore: what people call them, and which arguments hold what.

There are two families. What ``mint.distributed``, ``ops.communication`` and ``communication.comm_func`` call ends in
*kernels*, functions of one module, in C++ (``pyboost_dist_comm_all_reduce``). ``ops.AllReduce`` and its like are *primitives*,
which one function runs, by their names.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from mindspore import Tensor, communication
from mindspore.ops.auto_generate import gen_ops_prim as KERNELS

Rooted = Literal["inputs", "outputs", ""]

SENT: Final = 0
RECEIVED: Final = 1
"""What ``batch_isend_irecv`` makes of ``isend`` and ``irecv``."""


@dataclass(frozen=True, slots=True)
class _Known:
    """An operator as its arguments are named: what goes in, what is filled, and the root's rank.

    Attributes:
        outputs: Empty where they are the result.
        root: Empty where there is none.
        rooted: What only the root has.
    """

    name: str
    inputs: str = ""
    outputs: str = ""
    rooted: Rooted = ""
    root: str = ""


_KERNELS: Final[Mapping[str, _Known]] = {
    "dist_comm_all_reduce": _Known("all_reduce", "input", "input"),
    "dist_comm_broadcast": _Known("broadcast", "input", "input", "inputs", "src"),
    "dist_comm_reduce": _Known("reduce", "input", "input", "outputs", "dst"),
    "dist_comm_all_gather": _Known("all_gather", "input", "tensor_list"),
    "dist_comm_all_gather_into_tensor": _Known("all_gather_into_tensor", "input", "other"),
    "dist_comm_all_gather_into_tensor_uneven": _Known("all_gather_into_tensor_uneven", "input", "other"),
    "dist_comm_reduce_scatter": _Known("reduce_scatter", "input_list", "other"),
    "dist_comm_reduce_scatter_tensor": _Known("reduce_scatter_tensor", "input", "other"),
    "dist_comm_reduce_scatter_tensor_uneven": _Known("reduce_scatter_tensor_uneven", "input", "other"),
    "dist_comm_all_to_all_v": _Known("all_to_all", "input", "other"),
    "dist_comm_all_to_all_v_single": _Known("all_to_all_single", "input", "other"),
    "dist_comm_all_to_all_v_c": _Known("all_to_all_v_c", "input", "other"),
    "dist_comm_gather": _Known("gather", "input", "gather_list", "outputs", "dst"),
    "dist_comm_gather_into_tensor": _Known("gather_into_tensor", "input", "other", "outputs", "dst"),
    "dist_comm_scatter": _Known("scatter", "scatter_list", "other", "inputs", "src"),
    "dist_comm_scatter_tensor": _Known("scatter_tensor", "input", "other", "inputs", "src"),
    "dist_comm_isend": _Known("send", "input"),
    "dist_comm_irecv": _Known("recv", "", "input"),
    "dist_comm_batch_isend_irecv": _Known("batch_isend_irecv", "op_types", "op_types"),
    "dist_comm_barrier": _Known("barrier"),
    "inner_comm_all_reduce": _Known("all_reduce", "input"),
    "inner_comm_all_gather": _Known("all_gather_into_tensor", "input"),
    "inner_comm_reduce_scatter": _Known("reduce_scatter_tensor", "input"),
    "inner_comm_all_to_all_v": _Known("all_to_all", "input"),
    "inner_comm_isend": _Known("send", "input"),
    "inner_comm_irecv": _Known("recv"),
}

_NO_INPUTS: Final = frozenset({"recv", "barrier"})
_NO_OUTPUTS: Final = frozenset({"send", "barrier"})

_PRIMITIVES: Final[Mapping[str, _Known]] = {
    "AllReduce": _Known("all_reduce"),
    "Reduce": _Known("reduce", rooted="outputs", root="dest_rank"),
    "Broadcast": _Known("broadcast", rooted="inputs", root="root_rank"),
    "AllGather": _Known("all_gather"),
    "AllGatherV": _Known("all_gather_v"),
    "ReduceScatter": _Known("reduce_scatter"),
    "ReduceScatterV": _Known("reduce_scatter_v"),
    "AlltoAll": _Known("all_to_all"),
    "AlltoAllV": _Known("all_to_all_v"),
    "AlltoAllVC": _Known("all_to_all_v_c"),
    "CollectiveScatter": _Known("scatter", rooted="inputs", root="src_rank"),
    "CollectiveGather": _Known("gather", rooted="outputs", root="dest_rank"),
    "Send": _Known("send"),
    "Receive": _Known("recv"),
    "BatchISendIRecv": _Known("batch_isend_irecv"),
    "Barrier": _Known("barrier"),
}


@dataclass(frozen=True, slots=True)
class Operator(ABC):
    """A way to call an operator.

    Attributes:
        name: What people call it.
        rooted: What only the root has.
    """

    name: str
    rooted: Rooted

    functional: bool
    """Whether its outputs are its result, and not among its arguments."""

    @abstractmethod
    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        """The tensors that go in; those of a list together are one input."""

    @abstractmethod
    def given(self, args: Sequence[Any], result: Any) -> list[Tensor]:
        """The tensors that come out once it has completed."""

    @abstractmethod
    def root(self, args: Sequence[Any]) -> int:
        """The root's rank in the group, of an operator that is ``rooted``."""

    @abstractmethod
    def group_of(self, args: Sequence[Any]) -> Any:
        """The name of the group."""


@dataclass(frozen=True, slots=True)
class Kernel(Operator):
    """An operator in C++.

    Attributes:
        function: Its name in ``gen_ops_prim``.
        places: Of its arguments, by name.
        inputs, outputs: Positions of the arguments that hold them; None where there are none, or where they are the result.
        rooted_at: Position of the root's rank.
    """

    function: str
    places: Mapping[str, int]
    inputs: int | None
    outputs: int | None
    rooted_at: int | None

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return _tensors(args[self.inputs]) if self.inputs is not None else []

    def given(self, args: Sequence[Any], result: Any) -> list[Tensor]:
        if self.outputs is not None:
            return _tensors(args[self.outputs])
        return _tensors(result[0] if isinstance(result, tuple) else result) if self.functional else []

    def root(self, args: Sequence[Any]) -> int:
        return int(args[self.rooted_at])  # type: ignore[index]

    def group_of(self, args: Sequence[Any]) -> Any:
        return args[self.places["group"]]

    def is_awaited(self, args: Sequence[Any]) -> bool:
        """Whether the outputs are only there when somebody has waited for the handle."""
        place = self.places.get("async_op")
        return place is None or bool(args[place])


class ReducedToOneRank(Kernel):
    """``reduce`` hands the root's rank in the job on, which every other rooted function turns into that in the group."""

    def root(self, args: Sequence[Any]) -> int:
        return int(communication.get_group_rank_from_world_rank(args[self.places["dst"]], self.group_of(args)))


class BatchedSendsAndReceives(Kernel):
    """The tensors that are sent go in, those that are received come out."""

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return self._of(SENT, args)

    def given(self, args: Sequence[Any], _result: Any) -> list[Tensor]:
        return self._of(RECEIVED, args)

    def _of(self, kind: int, args: Sequence[Any]) -> list[Tensor]:
        tensors, kinds = args[self.places["input"]], args[self.places["op_types"]]
        return [tensor for tensor, what in zip(tensors, kinds, strict=True) if what == kind]


@dataclass(frozen=True, slots=True)
class Primitive(Operator):
    """An operator that is an object; the object is the first of the arguments, which hold what goes in.

    Attributes:
        primitive: Its name.
        root_attribute: Where it keeps the root's rank.
    """

    primitive: str
    root_attribute: str

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return [] if self.name in _NO_INPUTS else _tensors(args[1:])

    def given(self, _args: Sequence[Any], result: Any) -> list[Tensor]:
        return [] if self.name in _NO_OUTPUTS else _tensors(result)

    def root(self, args: Sequence[Any]) -> int:
        return int(getattr(args[0], self.root_attribute))

    def group_of(self, args: Sequence[Any]) -> Any:
        return args[0].group


@cache
def kernels() -> tuple[Kernel, ...]:
    """Those that this version of MindSpore has, and whose arguments are named as expected."""
    described = (_described(name, known) for name, known in _KERNELS.items() if hasattr(KERNELS, f"pyboost_{name}"))
    return tuple(one for one in described if one is not None)


@cache
def primitives() -> Mapping[str, Primitive]:
    """By name."""
    return {
        name: Primitive(known.name, known.rooted, True, name, known.root)  # its result is new
        for name, known in _PRIMITIVES.items()
    }


_MADE: Final[Mapping[str, type[Kernel]]] = {"reduce": ReducedToOneRank, "batch_isend_irecv": BatchedSendsAndReceives}


def _described(name: str, known: _Known) -> Kernel | None:
    caller = getattr(KERNELS, f"{name}_op", None)  # which hands its arguments on as they are
    if caller is None:
        return None
    names = list(inspect.signature(type(caller).__call__).parameters)[1:]
    places = {argument: place for place, argument in enumerate(names)}
    if not {"group", known.inputs, known.outputs, known.root} - {""} <= places.keys():
        return None
    made = _MADE.get(known.name, Kernel)
    functional = not known.outputs and known.name not in _NO_OUTPUTS
    found = (places.get(argument) for argument in (known.inputs, known.outputs, known.root))
    return made(known.name, known.rooted, functional, f"pyboost_{name}", places, *found)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in _tensors(one)]
