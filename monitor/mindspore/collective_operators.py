"""The communication operators of MindSpore: what people call them, and which arguments hold what.

There are two families. What ``mint.distributed``, ``ops.communication`` and ``communication.comm_func`` call ends in
*kernels*, functions of one module, in C++ (``pyboost_dist_comm_all_reduce``). ``ops.AllReduce`` and its like are *primitives*,
which one function runs, by their names.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Final, Literal

from mindspore import Tensor, communication
from mindspore.ops import primitive as PRIMITIVES
from mindspore.ops.auto_generate import gen_ops_prim as KERNELS

from monitor.mindspore.hooks import jit_context

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


# --- When the outputs of a call are there: read then, and never by waiting for them.
#
# A call that somebody waits for returns a handle of the runtime's, which MindSpore puts inside the ``CommHandle`` that
# its users get. There stands one of ours around it: the ``CommHandle`` is MindSpore's own, and waits as it would.


class Handle:
    """A handle of the runtime's, which tells when somebody has waited for it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._told: list[Callable[[], object]] = []

    @property
    def has_listeners(self) -> bool:
        return bool(self._told)

    def tell(self, told: Callable[[], object]) -> None:
        """Have ``told`` called once, on the thread that has waited, before it goes on. What that raises, the wait raises."""
        self._told.append(told)

    def wait(self) -> None:
        self._handle.wait()
        told, self._told = self._told, []
        for one in told:
            one()

    def __repr__(self) -> str:
        return repr(self._handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


# --- Sees every communication operator that Python issues, each once, where all ways of calling it meet.
#
# The functions of ``mint.distributed``, ``ops.communication`` and ``communication.comm_func`` end in functions in C++,
# which are looked up in the module ``gen_ops_prim``, whoever has imported what and when; primitives (``ops.AllReduce``)
# end in the function ``_run_op``. These are replaced in their modules while somebody listens. A compiler meets neither:
# it knows operators by their names, and does not look into how Python runs them.

Function = Callable[..., Any]

RUN: Final = "_run_op"


class CollectiveListener:
    """Whoever wants to know of communication. Raises what is training's to know, and nothing else."""

    def call_begins(self, _operator: Operator, _args: Sequence[Any]) -> bool:
        """An operator is about to be called.

        Returns:
            Whether to tell of its result.
        """
        return False

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        """It has returned. Its outputs are there, or will be when somebody has waited for ``handle``."""


class _Inside(threading.local):
    """Whether this thread is in an operator: one that somebody else has patched meanwhile may pass here twice."""

    another = False


class Interception:
    """What stands in the way of calls, and who is told by it."""

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[CollectiveListener], ...] = ()
        self._inside = _Inside()
        self._replaced: dict[tuple[ModuleType, str], tuple[Function, Function]] = {}

    @property
    def installed(self) -> bool:
        return bool(self._replaced)

    def add(self, listener: CollectiveListener) -> None:
        """Tell ``listener`` of every call from now on, as long as it lives."""
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        if not self._replaced:
            self._install()

    def remove(self, listener: CollectiveListener) -> None:
        """Tell it nothing more. Any number of times."""
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[CollectiveListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        if self._listeners:
            return
        for (module, name), (original, ours) in self._replaced.items():
            if vars(module)[name] is ours:  # somebody may have patched it since
                setattr(module, name, original)
        self._replaced.clear()

    def _install(self) -> None:
        for kernel in kernels():
            self._replace(KERNELS, kernel.function, self._kernel(kernel, vars(KERNELS)[kernel.function]))
        self._replace(PRIMITIVES, RUN, self._runner(vars(PRIMITIVES)[RUN]))

    def _replace(self, module: ModuleType, name: str, ours: Function) -> None:
        self._replaced[module, name] = vars(module)[name], ours
        setattr(module, name, ours)

    def _kernel(self, kernel: Kernel, original: Function) -> Function:
        def observed(primitive: Any, args: Sequence[Any]) -> Any:
            return self._observed(kernel, args, original, primitive, args)

        observed.__name__ = observed.__qualname__ = kernel.function
        return observed

    def _runner(self, original: Function) -> Function:
        known = primitives()

        def run_op(primitive: Any, name: str, args: Sequence[Any]) -> Any:
            operator = known.get(name)
            if operator is None:  # nearly always
                return original(primitive, name, args)
            return self._observed(operator, (primitive, *args), original, primitive, name, args)

        run_op.__name__ = run_op.__qualname__ = RUN
        return run_op

    def _observed(self, operator: Operator, seen: Sequence[Any], original: Function, *args: Any) -> Any:
        inside = self._inside
        if inside.another or jit_context() is not None:  # which traces, and takes the result for its own
            return original(*args)
        told = [one for known in self._listeners if (one := known()) is not None and one.call_begins(operator, seen)]
        inside.another = True
        try:
            result = original(*args)
        finally:
            inside.another = False
        return _tell(told, operator, seen, result) if told else result


def _tell(told: Sequence[CollectiveListener], operator: Operator, args: Sequence[Any], result: Any) -> Any:
    """Returns what the caller is given: the result, its handle replaced by one that tells when somebody has waited for it."""
    handle = None
    if isinstance(operator, Kernel) and isinstance(result, tuple) and operator.is_awaited(args):
        handle = Handle(result[1])
    for listener in told:
        listener.call_issued(operator, args, result, handle)
    return result if handle is None or not handle.has_listeners else (result[0], handle)


INTERCEPTION: Final = Interception()
"""Of this process, whose modules are there once."""
